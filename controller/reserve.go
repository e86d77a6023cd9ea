package main

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/landfall-lb/landfall/controller/plan"
	"github.com/landfall-lb/landfall/internal/kube"
	"github.com/landfall-lb/landfall/internal/lb"
)

// The Lease makes sure that one controller leads, as far as clocks and networks behave. But a write
// may arrive late, a process may sleep and go on, and somebody may install a second Landfall.
// Reservations make sure that even then no two Services get one address.
//
// Before the controller assigns an address, it writes a reservation into the status of the pool
// that has the address. It makes that write conditional on a version of the pool: the version that
// its own last reservation made, or one that it read before it caught up with all Services. So the
// controller knows every address of that pool that another one has given away until then, from the
// status of a Service or from a reservation; and every later reservation changes the version. The
// controller drops a reservation once the Service shows another version than the write was decided
// on, as the API server refuses that write from then on.

// maxReservations and maxReservationsSize, in bytes, bound the reservations in a pool's status, so that the object
// stays small: every node that announces hears of each change.
const (
	maxReservations     = 500
	maxReservationsSize = 64 << 10
)

// sizeOf returns what a reservation takes in the status, and is never too little.
func sizeOf(r lb.PendingReservation) int {
	const names = len(`{"namespace":"","name":"","uid":"","resourceVersion":"","addresses":[]},`)
	size := names + len(r.Service.Namespace) + len(r.Service.Name) + len(r.UID) + len(r.Version)
	for _, addr := range r.Addresses {
		size += len(addr.String()) + len(`"",`)
	}
	return size
}

// registry is what the controller knows about the reservations of one pool.
type registry struct {
	// caughtUp is a version of the pool that was read before the controller last caught up with the
	// Services.
	caughtUp string
	// version is the one that our last write of the pool made.
	version      string
	reservations []lb.PendingReservation // those in that version
}

// base returns the version of a pool on which the controller may reserve addresses; false when it
// has to catch up first.
func (c *controller) base(pool lb.Pool) (string, bool) {
	r := c.registries[pool.Name]
	switch {
	case r == nil:
		return "", false
	case r.version != "" && !kube.Older(r.version, pool.Version):
		return r.version, true
	case r.version != "" && pool.Status.Writer == c.writer:
		return pool.Version, true // it was edited since
	}
	return pool.Version, r.caughtUp == pool.Version
}

// catchUpWithOthers makes base return a version for all pools as they are now, and adopts the
// reservations of other controllers.
func (c *controller) catchUpWithOthers(ctx context.Context) error {
	pools := c.pools.All() // before
	if err := c.catchUp(ctx); err != nil {
		return err
	}
	for name, pool := range pools {
		if _, ok := c.base(pool); ok {
			continue
		}
		// The reservations of others do not count as our own: while another controller is the last
		// writer, it may still change them.
		c.registries[name] = &registry{caughtUp: pool.Version}
		if pool.Status.Writer == c.writer {
			continue // a write of this one of which it never heard: it knows which of them may take place
		}
		c.disown(name)
		for _, reservation := range pool.Status.Pending {
			c.adopt(name, reservation)
		}
	}
	return nil
}

// disown forgets the adopted writes of a pool that this controller never sent: the controller that
// reserved the addresses may have changed its mind since.
func (c *controller) disown(pool string) {
	for key, w := range c.writes {
		if _, ok := w.reservations[pool]; !ok || !w.adopted {
			continue
		}
		c.room = true
		if delete(w.reservations, pool); len(w.reservations) == 0 {
			delete(c.writes, key)
			c.again[key] = true
		}
	}
}

// adopt treats a reservation of another controller as a write that may still take place.
func (c *controller) adopt(pool string, reservation lb.PendingReservation) {
	s, ok := c.services.Get(reservation.Service)
	if !ok || s.UID != reservation.UID || s.Version != reservation.Version {
		return // the write has taken place, or never will
	}
	w := c.writes[reservation.Service]
	if !w.Covers(s) {
		pending := plan.Pending{UID: reservation.UID, Version: reservation.Version, Addresses: reservation.Addresses}
		w = write{Pending: pending, adopted: true}
	}
	for _, addr := range reservation.Addresses {
		if !slices.Contains(w.Addresses, addr) && !slices.Contains(w.Possible, addr) {
			w.Possible = append(slices.Clip(w.Possible), addr)
		}
	}
	if w.reservations == nil {
		w.reservations = map[string]lb.PendingReservation{}
	}
	w.reservations[pool] = reservation
	c.writes[reservation.Service] = w
	c.again[reservation.Service] = true
}

