package main

import (
	"context"
	"errors"
	"maps"
	"net/netip"
	"slices"

	"github.com/landfall-lb/landfall/controller/plan"
	"github.com/landfall-lb/landfall/internal/kube"
	"github.com/landfall-lb/landfall/internal/lb"
)

// The Lease makes sure that one controller leads, as far as clocks and networks behave: a write may
// arrive late, a process may sleep and go on, and a second Landfall may be installed. Claims make
// sure that even then no address goes to two Services.
//
// Before a Service is given an address, that is claimed in the status of the pool that has it. The
// write of the status is conditional on the version of the pool that the controller has, which is
// one of two: that which its own last claim made, or one that it read before it caught up with all
// Services. So all that others have given away of that pool until then is known, be it from a
// Service's status or from their claims; and whatever they claim after changes the version. A claim
// is dropped once the Service shows another version than the write was decided on, as that write
// will then be refused for ever.

// maxClaims bounds the claims in a pool's status, so that the object stays small.
const maxClaims = 500

// registry is what is known of the claims of one pool.
type registry struct {
	// caughtUp is a version of the pool that was read before the controller last caught up with the
	// Services.
	caughtUp string
	// version is that which the last write of ours has made.
	version string
	claims  []lb.PoolClaim // those that it has
}

// base returns the version of a pool on which claims may be made; false when the controller has to
// catch up first.
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

// catchUpWithOthers makes base return a version for all pools as they are now, and takes note of
// what others have claimed.
func (c *controller) catchUpWithOthers(ctx context.Context) error {
	pools := c.pools.All() // before
	if err := c.catchUp(ctx); err != nil {
		return err
	}
	for name, pool := range pools {
		if _, ok := c.base(pool); ok {
			continue
		}
		// What others have claimed is not claimed by this controller: they may change their mind as long
		// as it is not the last writer.
		c.registries[name] = &registry{caughtUp: pool.Version}
		c.disown(name)
		for _, claim := range pool.Status.Claims {
			c.adopt(name, claim)
		}
	}
	return nil
}

// disown forgets what was adopted of a pool and never sent by this controller: whoever claimed it
// may have changed their mind since.
func (c *controller) disown(pool string) {
	for key, w := range c.writes {
		if _, ok := w.claims[pool]; !ok || !w.adopted {
			continue
		}
		if delete(w.claims, pool); len(w.claims) == 0 {
			delete(c.writes, key)
			c.again[key] = true
		}
	}
}

// adopt takes a claim of another controller for a write of which nobody knows whether it takes
// place.
func (c *controller) adopt(pool string, claim lb.PoolClaim) {
	s, ok := c.services.Get(claim.Service)
	if !ok || s.UID != claim.UID || s.Version != claim.Version {
		return // the write has taken place, or never will
	}
	w := c.writes[claim.Service]
	if !w.Covers(s) {
		w = write{Pending: plan.Pending{UID: claim.UID, Version: claim.Version, Addresses: claim.Addresses}, adopted: true}
	}
	for _, addr := range claim.Addresses {
		if !slices.Contains(w.Addresses, addr) && !slices.Contains(w.Perhaps, addr) {
			w.Perhaps = append(slices.Clip(w.Perhaps), addr)
		}
	}
	if w.claims == nil {
		w.claims = map[string]lb.PoolClaim{}
	}
	w.claims[pool] = claim
	c.writes[claim.Service] = w
	c.again[claim.Service] = true
}

