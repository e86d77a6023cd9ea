package main

import (
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/speaker/plan"
)

// ranked are the three workers in the order in which they would own the VIP.
func ranked(vip netip.Addr) []string {
	rest := []string{w177, w178, w179}
	var order []string
	for len(rest) > 0 {
		w := plan.Winner(vip, rest)
		order = append(order, w)
		rest = slices.DeleteFunc(rest, func(n string) bool { return n == w })
	}
	return order
}

func TestOneNodeAnswersAndReports(t *testing.T) {
	inRig(t, func(r *rig) {
		r.start(w177, w178, w179)
		r.service(nginx, vip1)
		owner := ranked(vip1)[0]
		r.wantAnswers("at first", vip1, owner)
		for name, n := range r.nodes {
			claim, ok := n.claim(vip1)
			if !ok || claim.Reason != "" || claim.Answering != (name == owner) {
				t.Errorf("%s says %+v", name, claim)
			}
			c, ok := n.reported(nginx)
			if ok != (name == owner) {
				t.Errorf("%s reports %+v: %v", name, c, ok)
			}
			if ok && (!c.Status || c.Message != "172.26.236.180 is announced from "+owner+" (ARP on eth0)") {
				t.Errorf("%s reports %+v", name, c)
			}
		}
	})
}

func TestContract5And6SIGTERMHandsOverWithoutAGap(t *testing.T) {
	inRig(t, func(r *rig) {
		r.start(w177, w178, w179)
		r.service(nginx, vip1)
		r.service(other, vip2)
		order := ranked(vip1)
		r.wire.watch(vip1)
		r.wire.watch(vip2)
		started := time.Now()
		r.stop(order[0])
		r.wantAnswers("after SIGTERM", vip1, order[1])
		if took := time.Since(started); took > time.Second {
			t.Errorf("took %v", took)
		}
		if c, _ := r.nodes[order[1]].reported(nginx); !strings.Contains(c.Message, "announced from "+order[1]) {
			t.Errorf("the heir reports %+v", c)
		}
		if c, ok := r.nodes[order[0]].reported(nginx); ok {
			t.Errorf("who has stopped reports %+v", c)
		}
		r.crash(order[0])
		r.wantAnswers("after the end", vip1, order[1])
		for vip, least := range r.wire.least {
			if least == 0 {
				t.Errorf("for a moment nobody answered for %s", vip)
			}
		}
	})
}

func TestContract6HandoverIsBounded(t *testing.T) {
	inRig(t, func(r *rig) {
		r.start(w177, w178, w179)
		r.service(nginx, vip1)
		order := ranked(vip1)
		r.nodes[order[1]].mu.Lock()
		r.nodes[order[1]].mute = true // the heir claims, and cannot answer
		r.nodes[order[1]].mu.Unlock()
		started := time.Now()
		r.stop(order[0])
		if took := time.Since(started); took != handoverTimeout {
			t.Errorf("took %v, want %v", took, handoverTimeout)
		}
		r.wantAnswers("until the end", vip1, order[0])
		if c, _ := r.nodes[order[1]].reported(nginx); c.Status || c.Reason != lb.ReasonAnnounceFailed {
			t.Errorf("the heir reports %+v", c)
		}

		// Without anybody to hand over to there is nothing to wait for.
		r.die(order[0])
		r.die(order[1])
		r.wantAnswers("the last one", vip1, order[2])
		started = time.Now()
		r.stop(order[2])
		if took := time.Since(started); took > time.Second {
			t.Errorf("a speaker without heirs waited %v", took)
		}
	})
}

// syncing is a table of any kind.
type syncing interface{ SetSynced(bool) }

// unsynced has a table not know yet whether it has seen everything.
func unsynced(table func(*rig) syncing) (forget func(*rig, *fakeNode) (remember func())) {
	return func(r *rig, _ *fakeNode) func() {
		table(r).SetSynced(false)
		return func() { table(r).SetSynced(true) }
	}
}

