package plan

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/landfall-lb/landfall/internal/lb"
)

// TestContract1WhatARolloutWaitsFor has pods of this node wait until it announces the VIP, or stands by
// to do so, and for nothing that never comes.
func TestContract1WhatARolloutWaitsFor(t *testing.T) {
	answers := map[string]Claim{w177: {Answering: true}}
	claims := map[string]Claim{w177: {}}
	routes := map[string]Claim{w177: {Reason: lb.ReasonNoAdvertisement, Routes: "tor"}}
	unknown := func(in *Input) { in.Routed.Unknown = true }
	conflicting := func(in *Input) { in.ConflictingHosts = []ConflictingHost{{}} }
	withoutL2 := func(f *Facts) { f.Advertisements = nil }
	routed := func(reason lb.Reason, peers ...string) func(*Input) {
		return func(in *Input) {
			in.Routed.Peers = peers
			if reason != "" {
				in.Routed.Refusal = lb.Refuse(reason, "words")
			}
		}
	}
	with := func(claims map[string]Claim, tweaks ...func(*Input)) func(*Input) {
		return func(in *Input) {
			in.Claims = claims
			for _, tweak := range tweaks {
				tweak(in)
			}
		}
	}
	noLocal := held(delivery(nginx, local(0, 0, 1, 0)))
	for _, c := range []struct {
		name  string
		facts func(*Facts)
		input func(*Input)
		want  lb.Unannounced
	}{
		{name: "it answers", input: func(in *Input) { in.Answering = []string{"eth0"} }},
		{name: "another node answers, and it would take over", input: with(answers)},
		{name: "it owns the address and does not answer yet", want: lb.Unannounced{Reason: lb.ReasonAnnounceFailed}},
		{name: "it probes", input: func(in *Input) { in.Probed = false }, want: lb.Unannounced{Reason: lb.ReasonProbing}},
		{name: "nobody answers yet", input: with(map[string]Claim{w177: {Weight: 1}}),
			want: lb.Unannounced{Reason: lb.ReasonNotOwner}},
		{name: "no local endpoint", input: noLocal, want: lb.Unannounced{Reason: lb.ReasonNoLocalBackends}},
		{name: "no local endpoint, and another node answers", input: with(answers, noLocal),
			want: lb.Unannounced{Reason: lb.ReasonNoLocalBackends, Elsewhere: true}},
		{name: "no local endpoint, and another node claims", input: with(claims, noLocal),
			want: lb.Unannounced{Reason: lb.ReasonNoLocalBackends}},
		{name: "not programmed", input: with(answers, held(delivery(nginx, unprogrammed))),
			want: lb.Unannounced{Reason: lb.ReasonNotProgrammed, Elsewhere: true}},
		{name: "stopping", facts: func(f *Facts) { f.Stopping = true }, want: lb.Unannounced{Reason: lb.ReasonStopping}},
		{name: "not joined", facts: func(f *Facts) { f.Joined = false }, want: lb.Unannounced{Reason: lb.ReasonNotJoined}},
		{name: "no advertisement", facts: withoutL2},
		{name: "no interface", facts: func(f *Facts) { f.Interfaces = nil }},
		{name: "drained", facts: func(f *Facts) { f.Node.Leaving = lb.ReasonNodeDrained }},
		{name: "leaving", facts: func(f *Facts) { f.Node.Leaving = lb.ReasonNodeLeaving }},
		{name: "excluded", facts: func(f *Facts) { f.Node.Labels = map[string]string{LabelExclude: ""} }},
		{name: "another Service has the port", input: held(delivery(nginx, contested))},
		{name: "the Service that it joined has no local endpoint", input: with(answers, noLocal, joined(joiner,
			delivery(joiner, local(1, 0, 1, 0)))),
			want: lb.Unannounced{Reason: lb.ReasonNoLocalBackends, Service: nginx.Sum(), Elsewhere: true}},
		{name: "the Service that it joined is not programmed", input: with(answers, held(delivery(nginx, unprogrammed)),
			joined(joiner, delivery(joiner, local(1, 0, 1, 0)))),
			want: lb.Unannounced{Reason: lb.ReasonNotProgrammed, Service: nginx.Sum(), Elsewhere: true}},
		{name: "the one that joined has no local endpoint", input: with(answers, held(delivery(nginx, empty)),
			joined(joiner, delivery(joiner, local(0, 0, 1, 0)))),
			want: lb.Unannounced{Reason: lb.ReasonNoLocalBackends, Service: joiner.Sum(), Elsewhere: true}},
		{name: "the rules of two that share it are not known", facts: func(f *Facts) { f.Gate = lb.ReasonFeedLost },
			input: with(answers, joined(joiner, delivery(joiner))),
			want:  lb.Unannounced{Reason: lb.ReasonFeedLost, Elsewhere: true}},
		{name: "two that share it have no path", input: with(answers, held(delivery(nginx, pathless)),
			joined(joiner, delivery(joiner, pathless))),
			want: lb.Unannounced{Reason: lb.ReasonPodRouteMissing, Elsewhere: true}},
		{name: "two that share it have no endpoints", input: with(answers, held(delivery(nginx, empty)),
			joined(joiner, delivery(joiner, empty))), want: lb.Unannounced{Reason: lb.ReasonNoBackends, Elsewhere: true}},
		{name: "two that share it, and the node probes", input: with(nil, joined(joiner, delivery(joiner)),
			func(in *Input) { in.Probed = false }), want: lb.Unannounced{Reason: lb.ReasonProbing}},

		{name: "routers hear of it", facts: withoutL2, input: routed("", "tor")},
		{name: "no session", facts: withoutL2, input: routed(lb.ReasonNotEstablished),
			want: lb.Unannounced{Reason: lb.ReasonNotEstablished}},
		{name: "no session, and another node has one", facts: withoutL2, input: with(routes, routed(lb.ReasonNotEstablished)),
			want: lb.Unannounced{Reason: lb.ReasonNotEstablished, Elsewhere: true}},
		{name: "no local endpoint for routers", facts: withoutL2,
			input: with(routes, noLocal, routed(lb.ReasonNoLocalBackends)),
			want:  lb.Unannounced{Reason: lb.ReasonNoLocalBackends, Elsewhere: true}},
		{name: "the Service that it joined has no local endpoint for routers", facts: withoutL2,
			input: with(routes, noLocal, joined(joiner, delivery(joiner)), routed(lb.ReasonNoLocalBackends)),
			want:  lb.Unannounced{Reason: lb.ReasonNoLocalBackends, Service: nginx.Sum(), Elsewhere: true}},
		{name: "about to end at routers", facts: withoutL2, input: with(routes, noLocal, routed(lb.ReasonNoLocalBackends, "tor")),
			want: lb.Unannounced{Reason: lb.ReasonNoLocalBackends, Elsewhere: true}},
		{name: "routers never hear of it", facts: withoutL2, input: routed(lb.ReasonNodeExcluded)},
		{name: "BGP is not known yet", facts: withoutL2, input: unknown,
			want: lb.Unannounced{Reason: lb.ReasonNotEstablished}},
		{name: "BGP is not known yet, and another node has a session", facts: withoutL2, input: with(routes, unknown),
			want: lb.Unannounced{Reason: lb.ReasonNotEstablished, Elsewhere: true}},
		{name: "BGP is not known yet, and it would take over", input: with(answers, unknown)},
		{name: "BGP is not known yet, and it probes", input: with(nil, unknown, func(in *Input) { in.Probed = false }),
			want: lb.Unannounced{Reason: lb.ReasonProbing}},
		{name: "BGP is not known yet, and no interface has the subnet", facts: func(f *Facts) { f.Interfaces = nil },
			input: unknown, want: lb.Unannounced{Reason: lb.ReasonNotEstablished}},
		{name: "BGP is not known yet, and a device has the address", input: with(nil, unknown, conflicting),
			want: lb.Unannounced{Reason: lb.ReasonNotEstablished}},
		{name: "BGP is not known yet, and the node is drained", input: unknown,
			facts: func(f *Facts) { f.Node.Leaving = lb.ReasonNodeDrained }},
		{name: "BGP is not known yet, and the node is excluded", input: unknown,
			facts: func(f *Facts) { f.Node.Labels = map[string]string{LabelExclude: ""} }},
		{name: "BGP is not known yet, and another Service has the port",
			input: with(nil, unknown, held(delivery(nginx, contested)))},
		{name: "both ways, and routers hear of it", input: with(answers, noLocal, routed("", "tor"))},
		{name: "both ways, and it would take over", input: with(answers, routed(lb.ReasonNotEstablished))},
		{name: "both ways, and in none of them", input: with(claims, noLocal, routed(lb.ReasonNotEstablished)),
			want: lb.Unannounced{Reason: lb.ReasonNotEstablished}},
	} {
		f, in := facts(w178), input()
		if c.facts != nil {
			c.facts(&f)
		}
		if c.input != nil {
			c.input(&in)
		}
		var got lb.Unannounced
		if why := Decide(f, in).Unannounced(); why != nil {
			got = *why
		}
		if got != c.want {
			t.Errorf("%s: %+v, want %+v", c.name, got, c.want)
		}
	}
}

