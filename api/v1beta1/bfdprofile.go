package v1beta1

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// BFDProfile says how BFD (RFC 5880) watches the path to a BGP peer.
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

// BFDProfileSpec holds the parameters of asynchronous mode. A path counts as lost after the
// detection multiplier times the interval that both ends agree on: 900 ms by default.
//
// +kubebuilder:validation:XValidation:rule="!has(self.echoMode) || !self.echoMode",message="the echo function is not supported; leave echoMode out and lower transmitInterval and receiveInterval instead"
type BFDProfileSpec struct {
	// receiveInterval is the least time between received packets that the node asks for, in
	// milliseconds.
	// +optional
	// +kubebuilder:default=300
	// +kubebuilder:validation:Minimum=10
	// +kubebuilder:validation:Maximum=60000
	ReceiveInterval *int32 `json:"receiveInterval,omitempty"`

	// transmitInterval is the least time between packets that the node sends, in milliseconds.
	// +optional
	// +kubebuilder:default=300
	// +kubebuilder:validation:Minimum=10
	// +kubebuilder:validation:Maximum=60000
	TransmitInterval *int32 `json:"transmitInterval,omitempty"`

	// detectMultiplier is how many packets in a row may be missing before the path counts as lost.
	// +optional
	// +kubebuilder:default=3
	// +kubebuilder:validation:Minimum=2
	// +kubebuilder:validation:Maximum=255
	DetectMultiplier *int32 `json:"detectMultiplier,omitempty"`

	// passiveMode makes the node wait for the peer's first packet.
	// +optional
	PassiveMode bool `json:"passiveMode,omitempty"`

	// minimumTtl is the least time to live that packets of a multihop session may arrive with. Default
	// 254: one router between.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=254
	MinimumTTL *int32 `json:"minimumTtl,omitempty"`

	// echoInterval is accepted for manifests that carry it; it has no effect without echoMode.
	// +optional
	// +kubebuilder:validation:Minimum=10
	// +kubebuilder:validation:Maximum=60000
	EchoInterval *int32 `json:"echoInterval,omitempty"`

	// echoMode is not supported and must not be true.
	// +optional
	EchoMode bool `json:"echoMode,omitempty"`
}

// BFDProfileList is a list of profiles.
//
// +kubebuilder:object:root=true
type BFDProfileList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`

	Items []BFDProfile `json:"items"`
}