func TestContract7NothingIsClaimedBeforeAllIsKnown(t *testing.T) {
	for what, forget := range map[string]func(*rig, *fakeNode) func(){
		"the list of Services":         unsynced(func(r *rig) syncing { return r.api.services }),
		"the list of Nodes":            unsynced(func(r *rig) syncing { return r.api.nodes }),
		"the list of IPAddressPools":   unsynced(func(r *rig) syncing { return r.api.pools }),
		"the list of L2Advertisements": unsynced(func(r *rig) syncing { return r.api.advertisements }),
		"the list of network interfaces": func(_ *rig, n *fakeNode) func() {
			was := n.interfaces
			n.interfaces = nil
			return func() { n.interfaces = was }
		},
	} {
		t.Run(what, func(t *testing.T) {
			inRig(t, func(r *rig) {
				n := r.nodes[w178]
				remember := forget(r, n)
				r.start(w178)
				r.service(nginx, vip1)
				if err := n.ready(); err == nil || err.Error() != "waiting for "+what {
					t.Errorf("ready says %v", err)
				}
				if c, ok := n.claim(vip1); ok {
					t.Errorf("claims %+v", c)
				}
				if got := n.status(); got.Waiting != what {
					t.Errorf("waits for %q", got.Waiting)
				}
				remember()
				n.changes.markSynced()
				synctest.Wait()
				r.wantAnswers("with everything known", vip1, w178)
				if err := n.ready(); err != nil {
					t.Error(err)
				}
				if len(n.peers) != 2 {
					t.Errorf("told to meet %v", n.peers)
				}
			})
		})
	}
}

// With the API server gone, what is known goes on, and nodes still take over from one another.
func TestContract7FailoverWithoutAPIServer(t *testing.T) {
	inRig(t, func(r *rig) {
		r.start(w177, w178, w179)
		r.service(nginx, vip1)
		order := ranked(vip1)
		r.nodes[order[0]].setGate(lb.ReasonFeedLost)
		r.wantAnswers("the owner's proxy is gone", vip1, order[1])
		r.crash(order[1])
		r.wantAnswers("the next one has crashed", vip1, order[2])
		r.nodes[order[0]].setGate("")
		r.wantAnswers("the proxy is back, and the address is served well", vip1, order[2])
	})
}

func TestContract1And3AWithdrawnVIPIsNotAnswered(t *testing.T) {
	inRig(t, func(r *rig) {
		r.start(w177, w178, w179)
		r.service(nginx, vip1)
		owner := r.nodes[ranked(vip1)[0]]
		for _, c := range []struct {
			what string
			do   func()
		}{
			{"Service deleted", func() { r.api.services.Delete(nginx) }},
			{"type changed", func() { r.api.services.Set(nginx, lb.Service{Key: nginx, Type: lb.ClusterIP}) }},
			{"class changed", func() {
				s, _ := r.api.services.Get(nginx)
				s.Class = "example.com/other"
				r.api.services.Set(nginx, s)
			}},
			{"address moved", func() { r.service(nginx, vip2) }},
		} {
			time.Sleep(5 * time.Second) // changes that come all the time are folded
			r.service(nginx, vip1)
			r.wantAnswers("before: "+c.what, vip1, owner.self)
			c.do()
			synctest.Wait()
			r.wantAnswers(c.what, vip1)
			if claim, ok := owner.claim(vip1); ok {
				t.Errorf("%s: still says %+v", c.what, claim)
			}
			if vips := owner.rooms.holders.VIPs(nginx); (len(vips) > 0) != (c.what == "address moved") {
				t.Errorf("%s: the index has %v", c.what, vips)
			}
		}
		r.api.services.Delete(nginx)
		synctest.Wait()
		for name, n := range r.nodes {
			held, services, decisions := n.rooms.holders.All(), n.rooms.holders.Services(), n.snapshot()
			if len(held)+len(services)+len(decisions)+len(n.reports) > 0 {
				t.Errorf("%s keeps something of what is gone: %v %v %v %v", name, held, services, decisions, n.reports)
			}
		}
	})
}

func TestContract10AServiceWithoutAddressesIsNotShownAsAnnounced(t *testing.T) {
	inRig(t, func(r *rig) {
		r.start(w177, w178, w179)
		r.service(nginx, vip1)
		c, _ := r.nodes[ranked(vip1)[0]].reported(nginx)
		s, _ := r.api.services.Get(nginx)
		s.Conditions, s.Ingress = []lb.Condition{c}, nil
		r.api.services.Set(nginx, s)
		r.api.services.Set(other, lb.Service{Key: other, Type: lb.LoadBalancer}) // one that never had any
		annotated := lb.Key{Namespace: "default", Name: "annotated"}
		r.api.services.Set(annotated, lb.Service{Key: annotated, Type: lb.LoadBalancer, Announcements: "left over"})
		synctest.Wait()
		writers := 0
		for _, n := range r.nodes {
			for _, key := range []lb.Key{nginx, annotated} {
				status, ok := n.reports[key]
				if !ok {
					continue
				}
				writers++
				if c := status.Condition; c.Status || c.Reason != lb.ReasonNoAddress || status.Announcements != "" {
					t.Errorf("%s reports %+v of %s", n.self, status, key)
				}
			}
			if c, ok := n.reported(other); ok {
				t.Errorf("%s reports %+v", n.self, c)
			}
		}
		if writers != 2 {
			t.Errorf("%d reports, want one of each Service", writers)
		}
	})
}

