package routes

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/labels"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/speaker/plan"
)

var (
	epoch  = time.Unix(1e9, 0)
	vip1   = vip(1)
	vip2   = vip(2)
	tor    = netip.MustParseAddr("10.0.0.2")
	toTor  = Path{Peer: tor}
	served = lb.Delivery{Policy: lb.Cluster, Ready: 1}
)

func vip(n int) netip.Addr { return netip.AddrFrom4([4]byte{192, 0, 2, byte(n)}) }

// world is what surrounds a State: a router that hears what the node announces as soon as it is
// settled, and BFD.
type world struct {
	t     *testing.T
	state State
	now   time.Time
	facts Facts
	held  map[netip.Addr]lb.Delivery
	// labels are those of all Services.
	labels labels.Set
	dirty  map[netip.Addr]bool
	all    bool

	desired map[string]plan.BGPSession
	watched map[Path]lb.BFDProfile
	hears   map[netip.Prefix]bool
	events  []string
}

func newWorld(t *testing.T) *world {
	w := &world{t: t, state: New(time.Second), now: epoch, held: map[netip.Addr]lb.Delivery{},
		dirty: map[netip.Addr]bool{}, hears: map[netip.Prefix]bool{}}
	w.facts = Facts{
		Convergence: 3 * time.Second,
		Node: plan.Facts{
			Self: "a", Joined: true, Live: []string{"a"},
			Node: &lb.Node{Name: "a", Labels: labels.Set{}, Addresses: []netip.Addr{netip.MustParseAddr("10.0.0.1")}},
			Pools: map[string]lb.Pool{"lan": {Name: "lan", Ranges: []lb.Range{{From: netip.MustParseAddr("192.0.2.0"),
				To: netip.MustParseAddr("192.0.2.255")}}}},
			Interfaces: []lb.Interface{{Name: "eth0", Up: true,
				Addresses: []netip.Prefix{netip.MustParsePrefix("10.0.0.1/24")}}},
		},
		BGP: plan.BGPFacts{
			Peers: map[string]lb.Peer{"tor": {Name: "tor", LocalASN: 64500, PeerASN: 64501, Addr: tor, Port: 179,
				BFDProfile: "fast"}},
			Advertisements: map[string]lb.BGPAdvertisement{
				"all": {Name: "all", AggregationLength: 32, AggregationLengthV6: 128}},
			Profiles: map[string]lb.BFDProfile{"fast": {Name: "fast", Transmit: time.Second, Multiplier: 3}},
		},
		Seen: Seen{Sessions: map[string]Session{}, Paths: map[Path]PathState{}},
	}
	w.facts.Seen.Hears = func(p netip.Prefix) []string {
		if w.hears[p] && w.facts.Seen.Sessions["tor"].Established {
			return []string{"tor"}
		}
		return nil
	}
	return w
}

func (w *world) hold(vip netip.Addr, d lb.Delivery) {
	w.held[vip], w.dirty[vip] = d, true
}

func (w *world) holders(vip netip.Addr) []plan.Holder {
	d, ok := w.held[vip]
	if !ok {
		return nil
	}
	key := lb.Key{Namespace: "default", Name: vip.String()}
	d.Service, d.VIP = key, vip
	return []plan.Holder{{Service: key, Labels: w.labels, Delivery: &d}}
}

// step has the State look at what has changed, and the actors note what they are told.
func (w *world) step() Step {
	step := w.state.Step(w.now, w.facts, Events{VIPs: w.dirty, All: w.all, Holders: w.holders,
		Held:      func() []netip.Addr { return slices.Collect(maps.Keys(w.held)) },
		Elsewhere: func(netip.Addr) bool { return false }})
	w.dirty, w.all = map[netip.Addr]bool{}, false
	if step.SessionsChanged {
		w.desired = step.Sessions
		if _, begun := w.facts.Seen.Sessions["tor"]; begun {
			w.session(func(s *Session) { s.Synced = false })
		}
	}
	if step.PathsChanged {
		w.watched = step.Paths
	}
	for _, n := range step.News {
		w.events = append(w.events, fmt.Sprint(n.Peer, " ", n.Up, n.LastError))
	}
	return step
}

func (w *world) session(change func(*Session)) {
	sessions := maps.Clone(w.facts.Seen.Sessions)
	s := sessions["tor"]
	change(&s)
	sessions["tor"] = s
	w.facts.Seen.Sessions = sessions
}

