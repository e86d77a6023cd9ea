package main

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/kube/kubetest"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
	"github.com/landfall-lb/landfall/proxy/readiness"
)

// gateBench is a bench whose proxy opens readiness gates.
type gateBench struct {
	*bench
	pods *kubetest.Table[lb.Key, lb.GatedPod]
	open map[lb.Key]readiness.Gate
}

func (g *gateBench) Set(open map[lb.Key]readiness.Gate) { g.open = open }

// newGateBench returns a bench with a Service that has two endpoints, of which 10.200.1.3 is not ready.
func newGateBench(t *testing.T) *gateBench {
	g := &gateBench{bench: newBench(t, func(s *settings) { s.gateTimeout = 30 * time.Second }),
		pods: kubetest.NewTable[lb.Key, lb.GatedPod]()}
	g.from.gated, g.to.gates = g.pods, g
	g.update.Gates = true
	g.pods.OnChange(g.markGated)
	g.put("web", "192.0.2.1", "10.200.1.2", "10.200.1.3")
	g.unready("web", "10.200.1.3", "new")
	return g
}

// pod says what is so of a pod with a gate.
func (g *gateBench) pod(name, addr string, ready, opened bool) {
	g.pods.Set(key(name), lb.GatedPod{UID: name, Addrs: []netip.Addr{netip.MustParseAddr(addr)}, Ready: ready,
		Opened: opened})
}

// passed says that a pod counts as ready since then.
func (g *gateBench) passed(name, addr string, since time.Time) {
	g.pods.Set(key(name), lb.GatedPod{UID: name, Addrs: []netip.Addr{netip.MustParseAddr(addr)}, Ready: true,
		Opened: true, Passed: since})
}

// ready says that the slice of a Service has an endpoint as ready, unready that it has it as a pod that is not.
func (g *gateBench) ready(service, addr string) { g.change(service, addr, true, "") }

func (g *gateBench) unready(service, addr, pod string) { g.change(service, addr, false, pod) }

func (g *gateBench) change(service, addr string, ready bool, pod string) {
	all, _ := g.slices.Get(key(service))
	for _, s := range all {
		for i, ep := range s.Endpoints {
			if ep.Addr == netip.MustParseAddr(addr) {
				s.Endpoints[i].Ready, s.Endpoints[i].Serving, s.Endpoints[i].Pod = ready, ready, pod
			}
		}
	}
	g.mark(key(service))
}

func (g *gateBench) confirm() {
	g.t.Helper()
	g.runAlone()
	g.rules.confirm()
	g.runAlone()
}

func (g *gateBench) expect(what, backends, open string) {
	g.t.Helper()
	g.expectBackends("web", backends)
	var got []string
	for pod, gate := range g.open {
		got = append(got, fmt.Sprint(pod.Name, " ", gate.Reason))
	}
	if s := strings.Join(got, ", "); s != open {
		g.t.Errorf("%s: gates open: %q, want %q", what, s, open)
	}
}

// A pod of this node that waits only for its gate gets traffic first, and then the gate opens. It goes on
// getting traffic until the slice says that it is ready.
func TestRulesComeBeforeTheGateOpens(t *testing.T) {
	g := newGateBench(t)
	g.pod("new", "10.200.1.3", false, false)
	g.synced()
	g.run()
	g.confirm()
	g.expect("its containers are not ready", "10.200.1.2", "")

	g.pod("new", "10.200.1.3", true, false)
	g.runAlone()
	g.expect("not confirmed", "10.200.1.2 10.200.1.3", "")
	g.rules.confirm()
	g.runAlone()
	g.expect("confirmed", "10.200.1.2 10.200.1.3", "new Programmed")

	g.pod("new", "10.200.1.3", true, true)
	g.confirm()
	g.expect("opened, and the slice is late", "10.200.1.2 10.200.1.3", "")
	g.ready("web", "10.200.1.3")
	g.confirm()
	g.clock = g.clock.Add(plan.GateHold)
	g.confirm()
	g.expect("ready", "10.200.1.2 10.200.1.3", "")
	if n := len(g.gates.of) + len(g.gates.naming) + len(g.gates.unready); n > 0 {
		t.Errorf("it still remembers %d things: %+v", n, g.gates)
	}

	g.unready("web", "10.200.1.3", "new")
	g.confirm()
	g.expect("later it is as the slice says", "10.200.1.2", "")
}

