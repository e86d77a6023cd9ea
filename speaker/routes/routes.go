// Package routes decides what BGP peers hear from this node, which paths to them BFD watches, and
// what the status of the objects for BGP shall show, and remembers what the next decision has to
// know.
package routes

import (
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/speaker/plan"
)

// Facts concern all VIPs alike.
type Facts struct {
	Node plan.Facts
	// BGP lacks BFDDown, which is decided here, and Locals, which are among what was seen.
	BGP plan.BGPFacts
	// Unknown names what is not known yet of BGP; "" when all is. Until then no session is opened: a
	// router that has kept the routes of this speaker's predecessor drops those that it does not hear
	// again.
	Unknown string
	// Rescue is set where a proxy passes on the connections that routers move here, and Rescued while
	// it does so by all that it was told.
	Rescue, Rescued bool
	// Convergence is how long routers get to choose other routes before a planned withdrawal.
	Convergence time.Duration
	Seen        Seen
}

// Seen is what the actors have found out, as of the beginning of the step.
type Seen struct {
	Sessions map[string]Session // by peer
	// Hears returns the peers that hear of a prefix now, in any order.
	Hears func(netip.Prefix) []string
	Paths map[Path]PathState
}

// Session is what is so of a BGP session.
type Session struct {
	Established bool
	Since       time.Time // when it became what it is
	// Synced is set when all that the peer shall hear is on the wire, and nothing else.
	Synced bool
	// Heard counts how often what the peer hears has changed while it was established.
	Heard uint64
	// Peer is the peer's address; not valid unless the session is established.
	Peer netip.Addr
	// Local is the node's address of the last connection, also of one that is about to be established; not valid
	// before the first.
	Local netip.Addr
	// Status is what a BGPPeer shows of it.
	Status lb.PeerNode
	// Reason and LastError say why it is not, or was last not, established.
	Reason    lb.Reason
	LastError string
}

// up is when a session was established; zero while it is not.
func (s Session) up() time.Time {
	if !s.Established {
		return time.Time{}
	}
	return s.Since
}

// Events are what may change routes.
type Events struct {
	// VIPs are to be planned anew; with All set, more may differ than they.
	VIPs map[netip.Addr]bool
	All  bool
	// Holders returns the Services on a VIP; none when it is gone.
	Holders func(vip netip.Addr) []plan.Holder
	// Held returns all VIPs that are held.
	Held func() []netip.Addr
	// Elsewhere reports whether another node announces a VIP over BGP, and is not about to end that.
	Elsewhere func(vip netip.Addr) bool
}

// Step is what follows from a step.
type Step struct {
	// Sessions are what the BGP actor shall have, if SessionsChanged is set.
	Sessions        map[string]plan.BGPSession
	SessionsChanged bool
	// Paths are what the BFD actor shall watch, if PathsChanged is set.
	Paths        map[Path]lb.BFDProfile
	PathsChanged bool
	// Changed are the VIPs whose peers or decision have changed, or may have.
	Changed map[netip.Addr]bool
	News    []News
	// Again is when to look again; 0 for not at all.
	Again time.Duration
}

// News is that a session has come up, or was lost and why.
type News struct {
	Peer      string
	Up        bool
	Reason    lb.Reason
	LastError string
}

// A router sends connections of other nodes within 50 ms of the first route to a node that has just
// started. So once all else is known, routes wait until the proxy passes such connections on: as
// long as it says that it does not, and for rescueTime at most, as a proxy of an earlier release
// never says so. What is known then is told to the proxy within the same step, so that its answer
// counts from tellTime later on.
const (
	rescueTime = 3 * time.Second
	tellTime   = time.Millisecond
)

// State is what is remembered from one step to the next. Use New.
type State struct {
	book     plan.BGPBook
	paths    paths
	waiting  string    // what is needed before the first plan; "" once there is one
	known    time.Time // since when all else is known that the first plan needs
	planned  bool
	sessions map[string]Session // as last seen
	locals   map[string]netip.Addr
	heard    map[netip.Addr][]string
	// told are the peers that have heard of a VIP since Services hold it.
	told map[netip.Addr]map[string]bool
	// pending are the VIPs whose peers may have changed since heard was written.
	pending map[netip.Addr]bool
	// leaving are the VIPs that routers are told will end, and until when they are still announced.
	leaving map[netip.Addr]*departure
	checks  checks
	flaps   plan.Flaps[netip.Addr]
	steady  map[netip.Addr]bool      // VIPs that are announced and not about to end
	held    map[netip.Addr]time.Time // VIPs whose announcement waits, and until when
	// amends counts how often peers heard anew of a prefix, and amending has those of which they are to, and when.
	amends   plan.Flaps[netip.Prefix]
	amending map[netip.Prefix]time.Time
}

