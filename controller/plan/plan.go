// Package plan decides which Service holds which addresses, and says why one gets none.
//
// Its only way in is the Book, which is told of each change and decides for the Services that the
// change concerns. It has no clock and does no I/O. What a Service holds is read from its status,
// so any process can decide at any time: holders come first and keep what they have, newcomers are
// then served oldest first. The tests hold a Book to that: after each change it must say what a new
// Book says that knows only what is stored (assignModel).
package plan

import (
	"cmp"
	"net/netip"

	"github.com/landfall-lb/landfall/internal/lb"
)

// Config is what does not change while the controller runs.
type Config struct {
	// Class is the loadBalancerClass served, "" for Services without one.
	Class string
	// MoveOutside gives a Service whose address no pool contains any more another one, instead of only
	// saying so.
	MoveOutside bool
	// MoveDuplicates gives a Service whose address another one holds that comes first another address, instead of
	// only saying so.
	MoveDuplicates bool
	// Never are addresses that no pool hands out: gateways and the like.
	Never []lb.Range
}

// Pending is a write that the picture of the Services may not show yet: one of ours, or one for
// which another controller has a reservation.
type Pending struct {
	UID       string // of the Service
	Version   string // of the Service that the write was decided on
	Addresses []netip.Addr
	// Possible are more addresses that the Service may turn out to hold: an earlier write or another
	// controller may still give them to it.
	Possible []netip.Addr
}

// Covers reports whether s is still what the write was decided on, and so cannot show the write. As
// soon as the Service is seen in another version, that version is newer and shows whether the write
// took place.
func (p Pending) Covers(s lb.Service) bool { return p.UID == s.UID && p.Version == s.Version }

// of reports whether there is such a write, and it covers s.
func (p Pending) of(s lb.Service) bool { return p.UID != "" && p.Covers(s) }

// Decision is what one Service shall hold and show.
type Decision struct {
	// Addresses are all that the Service shall hold.
	Addresses []netip.Addr
	// Mode is the ipMode of the addresses; "" leaves it as it is.
	Mode lb.IPMode
	// Condition says whether the Service has what it asks for; nil on a Service that is to lose all
	// that is ours.
	Condition *lb.Condition
	// Pool is the pool of the first address; "" if none contains it.
	Pool string
	// Protect is set while Landfall assigned an address: a deleted Service stays until nobody
	// announces it. Release is set for one that Landfall protected and that no longer needs it.
	Protect, Release bool
	// Replaced are the addresses that the Service loses, as Landfall did not assign them: they are in no
	// pool, and it gets others, or it has those that Landfall assigned.
	Replaced []netip.Addr
}

// Plan is what is to be shown.
type Plan struct {
	// Services holds a decision for each Service that was decided and is ours, or was.
	Services map[lb.Key]Decision
	Pools    map[string]PoolPlan
}

// PoolPlan is what one pool shall show.
type PoolPlan struct {
	Status lb.PoolStatus
	// Families counts addresses by family, for each family that the pool has.
	Families map[lb.Family]Usage
}

// Ours reports whether a controller for class serves s: Services of exactly that class, and without
// a class those that have none.
func Ours(s *lb.Service, class string) bool { return s.Type == lb.LoadBalancer && s.Class == class }

// Older orders Services by age, then by name, which is the order in which they are served.
func Older(a, b *lb.Service) int {
	return cmp.Or(a.Created.Compare(b.Created), a.Key.Compare(b.Key))
}
