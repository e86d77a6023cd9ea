package plan

import (
	"cmp"
	"fmt"

	"github.com/landfall-lb/landfall/internal/lb"
)

// Places says how much of the kernel's memory for session affinity the clients of a Service may take.
type Places uint8

// What a Service may have. Only nftables mode gives a Service less than ManyPlaces.
const (
	ManyPlaces Places = iota
	FewPlaces
	// NoPlaces has the clients' addresses choose, as nothing is remembered.
	NoPlaces
)

// How many Services with session affinity of one namespace have places, in nftables mode.
const (
	MaxManyPlaces = 4
	MaxFewPlaces  = 64
)

// AffinityShares bound how much of the memory for session affinity the Services of one namespace take together. The
// first ones have many places, the next ones few. A Service keeps what it has, because other places would be without
// its clients: one with few has many only once it has been without affinity, or the proxy starts again.
//
// AffinityShares is not safe for concurrent use.
type AffinityShares struct{ many, few *Shares }

// NewAffinityShares returns AffinityShares for so many Services of each namespace; for any number if many is 0.
func NewAffinityShares(many, few int) *AffinityShares {
	return &AffinityShares{NewShares(many), NewShares(few)}
}

// Set takes whether a Service has session affinity, and returns what it has for that.
func (a *AffinityShares) Set(key lb.Key, age Age, affinity bool) Places {
	switch {
	case !affinity:
		if a.many.Held(key)+a.few.Held(key) > 0 || a.few.Waits(key) {
			a.many.Set(key, age, 0)
			a.few.Set(key, age, 0)
		}
		return ManyPlaces
	case a.few.Held(key) == 0 && a.many.Set(key, age, 1) == Room:
		a.few.Set(key, age, 0) // it waits no more
		return ManyPlaces
	case a.few.Set(key, age, 1) == Room:
		a.many.Set(key, age, 0)
		return FewPlaces
	}
	return NoPlaces
}

// Next returns a Service without places that can have some now, see [Shares.Next].
func (a *AffinityShares) Next() *lb.Key { return cmp.Or(a.many.Next(), a.few.Next()) }

// AffinityRefused says that a Service has no room in the memory for session affinity, "" if it has, or needs none as
// the relay remembers its clients.
func AffinityRefused(s Service) string {
	if s.AffinityTimeout == 0 || s.Places != NoPlaces || s.Relay {
		return ""
	}
	return fmt.Sprintf("spec.sessionAffinity: ClientIP: a node remembers the clients of %d Services of a namespace, and "+
		"there are as many; the addresses of this one's clients choose their endpoints, also after timeoutSeconds",
		MaxManyPlaces+MaxFewPlaces)
}
