package main

import (
	"fmt"
	"maps"
	"net/netip"
	"runtime"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/speaker/plan"
)

// crowd is what one speaker of a large cluster sees of the others: all of them claim every VIP, and
// the owners answer.
type crowd struct {
	fakeGossip
	names, live []string // sorted
	owners      map[netip.Addr]string
	// idle is set if every second node claims only what it owns, as with policy Local and few pods.
	idle bool
}

func (c *crowd) Claims(vip netip.Addr, seen plan.Sight) map[string]plan.Claim {
	claims := make(map[string]plan.Claim, len(seen.Live))
	for i, node := range seen.Live {
		switch owner := c.owners[vip] == node; {
		case node == c.self:
		case c.idle && i%2 == 0 && !owner:
			claims[node] = plan.Claim{Reason: lb.ReasonNoBackends}
		default:
			claims[node] = plan.Claim{Answering: owner}
		}
	}
	return claims
}

func (c *crowd) Set(map[string][]netip.Addr) {}

func (c *crowd) ConfirmAfter(time.Time) {}

func (c *crowd) Sight() plan.Sight {
	var dead []string
	for _, node := range c.names {
		if _, is := slices.BinarySearch(c.live, node); !is {
			dead = append(dead, node)
		}
	}
	return plan.Sight{Speakers: plan.SpeakersOf(c.self, c.live, slices.Clone(c.live), c.names, dead)}
}

// largeCluster is a speaker that is one of many, with all that its API server and gossip say.
func largeCluster(t testing.TB, nodes, vips int) (*fakeNode, *crowd) {
	n := newRig(t).nodes[w178]
	c := &crowd{fakeGossip: fakeGossip{n}, owners: map[netip.Addr]string{}}
	all, services := fixed[string, lb.Node]{}, fixed[lb.Key, lb.Service]{}
	for i := range nodes {
		name := fmt.Sprintf("k8s-worker-%04d", i)
		if i == 0 {
			name = w178
		}
		c.names = append(c.names, name)
		all[name] = lb.Node{Name: name, Addresses: []netip.Addr{netip.AddrFrom4([4]byte{172, 27, byte(i >> 8), byte(i)})}}
	}
	slices.Sort(c.names)
	c.live = c.names
	for i := range vips {
		d := lb.Delivery{Service: lb.Key{Namespace: "default", Name: fmt.Sprint("s", i)},
			VIP: netip.AddrFrom4([4]byte{172, 26, byte(i >> 8), byte(i)}), Policy: lb.Cluster, Ready: 2}
		n.deliveries[d.Key()] = d
		services[d.Service] = lb.Service{Key: d.Service, Type: lb.LoadBalancer, Ingress: []lb.Ingress{{Addr: d.VIP}}}
		c.owners[d.VIP] = plan.Winner(d.VIP, c.names)
	}
	n.from.nodes, n.from.services, n.from.members, n.from.liveness = all, services, c, c
	n.from.pools = fixed[string, lb.Pool]{"lan": {Name: "lan",
		Ranges: []lb.Range{{From: netip.MustParseAddr("172.26.0.0"), To: netip.MustParseAddr("172.26.200.255")}}}}
	n.interfaces[0].Addresses = []netip.Prefix{netip.MustParsePrefix("172.26.236.178/16")}
	n.live = true
	n.changes.markSynced()
	return n, c
}

// torn loses most others once it has been asked what it sees.
type torn struct{ *crowd }

func (c torn) Sight() plan.Sight {
	seen := c.crowd.Sight()
	c.live = []string{c.names[0], c.self}
	return seen
}

// TestContract11AStepGoesByOneSight has most other nodes die in the midst of a step, for this one: it takes none of
// their addresses, neither in that step nor in the next one, which knows that it is this node that may be cut off.
func TestContract11AStepGoesByOneSight(t *testing.T) {
	n, c := largeCluster(t, 5, 100)
	now := time.Now()
	next := func() (own []netip.Addr) {
		n.changes.markAll()
		n.step(now)
		now = now.Add(time.Second)
		answers, _ := n.rooms.ownership.Desired()
		return slices.SortedFunc(maps.Keys(answers), netip.Addr.Compare)
	}
	next()
	before := next()
	n.from.liveness = torn{c}
	for range 3 {
		for _, vip := range next() {
			if !slices.Contains(before, vip) {
				t.Errorf("most others are dead, and it has taken %s", vip)
			}
		}
	}
}

// BenchmarkScale is what one speaker of a large cluster costs: memory, and the processor's time of a step
// after each of these.
func BenchmarkScale(b *testing.B) {
	for _, size := range []struct {
		nodes, vips int
		idle        bool
	}{{100, 1000, false}, {1000, 1000, false}, {100, 10_000, false}, {1000, 10_000, false}, {1000, 10_000, true}} {
		name := fmt.Sprintf("%d nodes, %d VIPs", size.nodes, size.vips)
		if size.idle {
			name += ", half of the nodes idle"
		}
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				n, c := largeCluster(b, size.nodes, size.vips)
				c.idle = size.idle
				now, before := time.Now(), heap()
				step := func(what string) {
					began := cpuTime()
					n.step(now)
					b.ReportMetric(float64((cpuTime()-began).Microseconds())/1000, what+"-ms")
					now = now.Add(2 * time.Second)
				}
				rest := func() (steps int) { // what a step has left for the next ones
					for again := time.Nanosecond; again == time.Nanosecond; steps++ {
						again = n.step(now)
					}
					return steps
				}
				step("start")
				rest()
				b.ReportMetric(float64(heap()-before)/(1<<20), "MiB")
				n.changes.markVIPs([]netip.Addr{netip.AddrFrom4([4]byte{172, 26, 0, 7})})
				step("claim")
				c.live = c.names[:len(c.names)-1]
				n.changes.markAll()
				step("crash")
				began, steps := cpuTime(), rest()
				b.ReportMetric(float64((cpuTime()-began).Microseconds())/1000, "rest-ms")
				b.ReportMetric(float64(steps), "rest-steps")
				c.live = c.names[:1+len(c.names)/3]
				n.changes.markAll()
				step("partition")
			}
		})
	}
}

func heap() int64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

func cpuTime() time.Duration {
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
		return 0
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}
