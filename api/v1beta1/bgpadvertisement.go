package v1beta1

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// BGPAdvertisement announces the addresses of pools to BGP peers: from each node that can deliver
// an address.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:metadata:annotations="helm.sh/resource-policy=keep"
// +kubebuilder:resource:scope=Cluster,shortName=bgpadv,categories=landfall
// +kubebuilder:printcolumn:name="Ready",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].status`
// +kubebuilder:printcolumn:name="Reason",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].reason`
// +kubebuilder:printcolumn:name="Pools",type=string,JSONPath=`.spec.ipAddressPools`
// +kubebuilder:printcolumn:name="Peers",type=string,JSONPath=`.spec.peers`
// +kubebuilder:printcolumn:name="Communities",type=string,priority=1,JSONPath=`.spec.communities`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type BGPAdvertisement struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// +optional
	Spec BGPAdvertisementSpec `json:"spec,omitzero"`
	// +optional
	Status BGPAdvertisementStatus `json:"status,omitzero"`
}

// BGPAdvertisementSpec says which addresses are announced, by which nodes, to which peers and with
// which attributes. Empty selectors do not restrict. Where several advertisements announce the same
// prefix to a peer, its communities are theirs together; of a localPref, med or asPathPrepend on
// which they differ the older advertisement's holds, and the younger one is marked.
//
// +kubebuilder:validation:XValidation:rule="!has(self.serviceSelectors) || self.serviceSelectors.size() == 0 || ((!has(self.aggregationLength) || self.aggregationLength == 32) && (!has(self.aggregationLengthV6) || self.aggregationLengthV6 == 128))",message="serviceSelectors cannot be combined with aggregation: an aggregate also attracts the traffic of Services that are not selected"
type BGPAdvertisementSpec struct {
	// ipAddressPools names the pools whose addresses are announced. Together with
	// ipAddressPoolSelectors; both empty stand for all pools.
	// +optional
	// +kubebuilder:validation:MaxItems=256
	// +listType=set
	IPAddressPools []string `json:"ipAddressPools,omitempty"`

	// ipAddressPoolSelectors choose pools by their labels; one match is enough.
	// +optional
	// +kubebuilder:validation:MaxItems=64
	// +listType=atomic
	IPAddressPoolSelectors []metav1.LabelSelector `json:"ipAddressPoolSelectors,omitempty"`

	// serviceSelectors choose Services by their labels; one match is enough, none stands for all
	// Services.
	// +optional
	// +kubebuilder:validation:MaxItems=64
	// +listType=atomic
	ServiceSelectors []metav1.LabelSelector `json:"serviceSelectors,omitempty"`

	// nodeSelectors choose the nodes that announce by their labels; one match is enough, none stands
	// for all nodes.
	// +optional
	// +kubebuilder:validation:MaxItems=64
	// +listType=atomic
	NodeSelectors []metav1.LabelSelector `json:"nodeSelectors,omitempty"`

	// peers names the BGPPeers that hear the advertisement; none stands for all.
	// +optional
	// +kubebuilder:validation:MaxItems=256
	// +listType=set
	Peers []string `json:"peers,omitempty"`

	// aggregationLength is the length of the IPv4 prefix that is announced for an address, while the
	// node can deliver at least one address inside. The prefix must lie within one range of the pool.
	// Default 32, the address alone.
	// +optional
	// +kubebuilder:default=32
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=32
	AggregationLength *int32 `json:"aggregationLength,omitempty"`

	// aggregationLengthV6 is the same for IPv6. Default 128.
	// +optional
	// +kubebuilder:default=128
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=128
	AggregationLengthV6 *int32 `json:"aggregationLengthV6,omitempty"`

	// localPref is LOCAL_PREF towards internal peers, the higher the better. Default 100. External
	// peers never see it.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=4294967295
	LocalPref *int64 `json:"localPref,omitempty"`

	// med is MULTI_EXIT_DISC, the lower the better. Not sent unless set.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=4294967295
	MED *int64 `json:"med,omitempty"`

	// asPathPrepend is how many more times the nodes' AS number stands in the path that external peers
	// see.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=32
	ASPathPrepend int32 `json:"asPathPrepend,omitempty"`

	// communities are attached to the routes: 64512:100, large:64512:1:2, a well-known name such as
	// no-export, or a name that an object Community defines.
	// +optional
	// +kubebuilder:validation:MaxItems=63
	// +listType=set
	Communities []CommunityReference `json:"communities,omitempty"`
}

// CommunityReference is a community, a large community or the name of either.
//
// +kubebuilder:validation:MinLength=1
// +kubebuilder:validation:MaxLength=253
// +kubebuilder:validation:XValidation:rule="!self.contains(':') || self.matches('^[0-9]{1,5}:[0-9]{1,5}$') || self.matches('^large:[0-9]{1,10}:[0-9]{1,10}:[0-9]{1,10}$')",message="must be a community such as 64512:100, a large community such as large:64512:1:2, or a name"
// +kubebuilder:validation:XValidation:rule="!self.matches('^[0-9]{1,5}:[0-9]{1,5}$') || self.split(':').all(n, int(n) <= 65535)",message="each part of a community is at most 65535; write larger ones as large:a:b:c"
// +kubebuilder:validation:XValidation:rule="!self.matches('^large:[0-9]{1,10}:[0-9]{1,10}:[0-9]{1,10}$') || self.split(':').all(n, n == 'large' || int(n) <= 4294967295)",message="each part of a large community is at most 4294967295"
type CommunityReference string

// BGPAdvertisementStatus says whether the advertisement can be used as written.
type BGPAdvertisementStatus struct {
	// conditions: Ready says whether everything that the advertisement asks for can be done, and if
	// not, what to change.
	// +optional
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// BGPAdvertisementList is a list of advertisements.
//
// +kubebuilder:object:root=true
type BGPAdvertisementList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`

	Items []BGPAdvertisement `json:"items"`
}
