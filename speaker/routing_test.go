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
	"k8s.io/apimachinery/pkg/labels"

	"github.com/landfall-lb/landfall/internal/kube/kubetest"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/speaker/bfd"
	"github.com/landfall-lb/landfall/speaker/plan"
	"github.com/landfall-lb/landfall/speaker/routes"
)

var (
	tor1 = netip.MustParseAddr("172.26.236.2")
	tor2 = netip.MustParseAddr("172.26.236.3")
)

func graceful(p *lb.Peer) { p.GracefulRestart = true }

// onlyBGP takes away what makes nodes answer ARP.
func (r *rig) onlyBGP() {
	r.api.advertisements.Delete("lan")
	synctest.Wait()
}

// letRescue waits until speakers that have just started have heard of their proxies that these
// pass on connections.
func (r *rig) letRescue() {
	time.Sleep(time.Second)
	synctest.Wait()
}

// TestContract5RoutesWaitForASlowProxy: of three proxies one passes on connections at once, one is
// slow, and one never says that it does, as one of an earlier release.
func TestContract5RoutesWaitForASlowProxy(t *testing.T) {
	inRig(t, func(r *rig) {
		r.onlyBGP()
		r.nodes[w178].passing, r.nodes[w179].passing = false, false
		r.start(w177, w178, w179)
		r.tor("tor-1", "172.26.236.2", nil)
		r.service(nginx, vip1)
		r.letRescue()
		r.wantTold("passes on at once", w177, up1)
		r.wantTold("slow", w178, "")
		if ring := r.nodes[w178].update.Ring; len(ring[vip1]) == 0 {
			t.Errorf("the proxy was told %v, and not where connections may be", ring)
		}
		r.nodes[w178].answer()
		r.wantTold("slow, and has answered", w178, up1)
		r.wantTold("of an earlier release", w179, "")
		time.Sleep(5 * time.Second)
		synctest.Wait()
		r.wantTold("of an earlier release, after a while", w179, up1)
	})
}

func (r *rig) wantTold(what, node, want string) {
	r.t.Helper()
	if got := r.nodes[node].routers.told(); got != want {
		r.t.Errorf("%s: the peers of %s have heard %q\nwant %q", what, node, got, want)
	}
}

const (
	up1   = "tor-1 +172.26.236.180/32 lp 100 []"
	down1 = "tor-1 -172.26.236.180/32"
	bye1  = "tor-1 +172.26.236.180/32 lp 0 [65535:0]"
)

func TestRoutesWithoutL2AreAnnouncedFromEachNodeAndReported(t *testing.T) {
	inRig(t, func(r *rig) {
		r.onlyBGP()
		r.start(w177, w178, w179)
		r.tor("tor-1", "172.26.236.2", nil)
		r.tor("tor-2", "172.26.236.3", nil)
		r.service(nginx, vip1)
		r.letRescue()
		for _, name := range []string{w177, w178, w179} {
			r.wantTold("at first", name, up1+"; tor-2 +172.26.236.180/32 lp 100 []")
		}
		r.wantAnswers("no L2Advertisement", vip1)
		reporter := ranked(vip1)[0]
		for name, n := range r.nodes {
			c, ok := n.reported(nginx)
			if ok != (name == reporter) {
				t.Errorf("%s reports %+v", name, c)
			}
			want := "172.26.236.180 is announced from k8s-worker-177, k8s-worker-178, k8s-worker-179 (BGP to tor-1, tor-2)"
			if ok && (!c.Status || c.Reason != lb.ReasonAnnounced || c.Message != want || !lb.Serving(c).Status) {
				t.Errorf("%s reports %+v", name, c)
			}
		}

		// A node that cannot deliver it is left out; when none can, the reason is that of BGP and not
		// that nothing answers ARP.
		undeliverable := lb.Delivery{Service: nginx, VIP: vip1, Policy: lb.Local, Ready: 1}
		r.nodes[w178].deliver(undeliverable)
		r.wantTold("no local backend", w178, down1+"; tor-2 -172.26.236.180/32")
		if c, _ := r.nodes[reporter].reported(nginx); !strings.HasPrefix(c.Message,
			"172.26.236.180 is announced from k8s-worker-177, k8s-worker-179 (BGP") {
			t.Errorf("reported %+v", c)
		}
		for _, name := range []string{w177, w179} {
			r.nodes[name].deliver(undeliverable)
		}
		time.Sleep(10 * time.Millisecond)
		synctest.Wait()
		if c, _ := r.nodes[reporter].reported(nginx); c.Status || c.Reason != lb.ReasonNoLocalBackends ||
			!strings.Contains(c.Message, "externalTrafficPolicy Local") {
			t.Errorf("reported %+v", c)
		}
	})
}

// A proxy with pods whose gates are closed hears whether this node announces, and no other one does.
func TestContract1TheProxyHearsWhatIsNotAnnounced(t *testing.T) {
	for _, gates := range []bool{true, false} {
		inRig(t, func(r *rig) {
			r.onlyBGP()
			r.nodes[w178].gates = gates
			r.start(w177, w178, w179)
			r.tor("tor-1", "172.26.236.2", nil)
			r.service(nginx, vip1)
			r.letRescue()
			want := func(what string, why lb.Unannounced) {
				t.Helper()
				time.Sleep(time.Second)
				synctest.Wait()
				n := r.nodes[w178]
				n.mu.Lock()
				got := n.update.Unannounced[vip1]
				n.mu.Unlock()
				if !gates {
					why = lb.Unannounced{}
				}
				if got != why {
					t.Errorf("gates %v, %s: it hears %+v, want %+v", gates, what, got, why)
				}
			}
			want("routers hear of it", lb.Unannounced{})
			local := lb.Delivery{Service: nginx, VIP: vip1, Policy: lb.Local, Ready: 1}
			r.nodes[w178].deliver(local)
			want("no local endpoint", lb.Unannounced{Reason: lb.ReasonNoLocalBackends, Elsewhere: true})
			local.LocalReady = 1
			r.nodes[w178].deliver(local)
			want("a local endpoint", lb.Unannounced{})
		})
	}
}

