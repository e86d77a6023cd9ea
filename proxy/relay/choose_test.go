package relay

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
	"github.com/landfall-lb/landfall/proxy/relayfeed/wire"
)

// choosing is a table with one Service, for which tests choose.
type choosing struct {
	*table
	random *rand.Rand
}

// newChoosing returns a table with a port at frontend, and one at the next port of the address with the same backends:
// 10.0.0.1, 10.0.0.2 and so on, one for each weight.
func newChoosing(scheduler plan.Scheduler, weights ...uint8) choosing {
	c := choosing{newTable(time.Now), rand.New(rand.NewPCG(1, 2))}
	c.set(scheduler, weights...)
	return c
}

func (c choosing) set(scheduler plan.Scheduler, weights ...uint8) {
	r := &plan.Relayed{Scheduler: scheduler}
	for i := range 2 {
		port := plan.RelayedPort{Name: fmt.Sprint(i), Protocol: lb.TCP, Frontends: []plan.RelayedFrontend{
			{Addr: netip.AddrPortFrom(frontend.Addr(), frontend.Port()+uint16(i))}}}
		for j, weight := range weights {
			if weight > 0 {
				port.Cluster = append(port.Cluster, plan.RelayedBackend{Addr: backendAt(j), Weight: weight})
			}
		}
		r.Ports = append(r.Ports, port)
	}
	c.take(wire.Message{Services: []wire.Service{{Key: web, Relayed: r}}})
}

func backendAt(i int) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}).Next(), 8080)
}

// choose returns which backend a connection gets, after others.
func (c choosing) choose(client, to netip.AddrPort, tried ...int) int {
	var before []netip.AddrPort
	for _, i := range tried {
		before = append(before, backendAt(i))
	}
	w, _, _ := c.find(target{lb.TCP, to})
	b, ok := w.service.choose(c.chooser(w, client, to, c.random.Uint64), before)
	if !ok {
		return -1
	}
	b4 := b.Addr().As4()
	return int(b4[2])<<8 + int(b4[3]) - 1
}

// chosen returns which backends so many connections get, as letters.
func (c choosing) chosen(n int, to netip.AddrPort) string {
	var all strings.Builder
	for range n {
		fmt.Fprintf(&all, "%c", 'a'+rune(c.choose(frontend, to)))
	}
	return all.String()
}

// As IPVS' rr has it, one backend comes after the other, at each port. One that did not answer is left out and has
// no turn to catch up on, and one that comes or goes does not begin the turns anew.
func TestRoundRobin(t *testing.T) {
	c := newChoosing(plan.RoundRobin, 1, 1, 1)
	other := netip.AddrPortFrom(frontend.Addr(), frontend.Port()+1)
	for _, step := range []struct {
		what string
		do   func()
		want string
	}{
		{"at first", func() {}, "abcabca"},
		{"after connections to another port", func() {
			if got := c.chosen(4, other); got != "abca" {
				t.Errorf("at the other port: %s", got)
			}
		}, "bcabc"},
		{"after one did not answer", func() { c.suspect(c.services[id{web, lb.TCP}], backendAt(1)) }, "acac"},
		{"after it did", func() { c.services[id{web, lb.TCP}].trust(backendAt(1)) }, "bacbacb"},
		{"without one", func() { c.set(plan.RoundRobin, 1, 0, 1) }, "acac"},
		{"with it again", func() { c.set(plan.RoundRobin, 1, 1, 1) }, "bacbacb"},
	} {
		step.do()
		if got := c.chosen(len(step.want), frontend); got != step.want {
			t.Errorf("%s: %s, not %s", step.what, got, step.want)
		}
	}
	c.set(plan.Random, 1, 1, 1)
	if left := c.services[id{web, lb.TCP}].turns; len(left) > 0 {
		t.Errorf("%v is left", left)
	}
}