// settle has the router hear what it shall, and the State see that.
func (w *world) settle() Step {
	clear(w.hears)
	for p := range w.desired["tor"].Routes {
		w.hears[p] = true
	}
	w.session(func(s *Session) { s.Synced, s.Heard = true, s.Heard+1 })
	return w.step()
}

// up makes the session come or go.
func (w *world) up(up bool) {
	w.session(func(s *Session) {
		*s = Session{Established: up, Since: w.now, Status: lb.PeerNode{State: "Idle", Reason: "Why", Message: "gone"},
			LastError: "gone"}
		if up {
			s.Status, s.LastError = lb.PeerNode{State: "Established"}, ""
		}
	})
}

// watch brings the session up, for long enough that BFD watches its path.
func (w *world) watch() {
	w.up(true)
	w.step()
	w.now = w.now.Add(Settle)
	w.step()
}

// want fails the test unless the router shall hear of, and hears of, a VIP.
func (w *world) want(what string, vip netip.Addr, shall, hears bool) {
	w.t.Helper()
	_, announced := w.desired["tor"].Routes[netip.PrefixFrom(vip, 32)]
	routed := w.state.Routed(vip)
	if announced != shall || (len(routed.Peers) > 0) != hears {
		w.t.Errorf("%s: %s is announced: %v, heard of by %v; want %v, %v", what, vip, announced, routed.Peers, shall, hears)
	}
}

func TestNothingIsSaidBeforeAllIsKnown(t *testing.T) {
	w := newWorld(t)
	w.hold(vip1, served)
	if got := w.state.Waiting(); got != "the API server" {
		t.Errorf("before the first step: waiting for %q", got)
	}
	for _, c := range []struct {
		change func(*Facts)
		want   string
	}{
		{func(f *Facts) { f.Unknown = "the list of BGPPeers" }, "the list of BGPPeers"},
		{func(f *Facts) { f.Node.Joined = false }, "the other speakers"},
		{func(f *Facts) { f.Node.Gate = lb.ReasonFeedUnknown }, "the first report of the proxy"},
	} {
		facts := w.facts
		c.change(&w.facts)
		step := w.step()
		if got := w.state.Waiting(); got != c.want || step.SessionsChanged || !w.state.Routable(vip2) {
			t.Errorf("waiting for %q, want %q; told %v", got, c.want, step.SessionsChanged)
		}
		w.facts = facts
	}
	w.step()
	w.want("all is known", vip1, true, false)
	w.facts.Unknown = "the list of BGPPeers"
	w.hold(vip1, lb.Delivery{})
	w.step()
	w.want("what was known once goes on", vip1, false, false)
	if w.state.Waiting() != "" {
		t.Errorf("waiting for %q", w.state.Waiting())
	}
}

// TestContract5RoutesWaitForRescue: a router sends connections of others at once, which the proxy
// has to pass on by then.
func TestContract5RoutesWaitForRescue(t *testing.T) {
	both := []string{"node-1", "node-2"}
	for name, c := range map[string]struct {
		live   []string
		proxy  bool
		answer time.Duration // after all else is known; 0 if it was there before, and negative for never
		wait   time.Duration
	}{
		"the proxy was told all before": {both, true, 0, tellTime},
		"it needs a moment":             {both, true, 50 * time.Millisecond, 50 * time.Millisecond},
		"it is slow":                    {both, true, 2 * time.Second, 2 * time.Second},
		"it is very slow":               {both, true, time.Minute, rescueTime},
		"it never answers":              {both, true, -1, rescueTime},
		"there are no others":           {[]string{"node-1"}, true, -1, 0},
		"nobody passes any on":          {both, false, -1, 0},
	} {
		w := newWorld(t)
		w.hold(vip1, served)
		w.facts.Node.Live, w.facts.Rescue, w.facts.Node.Joined = c.live, c.proxy, false
		w.facts.Rescued = c.answer == 0
		w.step()
		w.now = w.now.Add(time.Minute) // it does not count before all else is known
		w.facts.Node.Joined = true
		known := w.now
		for {
			w.facts.Rescued = c.answer >= 0 && w.now.Sub(known) >= c.answer
			step := w.step()
			if step.SessionsChanged {
				break
			}
			next := w.now.Add(step.Again)
			if answer := known.Add(c.answer); answer.After(w.now) && answer.Before(next) {
				next = answer // which has the speaker look again
			}
			if step.Again <= 0 || w.now.Sub(known) > time.Hour {
				t.Fatalf("%s: no sessions after %s, and again after %s", name, w.now.Sub(known), step.Again)
			}
			w.now = next
		}
		if waited := w.now.Sub(known); waited != c.wait {
			t.Errorf("%s: routes waited for %s, want %s", name, waited, c.wait)
		}
		w.want(name, vip1, true, false)
	}
}