// A speaker that starts says of addresses that only routers may hear of that they are unannounced, until it knows what
// routers are to hear. What it says counts for gates only once the proxy has asked.
func TestContract1AStartingSpeakerSaysWhatIsUnannounced(t *testing.T) {
	inRig(t, func(r *rig) {
		r.onlyBGP()
		n := r.nodes[w178]
		n.passing = false
		r.start(w177, w178, w179)
		r.tor("tor-1", "172.26.236.2", nil)
		r.service(nginx, vip1)
		r.letRescue()
		want := func(what string, gates bool, why lb.Unannounced) {
			t.Helper()
			n.mu.Lock()
			update := n.update
			n.mu.Unlock()
			if got := update.Unannounced[vip1]; update.Gates != gates || got != why {
				t.Errorf("%s: it hears %v %+v, want %v %+v", what, update.Gates, got, gates, why)
			}
		}
		want("the proxy does not ask", false, lb.Unannounced{})
		n.mu.Lock()
		n.gates = true
		n.mu.Unlock()
		n.changes.markVIPs([]netip.Addr{vip2}) // the step that looks first need not be the one for which the feed asks
		time.Sleep(100 * time.Millisecond)
		synctest.Wait()
		want("it asks, and routers hear nothing yet", true,
			lb.Unannounced{Reason: lb.ReasonNotEstablished, Elsewhere: true})
		n.answer()
		time.Sleep(time.Second)
		synctest.Wait()
		want("routers hear of it", true, lb.Unannounced{})
	})
}

// A router behind an interface that forwards nothing hears of no address, also where the interface answers no ARP.
func TestContract1AnUplinkThatForwardsNothing(t *testing.T) {
	inRig(t, func(r *rig) {
		r.onlyBGP()
		n := r.nodes[w177]
		n.opts.exclude, n.opts.checkForwarding = []string{"up*"}, true
		forwards := func(yes bool) {
			n.mu.Lock()
			n.interfaces = append(slices.Clone(n.interfaces[:1]), lb.Interface{Index: 9, Name: "up0", Up: true,
				MAC: net.HardwareAddr{2, 0, 0, 0, 0, 9}, Unforwarded4: !yes,
				Addresses: []netip.Prefix{netip.MustParsePrefix("172.16.0.9/24")}})
			n.mu.Unlock()
			n.changes.markLinks()
		}
		forwards(true)
		r.start(w177)
		r.tor("tor-1", "172.16.0.2", nil)
		r.service(nginx, vip1)
		r.wantTold("at first", w177, up1)
		forwards(false)
		r.wantTold("it forwards nothing", w177, down1)
		time.Sleep(time.Second)
		synctest.Wait()
		if c, _ := n.reported(nginx); c.Status || c.Reason != lb.ReasonForwardingOff {
			t.Errorf("reported %+v", c)
		}
		forwards(true)
		r.wantTold("it forwards again", w177, up1)
	})
}

// A router further away sends to the address of the session, which need not be one of the Node. The step looks at that
// interface, though it answers no ARP and has no peer in its subnet.
func TestContract1TheUplinkToAFarRouterForwardsNothing(t *testing.T) {
	inRig(t, func(r *rig) {
		r.onlyBGP()
		n := r.nodes[w177]
		n.opts.exclude, n.opts.checkForwarding = []string{"up*"}, true
		n.routers.local = netip.MustParseAddr("10.8.0.1")
		forwards := func(yes bool) {
			n.mu.Lock()
			n.interfaces = append(slices.Clone(n.interfaces[:1]), lb.Interface{Index: 9, Name: "wg0", Up: true, NoARP: true,
				Unforwarded4: !yes, Addresses: []netip.Prefix{netip.MustParsePrefix("10.8.0.1/32")}})
			n.mu.Unlock()
			n.changes.markLinks()
		}
		forwards(true)
		r.start(w177)
		r.tor("tor-1", "172.31.0.2", nil)
		r.service(nginx, vip1)
		r.wantTold("at first", w177, up1)
		forwards(false)
		r.wantTold("it forwards nothing", w177, down1)
		forwards(true)
		r.wantTold("it forwards again", w177, up1)
	})
}

func TestL2AndBGPSideBySide(t *testing.T) {
	inRig(t, func(r *rig) {
		r.start(w177, w178, w179)
		r.tor("tor-1", "172.26.236.2", nil)
		r.service(nginx, vip1)
		r.letRescue()
		for _, name := range []string{w177, w178, w179} {
			r.wantTold("at first", name, up1)
		}
		owner := ranked(vip1)[0]
		r.wantAnswers("both", vip1, owner)
		c, _ := r.nodes[owner].reported(nginx)
		want := "172.26.236.180 is announced from " + owner + " (ARP on eth0); " +
			"172.26.236.180 is announced from k8s-worker-177, k8s-worker-178, k8s-worker-179 (BGP to tor-1)"
		if !c.Status || c.Message != want {
			t.Errorf("reported %+v", c)
		}
		// A router that goes takes nothing from those that ask by ARP.
		for _, n := range r.nodes {
			n.routers.connect("tor-1", false)
		}
		if c, _ := r.nodes[owner].reported(nginx); c.Message != "172.26.236.180 is announced from "+owner+" (ARP on eth0)" {
			t.Errorf("reported %+v", c)
		}
	})
}