// reserve reserves the addresses that the changes add to Services, and returns the changes for
// which that is done. The controller decides the others again: after a while with an error, else once there is room.
func (c *controller) reserve(ctx context.Context, p plan.Plan, pools map[string]lb.Pool,
	changes []change) ([]change, error) {
	wanted := map[string][]lb.PendingReservation{} // new ones, by pool
	for i, ch := range changes {
		reservation := c.reservationOf(ch)
		for _, name := range c.poolsOfNew(ch) {
			if _, ok := c.base(pools[name]); !ok {
				c.log.Info("another controller may have assigned addresses: catching up", "pool", name, "writer",
					pools[name].Status.Writer)
				c.retry(changes)
				return nil, c.catchUpWithOthers(ctx)
			}
			if changes[i].reservations == nil {
				changes[i].reservations = map[string]lb.PendingReservation{}
			}
			changes[i].reservations[name] = reservation
			if !c.reserved(name, reservation) {
				wanted[name] = append(wanted[name], reservation)
			}
		}
	}
	var failed []error
	for _, name := range slices.Sorted(maps.Keys(wanted)) {
		open := c.openReservations(name)
		adds := fitting(wanted[name], slices.DeleteFunc(slices.Clone(open), func(r lb.PendingReservation) bool {
			return c.unwritable[r.Service] != nil // no write ends those
		}))
		open = slices.DeleteFunc(open, func(have lb.PendingReservation) bool {
			// The new reservation contains this one: see reservationOf.
			return slices.ContainsFunc(adds, func(add lb.PendingReservation) bool { return add.Service == have.Service })
		})
		status := p.Pools[name].Status
		status.Pending = append(open, adds...)
		status.Writer = c.writer
		if err := c.writePool(ctx, pools[name], status); err != nil {
			failed = append(failed, err)
		}
	}
	var allowed, refused []change
	for _, ch := range changes {
		if c.withoutReservation(ch) == "" {
			allowed = append(allowed, ch)
		} else {
			refused = append(refused, ch)
		}
	}
	if len(failed) > 0 {
		c.retry(refused)
		return allowed, errors.Join(failed...)
	}
	for _, ch := range refused {
		key := ch.service.Key
		c.crowded[key] = crowded{key, c.withoutReservation(ch), ch.service.Created}
	}
	return allowed, nil
}

// crowded is a Service that waits until a pool has room for its reservation.
type crowded struct {
	key     lb.Key
	pool    string
	created time.Time
}

// uncrowd adds Services to keys for which a pool may have room now. They are no more than find room: a namespace with
// many whose writes hang must not have all of them decided again whenever a write of another one ends. The namespaces
// that wait for a pool take turns, each with its oldest Service first, so that those with few come with the first.
func (c *controller) uncrowd(keys map[lb.Key]bool) {
	type row struct{ namespace, pool string }
	rows := map[row][]crowded{}
	for key, waits := range c.crowded {
		at := row{key.Namespace, waits.pool}
		rows[at] = append(rows[at], waits)
	}
	if len(c.crowded) > maxReservations {
		for _, waiting := range rows {
			slices.SortFunc(waiting, func(a, b crowded) int {
				return cmp.Or(a.created.Compare(b.created), a.key.Compare(b.key))
			})
		}
	}
	for n := 0; len(rows) > 0; {
		for at, waiting := range rows { // in another order each time, if there are more than have a turn
			if n++; n > maxReservations {
				return
			}
			keys[waiting[0].key] = true
			if rows[at] = waiting[1:]; len(rows[at]) == 0 {
				delete(rows, at)
			}
		}
	}
}