// A pod counts as ready for a while after its gate was opened, and not for ever: the Node's controller
// may say that it is not.
func TestAnOpenGateHoldsForAWhile(t *testing.T) {
	g := newGateBench(t)
	g.pod("new", "10.200.1.3", true, false)
	g.pod("old", "10.200.1.2", true, true)
	g.synced()
	g.run()
	g.confirm()
	g.pod("new", "10.200.1.3", true, true)
	if wait := g.runAlone(); wait != plan.GateHold {
		t.Errorf("looks again after %s, want %s", wait, plan.GateHold)
	}
	g.clock = g.clock.Add(plan.GateHold)
	g.runAlone()
	g.confirm()
	g.expect("it never got ready", "10.200.1.2", "")
}

// While the kubelet says that the pod is ready, a roll-out goes on, and ends the pods before it. So rules keep the new
// one until EndpointSlices follow, however late, also those of a proxy that begins meanwhile. A writer that never follows
// has the last word in the end.
func TestContract5APodThatIsReadyStaysUntilItsSliceFollows(t *testing.T) {
	const both, old = "10.200.1.2 10.200.1.3", "10.200.1.2"
	opened := func() *gateBench {
		g := newGateBench(t)
		g.pod("new", "10.200.1.3", true, false)
		g.synced()
		g.run()
		g.confirm()
		g.passed("new", "10.200.1.3", g.clock)
		g.confirm()
		return g
	}
	late := func() *gateBench { // the kubelet is
		g := newGateBench(t)
		g.pod("new", "10.200.1.3", true, false)
		g.synced()
		g.run()
		g.confirm()
		g.pod("new", "10.200.1.3", true, true)
		g.confirm()
		g.clock = g.clock.Add(plan.GateHold + time.Second)
		g.confirm()
		g.expect("it is not ready yet", old, "")
		g.passed("new", "10.200.1.3", g.clock)
		g.confirm()
		return g
	}
	began := func(passed bool) func() *gateBench {
		return func() *gateBench {
			g := newGateBench(t)
			g.pod("new", "10.200.1.3", true, true)
			if passed {
				g.passed("new", "10.200.1.3", g.clock.Add(-10*time.Second))
			}
			g.synced()
			g.run()
			g.confirm()
			if !passed {
				g.expect("it is not ready yet", old, "")
				g.passed("new", "10.200.1.3", g.clock)
				g.confirm()
			}
			return g
		}
	}
	for what, start := range map[string]func() *gateBench{"opened": opened, "the kubelet is late": late,
		"ready at the start": began(true), "open at the start": began(false)} {
		g := start()
		g.clock = g.clock.Add(time.Minute)
		g.confirm()
		g.expect(what+", and the slice is late", both, "")
		g.ready("web", "10.200.1.3")
		g.confirm()
		g.expect(what+", and the slice has followed", both, "")
		g.unready("web", "10.200.1.3", "new")
		g.confirm()
		g.expect(what+", and later it is as the slice says", old, "")

		g = start()
		g.clock = g.clock.Add(time.Minute)
		g.pod("new", "10.200.1.3", true, true)
		g.confirm()
		g.expect(what+", and the Node's controller has taken it back", old, "")

		g = start()
		g.clock = g.clock.Add(plan.GateHoldPassed)
		g.confirm()
		g.expect(what+", and the slice never follows", old, "")
		if n := len(g.gates.pods); n > 0 {
			t.Errorf("%s: it still remembers %d pods", what, n)
		}
	}
}

// Slices have followed also where nothing has happened since.
func TestSlicesThatHaveFollowedHaveTheLastWord(t *testing.T) {
	g := newGateBench(t)
	g.pod("new", "10.200.1.3", true, false)
	g.synced()
	g.run()
	g.confirm()
	g.passed("new", "10.200.1.3", g.clock.Add(time.Hour)) // by another clock
	g.ready("web", "10.200.1.3")
	if wait := g.runAlone(); wait != plan.GateHold {
		t.Errorf("looks again after %s, want %s", wait, plan.GateHold)
	}
	g.clock = g.clock.Add(plan.GateHold)
	g.confirm()
	g.unready("web", "10.200.1.3", "new")
	g.confirm()
	g.expect("as the slice says", "10.200.1.2", "")
}