func TestContract6NothingIsSaidToRoutersBeforeAllIsKnown(t *testing.T) {
	secret := lb.Key{Name: "tor"}
	for what, forget := range map[string]func(*rig, *fakeNode) func(){
		"the list of BGPPeers":                             unsynced(func(r *rig) syncing { return r.api.peers }),
		"the list of BGPAdvertisements":                    unsynced(func(r *rig) syncing { return r.api.bgpAds }),
		"the list of Communities":                          unsynced(func(r *rig) syncing { return r.api.communities }),
		"the list of BFDProfiles":                          unsynced(func(r *rig) syncing { return r.api.profiles }),
		"the list of Secrets in namespace landfall-system": unsynced(func(r *rig) syncing { return r.api.passwords }),
		"the first report of the proxy": func(_ *rig, n *fakeNode) func() {
			n.setGate(lb.ReasonFeedUnknown)
			return func() { n.setGate("") }
		},
	} {
		t.Run(what, func(t *testing.T) {
			inRig(t, func(r *rig) {
				n := r.nodes[w178]
				r.api.passwords.Set("tor", "secret")
				r.tor("tor-1", "172.26.236.2", func(p *lb.Peer) { p.PasswordSecret = &secret })
				remember := forget(r, n)
				r.start(w178)
				r.service(nginx, vip1)
				if got := n.routers.told(); got != "" || n.routers.sets != 0 {
					t.Errorf("the peers have heard %q by %d calls", got, n.routers.sets)
				}
				if err := n.ready(); err == nil || err.Error() != "waiting for "+what && n.gate == "" {
					t.Errorf("ready says %v", err)
				}
				if got := n.status().BGP.Waiting; got != what {
					t.Errorf("the status says %q", got)
				}
				r.wantAnswers("L2 does not wait for BGP", vip1, map[bool][]string{true: {w178}}[n.gate == ""]...)
				remember()
				n.changes.markSynced()
				r.wantTold("known", w178, up1)
			})
		})
	}
}

func TestContract6ARestartIsNotHeardByGracefulPeersAndPlannedForOthers(t *testing.T) {
	inRig(t, func(r *rig) {
		r.onlyBGP()
		r.start(w177)
		r.tor("tor-1", "172.26.236.2", graceful)
		r.tor("tor-2", "172.26.236.3", nil)
		r.service(nginx, vip1)
		r.nodes[w177].routers.told()
		started := time.Now()
		r.stop(w177)
		r.wantTold("SIGTERM", w177, "tor-2 +172.26.236.180/32 lp 0 [65535:0]; tor-2 -172.26.236.180/32")
		if took := time.Since(started); took < 3*time.Second || took > 4*time.Second {
			t.Errorf("took %v", took)
		}
	})
	inRig(t, func(r *rig) {
		r.start(w177)
		r.tor("tor-1", "172.26.236.2", graceful)
		r.service(nginx, vip1)
		r.nodes[w177].routers.told()
		started := time.Now()
		r.stop(w177)
		if took := time.Since(started); took > time.Second {
			t.Errorf("nobody but graceful peers, and it took %v", took)
		}
		r.wantTold("SIGTERM", w177, "")
	})
}

func TestAnEndForGoodLeavesNothingAtRouters(t *testing.T) {
	for what, end := range map[string]func(r *rig, n *fakeNode){
		"uninstalled": func(_ *rig, n *fakeNode) {
			n.from.daemonSet = n.daemonSet
			n.runner.Poke()
			synctest.Wait()
			n.daemonSet.Delete("landfall-node")
		},
		"the node is about to leave the cluster": func(r *rig, n *fakeNode) {
			node, _ := r.api.nodes.Get(n.self)
			node.Leaving = lb.ReasonNodeLeaving
			r.api.nodes.Set(n.self, node)
		},
		"the node has left the cluster": func(r *rig, n *fakeNode) { r.api.nodes.Delete(n.self) },
	} {
		inRig(t, func(r *rig) {
			r.onlyBGP()
			r.start(w177)
			r.tor("tor-1", "172.26.236.2", graceful)
			r.service(nginx, vip1)
			n := r.nodes[w177]
			n.objects.write()
			if p, _ := r.api.peers.Get("tor-1"); p.Status[w177].State != "Established" {
				t.Errorf("%s: status %+v", what, p.Status)
			}
			n.routers.told()
			end(r, n)
			go func() {
				time.Sleep(3500 * time.Millisecond)
				n.objects.write()
			}()
			r.stop(w177)
			time.Sleep(time.Second)
			r.wantTold(what, w177, bye1+"; "+down1+"; tor-1 is left")
			if p, _ := r.api.peers.Get("tor-1"); len(p.Status) != 0 {
				t.Errorf("%s: status %+v", what, p.Status)
			}
		})
	}
	inRig(t, func(r *rig) { // what was never seen is not gone
		r.start(w177)
		r.tor("tor-1", "172.26.236.2", graceful)
		r.service(nginx, vip1)
		n := r.nodes[w177]
		n.from.daemonSet = kubetest.NewTable[string, lb.DaemonSet]()
		n.runner.Poke()
		n.routers.told()
		r.stop(w177)
		r.wantTold("SIGTERM under another name", w177, "")
	})
}

