package contract

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/landfall-lb/landfall/e2e/chaos/story"
	"github.com/landfall-lb/landfall/internal/lb"
)

// Clause is one claim of the contract.
type Clause struct {
	Number int
	Name   string
	// Settled judges the state after a round; Seen what was seen during it. One of them is set.
	Settled func(Snapshot) []string
	Seen    func(Evidence) []Violation
}

// Clauses returns all of them, in the order of their numbers.
func Clauses() []Clause {
	return []Clause{
		{Number: 0, Name: "everything can be seen", Settled: everythingIsSeen},
		{Number: 0, Name: "speakers see one another", Settled: speakersSeeOneAnother},
		{Number: 1, Name: "what has ready endpoints is announced by one, and answers", Settled: addressesAreDelivered},
		{Number: 1, Name: "what has no ready endpoints is announced by none", Settled: nothingIsAnnouncedInVain},
		{Number: 1, Name: "what is announced answers while proxies hang", Seen: noLossWhile(story.HungProxy)},
		{Number: 1, Name: "what a broken node served is answered by others", Seen: othersTakeOver},
		{Number: 2, Name: "Local keeps the client's address", Seen: localKeepsTheClient},
		{Number: 2, Name: "direct forwarding keeps the client's address", Seen: directKeepsTheClient},
		{Number: 2, Name: "Local is announced where it has pods", Settled: localIsWhereItsPodsAre},
		{Number: 3, Name: "a node that announces has the rules", Settled: announcersHaveTheRules},
		{Number: 3, Name: "rules go with their Service", Settled: rulesGoWithTheirService},
		{Number: 3, Name: "rules outlive announcements", Seen: rulesOutliveAnnouncements},
		{Number: 4, Name: "the health port tells the truth", Settled: healthPortsTellTheTruth},
		{Number: 4, Name: "the health port of a node that leaves says so", Seen: leavingNodesSaySo},
		{Number: 5, Name: "planned changes lose nothing",
			Seen: noLossWhile(story.DrainLabel, story.DrainTaint, story.RollPod, story.EditPool)},
		{Number: 6, Name: "restarts lose nothing", Seen: noLossWhile(story.Stop, story.StopLong, story.Kill)},
		{Number: 6, Name: "a speaker that is back in time keeps its addresses", Seen: restartsKeepTheOwner},
		{Number: 6, Name: "a client with session affinity keeps its pod", Seen: affinityKeepsThePod},
		{Number: 7, Name: "nothing is lost without the API server",
			Seen: noLossWhile(story.StopAPI, story.FreezeAPI, story.FreezeEtcd, story.SlowAPI)},
		{Number: 7, Name: "nothing is lost when a clock is set", Seen: noLossWhile(story.ShiftClock)},
		{Number: 8, Name: "an address has one holder", Seen: oneHolder},
		{Number: 8, Name: "holders keep their addresses", Settled: holdersKeepTheirs},
		{Number: 8, Name: "the right Service answers", Seen: theRightServiceAnswers},
		{Number: 9, Name: "without endpoints connections are refused", Settled: refusedAtOnce},
		{Number: 9, Name: "free addresses are silent", Settled: freeAddressesAreSilent},
		{Number: 9, Name: "UDP flows end with their backend", Settled: flowsEndWithTheirBackend},
		{Number: 10, Name: "the status says what is", Settled: statusIsTrue},
		{Number: 10, Name: "the status says why", Settled: statusSaysWhy},
		{Number: 11, Name: "neighbors and churn cost nobody",
			Seen: noLossWhile(story.MalformedARP, story.AddService, story.RemoveService, story.Unready, story.Ready,
				story.Burst, story.Flood, story.AddPeer, story.ForeignRules)},
		{Number: 11, Name: "a fault of one node costs only what it serves", Seen: onlyItsOwnIsLost},
		{Number: 11, Name: "a returning node takes nothing", Seen: returningNodesTakeNothing},
	}
}