// A Service may have a writer of EndpointSlices of its own, which names pods that are ready and shall get nothing, as
// those that stand by for a leader. A proxy that begins does not overrule that.
func TestAProxyThatBeginsLeavesOutWhoStandsBy(t *testing.T) {
	g := newGateBench(t)
	g.passed("new", "10.200.1.3", g.clock.Add(-time.Hour))
	g.synced()
	g.run()
	g.confirm()
	g.expect("ready for an hour", "10.200.1.2", "")
}

// No rules are written before it is known which pods wait: those of the process before may deliver to them.
func TestContract5RulesWaitForThePods(t *testing.T) {
	g := newGateBench(t)
	g.pods.SetSynced(false)
	g.passed("new", "10.200.1.3", g.clock)
	g.synced()
	g.run()
	if _, planned := g.rules.wanted[key("web")]; planned {
		t.Error("rules are written before the pods are known")
	}
}

// says has the speaker say of the address of "web" why this node does not announce it; "" if it does.
func (g *gateBench) says(reason lb.Reason, elsewhere bool) {
	vip := netip.MustParseAddr("192.0.2.1")
	g.update = lb.FeedUpdate{Gates: true, Previous: map[netip.Addr][]netip.Addr{vip: {}}}
	if reason != "" {
		g.update.Unannounced = map[netip.Addr]lb.Unannounced{vip: {Reason: reason, Elsewhere: elsewhere}}
	}
}

// A gate opens once the node announces the address or stands by for that, with policy Cluster also if another one does.
func TestContract1GatesWaitUntilTheNodeAnnounces(t *testing.T) {
	const both = "10.200.1.2 10.200.1.3"
	start := func(policy lb.TrafficPolicy) *gateBench {
		g := newGateBench(t)
		web, _ := g.services.Get(key("web"))
		web.ExternalPolicy = policy
		g.services.Set(key("web"), web)
		g.pod("new", "10.200.1.3", true, false)
		g.says(lb.ReasonNoLocalBackends, true)
		g.synced()
		g.run()
		g.confirm()
		return g
	}
	start(lb.Cluster).expect("Cluster, and another node announces", both, "new Programmed")

	g := start(lb.Local)
	g.expect("Local, and another node announces", both, "")
	g.says("", false)
	g.runAlone()
	g.expect("Local, and this node announces", both, "new Programmed")

	g = start(lb.Local)
	g.clock = g.clock.Add(30 * time.Second)
	g.runAlone()
	g.expect("never", both, "new TimedOut")
	if got, want := g.open[key("new")].Message,
		"here did not announce 192.0.2.1 for default/web (NoLocalBackends) within 30s"; got != want {
		t.Errorf("message %q, want %q", got, want)
	}

	g = start(lb.Local)
	g.says(lb.ReasonNoLocalBackends, true)
	for vip, why := range g.update.Unannounced {
		why.Service = lb.Key{Namespace: "other", Name: "first"}.Sum()
		g.update.Unannounced[vip] = why
	}
	g.runAlone()
	g.expect("Local, and the Service that it joined has no pod here", both, "new Programmed")

	g = start(lb.Local)
	g.update = lb.FeedUpdate{Gates: true}
	g.runAlone()
	g.expect("no such address", both, "new Programmed")
}

// What a speaker said counts while it is away, as in an upgrade, and not for ever.
func TestGatesWaitForASpeakerThatComesBack(t *testing.T) {
	const both = "10.200.1.2 10.200.1.3"
	g := newGateBench(t)
	g.says(lb.ReasonStopping, true)
	g.synced()
	g.run()
	g.mute = true
	g.run()
	g.clock = g.clock.Add(20 * time.Second)
	g.pod("new", "10.200.1.3", true, false)
	g.confirm()
	g.expect("the speaker is away", both, "")
	if wait := g.runAlone(); wait != 10*time.Second {
		t.Errorf("looks again after %s, want 10s", wait)
	}
	g.clock = g.clock.Add(10 * time.Second)
	g.runAlone()
	g.expect("it does not come back", both, "new Programmed")
}