func TestContract5PlannedWithdrawalsAreToldAhead(t *testing.T) {
	for what, c := range map[string]struct{ end, back func(r *rig, n *fakeNode) }{
		"drain": {
			func(r *rig, n *fakeNode) {
				r.api.nodes.Set(n.self, lb.Node{Name: n.self, Leaving: lb.ReasonNodeLeaving})
			},
			func(r *rig, n *fakeNode) { r.api.nodes.Set(n.self, lb.Node{Name: n.self}) },
		},
		"cordon, where that drains": {
			func(r *rig, n *fakeNode) {
				n.opts.cordonDrains = true
				r.api.nodes.Set(n.self, lb.Node{Name: n.self, Cordoned: true})
			},
			func(r *rig, n *fakeNode) { r.api.nodes.Set(n.self, lb.Node{Name: n.self}) },
		},
		"the last local backend is terminating": {
			func(_ *rig, n *fakeNode) {
				n.deliver(lb.Delivery{Service: nginx, VIP: vip1, Policy: lb.Local, Ready: 1, LocalServing: 1, Serving: 1})
			},
			func(_ *rig, n *fakeNode) {
				n.deliver(lb.Delivery{Service: nginx, VIP: vip1, Policy: lb.Local, Ready: 2, LocalReady: 1})
			},
		},
	} {
		inRig(t, func(r *rig) {
			r.onlyBGP()
			r.start(w177, w178)
			r.tor("tor-1", "172.26.236.2", graceful)
			r.service(nginx, vip1)
			r.letRescue()
			n := r.nodes[w177]
			r.wantTold(what, w177, up1)
			c.end(r, n)
			r.wantTold(what+": at once", w177, bye1)
			if got := n.whole(t).VIPs[0].Routes; got == nil || !got.Leaving {
				t.Errorf("%s: status %+v", what, got)
			}
			time.Sleep(2900 * time.Millisecond)
			r.wantTold(what+": until routers have converged", w177, "")
			time.Sleep(100 * time.Millisecond)
			r.wantTold(what+": then", w177, down1)
			time.Sleep(time.Minute)
			r.wantTold(what+": and stays so", w177, "")
			c.back(r, n)
			r.wantTold(what+": over", w177, up1)
			c.end(r, n)
			r.wantTold(what+": again", w177, bye1)
			c.back(r, n)
			r.wantTold(what+": taken back in time", w177, up1)
			time.Sleep(time.Minute)
			r.wantTold(what+": taken back for good", w177, "")
		})
	}
}

// While no other node announces the address, a planned end waits for one, as over ARP and NDP: new connections would
// find nobody, though the pods are well. The address goes off the air at once if the node delivers it no more, or is
// excluded from load balancing, and with the speaker.
func TestContract5TheLastNodeAnnouncesUntilAnotherDoes(t *testing.T) {
	local := lb.Delivery{Service: nginx, VIP: vip1, Policy: lb.Local, Ready: 1, LocalReady: 1}
	elsewhere := lb.Delivery{Service: nginx, VIP: vip1, Policy: lb.Local, Ready: 1}
	drained := lb.Node{Name: w177, Leaving: lb.ReasonNodeDrained}
	for what, c := range map[string]struct {
		ends func(r *rig, n *fakeNode)
		want string // what the peers of the drained node hear then
		// converges is set if they hear it after the time that routers get.
		converges bool
	}{
		"the pod moves": {func(r *rig, _ *fakeNode) {
			r.nodes[w178].deliver(local)
			r.wantTold("the other node", w178, up1)
		}, down1, true},
		"the pod terminates":     {func(_ *rig, n *fakeNode) { n.deliver(elsewhere) }, down1, false},
		"the speaker is stopped": {func(r *rig, _ *fakeNode) { r.stop(w177) }, down1 + "; tor-1 is left", false},
		"the node is excluded too": {func(r *rig, _ *fakeNode) {
			r.api.nodes.Set(w177, lb.Node{Name: w177, Labels: labels.Set{plan.LabelExclude: ""}})
		}, down1, false},
		"undrained": {func(r *rig, _ *fakeNode) { r.api.nodes.Set(w177, lb.Node{Name: w177}) }, up1, false},
		"the router is away for a moment": {func(_ *rig, n *fakeNode) {
			n.routers.connect("tor-1", false)
			time.Sleep(time.Second)
			n.routers.connect("tor-1", true)
		}, "tor-1 is lost; " + bye1, false},
		"the peer is gone for a moment": {func(r *rig, n *fakeNode) {
			peer, _ := r.api.peers.Get("tor-1")
			r.api.peers.Delete("tor-1")
			time.Sleep(time.Second)
			if s := n.status(); s.BGP.Leaving != 1 || s.Parting.Count != 1 {
				t.Errorf("no peer: %+v, parting %+v", s.BGP, s.Parting)
			}
			r.api.peers.Set("tor-1", peer)
		}, "tor-1 is left; " + bye1, false},
		"the advertisement is gone for a moment": {func(r *rig, n *fakeNode) {
			ad, _ := r.api.bgpAds.Get("all")
			r.api.bgpAds.Delete("all")
			time.Sleep(time.Second)
			if s := n.status(); s.BGP.Leaving != 1 || s.Parting.Count != 1 {
				t.Errorf("no advertisement: %+v, parting %+v", s.BGP, s.Parting)
			}
			r.api.bgpAds.Set("all", ad)
		}, down1 + "; " + bye1, false},
		"the pool is gone for a moment": {func(r *rig, _ *fakeNode) {
			pools := r.api.pools.All()
			for name := range pools {
				r.api.pools.Delete(name)
			}
			time.Sleep(time.Second)
			for name, pool := range pools {
				r.api.pools.Set(name, pool)
			}
		}, down1 + "; " + bye1, false},
		"another node announces while the advertisement is gone": {func(r *rig, n *fakeNode) {
			ad, _ := r.api.bgpAds.Get("all")
			r.api.bgpAds.Delete("all")
			time.Sleep(time.Second)
			r.nodes[w178].deliver(local)
			r.api.bgpAds.Set("all", ad)
			time.Sleep(4 * time.Second) // it goes on until routers have converged
			r.api.bgpAds.Delete("all")
			r.nodes[w178].deliver(elsewhere)
			time.Sleep(time.Second)
			r.api.bgpAds.Set("all", ad) // what is over stays over
		}, down1 + "; " + bye1 + "; " + down1, false},
		"the pod terminates while the peer is gone": {func(r *rig, n *fakeNode) {
			peer, _ := r.api.peers.Get("tor-1")
			r.api.peers.Delete("tor-1")
			n.deliver(elsewhere)
			time.Sleep(time.Second)
			r.api.peers.Set("tor-1", peer)
			n.deliver(local)
		}, "tor-1 is left", false},
	} {
		inRig(t, func(r *rig) {
			r.onlyBGP()
			n := r.nodes[w177]
			r.start(w177, w178)
			r.tor("tor-1", "172.26.236.2", graceful)
			r.service(nginx, vip1)
			r.letRescue()
			n.deliver(local)
			r.nodes[w178].deliver(elsewhere)
			r.nodes[w177].routers.told()
			r.nodes[w178].routers.told()
			r.api.nodes.Set(w177, drained)
			r.wantTold("drained", w177, bye1)
			time.Sleep(time.Hour)
			r.wantTold(what+": no other node announces", w177, "")
			if c, _ := r.nodes[w178].reported(nginx); c.Reason != lb.ReasonParting || lb.Serving(c).Status {
				t.Errorf("%s: reported %+v", what, c)
			}
			c.ends(r, n)
			if c.converges { // routers get the time to choose the other node's route
				r.wantTold(what, w177, "")
				time.Sleep(2900 * time.Millisecond)
				r.wantTold(what+": until routers have converged", w177, "")
				time.Sleep(100 * time.Millisecond)
			}
			r.wantTold(what, w177, c.want)
		})
	}
}