// The families of a port have other backends: each takes its turns, whatever comes in the other.
func TestFamiliesTakeTurnsByThemselves(t *testing.T) {
	c := choosing{newTable(time.Now), rand.New(rand.NewPCG(1, 2))}
	r := &plan.Relayed{Scheduler: plan.RoundRobin}
	var frontends []netip.AddrPort
	for _, prefix := range []string{"192.0.2.", "2001:db8::"} {
		at := func(host string) netip.AddrPort { return netip.AddrPortFrom(netip.MustParseAddr(prefix+host), 80) }
		frontends = append(frontends, at("9"))
		r.Ports = append(r.Ports, plan.RelayedPort{Name: "http", Protocol: lb.TCP,
			Frontends: []plan.RelayedFrontend{{Addr: at("9")}},
			Cluster:   []plan.RelayedBackend{{Addr: at("1"), Weight: 1}, {Addr: at("2"), Weight: 1}}})
	}
	c.take(wire.Message{Services: []wire.Service{{Key: web, Relayed: r}}})
	var got []string
	for range 3 {
		for _, to := range frontends {
			w, _, _ := c.find(target{lb.TCP, to})
			b, _ := w.service.choose(c.chooser(w, to, to, c.random.Uint64), nil)
			got = append(got, b.Addr().String())
		}
	}
	want := []string{"192.0.2.1", "2001:db8::1", "192.0.2.2", "2001:db8::2", "192.0.2.1", "2001:db8::1"}
	if !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}

// Contract clause 2: what comes for a frontend with policy Local goes to endpoints of the node alone, by each scheduler,
// and what comes for another frontend of the same port to all of them.
func TestContract2LocalFrontendsHaveTheNodesBackends(t *testing.T) {
	schedulers := []plan.Scheduler{plan.Random, plan.RoundRobin, plan.WeightedRoundRobin, plan.SourceHash,
		plan.DestinationHash, plan.Maglev, plan.LeastConnections, plan.WeightedLeastConnections,
		plan.ShortestExpectedDelay, plan.NeverQueue}
	for _, prefix := range []string{"192.0.2.", "2001:db8::"} {
		at := func(host int) netip.AddrPort {
			return netip.AddrPortFrom(netip.MustParseAddr(fmt.Sprint(prefix, host)), 80)
		}
		all := func(hosts ...int) (backends []plan.RelayedBackend) {
			for _, host := range hosts {
				backends = append(backends, plan.RelayedBackend{Addr: at(host), Weight: 1})
			}
			return backends
		}
		for _, protocol := range []lb.Protocol{lb.TCP, lb.UDP} {
			for _, scheduler := range schedulers {
				c := choosing{newTable(time.Now), rand.New(rand.NewPCG(1, 2))}
				c.take(wire.Message{Services: []wire.Service{{Key: web, Relayed: &plan.Relayed{Scheduler: scheduler,
					Ports: []plan.RelayedPort{{Protocol: protocol, Cluster: all(1, 2, 3, 4), Local: all(2, 3),
						Frontends: []plan.RelayedFrontend{{Addr: at(8), Local: true}, {Addr: at(9)}}}}}}}})
				for _, local := range []bool{true, false} {
					to := map[bool]netip.AddrPort{true: at(8), false: at(9)}[local]
					w, _, _ := c.find(target{protocol, to})
					got := map[netip.AddrPort]bool{}
					for i := range 500 {
						client := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)}), 1024)
						b, ok := w.service.choose(c.chooser(w, client, to, c.random.Uint64), nil)
						if got[b] = true; !ok {
							t.Fatalf("%s, %s: nothing is chosen", scheduler, protocol)
						}
					}
					elsewhere := got[at(1)] || got[at(4)]
					if local && elsewhere || !local && !elsewhere && scheduler != plan.DestinationHash { // that has one for all
						t.Errorf("%s, %s, local %v: %v are chosen", scheduler, protocol, local, got)
					}
				}
			}
		}
	}
}

