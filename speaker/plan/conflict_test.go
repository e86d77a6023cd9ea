package plan

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/landfall-lb/landfall/internal/lb"
)

func TestAddressConflicts(t *testing.T) {
	conflicting := []ConflictingHost{{Interface: "eth0", MAC: "02:00:00:00:00:09"}}
	insists := func(in *Input) { in.Holders[0].OnConflict = "announce" }
	mayInsist := func(f *Facts) { f.OnConflict = ServiceOnConflict }
	for _, c := range []struct {
		name    string
		facts   func(*Facts)
		input   func(*Input)
		answers bool
		probes  bool
		reason  lb.Reason // why this node does not claim
		summary lb.Reason
		true    bool
	}{
		{name: "a new address is probed first", probes: true, summary: lb.ReasonProbing},
		{name: "and announced then", input: func(in *Input) { in.Probed = true }, answers: true,
			summary: lb.ReasonAnnounceFailed},
		{name: "what was probed ahead is announced and probed side by side",
			input: func(in *Input) { in.Clear = []string{"eth0"} }, answers: true, probes: true, summary: lb.ReasonProbing},
		{name: "and goes on to be", input: func(in *Input) { in.Proving, in.Answering = true, []string{"eth0"} },
			answers: true, probes: true, summary: lb.ReasonAnnounced, true: true},
		{name: "until it was probed", input: func(in *Input) { in.Probed, in.Proving, in.Answering = true, true, []string{"eth0"} },
			answers: true, summary: lb.ReasonAnnounced, true: true},
		{name: "somebody is found meanwhile: it is withdrawn", input: func(in *Input) {
			in.Proving, in.Answering, in.ConflictingHosts = true, []string{"eth0"}, conflicting
		}, probes: true, reason: lb.ReasonAddressConflict, summary: lb.ReasonParting, true: true},
		{name: "probed ahead on another interface only", input: func(in *Input) { in.Clear = []string{"eth9"} },
			probes: true, summary: lb.ReasonProbing},
		{name: "another node has found somebody since it was probed ahead", input: func(in *Input) {
			in.Clear, in.Claims = []string{"eth0"}, map[string]Claim{w179: {Reason: lb.ReasonAddressConflict}}
		}, probes: true, summary: lb.ReasonProbing},
		{name: "what one of ours has answered for is taken over at once", input: func(in *Input) { in.Served = true },
			answers: true, summary: lb.ReasonAnnounceFailed},
		{name: "somebody else has it", input: func(in *Input) { in.ConflictingHosts = conflicting }, probes: true,
			reason: lb.ReasonAddressConflict, summary: lb.ReasonAddressConflict},
		{name: "found while probing, not only after it",
			input:  func(in *Input) { in.ConflictingHosts, in.Probed = conflicting, true },
			probes: true, reason: lb.ReasonAddressConflict, summary: lb.ReasonAddressConflict},
		{name: "the Service insists, and no administrator has said that Services may",
			input:  func(in *Input) { in.ConflictingHosts, in.Probed = conflicting, true; insists(in) },
			probes: true, reason: lb.ReasonAddressConflict, summary: lb.ReasonAddressConflict},
		{name: "Services may insist, and it does not", facts: mayInsist,
			input:  func(in *Input) { in.ConflictingHosts, in.Probed = conflicting, true },
			probes: true, reason: lb.ReasonAddressConflict, summary: lb.ReasonAddressConflict},
		{name: "it may and does: probed all the same, to be reported", facts: mayInsist,
			input: func(in *Input) { in.ConflictingHosts = conflicting; insists(in) }, probes: true, summary: lb.ReasonProbing},
		{name: "and announced after it", facts: mayInsist, input: func(in *Input) {
			in.ConflictingHosts, in.Served, in.Answering = conflicting, true, []string{"eth0"}
			insists(in)
		}, answers: true, summary: lb.ReasonContested, true: true},
		{name: "all Services insist", facts: func(f *Facts) { f.OnConflict = AnnounceOnConflict },
			input: func(in *Input) { in.ConflictingHosts, in.Probed = conflicting, true }, answers: true,
			summary: lb.ReasonAnnounceFailed},
		{name: "but this one", facts: func(f *Facts) { f.OnConflict = AnnounceOnConflict }, input: func(in *Input) {
			in.ConflictingHosts, in.Probed, in.Holders[0].OnConflict = conflicting, true, "refuse"
		}, probes: true, reason: lb.ReasonAddressConflict, summary: lb.ReasonAddressConflict},
		{name: "it comes when we answer: defended and reported", input: func(in *Input) {
			in.ConflictingHosts, in.Served, in.Answering = conflicting, true, []string{"eth0"}
		}, answers: true, summary: lb.ReasonContested, true: true},
		{name: "a route to it besides makes it no better", input: func(in *Input) {
			in.ConflictingHosts, in.Served, in.Answering = conflicting, true, []string{"eth0"}
			in.Routed = Routed{Peers: []string{"tor-1"}}
		}, answers: true, summary: lb.ReasonContested, true: true},
		{name: "what this node cannot deliver anyway is not probed",
			input: func(in *Input) { unprogrammed(in.Holders[0].Delivery) }, reason: lb.ReasonNotProgrammed,
			summary: lb.ReasonNotProgrammed},
		{name: "another node probes", input: func(in *Input) { in.Claims = map[string]Claim{w179: {Weight: 9}} }},
		{name: "another node has found somebody", input: func(in *Input) {
			in.Claims = map[string]Claim{w179: {Reason: lb.ReasonAddressConflict}, w177: {Weight: 9}}
		}, probes: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			f, in := facts(w178), input(func(in *Input) { in.Probed = false })
			if c.facts != nil {
				c.facts(&f)
			}
			if c.input != nil {
				c.input(&in)
			}
			f.Live = []string{w178}
			for node := range in.Claims {
				f.Live = append(f.Live, node)
			}
			d := Decide(f, in)
			if got := d.Claim(false).Reason; got != c.reason {
				t.Errorf("reason %q, want %q", got, c.reason)
			}
			if (len(d.Answer) > 0) != c.answers || (len(d.Probe) > 0) != c.probes {
				t.Errorf("answers on %v, probes on %v", d.Answer, d.Probe)
			}
			r, ok := Summarize(w178, []Decision{d})
			if ok != (c.summary != "") || r.Reason != c.summary || r.Announced != c.true {
				t.Errorf("reports %+v: %v", r, ok)
			}
			conflict := r.Reason == lb.ReasonAddressConflict || r.Reason == lb.ReasonContested
			if conflict && !strings.Contains(r.Message, "02:00:00:00:00:09 on eth0") {
				t.Errorf("message %q does not name the other holder", r.Message)
			}
			if r.Reason == lb.ReasonContested {
				if list := r.Announcements; len(list) != 1 || list[0].Owner != w178 || list[0].Reason != lb.ReasonContested {
					t.Errorf("announcements %+v", list)
				}
				if lb.Serving(r.Status().Condition).Status {
					t.Error("serving, while somebody else may get the traffic")
				}
			}
		})
	}
}

// Of several nodes one reports on a conflict that knows the other holder.
func TestWhoReportsAConflict(t *testing.T) {
	for _, knowing := range []string{w177, w178, w179} {
		in := input(func(in *Input) {
			in.Probed = false
			in.Claims = map[string]Claim{w177: {Reason: lb.ReasonNodeExcluded}, w179: {Reason: lb.ReasonNodeExcluded}}
			in.Claims[knowing] = Claim{Reason: lb.ReasonAddressConflict}
			delete(in.Claims, w178)
			in.ConflictingHosts = []ConflictingHost{{Interface: "eth0", MAC: "02:00:00:00:00:09"}}
		})
		f := facts(w178, func(f *Facts) {
			if knowing != w178 {
				f.Node.Labels = map[string]string{LabelExclude: ""}
			}
		})
		f.Live = []string{w177, w178, w179}
		if d := Decide(f, in); d.Reporter != knowing {
			t.Errorf("%s reports, want %s", d.Reporter, knowing)
		}
	}
}

func TestContract11WhoInsistsIsToldWhatItTakes(t *testing.T) {
	d := Decide(facts(w178), input(func(in *Input) {
		in.Holders[0].OnConflict = "announce"
		in.ConflictingHosts = []ConflictingHost{{Interface: "eth0", MAC: "02:00:00:00:00:09"}}
	}))
	if d.Refusal == nil || !strings.Contains(d.Refusal.Message, "needs --on-address-conflict=service of the speakers") {
		t.Errorf("%+v", d.Refusal)
	}
}