// The last node of an address is drained while its router is away: the router hears of the address when it is back.
func TestContract5TheLastNodeIsDrainedWhileItsRouterIsAway(t *testing.T) {
	inRig(t, func(r *rig) {
		r.onlyBGP()
		n := r.nodes[w177]
		r.start(w177)
		r.tor("tor-1", "172.26.236.2", graceful)
		r.service(nginx, vip1)
		r.wantTold("at first", w177, up1)
		n.routers.connect("tor-1", false)
		r.api.nodes.Set(w177, lb.Node{Name: w177, Leaving: lb.ReasonNodeDrained})
		time.Sleep(time.Minute)
		if s := n.status(); s.BGP.Leaving != 1 || s.Parting.Count != 1 {
			t.Errorf("the router is away: %+v, parting %+v", s.BGP, s.Parting)
		}
		n.routers.connect("tor-1", true)
		r.wantTold("the router is back", w177, "tor-1 is lost; "+bye1)

		// A speaker that starts on a drained node does not know whether the drain was over.
		r.crash(w177)
		r.api.nodes.Set(w178, lb.Node{Name: w178, Leaving: lb.ReasonNodeDrained})
		r.start(w178)
		time.Sleep(time.Minute)
		r.wantTold("drained from the start", w178, "")
		r.api.nodes.Set(w178, lb.Node{Name: w178})
		r.wantTold("undrained", w178, up1)
	})
}

// A drain waits for a router that has heard of an address, not for one that never has; and while another node answers
// ARP, the drained one is not what keeps the address on the air.
func TestContract5ADrainWaitsForNoRouterThatNeverHeard(t *testing.T) {
	local := lb.Delivery{Service: nginx, VIP: vip1, Policy: lb.Local, Ready: 1, LocalReady: 1}
	for what, c := range map[string]struct {
		heard bool
		while func(r *rig) // the router is away
		want  int          // addresses that wait for another node
	}{
		"never up":    {false, nil, 0},
		"was up once": {true, nil, 1},
		"was up, and the pod is another one": {true, func(r *rig) {
			r.nodes[w177].deliver(lb.Delivery{Service: nginx, VIP: vip1, Policy: lb.Local, Ready: 1})
			time.Sleep(time.Minute)
			r.nodes[w177].deliver(local)
		}, 1},
		"was up, and in its place is one that never was": {true, func(r *rig) {
			peer, _ := r.api.peers.Get("tor-1")
			r.api.peers.Delete("tor-1")
			peer.Name = "tor-2"
			r.api.peers.Set("tor-2", peer)
		}, 0},
	} {
		inRig(t, func(r *rig) {
			r.start(w177, w178)
			r.tor("tor-1", "172.26.236.2", graceful)
			for _, n := range r.nodes {
				n.routers.connect("tor-1", c.heard)
			}
			r.service(nginx, vip1)
			r.letRescue()
			r.nodes[w177].deliver(local)
			r.nodes[w178].deliver(local)
			time.Sleep(time.Second)
			for _, n := range r.nodes {
				n.routers.connect("tor-1", false)
			}
			if c.while != nil {
				c.while(r)
				time.Sleep(time.Second)
			}
			r.api.nodes.Set(w177, lb.Node{Name: w177, Leaving: lb.ReasonNodeDrained})
			time.Sleep(time.Minute)
			s := r.nodes[w177].status()
			if s.Answering != 0 || s.BGP.Leaving != c.want || s.Parting.Count != 0 {
				t.Errorf("%s: answers for %d, %d wait, parting %+v", what, s.Answering, s.BGP.Leaving, s.Parting)
			}
			if who := r.wire.who(vip1); !slices.Equal(who, []string{w178}) {
				t.Errorf("%s: %v answer", what, who)
			}
		})
	}
}

