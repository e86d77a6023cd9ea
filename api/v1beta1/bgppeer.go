package v1beta1

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// BGPPeer is a router with which nodes keep a BGP session.
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

// BGPPeerSpec is the address of the router, the nodes that have a session with it, and the options
// of the session. A node opens the TCP connection itself. It also accepts one from the router if
// the speaker runs with --bgp-listen; by default it does not listen, because another BGP speaker
// may run on the node.
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
type BGPPeerSpec struct {
	// myASN is the AS number of the nodes, 1 to 4294967295.
	//
	// +required
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=4294967295
	MyASN int64 `json:"myASN"`

	// localASN replaces myASN in the session with this peer and in the AS paths that it receives
	// (like "local-as … no-prepend replace-as" of other implementations).
	//
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=4294967295
	LocalASN *int64 `json:"localASN,omitempty"`

	// peerASN is the AS number that the peer must have. Set either peerASN or dynamicASN.
	//
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=4294967295
	PeerASN *int64 `json:"peerASN,omitempty"`

	// dynamicASN accepts any AS number of a kind: internal accepts only the AS number of the nodes,
	// external any other.
	//
	// +optional
	// +kubebuilder:validation:Enum=internal;external
	DynamicASN string `json:"dynamicASN,omitempty"`

	// peerAddress is the IP address of the peer. Set either peerAddress or interface.
	//
	// +optional
	// +kubebuilder:validation:MaxLength=45
	// +kubebuilder:validation:XValidation:rule="isIP(self)",message="must be an IP address such as 192.0.2.1 or 2001:db8::1"
	// +kubebuilder:validation:XValidation:rule="!isIP(self) || !ip(self).isLinkLocalUnicast()",message="a link-local address does not name its link; set interface instead"
	PeerAddress string `json:"peerAddress,omitempty"`

	// interface is the node's network interface to the peer, for unnumbered sessions (RFC 8950).
	// The speaker finds the peer by its router advertisements. The speaker sends router
	// advertisements with lifetime 0 there, so no host uses the node as a default router.
	//
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=15
	Interface string `json:"interface,omitempty"`

	// peerPort is the TCP port of the peer, 1 to 65535.
	//
	// +optional
	// +kubebuilder:default=179
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=65535
	PeerPort int32 `json:"peerPort,omitempty"`

	// sourceAddress is the node's own IP address of the session. A node that does not have the address
	// opens no session, and says so in the status.
	//
	// +optional
	// +kubebuilder:validation:MaxLength=45
	// +kubebuilder:validation:XValidation:rule="isIP(self)",message="must be an IP address of the node"
	SourceAddress string `json:"sourceAddress,omitempty"`

	// routerID is the BGP identifier of the node, written like an IPv4 address. Set it only with
	// nodeSelectors that select one node, because identifiers must differ. Default: the first IPv4
	// InternalIP of the node, or a hash of its name if it has none.
	//
	// +optional
	// +kubebuilder:validation:MaxLength=15
	// +kubebuilder:validation:XValidation:rule="isIP(self) && ip(self).family() == 4 && self != '0.0.0.0'",message="must have the form of an IPv4 address other than 0.0.0.0"
	RouterID string `json:"routerID,omitempty"`

	// holdTime is how long a session survives without a message from the peer, in whole seconds: 3s to
	// 65535s, or 0s for ever. The session uses the lower value of both sides. Default: three times
	// keepaliveTime if that is set, else 90s. To detect failures faster, use bfdProfile.
	//
	// +optional
	// +kubebuilder:validation:XValidation:rule="duration(self).getMilliseconds() % 1000 == 0 && (duration(self).getSeconds() == 0 || (duration(self).getSeconds() >= 3 && duration(self).getSeconds() <= 65535))",message="must be 0s, or whole seconds from 3s to 65535s (RFC 4271 4.2)"
	HoldTime *metav1.Duration `json:"holdTime,omitempty"`

	// keepaliveTime is the time between keepalive messages, in whole seconds from 1s to 21845s.
	// Default: a third of the negotiated hold time.
	//
	// +optional
	// +kubebuilder:validation:XValidation:rule="duration(self).getMilliseconds() % 1000 == 0 && duration(self).getSeconds() >= 1 && duration(self).getSeconds() <= 21845",message="must be whole seconds from 1s to 21845s"
	KeepaliveTime *metav1.Duration `json:"keepaliveTime,omitempty"`

	// connectTime is the longest time between attempts to connect, in whole seconds from 1s to 65535s;
	// the first attempts follow one another faster. Default 10s.
	//
	// +optional
	// +kubebuilder:validation:XValidation:rule="duration(self).getMilliseconds() % 1000 == 0 && duration(self).getSeconds() >= 1 && duration(self).getSeconds() <= 65535",message="must be whole seconds from 1s to 65535s"
	ConnectTime *metav1.Duration `json:"connectTime,omitempty"`

	// nodeSelectors selects the nodes that have a session, by label; a node needs to match only one
	// selector. If empty, every node has one.
	//
	// +optional
	// +kubebuilder:validation:MaxItems=64
	// +listType=atomic
	NodeSelectors []metav1.LabelSelector `json:"nodeSelectors,omitempty"`

	// password authenticates the session with TCP MD5 signatures (RFC 2385). Everybody who may read
	// BGPPeers can read it; prefer passwordSecret.
	//
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=80
	Password string `json:"password,omitempty"`

	// passwordSecret names a Secret of type kubernetes.io/basic-auth. Its key password
	// authenticates the session with TCP MD5 signatures (RFC 2385). The chart's value
	// speaker.bgpSecrets must name it too: speakers may read no other Secret.
	//
	// +optional
	PasswordSecret *PasswordSecret `json:"passwordSecret,omitempty"`

	// bfdProfile names the BFDProfile of a BFD session that monitors the path to the peer. If
	// empty, there is no BFD session.
	//
	// +optional
	// +kubebuilder:validation:MaxLength=253
	BFDProfile string `json:"bfdProfile,omitempty"`

	// enableGracefulRestart makes the peer keep the routes while the speaker of the node restarts
	// (RFC 4724).
	//
	// +optional
	EnableGracefulRestart bool `json:"enableGracefulRestart,omitempty"`

	// ebgpMultiHop allows an external peer that is more than one hop away.
	//
	// +optional
	EBGPMultiHop bool `json:"ebgpMultiHop,omitempty"`

	// dualStackAddressFamily announces IPv4 and IPv6 routes over the session, instead of only the
	// family of its addresses. Unnumbered sessions always carry both.
	//
	// +optional
	DualStackAddressFamily bool `json:"dualStackAddressFamily,omitempty"`

	// acceptRoutes shows the routes that the peer sends in what landfall-speaker status prints. The
	// speaker never installs them or passes them on.
	//
	// +optional
	AcceptRoutes bool `json:"acceptRoutes,omitempty"`

	// vrf is the name of the VRF on the node that the session is in. A node without a VRF of the name has
	// no session, and says so in the status. If empty, the session is in the main routing table.
	//
	// +optional
	// +kubebuilder:validation:MaxLength=15
	// +kubebuilder:validation:XValidation:rule="self.matches('^[^/:[:space:]]*$') && !(self in ['.', '..'])",message="must be the name of a network interface"
	VRF string `json:"vrf,omitempty"`
}

