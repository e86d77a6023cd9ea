package ownership

import (
	"net/netip"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/speaker/plan"
)

// A Service that is deleted and created, or whose last endpoint comes and goes, ten times a second is answered for
// at once, and announced a bounded number of times: the first ones at once. Where another node serves it in between
// that is a move, of which the first hundred are announced at once.
func TestContract11FlappingVIPsAreAnnouncedLess(t *testing.T) {
	for name, test := range map[string]struct {
		gone  bool // the Service is, in between; else it has no endpoint here
		moves bool // another node serves the VIP in between
		most  int  // how often it is announced in a minute
		first int  // how many turns at the beginning are announced at once
	}{
		"deleted and created":  {gone: true, most: 20 + 60, first: 20},
		"endpoints to zero":    {most: 20 + 60, first: 20},
		"to and fro two nodes": {moves: true, most: 100 + 60, first: 100},
	} {
		s, now, self := New(time.Second), epoch, ranked(vip1)[0]
		step := func(claims string, gone, serves bool) {
			s.Step(now, facts(self), Events{VIPs: map[netip.Addr]bool{vip1: true}, Seen: s.seen,
				Input: func(vip netip.Addr) (plan.Input, bool) {
					in := input(vip, claims)
					if !serves {
						in.Holders[0].Delivery.Ready = 0
					}
					return in, !gone
				}})
			now = now.Add(50 * time.Millisecond)
		}
		announced, first := 0, 0
		for turn := range 600 {
			others := ""
			if test.moves {
				others = ranked(vip1)[1] + ":answers"
			}
			step(others, test.gone, false)
			step("restarted", false, true) // so that nothing is probed
			answer, answers := s.answers[vip1]
			switch {
			case !answers:
				t.Fatalf("%s: not answered for at %v: %v", name, now.Sub(epoch), s.decisions[vip1].Refusal)
			case !answer.Held:
				if announced++; first == turn {
					first++
				}
			default:
				if n, ok := s.decisions[vip1].Node(self); !ok || n.Reason != lb.ReasonFlapping {
					t.Fatalf("%s: held back as %+v", name, n)
				}
			}
		}
		if announced > test.most || first < test.first {
			t.Errorf("%s: announced %d times in a minute, the first %d at once; want at most %d, and %d", name, announced,
				first, test.most, test.first)
		}
		// It rests, and is announced within a second.
		decided, changed, again := s.Step(now, facts(self), Events{Seen: s.seen})
		for s.answers[vip1].Held && again > 0 {
			now = now.Add(again)
			decided, changed, again = s.Step(now, facts(self), Events{Seen: s.seen,
				Input: func(vip netip.Addr) (plan.Input, bool) { return input(vip, ""), true }})
		}
		if s.answers[vip1].Held || now.Sub(epoch) > time.Minute+time.Second || s.Held() == 0 {
			t.Errorf("%s: rests at %v: %+v, changed %v, %+v, %d were held", name, now.Sub(epoch), decided, changed,
				s.answers[vip1], s.Held())
		}
	}
}