// TestLifeOfAVIP announces one, drains it, and takes it back.
func TestLifeOfAVIP(t *testing.T) {
	w := newWorld(t)
	w.hold(vip1, served)
	w.step()
	w.up(true)
	step := w.settle()
	if !step.Changed[vip1] || step.SessionsChanged || step.Again != Settle {
		t.Errorf("the router hears: %+v", step)
	}
	w.want("announced", vip1, true, true)
	w.now = w.now.Add(Settle)
	if step := w.step(); !step.PathsChanged || step.Again != 0 {
		t.Errorf("the session has settled: %+v", step)
	}
	if step := w.step(); len(step.Changed) > 0 || step.SessionsChanged || step.PathsChanged || len(step.News) > 0 {
		t.Errorf("nothing has changed: %+v", step)
	}

	w.facts.Node.Stopping, w.all = true, true
	step = w.step()
	w.settle()
	w.want("it is about to end", vip1, true, true)
	if step.Again != w.facts.Convergence || w.state.Stopped(w.facts.Seen.Sessions) {
		t.Errorf("again in %s, stopped %v", step.Again, w.state.Stopped(w.facts.Seen.Sessions))
	}
	w.now = w.now.Add(w.facts.Convergence - 1)
	if step := w.step(); step.Again != 1 || step.SessionsChanged {
		t.Errorf("a moment before its end: %+v", step)
	}
	w.now = w.now.Add(1)
	if step := w.step(); step.Again != 0 || !step.Changed[vip1] {
		t.Errorf("at its end: %+v", step)
	}
	w.want("withdrawn and still heard of", vip1, false, false)
	if w.state.Stopped(w.facts.Seen.Sessions) {
		t.Error("stopped, while the withdrawal is on its way")
	}
	w.settle()
	if !w.state.Stopped(w.facts.Seen.Sessions) {
		t.Error("not stopped")
	}

	w.facts.Node.Stopping, w.all = false, true
	w.step()
	w.settle()
	w.want("anew", vip1, true, true)
	delete(w.held, vip1)
	w.dirty[vip1] = true
	w.step()
	w.settle()
	w.want("gone", vip1, false, false)
	if len(w.state.heard)+len(w.state.told)+len(w.state.pending)+len(w.state.leaving)+len(w.state.VIPs()) > 0 {
		t.Errorf("something is left of what is gone: %+v", w.state)
	}
}

// TestAVIPThatJoinsAnAggregateIsHeardOfAtOnce checks that this is seen although the actor has
// nothing to do, and so says nothing.
func TestAVIPThatJoinsAnAggregateIsHeardOfAtOnce(t *testing.T) {
	w := newWorld(t)
	ad := w.facts.BGP.Advertisements["all"]
	ad.AggregationLength = 24
	w.facts.BGP.Advertisements["all"] = ad
	w.hold(vip1, served)
	w.step()
	w.up(true)
	w.settle()
	w.hold(vip2, served)
	step := w.step()
	if peers := w.state.Routed(vip2).Peers; step.SessionsChanged || len(peers) != 1 || !step.Changed[vip2] {
		t.Errorf("told %v, heard of by %v, changed %v", step.SessionsChanged, peers, step.Changed)
	}
}

// TestSessionsComeAndGo checks that each change is told once, and what peers hear follows.
func TestSessionsComeAndGo(t *testing.T) {
	w := newWorld(t)
	w.hold(vip1, served)
	w.step()
	w.up(false)
	w.settle()
	w.up(true)
	w.settle()
	w.step()
	w.want("up", vip1, true, true)
	w.now = w.now.Add(time.Minute)
	w.up(true) // it was lost and came back between two steps
	if step := w.settle(); step.Changed[vip1] {
		t.Errorf("changed %v", step.Changed)
	}
	w.up(false)
	if step := w.step(); !step.Changed[vip1] {
		t.Errorf("changed %v", step.Changed)
	}
	w.want("lost", vip1, true, false)
	if got, want := strings.Join(w.events, ", "), "tor true, tor true, tor falsegone"; got != want {
		t.Errorf("events %q, want %q", got, want)
	}
}

