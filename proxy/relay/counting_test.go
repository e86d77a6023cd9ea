package relay

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// greeter answers at once with its name, and holds the connection until the client ends it.
func greeter(t *testing.T, name byte) netip.AddrPort {
	return backend(t, func(conn *net.TCPConn) {
		if _, err := conn.Write([]byte{name}); err == nil {
			_, _ = io.Copy(io.Discard, conn)
		}
	})
}

// As IPVS does, the relay chooses by the connections that each backend has here, one after the other,
// and no connection that has failed or ended counts.
func TestRelayCountsConnections(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		scheduler plan.Scheduler
		weights   []uint8
		want      string // the backends of seven connections that stay open
		again     string // and of three more, once those of the first backend have ended
	}{
		{plan.LeastConnections, []uint8{0, 0, 0}, "abcabca", "aaa"},
		{plan.WeightedLeastConnections, []uint8{4, 1, 1}, "abcaaaa", "aaa"},
		{plan.ShortestExpectedDelay, []uint8{4, 1, 1}, "aaaabca", "aaa"},
		{plan.NeverQueue, []uint8{4, 1, 1}, "abcaaaa", "aaa"},
	} {
		t.Run(string(tt.scheduler), func(t *testing.T) {
			t.Parallel()
			g := newRig(t, func(o *Options) { o.TryAfter = o.ConnectTimeout }) // no backend is late
			refused := refusing(t)
			g.denied.Store(refused, true)
			backends := []netip.AddrPort{refused, greeter(t, 'a'), greeter(t, 'b'), greeter(t, 'c')}
			g.relayed(func(r *plan.Relayed) {
				r.Scheduler = tt.scheduler
				for i, weight := range tt.weights {
					r.Ports[0].Cluster[i+1].Weight = weight
				}
			}, backends...)
			open := map[byte][]*net.TCPConn{}
			connect := func() byte {
				conn := g.connect()
				var name [1]byte
				if _, err := io.ReadFull(conn, name[:]); err != nil {
					t.Fatal(err)
				}
				open[name[0]] = append(open[name[0]], conn)
				return name[0]
			}
			var got []byte
			for range tt.want {
				got = append(got, connect())
			}
			if string(got) != tt.want {
				t.Errorf("seven connections went to %q, want %q", got, tt.want)
			}
			ended := len(open['a'])
			for _, conn := range open['a'] {
				conn.Close()
			}
			g.until("ended connections are not counted", func() bool { return g.Counts()[0].Open == len(tt.want)-ended })
			got = nil
			for range tt.again {
				got = append(got, connect())
			}
			if string(got) != tt.again {
				t.Errorf("three more went to %q, want %q", got, tt.again)
			}
			for _, conn := range slices.Concat(open['a'], open['b'], open['c']) {
				conn.Close()
			}
			g.until("none is open", func() bool { return g.Counts()[0].Open == 0 })
			g.table.mu.Lock()
			defer g.table.mu.Unlock()
			if left := g.table.services[id{web, lb.TCP}].open; len(left) != 0 {
				t.Errorf("counted are still %v", left)
			}
		})
	}
}

// A namespace with more Services than are counted apart takes the place of no other: they have theirs by turns.
func TestContract11NamespacesAreCountedByTurns(t *testing.T) {
	r := &Relay{table: newTable(time.Now), passing: newPassing(), flows: newFlows(1, 1, 1)}
	learn := func(namespace string, n int) {
		for i := range n {
			s := r.table.learn(id{lb.Key{Namespace: namespace, Name: fmt.Sprintf("%04d", i)}, lb.TCP})
			s.counts.Connections = 1
		}
	}
	learn("a", 2*maxCounted)
	learn("b", 20)
	learn("c", maxCounted)
	all, of := r.Counts(), map[string]int{}
	for _, c := range all {
		of[c.Service.Namespace]++
	}
	if of["a"] != 240 || of["b"] != 20 || of["c"] != 240 {
		t.Errorf("counted apart are %v", of)
	}
	if rest := all[maxCounted]; rest.Protocol != lb.TCP || rest.Connections != 1020 {
		t.Errorf("the others: %+v", rest)
	}
	if !slices.IsSortedFunc(all[:maxCounted], func(a, b Counted) int { return a.Service.Compare(b.Service) }) {
		t.Error("they are not in order")
	}
}