// retry has the Services of changes decided again, as nothing was written.
func (c *controller) retry(changes []change) {
	for _, ch := range changes {
		c.again[ch.service.Key] = true
	}
}

// withoutReservation returns a pool whose status lacks the reservation of a change; "" if none does.
func (c *controller) withoutReservation(ch change) (pool string) {
	for name, reservation := range ch.reservations {
		if !c.reserved(name, reservation) {
			return name
		}
	}
	return ""
}

// reservationOf returns the reservation for a change: all addresses that the Service may turn out
// to hold, should an earlier write still take place.
func (c *controller) reservationOf(ch change) lb.PendingReservation {
	return lb.PendingReservation{
		Service: ch.service.Key, UID: ch.service.UID, Version: ch.service.Version,
		Addresses: slices.Concat(ch.holding.Addresses, c.possible(ch)),
	}
}

// possible returns the addresses of earlier writes that a change does not have.
func (c *controller) possible(ch change) []netip.Addr {
	w := c.writes[ch.service.Key]
	if !w.Covers(ch.service) {
		return nil
	}
	return slices.DeleteFunc(slices.Concat(w.Addresses, w.Possible),
		func(addr netip.Addr) bool { return slices.Contains(ch.holding.Addresses, addr) })
}

// poolsOfNew names the pools of the addresses that a change adds to what the Service shows.
func (c *controller) poolsOfNew(ch change) []string {
	var names []string
	for _, addr := range ch.holding.Addresses {
		shown := slices.ContainsFunc(ch.service.Ingress, func(in lb.Ingress) bool { return in.Addr == addr })
		// An address that left its pool was reserved before, and no pool gives it to another Service.
		if name := c.book.Pool(addr); !shown && name != "" && !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return names
}

// reserved reports whether the pool's status has the reservation.
func (c *controller) reserved(pool string, reservation lb.PendingReservation) bool {
	r := c.registries[pool]
	return r != nil && slices.ContainsFunc(r.reservations, func(have lb.PendingReservation) bool {
		return sameReservation(have, reservation)
	})
}

// keepReservations returns the reservations of a change, and those of earlier writes to the same
// version of the Service.
func (c *controller) keepReservations(ch change) map[string]lb.PendingReservation {
	w := c.writes[ch.service.Key]
	if len(w.reservations) == 0 || !w.Covers(ch.service) {
		return ch.reservations
	}
	all := maps.Clone(w.reservations)
	maps.Copy(all, ch.reservations)
	return all
}

// openReservations returns the reservations of a pool whose writes may still take place.
func (c *controller) openReservations(pool string) []lb.PendingReservation {
	var open []lb.PendingReservation
	for _, w := range c.writes {
		if reservation, ok := w.reservations[pool]; ok {
			open = append(open, reservation)
		}
	}
	slices.SortFunc(open, func(a, b lb.PendingReservation) int { return a.Service.Compare(b.Service) })
	return open
}

func sameReservation(a, b lb.PendingReservation) bool {
	return a.Service == b.Service && a.UID == b.UID && a.Version == b.Version && slices.Equal(a.Addresses, b.Addresses)
}

// fitting returns those of wanted for which there is room beside those that are open. A namespace takes one only as
// long as it has less than is left: one whose writes hang takes half, the next one half of the rest. The last tenth of
// the room is for namespaces that have none.
func fitting(wanted, open []lb.PendingReservation) (fit []lb.PendingReservation) {
	type taken struct{ n, size int }
	var all taken
	of := map[string]taken{}
	take := func(r lb.PendingReservation) {
		in := of[r.Service.Namespace]
		of[r.Service.Namespace] = taken{in.n + 1, in.size + sizeOf(r)}
		all = taken{all.n + 1, all.size + sizeOf(r)}
	}
	for _, r := range open {
		take(r)
	}
	for _, r := range wanted {
		in := of[r.Service.Namespace]
		n, size := maxReservations-all.n, maxReservationsSize-all.size
		if in.n > 0 {
			n, size = n-maxReservations/10, size-maxReservationsSize/10
		}
		if in.n < n && in.size+sizeOf(r) <= size {
			fit = append(fit, r)
			take(r)
		}
	}
	return fit
}
