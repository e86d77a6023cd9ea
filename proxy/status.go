package main

import (
	"io"
	"iter"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/ops"
	"github.com/landfall-lb/landfall/proxy/counters"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// status is what /v1/status shows, ahead of the list "services".
type status struct {
	Node string `json:"node"`
	Mode string `json:"mode"`
	// Waiting names what the proxy needs before it writes any rule; absent once it has it.
	Waiting string `json:"waiting,omitempty"`
	// Ready is set once the kernel has confirmed the rules of all Services.
	Ready   bool      `json:"ready"`
	Leaving lb.Reason `json:"leaving,omitempty"`
	// Findings are what keeps this node from delivering, beside the rules.
	Findings []lb.Finding `json:"findings,omitempty"`
	// Relay is what is so of the node's relay; absent without --relay.
	Relay *relayState `json:"relay,omitempty"`
}

// The states of a Service.
const (
	stateApplied = "applied" // the kernel holds the newest rules
	statePending = "pending" // newer rules are under way
	stateFailed  = "failed"  // the kernel did not take them
)

type serviceStatus struct {
	Service string `json:"service"`
	State   string `json:"state"`
	Error   string `json:"error,omitempty"`
	// Advice says what of the Service's wishes is not followed.
	Advice string       `json:"advice,omitempty"`
	Probe  *probeStatus `json:"probe,omitempty"`
	// Relayed is set if TCP connections to the Service are relayed while a relay is there.
	Relayed bool `json:"relayed,omitempty"`
	// Direct is set if connections from outside to VIPs are handed to the nodes of their endpoints as they
	// are. Advice says of which nodes this does not hold.
	Direct bool         `json:"direct,omitempty"`
	Ports  []portStatus `json:"ports"`
	VIPs   []vipStatus  `json:"vips,omitempty"`
	// HealthPort is the healthCheckNodePort, LocalReady what it counts for each family.
	HealthPort uint16            `json:"healthPort,omitempty"`
	LocalReady map[lb.Family]int `json:"localReady,omitempty"`
	// Counters are what the kernel counted, with --service-counters; only of a Service that was asked
	// for.
	Counters *counters.Counts `json:"counters,omitempty"`
}

type portStatus struct {
	Family    lb.Family        `json:"family"`
	Name      string           `json:"name,omitempty"`
	Protocol  lb.Protocol      `json:"protocol"`
	Policy    lb.TrafficPolicy `json:"policy"`
	Frontends []frontendStatus `json:"frontends"`
	Backends  []backendStatus  `json:"backends"`
}

type frontendStatus struct {
	Kind      plan.Kind      `json:"kind"`
	Address   *netip.Addr    `json:"address,omitempty"`
	Port      uint16         `json:"port"`
	Action    plan.Action    `json:"action"`
	Sources   []netip.Prefix `json:"sources,omitempty"`
	Lingering bool           `json:"lingering,omitempty"`
}

type backendStatus struct {
	Address netip.AddrPort `json:"address"`
	Local   bool           `json:"local,omitempty"`
	Ready   bool           `json:"ready"`
}

type vipStatus struct {
	VIP        netip.Addr `json:"vip"`
	Programmed bool       `json:"programmed"`
	// Reason says why this node does not deliver the VIP, Message explains it.
	Reason  lb.Reason `json:"reason,omitempty"`
	Message string    `json:"message,omitempty"`
	// The endpoints that the kernel delivers to, on this node and everywhere.
	LocalReady   int `json:"localReady"`
	LocalServing int `json:"localServing"`
	Ready        int `json:"ready"`
	Serving      int `json:"serving"`
}

func (p *proxy) status() status {
	st := status{Node: p.self, Mode: p.mode}
	trouble := ""
	if p.trouble != nil {
		trouble = p.trouble()
	}
	if p.found != nil {
		st.Findings = p.found()
	}
	if p.to.relay != nil {
		st.Relay = describeRelay(p.to.relay.State())
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	st.Waiting, st.Ready, st.Leaving = ops.Waiting(p.waiting, trouble), p.complete, p.facts.leaving
	return st
}

// statusPiece is how many Services are copied at a time: the loop waits no longer than that takes.
const statusPiece = 64

// services describes all Services in their order. It copies a few at a time, so that it neither
// copies all nor holds up the loop.
func (p *proxy) services() iter.Seq[serviceStatus] {
	return func(yield func(serviceStatus) bool) {
		p.mu.Lock()
		keys := slices.Collect(maps.Keys(p.records))
		p.mu.Unlock()
		slices.SortFunc(keys, lb.Key.Compare)
		for piece := range slices.Chunk(keys, statusPiece) {
			records, path := p.copies(piece)
			for _, r := range records {
				if !yield(r.status(path)) {
					return
				}
			}
		}
	}
}

// copies returns the records of those Services that are still there, and the path behind them: the
// step goes on while they are described.
func (p *proxy) copies(keys []lb.Key) ([]record, plan.Path) {
	p.mu.Lock()
	defer p.mu.Unlock()
	records := make([]record, 0, len(keys))
	for _, key := range keys {
		if r := p.records[key]; r != nil {
			records = append(records, *r)
		}
	}
	return records, p.path
}

func (r *record) status(path plan.Path) serviceStatus {
	path = r.along(path)
	st := serviceStatus{
		Service: r.planned.Key.String(), State: r.state(), Advice: adviceText(r.advice), Ports: []portStatus{},
		Probe:      r.probeStatus(),
		HealthPort: r.planned.HealthPort, Relayed: plan.AnyRelayed(r.planned, r.applied),
		Direct:     r.applied.Direct,
		LocalReady: plan.Health(r.planned, r.applied, path),
	}
	if r.failure != nil {
		st.Error = r.failure.Error()
	}
	for _, port := range r.planned.Ports {
		st.Ports = append(st.Ports, describe(port))
	}
	for _, d := range plan.Report(r.planned, r.applied, r.failure, path) {
		v := vipStatus{
			VIP: d.VIP, Programmed: d.Refusal == nil || lb.OfPath(d.Refusal.Reason), Reason: d.Deliverable(),
			LocalReady: d.LocalReady, LocalServing: d.LocalServing, Ready: d.Ready, Serving: d.Serving,
		}
		if d.Refusal != nil {
			v.Message = d.Refusal.Message
		}
		st.VIPs = append(st.VIPs, v)
	}
	return st
}

func describe(port plan.Port) portStatus {
	st := portStatus{
		Family: port.Family, Name: port.Name, Protocol: port.Protocol, Policy: port.External,
		Frontends: []frontendStatus{}, Backends: []backendStatus{},
	}
	for _, f := range port.Frontends {
		frontend := frontendStatus{Kind: f.Kind, Port: f.Port, Action: f.Action, Lingering: f.Lingering}
		if f.Sources != nil {
			frontend.Sources = f.Sources.Networks
		}
		if f.Addr.IsValid() {
			frontend.Address = &f.Addr
		}
		st.Frontends = append(st.Frontends, frontend)
	}
	all := slices.Clone(port.Backends.Cluster)
	has := make(map[lb.Backend]bool, len(all))
	for _, b := range all {
		has[b] = true
	}
	for _, b := range port.Backends.Local {
		if !has[b] {
			all = append(all, b)
		}
	}
	for _, b := range all {
		st.Backends = append(st.Backends, backendStatus{Address: port.At(b), Local: b.Local, Ready: b.Ready})
	}
	return st
}

// writeStatus writes the status, with all Services or only the one that is asked for.
func (p *proxy) writeStatus(w io.Writer, only string) error {
	if only == onlyConnections {
		return p.writeConnections(w)
	}
	services := p.services()
	if only != "" {
		var key lb.Key
		key.Namespace, key.Name, _ = strings.Cut(only, "/")
		services = func(yield func(serviceStatus) bool) {
			records, path := p.copies([]lb.Key{key})
			for _, r := range records {
				st := r.status(path)
				if p.counted != nil {
					if counted, ok := p.counted(key); ok {
						st.Counters = &counted
					}
				}
				yield(st)
			}
		}
	}
	return ops.WriteStatus(w, p.status(), "services", services)
}