func TestSharedVIP(t *testing.T) {
	inRig(t, func(r *rig) {
		r.start(w177, w178, w179)
		r.service(nginx, vip1)
		r.service(other, vip1)
		order := ranked(vip1)
		r.wantAnswers("both programmed", vip1, order[0])
		d := lb.Delivery{Service: other, VIP: vip1, Policy: lb.Cluster, Ready: 1,
			Refusal: lb.Refuse(lb.ReasonNotProgrammed, "no")}
		r.nodes[order[0]].deliver(d)
		synctest.Wait()
		r.wantAnswers("one not programmed on the owner", vip1, order[1])
		r.api.services.Delete(other)
		synctest.Wait()
		r.wantAnswers("only the other one left, and it is served well", vip1, order[1])
	})
}

// An owner that sees that another node answered for its VIP announces it again when that one has
// stopped.
func TestAnnouncesAgainAfterARival(t *testing.T) {
	inRig(t, func(r *rig) {
		r.start(w177, w178, w179)
		r.service(nginx, vip1)
		order := ranked(vip1)
		owner, rival := r.nodes[order[0]], r.nodes[order[2]]
		before := owner.rounds[vip1]
		rival.mu.Lock()
		rival.claims = map[netip.Addr]plan.Claim{vip1: {Answering: true}}
		rival.mu.Unlock()
		owner.changes.markVIPs([]netip.Addr{vip1})
		synctest.Wait()
		during := owner.rounds[vip1]
		rival.mu.Lock()
		rival.claims = map[netip.Addr]plan.Claim{vip1: {}}
		rival.mu.Unlock()
		owner.changes.markVIPs([]netip.Addr{vip1})
		synctest.Wait()
		if after := owner.rounds[vip1]; during == before || after == during {
			t.Errorf("rounds %d, %d, %d", before, during, after)
		}
	})
}

func TestGateNoneGoesByEndpoints(t *testing.T) {
	inRig(t, func(r *rig) {
		for _, n := range r.nodes {
			n.from.feed, n.from.slices = nil, r.api.slices
		}
		r.start(w177, w178, w179)
		r.service(nginx, vip1)
		r.wantAnswers("no endpoints", vip1)
		s, _ := r.api.services.Get(nginx)
		s.ExternalPolicy = lb.Local
		s.Ports = []lb.ServicePort{{Protocol: lb.TCP, Port: 80}}
		r.api.services.Set(nginx, s)
		last := ranked(vip1)[2]
		r.api.slices.Set(nginx, []lb.Slice{{
			Service: nginx, Family: lb.IPv4, Ports: []lb.SlicePort{{Protocol: lb.TCP, Port: 80}},
			Endpoints: []lb.Endpoint{{Addr: netip.MustParseAddr("192.168.1.1"), Node: last, Ready: true, Serving: true}},
		}})
		synctest.Wait()
		r.wantAnswers("policy Local, one endpoint", vip1, last)
		if got := r.nodes[last].status().Gate; got.Kind != "none" || !strings.HasPrefix(got.Checks, "endpoints only") {
			t.Errorf("status says %+v", got)
		}
	})
}

// The status counts the VIPs that the node does not announce for a cause of its own.
func TestContract10TheStatusSaysWhatIsWithheld(t *testing.T) {
	inRig(t, func(r *rig) {
		r.start(w177, w178)
		r.service(nginx, vip1)
		r.service(other, vip2)
		r.wantAnswers("well", vip1, plan.Winner(vip1, []string{w177, w178}))
		if got := r.nodes[w177].status().Withheld; len(got) > 0 {
			t.Errorf("withholds %+v", got)
		}
		node, _ := r.api.nodes.Get(w177)
		node.NetworkUnavailable = true
		r.api.nodes.Set(w177, node)
		synctest.Wait()
		got := r.nodes[w177].status().Withheld
		if len(got) != 1 || got[0].VIP != vip1 || got[0].Count != 2 || got[0].Reason != lb.ReasonNetworkUnavailable {
			t.Errorf("withholds %+v", got)
		}
		if got := r.nodes[w178].status().Withheld; len(got) > 0 {
			t.Errorf("another node withholds %+v", got)
		}
	})
}

