package rescue

import (
	"fmt"
	"strings"
	"testing"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/nft"
)

// A set that is not as this release makes it keeps no rules from being written: one of another program that is there
// first, or of another release.
func TestContract6ASetOfAnotherShapeIsNotInTheWay(t *testing.T) {
	r := newRack(t, 2)
	w, node := around(1), r.nodes[0]
	for _, set := range []string{prefixVIPs, prefixOnRing, prefixFlows, prefixFresh, setRenewed, ringOf(1), setPeers} {
		for _, late := range []bool{false, true} {
			node.Run(t, "nft", "flush", "ruleset")
			r.actors[0] = rescuer(t, node)
			if late { // the proxy is down meanwhile
				r.set(t, 0, w)
			}
			for _, at := range []addresses{v4, v6} {
				family, called := nftFamily(headerOf(lb.FamilyOf(addr(at.vip)))), set
				if strings.HasSuffix(set, "-") {
					called = name(set, w.Ring[addr(at.vip)][0])
				}
				node.Run(t, "nft", "add", "table", family, tableName)
				if late {
					node.Run(t, "nft", "flush", "table", family, tableName)
					node.Run(t, "nft", "delete", "set", family, tableName, called)
				}
				node.Run(t, "nft", "add", "set", family, tableName, called, "{ type inet_service; }")
			}
			a := rescuer(t, node)
			a.set(w)
			until(t, fmt.Sprintf("a target of each family is there beside another %s, late: %t", set, late), func() bool {
				node.Do(t, func() error { _ = a.apply(); return nil }) // or it would end the test
				return a.Targets() == 2
			})
		}
	}
}

// A release that is gone back from has left chains of its own, which use sets of targets. They keep no target from
// going.
func TestContract6ChainsOfANewerReleaseGo(t *testing.T) {
	r := newRack(t, 3)
	w, node := around(1, 2), r.nodes[0]
	r.set(t, 0, w)
	for _, at := range []addresses{v4, v6} {
		family := nftFamily(headerOf(lb.FamilyOf(addr(at.vip))))
		set := name(prefixVIPs, addr(at.b))
		writeRules(t, node, fmt.Sprintf(`
			add chain %[1]s %[2]s later
			add rule %[1]s %[2]s later %[1]s daddr @%[3]s jump %[4]s
			add chain %[1]s %[2]s later-hook { type filter hook forward priority 0; }
			add rule %[1]s %[2]s later-hook %[1]s daddr @%[3]s jump later`, family, tableName, set, name(prefixTo, addr(at.b))))
	}
	w = around(2)
	w.Gone = append(w.Gone, addr(v4.b), addr(v6.b))
	r.actors[0] = rescuer(t, node)
	r.set(t, 0, w)
	for _, at := range []addresses{v4, v6} {
		out := node.Run(t, "nft", "list", "table", nftFamily(headerOf(lb.FamilyOf(addr(at.vip)))), tableName)
		if strings.Contains(out, "later") || strings.Contains(out, name(prefixVIPs, addr(at.b))) {
			t.Errorf("left:\n%s", out)
		}
		if !strings.Contains(out, "ring begins") {
			t.Errorf("no rules:\n%s", out)
		}
	}
}

// A write of more than one transaction that fails in the middle leaves sets and chains of nodes that may be no targets
// by the next one. They go, and what is remembered of others stays.
func TestContract6WhatAFailedWriteLeavesGoes(t *testing.T) {
	r := newRack(t, 3)
	w, node := around(1, 2), r.nodes[0]
	r.set(t, 0, w)
	table := func(h header) string {
		return stripCounters(node.Run(t, "nft", "list", "table", nftFamily(h), tableName))
	}
	for _, at := range []addresses{v4, v6} {
		h := headerOf(lb.FamilyOf(addr(at.vip)))
		node.Run(t, "nft", "add", "element", nftFamily(h), tableName, name(prefixFlows, addr(at.b)),
			"{ "+at.client+" . 1 . "+at.vip+" . 80 timeout 1d expires 1d }")
		before, ghost := table(h), addr(at.client)
		before = before[strings.Index(before, "chain"):]
		k := r.actors[0].kernel.(Kernel)
		for from := range 3 { // which parts of the ghost are there
			b := k.writer(h.family)
			switch from {
			case 0:
				b.AddSet(h.flows(ghost))
				b.AddSet(h.fresh(ghost))
				b.AddSet(h.onRing(ghost))
				b.replace(name(prefixTo, ghost), nft.Hook{}, h.toRules(ghost, 0))
				b.replace(name(prefixNew, ghost), nft.Hook{}, h.newRules(ghost, 0))
			case 1:
				b.AddChain(name(prefixNew, ghost), nft.Hook{})
			case 2:
				b.AddSet(h.vips(ghost))
				b.AddSet(h.fresh(ghost))
			}
			if err := b.commit(); err != nil {
				t.Fatal(err)
			}
			r.actors[0] = rescuer(t, node)
			r.set(t, 0, w)
			after := table(h)
			kept := node.Run(t, "nft", "list", "set", nftFamily(h), tableName, name(prefixFlows, addr(at.b)))
			if !strings.Contains(kept, at.client+" . 1 . "+at.vip) {
				t.Errorf("part %d: forgotten:\n%s", from, kept)
			}
			if strings.Contains(after, name("-", ghost)) || after[strings.Index(after, "chain"):] != before {
				t.Errorf("part %d: left:\n%s", from, after)
			}
		}
	}
}

// What is left of a node that is a target again is used, and no write fails by it.
func TestContract6WhatIsLeftOfATargetIsUsed(t *testing.T) {
	r := newRack(t, 3)
	node, h := r.nodes[0], headerOf(lb.IPv4)
	r.set(t, 0, around(2))
	w := r.actors[0].kernel.(Kernel).writer(lb.IPv4)
	w.AddSet(h.flows(addr(v4.b)))
	w.AddSet(h.fresh(addr(v4.b)))
	w.replace(name(prefixTo, addr(v4.b)), nft.Hook{}, h.toRules(addr(v4.b), 0))
	if err := w.commit(); err != nil {
		t.Fatal(err)
	}
	node.Run(t, "nft", "add", "element", "ip", tableName, name(prefixFlows, addr(v4.b)), "{ 10.0.0.9 . 1 . 10.0.0.100 . 80 }")
	a := rescuer(t, node)
	a.known[addr(v4.b)] = there(1) // so the first write has it
	r.actors[0] = a
	r.set(t, 0, around(1, 2))
	if out := node.Run(t, "nft", "list", "table", "ip", tableName); !strings.Contains(out, "10.0.0.9 . 1 .") {
		t.Errorf("forgotten:\n%s", out)
	}
}
