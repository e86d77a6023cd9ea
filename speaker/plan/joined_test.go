package plan

import (
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/labels"

	"github.com/landfall-lb/landfall/internal/lb"
)

var (
	joiner = lb.Key{Namespace: "other", Name: "joiner"}
	friend = lb.Key{Namespace: nginx.Namespace, Name: "friend"}
)

// joined adds a Service that joined the VIP of nginx.
func joined(key lb.Key, d *lb.Delivery, tweak ...func(*Holder)) func(*Input) {
	h := Holder{Service: key, Delivery: d, Joined: true}
	for _, t := range tweak {
		t(&h)
	}
	return func(in *Input) { in.Holders = append(in.Holders, h) }
}

// TestContract11AJoinerNarrowsNothing has a Service that joined the address of another one be
// delivered nowhere, or elsewhere: the first holder's address is announced as if it were alone.
func TestContract11AJoinerNarrowsNothing(t *testing.T) {
	first := func(tweak func(*lb.Delivery)) func(*Input) {
		return func(in *Input) { tweak(in.Holders[0].Delivery) }
	}
	both := func(tweaks ...func(*Input)) func(*Input) {
		return func(in *Input) {
			for _, t := range tweaks {
				t(in)
			}
		}
	}
	for _, c := range []struct {
		name  string
		input func(*Input)
		want  lb.Reason
		told  lb.Reason // why this node does not deliver the joiner
	}{
		{name: "alone", input: func(*Input) {}},
		{name: "unprogrammed", input: joined(joiner, delivery(joiner, unprogrammed)), told: lb.ReasonNotProgrammed},
		{name: "not confirmed yet", input: joined(joiner, nil), told: lb.ReasonNotProgrammed},
		{name: "Local, elsewhere", input: joined(joiner, delivery(joiner, local(0, 0, 2, 0))),
			told: lb.ReasonNoLocalBackends},
		{name: "of the same namespace", input: joined(friend, delivery(friend, local(0, 0, 2, 0)))},
		{name: "empty", input: joined(joiner, delivery(joiner, empty)), told: lb.ReasonNoBackends},
		{name: "delivered", input: joined(joiner, delivery(joiner))},
		{name: "delivered, but the first is not", input: both(first(unprogrammed), joined(joiner, delivery(joiner))),
			want: lb.ReasonNotProgrammed},
		{name: "delivered, and the first has no endpoints anywhere",
			input: both(first(empty), joined(joiner, delivery(joiner)))},
		{name: "elsewhere, and the first has no endpoints anywhere",
			input: both(first(empty), joined(joiner, delivery(joiner, local(0, 0, 2, 0)))), want: lb.ReasonNoLocalBackends,
			told: lb.ReasonNoLocalBackends},
		{
			name: "insists on a refusal",
			input: both(joined(joiner, delivery(joiner), func(h *Holder) { h.OnConflict = "refuse" }),
				func(in *Input) { in.ConflictingHosts = []ConflictingHost{{}} })},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := facts(w178)
			f.OnConflict = AnnounceOnConflict
			in := input(c.input)
			d := Decide(f, in)
			if got := reasonOf(d.Refusal); got != c.want {
				t.Errorf("Layer 2: %q (%v), want %q", got, d.Refusal, c.want)
			}
			if v := standing("", nil, BGPInput{VIP: vip, Holders: in.Holders}); reasonOf(v.Refusal) != c.want {
				t.Errorf("BGP: %q, want %q", reasonOf(v.Refusal), c.want)
			}
			if c.want == "" && !forwards(in.Holders) {
				t.Error("it hands nothing over, as if it forwarded nothing")
			}
			if got := reasonOf(d.Undelivered[joiner]); got != c.told {
				t.Errorf("the joiner is told %q, want %q", got, c.told)
			}
		})
	}
}

// TestContract11AJoinersLabelsOfAnotherNamespaceSelectNothing keeps a joiner from having the first
// holder's address announced elsewhere.
func TestContract11AJoinersLabelsOfAnotherNamespaceSelectNothing(t *testing.T) {
	public, err := labels.Parse("public")
	if err != nil {
		t.Fatal(err)
	}
	ad := lb.L2Advertisement{Name: "public", ServiceSelectors: []labels.Selector{public}}
	set := func(h *Holder) { h.Labels = labels.Set{"public": ""} }
	for name, c := range map[string]struct {
		join func(*Input)
		want bool
	}{
		"of another namespace":  {joined(joiner, delivery(joiner), set), false},
		"of the same namespace": {joined(friend, delivery(friend), set), true},
		"the first itself":      {func(in *Input) { set(&in.Holders[0]) }, true},
	} {
		in := input(c.join)
		bgp := advertisement{BGPAdvertisement: lb.BGPAdvertisement{ServiceSelectors: ad.ServiceSelectors}}
		if got := selectsService(ad, in.Holders); got != c.want {
			t.Errorf("%s: L2Advertisement: %v", name, got)
		}
		if got := bgp.selects(BGPInput{Holders: in.Holders}); got != c.want {
			t.Errorf("%s: BGPAdvertisement: %v", name, got)
		}
	}
}

// TestContract10AJoinerIsTold has the owner say that it does not deliver the Service that joined.
func TestContract10AJoinerIsTold(t *testing.T) {
	d := Decide(facts(w178), input(joined(joiner, delivery(joiner, local(0, 0, 2, 0))),
		func(in *Input) { in.Answering = []string{"eth0"} }))
	report, ok := Summarize(w178, []Decision{d})
	if !ok {
		t.Fatal("the owner does not report")
	}
	if got := report.For(nginx, w178, []Decision{d}); !got.Announced {
		t.Errorf("the first holder: %+v", got)
	}
	got := report.For(joiner, w178, []Decision{d})
	want := "; " + w178 + " announces 172.26.236.180 for another Service, and does not deliver this one: "
	if got.Announced || got.Reason != lb.ReasonNoLocalBackends || !strings.Contains(got.Message, want) {
		t.Errorf("the joiner: %+v", got)
	}
}