// While the speaker is away, a new address is not announced.
func TestContract1GatesWaitForASpeakerThatHasNotSeenTheAddress(t *testing.T) {
	g := newGateBench(t)
	g.says("", false)
	g.synced()
	g.run()
	g.confirm()
	g.mute = true
	g.run()
	g.put("late", "192.0.2.2", "10.200.1.5")
	g.unready("late", "10.200.1.5", "other")
	g.pod("other", "10.200.1.5", true, false)
	g.clock = g.clock.Add(20 * time.Second)
	g.confirm()
	g.expect("the speaker is away", "10.200.1.2", "")
	g.mute = false
	vip := netip.MustParseAddr("192.0.2.2")
	g.update.Previous = map[netip.Addr][]netip.Addr{netip.MustParseAddr("192.0.2.1"): {}, vip: {}}
	g.update.Unannounced = map[netip.Addr]lb.Unannounced{vip: {Reason: lb.ReasonProbing}}
	g.runAlone()
	g.expect("it is back, and probes", "10.200.1.2", "")
	g.update.Unannounced = nil
	g.runAlone()
	g.expect("it announces the address", "10.200.1.2", "other Programmed")
}

// Of addresses that others announce, as of another load balancer's class, no speaker says anything.
func TestGatesDoNotWaitForASpeakerThatNeverNamesTheAddress(t *testing.T) {
	const both = "10.200.1.2 10.200.1.3"
	g := newGateBench(t)
	g.synced()
	g.run()
	g.confirm()
	g.mute = true
	g.run()
	g.pod("new", "10.200.1.3", true, false)
	g.confirm()
	g.expect("the speaker is away", both, "new Programmed")
	g.mute = false
	g.says(lb.ReasonProbing, false)
	g.run()
	g.mute = true
	g.run()
	g.pods.Delete(key("new"))
	g.pod("next", "10.200.1.3", true, false)
	g.unready("web", "10.200.1.3", "next")
	g.confirm()
	g.expect("the next one named it, and is away", both, "")
}

// A speaker that starts may not know yet that it is asked what is unannounced. What the one before it said counts until
// it does.
func TestGatesWaitForASpeakerThatKnowsWhatItIsAsked(t *testing.T) {
	const both = "10.200.1.2 10.200.1.3"
	g := newGateBench(t)
	g.says(lb.ReasonStopping, true)
	g.pod("new", "10.200.1.3", true, false)
	g.synced()
	g.run()
	g.confirm()
	g.expect("the first speaker stops", both, "")
	g.says("", false)
	g.update.Gates = false
	g.runAlone()
	g.expect("the second speaker says all but that", both, "")
	g.update.Gates = true
	g.runAlone()
	g.expect("it says that too", both, "new Programmed")
}

// A proxy that starts waits for its speaker to say what is unannounced, and not for long: there may be none.
func TestContract1GatesWaitForTheFirstWordOfASpeaker(t *testing.T) {
	const both = "10.200.1.2 10.200.1.3"
	start := func(change func(*gateBench)) *gateBench {
		g := newGateBench(t)
		change(g)
		g.pod("new", "10.200.1.3", true, false)
		g.run()
		g.clock = g.clock.Add(time.Hour) // without an API server; the speaker is not asked before the rules are there
		g.synced()
		g.run()
		g.confirm()
		return g
	}
	for what, change := range map[string]func(*gateBench){
		"no speaker":                    func(g *gateBench) { g.mute = true },
		"one of an earlier release":     func(g *gateBench) { g.says("", false); g.update.Gates = false },
		"one that was not asked before": func(g *gateBench) { g.update = lb.FeedUpdate{} },
	} {
		g := start(change)
		g.expect(what+", at first", both, "")
		if wait := g.runAlone(); wait != plan.GateSpeaker {
			t.Errorf("%s: looks again after %s, want %s", what, wait, plan.GateSpeaker)
		}
		g.clock = g.clock.Add(plan.GateSpeaker)
		g.runAlone()
		g.expect(what+", in the end", both, "new Programmed")
	}

	g := start(func(g *gateBench) { g.mute = true })
	g.mute = false
	g.says(lb.ReasonNotEstablished, false)
	g.clock = g.clock.Add(plan.GateSpeaker)
	g.runAlone()
	g.expect("it says that the address is unannounced", both, "")
	g.says("", false)
	g.runAlone()
	g.expect("it says that the address is announced", both, "new Programmed")

	g = start(func(g *gateBench) {
		g.mute = true
		web, _ := g.services.Get(key("web"))
		web.Ingress = nil
		g.services.Set(key("web"), web)
	})
	g.expect("a Service without an external address", both, "new Programmed")
}

