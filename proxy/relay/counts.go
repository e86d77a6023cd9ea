package relay

import (
	"cmp"
	"fmt"
	"os"
	"slices"

	"github.com/landfall-lb/landfall/internal/lb"
)

// Counts are what was counted, of one Service or of several.
type Counts struct {
	Open int `json:"open"`
	// Connections were accepted. Tries are the connections to backends that were begun for them;
	// Retried got a backend after the first was late or failed, Failures got none, and Refused and
	// ClientRefused were beyond the limits of the Service and of one client of it. Refused counts those too that were
	// reset as memory was scarce. NodeFailures are
	// the tries that failed on the node itself, as without a free file descriptor or source port. With UDP,
	// connections are flows, and Refused and ClientRefused those that ended early, for others.
	Connections   uint64 `json:"connections"`
	Tries         uint64 `json:"tries"`
	Retried       uint64 `json:"retried"`
	Failures      uint64 `json:"failures"`
	Refused       uint64 `json:"refused"`
	ClientRefused uint64 `json:"clientRefused"`
	NodeFailures  uint64 `json:"nodeFailures"`
	// Expired came with a TTL (IPv6: hop limit) of 1, and ended at once.
	Expired uint64 `json:"expired"`
	// Sent are the bytes of clients, Received those for them.
	Sent     uint64 `json:"sent"`
	Received uint64 `json:"received"`
}

func (c *Counts) add(other Counts) {
	c.Open += other.Open
	c.Connections += other.Connections
	c.Tries += other.Tries
	c.Retried += other.Retried
	c.Failures += other.Failures
	c.Refused += other.Refused
	c.ClientRefused += other.ClientRefused
	c.NodeFailures += other.NodeFailures
	c.Expired += other.Expired
	c.Sent += other.Sent
	c.Received += other.Received
}

// Counted are the counts of one Service in one protocol.
type Counted struct {
	Service  lb.Key      `json:"service"`
	Protocol lb.Protocol `json:"protocol"`
	Counts
}

// maxCounted is how many Services are counted apart.
const maxCounted = 500

// Counts returns what was counted of each Service, in order, with the bytes that open connections and flows have passed
// on so far. Of more than 500 those are counted apart that come first when namespaces take turns, and the others as one
// of each protocol, which has no name.
func (r *Relay) Counts() []Counted {
	for _, p := range r.passing.list() {
		p.count()
	}
	for _, f := range r.flows.list() {
		f.countSoFar()
	}
	r.table.mu.Lock()
	all := make([]Counted, 0, len(r.table.services))
	for which, s := range r.table.services {
		s.mu.Lock()
		all = append(all, Counted{which.key, which.protocol, s.counts})
		s.mu.Unlock()
	}
	r.table.mu.Unlock()
	slices.SortFunc(all, compareCounted)
	if len(all) <= maxCounted {
		return all
	}
	takeTurns(all)
	slices.SortFunc(all[:maxCounted], compareCounted)
	rest := map[lb.Protocol]*Counts{lb.TCP: {}, lb.UDP: {}}
	for _, c := range all[maxCounted:] {
		rest[c.Protocol].add(c.Counts)
	}
	return append(all[:maxCounted], Counted{Protocol: lb.TCP, Counts: *rest[lb.TCP]},
		Counted{Protocol: lb.UDP, Counts: *rest[lb.UDP]})
}

func compareCounted(a, b Counted) int {
	return cmp.Or(a.Service.Compare(b.Service), cmp.Compare(a.Protocol, b.Protocol))
}

// takeTurns has namespaces take turns in what is in order: first the first of each, then the second of each.
func takeTurns(all []Counted) {
	turns, of := make(map[id]int, len(all)), map[string]int{}
	for _, c := range all {
		turns[id{c.Service, c.Protocol}] = of[c.Service.Namespace]
		of[c.Service.Namespace]++
	}
	slices.SortStableFunc(all, func(a, b Counted) int {
		return cmp.Compare(turns[id{a.Service, a.Protocol}], turns[id{b.Service, b.Protocol}])
	})
}

// Refused counts the connections that were reset at once: beyond the limit of the node, of their
// Service or of their client, to the relay itself, and to what nobody relays.
func (r *Relay) Refused() uint64 { return uint64(max(0, r.refused.Load())) }

// Lost returns how many datagrams of clients, and how many for them, sockets had no room for. Those that wait at a
// flow's socket are counted when the flow ends.
func (r *Relay) Lost() (sent, received uint64) {
	return r.lostSent.Load() + r.receivers.dropped(), r.lostReceived.Load()
}

// NoPort counts the flows that ended as the node had no free port of UDP for them.
func (r *Relay) NoPort() uint64 { return uint64(r.noPort.Load()) }

// Limits returns how many connections and flows of UDP there may be at once, with the file descriptors that the
// process may have: each connection needs one for the client and one for each try, and each flow one, beside
// those of pipes and some for the process itself. Flows get a quarter of what there is, if they ask for as much,
// and at most half of the ports that the node's programs share for what they send: each takes one.
func Limits(connections, flows, tries int, descriptors uint64, ports int) (int, int) {
	const own = 100 + 2*maxPipes
	free := max(descriptors, own) - own
	flows = max(1, int(min(uint64(flows), free/4, uint64(ports/2))))
	return max(1, int(min(uint64(connections), (free-min(free, uint64(flows)))/uint64(1+tries)))), flows
}

// Ports returns how many ports the kernel has for sockets that ask for none, of both families.
func Ports() int {
	const standard = 60999 - 32768 + 1
	text, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range")
	var first, last int
	if _, bad := fmt.Sscan(string(text), &first, &last); err != nil || bad != nil || last < first {
		return standard
	}
	return last - first + 1
}