// TestBFDWaitsForBGP has BFD begin when the session has been up for a while, and go on when it is
// lost: FRR drops the routes that it keeps over a restart if both come up at once.
func TestBFDWaitsForBGP(t *testing.T) {
	w := newWorld(t)
	w.hold(vip1, served)
	step := w.step()
	w.up(false)
	for what, c := range map[string]Step{"before there is a session": step, "while it is down": w.step()} {
		if c.PathsChanged || c.Again != 0 {
			t.Errorf("%s: BFD watches %v, again in %s", what, c.Paths, c.Again)
		}
	}
	w.up(true)
	w.now = w.now.Add(Settle / 4)
	if step = w.step(); step.PathsChanged || step.Again != 3*Settle/4 {
		t.Errorf("up for a moment: BFD watches %v, again in %s", step.Paths, step.Again)
	}
	w.up(true) // it was lost and came back
	w.now = w.now.Add(Settle - 1)
	if step = w.step(); step.PathsChanged || step.Again != 1 {
		t.Errorf("up again for a moment: BFD watches %v, again in %s", step.Paths, step.Again)
	}
	w.now = w.now.Add(1)
	if step = w.step(); !step.PathsChanged || len(step.Paths) != 1 || step.Again != 0 {
		t.Errorf("settled: BFD watches %v, again in %s", step.Paths, step.Again)
	}
	w.up(false)
	if step = w.step(); step.PathsChanged || len(w.watched) != 1 {
		t.Errorf("lost: BFD watches %v", w.watched)
	}
}

// TestPathIsLost has BFD lose the path to the peer, and find it again or not.
func TestPathIsLost(t *testing.T) {
	w := newWorld(t)
	w.hold(vip1, served)
	w.watch()
	want := map[Path]lb.BFDProfile{toTor: {Transmit: time.Second, Multiplier: 3}}
	if !maps.Equal(w.watched, want) {
		t.Fatalf("BFD watches %v, want %v", w.watched, want)
	}
	down := func() bool { return w.desired["tor"].BFDDown }
	set := func(p PathState) Step {
		w.facts.Seen.Paths = map[Path]PathState{toTor: p}
		return w.step()
	}
	if set(PathState{}); down() {
		t.Error("a path that was never up holds the peer down")
	}
	set(PathState{Up: true})
	if step := set(PathState{Failures: 1}); !down() || step.Again != time.Second || !w.state.Watches()["tor"].HoldsDown {
		t.Errorf("lost: held down %v, again in %s", down(), step.Again)
	}
	if set(PathState{Failures: 1, Up: true}); down() {
		t.Error("held down although the path is there again")
	}
	if set(PathState{Failures: 2, Up: true}); !down() {
		t.Error("not held down after the path was lost for a moment, and the peer has dropped the routes")
	}
	if w.step(); down() {
		t.Error("held down for longer than that")
	}
	set(PathState{Failures: 3})
	if set(PathState{Failures: 3, Disabled: true}); down() {
		t.Error("held down although the peer has switched BFD off")
	}
	set(PathState{Failures: 4})
	w.now = w.now.Add(LostFor - 1)
	if w.step(); !down() {
		t.Error("let go too early")
	}
	w.now = w.now.Add(1)
	if w.step(); down() {
		t.Error("held down for good")
	}
	peer := w.facts.BGP.Peers["tor"]
	peer.BFDProfile = ""
	w.facts.BGP.Peers = map[string]lb.Peer{"tor": peer}
	w.all = true
	if step := w.step(); !step.PathsChanged || len(w.watched) > 0 {
		t.Errorf("BFD watches %v, which nobody asks for", w.watched)
	}
}