func TestGatesOfPodsThatGo(t *testing.T) {
	for what, change := range map[string]func(g *gateBench){
		"is deleted":          func(g *gateBench) { g.pod("new", "10.200.1.3", false, false) },
		"is gone":             func(g *gateBench) { g.pods.Delete(key("new")) },
		"lost its gate, anew": func(g *gateBench) { g.pods.Set(key("new"), lb.GatedPod{}) },
		"has another address": func(g *gateBench) { g.pod("new", "10.200.1.9", true, false) },
	} {
		g := newGateBench(t)
		g.pod("new", "10.200.1.3", true, false)
		g.synced()
		g.run()
		g.confirm()
		g.expect(what+": before", "10.200.1.2 10.200.1.3", "new Programmed")
		change(g)
		g.confirm()
		g.expect("it "+what, "10.200.1.2", "")
	}
}

// What does not come in time opens the gate all the same.
func TestGatesOpenInTime(t *testing.T) {
	g := newGateBench(t)
	g.pod("new", "10.200.1.3", true, false)
	g.pod("plain", "10.200.1.7", true, false)
	g.synced()
	if wait := g.run(); wait != plan.GateSettle {
		t.Errorf("looks again after %s, want %s", wait, plan.GateSettle)
	}
	g.clock = g.clock.Add(plan.GateSettle)
	if wait := g.runAlone(); wait != 28*time.Second {
		t.Errorf("looks again after %s, want 28s", wait)
	}
	g.expect("no Service names it", "10.200.1.2 10.200.1.3", "plain NoService")
	g.pods.Delete(key("plain"))
	g.clock = g.clock.Add(28 * time.Second)
	g.runAlone()
	g.expect("the kernel says nothing", "10.200.1.2 10.200.1.3", "new TimedOut")
	if got, want := g.open[key("new")].Message,
		"the rules of here did not deliver to the pod for default/web within 30s"; got != want {
		t.Errorf("message %q, want %q", got, want)
	}
}

// Pods in the network of their node have one address. An endpoint is one of them: another one does not admit it,
// and neither does a pod that has got the address of one that is gone.
func TestGatesOfPodsWithOneAddress(t *testing.T) {
	g := newGateBench(t)
	g.unready("web", "10.200.1.3", "one")
	g.pod("other", "10.200.1.3", true, false)
	g.synced()
	g.run()
	g.confirm()
	g.expect("the other waits", "10.200.1.2", "")
	g.pod("one", "10.200.1.3", true, false)
	g.confirm()
	g.expect("both wait", "10.200.1.2 10.200.1.3", "one Programmed")
	g.pods.Delete(key("one"))
	g.confirm()
	g.expect("it is gone", "10.200.1.2", "")
	g.clock = g.clock.Add(plan.GateSettle)
	g.confirm()
	g.expect("no Service names the other", "10.200.1.2", "other NoService")
	g.pods.Delete(key("other"))
	g.confirm()
	if n := len(g.gates.of); n > 0 {
		t.Errorf("it still knows %d addresses", n)
	}
}