// TestEveryReasonIsOneToWaitForOrNot has somebody decide about each reason that a program of the speaker names. Pods
// wait for what may come by itself, and for faults of the node's programs and of the path to the pod, until their time
// is over. They do not wait for what comes only once somebody changes a configuration, be it the node's, as where a
// BGPPeer names an interface or a VRF that the node does not have.
func TestEveryReasonIsOneToWaitForOrNot(t *testing.T) {
	decided := map[bool][]string{
		true: {
			// The node or its programs are not ready yet, or the VIP has to move.
			"FeedUnknown", "NotProgrammed", "NoBackends", "NoLocalBackends", "Stopping", "NotJoined", "NotOwner", "Unheard",
			"NodeUnknown", "AnnounceFailed", "NetworkUnavailable", "NodeNotReady", "Flapping", "Probing", "ProbedAhead",
			"Yielded", "CutOff", "NotEstablished",
			// A program or the path to the pod has a fault.
			"FeedLost", "NoCarrier", "ForwardingOff", "PodRouteMissing", "ConntrackFull",
		},
		false: {
			"NoAdvertisement", "NoInterface", "FamilyUnspoken", "TooManyVIPs", "NodeExcluded", "NodeDrained", "NodeLeaving",
			"FrontendInUse", "AddressConflict", "UnknownPeer", "FamilyNotOffered", "AggregateOutside", "UnknownCommunity",
			"CommunityAmbiguous", "VRFUndelivered",
			// The node refuses each peer of the advertisement.
			"PeerInvalid", "PeerDuplicate", "SecretMissing", "SecretElsewhere", "VRFMissing", "InterfaceMissing",
			"SelectorInvalid",
		},
	}
	// These never say why a node does not announce a VIP.
	others := []string{
		// of Services, of VIPs as a whole and of nodes that are gone
		"Announced", "Contested", "Headless", "Missing", "NoAddress", "NoOwner", "Parting",
		// of peers and sessions
		"BFDDown", "Established", "NoNextHop", "ProfileMissing", "SessionTaken", "SourceMissing",
		// of advertisements
		"AdvertisementReady", "AggregateLocal", "AttributeConflict", "AttributeUnsent", "SelectsNoNode", "SelectsNoPool",
		"UnknownPool",
		// of nodes
		"APIServerUnreachable", "ARPNotStrict", "AddressOnNode", "GossipBlocked", "StrictReversePath",
	}
	all := slices.Concat(decided[true], decided[false], others)
	for _, name := range namedReasons(t, "..") {
		if n := len(all); !slices.Contains(all, name) {
			t.Errorf("decide whether pods wait while %s keeps a node from announcing", name)
		} else if all = slices.DeleteFunc(all, func(s string) bool { return s == name }); len(all) != n-1 {
			t.Errorf("%s is there twice", name)
		}
	}
	if len(all) > 0 {
		t.Errorf("the speaker does not name %s", all)
	}
	for waits, names := range decided {
		for _, name := range names {
			if configured(lb.Reason(name)) == waits {
				t.Errorf("configured(%s) is %v", name, waits)
			}
		}
	}
}

// namedReasons returns what the constants of type lb.Reason are called that the code below a folder names, without
// their prefix.
func namedReasons(t *testing.T, folder string) []string {
	t.Helper()
	names := map[string]bool{}
	err := filepath.WalkDir(folder, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return err
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, 0)
		if err != nil {
			return err
		}
		ast.Inspect(file, func(n ast.Node) bool {
			selector, ok := n.(*ast.SelectorExpr)
			if !ok {
				return true
			}
			of, isName := selector.X.(*ast.Ident)
			name, found := strings.CutPrefix(selector.Sel.Name, "Reason")
			if isName && of.Name == "lb" && found && name != "" {
				names[name] = true
			}
			return true
		})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return slices.Sorted(maps.Keys(names))
}
