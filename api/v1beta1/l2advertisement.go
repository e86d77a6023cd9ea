package v1beta1

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// L2Advertisement announces the addresses of pools over ARP (IPv4) and NDP (IPv6): one node at a
// time answers for an address.
//
// +kubebuilder:object:root=true
// +kubebuilder:metadata:annotations="helm.sh/resource-policy=keep"
// +kubebuilder:resource:scope=Cluster,shortName=l2adv,categories=landfall
// +kubebuilder:printcolumn:name="Pools",type=string,JSONPath=`.spec.ipAddressPools`
// +kubebuilder:printcolumn:name="Interfaces",type=string,JSONPath=`.spec.interfaces`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type L2Advertisement struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// +optional
	Spec L2AdvertisementSpec `json:"spec,omitzero"`
}

// L2AdvertisementSpec says which addresses are announced, by which nodes, on which interfaces.
// Empty fields do not restrict.
type L2AdvertisementSpec struct {
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

	// serviceSelectors choose the Services whose addresses are announced by their labels; one match is
	// enough, none stands for all Services.
	// +optional
	// +kubebuilder:validation:MaxItems=64
	// +listType=atomic
	ServiceSelectors []metav1.LabelSelector `json:"serviceSelectors,omitempty"`

	// nodeSelectors choose the nodes that may announce by their labels; one match is enough, none
	// stands for all nodes.
	// +optional
	// +kubebuilder:validation:MaxItems=64
	// +listType=atomic
	NodeSelectors []metav1.LabelSelector `json:"nodeSelectors,omitempty"`

	// preferredNodes choose nodes that shall rather answer than others. The weights of all entries
	// that select a node add up. Among the nodes that can deliver an address, the heaviest answers,
	// and takes over from a lighter one. Without entries, an address stays where it is as long as it
	// is served well there.
	// +optional
	// +kubebuilder:validation:MaxItems=64
	// +listType=atomic
	PreferredNodes []PreferredNode `json:"preferredNodes,omitempty"`

	// interfaces are the names of the network interfaces that answer; none stands for each interface
	// with a subnet that contains the address.
	// +optional
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MinLength=1
	// +kubebuilder:validation:items:MaxLength=15
	// +listType=set
	Interfaces []string `json:"interfaces,omitempty"`
}

// PreferredNode adds a weight to nodes.
type PreferredNode struct {
	// weight is added to the weight of the nodes that nodeSelector selects.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=100
	Weight int32 `json:"weight"`

	// nodeSelector chooses nodes by their labels; the empty selector selects all.
	NodeSelector metav1.LabelSelector `json:"nodeSelector"`
}

// L2AdvertisementList is a list of advertisements.
//
// +kubebuilder:object:root=true
type L2AdvertisementList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`

	Items []L2Advertisement `json:"items"`
}
