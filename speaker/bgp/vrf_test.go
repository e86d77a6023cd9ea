package bgp

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/speaker/plan"
)

// Sockets of a session in a VRF are in it, and only connections there are the session's. The loopback interface stands for
// a VRF.
func TestSocketsInVRFs(t *testing.T) {
	a := New(Options{Log: slog.New(slog.DiscardHandler), Listen: "127.0.0.2:1790"})
	l := newListener(a, "lo")
	if l.address != ":1790" {
		t.Errorf("listens in the VRF at %s", l.address)
	}
	l.address = ":0"
	socket, err := l.open(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer socket.Close()
	peer := netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), socket.Addr().(*net.TCPAddr).AddrPort().Port())
	target := Target{Peer: peer, VRF: "lo", Timeout: time.Minute}
	ours, err := dial(t.Context(), target)
	if err != nil {
		t.Fatal(err)
	}
	defer ours.Close()
	theirs, err := socket.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer theirs.Close()
	for what, conn := range map[string]net.Conn{"opened": ours, "accepted": theirs} {
		if device := deviceOf(conn); device != "lo" {
			t.Errorf("the connection that was %s is bound to %q", what, device)
		}
	}
	for vrf, want := range map[string]bool{"lo": true, "": false, "red": false} {
		if target.VRF = vrf; target.admits(theirs) != want {
			t.Errorf("a session in VRF %q: admits is not %v", vrf, want)
		}
	}
	outside := fakeConn{&net.TCPConn{}, "127.0.0.1"} // bound to no device
	for vrf, want := range map[string]bool{"": true, "red": false} {
		if target.VRF = vrf; target.admits(outside) != want {
			t.Errorf("a session in VRF %q, a connection from outside of VRFs: admits is not %v", vrf, want)
		}
	}
	target = Target{Peer: netip.AddrPortFrom(netip.MustParseAddr("fe80::1%lo"), 179)}
	if linked := (fakeConn{theirs, "fe80::1%lo"}); !target.admits(linked) {
		t.Error("a connection of a link-local peer, which the kernel binds to the interface, is not admitted")
	}
	if _, err := dial(t.Context(), Target{Peer: peer, VRF: "no-such-vrf", Timeout: time.Minute}); err == nil {
		t.Error("connects in a VRF that is not there")
	}
}

// fakeConn has another remote address.
type fakeConn struct {
	net.Conn
	remote string
}

func (c fakeConn) RemoteAddr() net.Addr {
	return net.TCPAddrFromAddrPort(netip.AddrPortFrom(netip.MustParseAddr(c.remote), 1))
}

func (c fakeConn) SyscallConn() (syscall.RawConn, error) { return c.Conn.(*net.TCPConn).SyscallConn() }

// The actor listens in exactly those VRFs that a session is in, and there with the passwords of these sessions.
func TestListensInVRFs(t *testing.T) {
	a := New(Options{Log: slog.New(slog.DiscardHandler), Listen: ":1790"})
	a.start = func(func()) {}
	session := func(vrf, password string) plan.BGPSession {
		return external(func(d *plan.BGPSession) {
			d.VRF, d.Password, d.Addr = vrf, password, netip.MustParseAddr("192.0.2.1")
		})
	}
	inside := func() (all []string) {
		a.mu.Lock()
		defer a.mu.Unlock()
		for at := range a.inside {
			all = append(all, fmt.Sprintf("%s/%d", at.vrf, at.index))
		}
		slices.Sort(all)
		return all
	}
	anew := session("blue", "other")
	anew.VRFIndex = 9
	for _, step := range []struct {
		desired map[string]plan.BGPSession
		want    []string
	}{
		{map[string]plan.BGPSession{"a": session("", "main")}, nil},
		{map[string]plan.BGPSession{"a": session("", "main"), "b": session("red", "secret"), "c": session("red", "")},
			[]string{"red/0"}},
		{map[string]plan.BGPSession{"a": session("", "main"), "b": session("red", "secret"), "d": session("blue", "other")},
			[]string{"blue/0", "red/0"}},
		{map[string]plan.BGPSession{"a": session("", "main"), "b": session("red", "secret"), "d": anew},
			[]string{"blue/9", "red/0"}},
	} {
		a.Set(step.desired)
		a.apply(t.Context())
		if got := inside(); !slices.Equal(got, step.want) {
			t.Errorf("listens in %v, want %v", got, step.want)
		}
	}
	for vrf, want := range map[string]string{"": "main", "red": "secret", "blue": "other"} {
		if got := a.passwords(vrf); len(got) != 1 || got[netip.MustParseAddr("192.0.2.1")] != want {
			t.Errorf("passwords in VRF %q: %v", vrf, got)
		}
	}
	ended := make(chan struct{})
	a.mu.Lock()
	red := a.inside[place{"red", 0}]
	a.inside[place{"red", 0}] = inner{red.listener, func() { red.end(); close(ended) }}
	a.mu.Unlock()
	a.Set(nil)
	a.apply(context.Background())
	select {
	case <-ended:
	default:
		t.Error("goes on listening in a VRF without a session")
	}
	if got := inside(); len(got) > 0 {
		t.Errorf("listens in %v", got)
	}
}

// A session whose VRF changes is another one.
func TestTheVRFIsPartOfTheSession(t *testing.T) {
	inside := external(func(d *plan.BGPSession) { d.VRF = "red" })
	if change := difference(external(nil), inside); change == nil || !change.foreign {
		t.Errorf("a change of the VRF: %v", change)
	}
	anew := external(func(d *plan.BGPSession) { d.VRF, d.VRFIndex = "red", 9 })
	if change := difference(inside, anew); change == nil || change.foreign {
		t.Errorf("the VRF is made anew: %v", change) // the router is the same, and may keep the routes
	}
	if target := targetOf(inside, netip.Addr{}); target.VRF != "red" {
		t.Errorf("connects in VRF %q", target.VRF)
	}
}
