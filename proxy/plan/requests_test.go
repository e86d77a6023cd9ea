package plan

import (
	"strings"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
)

// One node says for all what of a Service's requests is not followed.
func TestAsRequested(t *testing.T) {
	scheduler := []lb.Refusal{{Reason: lb.ReasonSchedulerIgnored, Message: "no lc: random"},
		{Reason: lb.ReasonExternalIPRefused, Message: "no 192.0.2.1"}}
	of := func(message string) lb.Condition {
		return lb.Condition{Type: lb.ConditionAsRequested, Reason: lb.ReasonSchedulerIgnored, Message: message}
	}
	const said = "no lc: random; no 192.0.2.1"
	for _, c := range []struct {
		what    string
		shown   lb.Condition
		refused []lb.Refusal
		writes  bool
		want    lb.Condition
		turn    bool // whether it waits for that
	}{
		{what: "nothing to say"},
		{"the first", lb.Condition{}, scheduler, true, of("here: " + said), true},
		{"it has said so", of("here: " + said), scheduler, false, of("here: " + said), false},
		{"it has said something else", of("here: no sed"), scheduler, true, of("here: " + said), false},
		{"it serves as requested now", of("here: no sed"), nil, true, lb.Condition{}, false},
		{"another has said so", of("there: " + said), scheduler, false, of("here: " + said), false},
		{"another has, and this one has nothing to say", of("there: " + said), nil, false, lb.Condition{}, false},
		{"a node that is gone has", of("gone: no sed"), scheduler, true, of("here: " + said), true},
		{"a node that is gone has, and nobody else", of("gone: no sed"), nil, true, lb.Condition{}, true},
		{"no node has", of("nonsense"), nil, true, lb.Condition{}, true},
	} {
		svc := lb.Service{UID: "1", AsRequested: c.shown}
		exists := func(node string) bool { return node == "here" || node == "there" }
		got, ok := AsRequested("here", svc, c.refused, exists, 100)
		if ok != c.writes || got.Want != c.want || got.Shown != c.shown || got.UID != "1" ||
			(got.Turn > 0) != (ok && c.turn) {
			t.Errorf("%s: %v %+v", c.what, ok, got)
		}
	}
	long := []lb.Refusal{{Reason: lb.ReasonDirectRefused, Message: strings.Repeat("ä", 4096)}}
	got, _ := AsRequested("here", lb.Service{}, long, func(string) bool { return true }, 1)
	if n := len(got.Want.Message); n > 1024 || n < 1000 || !strings.HasSuffix(got.Want.Message, "ä...") || got.Turn != 0 {
		t.Errorf("%d bytes, which end in %q, after %s", n, got.Want.Message[n-5:], got.Turn)
	}
}

// Nodes that refuse the same do not write at one moment, and not one node writes first for all Services.
func TestTurns(t *testing.T) {
	for _, c := range []struct {
		nodes int
		last  time.Duration
	}{{2, time.Second}, {100, 50 * time.Second}, {5000, time.Minute}} {
		first := map[string]bool{}
		for _, name := range []string{"a", "b", "c", "d", "e", "f", "g", "h"} {
			key, least, who := lb.Key{Namespace: "default", Name: name}, c.last, ""
			for _, node := range []string{"n1", "n2", "n3", "n4"} {
				at := turn(node, key, c.nodes)
				if at < 0 || at >= c.last {
					t.Errorf("%d nodes: %s", c.nodes, at)
				}
				if at < least {
					least, who = at, node
				}
			}
			first[who] = true
		}
		if len(first) < 2 {
			t.Errorf("%d nodes: %v write first for all", c.nodes, first)
		}
	}
}
