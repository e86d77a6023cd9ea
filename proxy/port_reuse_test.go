package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/nstest"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// Clients that close first do not use up the node's source ports: the relay closes first towards the backend then, and
// the kernel would keep each port for a minute.
func TestContract11ClientsThatCloseFirstTakeNoPorts(t *testing.T) {
	t.Parallel()
	s := newRelaySite(t)
	const ports, connections = 100, 4 * 100
	s.node.Run(t, "sysctl", "-qw", fmt.Sprintf("net.ipv4.ip_local_port_range=40000 %d", 40000+ports-1))
	s.backends[0].Serve(t, ":8081", func(conn net.Conn) { _, _ = io.Copy(conn, conn) })
	svc, endpoints := s.objects()
	for i := range endpoints {
		endpoints[i].Ports[0].Port = 8081
		endpoints[i].Endpoints = endpoints[i].Endpoints[:1]
	}
	planned := plan.New(svc, endpoints, plan.Node{Name: "node", Relay: true})
	s.write(t, planned)
	feed, socket := s.feed(t, planned)
	r, stop := s.relay(t, feed, socket, 1000)
	defer stop()
	reuse := newPortReuse(kernelParameters{"/proc/sys/net", slog.New(slog.DiscardHandler)})
	s.node.Do(t, func() error { reuse.set(true); return nil })
	failed, bytes := 0, make([]byte, 1)
	s.client.Do(t, func() error {
		for i := range connections {
			err := closesFirst(netip.AddrPortFrom(s.vips[allFamilies[i%2]], 80), bytes)
			if err != nil {
				if failed++; failed == 1 {
					t.Errorf("connection %d: %v", i, err)
				}
			}
			time.Sleep(20 * time.Millisecond) // the kernel reuses a port after a second at the earliest
		}
		return nil
	})
	// Where the machine is busy, the rules may do without the relay for a moment.
	if c := r.Counts()[0]; failed > 0 || c.NodeFailures > 0 || c.Connections < 2*ports {
		t.Errorf("%d of %d connections failed: %+v", failed, connections, c)
	}
	s.node.Do(t, func() error { // as the kubelet does
		return closesFirst(netip.MustParseAddrPort("10.0.1.2:8081"), bytes)
	})
}

// closesFirst makes a connection to a server that sends back what it gets, and closes it before the server does.
func closesFirst(to netip.AddrPort, bytes []byte) error {
	conn, err := net.DialTimeout("tcp", to.String(), time.Minute)
	if err != nil {
		return err
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(time.Minute))
	if _, err := conn.Write(bytes); err != nil {
		return err
	}
	_, err = io.ReadFull(conn, bytes)
	return err
}

// What Landfall has set it sets back, once nothing is relayed or its rules go, also after a restart; what others have set
// stays.
func TestPortReuseIsSetBack(t *testing.T) {
	for _, tt := range []struct {
		name, before string
		// on, off, restart (of the proxy), cleanup, flush (of all rules); or a value that the administrator sets
		story string
		after string
		noted bool
	}{
		{"while something is relayed", "2", "on on", "1", true},
		{"nothing is relayed any more", "2", "on off off", "2", false},
		{"it was off", "0", "on off", "0", false},
		{"again", "2", "on off on", "1", true},
		{"the relay is switched off with a restart", "2", "on restart off", "2", false},
		{"restarts, and cleaned up", "2", "on restart on restart cleanup cleanup", "2", false},
		{"the administrator's", "1", "on off restart on cleanup", "1", false},
		{"set to something else meanwhile", "2", "on 0 off", "0", false},
		{"set to something else meanwhile, and again", "2", "on 0 on off", "0", false},
		{"nothing was relayed", "2", "off cleanup", "2", false},
		{"all rules are flushed", "2", "on flush off", "2", false},
		{"flushed, and noted again before a restart", "2", "on flush on restart off", "2", false},
		{"flushed after a restart", "0", "on restart on flush off", "0", false},
		{"flushed, and set to something else", "2", "on flush 0 off", "0", false},
		{"flushed where nothing is Landfall's", "1", "on flush on off", "1", false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			ns := nstest.New(t)
			set := func(value string) { ns.Run(t, "sysctl", "-qw", "net.ipv4.tcp_tw_reuse="+value) }
			set(tt.before)
			parameters := kernelParameters{"/proc/sys/net", slog.New(slog.DiscardHandler)}
			p := newPortReuse(parameters)
			for step := range strings.FieldsSeq(tt.story) {
				switch step {
				case "on", "off":
					ns.Do(t, func() error { p.set(step == "on"); return nil })
				case "restart":
					p = newPortReuse(parameters)
				case "flush":
					ns.Run(t, "nft", "flush", "ruleset")
				case "cleanup":
					ns.Do(t, func() error { return cleanup(t.Context(), parameters) })
				default:
					set(step)
				}
			}
			if got := strings.TrimSpace(ns.Run(t, "cat", "/proc/sys/net/"+reusing.Path)); got != tt.after {
				t.Errorf("it is %s, want %s", got, tt.after)
			}
			if noted := strings.Contains(ns.Run(t, "nft", "list", "tables"), "landfall-settings"); noted != tt.noted {
				t.Errorf("noted: %v, want %v", noted, tt.noted)
			}
		})
	}
}

// Where it cannot be written, the log says so, once, and nothing is remembered.
func TestPortReuseThatCannotBeSet(t *testing.T) {
	ns := nstest.New(t)
	var said strings.Builder
	folder := t.TempDir()
	dir := filepath.Join(folder, reusing.Path) // which can be read, but takes no 1
	if err := os.MkdirAll(filepath.Dir(dir), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/proc/sys/net/ipv4/tcp_min_snd_mss", dir); err != nil { // 48 at least
		t.Fatal(err)
	}
	for _, f := range []string{folder, "/nowhere"} {
		said.Reset()
		p := newPortReuse(kernelParameters{f, slog.New(slog.NewTextHandler(&said, nil))})
		ns.Do(t, func() error { p.set(true); p.set(true); return nil })
		if n := strings.Count(said.String(), "cannot set a kernel parameter; many short"); n != 1 {
			t.Errorf("%s: said %d times:\n%s", f, n, &said)
		}
		if out := ns.Run(t, "nft", "list", "tables"); strings.Contains(out, "landfall-settings") {
			t.Errorf("left behind:\n%s", out)
		}
	}
}

// Ports are reused while the relay has something to serve, and what a predecessor with a relay has set goes.
func TestPortsAreReusedForTheRelay(t *testing.T) {
	b, f := newRelayBench(t)
	b.run()
	log := slog.New(slog.DiscardHandler)
	var asked []bool
	h := host{proxy: b.proxy, parameters: kernelParameters{t.TempDir(), log}, log: log,
		reusePorts: func(on bool) { asked = append(asked, on) },
		chains:     func(context.Context) ([]plan.ForwardChain, error) { return nil, nil },
		inputs:     func() ([]plan.ForwardChain, error) { return nil, nil },
		routes:     func([]netip.Addr) (map[netip.Addr]lb.RouteKind, error) { return nil, nil },
		strict:     func() string { return "" }, noTunnel: func() string { return "" }}
	look := func(when string, want ...bool) {
		t.Helper()
		asked = nil
		if h.look(t.Context()); fmt.Sprint(asked) != fmt.Sprint(want) {
			t.Errorf("%s: asked for %v, want %v", when, asked, want)
		}
	}
	look("a Service is relayed", true)
	clear(f.all)
	b.complete = false
	look("before the proxy knows all Services")
	b.complete = true
	look("none is relayed", false)
	b.to.relay = nil
	look("without a relay", false)
}
