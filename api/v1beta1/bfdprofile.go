package v1beta1

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// BFDProfile sets how BFD (RFC 5880) monitors the path to a BGP peer that names the profile.
//
// +kubebuilder:object:root=true
// +kubebuilder:metadata:annotations="helm.sh/resource-policy=keep"
// +kubebuilder:resource:scope=Cluster,categories=landfall
// +kubebuilder:printcolumn:name="Transmit",type=integer,JSONPath=`.spec.transmitInterval`
// +kubebuilder:printcolumn:name="Receive",type=integer,JSONPath=`.spec.receiveInterval`
// +kubebuilder:printcolumn:name="Multiplier",type=integer,JSONPath=`.spec.detectMultiplier`
// +kubebuilder:printcolumn:name="Passive",type=boolean,JSONPath=`.spec.passiveMode`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type BFDProfile struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// +optional
	Spec BFDProfileSpec `json:"spec,omitzero"`
}

// BFDProfileSpec holds the parameters of asynchronous mode. A path is down when no packet arrives
// for detectMultiplier times the negotiated interval: 900 ms by default.
//
// +kubebuilder:validation:XValidation:rule="!has(self.echoMode) || !self.echoMode",message="the echo function is not supported; leave echoMode out and lower transmitInterval and receiveInterval instead"
type BFDProfileSpec struct {
	// receiveInterval is the shortest time between packets that the node is willing to receive, in
	// milliseconds.
	// +optional
	// +kubebuilder:default=300
	// +kubebuilder:validation:Minimum=10
	// +kubebuilder:validation:Maximum=60000
	ReceiveInterval *int32 `json:"receiveInterval,omitempty"`

	// transmitInterval is the shortest time between packets that the node sends, in milliseconds.
	// +optional
	// +kubebuilder:default=300
	// +kubebuilder:validation:Minimum=10
	// +kubebuilder:validation:Maximum=60000
	TransmitInterval *int32 `json:"transmitInterval,omitempty"`

	// detectMultiplier is the number of packets in a row that must be missing before the path is
	// down.
	// +optional
	// +kubebuilder:default=3
	// +kubebuilder:validation:Minimum=2
	// +kubebuilder:validation:Maximum=255
	DetectMultiplier *int32 `json:"detectMultiplier,omitempty"`

	// passiveMode makes the node wait for the peer's first packet before it sends its own.
	// +optional
	PassiveMode bool `json:"passiveMode,omitempty"`

	// minimumTtl is the lowest TTL that the node accepts in packets of a multihop session. Default
	// 254: one router in between.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=254
	MinimumTTL *int32 `json:"minimumTtl,omitempty"`

	// echoInterval has no effect, because echoMode is not supported. It is accepted so that
	// existing manifests apply.
	// +optional
	// +kubebuilder:validation:Minimum=10
	// +kubebuilder:validation:Maximum=60000
	EchoInterval *int32 `json:"echoInterval,omitempty"`

	// echoMode is not supported and must not be true.
	// +optional
	EchoMode bool `json:"echoMode,omitempty"`
}

// BFDProfileList is a list of BFDProfiles.
//
// +kubebuilder:object:root=true
type BFDProfileList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`

	Items []BFDProfile `json:"items"`
}