// As IPVS' wrr has it, of as many connections as all weights together each backend has as many as its weight, spread
// over all of them.
func TestWeightedRoundRobin(t *testing.T) {
	for _, weights := range [][]uint8{{1, 1, 1}, {3, 1}, {5, 3, 2}, {100, 1, 1}, {7, 7, 1, 50, 2}} {
		total := 0
		for _, weight := range weights {
			total += int(weight)
		}
		c := newChoosing(plan.WeightedRoundRobin, weights...)
		counts, heaviest := make([]int, len(weights)), slices.Index(weights, slices.Max(weights))
		waited, longest := 0, 0
		for i := range 3 * total {
			got := c.choose(frontend, frontend)
			counts[got]++
			if waited++; got == heaviest {
				waited = 0
			}
			longest = max(longest, waited)
			for j, n := range counts {
				if (i+1)%total == 0 && n != (i+1)/total*int(weights[j]) {
					t.Errorf("%d: %d of %d connections for %d", weights, n, i+1, j)
				}
			}
		}
		if most := total/int(weights[heaviest]) + len(weights); longest > most {
			t.Errorf("%d: the heaviest waits for %d connections, want %d at most", weights, longest, most)
		}
	}
	// One after the other and not in blocks.
	if got := newChoosing(plan.WeightedRoundRobin, 5, 1, 1).chosen(7, frontend); got != "aaabcaa" {
		t.Errorf("%s", got)
	}
}

// Of what a scheduler hashes, all and nothing else decides; each backend has its share; without one backend only its
// connections move, and a few more, as with Maglev's tables; and another relay chooses the same.
func TestHashedByTheirDefinition(t *testing.T) {
	weights := []uint8{6, 2, 4, 4}
	for _, tt := range []struct {
		scheduler                plan.Scheduler
		address, port, frontends bool // decide
	}{
		{plan.SourceHash, true, false, false},
		{plan.Maglev, true, true, false},
		{plan.DestinationHash, false, false, true},
	} {
		one, another := newChoosing(tt.scheduler, weights...), newChoosing(tt.scheduler, weights...)
		without := newChoosing(tt.scheduler, 6, 2, 0, 4)
		const n = 4000
		counts, moved := make([]int, len(weights)), 0
		differ := map[string]bool{}
		for i := range n {
			client := netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, 0, byte(i >> 8), byte(i)}), uint16(1024+i))
			to := frontend
			if tt.frontends {
				to = netip.AddrPortFrom(client.Addr(), frontend.Port())
				for _, c := range []choosing{one, another, without} {
					c.at[target{lb.TCP, to}] = c.at[target{lb.TCP, frontend}]
				}
			}
			got := one.choose(client, to)
			counts[got]++
			if again := another.choose(client, to); again != got {
				t.Fatalf("%s: another relay chooses %d, not %d", tt.scheduler, again, got)
			}
			if now := without.choose(client, to); now != got {
				moved++
				if now == 2 {
					t.Fatalf("%s: a backend that is not there", tt.scheduler)
				}
			}
			differs := func(what string, client, to netip.AddrPort) {
				differ[what] = differ[what] || one.choose(client, to) != got
			}
			differs("address", netip.AddrPortFrom(client.Addr().Next(), client.Port()), to)
			differs("port", netip.AddrPortFrom(client.Addr(), client.Port()+1), to)
			if !tt.frontends {
				differs("frontend", client, netip.AddrPortFrom(frontend.Addr(), frontend.Port()+1))
			}
		}
		for i, got := range counts {
			want := n * int(weights[i]) / 16
			if got < want*85/100 || got > want*115/100 {
				t.Errorf("%s: %d of %d for backend %d, want about %d", tt.scheduler, got, n, i, want)
			}
		}
		if least := counts[2]; moved < least || moved > least+n/8 {
			t.Errorf("%s: without a backend that has %d, %d of %d move", tt.scheduler, least, moved, n)
		}
		if differ["address"] != tt.address || differ["port"] != tt.port || differ["frontend"] {
			t.Errorf("%s: the choice follows %v", tt.scheduler, differ)
		}
	}
}

