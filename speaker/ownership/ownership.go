// Package ownership decides, VIP by VIP, which node owns it and whether this one answers for it
// over ARP and NDP, and remembers what the next decision on the VIP has to know.
package ownership

import (
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/landfall-lb/landfall/speaker/plan"
)

// FreshFor is how long a VIP counts as fresh: longer than a change takes from the API server to
// each node's kernel.
const FreshFor = time.Second

// looksAtOnce is how many claims of nodes a step goes through: a quarter of a second of processor time.
// VIPs beyond that are decided in the steps that follow, so that a crash in a cluster of a thousand nodes
// holds up neither the VIPs of the node that crashed nor anything else.
const looksAtOnce = 500_000

// Seen is what the actor for ARP and NDP has found out.
type Seen struct {
	Answering        map[netip.Addr][]string
	Probed           map[netip.Addr]bool
	ConflictingHosts map[netip.Addr][]plan.ConflictingHost
	Rivals           map[netip.Addr]string
	// Version is another one whenever the others say something else; 0 if that is not known.
	Version uint64
}

// Events are what may change decisions.
type Events struct {
	// VIPs are to be decided anew. Those that no Service holds any more are forgotten.
	VIPs map[netip.Addr]bool
	Seen Seen
	// Input returns what is known of a VIP outside of this package; ok is false when no Service holds
	// it. It is called once for each VIP that is decided.
	Input func(vip netip.Addr) (in plan.Input, ok bool)
}

// Answer says where a VIP is answered for. It is announced again when the round changes.
type Answer struct {
	On    []string
	Round int
	// Owned is set where this node owns the VIP as a majority sees it, and does not only answer until
	// another does.
	Owned bool
	// Held is set while the VIP is answered for and not announced.
	Held bool
}

// Decided is what a step has come to for one VIP. Before is the zero Decision of a VIP that is new,
// After that of one that no Service holds any more.
type Decided struct {
	Claims        map[string]plan.Claim // of the other nodes
	Before, After plan.Decision
	// Rival is the other node that was the last to announce the VIP while this one answers for it; ""
	// if none was seen to.
	Rival     string
	New, Gone bool
}

// State is what is remembered from one step to the next. Use New.
type State struct {
	decisions map[netip.Addr]plan.Decision
	answers   map[netip.Addr]Answer
	probes    map[netip.Addr][]string
	rounds    map[netip.Addr]int
	fresh     map[netip.Addr]time.Time // VIPs that were first seen a moment ago, until when they count as fresh
	served    map[netip.Addr]bool      // VIPs that a node of ours has answered for
	proving   map[netip.Addr]bool      // VIPs that this node answers for and still probes
	unserved  map[netip.Addr]bool      // VIPs that no node answers for now
	since     map[netip.Addr]time.Time // when this node began to answer for VIPs
	flaps     plan.Flaps[netip.Addr]
	held      map[netip.Addr]time.Time // VIPs whose announcement waits, and until when
	moved     map[netip.Addr]bool      // VIPs that another node has answered for since this one last began to
	later     map[netip.Addr]bool      // VIPs that are to be decided anew when there is room in a step
	looks     int                      // claims of nodes that a step goes through
	missing   []string                 // nodes, as of the last step
	apart     bool                     // it heard no majority in the last step, or was yielding
	seen      Seen
	changes   int
}

// New returns a State that remembers nothing. A VIP that flaps is announced anew once in each interval.
func New(flapInterval time.Duration) State {
	return State{
		decisions: map[netip.Addr]plan.Decision{}, answers: map[netip.Addr]Answer{}, probes: map[netip.Addr][]string{},
		rounds: map[netip.Addr]int{}, fresh: map[netip.Addr]time.Time{}, served: map[netip.Addr]bool{},
		proving:  map[netip.Addr]bool{},
		unserved: map[netip.Addr]bool{}, since: map[netip.Addr]time.Time{},
		flaps: plan.NewFlaps[netip.Addr](flapInterval), held: map[netip.Addr]time.Time{}, moved: map[netip.Addr]bool{},
		later: map[netip.Addr]bool{}, looks: looksAtOnce,
	}
}

