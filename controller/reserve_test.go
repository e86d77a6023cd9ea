package main

import (
	"testing"

	"github.com/landfall-lb/landfall/internal/lb"
)

// stalledReservation returns a cluster in which a controller has reserved an address for the Service a, and is waiting
// for the answer to its write to the Service.
func stalledReservation(t *testing.T) (*cluster, *process) {
	t.Helper()
	c := newCluster()
	c.addPool("p", "10.0.0.0/28")
	c.put(service("a"))
	p := newProcess(c)
	p.takeOver(t)
	c.fail(nil, stall)
	_, _ = p.step(t.Context())
	if pool := c.pools["p"].Status; len(pool.Pending) != 1 || pool.Writer != p.writer {
		t.Fatalf("%s reserved %v", pool.Writer, pool.Pending)
	}
	return c, p
}

// A controller drops the reservation of another one, as the Service is gone. It is the last writer of the
// reservations then: the other must not take them for its own.
func TestContract8WhoDropsAReservationIsItsWriter(t *testing.T) {
	c, other := stalledReservation(t)
	p := newProcess(c)
	c.remove("a")
	p.takeOver(t)
	_, _ = p.step(t.Context())
	if pool := c.pools["p"].Status; len(pool.Pending) != 0 || pool.Writer != p.writer {
		t.Errorf("%v is left, written by %s, want nothing, written by %s", pool.Pending, pool.Writer, p.writer)
	}
	other.deliverPools()
	if base, ok := other.base(c.pools["p"]); ok {
		t.Errorf("the other reserves on version %s without catching up", base)
	}
}

// A webhook refuses a Service, so the controller drops its reservation. The answer to that is lost: the reservation
// may be gone, so it allows no further write.
func TestContract8AReservationThatMayBeGoneAllowsNoWrite(t *testing.T) {
	c := newCluster()
	c.webhook, c.invalid = true, map[lb.Key]bool{key("a"): true}
	c.addPool("p", "10.0.0.0/28")
	c.put(service("a"))
	p := newProcess(c)
	p.takeOver(t)
	_, _ = p.step(t.Context())
	made := c.pools["p"].Status.Pending
	if len(made) != 1 || !p.reserved("p", made[0]) {
		t.Fatalf("reserved %v", made)
	}
	c.fail(lost)
	_, _ = p.step(t.Context())
	if left := c.pools["p"].Status.Pending; len(left) > 0 || p.reserved("p", made[0]) {
		t.Errorf("the pool has %v, and the controller counts on %v", left, made)
	}
}

// A controller writes the counts of a pool beside the reservation of another one, which it has adopted. From then on
// it may act on that reservation, so the other must catch up before it drops it.
func TestContract8WhoCountsBesideAReservationIsItsWriter(t *testing.T) {
	c, _ := stalledReservation(t)
	p := newProcess(c)
	pool := c.pools["p"]
	pool.Status.AssignedIPv4 = "2" // as before another Service was deleted
	c.pools["p"] = pool
	p.takeOver(t)
	c.fail(refused) // its own reservation, but not what comes after that
	_, _ = p.step(t.Context())
	pending := c.pools["p"].Status.Pending
	if len(pending) != 1 || !p.reserved("p", pending[0]) || c.pools["p"].Status.Writer != p.writer {
		t.Errorf("the controller counts on %v, which %s wrote", pending, c.pools["p"].Status.Writer)
	}
}