// The connections of a backend that does not answer spread over all others, each to the same one again.
func TestHashedWithoutABackend(t *testing.T) {
	c := newChoosing(plan.SourceHash, 1, 1, 1, 1)
	counts := make([]int, 4)
	for i := range 2000 {
		client := netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, 0, byte(i >> 8), byte(i)}), 1024)
		first := c.choose(client, frontend)
		next := c.choose(client, frontend, first)
		if next == first || c.choose(client, frontend, first) != next {
			t.Fatalf("%s has %d, and then %d", client, first, next)
		}
		if first == 0 {
			counts[next]++
		}
		c.suspect(c.services[id{web, lb.TCP}], backendAt(first))
		if got := c.choose(client, frontend); got != next {
			t.Errorf("%s has %d while the one before is tried last, not %d", client, got, next)
		}
		c.services[id{web, lb.TCP}].trust(backendAt(first))
	}
	if least := slices.Min(counts[1:]); least < 100 {
		t.Errorf("those of the first go to %v", counts)
	}
	if got := c.choose(frontend, frontend, 0, 1, 2, 3); got != -1 {
		t.Errorf("after all were tried: %d", got)
	}
}

// At random each backend has the same chance, also where the tables of a Service would be too many.
func TestDrawnAtRandom(t *testing.T) {
	even := func(c choosing, name string) {
		t.Helper()
		counts := make([]int, 3)
		for range 3000 {
			counts[c.choose(frontend, frontend)]++
		}
		if slices.Min(counts) < 850 {
			t.Errorf("%s: %v", name, counts)
		}
	}
	even(newChoosing("", 1, 1, 1), "random")
	c := newChoosing(plan.SourceHash, 1, 1, 1)
	r := c.services[id{web, lb.TCP}].Relayed
	for i := range plan.MaxSlots / int(plan.SlotSizes[0]) {
		r.Ports = append(r.Ports, plan.RelayedPort{Name: fmt.Sprint("more", i), Protocol: lb.TCP,
			Frontends: []plan.RelayedFrontend{{Addr: netip.AddrPortFrom(netip.MustParseAddr("198.51.100.2"), uint16(i))}},
			Cluster:   []plan.RelayedBackend{{Addr: backendAt(i)}, {Addr: backendAt(i + 1)}}})
	}
	c.take(wire.Message{Services: []wire.Service{{Key: web, Relayed: &r}}})
	even(c, "too many tables")

	weights := make([]uint8, 200)
	for i := range weights {
		weights[i] = 1
	}
	c = newChoosing(plan.SourceHash, weights...)
	r = c.services[id{web, lb.TCP}].Relayed
	for i := range 100 { // of which none has room for as many slots as there are backends
		p := plan.RelayedPort{Name: fmt.Sprint("more", i), Protocol: lb.TCP,
			Frontends: []plan.RelayedFrontend{{Addr: netip.AddrPortFrom(netip.MustParseAddr("198.51.100.2"), uint16(i))}}}
		for j := range weights {
			p.Cluster = append(p.Cluster, plan.RelayedBackend{Addr: backendAt(i + j)})
		}
		r.Ports = append(r.Ports, p)
	}
	c.take(wire.Message{Services: []wire.Service{{Key: web, Relayed: &r}}})
	reached := map[int]bool{}
	for i := range 20_000 {
		reached[c.choose(netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, 0, byte(i >> 8), byte(i)}), 1), frontend)] = true
	}
	if len(reached) != len(weights) {
		t.Errorf("%d of %d backends get connections", len(reached), len(weights))
	}
}

// A table stays as it is while its backends do, and ports with the same backends share one.
func TestTablesAreKept(t *testing.T) {
	c := newChoosing(plan.Maglev, 1, 1, 1)
	tables := func() *slots {
		w, _, _ := c.find(target{lb.TCP, frontend})
		other, _, _ := c.find(target{lb.TCP, netip.AddrPortFrom(frontend.Addr(), frontend.Port()+1)})
		if w.slots == nil || w.slots != other.slots {
			t.Fatalf("%p and %p", w.slots, other.slots)
		}
		return w.slots
	}
	before := tables()
	if c.set(plan.Maglev, 1, 1, 1); tables() != before {
		t.Error("the same backends have another table")
	}
	if c.set(plan.Maglev, 1, 2, 1); tables() == before {
		t.Error("other weights have the same table")
	}
}