// The status names the Services of what a node announces although it should not, as no other node can: landfallctl
// drain waits for that.
func TestContract10TheStatusSaysWhatHasNoOtherNode(t *testing.T) {
	for _, bgp := range []bool{false, true} {
		inRig(t, func(r *rig) {
			if bgp {
				r.onlyBGP()
			}
			r.start(w177, w178)
			r.tor("tor-1", "172.26.236.2", nil)
			r.service(nginx, vip1)
			r.service(other, vip2)
			r.letRescue()
			for _, node := range []string{w177, w178} {
				d := lb.Delivery{Service: nginx, VIP: vip1, Policy: lb.Local, Ready: 1}
				if node == w177 {
					d.LocalReady = 1
				}
				r.nodes[node].deliver(d)
			}
			time.Sleep(time.Second)
			synctest.Wait()
			want := func(what string, n int, services ...string) {
				t.Helper()
				time.Sleep(5 * time.Second)
				synctest.Wait()
				got := r.nodes[w177].status().Parting
				if got.Count != n || !slices.Equal(got.Services, services) {
					t.Errorf("BGP %v, %s: %+v", bgp, what, got)
				}
			}
			want("well", 0)
			r.api.nodes.Set(w177, lb.Node{Name: w177, Leaving: lb.ReasonNodeDrained})
			want("drained", 1, nginx.String())
			if bgp { // the route comes back with the router
				r.nodes[w177].routers.connect("tor-1", false)
				want("the router is away", 1, nginx.String())
				if got := r.nodes[w177].status().BGP.Leaving; got != 1 {
					t.Errorf("the router is away: %d addresses are about to end", got)
				}
				r.nodes[w177].routers.connect("tor-1", true)
				want("the router is back", 1, nginx.String())
			}
			r.nodes[w178].deliver(lb.Delivery{Service: nginx, VIP: vip1, Policy: lb.Local, Ready: 2, LocalReady: 1})
			want("the other node delivers", 0)
			if got := r.nodes[w177].status().BGP.Leaving; got != 0 {
				t.Errorf("BGP %v, the other node delivers: %d addresses are about to end", bgp, got)
			}
		})
	}
}

func TestContract10StatusAndMetrics(t *testing.T) {
	inRig(t, func(r *rig) {
		r.start(w177, w178, w179)
		r.service(nginx, vip1)
		r.service(other, vip2)
		order := ranked(vip1)
		owner := r.nodes[order[0]]
		r.nodes[order[1]].deliver(lb.Delivery{Service: nginx, VIP: vip1, Policy: lb.Local, Ready: 1})
		synctest.Wait()

		got := owner.whole(t)
		if len(got.VIPs) != 2 || got.VIPs[0].VIP != vip1 || got.VIPs[0].Owner != order[0] ||
			!slices.Equal(got.VIPs[0].Answering, []string{"eth0"}) || got.status.Answering == 0 {
			t.Fatalf("got %+v", got.VIPs)
		}
		reasons := map[string]lb.Reason{}
		for _, n := range got.VIPs[0].Nodes {
			reasons[n.Node] = n.Reason
			if n.Message == "" {
				t.Errorf("%s has no sentence", n.Node)
			}
		}
		if reasons[order[0]] != lb.ReasonAnnounced || reasons[order[1]] != lb.ReasonNoLocalBackends ||
			reasons[order[2]] != lb.ReasonNotOwner {
			t.Errorf("got %v", reasons)
		}

		registry := prometheus.NewRegistry()
		registry.MustRegister(newCollector(owner.speaker))
		want := `
# HELP landfall_speaker_members Live nodes that run a speaker, this one included.
# TYPE landfall_speaker_members gauge
landfall_speaker_members 3
# HELP landfall_speaker_claims VIPs by why this node does not claim them; Claimed for those that it does.
# TYPE landfall_speaker_claims gauge
landfall_speaker_claims{reason="Claimed"} 2
`
		if err := testutil.GatherAndCompare(registry, strings.NewReader(want), "landfall_speaker_members",
			"landfall_speaker_claims"); err != nil {
			t.Error(err)
		}
		if n, err := testutil.GatherAndCount(registry, "landfall_speaker_announced"); err != nil || n != len(owner.outcome) {
			t.Errorf("%d announced, want %d: %v", n, len(owner.outcome), err)
		}
	})
}

