package v1beta1

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// Community defines names for BGP communities, for use in BGPAdvertisements.
//
// +kubebuilder:object:root=true
// +kubebuilder:metadata:annotations="helm.sh/resource-policy=keep"
// +kubebuilder:resource:scope=Cluster,categories=landfall
// +kubebuilder:printcolumn:name="Names",type=string,JSONPath=`.spec.communities[*].name`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type Community struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// +optional
	Spec CommunitySpec `json:"spec,omitzero"`
}

// CommunitySpec is a list of named communities. If several objects define one name differently, the
// advertisements that use the name are refused.
type CommunitySpec struct {
	// communities maps names to communities.
	// +optional
	// +kubebuilder:validation:MaxItems=256
	// +listType=map
	// +listMapKey=name
	Communities []CommunityAlias `json:"communities,omitempty"`
}

// CommunityAlias maps one name to a community.
type CommunityAlias struct {
	// name is the name that BGPAdvertisements use. It has no colon.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:XValidation:rule="!self.contains(':')",message="a name must not contain a colon, because names with a colon are read as communities"
	Name string `json:"name"`

	// value is a community such as 64512:100 or a large community such as large:64512:1:2.
	// +required
	// +kubebuilder:validation:MaxLength=40
	// +kubebuilder:validation:XValidation:rule="self.matches('^[0-9]{1,5}:[0-9]{1,5}$') || self.matches('^large:[0-9]{1,10}:[0-9]{1,10}:[0-9]{1,10}$')",message="must be a community such as 64512:100 or a large community such as large:64512:1:2"
	// +kubebuilder:validation:XValidation:rule="!self.matches('^[0-9]{1,5}:[0-9]{1,5}$') || self.split(':').all(n, int(n) <= 65535)",message="each part of a community is at most 65535; write larger ones as large:a:b:c"
	// +kubebuilder:validation:XValidation:rule="!self.matches('^large:[0-9]{1,10}:[0-9]{1,10}:[0-9]{1,10}$') || self.split(':').all(n, n == 'large' || int(n) <= 4294967295)",message="each part of a large community is at most 4294967295"
	Value string `json:"value"`
}

// CommunityList is a list of Communities.
//
// +kubebuilder:object:root=true
type CommunityList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`

	Items []Community `json:"items"`
}