// A Node that is deleted may be one of all: an address stays on the air until another node announces it that has a Node,
// or until the speaker is stopped.
func TestContract5ADeletedNodeWithdrawsOnceAnotherAnnounces(t *testing.T) {
	inRig(t, func(r *rig) {
		r.onlyBGP()
		r.start(w177, w178)
		r.tor("tor-1", "172.26.236.2", graceful)
		r.service(nginx, vip1)
		r.wantTold("at first", w177, up1)
		r.wantTold("at first", w178, up1)
		nodes := r.api.nodes.All()
		r.api.nodes.Delete(w177)
		r.wantTold("one of two", w177, bye1)
		time.Sleep(2900 * time.Millisecond)
		r.wantTold("until routers have converged", w177, "")
		time.Sleep(100 * time.Millisecond)
		r.wantTold("another one announces", w177, down1)
		r.wantTold("which goes on", w178, "")
		r.api.nodes.Delete(w178)
		r.wantTold("all are deleted", w178, bye1)
		time.Sleep(time.Hour)
		r.wantTold("nobody else announces", w178, "")
		r.wantTold("who has withdrawn has done so", w177, "")
		r.api.nodes.Set(w177, nodes[w177])
		r.wantTold("one is back", w177, up1)
		r.wantTold("and the other one ends once routers have converged", w178, "")
		time.Sleep(3 * time.Second)
		r.wantTold("then", w178, down1)
		r.api.nodes.Set(w178, nodes[w178])
		r.wantTold("both are back", w178, up1)

		r.api.nodes.Delete(w177)
		r.api.nodes.Delete(w178)
		r.wantTold("both at once", w177, bye1)
		r.wantTold("both at once", w178, bye1)
		time.Sleep(time.Minute)
		r.wantTold("nobody else announces", w177, "")
		r.wantTold("nobody else announces", w178, "")
		began := time.Now()
		r.stop(w177)
		if took := time.Since(began); took > time.Second {
			t.Errorf("the end took %v", took)
		}
		r.wantTold("it is stopped", w177, down1+"; tor-1 is left")
		r.wantTold("the last one", w178, "")
	})
}

func TestContract1UnplannedEndsAreWithdrawnAtOnce(t *testing.T) {
	inRig(t, func(r *rig) {
		r.start(w177)
		r.tor("tor-1", "172.26.236.2", graceful)
		r.service(nginx, vip1)
		r.service(other, vip2)
		n := r.nodes[w177]
		n.routers.told()
		n.setGate(lb.ReasonFeedLost)
		r.wantTold("the proxy is lost", w177, down1+"; tor-1 -172.26.236.181/32")
		n.setGate("")
		r.wantTold("the proxy is back", w177, up1+"; tor-1 +172.26.236.181/32 lp 100 []")
		n.deliver(lb.Delivery{Service: nginx, VIP: vip1, Policy: lb.Cluster, Ready: 1,
			Refusal: lb.Refuse(lb.ReasonNotProgrammed, "no")})
		r.wantTold("one is not programmed", w177, down1)
	})
}

func TestNothingIsSetWithoutAChange(t *testing.T) {
	inRig(t, func(r *rig) {
		r.start(w177)
		r.tor("tor-1", "172.26.236.2", func(p *lb.Peer) { p.BFDProfile = "fast" })
		r.api.profiles.Set("fast", lb.BFDProfile{Name: "fast", Receive: 50 * time.Millisecond,
			Transmit: 50 * time.Millisecond, Multiplier: 3})
		r.service(nginx, vip1)
		n := r.nodes[w177]
		n.routers.told()
		time.Sleep(2 * routes.Settle) // BFD begins
		synctest.Wait()
		sets, watches := n.routers.sets, n.bfd.sets
		for range 10 {
			n.changes.markAll()
			n.changes.markVIPs([]netip.Addr{vip1})
			n.changes.markRoutes("")
			time.Sleep(time.Second)
			synctest.Wait()
		}
		if n.routers.sets != sets || n.bfd.sets != watches {
			t.Errorf("set %d and %d more times", n.routers.sets-sets, n.bfd.sets-watches)
		}
	})
}

func TestBFDTakesThePeerDown(t *testing.T) {
	inRig(t, func(r *rig) {
		r.onlyBGP()
		r.start(w177)
		r.tor("tor-1", "172.26.236.2", func(p *lb.Peer) { p.BFDProfile = "fast" })
		r.service(nginx, vip1)
		n := r.nodes[w177]
		if p := n.status().BGP.Peers[0]; p.Warning == nil || p.Warning.Reason != lb.ReasonProfileMissing || p.BFD != nil {
			t.Errorf("without the profile: %+v", p)
		}
		r.api.profiles.Set("fast", lb.BFDProfile{Name: "fast", Receive: 50 * time.Millisecond,
			Transmit: 60 * time.Millisecond, Multiplier: 3, Passive: true, MinimumTTL: 200})
		time.Sleep(2 * routes.Settle)
		synctest.Wait()
		key := bfd.Key{Peer: tor1}
		want := bfd.Profile{ReceiveInterval: 50 * time.Millisecond, TransmitInterval: 60 * time.Millisecond,
			DetectMultiplier: 3, Passive: true, MinimumTTL: 200}
		if len(n.bfd.desired) != 1 || n.bfd.desired[key] != want {
			t.Fatalf("desired %v", n.bfd.desired)
		}
		r.wantTold("not up yet", w177, up1)
		n.bfd.change(key, func(o *bfd.Outcome) { o.State, o.Ups = bfd.Up, 1 })
		r.wantTold("up", w177, "")
		n.objects.write()
		if p, _ := r.api.peers.Get("tor-1"); p.Status[w177] != (lb.PeerNode{State: "Established", Message: "BFD is Up"}) {
			t.Errorf("status %+v", p.Status)
		}

		n.bfd.change(key, func(o *bfd.Outcome) { o.State, o.RemoteState = bfd.Down, bfd.AdminDown })
		r.wantTold("the peer has switched it off", w177, "")
		n.bfd.change(key, func(o *bfd.Outcome) { o.State, o.RemoteState = bfd.Up, bfd.Up })

		n.bfd.change(key, func(o *bfd.Outcome) {
			o.State, o.RemoteState, o.Failures, o.Diagnostic = bfd.Down, bfd.Down, 1, bfd.DetectionExpired
		})
		r.wantTold("lost", w177, "tor-1 is lost")
		st := n.status().BGP.Peers[0]
		if st.BFD == nil || st.BFD.State != "Down" || !st.BFD.HoldsDown ||
			st.BFD.Diagnostic != "Control Detection Time Expired" || st.Session.Reason != lb.ReasonBFDDown {
			t.Errorf("status %+v %+v", st.BFD, st.Session)
		}
		if c, _ := n.reported(nginx); c.Status || c.Reason != lb.ReasonNotEstablished {
			t.Errorf("reported %+v", c)
		}
		time.Sleep(10 * time.Second)
		r.wantTold("still lost", w177, "")
		n.bfd.change(key, func(o *bfd.Outcome) { o.State, o.RemoteState = bfd.Up, bfd.Up })
		r.wantTold("up again", w177, up1)

		n.bfd.change(key, func(o *bfd.Outcome) { o.Failures++ }) // down and up before anybody looked
		time.Sleep(3 * time.Second)
		r.wantTold("a short loss", w177, "tor-1 is lost; "+up1)

		n.bfd.change(key, func(o *bfd.Outcome) { o.State, o.RemoteState = bfd.Down, bfd.Down; o.Failures++ })
		time.Sleep(routes.LostFor + time.Second)
		r.wantTold("a router whose BFD was ended", w177, "tor-1 is lost; "+up1)

		r.api.peers.Delete("tor-1")
		synctest.Wait()
		if len(n.bfd.desired) != 0 {
			t.Errorf("desired %v", n.bfd.desired)
		}
	})
}

