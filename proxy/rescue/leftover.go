package rescue

import (
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/proxy/nft"
)

// odd reports whether there is something that this release does not make.
func (have held) odd() bool {
	return have.blocked() || len(have.strange)+len(have.strangeSets)+len(have.left)+len(have.leftChains) > 0
}

// blocked reports whether all rules have to go before ours can be written.
func (have held) blocked() bool { return len(have.foreign)+len(have.hooked) > 0 }

// leftover is a set or a chain of a node that is not a target.
type leftover struct {
	node netip.Addr
	name string
}

// sortSets finds the sets with names of ours that are not as we make them, and those of VIPs for a
// node that lacks the rest: they are foreign. The other sets of such nodes are left.
func (h header) sortSets(sets map[string]nft.Shape, have *held) {
	ours := map[string]nft.Shape{}
	for _, set := range append(h.limitSets(), h.peers(), h.addresses(setRing)) {
		ours[set.Name] = set.Shape()
	}
	for name, shape := range sets {
		node, set, is := h.ofTarget(name)
		if is {
			ours[name] = set.Shape()
		}
		if _, is := hopsOf(name); is {
			ours[name] = h.addresses(name).Shape()
		}
		should, known := ours[name]
		_, whole := have.sent[node]
		switch {
		case known && shape != should, is && !whole && name == h.vips(node).Name:
			have.foreign = append(have.foreign, name)
		case is && !whole:
			have.left = append(have.left, leftover{node, name})
		case !known && shape.Flags&unix.NFT_SET_ANONYMOUS == 0: // those go with their rules
			have.strangeSets = append(have.strangeSets, name)
		}
	}
}

// ofTarget returns the set of a target that has a name.
func (h header) ofTarget(text string) (node netip.Addr, set nft.Set, ok bool) {
	for prefix, of := range map[string]func(netip.Addr) nft.Set{
		prefixVIPs: h.vips, prefixOnRing: h.onRing, prefixFlows: h.flows, prefixFresh: h.fresh,
	} {
		if node, ok = h.nodeOf(prefix, text); ok {
			return node, of(node), true
		}
	}
	return node, set, false
}

// sortChains finds the chains that are none of ours, or are entered elsewhere. Those of nodes that lack the rest are
// left.
func (h header) sortChains(chains map[string]nft.Chain, have *held) {
	hooks := map[string]nft.Hook{chainStrays: strayHook, chainSegments: segmentHook, chainErrors: {}, chainRecall: {},
		chainOffRing: {}}
	for _, chain := range limitChains {
		hooks[chain] = nft.Hook{}
	}
	for chain, c := range chains {
		node, is := h.nodeOf(prefixTo, chain)
		if !is {
			node, is = h.nodeOf(prefixNew, chain)
		}
		hook, known := hooks[chain]
		_, whole := have.sent[node]
		switch {
		case (is || known) && c.Hook != hook:
			have.hooked = append(have.hooked, chain)
		case is && !whole:
			have.leftChains = append(have.leftChains, leftover{node, chain})
		case !is && !known:
			have.strange = append(have.strange, chain)
		}
	}
}

// unblock removes all rules, and then what is in the way of ours.
func (w *writer) unblock(have held) {
	w.RemoveRules("")
	for _, name := range slices.Concat(have.strangeSets, have.foreign) { // a map of verdicts may lead to a chain
		w.RemoveSet(name)
	}
	for _, name := range have.hooked {
		w.RemoveChain(name)
	}
}

// dropped returns the nodes that are targets no more.
func dropped(want *table, have held) (nodes []netip.Addr) {
	for node := range have.sent {
		if _, wanted := want.targets[node]; !wanted {
			nodes = append(nodes, node)
		}
	}
	return nodes
}

// unwanted returns what is left of nodes that are no targets.
func (t *table) unwanted(left []leftover) []leftover {
	return slices.DeleteFunc(slices.Clone(left), func(l leftover) bool {
		_, wanted := t.targets[l.node]
		return wanted
	})
}

// removeStrange removes the rules of targets that are none any more, and what this release does not have, which these
// rules may use.
func (w *writer) removeStrange(want *table, have held) {
	for _, node := range dropped(want, have) {
		w.RemoveRules(name(prefixNew, node))
		w.RemoveRules(name(prefixTo, node))
		w.spill()
	}
	for _, l := range want.unwanted(have.leftChains) {
		w.RemoveRules(l.name)
		w.spill()
	}
	w.removeChains(have.strange, have.strangeSets)
}

// removeLeft removes what is left of nodes that are no targets.
func (w *writer) removeLeft(want *table, have held) {
	var chains []string
	for _, l := range want.unwanted(have.leftChains) {
		chains = append(chains, l.name)
	}
	w.removeChains(chains, nil)
	for _, l := range want.unwanted(have.left) {
		w.RemoveSet(l.name)
		w.spill()
	}
}

// removeChains removes chains, of which one may lead to another, and sets, which their rules may use and which may lead
// to them.
func (w *writer) removeChains(chains, sets []string) {
	for _, name := range chains {
		w.RemoveRules(name)
		w.spill()
	}
	for _, name := range sets {
		w.RemoveSet(name)
		w.spill()
	}
	for _, name := range chains {
		w.RemoveChain(name)
		w.spill()
	}
}
