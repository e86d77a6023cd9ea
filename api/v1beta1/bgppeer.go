package v1beta1

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// BGPPeer is a router that nodes keep a BGP session with.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:metadata:annotations="helm.sh/resource-policy=keep"
// +kubebuilder:resource:scope=Cluster,shortName=bgpp,categories=landfall
// +kubebuilder:printcolumn:name="Address",type=string,JSONPath=`.spec.peerAddress`
// +kubebuilder:printcolumn:name="Interface",type=string,priority=1,JSONPath=`.spec.interface`
// +kubebuilder:printcolumn:name="PeerASN",type=integer,JSONPath=`.spec.peerASN`
// +kubebuilder:printcolumn:name="MyASN",type=integer,JSONPath=`.spec.myASN`
// +kubebuilder:printcolumn:name="BFDProfile",type=string,JSONPath=`.spec.bfdProfile`
// +kubebuilder:printcolumn:name="Sessions",type=string,JSONPath=`.status.nodes[*].state`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type BGPPeer struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// +required
	Spec BGPPeerSpec `json:"spec"`
	// +optional
	Status BGPPeerStatus `json:"status,omitzero"`
}

// BGPPeerSpec says how to reach the router, from which nodes, and with which options. A node opens
// the TCP connection itself. It listens only where the speaker's flag --bgp-listen says so, as
// another BGP speaker may live on the node.
//
// +kubebuilder:validation:XValidation:rule="has(self.peerASN) != has(self.dynamicASN)",message="set exactly one of peerASN and dynamicASN"
// +kubebuilder:validation:XValidation:rule="has(self.peerAddress) != has(self.interface)",message="set exactly one of peerAddress and interface"
// +kubebuilder:validation:XValidation:rule="!has(self.interface) || !has(self.sourceAddress)",message="sourceAddress cannot be set with interface: an unnumbered session is between link-local addresses"
// +kubebuilder:validation:XValidation:rule="!has(self.interface) || !has(self.ebgpMultiHop) || !self.ebgpMultiHop",message="ebgpMultiHop cannot be set with interface: an unnumbered session is between neighbors on one link"
// +kubebuilder:validation:XValidation:rule="!has(self.peerAddress) || !has(self.sourceAddress) || !isIP(self.peerAddress) || !isIP(self.sourceAddress) || ip(self.peerAddress).family() == ip(self.sourceAddress).family()",message="sourceAddress must be of the same address family as peerAddress"
// +kubebuilder:validation:XValidation:rule="!has(self.ebgpMultiHop) || !self.ebgpMultiHop || ((!has(self.peerASN) || self.peerASN != (has(self.localASN) ? self.localASN : self.myASN)) && (!has(self.dynamicASN) || self.dynamicASN != 'internal'))",message="ebgpMultiHop is for external peers; leave it out for an internal one, which may be any number of hops away"
// +kubebuilder:validation:XValidation:rule="!has(self.password) || !has(self.passwordSecret)",message="set only one of password and passwordSecret"
// +kubebuilder:validation:XValidation:rule="!has(self.holdTime) || !has(self.keepaliveTime) || duration(self.holdTime).getSeconds() == 0 || duration(self.keepaliveTime) < duration(self.holdTime)",message="keepaliveTime must be less than holdTime; a third of it is usual"
// +kubebuilder:validation:XValidation:rule="!has(self.holdTime) || !has(self.keepaliveTime) || duration(self.holdTime).getSeconds() != 0",message="keepaliveTime has no meaning with a holdTime of 0s, which switches keepalives off; leave it out"
// +kubebuilder:validation:XValidation:rule="!has(self.vrf) || size(self.vrf) == 0",message="sessions inside a VRF are not supported; leave vrf out and reach the peer over the node's main routing table"
type BGPPeerSpec struct {
	// myASN is the AS number of the cluster's nodes, of 4 bytes.
	//
	// +required
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=4294967295
	MyASN int64 `json:"myASN"`

	// localASN stands in for myASN towards this peer, in the session and in the paths of routes (as
	// "local-as … no-prepend replace-as" of other implementations).
	//
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=4294967295
	LocalASN *int64 `json:"localASN,omitempty"`

	// peerASN is the AS number that the peer must have.
	//
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=4294967295
	PeerASN *int64 `json:"peerASN,omitempty"`

	// dynamicASN takes the AS number that the peer states: internal if it must be the node's own,
	// external if it must be another one.
	//
	// +optional
	// +kubebuilder:validation:Enum=internal;external
	DynamicASN string `json:"dynamicASN,omitempty"`

	// peerAddress is the address of the peer.
	//
	// +optional
	// +kubebuilder:validation:MaxLength=45
	// +kubebuilder:validation:XValidation:rule="isIP(self)",message="must be an IP address such as 192.0.2.1 or 2001:db8::1"
	// +kubebuilder:validation:XValidation:rule="!isIP(self) || !ip(self).isLinkLocalUnicast()",message="a link-local address says nothing without its link; set interface instead"
	PeerAddress string `json:"peerAddress,omitempty"`

	// interface is the node's interface to the peer, which is found by its router advertisements
	// (unnumbered, RFC 8950). The node sends router advertisements of its own there, which make it
	// nobody's default router.
	//
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=15
	Interface string `json:"interface,omitempty"`

	// peerPort is the TCP port of the peer.
	//
	// +optional
	// +kubebuilder:default=179
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=65535
	PeerPort int32 `json:"peerPort,omitempty"`

	// sourceAddress is the node's address of the session. A node that does not have it opens no
	// session and says so in the status.
	//
	// +optional
	// +kubebuilder:validation:MaxLength=45
	// +kubebuilder:validation:XValidation:rule="isIP(self)",message="must be an IP address of the node"
	SourceAddress string `json:"sourceAddress,omitempty"`

	// routerID is the BGP identifier of the nodes. It should be set only with nodeSelectors that
	// choose one node; by default each node takes its first InternalIP of IPv4, or a number made of
	// its name when it has none.
	//
	// +optional
	// +kubebuilder:validation:MaxLength=15
	// +kubebuilder:validation:XValidation:rule="isIP(self) && ip(self).family() == 4 && self != '0.0.0.0'",message="must have the form of an IPv4 address other than 0.0.0.0"
	RouterID string `json:"routerID,omitempty"`

	// holdTime is how long a silent peer is trusted, in whole seconds: 0s for ever, else at least 3s.
	// The session takes the lesser of the two peers' times. Default 90s.
	//
	// +optional
	// +kubebuilder:validation:XValidation:rule="duration(self).getMilliseconds() % 1000 == 0 && (duration(self).getSeconds() == 0 || (duration(self).getSeconds() >= 3 && duration(self).getSeconds() <= 65535))",message="must be 0s, or whole seconds from 3s to 65535s (RFC 4271 4.2)"
	HoldTime *metav1.Duration `json:"holdTime,omitempty"`

	// keepaliveTime is the time between keepalives, in whole seconds. Default a third of the
	// negotiated hold time.
	//
	// +optional
	// +kubebuilder:validation:XValidation:rule="duration(self).getMilliseconds() % 1000 == 0 && duration(self).getSeconds() >= 1 && duration(self).getSeconds() <= 21845",message="must be whole seconds from 1s to 21845s"
	KeepaliveTime *metav1.Duration `json:"keepaliveTime,omitempty"`

	// connectTime is the longest time between attempts to connect, in whole seconds; the first
	// attempts come sooner. Default 10s.
	//
	// +optional
	// +kubebuilder:validation:XValidation:rule="duration(self).getMilliseconds() % 1000 == 0 && duration(self).getSeconds() >= 1 && duration(self).getSeconds() <= 65535",message="must be whole seconds from 1s to 65535s"
	ConnectTime *metav1.Duration `json:"connectTime,omitempty"`

	// nodeSelectors choose the nodes that open a session by their labels; one match is enough, none
	// stands for all nodes.
	//
	// +optional
	// +kubebuilder:validation:MaxItems=64
	// +listType=atomic
	NodeSelectors []metav1.LabelSelector `json:"nodeSelectors,omitempty"`

	// password protects the session by TCP MD5 signatures (RFC 2385). Prefer passwordSecret.
	//
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=80
	Password string `json:"password,omitempty"`

	// passwordSecret names a Secret of type kubernetes.io/basic-auth whose key password protects the
	// session by TCP MD5 signatures.
	//
	// +optional
	PasswordSecret *PasswordSecret `json:"passwordSecret,omitempty"`

	// bfdProfile names the BFDProfile of a BFD session that watches the path to the peer; none
	// without.
	//
	// +optional
	// +kubebuilder:validation:MaxLength=253
	BFDProfile string `json:"bfdProfile,omitempty"`

	// enableGracefulRestart keeps the routes at the peer over a restart of the node's speaker (RFC
	// 4724).
	//
	// +optional
	EnableGracefulRestart bool `json:"enableGracefulRestart,omitempty"`

	// ebgpMultiHop allows an external peer that is more than one hop away.
	//
	// +optional
	EBGPMultiHop bool `json:"ebgpMultiHop,omitempty"`

	// dualStackAddressFamily offers routes of both address families over the session, not only of the
	// family of its addresses. Unnumbered sessions always do.
	//
	// +optional
	DualStackAddressFamily bool `json:"dualStackAddressFamily,omitempty"`

	// acceptRoutes keeps the routes that the peer sends and shows them in the speaker's status. They
	// are never installed or passed on.
	//
	// +optional
	AcceptRoutes bool `json:"acceptRoutes,omitempty"`

	// vrf is not supported and must be empty.
	//
	// +optional
	VRF string `json:"vrf,omitempty"`
}