// Unsettled returns the clauses that do not hold of a state. A state is settled once there are none.
func Unsettled(s Snapshot) []Violation {
	var all []Violation
	for _, c := range Clauses() {
		if c.Settled != nil {
			for _, text := range c.Settled(s) {
				all = append(all, Violation{Clause: c.Number, Name: c.Name, Text: text, At: s.At})
			}
		}
	}
	return all
}

// Judge returns what was violated in a round.
func Judge(e Evidence) []Violation {
	all := Unsettled(e.Settled)
	for _, c := range Clauses() {
		if c.Seen != nil {
			for _, v := range c.Seen(e) {
				v.Clause, v.Name = c.Number, c.Name
				all = append(all, v)
			}
		}
	}
	for i := range all {
		all[i].Round = e.Round.Number
	}
	return all
}

func everythingIsSeen(s Snapshot) []string { return s.Unknown }

func speakersSeeOneAnother(s Snapshot) (bad []string) {
	for _, node := range s.Nodes {
		for _, other := range s.Nodes {
			if !slices.Contains(s.Members[node], other) {
				bad = append(bad, fmt.Sprintf("%s does not see %s", node, other))
			}
		}
	}
	return bad
}

// addressesAreDelivered: one node answers for an address on the LAN, or the router leads it to all nodes that
// deliver it, and a request is answered.
func addressesAreDelivered(s Snapshot) (bad []string) {
	for _, svc := range s.Services {
		if !svc.HasReady() {
			continue
		}
		for _, a := range svc.Addresses {
			say := func(format string, args ...any) {
				bad = append(bad, fmt.Sprintf("%s of %s: ", a, svc.Name)+fmt.Sprintf(format, args...))
			}
			if svc.BGP {
				want := s.Nodes
				if svc.Local {
					want = svc.nodes()
				}
				if !slices.Equal(s.Routed[a], want) {
					say("the router leads it to %v, want %v", s.Routed[a], want)
				}
			} else {
				if len(s.Answering[a]) != 1 {
					say("%v say that they answer for it", s.Answering[a])
				}
				if !slices.Equal(s.Heard[a], s.Answering[a]) {
					say("%v answer on the LAN, %v say so", s.Heard[a], s.Answering[a])
				}
			}
			for _, p := range svc.Ports(a) {
				if text, asked := s.Asked[p]; !asked || text != "" {
					say("a request over %s to port %d failed: %s", p.Network, p.To.Port(), text)
				}
			}
		}
	}
	return bad
}

func nothingIsAnnouncedInVain(s Snapshot) (bad []string) {
	for _, svc := range s.Services {
		for _, a := range svc.Addresses {
			// A shared address is announced for the other Service.
			if !svc.HasReady() && svc.Share == "" && len(s.Answering[a])+len(s.Heard[a])+len(s.Routed[a]) > 0 {
				bad = append(bad, fmt.Sprintf("%s of %s: answering %v, heard %v, routed %v", a, svc.Name, s.Answering[a],
					s.Heard[a], s.Routed[a]))
			}
		}
	}
	return bad
}

func localIsWhereItsPodsAre(s Snapshot) (bad []string) {
	for _, svc := range s.Services {
		for _, a := range svc.Addresses {
			for _, node := range slices.Concat(s.Answering[a], s.Routed[a]) {
				if svc.Local && svc.Ready[node] == 0 {
					bad = append(bad, fmt.Sprintf("%s of %s is announced from %s, which has no pod of it", a, svc.Name, node))
				}
			}
		}
	}
	return bad
}

func healthPortsTellTheTruth(s Snapshot) (bad []string) {
	for _, svc := range s.Services {
		if svc.Health == nil {
			continue
		}
		for _, node := range s.Nodes {
			want := 503
			if svc.Ready[node] > 0 {
				want = 200
			}
			if got := svc.Health[node]; got != want {
				bad = append(bad, fmt.Sprintf("%s on %s: %d, want %d", svc.Name, node, got, want))
			}
		}
	}
	return bad
}

