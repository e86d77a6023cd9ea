package main

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/speaker/plan"
	"github.com/landfall-lb/landfall/speaker/report"
)

var conflicting = plan.ConflictingHost{Interface: "eth0", MAC: "02:00:00:00:99:99"}

// see has each node's interface see, or no longer see, a conflicting host at the VIP.
func (r *rig) see(vip netip.Addr, hosts ...plan.ConflictingHost) {
	for _, n := range r.nodes {
		n.mu.Lock()
		n.conflicting = map[netip.Addr][]plan.ConflictingHost{}
		if len(hosts) > 0 {
			n.conflicting[vip] = hosts
		}
		n.mu.Unlock()
		n.runner.Poke()
	}
	synctest.Wait()
}

func (r *rig) slow(slow bool) {
	for _, n := range r.nodes {
		n.mu.Lock()
		n.slow = slow
		n.mu.Unlock()
		n.changes.markAll()
	}
	synctest.Wait()
}

func TestNewAddressIsProbedAndATakeoverIsNot(t *testing.T) {
	inRig(t, func(r *rig) {
		r.slow(true)
		r.start(w177, w178, w179)
		r.service(nginx, vip1)
		r.wantAnswers("while the owner asks", vip1)
		r.slow(false)
		order := ranked(vip1)
		r.wantAnswers("after it", vip1, order[0])

		// From here on probing would never end.
		r.slow(true)
		r.crash(order[0])
		r.wantAnswers("after a crash", vip1, order[1])
	})
}

func TestForeignHolderIsReportedAndKeepsItsAddress(t *testing.T) {
	inRig(t, func(r *rig) {
		r.slow(true)
		r.start(w177, w178, w179)
		r.service(nginx, vip1)
		r.see(vip1, conflicting)
		r.wantAnswers("while somebody else has it", vip1)
		reports := 0
		for name, n := range r.nodes {
			if claim, _ := n.claim(vip1); claim.Reason != lb.ReasonAddressConflict {
				t.Errorf("%s says %+v", name, claim)
			}
			c, ok := n.reported(nginx)
			if !ok {
				continue
			}
			reports++
			if c.Status || c.Reason != lb.ReasonAddressConflict ||
				!strings.Contains(c.Message, "172.26.236.180 is in use by 02:00:00:00:99:99 on eth0") {
				t.Errorf("%s reports %+v", name, c)
			}
			if st := n.whole(t).VIPs[0]; len(st.ConflictingHosts) != 1 || !st.Probing {
				t.Errorf("status %+v", st)
			}
			want := `landfall_speaker_address_conflict{interface="eth0",mac="02:00:00:00:99:99",vip="172.26.236.180"} 1`
			registry := prometheus.NewRegistry()
			registry.MustRegister(newCollector(n.speaker))
			if err := testutil.GatherAndCompare(registry,
				strings.NewReader(
					"# HELP landfall_speaker_address_conflict 1 for each conflicting host: a device outside the cluster that uses "+
						"a VIP, as this node sees it.\n# TYPE landfall_speaker_address_conflict gauge\n"+want+"\n"),
				"landfall_speaker_address_conflict"); err != nil {
				t.Error(err)
			}
		}
		if reports != 1 {
			t.Errorf("%d nodes report", reports)
		}

		// It goes; the address is ours.
		r.see(vip1)
		r.slow(false)
		time.Sleep(time.Second)
		synctest.Wait()
		owner := ranked(vip1)[0]
		r.wantAnswers("when it has gone", vip1, owner)

		// It comes back: now the address is defended, and that is reported.
		r.see(vip1, conflicting)
		r.wantAnswers("when it is back", vip1, owner)
		if c, _ := r.nodes[owner].reported(nginx); !c.Status || c.Reason != lb.ReasonContested ||
			!strings.Contains(c.Message, conflicting.MAC) {
			t.Errorf("reports %+v", c)
		}
	})
}

// A device that makes up another MAC address each moment keeps nobody from reading that it uses the address, and has
// the Service written hardly more often than one that does not.
func TestContract10MadeUpMACsAreReported(t *testing.T) {
	for _, kept := range []int{1, 8} { // that count at a time
		t.Run(fmt.Sprint(kept), func(t *testing.T) {
			inRig(t, func(r *rig) {
				r.slow(true)
				r.start(w177, w178, w179)
				r.service(nginx, vip1)
				shown, writes := lb.Service{Key: nginx}, 0
				reporter := report.New(report.Options{Log: slog.New(slog.DiscardHandler),
					Service: func(lb.Key) (lb.Service, bool) { return shown, true },
					Write: func(_ context.Context, s lb.Service, status lb.AnnouncedStatus) (bool, error) {
						s.Announcements = status.Announcements
						s.Conditions = []lb.Condition{status.Condition, lb.Serving(status.Condition)}
						shown, writes = s, writes+1
						return true, nil
					},
					Refused: func(error) bool { return false }, Event: func(lb.Service, bool, lb.Reason, string) {}})
				reporter.Begin(nil)
				ctx, cancel := context.WithCancel(context.Background())
				done := make(chan error)
				go func() { done <- reporter.Run(ctx) }()
				defer func() { cancel(); <-done }()
				var hosts []plan.ConflictingHost
				for i := range 200 {
					hosts = append(hosts, plan.ConflictingHost{Interface: "eth0", MAC: fmt.Sprintf("02:00:00:00:00:%02x", i)})
					hosts = hosts[max(0, len(hosts)-kept):]
					r.see(vip1, hosts...)
					for _, n := range r.nodes {
						if status, ok := n.wrote(nginx); ok {
							reporter.Update(map[lb.Key]*lb.AnnouncedStatus{nginx: &status})
						}
					}
					time.Sleep(1500 * time.Millisecond)
					synctest.Wait()
					if i == 2 && writes == 0 {
						t.Error("nothing is written in 4.5 s")
					}
				}
				if len(shown.Conditions) == 0 || shown.Conditions[0].Reason != lb.ReasonAddressConflict || writes > 12 {
					t.Errorf("%d writes in five minutes; shown: %+v", writes, shown.Conditions)
				}
			})
		})
	}
}

