package lb

import (
	"net/netip"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/labels"
)

// ConditionProgrammed is a pod's readiness gate (KEP-580), and the condition that opens it: a proxy sets it
// once its node's rules deliver to the pod.
const ConditionProgrammed = "landfall.dev/programmed"

// Why ConditionProgrammed is true.
const (
	// ReasonProgrammed says that the rules of the pod's node deliver to it, and that the addresses of its
	// Services are announced.
	ReasonProgrammed Reason = "Programmed"
	// ReasonNoService says that no Service names the pod as an endpoint.
	ReasonNoService Reason = "NoService"
	// ReasonTimedOut says that this was not so in time, and the pod no longer waits for it.
	ReasonTimedOut Reason = "TimedOut"
)

// GatedPod is a pod with the readiness gate ConditionProgrammed; the zero value stands for one without.
type GatedPod struct {
	UID    string
	Addrs  []netip.Addr
	Labels labels.Set
	// Ready is set when nothing else keeps the pod from being ready: its containers and all other gates are,
	// and it is not being deleted.
	Ready bool
	// Opened is set when the gate is open.
	Opened bool
	// Passed is since when the pod counts as ready, as the kubelet or the Node's controller says: EndpointSlices follow.
	// Zero while it does not.
	Passed time.Time
}

// SelectedBy reports whether a Service.Selector selects the pod.
func (p GatedPod) SelectedBy(selector string) bool {
	for term := range strings.SplitSeq(selector, ",") {
		name, value, _ := strings.Cut(term, "=")
		if have, ok := p.Labels[name]; !ok || have != value {
			return false
		}
	}
	return true
}