// TestALoopThatHangsIsSeen has the loop deadlocked on what it reads.
func TestALoopThatHangsIsSeen(t *testing.T) {
	inRig(t, func(r *rig) {
		r.start(w177)
		n := r.nodes[w177]
		if busy := n.runner.Busy(); busy != 0 {
			t.Errorf("at rest: busy for %v", busy)
		}
		hang, interfaces := make(chan struct{}), n.from.interfaces
		n.from.interfaces = func() ([]lb.Interface, bool) { <-hang; return interfaces() }
		n.changes.markAll()
		time.Sleep(time.Hour)
		if busy := n.runner.Busy(); busy < time.Hour-time.Minute {
			t.Errorf("busy for %v", busy)
		}
		close(hang)
		synctest.Wait()
		if busy := n.runner.Busy(); busy != 0 {
			t.Errorf("busy for %v", busy)
		}
	})
}

// TestOnlyInterfacesThatMayAnswerCount has interfaces come: one of a pod, as with each pod, plans
// no address anew; one that may answer does.
func TestOnlyInterfacesThatMayAnswerCount(t *testing.T) {
	inRig(t, func(r *rig) {
		n := r.nodes[w177]
		n.opts.exclude = []string{"veth*"}
		r.start(w177)
		r.service(nginx, vip1)
		come := func(name string, addresses ...netip.Prefix) (decided int) {
			n.mu.Lock()
			before := n.decided
			n.interfaces = append(slices.Clone(n.interfaces), lb.Interface{Index: len(n.interfaces) + 2, Name: name,
				MAC: net.HardwareAddr{2, 0, 0, 0, 1, byte(len(n.interfaces))}, Up: true, Addresses: addresses})
			n.mu.Unlock()
			n.changes.markLinks()
			synctest.Wait()
			n.mu.Lock()
			defer n.mu.Unlock()
			return n.decided - before
		}
		if got := come("veth1234"); got != 0 {
			t.Errorf("%d decisions for the interface of a pod", got)
		}
		if got := come("coredns--1234"); got != 0 {
			t.Errorf("%d decisions for the interface of a pod of an unknown kind", got)
		}
		if come("eth1", netip.MustParsePrefix("198.51.100.1/24")) == 0 {
			t.Error("no decision for an interface that may answer")
		}
		if come("veth5678") != 0 {
			t.Error("decisions for the next interface of a pod")
		}
		r.api.advertisements.Set("lan", lb.L2Advertisement{Name: "lan", Interfaces: []string{"eth0", "veth9"}})
		synctest.Wait()
		if come("veth9") == 0 {
			t.Error("no decision for an interface that an advertisement names")
		}
	})
}

// TestAPodsInterfaceCostsNoLookAtTheAddressesAhead has the interfaces of pods come and go on a node that probes many
// addresses ahead. It does not rank the nodes for each of them anew.
func TestAPodsInterfaceCostsNoLookAtTheAddressesAhead(t *testing.T) {
	inRig(t, func(r *rig) {
		const many = 256
		n := r.nodes[w177]
		r.api.pools.Set("next", lb.Pool{Name: "next", ProbeAhead: 1, Status: lb.PoolStatus{Next: []lb.Range{
			{From: netip.MustParseAddr("172.26.236.0"), To: netip.MustParseAddr("172.26.236.255")}}}})
		r.start(w177)
		if got := len(n.rooms.ahead.Desired()); got != many {
			t.Fatalf("%d addresses are probed ahead, want %d", got, many)
		}
		got := testing.AllocsPerRun(10, func() {
			n.changes.note(func(d *dirt) { d.links = true })
			n.step(time.Now())
		})
		if got >= many {
			t.Errorf("%v allocations for a pod's interface, with %d addresses probed ahead", got, many)
		}
	})
}

