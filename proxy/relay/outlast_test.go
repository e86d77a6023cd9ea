package relay

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
	"github.com/landfall-lb/landfall/proxy/relayfeed/wire"
)

// untaken is how many bytes an end sends that the other does not read: more than a window takes.
const untaken = 512 << 10

// The Services of outlasting: clients of the first do not read, and pods of the second do not.
var (
	toClients = netip.MustParseAddrPort("198.51.100.3:80")
	toPods    = netip.MustParseAddrPort("198.51.100.4:80")
)

// outlasting has a relay know both, and a Service of another namespace whose clients do not read either, at frontend.
// Pods of toPods read once goOn is closed, and ends has how that ends.
func (g *rig) outlasting(t *testing.T, goOn <-chan struct{}) (ends <-chan error) {
	t.Helper()
	read := make(chan error, 10)
	of := func(namespace, name string, at netip.AddrPort, serve func(*net.TCPConn)) wire.Service {
		relayed := &plan.Relayed{Ports: []plan.RelayedPort{{Protocol: lb.TCP,
			Frontends: []plan.RelayedFrontend{{Addr: at}}, Cluster: []plan.RelayedBackend{{Addr: backend(t, serve)}}}}}
		return wire.Service{Key: lb.Key{Namespace: namespace, Name: name}, Relayed: relayed}
	}
	all := []wire.Service{
		of("bystander", "web", frontend, func(conn *net.TCPConn) {
			_, _ = conn.Write(make([]byte, untaken/2))
			_, _ = io.Copy(io.Discard, conn)
		}),
		of("tenant", "clients", toClients, func(conn *net.TCPConn) {
			_, _ = io.Copy(io.Discard, conn)
			_, _ = conn.Write(make([]byte, untaken))
		}),
		of("tenant", "pods", toPods, func(conn *net.TCPConn) {
			_ = conn.CloseWrite()
			<-goOn
			_, err := io.Copy(io.Discard, conn)
			read <- err
		}),
	}
	g.until("it knows them", func() bool {
		select {
		case g.tell <- wire.Message{Complete: true, Services: all}:
		case <-time.After(10 * time.Millisecond):
		}
		return len(g.Counts()) == len(all)
	})
	return read
}

// outlast opens n connections to a frontend of outlasting, and waits until both ends of each have ended what they send.
func (g *rig) outlast(t *testing.T, n int, at netip.AddrPort) (clients []*net.TCPConn) {
	t.Helper()
	before := len(g.outlasts())
	g.original.Store(&at)
	for range n {
		conn := g.connect()
		if at == toPods {
			if _, err := conn.Write(make([]byte, untaken)); err != nil {
				t.Fatal(err)
			}
		}
		if err := conn.CloseWrite(); err != nil {
			t.Fatal(err)
		}
		clients = append(clients, conn)
	}
	g.until("both ends have ended what they send", func() bool {
		c := g.countsAt(at)
		return len(g.outlasts()) == before+n || c.Open == 0 && c.Connections == uint64(n)
	})
	if c := g.countsAt(at); c.Open != n || c.Sent+c.Received != uint64(n*untaken) {
		t.Fatalf("%d connections hold what nobody reads: %+v", n, c)
	}
	return clients
}

// outlasts returns the connections of which both ends have ended what they send.
func (g *rig) outlasts() []*passed {
	return slices.DeleteFunc(g.passing.list(), func(p *passed) bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		return !p.done
	})
}

// countsAt returns the counts of the Service at a frontend.
func (g *rig) countsAt(at netip.AddrPort) Counts {
	w, _, _ := g.table.find(target{lb.TCP, at})
	for _, c := range g.Counts() {
		if c.Service == w.service.key {
			return c.Counts
		}
	}
	return Counts{}
}

// What ended connections hold that nobody reads is still their Service's: they are counted, and reset before those of
// another namespace. In both directions.
func TestContract11EndedConnectionsHoldWhatNobodyReads(t *testing.T) {
	for _, at := range []netip.AddrPort{toClients, toPods} {
		t.Run(at.String(), func(t *testing.T) {
			t.Parallel()
			goOn := make(chan struct{})
			g := newRig(t, nil)
			ends := g.outlasting(t, goOn)
			bystander := g.connect()
			g.until("the bystander holds something", func() bool {
				all := g.passing.list()
				return len(all) == 1 && all[0].client.held() > leftToKernel
			})
			const n = 3
			clients := g.outlast(t, n, at)
			victims := g.relieve(untaken / 4)
			for _, v := range victims {
				if v.service.key.Namespace != "tenant" {
					t.Errorf("a connection to %s is reset", v.service.key)
				}
			}
			g.until("resets end them", func() bool { return g.countsAt(at).Open == n-len(victims) })
			if len(victims) == 0 || g.countsAt(at).Refused != uint64(len(victims)) {
				t.Errorf("%d are reset: %+v", len(victims), g.countsAt(at))
			}
			close(goOn)
			reset := 0
			for _, client := range clients {
				_, err := io.ReadAll(client)
				if at == toPods {
					err = <-ends
				}
				if errors.Is(err, unix.ECONNRESET) {
					reset++
				}
			}
			if reset != len(victims) { // else the kernel would go on sending, and hold what it sends
				t.Errorf("%d readers see a reset, of %d", reset, len(victims))
			}
			if _, err := io.ReadFull(bystander, make([]byte, untaken/2)); err != nil {
				t.Errorf("the bystander: %v", err)
			}
		})
	}
}

