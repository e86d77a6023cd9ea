package bfd

import (
	"context"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/e2e/router"
	"github.com/landfall-lb/landfall/e2e/router/routertest"
	"github.com/landfall-lb/landfall/internal/nstest"
)

// wanted is a session that a router shall have.
type wanted struct {
	peer, local, device string
	multihop            bool
}

// view is what a router shows of a session.
type view struct {
	Up         bool
	Diagnostic string // of the peer, as the router has it from us
	// Transmit, Receive and Multiplier are ours as the router has them from us; of Interval and
	// Timeout a router shows only what was agreed.
	Transmit, Receive, Multiplier int
	Interval, Timeout             time.Duration
}

// routerKind is a program that has BFD sessions.
type routerKind struct {
	program string
	run     func(context.Context, router.Options) (*router.Router, error)
	// for a session with transmit interval 100 ms, receive interval 150 ms, multiplier 4
	options func(wanted) router.Options
	views   func(*testing.T, *router.Router) []view // the router's own of its sessions
}

var kinds = map[string]routerKind{
	"FRR":  {"bfdd", router.StartFRR, frrOptions, frrViews},
	"BIRD": {"bird", router.StartBIRD, birdOptions, birdViews},
}

// start starts a router in a namespace, as punctual as we are: else a busy machine makes it fail
// the test.
func (k routerKind) start(t *testing.T, ns *nstest.NS, session wanted) *router.Router {
	t.Helper()
	o := k.options(session)
	o.RealTime = true
	return routertest.Start(t, ns, k.run, o)
}

// frr is the session in the words of FRR's configuration.
func (s wanted) frr() string {
	text := "peer " + s.peer
	if s.multihop {
		text += " multihop"
	}
	if s.local != "" {
		text += " local-address " + s.local
	}
	if s.device != "" {
		text += " interface " + s.device
	}
	return text
}

func frrOptions(s wanted) router.Options {
	return router.Options{
		BFD: "bfd\n profile fast\n  transmit-interval 100\n  receive-interval 150\n  detect-multiplier 4\n !\n " +
			s.frr() + "\n  profile fast\n !\n!"}
}

func frrViews(t *testing.T, r *router.Router) (views []view) {
	t.Helper()
	var peers []map[string]any
	if err := r.JSON(t.Context(), "show bfd peers json", &peers); err != nil {
		t.Error(err)
	}
	for _, p := range peers {
		number := func(key string) int { n, _ := p[key].(float64); return int(n) }
		text := func(key string) string { s, _ := p[key].(string); return s }
		views = append(views, view{
			Up: p["status"] == "up", Diagnostic: text("remote-diagnostic"),
			Transmit: number("remote-transmit-interval"), Receive: number("remote-receive-interval"),
			Multiplier: number("remote-detect-multiplier"),
		})
	}
	return views
}

func birdOptions(s wanted) router.Options {
	const timers = "{ min tx interval 100 ms; min rx interval 150 ms; idle tx interval 1 s; multiplier 4; };"
	neighbor := s.peer
	if s.device != "" {
		neighbor += " dev \"" + s.device + "\""
	}
	if s.local != "" {
		neighbor += " local " + s.local
	}
	if s.multihop {
		neighbor += " multihop yes"
	}
	return router.Options{
		Config: "router id 203.0.113.9;\nlog stderr all;\nprotocol device {}\nprotocol bfd {\n interface \"*\" " + timers +
			"\n multihop " + timers + "\n neighbor " + neighbor + ";\n}\n"}
}

// birdViews reads lines as `192.0.2.1   eth0   Up   2026-01-02   0.060   0.180`.
func birdViews(t *testing.T, r *router.Router) (views []view) {
	t.Helper()
	out, err := r.Ask(t.Context(), "show bfd sessions")
	if err != nil {
		t.Error(err)
	}
	for line := range strings.Lines(out) {
		fields := strings.Fields(line)
		if len(fields) < 6 || !strings.ContainsAny(fields[0], ".:") {
			continue
		}
		seconds := func(s string) time.Duration {
			f, _ := strconv.ParseFloat(s, 64)
			return time.Duration(f * float64(time.Second))
		}
		n := len(fields)
		views = append(views, view{Up: fields[2] == "Up", Interval: seconds(fields[n-2]), Timeout: seconds(fields[n-1])})
	}
	return views
}

// longest is how long a test waits: a router on a busy machine was once without CPU time for more
// than two minutes.
const longest = 5 * time.Minute

// waitFor waits until it is so.
func waitFor(t *testing.T, what string, so func() bool) {
	t.Helper()
	for began := time.Now(); !so(); time.Sleep(20 * time.Millisecond) {
		if time.Since(began) > longest {
			t.Fatalf("waited in vain for %s", what)
		}
	}
}
