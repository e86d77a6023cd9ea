package rescue

import (
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/links"
	"github.com/landfall-lb/landfall/internal/nstest"
	"github.com/landfall-lb/landfall/proxy/nfnetlink"
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

// A release that is gone back from has left chains and sets of its own, which use sets and chains of targets. They keep
// no target from going.
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
			add rule %[1]s %[2]s later-hook %[1]s daddr @%[3]s tcp dport { 80, 81 } jump later
			add map %[1]s %[2]s later-map { type %[5]s : verdict; elements = { %[6]s : goto %[4]s }; }
			add rule %[1]s %[2]s later-hook %[1]s daddr vmap @later-map`, family, tableName, set, name(prefixTo, addr(at.b)),
			map[string]string{"ip": "ipv4_addr", "ip6": "ipv6_addr"}[family], at.vip))
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

// What another release has left of a node that is no target may use a set of its own, which goes with it.
func TestContract6AChainThatIsLeftUsesAStrangeSet(t *testing.T) {
	r := newRack(t, 2)
	w, node, gone := around(1), r.nodes[0], addr("10.0.0.77")
	r.set(t, 0, w)
	writeRules(t, node, fmt.Sprintf(`
		add set ip %[1]s later { type ipv4_addr; }
		add chain ip %[1]s %[2]s
		add rule ip %[1]s %[2]s ip daddr @later drop`, tableName, name(prefixNew, gone)))
	r.actors[0] = rescuer(t, node)
	r.set(t, 0, w)
	out := node.Run(t, "nft", "list", "table", "ip", tableName)
	if strings.Contains(out, "later") || strings.Contains(out, name(prefixNew, gone)) {
		t.Errorf("left:\n%s", out)
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

// Between two transactions of a write that fails, a VIP may be in the sets of two lengths of rings, or in that of one
// that no ring has. The next write puts that right, whichever of the two it wants.
func TestContract6AVIPInTheSetsOfTwoLengthsIsPutRight(t *testing.T) {
	r := newRack(t, 3)
	node := r.nodes[0]
	for _, want := range []Desired{around(1, 2), around(1), around(1, 2)} {
		for _, at := range []addresses{v4, v6} {
			family := nftFamily(headerOf(lb.FamilyOf(addr(at.vip))))
			for _, hops := range []int{1, 2, 3} {
				set := fmt.Sprintf("%s %s %s", family, tableName, ringOf(hops))
				writeRules(t, node, fmt.Sprintf("add table %s %s\nadd set %s { type %s; }", family, tableName, set,
					map[string]string{"ip": "ipv4_addr", "ip6": "ipv6_addr"}[family]))
				if hops < 3 {
					writeRules(t, node, fmt.Sprintf("add element %s { %s }", set, at.vip))
				}
			}
		}
		r.actors[0] = rescuer(t, node)
		r.set(t, 0, want)
		for _, at := range []addresses{v4, v6} {
			length := len(want.Ring[addr(at.vip)])
			have, err := r.actors[0].kernel.load(lb.FamilyOf(addr(at.vip)), true)
			if err != nil || len(have.rings) != 1 || !slices.Equal(have.rings[length], []netip.Addr{addr(at.vip)}) {
				t.Errorf("of a ring with %d others the kernel has %v, %v", length, have.rings, err)
			}
		}
	}
}

// A chain with a name of ours that another release enters elsewhere keeps no rules from being written, and what is
// remembered of a target stays.
func TestContract6AChainThatIsEnteredElsewhereIsNotInTheWay(t *testing.T) {
	r := newRack(t, 2)
	w, node := around(1), r.nodes[0]
	target := w.Ring[addr(v4.vip)][0]
	r.set(t, 0, w)
	node.Run(t, "nft", "add", "element", "ip", tableName, name(prefixFlows, target),
		"{ 10.0.0.9 . 1 . 10.0.0.100 . 80 timeout 1d expires 1d }")
	right := stripCounters(node.Run(t, "nft", "list", "chain", "ip", tableName, chainStrays))
	for _, chain := range []string{chainStrays, chainErrors, chainRecall, chainOver, chainSegments,
		name(prefixTo, target)} {
		writeRules(t, node, fmt.Sprintf(`
			flush table ip %[1]s
			add chain ip %[1]s %[2]s
			delete chain ip %[1]s %[2]s
			add chain ip %[1]s %[2]s { type filter hook prerouting priority -160; }`, tableName, chain))
		r.actors[0] = rescuer(t, node)
		r.actors[0].set(w)
		until(t, "there is a target of each family beside another "+chain, func() bool {
			node.Do(t, func() error { _ = r.actors[0].apply(); return nil }) // or it would end the test
			return r.actors[0].Targets() == 2
		})
		out := node.Run(t, "nft", "list", "table", "ip", tableName)
		if stripCounters(node.Run(t, "nft", "list", "chain", "ip", tableName, chainStrays)) != right ||
			strings.Contains(out, "priority -160") || !strings.Contains(out, "10.0.0.9 . 1 .") {
			t.Errorf("beside another %s:\n%s", chain, out)
		}
	}
}

// What is in the way of all rules goes in the transaction that writes them anew, however many targets there are: no
// packet meets a table without rules. Where the socket's buffer is too small for that, it takes several.
func TestContract6ASetOfAnotherShapeIsReplacedAtOnce(t *testing.T) {
	node := nstest.New(t)
	var k Kernel
	node.Do(t, func() (err error) {
		k, err = Open(0)
		return err
	})
	t.Cleanup(k.Close)
	all, j := map[netip.Addr]Origins{}, judge{neighbors: map[netip.Addr]links.Neighbor{}}
	for i := range byte(maxTargets + maxDirect) {
		target := netip.AddrFrom16([16]byte{0xfd, 15: i})
		j.neighbors[target] = there(i)
		vip := netip.AddrFrom16([16]byte{0x20, 1, 15: i})
		all[vip] = Origins{Ring: []netip.Addr{target}, Direct: i >= maxTargets}
	}
	want := choose(lb.IPv6, all, j, nil)
	write := func() (transactions uint32) {
		t.Helper()
		have, err := k.load(lb.IPv6, true)
		before := generation(t, k)
		if err == nil {
			err = k.write(lb.IPv6, want, have)
		}
		if err != nil {
			t.Fatal(err)
		}
		transactions = generation(t, k) - before
		have, err = k.load(lb.IPv6, true)
		if err != nil || !same(lb.IPv6, have, want) || !have.table.equal(want) || have.odd() {
			t.Fatalf("the kernel has other rules than those of %d targets: %v", len(want.targets), err)
		}
		return transactions
	}
	if n := write(); n < 2 {
		t.Fatalf("all is written in %d transactions: the test shows nothing", n)
	}
	for _, small := range []bool{false, true} {
		if small {
			fd := int(reflect.ValueOf(k.conn).Elem().FieldByName("fd").Int())
			if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, 106_496); err != nil {
				t.Fatal(err)
			}
		}
		for _, set := range []string{setRenewed, name(prefixFlows, want.nodes()[0])} {
			writeRules(t, node, fmt.Sprintf("flush table ip6 %[1]s\ndelete set ip6 %[1]s %[2]s\n"+
				"add set ip6 %[1]s %[2]s { type inet_service; }", tableName, set))
			if n := write(); n > 1 != small {
				t.Errorf("instead of another %s all is written in %d transactions, with a small buffer: %t", set, n, small)
			}
		}
	}
}

// generation returns the number of the last transaction in a network namespace.
func generation(t *testing.T, k Kernel) (number uint32) {
	t.Helper()
	var m nfnetlink.Messages
	m.Add(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_GETGEN, 0, 0, "generation", func() {})
	if err := k.conn.Request(&m, func(msg nfnetlink.Message) {
		number, _ = nfnetlink.GetNumber(msg.Attributes(), unix.NFTA_GEN_ID)
	}); err != nil {
		t.Fatal(err)
	}
	return number
}