// TestContract11AnAddressInAStatusWithdrawsNothing has somebody write a Service's address into the
// status of another one, which no node delivers. The address stays announced, unless nothing says
// whose it is.
func TestContract11AnAddressInAStatusWithdrawsNothing(t *testing.T) {
	tenant := lb.Key{Namespace: "aaa", Name: "tenant"}
	for name, test := range map[string]struct {
		message string // of the condition of the Service that had the address
		stays   bool
	}{
		"confirmed":   {vip1.String() + " from pool lan", true},
		"unconfirmed": {"", false},
	} {
		t.Run(name, func(t *testing.T) {
			inRig(t, func(r *rig) {
				r.start(w177, w178, w179)
				r.service(nginx, vip1)
				s, _ := r.api.services.Get(nginx)
				s.Conditions = []lb.Condition{{Type: lb.ConditionAssigned, Status: true, Message: test.message}}
				r.api.services.Set(nginx, s)
				owner := ranked(vip1)[0]
				r.wantAnswers("before", vip1, owner)
				r.service(tenant, vip1)
				for _, n := range r.nodes {
					n.deliver(lb.Delivery{Service: tenant, VIP: vip1, Policy: lb.Local, Ready: 1})
				}
				synctest.Wait()
				if test.stays {
					r.wantAnswers("written into another status", vip1, owner)
				} else {
					r.wantAnswers("two hold it alike", vip1)
				}
			})
		})
	}
}

// kubectl delete node: the Node is gone at once, and the node still serves. It leaves as a drained one does. A node that
// has never had a Node announces nothing.
func TestContract5ADeletedNodeLeavesAsADrainedOne(t *testing.T) {
	inRig(t, func(r *rig) {
		order := ranked(vip1)
		node, _ := r.api.nodes.Get(order[1])
		r.api.nodes.Delete(order[1])
		r.start(w177, w178, w179)
		r.service(nginx, vip1)
		r.wantAnswers("at first", vip1, order[0])
		if claim, _ := r.nodes[order[1]].claim(vip1); claim.Reason != lb.ReasonNodeUnknown {
			t.Errorf("without a Node: %+v", claim)
		}
		r.api.nodes.Set(order[1], node)
		time.Sleep(time.Minute)
		first, _ := r.api.nodes.Get(order[0])
		r.wire.watch(vip1)
		r.api.nodes.Delete(order[0])
		synctest.Wait()
		r.wantAnswers("its Node is deleted", vip1, order[1])
		if r.wire.least[vip1] == 0 {
			t.Error("no node answered for a moment")
		}
		if claim, _ := r.nodes[order[0]].claim(vip1); claim.Reason != lb.ReasonNodeLeaving {
			t.Errorf("without its Node: %+v", claim)
		}
		r.api.nodes.Delete(order[1])
		r.api.nodes.Delete(order[2])
		time.Sleep(time.Minute)
		if len(r.wire.who(vip1)) != 1 {
			t.Errorf("once no Node is left, %v answer", r.wire.who(vip1))
		}
		r.api.nodes.Set(order[0], first)
		time.Sleep(time.Minute)
		r.wantAnswers("its Node is back", vip1, order[0])
	})
}

// A node that has lost its own Node does not believe a list of the others: a restored or wrong one may lack them all. If
// it did, it would miss nobody once it is cut off, and take their addresses.
func TestContract7AListWithoutThisNodeSaysNothingOfOthers(t *testing.T) {
	inRig(t, func(r *rig) {
		r.start(w177, w178, w179)
		synctest.Wait()
		want := func(what string, node string, others ...string) {
			t.Helper()
			n := r.nodes[node]
			n.mu.Lock()
			defer n.mu.Unlock()
			if !slices.Equal(n.named, others) {
				t.Errorf("%s: %s knows of %v, want %v", what, node, n.named, others)
			}
		}
		want("at first", w177, w178, w179)
		nodes := r.api.nodes.All()
		r.api.nodes.Delete(w177)
		synctest.Wait()
		want("without its Node", w177, w178, w179)
		want("another without that Node", w178, w179)
		r.api.nodes.Delete(w178)
		r.api.nodes.Delete(w179)
		synctest.Wait()
		want("without all Nodes", w177, w178, w179)
		r.api.nodes.Set(w178, nodes[w178])
		synctest.Wait()
		r.api.nodes.Set(w177, nodes[w177])
		synctest.Wait()
		want("with its Node again, the last to be there", w177, w178)
	})
}
