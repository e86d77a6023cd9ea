package bgp

import (
	"context"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/speaker/plan"
)

const benchmarkVIPs = 5000

// sink is a router that takes everything, and counts it.
type sink struct {
	listener net.Listener
	bytes    atomic.Int64
	heard    chan struct{} // poked when something has come
}

func newSink(b *testing.B) *sink {
	listener, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	s := &sink{listener: listener, heard: make(chan struct{}, 1)}
	b.Cleanup(func() { listener.Close() })
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			go s.serve(conn)
		}
	}()
	return s
}

func (s *sink) serve(conn net.Conn) {
	defer conn.Close()
	o := dualOpen()
	o.hold = 0 // so that only what is to be measured is on the wire
	r := &reader{from: conn}
	if _, err := r.next(); err != nil { // OPEN
		return
	}
	conn.Write(append(o.serialize(), keepalive()...))
	if _, err := r.next(); err != nil { // KEEPALIVE
		return
	}
	buf := make([]byte, 1<<16)
	for {
		n, err := conn.Read(buf)
		if err != nil {
			return
		}
		s.bytes.Add(int64(n))
		poke(s.heard)
	}
}

// benchmark is an actor with two routers.
type benchmark struct {
	a     *Actor
	sinks [2]*sink
	names [2]string
}

func newBenchmark(b *testing.B) *benchmark {
	m := &benchmark{names: [2]string{"tor-1", "tor-2"}}
	for i := range m.sinks {
		m.sinks[i] = newSink(b)
	}
	m.a = New(Options{Log: slog.New(slog.DiscardHandler)})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		m.a.Run(ctx)
		close(done)
	}()
	b.Cleanup(func() {
		cancel()
		<-done
	})
	return m
}

// sessions have the same routes for both routers.
func (m *benchmark) sessions(routes map[netip.Prefix]plan.Route) map[string]plan.BGPSession {
	all := map[string]plan.BGPSession{}
	for i, s := range m.sinks {
		all[m.names[i]] = external(func(d *plan.BGPSession) {
			d.Addr, d.Port, d.HoldTime = netip.MustParseAddr("127.0.0.1"), uint16(s.listener.Addr().(*net.TCPAddr).Port), 0
			d.Families, d.NextHop6, d.Routes = []lb.Family{lb.IPv4, lb.IPv6}, netip.MustParseAddr("fd00::1"), routes
		})
	}
	return all
}

func (m *benchmark) wait() {
	for {
		statuses := m.a.Statuses()
		if len(statuses) == 2 && statuses[m.names[0]].Synced && statuses[m.names[1]].Synced {
			return
		}
		time.Sleep(time.Millisecond)
	}
}

func cpuTime(b *testing.B) time.Duration {
	var r syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &r); err != nil {
		b.Fatal(err)
	}
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}

// BenchmarkColdSync opens sessions with two routers and announces 5,000 VIPs to each. It reports
// the processor time of all of it, the routers' part included.
func BenchmarkColdSync(b *testing.B) {
	for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		b.Run(string(family), func(b *testing.B) {
			m := newBenchmark(b)
			routes := vips(benchmarkVIPs, family == lb.IPv6)
			var spent time.Duration
			b.ReportAllocs()
			for b.Loop() {
				began := cpuTime(b)
				m.a.Set(m.sessions(routes))
				m.wait()
				spent += cpuTime(b) - began
				b.StopTimer()
				m.a.Set(nil)
				for len(m.a.Statuses()) > 0 {
					time.Sleep(time.Millisecond)
				}
				b.StartTimer()
			}
			b.ReportMetric(float64(spent.Microseconds())/1000/float64(b.N), "cpu-ms/op")
		})
	}
}

// BenchmarkOneChange withdraws one VIP among 5,000, and announces it again. It reports how long it
// takes from Set until both routers have heard of it.
func BenchmarkOneChange(b *testing.B) {
	m := newBenchmark(b)
	all, less := vips(benchmarkVIPs, false), vips(benchmarkVIPs-1, false)
	m.a.Set(m.sessions(all))
	m.wait()
	both := [2]map[string]plan.BGPSession{m.sessions(less), m.sessions(all)}
	for _, s := range m.sinks {
		select {
		case <-s.heard:
		default:
		}
	}
	var took []time.Duration
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		began := time.Now()
		m.a.Set(both[i%2])
		for _, s := range m.sinks {
			<-s.heard
		}
		took = append(took, time.Since(began))
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)*99/100].Microseconds())/1000, "p99-ms")
}

// BenchmarkResync states the same 5,000 routes again, of which no router hears.
func BenchmarkResync(b *testing.B) {
	m := newBenchmark(b)
	routes := vips(benchmarkVIPs, false)
	m.a.Set(m.sessions(routes))
	m.wait()
	time.Sleep(10 * time.Millisecond) // until the last bytes have arrived
	before := m.sinks[0].bytes.Load() + m.sinks[1].bytes.Load()
	b.ReportAllocs()
	for b.Loop() {
		m.a.Set(m.sessions(routes))
		m.wait()
	}
	sent := m.sinks[0].bytes.Load() + m.sinks[1].bytes.Load() - before
	if sent != 0 {
		b.Fatalf("%d bytes", sent)
	}
	b.ReportMetric(float64(sent), "bytes-on-wire/op")
}