func TestStatus(t *testing.T) {
	idle := lb.PeerNode{State: "Idle", Reason: "Why", Message: "gone"}
	watched := lb.PeerNode{State: "Established", Message: "BFD is Up"}
	said := func(p lb.PeerNode) func(*world) {
		return func(w *world) {
			peer := w.facts.BGP.Peers["tor"]
			peer.Status = map[string]lb.PeerNode{"a": p}
			w.facts.BGP.Peers = map[string]lb.Peer{"tor": peer}
		}
	}
	do := func(changes ...func(*world)) func(*world) {
		return func(w *world) {
			for _, c := range changes {
				c(w)
			}
		}
	}
	up := func(w *world) {
		w.watch()
		w.facts.Seen.Paths = map[Path]PathState{toTor: {Up: true, Message: "BFD is Up"}}
	}
	down := func(w *world) { w.up(false) }
	stop := func(w *world) { w.facts.Node.Stopping = true }
	for what, c := range map[string]struct {
		change func(*world)
		writes bool
		want   *lb.PeerNode
	}{
		"the actor has not begun":            {func(*world) {}, false, nil},
		"nor after a restart":                {said(watched), false, nil},
		"not up":                             {down, true, &idle},
		"up":                                 {up, true, &watched},
		"was up":                             {do(said(watched), down), true, &idle},
		"said already":                       {do(said(watched), up), false, nil},
		"ends for good":                      {do(said(watched), up, stop), true, nil},
		"ends for good and has said nothing": {do(up, stop), false, nil},
		"restarts": {do(said(watched), up, stop, func(w *world) { w.facts.BGP.Restarting = true }),
			false, nil},
		"a profile that is not there": {do(up, func(w *world) { w.facts.BGP.Profiles = nil }), true,
			&lb.PeerNode{State: "Established", Reason: lb.ReasonProfileMissing,
				Message: "BFDProfile fast does not exist, so only the hold time monitors the path"}},
		"not for this node any more": {do(said(watched), up, func(w *world) {
			peer := w.facts.BGP.Peers["tor"]
			peer.NodeSelectors = []labels.Selector{labels.Nothing()}
			w.facts.BGP.Peers = map[string]lb.Peer{"tor": peer}
		}), true, nil},
		"refused": {do(up, func(w *world) {
			peer := w.facts.BGP.Peers["tor"]
			peer.Problem = lb.Refuse("Why", "no")
			w.facts.BGP.Peers = map[string]lb.Peer{"tor": peer}
		}), true, &lb.PeerNode{State: "Refused", Reason: "Why", Message: "no"}},
		"refused at length": {do(up, func(w *world) {
			peer := w.facts.BGP.Peers["tor"]
			peer.Problem = lb.Refuse("Why", "%s", strings.Repeat("é", maxMessage+1))
			w.facts.BGP.Peers = map[string]lb.Peer{"tor": peer}
		}), true, &lb.PeerNode{State: "Refused", Reason: "Why", Message: strings.Repeat("é", maxMessage)}},
	} {
		w := newWorld(t)
		c.change(w)
		w.step()
		writes, _ := w.state.Status(w.now, w.facts, StatusEvents{})
		got, wrote := writes.Peers["tor"]
		if wrote != c.writes || !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s: writes %v %+v, want %v %+v", what, wrote, got, c.writes, c.want)
		}
	}
}

// TestChecks looks at what is wrong with advertisements, at most so often, and on one node only.
func TestChecks(t *testing.T) {
	w := newWorld(t)
	w.facts.Node.Live = []string{"a", "b", "c"}
	reporter := plan.Winner(netip.Addr{}, w.facts.Node.Live)
	looks := 0
	e := StatusEvents{Check: true, Held: func() []plan.BGPHeld { looks++; return nil }}
	for _, self := range w.facts.Node.Live {
		w.state, w.now, looks, e.Check = New(time.Second), epoch, 0, true
		w.facts.Node.Self = self
		w.step()
		writes, again := w.state.Status(w.now, w.facts, e)
		mine := 0
		if self == reporter {
			mine = 1
		}
		if len(writes.Conditions) != mine || looks != mine || again != 0 {
			t.Errorf("%s: %+v after %d looks, again in %s", self, writes, looks, again)
		}
		w.now = w.now.Add(CheckEvery / 4)
		e.Check = false
		if _, again := w.state.Status(w.now, w.facts, e); again != 0 || looks != mine {
			t.Errorf("%s looks although nothing has changed: %d, again in %s", self, looks, again)
		}
		e.Check = true
		if _, again := w.state.Status(w.now, w.facts, e); again != CheckEvery*3/4 || looks != mine {
			t.Errorf("%s looks too soon: %d, again in %s", self, looks, again)
		}
		e.Check = false // it is due yet
		w.now = w.now.Add(CheckEvery * 3 / 4)
		if _, again := w.state.Status(w.now, w.facts, e); again != 0 || looks != 2*mine {
			t.Errorf("%s does not look again: %d, again in %s", self, looks, again)
		}
		w.facts.Node.Stopping = true
		if writes, _ := w.state.Status(w.now, w.facts, e); len(writes.Conditions) > 0 {
			t.Errorf("%s ends and writes %+v", self, writes)
		}
		w.facts.Node.Stopping = false
	}
}