// leavingNodesSaySo: the load balancer of somebody else sends nothing more to a node that is about to be deleted.
func leavingNodesSaySo(e Evidence) (bad []Violation) {
	for _, s := range e.Spans {
		for _, name := range s.Attractive {
			bad = append(bad, Violation{At: s.Ended, Text: fmt.Sprintf("%s: the health port of %s did not say 503", s.Event,
				name)})
		}
	}
	return bad
}

func holdersKeepTheirs(s Snapshot) (bad []string) {
	for _, svc := range s.Services {
		if want, stays := s.Expected[svc.Name]; stays && !slices.Equal(svc.Addresses, want) {
			bad = append(bad, fmt.Sprintf("%s holds %v, it had %v", svc.Name, svc.Addresses, want))
		} else if !stays && len(svc.Addresses) == 0 {
			bad = append(bad, svc.Name+" holds no address")
		}
	}
	return bad
}

// refusedAtOnce: over each family and protocol, by a reset or an ICMP error.
func refusedAtOnce(s Snapshot) (bad []string) {
	for _, svc := range s.Services {
		if svc.HasReady() {
			continue
		}
		for _, a := range svc.Addresses {
			for _, p := range svc.Ports(a) {
				if got := s.Asked[p]; got != Refused {
					bad = append(bad, fmt.Sprintf("%s has no pods, and a request from inside over %s to %s ends with %q", svc.Name,
						p.Network, p.To, got))
				}
			}
		}
	}
	return bad
}

func freeAddressesAreSilent(s Snapshot) (bad []string) {
	held := map[netip.Addr]bool{}
	for _, svc := range s.Services {
		for _, a := range svc.Addresses {
			held[a] = true
		}
	}
	for what, seen := range map[string]map[netip.Addr][]string{
		"say that they answer": s.Answering, "answer on the LAN": s.Heard, "get it from the router": s.Routed} {
		for a, nodes := range seen {
			if !held[a] && len(nodes) > 0 {
				bad = append(bad, fmt.Sprintf("no Service holds %s, and %v %s", a, nodes, what))
			}
		}
	}
	return bad
}

func statusIsTrue(s Snapshot) (bad []string) {
	for _, svc := range s.Services {
		if svc.Announced != svc.HasReady() {
			bad = append(bad, fmt.Sprintf("%s says Announced=%v (%s), and has ready pods on %v", svc.Name, svc.Announced,
				svc.Message, svc.nodes()))
		}
		for _, a := range svc.Addresses {
			if nodes := s.Answering[a]; svc.HasReady() && !svc.BGP && len(nodes) == 1 && svc.Owners[a] != nodes[0] {
				bad = append(bad, fmt.Sprintf("%s says that %q answers for %s, and %s does", svc.Name, svc.Owners[a], a,
					nodes[0]))
			}
		}
	}
	return bad
}

// statusSaysWhy: the condition has the typed reason for what is so.
func statusSaysWhy(s Snapshot) (bad []string) {
	for _, svc := range s.Services {
		want := lb.ReasonAnnounced
		if !svc.HasReady() {
			want = lb.ReasonNoBackends
		}
		if svc.Reason != string(want) {
			bad = append(bad, fmt.Sprintf("%s says %q (%s), want %q", svc.Name, svc.Reason, svc.Message, want))
		}
	}
	return bad
}