func TestContract10PeersAndAdvertisementsSayWhatIsWrong(t *testing.T) {
	inRig(t, func(r *rig) {
		r.start(w177, w178, w179)
		r.tor("tor-1", "172.26.236.2", func(p *lb.Peer) {
			p.Status = map[string]lb.PeerNode{w178: {State: "Idle"}}
		})
		r.tor("tor-2", "172.26.236.3", func(p *lb.Peer) { p.PasswordSecret = &lb.Key{Name: "missing"} })
		r.api.bgpAds.Set("wide", lb.BGPAdvertisement{Name: "wide", Generation: 7, AggregationLength: 20,
			AggregationLengthV6: 128, Communities: []string{"nowhere"}})
		r.service(nginx, vip1)
		time.Sleep(3 * time.Second)
		for _, n := range r.nodes {
			n.objects.write()
		}
		time.Sleep(3 * time.Second)
		p, _ := r.api.peers.Get("tor-1")
		if len(p.Status) != 3 || p.Status[w178].State != "Established" {
			t.Errorf("tor-1: %+v", p.Status)
		}
		p, _ = r.api.peers.Get("tor-2")
		if len(p.Status) != 3 || p.Status[w178].State != "Refused" || p.Status[w178].Reason != lb.ReasonSecretMissing {
			t.Errorf("tor-2: %+v", p.Status)
		}
		ad, _ := r.api.bgpAds.Get("wide")
		if len(ad.Conditions) != 1 || ad.Conditions[0].Status || ad.Conditions[0].Reason != lb.ReasonUnknownCommunity ||
			ad.Conditions[0].Generation != 7 {
			t.Errorf("wide: %+v", ad.Conditions)
		}
		if ad, _ = r.api.bgpAds.Get("all"); len(ad.Conditions) != 1 || !ad.Conditions[0].Status {
			t.Errorf("all: %+v", ad.Conditions)
		}
		for name, n := range r.nodes {
			synctest.Wait()
			if len(n.objects.jobs) > 0 {
				t.Errorf("%s goes on writing: %v", name, n.objects.jobs)
			}
		}

		// An aggregate over a Service with policy Local is marked, and the mark goes with its cause.
		r.api.bgpAds.Set("wide", lb.BGPAdvertisement{Name: "wide", AggregationLength: 30, AggregationLengthV6: 128})
		r.service(other, netip.MustParseAddr("172.26.236.182"))
		r.service(nginx, netip.MustParseAddr("172.26.236.181"))
		s, _ := r.api.services.Get(nginx)
		s.ExternalPolicy = lb.Local
		r.api.services.Set(nginx, s)
		time.Sleep(3 * time.Second)
		for _, n := range r.nodes {
			n.objects.write()
		}
		if ad, _ := r.api.bgpAds.Get("wide"); len(ad.Conditions) != 1 || ad.Conditions[0].Reason != lb.ReasonAggregateLocal {
			t.Errorf("wide: %+v", ad.Conditions)
		}
		s.ExternalPolicy = lb.Cluster
		r.api.services.Set(nginx, s)
		time.Sleep(3 * time.Second)
		for _, n := range r.nodes {
			n.objects.write()
		}
		if ad, _ := r.api.bgpAds.Get("wide"); len(ad.Conditions) != 1 ||
			ad.Conditions[0].Reason != lb.ReasonAdvertisementReady {
			t.Errorf("wide: %+v", ad.Conditions)
		}
	})
}

func TestSessionChangesAreEvents(t *testing.T) {
	inRig(t, func(r *rig) {
		r.start(w177)
		r.tor("tor-1", "172.26.236.2", nil)
		n := r.nodes[w177]
		n.routers.connect("tor-1", false)
		n.routers.connect("tor-1", false)
		n.routers.connect("tor-1", true)
		want := []string{
			"tor-1 true Established the session with k8s-worker-177 is established",
			"tor-1 false NotEstablished the session with k8s-worker-177 is lost: connection refused",
			"tor-1 true Established the session with k8s-worker-177 is established",
		}
		if !slices.Equal(n.objects.events, want) {
			t.Errorf("events %q", n.objects.events)
		}
	})
}

func TestAggregateStaysWithItsLastVIP(t *testing.T) {
	inRig(t, func(r *rig) {
		r.onlyBGP()
		r.api.bgpAds.Set("all", lb.BGPAdvertisement{Name: "all", AggregationLength: 30, AggregationLengthV6: 128})
		r.start(w177)
		r.tor("tor-1", "172.26.236.2", nil)
		a, b := netip.MustParseAddr("172.26.236.184"), netip.MustParseAddr("172.26.236.185")
		r.service(nginx, a)
		r.wantTold("one", w177, "tor-1 +172.26.236.184/30 lp 100 []")
		r.service(other, b)
		r.wantTold("two", w177, "")
		r.api.services.Delete(nginx)
		r.wantTold("the other one is left", w177, "")
		if c, _ := r.nodes[w177].reported(other); !c.Status {
			t.Errorf("reported %+v", c)
		}
		r.api.services.Delete(other)
		r.wantTold("none is left", w177, "tor-1 -172.26.236.184/30")
	})
}