// Step decides these VIPs: those that the events name, those that the actor has news of, and those
// that stop being fresh; of many in a large cluster, some are left for the next steps. It returns the
// decisions, and reports whether the actor's work changes. again is when to call Step next; 0 for not at
// all.
func (s *State) Step(now time.Time, facts plan.Facts, e Events) (
	decided map[netip.Addr]Decided, changed bool, again time.Duration) {
	vips := maps.Clone(e.VIPs)
	if vips == nil {
		vips = map[netip.Addr]bool{}
	}
	s.look(e.Seen, vips)
	s.ripen(now, vips)
	s.greet(facts, vips)
	vips = s.portion(facts, vips)
	decided = make(map[netip.Addr]Decided, len(vips))
	for vip := range vips {
		in, held := e.Input(vip)
		if !held {
			decided[vip] = Decided{Before: s.decisions[vip], Gone: true}
			s.forget(vip)
		} else {
			decided[vip] = s.decide(now, facts, in)
		}
		changed = s.assign(vip) || changed
	}
	if again = s.ripest(now); len(s.later) > 0 {
		again = plan.Sooner(again, 0)
	}
	return decided, changed, again
}

// portion returns the VIPs that this step decides, and keeps the others for the next ones. First come
// those that cannot wait, however many they are, and then those that have changed, as long as they are
// few.
func (s *State) portion(facts plan.Facts, vips map[netip.Addr]bool) map[netip.Addr]bool {
	room := max(s.looks/max(len(facts.Live), 1), 1)
	if len(vips) > room {
		live := make(map[string]bool, len(facts.Live))
		for _, node := range facts.Live {
			live[node] = true
		}
		for vip := range vips {
			if !s.urgent(vip, live) {
				s.later[vip] = true
				delete(vips, vip)
			}
		}
	}
	for vip := range s.later {
		if len(vips) >= room {
			break
		}
		vips[vip] = true
	}
	for vip := range vips {
		delete(s.later, vip)
	}
	return vips
}

// urgent reports whether a VIP may be off the air while its decision waits, or be answered for wrongly by
// this node.
func (s *State) urgent(vip netip.Addr, live map[string]bool) bool {
	d, known := s.decisions[vip]
	return !known || s.unserved[vip] || d.Owner != "" && !live[d.Owner] || len(d.Answer) > 0 ||
		len(s.seen.Answering[vip]) > 0
}

// look takes what the actor has found out. It adds to vips those that this is news about.
func (s *State) look(seen Seen, vips map[netip.Addr]bool) {
	if seen.Version != 0 && seen.Version == s.seen.Version {
		return
	}
	differing(s.seen.Answering, seen.Answering, slices.Equal, vips)
	differing(s.seen.ConflictingHosts, seen.ConflictingHosts, slices.Equal, vips)
	differing(s.seen.Rivals, seen.Rivals, func(a, b string) bool { return a == b }, vips)
	differing(s.seen.Probed, seen.Probed, func(a, b bool) bool { return a == b }, vips)
	s.seen = seen
}

// differing compares two maps, and adds to found each key whose values differ.
func differing[V any](a, b map[netip.Addr]V, same func(a, b V) bool, found map[netip.Addr]bool) {
	kept := 0 // keys of a that are in b
	for vip, now := range b {
		before, ok := a[vip]
		if ok {
			kept++
		}
		if !same(before, now) {
			found[vip] = true
		}
	}
	if kept == len(a) {
		return
	}
	for vip := range a {
		if _, ok := b[vip]; !ok {
			found[vip] = true
		}
	}
}