// departure is the planned end of a VIP's announcement.
type departure struct {
	until     time.Time
	over      bool
	elsewhere bool // whether another node announced it when that was last asked
}

// New returns a State that has planned nothing. A VIP that flaps is announced anew once in each interval.
func New(flapInterval time.Duration) State {
	return State{
		waiting: "the API server", heard: map[netip.Addr][]string{}, told: map[netip.Addr]map[string]bool{},
		pending: map[netip.Addr]bool{},
		leaving: map[netip.Addr]*departure{}, flaps: plan.NewFlaps[netip.Addr](flapInterval), steady: map[netip.Addr]bool{},
		held: map[netip.Addr]time.Time{}, amends: plan.NewFlaps[netip.Prefix](flapInterval),
		amending: map[netip.Prefix]time.Time{},
	}
}

// Step plans what BGP peers hear.
func (s *State) Step(now time.Time, f Facts, e Events) Step {
	var wait time.Duration
	if s.waiting, wait = s.missing(now, f); s.waiting != "" {
		return Step{Again: wait}
	}
	e.All = e.All || !s.planned
	s.planned = true
	step := Step{Changed: map[netip.Addr]bool{}}
	step.News = s.look(f.Seen, step.Changed)
	s.part(now, step.Changed)
	s.release(now, step.Changed)
	s.paths.judge(now, f.Seen.Paths)
	f.BGP.BFDDown = s.paths.lost()
	f.BGP.Locals = localsOf(f.Seen.Sessions)
	if !maps.Equal(f.BGP.Locals, s.locals) { // packets of other links may be what a router sends
		s.locals, e.All = f.BGP.Locals, true
	}

	var planned map[netip.Addr]bool
	planned, step.SessionsChanged = s.plan(now, f, e, step.Changed)
	for vip := range planned {
		step.Changed[vip] = true
		s.pending[vip] = true
		s.hear(vip, f.Seen.Hears) // an aggregate that it is in now may be heard of already
		s.depart(now, f, e, vip)
		s.count(now, vip)
	}
	step.Sessions = s.book.Sessions()
	step.PathsChanged = s.paths.plan(now, &s.book, f.Seen, f.Node.Interfaces)
	if step.PathsChanged {
		step.Paths = s.paths.desired()
	}
	step.Again = s.again(now)
	return step
}

// missing says what a plan of routes needs and is not known yet, and for how long, if that is
// certain.
func (s *State) missing(now time.Time, f Facts) (what string, wait time.Duration) {
	switch {
	case s.planned:
		return "", 0
	case f.Unknown != "":
		return f.Unknown, 0
	case !f.Node.Joined:
		return "the other speakers", 0 // to know where connections are that routers move here
	case f.Node.Gate == lb.ReasonFeedUnknown:
		return "the first report of the proxy", 0
	case !f.Rescue || len(f.Node.Live) < 2:
		return "", 0
	}
	const proxy = "the proxy, which learns where connections are"
	if s.known.IsZero() {
		s.known = now
	}
	switch passed := now.Sub(s.known); {
	case passed < tellTime:
		return proxy, tellTime - passed
	case passed < rescueTime && !f.Rescued:
		return proxy, rescueTime - passed
	}
	return "", 0
}

// look notes which sessions are up, and which peers hear of the VIPs whose peers may have changed.
// It adds to changed each VIP that this is news about.
func (s *State) look(seen Seen, changed map[netip.Addr]bool) (news []News) {
	settled, moved := true, false
	for name, now := range seen.Sessions {
		settled = settled && (now.Synced || !now.Established)
		before := s.sessions[name]
		moved = moved || now.Synced != before.Synced || now.Heard != before.Heard
	}
	flapped := len(seen.Sessions) != len(s.sessions)
	for name := range s.book.Sessions() {
		flapped = flapped || seen.Sessions[name].up() != s.sessions[name].up()
	}
	if flapped {
		for vip := range s.book.VIPs() {
			s.pending[vip] = true
		}
		news = differing(s.sessions, seen.Sessions)
	}
	s.sessions = seen.Sessions
	if moved || flapped { // a peer that takes nothing must not have each step ask for all VIPs
		for vip := range s.pending {
			if s.hear(vip, seen.Hears) {
				changed[vip] = true
			}
		}
	}
	if settled {
		clear(s.pending)
	}
	return news
}

