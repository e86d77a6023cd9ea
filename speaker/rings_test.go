package main

import (
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
)

// wantRing fails the test unless the proxy of a node is told this ring for vip1: the last numbers
// of addresses, or "none".
func (r *rig) wantRing(what, node, want string) {
	r.t.Helper()
	synctest.Wait()
	n := r.nodes[node]
	n.mu.Lock()
	ring, ok := n.update.Ring[vip1]
	n.mu.Unlock()
	got := "none"
	if ok {
		var numbers []string
		for _, addr := range ring {
			numbers = append(numbers, strings.TrimPrefix(addr.String(), "172.26.236."))
		}
		got = strings.Join(numbers, " ")
	}
	if got != want {
		r.t.Errorf("%s: the proxy of %s is told the ring %q, want %q", what, node, got, want)
	}
}

// again has a node plan the VIP anew.
func (r *rig) again(node string) {
	r.nodes[node].changes.markVIPs([]netip.Addr{vip1})
	synctest.Wait()
}

func TestContract5TheProxyIsToldTheRing(t *testing.T) {
	inRig(t, func(r *rig) {
		r.start(w177, w178, w179)
		r.service(nginx, vip1)
		time.Sleep(2 * time.Second)
		for node := range r.nodes {
			r.wantRing("ARP only", node, "none")
		}
		r.onlyBGP()
		r.tor("tor-1", "172.26.236.2", nil)
		r.wantRing("all announce it", w177, "178 179")
		r.wantRing("from this node on", w178, "179 177")
		r.wantRing("once round", w179, "177 178")

		// A drain: the node holds connections yet. Its speaker may end.
		node, _ := r.api.nodes.Get(w178)
		node.Leaving = lb.ReasonNodeLeaving
		time.Sleep(2 * lb.FlowMemory) // it has announced all the time
		r.api.nodes.Set(w178, node)
		synctest.Wait()
		time.Sleep(10 * time.Second)
		if claim, _ := r.nodes[w178].claim(vip1); claim.Routes != "" {
			t.Fatalf("the drain is not over: %+v", claim)
		}
		r.wantRing("drained", w177, "178 179")
		r.wantRing("drained", w178, "179 177")
		r.crash(w178)
		r.again(w177)
		r.wantRing("its speaker has ended", w177, "178 179")
		n := r.nodes[w177]
		n.mu.Lock()
		n.dead = []string{w178}
		n.mu.Unlock()
		r.again(w177)
		r.wantRing("it is dead", w177, "179")
		n.mu.Lock()
		n.dead = nil
		n.mu.Unlock()
		r.again(w177)
		r.wantRing("a false alarm", w177, "178 179")
		time.Sleep(lb.FlowMemory + time.Minute)
		r.again(w177)
		r.wantRing("an hour later", w177, "179")

		// A node that gets another address.
		other, _ := r.api.nodes.Get(w179)
		other.Addresses = []netip.Addr{netip.MustParseAddr("172.26.236.170")}
		r.api.nodes.Set(w179, other)
		r.wantRing("another address", w177, "170")

		r.api.services.Delete(nginx)
		r.wantRing("no such VIP", w177, "none")
	})
}

// A VIP that is announced both ways has one ring of all who do either, so that no node hands its
// packets on by another view.
func TestTheRingOfAVIPThatIsAnnouncedBothWays(t *testing.T) {
	inRig(t, func(r *rig) {
		r.start(w177, w178, w179)
		r.service(nginx, vip1)
		time.Sleep(2 * time.Second)
		owner := ranked(vip1)[0]
		for node, n := range r.nodes {
			n.mu.Lock()
			previous := n.update.Previous[vip1]
			n.mu.Unlock()
			addr := r.nodes[owner].interfaces[0].Addresses[0].Addr()
			if (node == owner) != (len(previous) == 0) || node != owner && !slices.Equal(previous, []netip.Addr{addr}) {
				t.Errorf("%s: the previous owner is %v", node, previous)
			}
		}
		// Of the others, one has a router.
		router := ranked(vip1)[1]
		r.tor("tor-1", "172.26.236.2", func(p *lb.Peer) {})
		for node, n := range r.nodes {
			n.routers.connect("tor-1", node == router)
		}
		third := ranked(vip1)[2]
		r.again(third)
		number := func(node string) string { return strings.TrimPrefix(node, "k8s-worker-") }
		both := []string{number(owner), number(router)}
		slices.Sort(both)
		if number(third) > both[0] && number(third) < both[1] {
			slices.Reverse(both)
		}
		// All had told the router before.
		time.Sleep(lb.FlowMemory + time.Minute)
		r.again(third)
		r.wantRing("both ways", third, strings.Join(both, " "))
	})
}

func TestRoutesWaitForTheOtherSpeakers(t *testing.T) {
	inRig(t, func(r *rig) {
		r.onlyBGP()
		n := r.nodes[w177]
		n.joined = false
		r.service(nginx, vip1)
		r.tor("tor-1", "172.26.236.2", nil)
		r.start(w177)
		r.wantTold("not joined", w177, "")
		n.mu.Lock()
		n.joined = true
		n.mu.Unlock()
		n.changes.markVIPs(nil)
		r.wantTold("joined", w177, up1)
	})
}

// A node that was cut off finds the others again one by one. Those that it has not found yet may
// hold the connections that routers move to it at once: they stay in the ring.
func TestContract11AReturningNodeKeepsItsRing(t *testing.T) {
	inRig(t, func(r *rig) {
		r.start(w177, w178, w179)
		r.service(nginx, vip1)
		r.onlyBGP()
		r.tor("tor-1", "172.26.236.2", nil)
		time.Sleep(time.Minute)
		r.wantRing("all are there", w179, "177 178")
		r.cut(w179, false)
		r.wantRing("cut off", w179, "177 178")
		time.Sleep(8 * time.Second)
		n := r.nodes[w179]
		n.set(func(n *fakeNode) {
			n.apiless, n.unheard = false, true // cutOff: whoever is missing is silent
			n.sees = func(other string) bool { return other == w177 }
			n.interfaces = slices.Clone(n.interfaces)
			n.interfaces[0].Up = true
		})
		n.changes.markAll()
		synctest.Wait()
		r.wantRing("found the first", w179, "177 178")
		n.set(func(n *fakeNode) { n.unheard = false })
		n.changes.markAll()
		synctest.Wait()
		r.wantRing("heard it", w179, "177 178")
		r.reconnect(w179, 0)
		time.Sleep(time.Minute)
		r.wantRing("in the end", w179, "177 178")
	})
}