// greet has this node announce its own VIPs again when a missing node is back: that node may have
// announced them before it was heard. A node that was on the lesser side itself does so when it is
// sure again what it owns. It adds the VIPs to vips.
func (s *State) greet(facts plan.Facts, vips map[netip.Addr]bool) {
	back := slices.ContainsFunc(s.missing, func(node string) bool { return slices.Contains(facts.Live, node) }) ||
		s.apart
	s.missing, s.apart = facts.Missing, facts.Parted || facts.Alone
	if !back || s.apart {
		return
	}
	for vip := range s.answers {
		if !s.decisions[vip].Handover {
			s.rounds[vip]++
			vips[vip] = true
		}
	}
}

// ripen adds to vips those that are fresh no more, and those whose announcement has waited.
func (s *State) ripen(now time.Time, vips map[netip.Addr]bool) {
	for vip, until := range s.held {
		if !now.Before(until) {
			vips[vip] = true
		}
	}
	for vip, until := range s.fresh {
		if !now.Before(until) {
			vips[vip] = true
			delete(s.fresh, vip)
		}
	}
}

// ripest returns when the next VIP ripens; 0 for none.
func (s *State) ripest(now time.Time) (next time.Duration) {
	for _, waits := range []map[netip.Addr]time.Time{s.fresh, s.held} {
		for _, until := range waits {
			next = plan.Sooner(next, until.Sub(now))
		}
	}
	return next
}

func (s *State) forget(vip netip.Addr) {
	delete(s.decisions, vip)
	delete(s.rounds, vip)
	delete(s.fresh, vip)
	delete(s.served, vip)
	delete(s.proving, vip)
	delete(s.unserved, vip)
	delete(s.since, vip)
	delete(s.held, vip)
	delete(s.moved, vip)
	delete(s.later, vip)
}

// decide plans one VIP and notes what follows.
func (s *State) decide(now time.Time, facts plan.Facts, in plan.Input) Decided {
	vip := in.VIP
	before, known := s.decisions[vip]
	if !known {
		s.fresh[vip] = now.Add(FreshFor)
	}
	in.Answering, in.Probed, in.ConflictingHosts = s.seen.Answering[vip], s.seen.Probed[vip], s.seen.ConflictingHosts[vip]
	if len(in.Answering) > 0 || anyAnswers(in.Claims) {
		delete(s.fresh, vip) // from now on, whoever can shall step in at once
	}
	if len(in.Answering) > 0 && !s.proving[vip] || anyAnswers(in.Claims) || in.Restarted {
		s.served[vip] = true
	}
	if plan.Ceded(in) {
		delete(s.served, vip)
	}
	_, in.Fresh = s.fresh[vip]
	in.Served, in.Since, in.Proving = s.served[vip], s.since[vip], s.proving[vip]
	next := plan.Decide(facts, in)
	if before.Overlap != next.Overlap && !s.apart {
		s.rounds[vip]++ // clients may have listened to the other one last
	}
	switch {
	case len(next.Answer) == 0:
		delete(s.since, vip)
	case len(before.Answer) == 0:
		s.since[vip] = now
	}
	next.Flapping = s.holdBack(now, vip, len(before.Answer) > 0, len(next.Answer) > 0)
	if len(next.Answer) == 0 && anyAnswers(in.Claims) {
		s.moved[vip] = true
	}
	if known && before.Owner != next.Owner {
		s.changes++
	}
	delete(s.proving, vip)
	switch {
	case next.Proving:
		s.proving[vip] = true
	case len(next.Answer) > 0:
		s.served[vip] = true // and so it is not probed again, even if it takes a while to answer
	}
	s.decisions[vip] = next
	if next.Served() {
		delete(s.unserved, vip)
	} else {
		s.unserved[vip] = true
	}
	return Decided{Claims: in.Claims, Before: before, After: next, Rival: s.seen.Rivals[vip], New: !known}
}