// noLossWhile returns a clause: no connection fails because of these kinds of events. Only calm rounds are judged.
func noLossWhile(kinds ...story.Kind) func(Evidence) []Violation {
	return func(e Evidence) (bad []Violation) {
		if !e.Round.Calm {
			return nil
		}
		for _, s := range e.Samples {
			if s.Err == "" {
				continue
			}
			if span := cause(e.Spans, s.Ended); slices.Contains(kinds, span.Kind) {
				bad = append(bad, Violation{At: s.Began, Text: fmt.Sprintf("%s over %s to %s of %s, begun at %s, after %s: %s",
					"a request", s.Network, s.Target, s.Service, clock(s.Began), span.Event, s.Err)})
			}
		}
		for _, f := range e.Flows {
			if f.Broke.IsZero() || slices.ContainsFunc(e.Spans, func(s Span) bool { return s.ends(f) }) {
				continue
			}
			// It breaks when it has had no answer for a while: what did it was before that, in the time between two lines.
			if span := cause(e.Spans, f.Asked.Add(lineTime)); slices.Contains(kinds, span.Kind) {
				bad = append(bad, Violation{At: f.Broke, Text: fmt.Sprintf(
					"a connection to %s of %s, with %s, broke at %s, after %s: %s", f.Target, f.Service, f.Pod,
					clock(f.Broke), span.Event, f.Err)})
			}
		}
		return bad
	}
}

// ends reports whether an event ends a connection by what it is: the pod is gone, or the relay that may carry it.
func (s Span) ends(f Flow) bool {
	return slices.Contains(s.Gone, f.Pod) || f.Relayed && s.Program == "relay"
}

// lineTime is more than the time between two lines of a flow.
const lineTime = time.Second

func clock(t time.Time) string { return t.Format("15:04:05.000") }

// cause returns the event that a loss is laid to: the last planned change or fault that began before it ended, or
// else the last churn.
func cause(spans []Span, ended time.Time) Span {
	var found Span
	ok := false
	for _, churn := range []bool{false, true} {
		for _, s := range spans {
			if s.Began.Before(ended) && s.Kind.IsChurn() == churn {
				found, ok = s, true
			}
		}
		if ok {
			return found
		}
	}
	return Span{Event: story.Event{Kind: story.AddService}} // of a round before
}

func localKeepsTheClient(e Evidence) []Violation {
	return wrongSources(e, func(s Sample) bool { return s.Local })
}

// directKeepsTheClient judges calm rounds: a node that has just started may masquerade until it knows the others.
func directKeepsTheClient(e Evidence) []Violation {
	return wrongSources(e, func(s Sample) bool { return s.Direct && e.Round.Calm })
}

// wrongSources returns the requests, of those that matter, that a pod saw from another address than the client's.
func wrongSources(e Evidence, matters func(Sample) bool) (bad []Violation) {
	for _, s := range e.Samples {
		if matters(s) && s.Err == "" && s.Source != s.Client {
			bad = append(bad, Violation{At: s.Began, Text: fmt.Sprintf("%s of %s: %s saw %s, the client is %s", s.Target,
				s.Service, s.Pod, s.Source, s.Client)})
		}
	}
	return bad
}

// restartHold is how long addresses are kept for a speaker that was killed (--restart-hold); one that is back in
// half of that was surely in time.
const restartHold = 5 * time.Second

func restartsKeepTheOwner(e Evidence) (bad []Violation) {
	for _, s := range e.Spans {
		if s.Kind != story.Kill || s.Program != "speaker" || s.Back > restartHold/2 || !e.Round.Calm {
			continue
		}
		if len(s.Lost) > 0 {
			bad = append(bad, Violation{At: s.Began, Text: fmt.Sprintf("%s was back after %v, and lost %v", s.Event,
				s.Back.Round(time.Millisecond), s.Lost)})
		}
	}
	return bad
}