// PasswordSecret names a Secret in the namespace that Landfall runs in, so that its speakers need
// to read Secrets nowhere else.
type PasswordSecret struct {
	// name of the Secret.
	//
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name"`

	// namespace must be the one that Landfall runs in, if it is given.
	//
	// +optional
	// +kubebuilder:validation:MaxLength=63
	Namespace string `json:"namespace,omitempty"`
}

// BGPPeerStatus is what the nodes say of their sessions.
type BGPPeerStatus struct {
	// nodes has the word of each node that should have a session with the peer.
	//
	// +optional
	// +listType=map
	// +listMapKey=name
	Nodes []BGPPeerNode `json:"nodes,omitempty"`
}

// BGPPeerNode is what one node says of its session.
type BGPPeerNode struct {
	// name of the node.
	// +required
	Name string `json:"name"`
	// state is the state of the session as RFC 4271 names it, or Refused when the node does not open
	// one.
	// +required
	State string `json:"state"`
	// since is when the state was reached.
	// +optional
	Since metav1.Time `json:"since,omitzero"`
	// reason says in one word why the session is not established.
	// +optional
	Reason string `json:"reason,omitempty"`
	// message says why the session is not established, or what it cannot do.
	// +optional
	Message string `json:"message,omitempty"`
}

// BGPPeerList is a list of peers.
//
// +kubebuilder:object:root=true
type BGPPeerList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`

	Items []BGPPeer `json:"items"`
}
