package bfd

import (
	"context"
	"log/slog"
	"net/netip"
	"testing"
	"time"

	"github.com/vishvananda/netns"

	"github.com/landfall-lb/landfall/internal/nstest"
)

// running is an Actor that runs in a namespace.
type running struct {
	*Actor
	t       *testing.T
	changed chan struct{}
	stop    func() // ends Run and waits for it; may be called again
}

// start runs an Actor in a namespace until the test ends.
func start(t *testing.T, ns *nstest.NS, opts Options) *running {
	t.Helper()
	var handle netns.NsHandle
	ns.Do(t, func() (err error) { handle, err = netns.Get(); return err })
	r := &running{t: t, changed: make(chan struct{}, 1)}
	opts.Log = slog.New(slog.NewTextHandler(t.Output(), nil)).With("in", ns.Name)
	opts.Changed = func() {
		select {
		case r.changed <- struct{}{}:
		default:
		}
	}
	opts.open = func() (wire, error) {
		if err := netns.Set(handle); err != nil { // on the engine's thread, which ends with it
			return nil, err
		}
		return newKernel()
	}
	r.Actor = New(opts)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if err := r.Run(ctx); err != nil {
			t.Errorf("Run: %v", err)
		}
	}()
	r.stop = func() { cancel(); <-ended }
	t.Cleanup(func() { r.stop(); handle.Close() })
	return r
}

// until waits for the outcome of a session to be as wished.
func (r *running) until(key Key, what string, ok func(Outcome) bool) Outcome {
	r.t.Helper()
	timeout := time.After(20 * time.Second)
	for {
		if o, found := r.Outcomes()[key]; found && ok(o) {
			return o
		}
		select {
		case <-r.changed:
		case <-timeout:
			r.t.Fatalf("%s: not %s: %+v; %+v", key, what, r.Outcomes()[key], r.Health())
		}
	}
}

func isUp(o Outcome) bool { return o.State == Up }

// settled tells whether the session goes at its own timers, and not still at those of its start.
func settled(o Outcome) bool { return o.State == Up && o.RemoteState == Up && o.DetectionTime < slow }

func addr(s string) netip.Addr { return netip.MustParseAddr(s) }

var fast = Profile{TransmitInterval: 50 * time.Millisecond, ReceiveInterval: 50 * time.Millisecond}

// cable joins two new namespaces, 192.0.2.1 and 2001:db8::1 to 192.0.2.2 and 2001:db8::2.
func cable(t *testing.T) (a, b *nstest.NS) {
	t.Helper()
	a, b = nstest.New(t), nstest.New(t)
	nstest.Veth(t, a, "eth0", "192.0.2.1/24", b, "eth0", "192.0.2.2/24")
	for ns, cidr := range map[*nstest.NS]string{a: "2001:db8::1/64", b: "2001:db8::2/64"} {
		ns.Run(t, "ip", "addr", "add", cidr, "dev", "eth0", "nodad")
		ns.Run(t, "ip", "addr", "add", map[*nstest.NS]string{a: "fe80::1/64", b: "fe80::2/64"}[ns], "dev", "eth0", "nodad")
	}
	return a, b
}

func TestSessionsOverACable(t *testing.T) {
	a, b := cable(t)
	left, right := start(t, a, Options{}), start(t, b, Options{})
	keys := map[Key]Key{
		{Peer: addr("192.0.2.2")}:    {Peer: addr("192.0.2.1"), Local: addr("192.0.2.2"), Interface: "eth0"},
		{Peer: addr("2001:db8::2")}:  {Peer: addr("2001:db8::1"), Interface: "eth0"},
		{Peer: addr("fe80::2%eth0")}: {Peer: addr("fe80::1"), Local: addr("fe80::2"), Interface: "eth0"},
		{Peer: addr("192.0.2.2"), Local: addr("192.0.2.1"), Multihop: true}: {Peer: addr("192.0.2.1"), Multihop: true},
	}
	lefts, rights := map[Key]Profile{}, map[Key]Profile{}
	for l, r := range keys {
		lefts[l], rights[r] = fast, fast
	}
	left.Set(lefts)
	right.Set(rights)
	for l, r := range keys {
		left.until(l, "settled", settled)
		right.until(r, "settled", settled)
	}
	left.stop()
	for _, r := range keys {
		o := right.until(r, "down", func(o Outcome) bool { return o.State == Down })
		if o.RemoteState != AdminDown || o.RemoteDiagnostic != AdministrativelyDown || o.Diagnostic != NeighborSignaledDown || o.Failures != 0 || !o.LastDown.Administrative {
			t.Errorf("%s: planned stop seen as %+v", r, o)
		}
	}
	if h := right.Health(); len(h.Dropped) > 0 || h.Lost > 0 {
		t.Errorf("%+v", h)
	}
}