// affinityKeepsThePod judges calm rounds up to the first event that may move an address to another node, whose kernel
// remembers other clients, or that is about the Service's pods.
func affinityKeepsThePod(e Evidence) (bad []Violation) {
	type asked struct {
		client netip.Addr
		target netip.AddrPort
	}
	by := map[asked][]Sample{}
	for _, s := range e.Samples {
		if e.Round.Calm && s.Affine && s.Err == "" &&
			!slices.ContainsFunc(e.Spans, func(p Span) bool { return p.Began.Before(s.Ended) && !p.leaves(s.Service) }) {
			by[asked{s.Client, s.Target}] = append(by[asked{s.Client, s.Target}], s)
		}
	}
	for whom, samples := range by {
		slices.SortFunc(samples, func(a, b Sample) int { return a.Began.Compare(b.Began) })
		// A node remembers a client from its first handshake on: requests and connections beside it may go elsewhere, and
		// any of these may be the one whose handshake ended first.
		answered := slices.MinFunc(samples, func(a, b Sample) int { return a.Ended.Compare(b.Ended) }).Ended
		var pods []string
		for _, f := range e.Flows {
			if f.Client == whom.client && f.Target == whom.target && !f.Began.After(answered) {
				pods = append(pods, f.Pod)
			}
		}
		for _, s := range samples {
			switch {
			case !s.Began.After(answered):
				pods = append(pods, s.Pod)
				continue
			case !slices.Contains(pods, s.Pod):
				bad = append(bad, Violation{At: s.Began, Text: fmt.Sprintf("%s of %s: %s answered %s, and %s before", s.Target,
					s.Service, s.Pod, s.Client, strings.Join(pods, " or "))})
			}
			pods = []string{s.Pod}
		}
	}
	return bad
}

// leaves reports whether an event leaves a Service's pods, and its addresses where they are.
func (s Span) leaves(service string) bool {
	switch s.Kind {
	case story.Kill:
		return s.Program != "speaker"
	case story.Stop:
		return s.Program == "controller"
	case story.StopAPI, story.FreezeAPI, story.FreezeEtcd, story.SlowAPI, story.ShiftClock, story.MalformedARP,
		story.EditPool, story.AddPeer, story.ForeignRules:
		return true
	default:
		return s.Kind.IsChurn() && s.Service != service
	}
}

func oneHolder(e Evidence) (bad []Violation) {
	type place struct {
		seen time.Time
		addr netip.Addr
	}
	by := map[place]Holder{}
	told := map[string]bool{}
	for _, h := range e.Holders {
		at := place{h.Seen, h.Address}
		first, taken := by[at]
		if !taken {
			by[at] = h
			continue
		}
		text := fmt.Sprintf("%s is held by %s and %s", h.Address, first.Service, h.Service)
		if (h.Share == "" || h.Share != first.Share) && !told[text] {
			told[text] = true
			bad = append(bad, Violation{At: h.Seen, Text: text})
		}
	}
	return bad
}

func theRightServiceAnswers(e Evidence) (bad []Violation) {
	for _, s := range e.Samples {
		if s.Err == "" && s.App != s.Wanted {
			bad = append(bad, Violation{At: s.Began, Text: fmt.Sprintf("%s of %s: %s of %s answered", s.Target, s.Service,
				s.Pod, s.App)})
		}
	}
	return bad
}

// returningNodesTakeNothing judges storms in which one node alone was away: what it did not own before it leaves to
// those who have served it meanwhile. That are the addresses of Services that are always there, save those that
// another event was about.
func returningNodesTakeNothing(e Evidence) (bad []Violation) {
	away := []story.Kind{story.Cut, story.Unplug, story.Crash, story.FreezeNode, story.FreezeSpeaker, story.Deaf,
		story.Mute}
	var nodes []Span
	served := maps.Clone(e.Settled.Expected)
	for _, s := range e.Spans {
		if s.Node != "" {
			nodes = append(nodes, s)
		}
		delete(served, s.Service)
	}
	if e.Round.Calm || len(nodes) != 1 || !slices.Contains(away, nodes[0].Kind) {
		return nil
	}
	others := slices.Concat(slices.Collect(maps.Values(served))...)
	for _, a := range nodes[0].Took {
		if !slices.Contains(nodes[0].OwnedBefore, a) && slices.Contains(others, a) {
			bad = append(bad, Violation{At: nodes[0].Ended, Text: fmt.Sprintf("after %s the node took %s, which another served",
				nodes[0].Event, a)})
		}
	}
	return bad
}
