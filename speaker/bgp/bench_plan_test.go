package bgp

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/speaker/plan"
)

// planned is a node's plan of routes for the routers of a benchmark, and what it rests on.
type planned struct {
	*benchmark
	book  *plan.BGPBook
	facts plan.Facts
	bgp   plan.BGPFacts
	known map[netip.Addr]plan.BGPInput
}

// newPlanned is a node that delivers the benchmark's VIPs, each of a Service of its own.
func newPlanned(b *testing.B) *planned {
	p := &planned{
		benchmark: newBenchmark(b), book: &plan.BGPBook{}, known: map[netip.Addr]plan.BGPInput{},
		bgp: plan.BGPFacts{
			Peers: map[string]lb.Peer{},
			Advertisements: map[string]lb.BGPAdvertisement{"all": {Name: "all", AggregationLength: 32,
				AggregationLengthV6: 128}},
		},
	}
	whole, err := lb.ParseRange("10.1.0.0/16")
	if err != nil {
		b.Fatal(err)
	}
	p.facts = plan.Facts{
		Self: "node-1", Node: &lb.Node{Name: "node-1", Addresses: []netip.Addr{netip.MustParseAddr("10.0.0.1")}},
		Pools:      map[string]lb.Pool{"all": {Name: "all", Ranges: []lb.Range{whole}}},
		Interfaces: []lb.Interface{{Name: "lo", Up: true, Addresses: []netip.Prefix{netip.MustParsePrefix("127.0.0.1/8")}}},
	}
	for i, s := range p.sinks {
		p.bgp.Peers[p.names[i]] = lb.Peer{
			Name: p.names[i], LocalASN: 64500, PeerASN: 64501, Addr: netip.MustParseAddr("127.0.0.1"),
			Port: uint16(s.listener.Addr().(*net.TCPAddr).Port), ConnectTime: time.Second,
		}
	}
	for prefix := range vips(benchmarkVIPs, false) {
		vip := prefix.Addr()
		key := lb.Key{Namespace: "default", Name: fmt.Sprint("s", vip)}
		delivery := &lb.Delivery{Service: key, VIP: vip, Policy: lb.Cluster, Ready: 2, LocalReady: 1}
		p.known[vip] = plan.BGPInput{VIP: vip, Holders: []plan.Holder{{Service: key, Delivery: delivery}}}
	}
	return p
}

// all plans everything, and tells the actor.
func (p *planned) all() {
	inputs := make([]plan.BGPInput, 0, len(p.known))
	for _, in := range p.known {
		inputs = append(inputs, in)
	}
	p.book.PlanAll(p.facts, p.bgp, inputs, nil)
	p.a.Set(p.book.Sessions())
}

// BenchmarkClaimsColdSync is BenchmarkColdSync from the node's claims on: plan, sessions, and all
// that two routers hear.
func BenchmarkClaimsColdSync(b *testing.B) {
	p := newPlanned(b)
	var spent time.Duration
	b.ReportAllocs()
	for b.Loop() {
		began := cpuTime(b)
		p.all()
		p.wait()
		spent += cpuTime(b) - began
		b.StopTimer()
		if heard := len(p.a.Statuses()); heard != 2 || len(p.book.Sessions()["tor-1"].Routes) != benchmarkVIPs {
			b.Fatalf("%d sessions, %d routes", heard, len(p.book.Sessions()["tor-1"].Routes))
		}
		p.book = &plan.BGPBook{}
		p.a.Set(nil)
		for len(p.a.Statuses()) > 0 {
			time.Sleep(time.Millisecond)
		}
		b.StartTimer()
	}
	b.ReportMetric(float64(spent.Microseconds())/1000/float64(b.N), "cpu-ms/op")
}

// BenchmarkClaimToWire ends the claim of one VIP among 5,000, and begins it again. It reports how
// long it takes from there until both routers have heard of it.
func BenchmarkClaimToWire(b *testing.B) {
	p := newPlanned(b)
	p.all()
	p.wait()
	time.Sleep(10 * time.Millisecond) // until the last bytes have arrived
	for _, s := range p.sinks {
		select {
		case <-s.heard:
		default:
		}
	}
	vip := netip.MustParseAddr("10.1.0.77")
	with := p.known[vip]
	without := plan.BGPInput{VIP: vip, Holders: []plan.Holder{{Service: with.Holders[0].Service}}}
	var took []time.Duration
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		began := time.Now()
		p.known[vip] = []plan.BGPInput{without, with}[i%2]
		_, changed := p.book.Plan(p.facts, p.bgp, map[netip.Addr]bool{vip: true},
			func(vip netip.Addr) (plan.BGPInput, bool) { in, ok := p.known[vip]; return in, ok },
			func(netip.Prefix) bool { return true })
		if !changed {
			b.Fatal("no change")
		}
		p.a.Set(p.book.Sessions())
		for _, s := range p.sinks {
			<-s.heard
		}
		took = append(took, time.Since(began))
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)*99/100].Microseconds())/1000, "p99-ms")
}

// BenchmarkClaimsResync plans the same claims again, of which no router hears.
func BenchmarkClaimsResync(b *testing.B) {
	p := newPlanned(b)
	p.all()
	p.wait()
	time.Sleep(10 * time.Millisecond)
	before := p.sinks[0].bytes.Load() + p.sinks[1].bytes.Load()
	b.ReportAllocs()
	for b.Loop() {
		p.all()
		p.wait()
	}
	time.Sleep(10 * time.Millisecond)
	if sent := p.sinks[0].bytes.Load() + p.sinks[1].bytes.Load() - before; sent != 0 {
		b.Fatalf("%d bytes", sent)
	}
	b.ReportMetric(0, "bytes-on-wire/op")
}
