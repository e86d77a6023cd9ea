package v1beta1

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// L2Advertisement makes nodes announce the addresses of pools over ARP (IPv4) and NDP (IPv6). One
// node at a time, the owner, answers for an address.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:metadata:annotations="helm.sh/resource-policy=keep"
// +kubebuilder:resource:scope=Cluster,shortName=l2adv,categories=landfall
// +kubebuilder:printcolumn:name="Ready",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].status`
// +kubebuilder:printcolumn:name="Reason",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].reason`
// +kubebuilder:printcolumn:name="Pools",type=string,JSONPath=`.spec.ipAddressPools`
// +kubebuilder:printcolumn:name="Interfaces",type=string,JSONPath=`.spec.interfaces`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type L2Advertisement struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// +optional
	Spec L2AdvertisementSpec `json:"spec,omitzero"`
	// +optional
	Status L2AdvertisementStatus `json:"status,omitzero"`
}

// L2AdvertisementSpec selects the addresses to announce, the nodes that may announce them and their
// network interfaces. An empty field does not restrict.
type L2AdvertisementSpec struct {
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

	// nodeSelectors selects the nodes that may announce, by label; a node needs to match only one
	// selector. If empty, every node may announce.
	// +optional
	// +kubebuilder:validation:MaxItems=64
	// +listType=atomic
	NodeSelectors []metav1.LabelSelector `json:"nodeSelectors,omitempty"`

	// preferredNodes gives weights to nodes; the weights of all entries that select a node add up.
	// Among the nodes that deliver an address, the heaviest becomes its owner, and takes the
	// address over from a lighter node. Without entries, an address stays with its owner as long as
	// that node delivers it.
	// +optional
	// +kubebuilder:validation:MaxItems=64
	// +listType=atomic
	PreferredNodes []PreferredNode `json:"preferredNodes,omitempty"`

	// interfaces names the network interfaces that answer. If empty, each interface that is up and
	// has a subnet with the address answers, except those of --exclude-interfaces.
	// +optional
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MinLength=1
	// +kubebuilder:validation:items:MaxLength=15
	// +listType=set
	Interfaces []string `json:"interfaces,omitempty"`
}

// L2AdvertisementStatus reports whether the speakers can follow the advertisement as written.
type L2AdvertisementStatus struct {
	// conditions has one type, Ready: True if the advertisement selects a pool and a node, else False
	// with what to change.
	// +optional
	// +kubebuilder:validation:MaxItems=8
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// PreferredNode adds a weight to the nodes that it selects.
type PreferredNode struct {
	// weight is added to the weight of each node that nodeSelector selects.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=100
	Weight int32 `json:"weight"`

	// nodeSelector selects nodes by label; an empty selector selects every node.
	NodeSelector metav1.LabelSelector `json:"nodeSelector"`
}

// L2AdvertisementList is a list of L2Advertisements.
//
// +kubebuilder:object:root=true
type L2AdvertisementList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`

	Items []L2Advertisement `json:"items"`
}