func TestBGPStatusAndMetrics(t *testing.T) {
	inRig(t, func(r *rig) {
		r.onlyBGP()
		r.api.profiles.Set("fast", lb.BFDProfile{Name: "fast", Receive: 50 * time.Millisecond,
			Transmit: 50 * time.Millisecond, Multiplier: 3})
		r.start(w177)
		r.tor("tor-1", "172.26.236.2", func(p *lb.Peer) { p.BFDProfile = "fast" })
		r.service(nginx, vip1)
		n := r.nodes[w177]
		n.routers.told()
		time.Sleep(2 * routes.Settle)
		synctest.Wait()
		n.bfd.change(bfd.Key{Peer: tor1}, func(o *bfd.Outcome) { o.State, o.DetectionTime = bfd.Up, 150*time.Millisecond })
		got := n.whole(t)
		if len(got.BGP.Peers) != 1 || got.BGP.Peers[0].BFD.State != "Up" || got.BGP.Peers[0].BFD.DetectionTime != "150ms" ||
			got.BGP.Peers[0].Session.State != "Established" {
			t.Errorf("%+v", got)
		}
		routes := got.VIPs[0].Routes
		if routes == nil || !slices.Equal(routes.Peers, []string{"tor-1"}) || len(routes.Prefixes) != 1 {
			t.Errorf("%+v", got)
		}
		registry := prometheus.NewPedanticRegistry()
		registry.MustRegister(newPathCollector(n.speaker), newCollector(n.speaker))
		want := `
# HELP landfall_speaker_announced 1 for each VIP and Service that this node answers for, or that BGP peers hear of from it.
# TYPE landfall_speaker_announced gauge
landfall_speaker_announced{service="default/my-nginx",vip="172.26.236.180"} 1
# HELP landfall_bfd_session_up Whether the BFD session with the BGP peer is Up.
# TYPE landfall_bfd_session_up gauge
landfall_bfd_session_up{peer="tor-1"} 1
# HELP landfall_bfd_detection_seconds Silence after which the path to the peer counts as lost; 0 while the peer is not heard.
# TYPE landfall_bfd_detection_seconds gauge
landfall_bfd_detection_seconds{peer="tor-1"} 0.15
`
		if err := testutil.GatherAndCompare(registry, strings.NewReader(want), "landfall_bfd_session_up",
			"landfall_bfd_detection_seconds", "landfall_speaker_announced"); err != nil {
			t.Error(err)
		}
	})
}

// A BGPPeer that selects the node no more is told so at once, with graceful restart too: it would
// wait for a successor otherwise.
func TestAPeerThatSelectsTheNodeNoMoreIsLeft(t *testing.T) {
	inRig(t, func(r *rig) {
		r.onlyBGP()
		for _, name := range []string{w177, w178} {
			node, _ := r.api.nodes.Get(name)
			node.Labels = map[string]string{"rack": name}
			r.api.nodes.Set(name, node)
		}
		r.start(w177, w178)
		r.tor("tor-1", "172.26.236.2", graceful)
		r.service(nginx, vip1)
		r.letRescue()
		r.wantTold("at first", w177, up1)
		r.wantTold("at first", w178, up1)
		p, _ := r.api.peers.Get("tor-1")
		selector, err := labels.Parse("rack=" + w177)
		if err != nil {
			t.Fatal(err)
		}
		p.NodeSelectors = []labels.Selector{selector}
		r.api.peers.Set("tor-1", p)
		r.wantTold("selected", w177, "")
		r.wantTold("not selected", w178, "tor-1 is left")
	})
}

// One node writes whether each L2Advertisement selects pools and nodes, and again when that changes.
func TestL2AdvertisementsShowTheirState(t *testing.T) {
	inRig(t, func(r *rig) {
		r.start(w177, w178, w179)
		want := func(status bool, reason lb.Reason) {
			t.Helper()
			time.Sleep(3 * time.Second)
			synctest.Wait()
			writers := 0
			for _, n := range r.nodes {
				for name := range n.objects.jobs {
					if name == "L2Advertisement lan" {
						writers++
					}
				}
				n.objects.write()
			}
			synctest.Wait()
			ad, _ := r.api.advertisements.Get("lan")
			if writers != 1 || len(ad.Conditions) != 1 || ad.Conditions[0].Status != status || ad.Conditions[0].Reason != reason {
				t.Errorf("%d nodes write %+v, want one to write %s", writers, ad.Conditions, reason)
			}
			for name, n := range r.nodes {
				if len(n.objects.jobs) > 0 {
					t.Errorf("%s goes on writing: %v", name, n.objects.jobs)
				}
			}
		}
		want(true, lb.ReasonAdvertisementReady)
		r.api.advertisements.Set("lan", lb.L2Advertisement{Name: "lan", Generation: 2, Pools: []string{"dmz"}})
		want(false, lb.ReasonUnknownPool)
		r.api.pools.Set("dmz", lb.Pool{Name: "dmz"})
		want(true, lb.ReasonAdvertisementReady)
		r.api.advertisements.Set("lan", lb.L2Advertisement{Name: "lan", Generation: 3,
			NodeSelectors: []labels.Selector{labels.SelectorFromSet(labels.Set{"rack": "1"})}})
		want(false, lb.ReasonSelectsNoNode)
		node, _ := r.api.nodes.Get(w178)
		node.Labels = labels.Set{"rack": "1"}
		r.api.nodes.Set(w178, node)
		want(true, lb.ReasonAdvertisementReady)
	})
}
