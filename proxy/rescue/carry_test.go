package rescue

import (
	"errors"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/links"
	"github.com/landfall-lb/landfall/proxy/tunnel"
)

// TestTunnelsAreMadeWhereRingsNeedThem plays a node with another one behind a router.
func TestTunnelsAreMadeWhereRingsNeedThem(t *testing.T) {
	vip, self, near, far, third := addr("192.0.2.1"), addr("10.0.1.1"), addr("10.0.1.2"), addr("10.0.2.1"), addr("10.0.3.1")
	routed := links.Neighbor{Routed: true, Link: 2, MTU: 1500}
	k := &fakeKernel{neighbor: map[netip.Addr]links.Neighbor{near: there(1), far: routed, third: routed}, tunnel: 7}
	actor := newActor(fakeDeps, k)
	step := func(what string, w Desired, targets ...netip.Addr) {
		t.Helper()
		actor.set(w)
		actor.looked = time.Time{}
		if _, err := actor.step(t.Context()); err != nil {
			t.Errorf("%s: %v", what, err)
		}
		if got := actor.written[lb.IPv4].nodes(); !slices.Equal(got, targets) {
			t.Errorf("%s: targets %v, want %v", what, got, targets)
		}
	}
	type nodes = map[netip.Addr][]netip.Addr
	ring := func(all ...netip.Addr) Desired { return Desired{Ring: nodes{vip: all}} }

	step("a previous owner behind a router", Desired{Previous: nodes{vip: {far}}})
	if k.carried != nil {
		t.Errorf("a tunnel for a previous owner: %+v", k.carried)
	}
	step("a ring on the network", ring(near), near)
	if k.carried != nil {
		t.Errorf("a tunnel for a ring on the network: %+v", k.carried)
	}
	k.cannotCarry = errors.New("no such interface type")
	step("it cannot be made", ring(far, near), near)
	k.cannotCarry = nil
	actor.SetNodes([]netip.Addr{addr("fd00::1"), self}, []netip.Addr{third, addr("fd00::2"), near, far})
	step("it can", ring(far, near), near, far)
	want := tunnel.Desired{Self: self, Nodes: []netip.Addr{near, far, third}, Peers: []netip.Addr{far}, MTU: 1500}
	if got := k.carried; got == nil || got.Self != want.Self || !slices.Equal(got.Nodes, want.Nodes) ||
		!slices.Equal(got.Peers, want.Peers) || got.MTU != want.MTU {
		t.Errorf("tunnel %+v, want %+v", got, want)
	}
	if got := actor.written[lb.IPv4].carried; len(got) != 1 || got[far] != 7 {
		t.Errorf("carried %v", got)
	}

	// A new node is known before a ring has it, without a wait for the next look.
	actor.looked = time.Now()
	actor.SetNodes([]netip.Addr{self}, []netip.Addr{near, far, third, addr("10.0.4.1")})
	if _, err := actor.step(t.Context()); err != nil || len(k.carried.Nodes) != 4 {
		t.Errorf("with another node: %v, %+v", err, k.carried)
	}
	writes := k.writes
	k.tunnel, k.refused = 8, 5 // another program has removed the interface, and ours is another one
	step("made anew", ring(far, near), near, far)
	if k.writes == writes || actor.written[lb.IPv4].carried[far] != 8 {
		t.Errorf("the rules lead to interface %d after %d writes", actor.written[lb.IPv4].carried[far], k.writes-writes)
	}
	k.refused = 2 // with other rules, which count anew
	step("", ring(far, near), near, far)
	k.cannotCarry, k.refused = errors.New("list of chains: interrupted"), 0 // before anything was counted
	step("it cannot be looked at", ring(far, near), near, far)
	k.cannotCarry, k.refused = nil, 2
	step("it can", ring(far, near), near, far)
	if actor.Refused() != 7 {
		t.Errorf("%d packets were refused", actor.Refused())
	}
	step("no ring any more", Desired{}, near)
	if k.carried != nil {
		t.Errorf("a tunnel without a ring: %+v", k.carried)
	}
}

// A tunnel that cannot be removed at once is removed later, also if there is nothing else to look after.
func TestContract6ATunnelThatCannotBeRemovedIsLookedAfter(t *testing.T) {
	k := &fakeKernel{carried: &tunnel.Desired{}, cannotEnd: errors.New("list of routes: interrupted")}
	a := newActor(fakeDeps, k)
	a.Begin(nil)
	for _, want := range []time.Duration{lookEvery, 0} {
		a.looked = time.Time{}
		if next, err := a.step(t.Context()); err != nil || next != want {
			t.Errorf("the next look is after %s, %v; want %s", next, err, want)
		}
	}
	if k.carried != nil {
		t.Error("the tunnel is still there")
	}
}

// What keeps one family without a tunnel is said until it is over, whatever becomes of the other.
func TestWhyThereIsNoTunnelIsSaidOfEachFamily(t *testing.T) {
	var said []string
	a := newActor(Deps{Log: fakeDeps.Log, Families: []lb.Family{lb.IPv4, lb.IPv6},
		NoTunnel: func(text string) { said = append(said, text) }}, &fakeKernel{})
	for _, of := range []struct {
		family lb.Family
		err    error
	}{{lb.IPv4, errors.New("four")}, {lb.IPv6, errors.New("six")}, {lb.IPv4, nil}, {lb.IPv6, nil}} {
		a.tunnels[of.family] = a.tell(of.family, a.tunnels[of.family], of.err)
	}
	if want := []string{"four", "six", "six", ""}; !slices.Equal(said, want) {
		t.Errorf("said %q, want %q", said, want)
	}
}
