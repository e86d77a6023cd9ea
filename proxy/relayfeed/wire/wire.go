// Package wire has what the proxy and its relay say to each other over the relay's socket.
package wire

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/netip"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// Socket is the default path of the socket.
const Socket = "/run/landfall/relay.sock"

// Beat is how often each end sends a message, even if that has no content. An end that is silent for
// Silence hangs.
const (
	Beat    = 500 * time.Millisecond
	Silence = 4 * Beat
)

// DefaultDrain is how long a relay lets open connections go on when it ends, unless it is told otherwise.
const DefaultDrain = 20 * time.Second

// Version is that of what Message and Hello mean. Both ends leave out fields that they do not know. Whoever adds
// what an end of before would get wrong, such as a scheduler or a protocol, counts it up. Ends of two versions
// exchange beats and farewells and nothing else: the rules do not lead to the relay. No version is an earlier one.
const Version = 1

// Message is one line (JSON, ended by a newline) that the proxy writes to its relay. It has MaxServices frontends and
// endpoints at most, or one Service, so that the relay takes it in within a moment. Once the proxy knows the cluster,
// it tells of all Services, in as many lines as that takes.
type Message struct {
	// Version is that of the proxy.
	Version int `json:"version,omitempty"`
	// Complete is set if Services are all that are relayed, with those of the next lines as long as More is set: the relay
	// forgets others then. Otherwise they are changes.
	Complete bool `json:"complete,omitempty"`
	More     bool `json:"more,omitempty"`
	// Services are what is relayed, nil for one that is not relayed any more.
	Services []Service `json:"services,omitempty"`
	// NodePorts are the addresses at which the node serves node ports, if they have changed; nil if they
	// have not.
	NodePorts []netip.Addr `json:"nodePorts,omitzero"`
	// Left is set once the rules do not lead to the relay any more, after it has said that it leaves.
	Left bool `json:"left,omitempty"`
	// Answers are what the relay has asked for.
	Answers []Answer `json:"answers,omitempty"`
}

// Flow is a flow of UDP as the relay sees it: who sent, and the address of the node at which it arrived.
type Flow struct {
	Client netip.AddrPort `json:"client"`
	At     netip.AddrPort `json:"at"`
}

// Answer says where the packets of a flow came from and went to before the rules led them to the relay. It is
// only the flow if the rules did not. A socket of UDP cannot find that out, and who may ask the kernel may do
// much more than a relay needs.
type Answer struct {
	Flow
	From netip.AddrPort `json:"from,omitzero"`
	To   netip.AddrPort `json:"to,omitzero"`
}

// Service is what is relayed of one Service.
type Service struct {
	Key     lb.Key        `json:"key"`
	Relayed *plan.Relayed `json:"relayed,omitempty"`
}

// Hello is one line (JSON, ended by a newline) that a relay writes to its proxy.
type Hello struct {
	// Version is that of the relay.
	Version int `json:"version,omitempty"`
	// Ports are those at which the relay accepts connections, and receives UDP, by family, at all addresses. It says
	// them once it has heard a proxy of its version.
	Ports map[lb.Family]uint16 `json:"ports,omitempty"`
	// NoPort says why the relay has no port of a family that the node has, and so relays nothing of it.
	NoPort map[lb.Family]string `json:"noPort,omitempty"`
	// NoUDP says why the relay receives no UDP at its port of a family, where it does not.
	NoUDP map[lb.Family]string `json:"noUDP,omitempty"`
	// Leaving is set if the rules shall not lead to the relay any more.
	Leaving bool `json:"leaving,omitempty"`
	// Drain is how long open connections may go on after that, in nanoseconds; 0 for DefaultDrain.
	Drain time.Duration `json:"drain,omitempty"`
	// Full is set if the relay has about as many connections as it may, or too little time or memory for more: the
	// rules shall not lead there, but straight to endpoints, until it has room again.
	Full bool `json:"full,omitempty"`
	// Behind is set if the relay takes in new flows of UDP more slowly than they come: the rules shall lead them
	// straight to endpoints for a while.
	Behind bool `json:"behind,omitempty"`
	// Connections is how many are open.
	Connections int `json:"connections,omitempty"`
	// Flows are asked about, MaxFlows at most.
	Flows []Flow `json:"flows,omitempty"`
}

// MaxHello is how many bytes a line of the relay has at most, MaxFlows how many flows it asks about.
const (
	MaxHello = 16 << 10
	MaxFlows = 64
)

// MaxServices is how many frontends and endpoints a line of the proxy has at most, unless one Service has more.
const MaxServices = 4096

// DecodeHello reads a line of the relay.
func DecodeHello(line []byte) (h Hello, err error) {
	decoder := json.NewDecoder(bytes.NewReader(line))
	if err := decoder.Decode(&h); err != nil {
		return h, fmt.Errorf("decode: %w", err)
	}
	for family, port := range h.Ports {
		if family != lb.IPv4 && family != lb.IPv6 || port == 0 {
			return h, fmt.Errorf("%q is no family, or %d is no port", family, port)
		}
	}
	if h.Connections < 0 || h.Drain < 0 {
		return h, fmt.Errorf("%d connections, or a drain time of %s", h.Connections, h.Drain)
	}
	if len(h.Flows) > MaxFlows {
		return h, fmt.Errorf("%d flows, and %d are the most", len(h.Flows), MaxFlows)
	}
	for _, f := range h.Flows {
		if !f.Client.IsValid() || !f.At.IsValid() || f.Client.Addr().Is4() != f.At.Addr().Is4() {
			return h, fmt.Errorf("a flow from %s to %s", f.Client, f.At)
		}
	}
	return h, nil
}