// A pod of both families waits for those in which a Service selects it or names its address, and not for others.
func TestGatesWaitForBothFamilies(t *testing.T) {
	for _, c := range []struct {
		name           string
		selects, named bool // the Service selects the pod; a slice names its address of IPv6 from the start
		opens          string
	}{
		{"selected, named in one family", true, false, ""},
		{"selected, named in both", true, true, "new Programmed"},
		{"named in one family alone", false, false, "new Programmed"},
	} {
		t.Run(c.name, func(t *testing.T) {
			g := newGateBench(t)
			web, _ := g.services.Get(key("web"))
			web.ClusterIPs = append(web.ClusterIPs, netip.MustParseAddr("fd00:10::9"))
			if c.selects {
				web.Selector = "app=web"
			}
			g.services.Set(key("web"), web)
			g.pods.Set(key("new"), lb.GatedPod{UID: "new", Ready: true, Labels: map[string]string{"app": "web"},
				Addrs: []netip.Addr{netip.MustParseAddr("10.200.1.3"), netip.MustParseAddr("fd00:200::3")}})
			name := func() {
				all, _ := g.slices.Get(key("web"))
				g.slices.Set(key("web"), append(all, lb.Slice{Service: key("web"), Family: lb.IPv6, Ports: all[0].Ports,
					Endpoints: []lb.Endpoint{{Addr: netip.MustParseAddr("fd00:200::3"), Node: "here", Ready: true, Serving: true,
						Pod: "new"}}}))
				g.mark(key("web"))
			}
			if c.named {
				name()
			}
			g.synced()
			g.run()
			g.confirm()
			g.expect("at first", "10.200.1.2 10.200.1.3", c.opens)
			if c.opens == "" {
				name()
				g.confirm()
				g.expect("named in both", "10.200.1.2 10.200.1.3", "new Programmed")
			}
		})
	}
}

// An endpoint that is no pod is ready when its slice says so.
func TestGatesAdmitPodsOnly(t *testing.T) {
	g := newGateBench(t)
	g.unready("web", "10.200.1.3", "")
	g.pod("new", "10.200.1.3", true, false)
	g.synced()
	g.run()
	g.confirm()
	g.expect("the slice names no pod", "10.200.1.2", "")
}

// A pod waits for the Services that select it, also while no EndpointSlice names it yet.
func TestGatesWaitForServicesThatSelectThePod(t *testing.T) {
	g := newGateBench(t)
	web, _ := g.services.Get(key("web"))
	web.Selector = "app=web,tier=front"
	g.services.Set(key("web"), web)
	g.ready("web", "10.200.1.3")
	labelled := func(name, addr, app string) {
		g.pods.Set(key(name), lb.GatedPod{UID: name, Addrs: []netip.Addr{netip.MustParseAddr(addr)}, Ready: true,
			Labels: map[string]string{"app": app, "tier": "front", "hash": "1"}})
	}
	labelled("late", "10.200.1.4", "web")
	labelled("plain", "10.200.1.5", "db")
	labelled("turned", "10.200.1.6", "db")
	g.synced()
	g.run()
	labelled("turned", "10.200.1.6", "web")
	g.confirm()
	g.expect("no slice names them", "10.200.1.2 10.200.1.3", "")
	g.clock = g.clock.Add(plan.GateSettle)
	g.confirm()
	g.expect("two seconds later", "10.200.1.2 10.200.1.3", "plain NoService")
	g.pods.Delete(key("plain"))
	g.pods.Delete(key("turned"))
	labelled("other-family", "fd00::1", "web")
	g.confirm()
	g.clock = g.clock.Add(plan.GateSettle)
	g.confirm()
	g.expect("the Service has no address of its family", "10.200.1.2 10.200.1.3", "other-family NoService")
	g.pods.Delete(key("other-family"))
	all, _ := g.slices.Get(key("web"))
	all[0].Endpoints = append(all[0].Endpoints, lb.Endpoint{Addr: netip.MustParseAddr("10.200.1.4"), Node: "here",
		Pod: "late"})
	g.mark(key("web"))
	g.confirm()
	g.expect("the slice names it", "10.200.1.2 10.200.1.3 10.200.1.4", "late Programmed")
	g.pods.Delete(key("late"))
	g.delete("web")
	g.confirm()
	if n := len(g.gates.selectors); n > 0 {
		t.Errorf("it still knows the selectors of %d namespaces", n)
	}
}

// What somebody in another namespace writes into an EndpointSlice neither holds up a pod nor admits it.
func TestGatesIgnoreOtherNamespaces(t *testing.T) {
	g := newGateBench(t)
	g.pods.Set(lb.Key{Namespace: "shop", Name: "new"}, lb.GatedPod{UID: "new",
		Addrs: []netip.Addr{netip.MustParseAddr("10.200.1.3")}, Ready: true})
	g.synced()
	g.run()
	g.confirm()
	g.expect("at first", "10.200.1.2", "")
	g.clock = g.clock.Add(plan.GateSettle)
	g.runAlone()
	g.expect("no Service of its own names it", "10.200.1.2", "new NoService")
}

