package main

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/speaker/plan"
)

// TestVIPsBeyondTheLimitAreRefused has a cluster with one VIP more than speakers announce: no node
// says a word of it to the others, and one node says why at the Service, until there is room.
func TestVIPsBeyondTheLimitAreRefused(t *testing.T) {
	inRig(t, func(r *rig) {
		for _, n := range r.nodes {
			n.rooms.holders.Limit = 1
		}
		r.start(w177, w178, w179)
		r.service(nginx, vip1)
		r.service(other, vip2) // as old, and second by name
		r.wantAnswers("within the limit", vip1, ranked(vip1)[0])
		r.wantAnswers("beyond the limit", vip2)
		said := func() (by string) {
			t.Helper()
			for _, n := range r.nodes {
				if claim, ok := n.claim(vip2); ok {
					t.Errorf("%s says %+v of a VIP beyond the limit", n.self, claim)
				}
				status, ok := n.reports[other]
				switch {
				case !ok || !n.live:
					continue
				case by != "":
					t.Errorf("%s and %s report", by, n.self)
				case status.Condition.Status || status.Condition.Reason != lb.ReasonTooManyVIPs:
					t.Errorf("%s reports %+v", n.self, status.Condition)
				}
				by = n.self
			}
			return by
		}
		if by, want := said(), plan.Winner(vip2, []string{w177, w178, w179}); by != want {
			t.Errorf("%q reports, want %s", by, want)
		}
		registry := prometheus.NewRegistry()
		registry.MustRegister(newCollector(r.nodes[w177].speaker))
		if n, err := testutil.GatherAndCount(registry, "landfall_speaker_claims"); err != nil || n != 2 {
			t.Errorf("%d reasons are counted, want Claimed and TooManyVIPs: %v", n, err)
		}
		r.service(other, vip2, vip1)
		if c, ok := r.nodes[ranked(vip1)[0]].reported(other); ok && c.Reason == lb.ReasonAnnounced {
			t.Errorf("with one VIP of two: %+v", c)
		}
		r.service(other, vip2)
		r.crash(said())
		if by := said(); by == "" {
			t.Error("nobody reports after the reporter is gone")
		}
		r.api.services.Delete(nginx)
		synctest.Wait()
		r.wantAnswers("gone", vip1)
		if len(r.wire.who(vip2)) != 1 {
			t.Errorf("with room again %v answer", r.wire.who(vip2))
		}
	})
}

// TestWrongProbesAreTold in the condition of a Service that is announced all the same.
func TestWrongProbesAreTold(t *testing.T) {
	inRig(t, func(r *rig) {
		r.start(w177, w178, w179)
		r.service(nginx, vip1)
		s, _ := r.api.services.Get(nginx)
		s.InvalidProbe = `"icmp": want tcp`
		r.api.services.Set(nginx, s)
		synctest.Wait()
		time.Sleep(time.Minute)
		synctest.Wait()
		r.wantAnswers("with a wrong probe", vip1, ranked(vip1)[0])
		told := 0
		for _, n := range r.nodes {
			status, ok := n.reports[nginx]
			if !ok {
				continue
			}
			told++
			if c := status.Condition; !c.Status || !strings.HasSuffix(c.Message,
				`; annotation landfall.dev/probe: "icmp": want tcp; nodes do not probe its endpoints`) {
				t.Errorf("%s reports %+v", n.self, c)
			}
		}
		if told == 0 {
			t.Error("no node reports")
		}
	})
}

// A tenant who may write the status of Services in one namespace can fill old ones with addresses that no pool has.
// Those come after all that the controller has confirmed, on every node. While there is room they are announced: so
// are those of Services from before the controller.
func TestContract11MadeUpAddressesTakeNoRoom(t *testing.T) {
	inRig(t, func(r *rig) {
		for _, n := range r.nodes {
			n.rooms.holders.Limit = 1
		}
		r.start(w177, w178, w179)
		r.service(nginx, vip1)
		r.wantAnswers("while there is room", vip1, ranked(vip1)[0])
		r.service(other, vip2) // as old, and second by name
		s, _ := r.api.services.Get(other)
		s.Conditions = append(s.Conditions, lb.Condition{Type: lb.ConditionAssigned, Status: true,
			Message: vip2.String() + lb.FromPool + "lan"})
		r.api.services.Set(other, s)
		synctest.Wait()
		time.Sleep(time.Minute)
		synctest.Wait()
		r.wantAnswers("confirmed", vip2, ranked(vip2)[0])
		r.wantAnswers("made up", vip1)
		for _, n := range r.nodes {
			if status, ok := n.reports[nginx]; ok && status.Condition.Reason != lb.ReasonTooManyVIPs {
				t.Errorf("%s reports %+v", n.self, status.Condition)
			}
		}
	})
}