// PasswordSecret names a Secret in the namespace of Landfall. Speakers can read Secrets nowhere
// else.
type PasswordSecret struct {
	// name is the name of the Secret.
	//
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name"`

	// namespace, if set, must be the namespace of Landfall.
	//
	// +optional
	// +kubebuilder:validation:MaxLength=63
	Namespace string `json:"namespace,omitempty"`
}

// BGPPeerStatus reports the session of each node.
type BGPPeerStatus struct {
	// nodes has one entry for each node that should have a session with the peer.
	//
	// +optional
	// +kubebuilder:validation:MaxItems=5000
	// +listType=map
	// +listMapKey=name
	Nodes []BGPPeerNode `json:"nodes,omitempty"`
}

// BGPPeerNode is the status of the session of one node.
type BGPPeerNode struct {
	// name is the name of the node.
	// +required
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name"`
	// state is the state of the session as in RFC 4271, or Refused if the node opens no session.
	// +required
	// +kubebuilder:validation:MaxLength=32
	State string `json:"state"`
	// since is when the session entered the state.
	// +optional
	Since metav1.Time `json:"since,omitzero"`
	// reason is the reason, as one CamelCase word, why the session is not established.
	// +optional
	// +kubebuilder:validation:MaxLength=64
	Reason string `json:"reason,omitempty"`
	// message explains why the session is not established, or what it cannot do.
	// +optional
	// +kubebuilder:validation:MaxLength=512
	Message string `json:"message,omitempty"`
}

// BGPPeerList is a list of BGPPeers.
//
// +kubebuilder:object:root=true
type BGPPeerList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`

	Items []BGPPeer `json:"items"`
}