// claim claims what the changes add to Services, and returns those changes for which that is done.
// The others are to be decided again: with an error after a while, else at once.
func (c *controller) claim(ctx context.Context, p plan.Plan, pools map[string]lb.Pool,
	changes []change) ([]change, error) {
	wanted := map[string][]lb.PoolClaim{} // new ones, by pool
	for i, ch := range changes {
		claim := c.claimOf(ch)
		for _, name := range c.poolsOfNew(ch) {
			if _, ok := c.base(pools[name]); !ok {
				c.log.Info("another controller may have assigned addresses: catching up", "pool", name, "writer",
					pools[name].Status.Writer)
				c.retry(changes)
				return nil, c.catchUpWithOthers(ctx)
			}
			if changes[i].claims == nil {
				changes[i].claims = map[string]lb.PoolClaim{}
			}
			changes[i].claims[name] = claim
			if !c.claimed(name, claim) {
				wanted[name] = append(wanted[name], claim)
			}
		}
	}
	var failed []error
	for _, name := range slices.Sorted(maps.Keys(wanted)) {
		open := c.openClaims(name)
		adds := first(wanted[name], maxClaims-len(open))
		open = slices.DeleteFunc(open, func(have lb.PoolClaim) bool {
			// One that the new one has in it: see claimOf.
			return slices.ContainsFunc(adds, func(claim lb.PoolClaim) bool { return claim.Service == have.Service })
		})
		status := p.Pools[name].Status
		status.Claims = append(open, adds...)
		status.Writer = c.writer
		if err := c.writePool(ctx, pools[name], status); err != nil {
			failed = append(failed, err)
		}
	}
	var allowed, refused []change
	for _, ch := range changes {
		if c.allClaimed(ch) {
			allowed = append(allowed, ch)
		} else {
			refused = append(refused, ch)
		}
	}
	c.retry(refused)
	return allowed, errors.Join(failed...)
}

// retry has the Services of changes decided again, as nothing was written.
func (c *controller) retry(changes []change) {
	for _, ch := range changes {
		c.again[ch.service.Key] = true
	}
}

func (c *controller) allClaimed(ch change) bool {
	for name, claim := range ch.claims {
		if !c.claimed(name, claim) {
			return false
		}
	}
	return true
}

// claimOf returns the claim for a change: all that the Service may turn out to hold, should an
// earlier write still take place.
func (c *controller) claimOf(ch change) lb.PoolClaim {
	return lb.PoolClaim{
		Service: ch.service.Key, UID: ch.service.UID, Version: ch.service.Version,
		Addresses: slices.Concat(ch.holding.Addresses, c.perhaps(ch)),
	}
}

// perhaps returns the addresses of earlier writes that a change does not have.
func (c *controller) perhaps(ch change) []netip.Addr {
	w := c.writes[ch.service.Key]
	if !w.Covers(ch.service) {
		return nil
	}
	return slices.DeleteFunc(slices.Concat(w.Addresses, w.Perhaps),
		func(addr netip.Addr) bool { return slices.Contains(ch.holding.Addresses, addr) })
}

// poolsOfNew names the pools of the addresses that a change adds to what the Service shows.
func (c *controller) poolsOfNew(ch change) []string {
	var names []string
	for _, addr := range ch.holding.Addresses {
		shown := slices.ContainsFunc(ch.service.Ingress, func(in lb.Ingress) bool { return in.Addr == addr })
		// What is in no pool any more was claimed while it was, and no pool gives it to anybody else.
		if name := c.book.Pool(addr); !shown && name != "" && !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return names
}

// claimed reports whether the pool's status has the claim.
func (c *controller) claimed(pool string, claim lb.PoolClaim) bool {
	r := c.registries[pool]
	return r != nil && slices.ContainsFunc(r.claims, func(have lb.PoolClaim) bool { return sameClaim(have, claim) })
}

// keepClaims returns the claims of a change, and those of earlier writes to the same version of the
// Service.
func (c *controller) keepClaims(ch change) map[string]lb.PoolClaim {
	w := c.writes[ch.service.Key]
	if len(w.claims) == 0 || !w.Covers(ch.service) {
		return ch.claims
	}
	all := maps.Clone(w.claims)
	maps.Copy(all, ch.claims)
	return all
}

// openClaims returns the claims of a pool whose writes may still take place.
func (c *controller) openClaims(pool string) []lb.PoolClaim {
	var open []lb.PoolClaim
	for _, w := range c.writes {
		if claim, ok := w.claims[pool]; ok {
			open = append(open, claim)
		}
	}
	slices.SortFunc(open, func(a, b lb.PoolClaim) int { return a.Service.Compare(b.Service) })
	return open
}

func sameClaim(a, b lb.PoolClaim) bool {
	return a.Service == b.Service && a.UID == b.UID && a.Version == b.Version && slices.Equal(a.Addresses, b.Addresses)
}

// first returns the first n of all, none if n is negative.
func first[T any](all []T, n int) []T { return all[:max(0, min(n, len(all)))] }