// TestOrderAndRepetition plays random events in steps, one by one, in reverse and twice: in the end
// the router is to hear the same, and the same is known of each VIP.
func TestOrderAndRepetition(t *testing.T) {
	deliveries := []lb.Delivery{served, {Policy: lb.Cluster}, {Policy: lb.Local, Ready: 1},
		{Policy: lb.Local, Ready: 2, LocalReady: 1}}
	for seed := range uint64(60) {
		r := rand.New(rand.NewPCG(seed, 4))
		var all []*world
		for range 4 {
			w := newWorld(t)
			ad := w.facts.BGP.Advertisements["all"]
			ad.AggregationLength = []int{32, 31, 24}[seed%3]
			w.facts.BGP.Advertisements["all"] = ad
			w.facts.Convergence = 0
			w.step()
			all = append(all, w)
		}
		one, single, reversed, twice := all[0], all[1], all[2], all[3]
		for range 20 {
			change := map[netip.Addr]*lb.Delivery{}
			for range 1 + r.IntN(3) {
				v := vip(r.IntN(6))
				change[v] = nil
				if r.IntN(4) > 0 {
					change[v] = &deliveries[r.IntN(len(deliveries))]
				}
			}
			flap, up := r.IntN(5) == 0, r.IntN(3) > 0
			order := slices.SortedFunc(maps.Keys(change), netip.Addr.Compare)
			for _, w := range all {
				w.now = w.now.Add(time.Second)
				if flap {
					w.up(up)
				}
				if w == reversed {
					slices.Reverse(order)
				}
				for _, v := range order {
					w.dirty[v] = true
					if delete(w.held, v); change[v] != nil {
						w.held[v] = *change[v]
					}
					if w == single || w == reversed {
						w.step()
					}
				}
				if w == twice {
					w.step()
					for _, v := range order {
						w.dirty[v] = true
					}
				}
				w.step()
				for range 3 { // until nothing is on its way and no end is awaited
					w.settle()
				}
			}
			for what, w := range map[string]*world{"one by one": single, "reversed": reversed, "twice": twice} {
				if a, b := w.desired["tor"].Routes, one.desired["tor"].Routes; !maps.EqualFunc(a, b, plan.Route.Equal) {
					t.Fatalf("seed %d, %s: the router is to hear %v, want %v", seed, what, a, b)
				}
				for n := range 6 {
					if a, b := w.state.Routed(vip(n)), one.state.Routed(vip(n)); !reflect.DeepEqual(a, b) {
						t.Fatalf("seed %d, %s: %s is %+v, want %+v", seed, what, vip(n), a, b)
					}
				}
			}
		}
	}
}

// A VIP whose Service is deleted and created, or whose last endpoint ends and comes again, ten times a second is
// announced a bounded number of times, the first ones at once. Its withdrawals are never delayed.
func TestContract11FlappingRoutesAreAnnouncedLess(t *testing.T) {
	for name, end := range map[string]func(*world){
		"deleted":   func(w *world) { delete(w.held, vip1); w.dirty[vip1] = true },
		"endpoints": func(w *world) { w.hold(vip1, lb.Delivery{Policy: lb.Cluster}) },
	} {
		w := newWorld(t)
		w.up(true)
		w.step()
		w.settle()
		announced, first := 0, 0
		for turn := range 600 {
			w.hold(vip1, served)
			step := w.step()
			w.settle()
			routed := w.state.Routed(vip1)
			switch held := w.state.held[vip1]; {
			case routed.Refusal == nil && len(routed.Peers) > 0:
				if announced++; first == turn {
					first++
				}
			case routed.Refusal == nil || routed.Refusal.Reason != lb.ReasonFlapping || len(routed.Peers) > 0 ||
				step.Again <= 0 || step.Again > held.Sub(w.now):
				t.Fatalf("%s: turn %d: %+v, again %v", name, turn, routed, step.Again)
			}
			w.now = w.now.Add(50 * time.Millisecond)
			end(w)
			w.step()
			w.settle()
			w.want(name, vip1, false, false)
			w.now = w.now.Add(50 * time.Millisecond)
		}
		if first < 20 || announced > 20+60 {
			t.Errorf("%s: announced %d times in a minute, the first %d at once", name, announced, first)
		}
		w.hold(vip1, served)
		again := w.step().Again
		w.now = w.now.Add(again)
		w.step()
		w.settle()
		w.want(name+", then rests", vip1, true, true)
		if again > time.Second || w.state.Held() == 0 {
			t.Errorf("%s: it rests, and is announced after %v; %d were held", name, again, w.state.Held())
		}
	}
}

// A Service is selected by another BGPAdvertisement ten times a second. Its peers hear of that a bounded number of times,
// the first ones at once, and in the end of what is so then; other Services' routes and its end never wait.
func TestContract11RoutesThatNeverRestAreChangedLess(t *testing.T) {
	selects := func(color string) []labels.Selector {
		return []labels.Selector{labels.SelectorFromSet(labels.Set{"color": color})}
	}
	pref := uint32(200)
	for name, other := range map[string]lb.BGPAdvertisement{
		"attributes": {Name: "red", AggregationLength: 32, LocalPref: &pref, ServiceSelectors: selects("red")},
		"aggregates": {Name: "red", AggregationLength: 24, ServiceSelectors: selects("red")},
		"peers":      {Name: "red", AggregationLength: 32, Peers: []string{"other"}, ServiceSelectors: selects("red")},
	} {
		w := newWorld(t)
		peer := w.facts.BGP.Peers["tor"]
		peer.Name, peer.Addr = "other", netip.MustParseAddr("10.0.0.3")
		w.facts.BGP.Peers["other"] = peer
		w.facts.BGP.Advertisements = map[string]lb.BGPAdvertisement{"red": other,
			"blue": {Name: "blue", AggregationLength: 32, Peers: []string{"tor"}, ServiceSelectors: selects("blue")}}
		w.up(true)
		w.step()
		w.settle()
		updates, most, first := map[string]int{}, 0, 0
		turn := func(color string) Step {
			before := w.desired
			w.labels = labels.Set{"color": color}
			w.hold(vip1, served)
			step := w.step()
			w.settle()
			for peer, s := range w.desired {
				for prefix, route := range s.Routes {
					if was, ok := before[peer].Routes[prefix]; !ok || !was.Equal(route) {
						updates[peer+prefix.String()]++
						most = max(most, updates[peer+prefix.String()])
					}
				}
			}
			return step
		}
		for i := range 300 {
			before := w.desired
			turn([]string{"blue", "red"}[i%2])
			if !reflect.DeepEqual(w.desired, before) && first == i {
				first++
			}
			w.now = w.now.Add(100 * time.Millisecond)
		}
		if first < 20 || most > 20+30 {
			t.Errorf("%s: %d updates of a prefix in 30 s, the first %d changes at once", name, most, first)
		}
		again := turn("red").Again
		if again > time.Second || w.state.Held() == 0 {
			t.Errorf("%s: it rests, and is announced as it is after %v; %d were held", name, again, w.state.Held())
		}
		w.now = w.now.Add(again)
		w.step()
		w.settle()
		w.all = true
		w.step()
		fresh := newWorld(t)
		fresh.facts, fresh.labels = w.facts, w.labels
		fresh.hold(vip1, served)
		fresh.step()
		if !reflect.DeepEqual(w.desired, fresh.desired) {
			t.Errorf("%s: it rests as %v, want %v", name, w.desired, fresh.desired)
		}
		for i := range 4 {
			turn([]string{"blue", "red"}[i%2])
		}
		if w.state.VIPs()[vip1].Obstacles == nil {
			t.Errorf("%s: nothing says why its peers do not hear of it anew", name)
		}
		w.labels = labels.Set{"color": "blue"}
		w.hold(vip2, served)
		w.step()
		if vip := netip.PrefixFrom(vip2, 32); w.desired["tor"].Routes[vip].LocalPref == 0 {
			t.Errorf("%s: another Service waits", name)
		}
		clear(w.held)
		w.dirty[vip1], w.dirty[vip2] = true, true
		w.step()
		for peer, s := range w.desired {
			if len(s.Routes) > 0 {
				t.Errorf("%s: %s still hears of %v", name, peer, s.Routes)
			}
		}
	}
}