// What devices of the LAN make up fills no log.
func TestContract11LinesAboutConflictingHostsAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log strings.Builder
		s := newSpeaker(w177, options{}, slog.New(slog.NewTextHandler(&log, nil)))
		lines := func() int {
			n := strings.Count(log.String(), "\n")
			log.Reset()
			return n
		}
		second := plan.ConflictingHost{Interface: "eth0", MAC: "02:00:00:00:99:98"}
		before, now := plan.Decision{VIP: vip1}, plan.Decision{VIP: vip1, ConflictingHosts: []plan.ConflictingHost{conflicting}}
		more := plan.Decision{VIP: vip1, ConflictingHosts: []plan.ConflictingHost{conflicting, second}}
		others := plan.Decision{VIP: vip1, ConflictingHosts: []plan.ConflictingHost{conflicting, conflicting, second}}
		for _, d := range []plan.Decision{now, now, more, others, more, before} {
			s.logConflict(time.Now(), before, d)
			before = d
		}
		if n := lines(); n != 3 { // of one, of others, of none
			t.Errorf("%d lines about one address", n)
		}
		time.Sleep(time.Second)
		for range 1000 {
			s.logConflict(time.Now(), before, now)
			s.logConflict(time.Now(), now, before)
		}
		time.Sleep(time.Second)
		s.logConflict(time.Now(), before, now)
		if text := log.String(); lines() != maxConflictLines+1 || !strings.Contains(text, "leftOut=1990") {
			t.Errorf("logged:\n%s", text)
		}
	})
}

// Each node knows the MAC addresses of all others, or it would take them for conflicting hosts.
func TestNodesKnowOneAnother(t *testing.T) {
	inRig(t, func(r *rig) {
		r.start(w177, w178, w179)
		r.service(nginx, vip1)
		r.service(other, vip2)
		for name, n := range r.nodes {
			if len(n.macs) != 1 {
				t.Errorf("%s tells %v", name, n.macs)
			}
			n.changes.markAll()
		}
		synctest.Wait()
		for name, n := range r.nodes {
			if len(n.ours) != 3 {
				t.Errorf("%s knows %v", name, n.ours)
			}
		}
	})
}

// Two Services have one VIP in their status, and the nodes serve its port for one of them. The VIP
// stays announced, and the other Service's condition says why it is not served.
func TestContract11TheLoserOfAFrontendIsTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.service(nginx, vip1)
		r.start(w177, w178)
		defer r.end()
		owner := r.wire.who(vip1)
		r.wire.watch(vip1)
		r.api.services.Set(other, lb.Service{Key: other, Type: lb.LoadBalancer, ExternalPolicy: lb.Cluster,
			Ingress: []lb.Ingress{{Addr: vip1}}})
		time.Sleep(10 * time.Second) // the speakers hear of it before their proxies do
		for _, n := range r.nodes {
			n.deliver(lb.Delivery{Service: other, VIP: vip1, Policy: lb.Cluster,
				Refusal: lb.Refuse(lb.ReasonFrontendInUse, "172.26.236.180:80/tcp is held by Service default/my-nginx")})
		}
		time.Sleep(10 * time.Second)
		synctest.Wait()
		r.wantAnswers("with the loser", vip1, owner...)
		if r.wire.least[vip1] == 0 {
			t.Error("no node answered for a moment")
		}
		condition := func(key lb.Key) (found lb.Condition) {
			for _, n := range r.nodes {
				if c, ok := n.reported(key); ok {
					found = c
				}
			}
			return found
		}
		if c := condition(nginx); !c.Status || c.Reason != lb.ReasonAnnounced {
			t.Errorf("the winner's condition: %+v", c)
		}
		if c := condition(other); c.Status || c.Reason != lb.ReasonFrontendInUse ||
			!strings.HasPrefix(c.Message, "172.26.236.180:80/tcp is held by Service default/my-nginx") {
			t.Errorf("the loser's condition: %+v", c)
		}
		for _, n := range r.nodes {
			n.deliver(lb.Delivery{Service: other, VIP: vip1, Policy: lb.Cluster, Ready: 1})
		}
		time.Sleep(10 * time.Second)
		synctest.Wait()
		if c := condition(other); !c.Status {
			t.Errorf("it is served, and its condition says: %+v", c)
		}
	})
}