// differing returns which sessions are up or were lost since before.
func differing(before, now map[string]Session) (news []News) {
	for _, name := range sortedKeys(now) {
		session := now[name]
		up, wasUp := session.up(), before[name].up()
		switch {
		case !up.IsZero() && up != wasUp:
			news = append(news, News{Peer: name, Up: true})
		case up.IsZero() && !wasUp.IsZero():
			news = append(news, News{Peer: name, Reason: session.Reason, LastError: session.LastError})
		}
	}
	return news
}

// hear notes which peers hear of a VIP, and reports whether they are others than before.
func (s *State) hear(vip netip.Addr, hears func(netip.Prefix) []string) (changed bool) {
	var peers []string
	for _, p := range s.book.VIP(vip).Prefixes {
		peers = append(peers, hears(p)...)
	}
	slices.Sort(peers)
	peers = slices.Compact(peers)
	changed = !slices.Equal(peers, s.heard[vip])
	if len(peers) == 0 {
		delete(s.heard, vip)
	} else if changed {
		s.heard[vip] = peers
		if s.told[vip] == nil {
			s.told[vip] = map[string]bool{}
		}
		for _, peer := range peers {
			s.told[vip][peer] = true
		}
	}
	return changed
}

// plan plans the VIPs of the events and those in changed, or all, and returns those that it has
// planned.
func (s *State) plan(now time.Time, f Facts, e Events, changed map[netip.Addr]bool,
) (planned map[netip.Addr]bool, sessions bool) {
	input := func(vip netip.Addr) (plan.BGPInput, bool) { return s.input(now, f, e, vip) }
	mayAmend := func(prefix netip.Prefix) bool { return s.mayAmend(now, prefix) }
	if !e.All {
		dirty := maps.Clone(changed)
		maps.Copy(dirty, e.VIPs)
		return s.book.Plan(f.Node, f.BGP, dirty, input, mayAmend)
	}
	var inputs []plan.BGPInput
	for _, vip := range e.Held() {
		if in, ok := input(vip); ok {
			inputs = append(inputs, in)
		}
	}
	planned = map[netip.Addr]bool{}
	for vip := range s.book.VIPs() {
		planned[vip] = true
	}
	sessions = s.book.PlanAll(f.Node, f.BGP, inputs, mayAmend)
	for vip := range s.book.VIPs() {
		planned[vip] = true
	}
	return planned, sessions
}

// input is what this node knows of a VIP for BGP; ok is false when no Service holds it.
func (s *State) input(now time.Time, f Facts, e Events, vip netip.Addr) (in plan.BGPInput, ok bool) {
	holders := e.Holders(vip)
	if len(holders) == 0 {
		return in, false
	}
	was := s.book.VIP(vip)
	in = plan.BGPInput{VIP: vip, Holders: holders,
		Announced: len(s.heard[vip]) > 0 || was.Lingers, // whose session may come back
		Steady:    s.steady[vip] && s.wasTold(vip),
		Flapping:  !s.steady[vip] && s.flaps.Wait(now, vip, false) > 0}
	if in.Flapping && !was.Lingers {
		in.Announced = false // its withdrawal is on the way
	}
	if d := s.leaving[vip]; d != nil {
		in.Elsewhere = e.Elsewhere(vip)
		if in.Elsewhere && !d.elsewhere && !f.Node.Stopping { // routers get the time to choose its route
			d.until, d.over = now.Add(f.Convergence), false
		}
		d.elsewhere, in.Converged = in.Elsewhere, d.over
	}
	return in, true
}

// wasTold reports whether a peer that is still there has heard of a VIP.
func (s *State) wasTold(vip netip.Addr) bool {
	for peer := range s.told[vip] {
		if _, is := s.book.Peers()[peer]; is {
			return true
		}
	}
	return false
}

// mayAmend reports whether peers may hear anew of a prefix, and takes note of it.
func (s *State) mayAmend(now time.Time, prefix netip.Prefix) bool {
	_, waits := s.amending[prefix]
	delete(s.amending, prefix)
	wait := s.amends.Wait(now, prefix, false)
	if wait <= 0 {
		s.amends.Announce(now, prefix)
		return true
	}
	if s.amending[prefix] = now.Add(wait); !waits {
		s.amends.Hold()
	}
	return false
}