// A route in graceful shutdown stays in it while its VIP may not be announced anew.
func TestContract11FlappingRoutesStayInGracefulShutdown(t *testing.T) {
	w := newWorld(t)
	w.up(true)
	w.step()
	announced := 0
	for range 600 {
		for _, d := range []lb.Delivery{{Policy: lb.Local, Ready: 1, LocalReady: 1},
			{Policy: lb.Local, Ready: 1, LocalServing: 1}} {
			w.hold(vip1, d)
			w.step()
			w.settle()
			w.want("ends and comes again", vip1, true, true)
			if w.state.Routed(vip1).Refusal == nil {
				announced++
			}
			w.now = w.now.Add(50 * time.Millisecond)
		}
	}
	if announced < 20 || announced > 20+60 {
		t.Errorf("announced %d times in a minute", announced)
	}
}

// After a session has flapped, no step asks for all VIPs only because a router takes nothing of what it shall hear.
func TestContract11APeerThatTakesNothingCostsNothing(t *testing.T) {
	w := newWorld(t)
	const many = 200
	for i := range many {
		w.hold(vip(i), served)
	}
	w.facts.BGP.Peers["slow"] = lb.Peer{Name: "slow", LocalASN: 64500, PeerASN: 64502, Addr: netip.MustParseAddr("10.0.0.3"),
		Port: 179}
	w.step()
	w.up(true)
	w.facts.Seen.Sessions["slow"] = Session{Established: true, Since: w.now}
	w.settle()
	asked := 0
	hears := w.facts.Seen.Hears
	w.facts.Seen.Hears = func(p netip.Prefix) []string { asked++; return hears(p) }
	w.up(false)
	w.step()
	if asked < many {
		t.Errorf("%d VIPs were looked at when a session was lost, want %d", asked, many)
	}
	asked = 0
	for range 10 {
		w.hold(vip1, served)
		w.step()
	}
	if asked > 10 {
		t.Errorf("%d VIPs were looked at in 10 steps with one change each", asked)
	}
	w.up(true)
	w.settle()
	w.want("the session is up again", vip1, true, true)
	w.want("the session is up again", vip2, true, true)
	delete(w.hears, netip.PrefixFrom(vip2, 32))
	w.session(func(s *Session) { s.Heard++ })
	w.step()
	w.want("the router hears less than it shall", vip2, true, false)
}

// A router that is not near sends to the address of the session, of which the step hears with the session: what comes
// in at that link has to be forwarded.
func TestContract1AFarRouterSendsToTheAddressOfTheSession(t *testing.T) {
	w := newWorld(t)
	far := netip.MustParseAddr("10.9.0.2")
	peer := w.facts.BGP.Peers["tor"]
	peer.Addr, peer.BFDProfile = far, ""
	w.facts.BGP.Peers["tor"] = peer
	w.facts.Node.CheckForwarding = true
	w.facts.Node.Interfaces = append(w.facts.Node.Interfaces, lb.Interface{Name: "wg0", Up: true, NoARP: true,
		Unforwarded4: true, Addresses: []netip.Prefix{netip.MustParsePrefix("10.8.0.1/32")}})
	w.hold(vip1, served)
	w.step()
	routed := func(what string, want bool) {
		t.Helper()
		if _, routed := w.desired["tor"].Routes[netip.PrefixFrom(vip1, 32)]; routed != want {
			t.Errorf("%s: the router shall hear of the VIP: %v", what, routed)
		}
	}
	routed("before a session", true)
	w.session(func(s *Session) { s.Local = netip.MustParseAddr("10.8.0.1") }) // a connection that is no session yet
	w.step()
	routed("a connection from the tunnel's address", false)
	w.up(true)
	w.session(func(s *Session) { s.Local = netip.MustParseAddr("10.8.0.1") })
	w.settle()
	routed("a session from the tunnel's address", false)
	if got := w.state.Locals()["tor"]; got.String() != "10.8.0.1" {
		t.Errorf("the address of the session is %v", got)
	}
	w.up(true)
	w.session(func(s *Session) { s.Local = netip.MustParseAddr("10.0.0.1") })
	w.settle()
	routed("a session from another address", true)
}