// Once the other end has read all, the connection is over, without a reset.
func TestEndedConnectionsEndOnceAllIsRead(t *testing.T) {
	t.Parallel()
	goOn := make(chan struct{})
	g := newRig(t, nil)
	g.outlasting(t, goOn)
	client := g.outlast(t, 1, toClients)[0]
	g.outlast(t, 1, toPods)
	if all, err := io.ReadAll(client); len(all) != untaken || err != nil {
		t.Errorf("the client got %d bytes, %v", len(all), err)
	}
	g.until("that one is over", func() bool { return g.countsAt(toClients).Open == 0 })
	if c := g.countsAt(toPods); c.Open != 1 {
		t.Errorf("the pod has read nothing yet: %+v", c)
	}
	close(goOn)
	g.until("the other is over", func() bool { return g.countsAt(toPods).Open == 0 && g.open.Load() == 0 })
}

// What the kernel holds of what was received stays until the socket is closed, however well the ends read: the urgent
// byte's buffer, or that of the end itself, which is beyond 4 KiB with some network cards.
func TestContract11WhatWasReceivedHoldsUpNoEnd(t *testing.T) {
	t.Parallel()
	g := newRig(t, nil)
	g.relayed(nil, backend(t, func(conn *net.TCPConn) { _, _ = io.Copy(io.Discard, conn) }))
	client := g.connect()
	sendTo(t, client, strings.Repeat("x", 8<<10), unix.MSG_OOB)
	if err := client.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	g.until("it is over", func() bool { return g.open.Load() == 0 && g.Counts()[0].Connections == 1 })
}

// A timer that fires as the last byte moves resets nothing any more.
func TestEndedConnectionsAreNotIdle(t *testing.T) {
	_, client := pairOfConns(t)
	_, backend := pairOfConns(t)
	p := newPassage(nil, client, backend)
	p.done = true
	if p.abandon(errors.New("neither end has sent anything")); p.why != nil {
		t.Error(p.why)
	}
	p.done = false
	if p.abandon(errors.New("neither end has sent anything")); p.why == nil {
		t.Error("one that moves bytes is not reset")
	}
}

// One whose reader does not read is reset when it has been idle for too long.
func TestEndedConnectionsMayBeIdle(t *testing.T) {
	t.Parallel()
	g := newRig(t, func(o *Options) { o.Idle = time.Second })
	g.outlasting(t, nil)
	client := g.outlast(t, 1, toClients)[0]
	g.until("it is reset", func() bool { return g.countsAt(toClients).Open == 0 })
	if _, err := io.ReadAll(client); !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("the client reads %v, want a reset", err)
	}
}

// The kernel goes on sending what ended connections hold when the relay ends.
func TestDrainOfEndedConnections(t *testing.T) {
	t.Parallel()
	g := newRig(t, func(o *Options) { o.Drain = time.Millisecond })
	g.outlasting(t, nil)
	client := g.outlast(t, 1, toClients)[0]
	g.stop()
	if all, err := io.ReadAll(client); len(all) != untaken || err != nil {
		t.Errorf("after the relay's end the client got %d bytes, %v", len(all), err)
	}
}

// A successor gets no connection of which nothing is left to pass on: the relay before waits for its end.
func TestHandOverLeavesEndedConnections(t *testing.T) {
	if !alone(t) {
		return
	}
	g := newRig(t, handsOver(filepath.Join(t.TempDir(), "own", "handover.sock"), relayPort))
	g.outlasting(t, nil)
	client := g.outlast(t, 1, toClients)[0]
	next := g.successor(t, echo(t, "a"))
	if n := len(next.passing.list()); n != 0 || g.countsAt(toClients).Open != 1 {
		t.Errorf("the successor has %d connections, and the one before %+v", n, g.countsAt(toClients))
	}
	if all, err := io.ReadAll(client); len(all) != untaken || err != nil {
		t.Errorf("the client got %d bytes, %v", len(all), err)
	}
	g.until("it is over", func() bool { return g.open.Load() == 0 })
}
