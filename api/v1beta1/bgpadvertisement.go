package v1beta1

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// BGPAdvertisement makes nodes announce the addresses of pools to BGP peers. Every node that
// delivers an address announces it.
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

// BGPAdvertisementSpec selects addresses, nodes and peers, and sets route attributes. An empty
// selector does not restrict. If several advertisements announce one prefix to a peer, the route
// carries the communities of all. If they differ in localPref, med or asPathPrepend, the oldest
// decides, and the younger one reports AttributeConflict.
//
// +kubebuilder:validation:XValidation:rule="!has(self.serviceSelectors) || self.serviceSelectors.size() == 0 || ((!has(self.aggregationLength) || self.aggregationLength == 32) && (!has(self.aggregationLengthV6) || self.aggregationLengthV6 == 128))",message="serviceSelectors cannot be combined with aggregation: an aggregate also attracts the traffic of Services that are not selected"
type BGPAdvertisementSpec struct {
	// ipAddressPools selects pools by name, in addition to ipAddressPoolSelectors. If both are
	// empty, every pool is selected.
	// +optional
	// +kubebuilder:validation:MaxItems=256
	// +listType=set
	IPAddressPools []string `json:"ipAddressPools,omitempty"`

	// ipAddressPoolSelectors selects pools by label; a pool needs to match only one selector.
	// +optional
	// +kubebuilder:validation:MaxItems=64
	// +listType=atomic
	IPAddressPoolSelectors []metav1.LabelSelector `json:"ipAddressPoolSelectors,omitempty"`

	// serviceSelectors selects Services by label; a Service needs to match only one selector. If
	// empty, every Service is selected.
	// +optional
	// +kubebuilder:validation:MaxItems=64
	// +listType=atomic
	ServiceSelectors []metav1.LabelSelector `json:"serviceSelectors,omitempty"`

	// nodeSelectors selects the nodes that announce, by label; a node needs to match only one
	// selector. If empty, every node announces.
	// +optional
	// +kubebuilder:validation:MaxItems=64
	// +listType=atomic
	NodeSelectors []metav1.LabelSelector `json:"nodeSelectors,omitempty"`

	// peers names the BGPPeers that receive the routes. If empty, every BGPPeer receives them.
	// +optional
	// +kubebuilder:validation:MaxItems=256
	// +listType=set
	Peers []string `json:"peers,omitempty"`

	// aggregationLength is the length of the IPv4 prefix to announce. A node announces the prefix
	// while it delivers at least one address inside. The prefix must lie within one range of the
	// pool. Default 32: each address by itself.
	// +optional
	// +kubebuilder:default=32
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=32
	AggregationLength *int32 `json:"aggregationLength,omitempty"`

	// aggregationLengthV6 is the length of the IPv6 prefix to announce; see aggregationLength.
	// Default 128.
	// +optional
	// +kubebuilder:default=128
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=128
	AggregationLengthV6 *int32 `json:"aggregationLengthV6,omitempty"`

	// localPref is the LOCAL_PREF attribute for internal peers, which prefer higher values. Default
	// 100. External peers never receive it.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=4294967295
	LocalPref *int64 `json:"localPref,omitempty"`

	// med is the MULTI_EXIT_DISC attribute; peers prefer lower values. Not sent unless set.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=4294967295
	MED *int64 `json:"med,omitempty"`

	// asPathPrepend is how many extra times the AS path for external peers contains the AS number
	// of the nodes, 0 to 32. Peers prefer shorter paths.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=32
	ASPathPrepend int32 `json:"asPathPrepend,omitempty"`

	// communities are attached to the routes: a community (64512:100), a large community
	// (large:64512:1:2), a well-known name such as no-export, or a name that a Community object
	// defines.
	// +optional
	// +kubebuilder:validation:MaxItems=63
	// +listType=set
	Communities []CommunityReference `json:"communities,omitempty"`
}

// CommunityReference is a community, a large community or the name of one.
//
// +kubebuilder:validation:MinLength=1
// +kubebuilder:validation:MaxLength=253
// +kubebuilder:validation:XValidation:rule="!self.contains(':') || self.matches('^[0-9]{1,5}:[0-9]{1,5}$') || self.matches('^large:[0-9]{1,10}:[0-9]{1,10}:[0-9]{1,10}$')",message="must be a community such as 64512:100, a large community such as large:64512:1:2, or a name"
// +kubebuilder:validation:XValidation:rule="!self.matches('^[0-9]{1,5}:[0-9]{1,5}$') || self.split(':').all(n, int(n) <= 65535)",message="each part of a community is at most 65535; write larger ones as large:a:b:c"
// +kubebuilder:validation:XValidation:rule="!self.matches('^large:[0-9]{1,10}:[0-9]{1,10}:[0-9]{1,10}$') || self.split(':').all(n, n == 'large' || int(n) <= 4294967295)",message="each part of a large community is at most 4294967295"
type CommunityReference string

// BGPAdvertisementStatus reports whether the speakers can follow the advertisement as written.
type BGPAdvertisementStatus struct {
	// conditions has one type, Ready: True if the speakers can do all that the advertisement asks
	// for, else False with what to change.
	// +optional
	// +kubebuilder:validation:MaxItems=8
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// BGPAdvertisementList is a list of BGPAdvertisements.
//
// +kubebuilder:object:root=true
type BGPAdvertisementList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`

	Items []BGPAdvertisement `json:"items"`
}
