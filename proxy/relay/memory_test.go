package relay

import (
	"fmt"
	"io"
	"math"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"testing"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
	"github.com/landfall-lb/landfall/proxy/relayfeed/wire"
)

// What readers of one Service leave in the kernel's buffers ends no relay: once little memory is left, those of its
// connections are reset that hold most, and another Service's go on. Meanwhile the rules do without the relay.
func TestContract11ReadersThatDoNotReadEndNoRelay(t *testing.T) {
	t.Parallel()
	g := newRig(t, nil)
	other := netip.MustParseAddrPort("198.51.100.2:80")
	of := func(name string, at netip.AddrPort, serve func(*net.TCPConn)) wire.Service {
		return wire.Service{Key: lb.Key{Namespace: "default", Name: name}, Relayed: &plan.Relayed{Ports: []plan.RelayedPort{{
			Protocol: lb.TCP, Frontends: []plan.RelayedFrontend{{Addr: at}},
			Cluster: []plan.RelayedBackend{{Addr: backend(t, serve)}}}}}}
	}
	g.tell <- wire.Message{Complete: true, Services: []wire.Service{
		of("bystander", other, func(conn *net.TCPConn) { _, _ = io.Copy(conn, conn) }),
		of("flood", frontend, func(conn *net.TCPConn) {
			for piece := make([]byte, 1<<16); ; {
				if _, err := conn.Write(piece); err != nil {
					return
				}
			}
		})}}
	g.until("it knows both", func() bool { return len(g.Counts()) == 2 })
	g.connect()
	g.connect()
	g.until("what nobody reads waits", func() bool {
		all := g.passing.list()
		return len(all) == 2 && !slices.ContainsFunc(all, func(c *passed) bool { return c.client.held() < 100_000 })
	})
	g.original.Store(&other)
	conn := g.connect()
	g.until("the bystander is there", func() bool { return len(g.passing.list()) == 3 })

	g.scarce.Store(true)
	g.until("one is reset", func() bool { return g.Counts()[1].Open == 1 })
	g.says("while memory is scarce", func(h wire.Hello) bool { return h.Full })
	if _, err := io.WriteString(conn, "x"); err != nil {
		t.Error(err)
	}
	if _, err := io.ReadFull(conn, make([]byte, 1)); err != nil {
		t.Errorf("the bystander: %v", err)
	}
	if c := g.Counts(); c[0].Open != 1 || c[0].Refused != 0 || c[1].Refused != 1 {
		t.Errorf("%+v", c)
	}
}

// The connection goes that holds most, of the Service that holds most: not the largest of all. What would not make the
// room is left alone.
func TestContract11WhoHoldsMostIsReset(t *testing.T) {
	large, small := &service{}, &service{}
	all := []holding{{&passed{service: small}, 45}, {&passed{service: large}, 30}, {&passed{service: large}, 40},
		{&passed{service: large}, 20}}
	for room, want := range map[uint64][]int{40: {2}, 41: {2, 1}, 71: {2, 1, 0}, 135: {2, 1, 0, 3}, 136: nil} {
		var got []int
		for _, c := range most(all, room) {
			got = append(got, slices.IndexFunc(all, func(h holding) bool { return h.passed == c }))
		}
		if !slices.Equal(got, want) {
			t.Errorf("for %d: %v, want %v", room, got, want)
		}
	}
}

// A tenant whose many Services hold little each makes the room before a neighbor whose one Service holds more than any
// of them, and of that tenant's the Service that holds most comes first.
func TestContract11TheNamespaceThatHoldsMostIsReset(t *testing.T) {
	neighbor := &service{id: id{key: lb.Key{Namespace: "neighbor", Name: "web"}}}
	all := []holding{{&passed{service: neighbor}, 20}}
	for i := range 10 {
		all = append(all, holding{&passed{service: &service{id: id{key: lb.Key{Namespace: "tenant", Name: fmt.Sprint(i)}}}}, 8})
	}
	all = append(all, holding{&passed{service: all[1].service}, 1})
	for room, want := range map[uint64]string{60: "tenant", 61: "tenant"} {
		for i, c := range most(all, room) {
			if c.service.key.Namespace != want || i == 0 && c.service != all[1].service {
				t.Errorf("for %d, %s is reset", room, c.service.key)
			}
		}
	}
	if victims := most(all, 65); len(victims) != 9 || victims[8].service != neighbor {
		t.Errorf("for 65, %d are reset, and the neighbor not once it holds most", len(victims))
	}
}

// The process itself gets seven tenths of a limit that there is.
func TestContract11GarbageIsBounded(t *testing.T) {
	before := debug.SetMemoryLimit(-1)
	defer debug.SetMemoryLimit(before)
	for _, test := range []struct {
		limit uint64
		want  int64
	}{{0, before}, {1 << 40, 1 << 40 / 10 * 7}, {math.MaxUint64, math.MaxInt64 / 10 * 7}} {
		debug.SetMemoryLimit(before)
		BoundGarbage(test.limit)
		if got := debug.SetMemoryLimit(-1); got != test.want {
			t.Errorf("of %d: %d, want %d", test.limit, got, test.want)
		}
	}
}

// Connections are reset above four fifths of a limit that there is.
func TestMemoryIsRead(t *testing.T) {
	folder := t.TempDir()
	write := func(name, text string) {
		if err := os.WriteFile(filepath.Join(folder, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if got := excess(cgroupMemory(folder)); got != 0 {
		t.Errorf("without files: %d", got)
	}
	for _, test := range []struct {
		used, limit string
		want        uint64
	}{{"800\n", "1000\n", 0}, {"801\n", "1000\n", 101}, {"801\n", "max\n", 0}} {
		write("memory.current", test.used)
		write("memory.max", test.limit)
		if got := excess(cgroupMemory(folder)); got != test.want {
			t.Errorf("%q of %q: %d, want %d", test.used, test.limit, got, test.want)
		}
	}
}
