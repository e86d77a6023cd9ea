package relay

import (
	"slices"

	"github.com/landfall-lb/landfall/internal/lb"
)

// Counts are what was counted, of one Service or of several.
type Counts struct {
	Open int `json:"open"`
	// Connections were accepted. Tries are the connections to backends that were begun for them;
	// Retried got a backend after the first was late or failed, Failures got none, and Refused and
	// ClientRefused were beyond the limits of the Service and of one client of it. NodeFailures are
	// the tries that failed on the node itself, as without a free file descriptor or source port.
	Connections   uint64 `json:"connections"`
	Tries         uint64 `json:"tries"`
	Retried       uint64 `json:"retried"`
	Failures      uint64 `json:"failures"`
	Refused       uint64 `json:"refused"`
	ClientRefused uint64 `json:"clientRefused"`
	NodeFailures  uint64 `json:"nodeFailures"`
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
	c.Sent += other.Sent
	c.Received += other.Received
}

// Counted are the counts of one Service.
type Counted struct {
	Service lb.Key `json:"service"`
	Counts
}

// maxCounted is how many Services are counted apart.
const maxCounted = 500

// Counts returns what was counted of each Service, in order. Those beyond the first 500 are counted as
// one, which has no name.
func (r *Relay) Counts() []Counted {
	r.table.mu.Lock()
	defer r.table.mu.Unlock()
	all := make([]Counted, 0, len(r.table.services))
	for key, s := range r.table.services {
		all = append(all, Counted{key, s.counts})
	}
	slices.SortFunc(all, func(a, b Counted) int { return a.Service.Compare(b.Service) })
	if len(all) > maxCounted {
		var rest Counted
		for _, c := range all[maxCounted:] {
			rest.add(c.Counts)
		}
		all = append(all[:maxCounted], rest)
	}
	return all
}

// Refused counts the connections that were reset at once: beyond the limit of the node, of their
// Service or of their client, to the relay itself, and to what nobody relays.
func (r *Relay) Refused() uint64 { return uint64(max(0, r.refused.Load())) }

// Limit returns how many connections there may be at once, with the file descriptors that the process
// may have: each connection needs one for the client and one for each try, beside those of pipes and some
// for the process itself.
func Limit(asked, tries int, descriptors uint64) int {
	const own = 100 + 2*maxPipes
	return max(1, int(min(uint64(asked), (max(descriptors, own)-own)/uint64(1+tries))))
}