// selecting has a Service of one endpoint select pods.
func (g *gateBench) selecting(name, vip, selector string) {
	if _, ok := g.services.Get(key(name)); !ok {
		g.put(name, vip, "10.200.1.2")
	}
	s, _ := g.services.Get(key(name))
	s.Selector, s.HealthCheckNodePort = selector, 0
	g.services.Set(key(name), s)
	g.mark(key(name))
}

// waitForThree has the pod "new" wait for the Services a, b and c, which select it.
func (g *gateBench) waitForThree() {
	for i, name := range []string{"a", "b", "c"} {
		g.selecting(name, fmt.Sprint("192.0.2.", 10+i), "app=shop")
	}
	g.pods.Set(key("new"), lb.GatedPod{UID: "new", Addrs: []netip.Addr{netip.MustParseAddr("10.200.1.4")}, Ready: true,
		Labels: map[string]string{"app": "shop"}})
	g.synced()
	g.run()
	g.confirm()
}

// While a pod waits for one Service the others are not looked at, and none is forgotten.
func TestGatesOfPodsThatManyServicesSelect(t *testing.T) {
	g := newGateBench(t)
	g.waitForThree()
	g.expect("no slice names it", "10.200.1.2", "")
	for _, name := range []string{"a", "b", "c"} {
		all, _ := g.slices.Get(key(name))
		all[0].Endpoints = append(all[0].Endpoints, lb.Endpoint{Addr: netip.MustParseAddr("10.200.1.4"), Node: "here",
			Pod: "new"})
		g.mark(key(name))
		g.runAlone()
		g.expect(name+" is not confirmed", "10.200.1.2", "")
		g.rules.confirm()
	}
	g.selecting("d", "192.0.2.13", "app=shop")
	g.runAlone()
	g.expect("another Service selects it", "10.200.1.2", "")
	g.rules.confirm()
	g.runAlone()
	g.expect("and has no slice that names it", "10.200.1.2", "")
	g.selecting("d", "192.0.2.13", "app=other")
	g.confirm()
	g.expect("it selects it no more", "10.200.1.2", "new Programmed")
}

func TestGatesThatOpenInTimeNameAllServices(t *testing.T) {
	g := newGateBench(t)
	g.waitForThree()
	g.clock = g.clock.Add(30 * time.Second)
	g.runAlone()
	if got, want := g.open[key("new")].Message, "the rules of here did not deliver to the pod for default/a, default/b, "+
		"default/c within 30s"; got != want {
		t.Errorf("message %q, want %q", got, want)
	}
}

// What a pod that waits costs each step of the planner does not grow with the Services that select it, nor with
// their endpoints: a tenant decides about both, and all others wait for the step.
func TestGatesThatWaitCostNothing(t *testing.T) {
	allocations := func(services, endpoints int) float64 {
		g := newGateBench(t)
		for i := range services {
			name := fmt.Sprint("many-", i)
			g.selecting(name, fmt.Sprintf("198.51.%d.%d", i>>8, i&255), "app=shop")
			all, _ := g.slices.Get(key(name))
			for e := range endpoints {
				all[0].Endpoints = append(all[0].Endpoints, lb.Endpoint{Node: "there", Ready: true, Serving: true,
					Addr: netip.AddrFrom4([4]byte{10, 201, byte(e >> 8), byte(e)})})
			}
		}
		for i := range 100 {
			g.pods.Set(key(fmt.Sprint("pod-", i)), lb.GatedPod{UID: "pod", Ready: true,
				Addrs: []netip.Addr{netip.AddrFrom4([4]byte{10, 200, 2, byte(i)})}, Labels: map[string]string{"app": "shop"}})
		}
		g.synced()
		g.run()
		g.confirm()
		return testing.AllocsPerRun(5, func() { g.runAlone() })
	}
	few, many, large := allocations(2, 1), allocations(500, 1), allocations(2, 1000)
	if many > 2*few || large > 2*few {
		t.Errorf("a step allocates %.0f times with 2 Services, %.0f with 500, %.0f with 1,000 endpoints each", few, many, large)
	}
}