// release adds to changed the VIPs whose announcement, or whose routes' change, has waited.
func (s *State) release(now time.Time, changed map[netip.Addr]bool) {
	for prefix, until := range s.amending {
		if now.Before(until) {
			continue
		}
		delete(s.amending, prefix)
		for _, vip := range s.book.Within(prefix) {
			changed[vip] = true
		}
	}
	for vip, until := range s.held {
		if !now.Before(until) {
			changed[vip] = true
		}
	}
}

// count notes that a VIP is announced, or has to wait for that.
func (s *State) count(now time.Time, vip netip.Addr) {
	v := s.book.VIP(vip)
	_, waits := s.held[vip]
	switch delete(s.held, vip); {
	case v.Refusal != nil && v.Refusal.Reason == lb.ReasonFlapping:
		s.held[vip] = now.Add(s.flaps.Wait(now, vip, false))
		if !waits {
			s.flaps.Hold()
		}
		delete(s.steady, vip)
	case v.Refusal != nil || len(v.Prefixes) == 0:
		delete(s.steady, vip)
	case !s.steady[vip]:
		s.steady[vip] = true
		s.flaps.Announce(now, vip)
	}
}

// Held counts the announcements, and the changes of routes, that had to wait.
func (s *State) Held() int { return s.flaps.Held() + s.amends.Held() }

// part adds to changed the VIPs whose departure is over.
func (s *State) part(now time.Time, changed map[netip.Addr]bool) {
	for vip, d := range s.leaving {
		if !d.over && !now.Before(d.until) {
			d.over = true
			changed[vip] = true
		}
	}
}

// depart notes that the end of a VIP's announcement has begun, or that there is none.
func (s *State) depart(now time.Time, f Facts, e Events, vip netip.Addr) {
	v, known := s.book.VIPs()[vip]
	if !known {
		delete(s.told, vip)
	}
	switch {
	case !known || v.Refusal == nil:
		delete(s.leaving, vip)
	case v.Lingers && s.leaving[vip] == nil:
		s.leaving[vip] = &departure{until: now.Add(f.Convergence), elsewhere: e.Elsewhere(vip)}
	}
}

// again returns when something ends by itself; 0 for never.
func (s *State) again(now time.Time) time.Duration {
	next := s.paths.again(now)
	for _, d := range s.leaving {
		if !d.over {
			next = plan.Sooner(next, d.until.Sub(now))
		}
	}
	for _, until := range s.held {
		next = plan.Sooner(next, until.Sub(now))
	}
	for _, until := range s.amending {
		next = plan.Sooner(next, until.Sub(now))
	}
	return next
}

// Waiting names what is needed before the first plan; "" once there is one.
func (s *State) Waiting() string { return s.waiting }

// Routed returns what has become of a VIP over BGP.
func (s *State) Routed(vip netip.Addr) plan.Routed {
	if s.waiting != "" {
		return plan.Routed{Unknown: true}
	}
	return s.book.VIP(vip).Routed(slices.Clone(s.heard[vip]))
}

// Routable reports whether BGP is for the VIP, as far as is known.
func (s *State) Routable(vip netip.Addr) bool { return s.waiting != "" || s.book.VIP(vip).Selected }

// Locals returns the node's addresses of the sessions, as of the last step. Do not change it.
func (s *State) Locals() map[string]netip.Addr { return s.locals }

func localsOf(sessions map[string]Session) map[string]netip.Addr {
	locals := make(map[string]netip.Addr, len(sessions))
	for name, session := range sessions {
		if session.Local.IsValid() {
			locals[name] = session.Local
		}
	}
	return locals
}

// Peers returns the decision for each peer that selects the node. Do not change it.
func (s *State) Peers() map[string]plan.PeerDecision { return s.book.Peers() }

// VIPs returns what was planned for each VIP. Do not change it.
func (s *State) VIPs() map[netip.Addr]plan.BGPVIP { return s.book.VIPs() }

// Stopped reports whether nothing is on its way to any peer, and no end of an announcement has to
// be waited for, since the speaker was told to end. sessions are what the actor says now.
func (s *State) Stopped(sessions map[string]Session) bool {
	if s.waiting != "" {
		return true // there are no sessions
	}
	for _, v := range s.book.VIPs() {
		if v.Leaving || v.Refusal == nil {
			return false
		}
	}
	for _, session := range sessions {
		if session.Established && !session.Synced {
			return false
		}
	}
	return true
}

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }
