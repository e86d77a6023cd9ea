package plan

import (
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
)

// A node that may have been cut off has no address that it did not answer for before.
func TestEstranged(t *testing.T) {
	trusted := time.Unix(1e9, 0)
	for name, c := range map[string]struct {
		answering bool
		since     time.Time
		others    map[string]Claim
		answers   bool
	}{
		"it never answered":               {},
		"it answered long before":         {answering: true, since: trusted.Add(-time.Hour), answers: true},
		"it has taken it lately":          {answering: true, since: trusted.Add(time.Second)},
		"it did, and another one answers": {true, trusted, map[string]Claim{w179: {Answering: true}}, false},
	} {
		f := facts(w178)
		f.Live, f.Estranged, f.Parted, f.Trusted = []string{w178, w179}, true, true, trusted
		in := input(func(in *Input) { in.Served, in.Since, in.Claims = true, c.since, c.others })
		if c.answering {
			in.Answering = []string{"eth0"}
		}
		d := Decide(f, in)
		if got := len(d.Answer) > 0; got != c.answers {
			t.Errorf("%s: answers %v", name, got)
		}
		if refused := d.Refusal != nil &&
			d.Refusal.Reason == lb.ReasonCutOff; refused == (c.answering && !c.since.After(trusted)) {
			t.Errorf("%s: %+v", name, d.Refusal)
		}
		if d.Refusal != nil && (d.Reporter != "" || len(d.Probe) > 0) {
			t.Errorf("%s: reporter %q, probes %v", name, d.Reporter, d.Probe)
		}
	}
}

// A node that may have been cut off does not say of an address that it cannot serve itself that nobody does.
func TestContract10ACutOffNodeLeavesTheStatusToOthers(t *testing.T) {
	for name, c := range map[string]struct {
		tweak    func(*Facts, *Input) // if any
		reporter string
	}{
		"it has always been alone": {nil, w178},
		"it may have been cut off": {func(f *Facts, _ *Input) { f.Estranged = true }, ""},
		"a majority serves it":     {func(_ *Facts, in *Input) { in.Elsewhere = true }, ""},
		"but one that it sees may": {func(f *Facts, in *Input) {
			f.Estranged, in.Claims = true, map[string]Claim{w179: {Answering: true}}
		}, w179},
		"it has outlived the others": {func(f *Facts, _ *Input) { f.Parted, f.Alone = true, true }, w178},
	} {
		f, in := facts(w178), input(held(delivery(nginx, local(0, 0, 1, 1))))
		f.Live = []string{w178}
		if c.tweak != nil {
			c.tweak(&f, &in)
		}
		if d := Decide(f, in); d.Refusal == nil || d.Refusal.Reason != lb.ReasonNoLocalBackends || d.Reporter != c.reporter {
			t.Errorf("%s: reporter %q, want %q, and refused: %v", name, d.Reporter, c.reporter, d.Refusal)
		}
	}
}