// holdBack reports whether this node answers for a VIP and has to wait before it announces it.
func (s *State) holdBack(now time.Time, vip netip.Addr, before, answers bool) bool {
	until, held := s.held[vip]
	switch {
	case !answers:
		delete(s.held, vip)
		return false
	case held && now.Before(until):
		return true
	case before && !held:
		return false
	}
	wait := s.flaps.Wait(now, vip, s.moved[vip])
	if wait > 0 {
		s.held[vip] = now.Add(wait)
		s.flaps.Hold()
		return true
	}
	s.flaps.Announce(now, vip)
	delete(s.held, vip)
	delete(s.moved, vip)
	return false
}

// Held counts the announcements that had to wait.
func (s *State) Held() int { return s.flaps.Held() }

func anyAnswers(claims map[string]plan.Claim) bool {
	for _, claim := range claims {
		if claim.Answering {
			return true
		}
	}
	return false
}

// assign notes what the actor has to do for a VIP, and reports whether that is something new.
func (s *State) assign(vip netip.Addr) bool {
	d := s.decisions[vip]
	answer, probe := s.answers[vip], s.probes[vip]
	delete(s.answers, vip)
	delete(s.probes, vip)
	if len(d.Answer) > 0 {
		// A node that hears no majority does not know who else answers by right: one that it waits for
		// may have taken over. It would take that one's clients in the middle of their connections.
		s.answers[vip] = Answer{On: d.Answer, Round: s.rounds[vip], Owned: !d.Handover && !s.apart,
			Held: d.Flapping}
	}
	if len(d.Probe) > 0 && (len(d.Answer) == 0 || d.Proving) {
		s.probes[vip] = d.Probe
	}
	now := s.answers[vip]
	return !slices.Equal(answer.On, now.On) || answer.Round != now.Round || answer.Owned != now.Owned ||
		answer.Held != now.Held ||
		!slices.Equal(probe, s.probes[vip])
}

// Desired returns what the actor is to answer for, and on which interfaces it is to probe. Do not
// change it, and do not keep it beyond the next step.
func (s *State) Desired() (answers map[netip.Addr]Answer, probes map[netip.Addr][]string) {
	return s.answers, s.probes
}

// Decision returns what was last decided for the VIP; ok is false when nothing was.
func (s *State) Decision(vip netip.Addr) (d plan.Decision, ok bool) {
	d, ok = s.decisions[vip]
	return d, ok
}

// Served reports whether a node of ours has answered for a VIP, as far as this one knows.
func (s *State) Served(vip netip.Addr) bool { return s.served[vip] }

// Answering returns the interfaces on which the actor answers for a VIP.
func (s *State) Answering(vip netip.Addr) []string { return s.seen.Answering[vip] }

// VIPs returns all VIPs that were decided, in no order.
func (s *State) VIPs() []netip.Addr { return slices.Collect(maps.Keys(s.decisions)) }

// Decisions returns what was last decided, sorted by VIP.
func (s *State) Decisions() []plan.Decision {
	return slices.SortedFunc(maps.Values(s.decisions), func(a, b plan.Decision) int { return a.VIP.Compare(b.VIP) })
}

// Claim returns what this node says of a VIP to the others; nil when no Service holds it.
func (s *State) Claim(vip netip.Addr) *plan.Claim {
	d, ok := s.decisions[vip]
	if !ok {
		return nil
	}
	claim := d.Claim(len(s.seen.Answering[vip]) > 0)
	return &claim
}

// Unserved returns the VIPs that no node answers for which this one sees; sorted.
func (s *State) Unserved() []netip.Addr {
	return slices.SortedFunc(maps.Keys(s.unserved), netip.Addr.Compare)
}

// OwnerChanges counts how often another node became the owner of a VIP that was known already.
func (s *State) OwnerChanges() int { return s.changes }

// Stopped reports whether every VIP was decided since the speaker was told to end, and none is
// still handed over.
func (s *State) Stopped() bool {
	for _, d := range s.decisions {
		if d.Refusal == nil || len(d.Answer) > 0 {
			return false
		}
	}
	return true
}