func TestBadChoiceOnConflictIsNamed(t *testing.T) {
	in := input(func(in *Input) {
		in.Holders[0].OnConflict = "yes"
		in.ConflictingHosts = []ConflictingHost{{Interface: "eth0", MAC: "02:00:00:00:00:09"}}
	})
	d := Decide(facts(w178), in)
	if d.Refusal == nil ||
		!strings.Contains(
			d.Refusal.Message,
			`annotation landfall.dev/on-address-conflict of default/my-nginx: "yes" is neither refuse nor announce`) {
		t.Errorf("%+v", d.Refusal)
	}
}

// What is said of a VIP that many devices seem to use stays the same while others come and go: one device may make up
// more and more MAC addresses.
func TestSentencesNameOneOfManyConflictingHosts(t *testing.T) {
	first := ConflictingHost{Interface: "eth0", MAC: "02:00:00:00:00:09"}
	say := func(answering bool, hosts ...ConflictingHost) string {
		f := facts(w178)
		f.Live = []string{w178}
		d := Decide(f, input(func(in *Input) {
			in.ConflictingHosts = hosts
			if answering {
				in.Served, in.Answering = true, []string{"eth0"}
			}
		}))
		r, _ := Summarize(w178, []Decision{d})
		status, _ := d.Node(w178)
		return r.Message + "\n" + status.Message + "\n" + d.Uses()
	}
	for _, answering := range []bool{false, true} {
		alone, before := say(answering, first), ""
		if strings.Contains(alone, "others") || !strings.HasSuffix(alone, "\n"+first.String()) {
			t.Errorf("of one: %s", alone)
		}
		for i := range 8 {
			hosts := []ConflictingHost{first, {Interface: "eth1", MAC: fmt.Sprint("02:00:00:00:00:1", i)}, first}[:2+i%2]
			now := say(answering, hosts...)
			if strings.Count(now, first.String()) != 3 || strings.Count(now, "others") != 3 || before != "" && now != before {
				t.Errorf("of %d: %s", len(hosts), now)
			}
			before = now
		}
	}
}

func TestMACs(t *testing.T) {
	named := func(name string, mac byte) lb.Interface {
		return lb.Interface{Name: name, MAC: net.HardwareAddr{2, 0, 0, 0, 0, mac}}
	}
	f := Facts{
		Interfaces: []lb.Interface{named("eth0", 2), named("eth1", 1), named("bond0", 1), named("veth1", 3),
			named("veth2", 4), {Name: "tun0"}, {Name: "lo", Loopback: true, MAC: net.HardwareAddr{0, 0, 0, 0, 0, 0}}},
		Exclude:        []string{"veth*"},
		Advertisements: map[string]lb.L2Advertisement{"lab": {Interfaces: []string{"veth2"}}},
	}
	if got, want := MACs(f),
		[]string{"02:00:00:00:00:04", "02:00:00:00:00:01", "02:00:00:00:00:02"}; !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

// A node tells the others of some 80 MAC addresses at most: those of interfaces that may answer are among them,
// however many virtual functions of a network card there are.
func TestMACsThatMayAnswerComeFirst(t *testing.T) {
	mac := func(i byte) net.HardwareAddr { return net.HardwareAddr{2, 0, 0, 0, 0, i} }
	f := Facts{
		Interfaces: []lb.Interface{{Name: "eth0", MAC: mac(200), Addresses: []netip.Prefix{netip.MustParsePrefix("10.0.0.1/24")}},
			{Name: "port", MAC: mac(200), Enslaved: true}, {Name: "named", MAC: mac(100)}},
		Advertisements: map[string]lb.L2Advertisement{"lab": {Interfaces: []string{"named"}}},
	}
	for i := range byte(90) {
		f.Interfaces = append(f.Interfaces, lb.Interface{Name: fmt.Sprint("vf", i), MAC: mac(i)})
	}
	got := MACs(f)
	if len(got) != 92 || got[0] != mac(100).String() || got[1] != mac(200).String() || !slices.IsSorted(got[2:]) {
		t.Errorf("%d: %v", len(got), got)
	}
}
