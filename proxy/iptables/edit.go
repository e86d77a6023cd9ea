package iptables

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// edits turn the rules of one chain into others. Rules that are right stay untouched: they are never removed, and their counters go on.
type edits struct {
	// moved have to go first, as they come back elsewhere in the chain.
	moved []string
	// inserts come next, in this order.
	inserts []insert
	// stale go last.
	stale []string
}

type insert struct {
	at   int // position, from 1
	last bool
	rule string
}

// diff returns the edits from have to want. Rules in want must be distinct; those in have for which keep is true stay where they are.
func diff(have, want []string, keep func(rule string) bool) edits {
	var e edits
	if slices.Equal(have, want) {
		return e
	}
	index := make(map[string]int, len(want))
	for i, r := range want {
		index[r] = i
	}
	stays := longestRise(have, index)
	var rest []string // what is there once the moved ones are gone
	for i, r := range have {
		_, wanted := index[r]
		switch {
		case wanted && !stays[i]:
			e.moved = append(e.moved, r)
			continue
		case !wanted && (keep == nil || !keep(r)):
			e.stale = append(e.stale, r)
		}
		rest = append(rest, r)
	}
	at := make(map[string]int, len(rest))
	for i, r := range rest {
		at[r] = i
	}
	next := 0 // in rest
	for _, r := range want {
		if i, ok := at[r]; ok {
			next = i + 1
			continue
		}
		position := next + len(e.inserts) + 1
		e.inserts = append(e.inserts, insert{at: position, rule: r, last: position > len(rest)+len(e.inserts)})
	}
	return e
}

// longestRise marks the rules of have that stay: a longest choice of wanted ones that stand in the wanted order. Rules that stand
// there twice, which is not our doing, are left out, as a deletion names its rule by its text.
func longestRise(have []string, index map[string]int) []bool {
	times := make(map[string]int, len(have))
	for _, r := range have {
		times[r]++
	}
	var tails []int // tails[n] is the place in have of the smallest end of a rise of n+1 rules
	before := make([]int, len(have))
	for i, r := range have {
		want, ok := index[r]
		if !ok || times[r] > 1 {
			continue
		}
		n, _ := slices.BinarySearchFunc(tails, want, func(tail, want int) int { return index[have[tail]] - want })
		before[i] = -1
		if n > 0 {
			before[i] = tails[n-1]
		}
		tails = append(tails[:n], append([]int{i}, tails[min(n+1, len(tails)):]...)...)
	}
	stays := make([]bool, len(have))
	if len(tails) > 0 {
		for i := tails[len(tails)-1]; i >= 0; i = before[i] {
			stays[i] = true
		}
	}
	return stays
}

// write renders edits as lines of iptables-restore: those that must come before stale rules go, and those that remove stale rules.
func (e edits) write(chain string, first, last *strings.Builder) {
	for _, r := range e.moved {
		fmt.Fprintf(first, "-D %s %s\n", chain, r)
	}
	for _, in := range e.inserts {
		if in.last {
			fmt.Fprintf(first, "-A %s %s\n", chain, in.rule)
		} else {
			fmt.Fprintf(first, "-I %s %d %s\n", chain, in.at, in.rule)
		}
	}
	for _, r := range e.stale {
		fmt.Fprintf(last, "-D %s %s\n", chain, r)
	}
}

// script returns the input for iptables-restore that turns have into want; empty when there is nothing to do. have holds our own
// chains and the built-in ones, want only our own ones; hooks are our jumps in the built-in ones.
//
// Both tables change in a transaction of their own, so their order matters: refusals come before the rules that deliver are
// taken away, and go after those that deliver are there.
//
// keep are chains of nat that stay although they are not wanted, with the rules that jump to them: a Service whose new rules are
// not in place yet may need them.
func script(have, want, hooks tables, keep map[string]bool) string {
	var s strings.Builder
	natFirst, natLast := changes(have.nat, want.nat, hooks.nat, keep)
	filterFirst, filterLast := changes(have.filter, want.filter, hooks.filter, nil)
	writeTable(&s, "filter", filterFirst)
	writeTable(&s, "nat", natFirst+natLast)
	writeTable(&s, "filter", filterLast)
	return s.String()
}

func writeTable(s *strings.Builder, table, lines string) {
	if lines != "" {
		fmt.Fprintf(s, "*%s\n%sCOMMIT\n", table, lines)
	}
}

func changes(have, want, hooks chains, keep map[string]bool) (before, after string) {
	var first, last strings.Builder
	names := slices.Sorted(maps.Keys(want))
	for _, chain := range names {
		if _, ok := have[chain]; !ok {
			fmt.Fprintf(&first, ":%s - [0:0]\n", chain)
		}
	}
	for _, chain := range names {
		diff(have[chain], want[chain], func(rule string) bool { return keep[target(rule)] }).write(chain, &first, &last)
	}
	for _, chain := range slices.Sorted(maps.Keys(hooks)) {
		writeHooks(&first, chain, have[chain], hooks[chain])
	}
	var stale []string
	for chain := range have {
		if _, ok := want[chain]; !ok && strings.HasPrefix(chain, prefix) && !keep[chain] {
			stale = append(stale, chain)
		}
	}
	slices.Sort(stale)
	for _, chain := range stale {
		fmt.Fprintf(&last, "-F %s\n", chain)
	}
	for _, chain := range stale {
		fmt.Fprintf(&last, "-X %s\n", chain)
	}
	return first.String(), last.String()
}

// writeHooks puts our jumps to the front of a built-in chain, unless they are all there, in order, and ahead of kube-proxy's:
// between us and others, whoever came first stays first, as two that both insist would never rest.
func writeHooks(s *strings.Builder, chain string, have, hooks []string) {
	if hooksRight(have, hooks) {
		return
	}
	for _, r := range have {
		if strings.HasPrefix(target(r), prefix) {
			fmt.Fprintf(s, "-D %s %s\n", chain, r)
		}
	}
	for i, r := range hooks {
		fmt.Fprintf(s, "-I %s %d %s\n", chain, i+1, r)
	}
}

func hooksRight(have, hooks []string) bool {
	var ours []string
	for _, r := range have {
		switch t := target(r); {
		case strings.HasPrefix(t, prefix):
			ours = append(ours, r)
		case strings.HasPrefix(t, "KUBE-") && len(ours) < len(hooks):
			return false
		}
	}
	return slices.Equal(ours, hooks)
}

// target returns where a rule jumps or what it does, without options.
func target(rule string) string {
	_, t, _ := strings.Cut(rule, " -j ")
	if rest, ok := strings.CutPrefix(rule, "-j "); ok {
		t = rest
	}
	t, _, _ = strings.Cut(t, " ")
	return t
}
