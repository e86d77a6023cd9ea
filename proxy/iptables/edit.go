package iptables

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// edits turn the rules of one chain into others. Rules that are right stay untouched: they are
// never removed, and their counters go on.
type edits struct {
	// moved have to go first, as they come back elsewhere in the chain.
	moved []string
	// inserts come next, in this order.
	inserts []insert
	// stale go last.
	stale []string
	// kept are not wanted and stay.
	kept bool
}

type insert struct {
	at   int // position, from 1
	last bool
	rule string
}

// diff returns the edits from have to want. Rules in want must be distinct; those in have for which
// keep is true stay where they are.
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
		case !wanted:
			e.kept = true
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

// longestRise marks the rules of have that stay: a longest choice of wanted ones that stand in the
// wanted order. Rules that stand there twice, which is not our doing, are left out, as a deletion
// names its rule by its text.
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

// write renders edits as lines of iptables-restore: those that must come before stale rules go, and
// those that remove stale rules.
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

// result returns what have becomes.
func (e edits) result(have []string) []string {
	without := func(rules, gone []string) []string {
		rules = slices.Clone(rules)
		for _, r := range gone {
			if i := slices.Index(rules, r); i >= 0 {
				rules = slices.Delete(rules, i, i+1)
			}
		}
		return rules
	}
	rules := without(have, e.moved)
	for _, in := range e.inserts {
		rules = slices.Insert(rules, in.at-1, in.rule)
	}
	return without(rules, e.stale)
}

// script returns the input for iptables-restore that turns have into want, empty when there is
// nothing to do, and what is there then. have holds our own chains and the built-in ones, want only
// our own ones; hooks are our jumps in the built-in ones. All may be parts: chains that are in
// neither of have and want are not looked at.
//
// Both tables change in a transaction of their own, so their order matters: refusals come before
// the rules that deliver are taken away, and go after those that deliver are there.
//
// keep is what stays in nat although it is not wanted.
func script(have, want, hooks tables, keep leftovers) (string, tables) {
	var s strings.Builder
	nat, filter := changes(have.nat, want.nat, hooks.nat, keep),
		changes(have.filter, want.filter, hooks.filter, leftovers{})
	writeTable(&s, "filter", filter.first.String())
	writeTable(&s, "nat", nat.first.String()+nat.last.String())
	writeTable(&s, "filter", filter.last.String())
	return s.String(), tables{nat: nat.now, filter: filter.now}
}

func writeTable(s *strings.Builder, table, lines string) {
	if lines != "" {
		fmt.Fprintf(s, "*%s\n%sCOMMIT\n", table, lines)
	}
}

// changeset is how a table is changed: what must come before stale rules go, what removes them, and
// what is there then.
type changeset struct {
	first, last strings.Builder
	now         chains
}

func changes(have, want, hooks chains, keep leftovers) *changeset {
	c := &changeset{now: chains{}}
	for chain, rules := range have {
		if !strings.HasPrefix(chain, prefix) {
			c.now[chain] = rules
		}
	}
	keepRule := func(rule string) bool { return keep.chains[target(rule)] || keep.ways[target(rule)] }
	names := slices.Sorted(maps.Keys(want))
	for _, chain := range names {
		if _, ok := have[chain]; !ok {
			fmt.Fprintf(&c.first, ":%s - [0:0]\n", chain)
		}
	}
	for _, chain := range names {
		if ofOne(chain) {
			c.edit(chain, have[chain], want[chain], nil) // nobody else's rules have a place there
		} else {
			c.edit(chain, have[chain], want[chain], keepRule)
		}
	}
	for _, chain := range slices.Sorted(maps.Keys(hooks)) {
		c.now[chain] = writeHooks(&c.first, chain, have[chain], hooks[chain])
	}
	var stale []string
	for _, chain := range slices.Sorted(maps.Keys(have)) {
		_, wanted := want[chain]
		switch {
		case wanted || !strings.HasPrefix(chain, prefix):
		case keep.chains[chain]:
			c.now[chain] = have[chain]
		case keep.ways[chain]:
			c.edit(chain, have[chain], nil, keepRule)
		default:
			stale = append(stale, chain)
		}
	}
	for _, chain := range stale {
		fmt.Fprintf(&c.last, "-F %s\n", chain)
	}
	for _, chain := range stale {
		fmt.Fprintf(&c.last, "-X %s\n", chain)
	}
	return c
}

// edit turns the rules of a chain into others.
func (c *changeset) edit(chain string, have, want []string, keep func(rule string) bool) {
	e := diff(have, want, keep)
	e.write(chain, &c.first, &c.last)
	c.now[chain] = want
	if e.kept {
		c.now[chain] = e.result(have)
	}
}

// leftovers are what a predecessor wrote for Services whose own rules are not in place yet.
type leftovers struct {
	chains map[string]bool // stay as they are, with the rules that jump to them
	ways   map[string]bool // lead there from chains that are wanted, and keep only such rules
}

// newLeftovers returns what stays of have so that the given chains, which are not wanted, are still
// reached.
func newLeftovers(have, want chains, keep map[string]bool) leftovers {
	l := leftovers{chains: keep, ways: map[string]bool{}}
	if len(keep) == 0 {
		return l
	}
	leads := func(r string) bool { return keep[target(r)] || l.ways[target(r)] }
	for found := true; found; { // another release may have led there over more chains
		found = false
		for chain, rules := range have {
			_, wanted := want[chain]
			if !wanted && !keep[chain] && !l.ways[chain] && strings.HasPrefix(chain, prefix) && !ofOne(chain) &&
				slices.ContainsFunc(rules, leads) {
				l.ways[chain], found = true, true
			}
		}
	}
	return l
}

// writeHooks puts our jumps to the front of a built-in chain, unless they are all there, in order,
// and ahead of kube-proxy's: between us and others, whoever came first stays first, as two that
// both insist would never rest. It returns what the chain holds then.
func writeHooks(s *strings.Builder, chain string, have, hooks []string) []string {
	if hooksRight(have, hooks) {
		return have
	}
	for _, r := range have {
		if strings.HasPrefix(target(r), prefix) {
			fmt.Fprintf(s, "-D %s %s\n", chain, r)
		}
	}
	for i, r := range hooks {
		fmt.Fprintf(s, "-I %s %d %s\n", chain, i+1, r)
	}
	others := slices.DeleteFunc(slices.Clone(have), func(r string) bool { return strings.HasPrefix(target(r), prefix) })
	return append(slices.Clone(hooks), others...)
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

// target returns where a rule jumps or what it does, without options. What a comment says does not count.
func target(rule string) string {
	for rule != "" {
		var word string
		switch word, rule = cutWord(rule); word {
		case "-j":
			word, _ = cutWord(rule)
			return word
		case "--comment":
			_, rule = cutWord(rule)
		}
	}
	return ""
}

// cutWord cuts off the first word of a rule. What is in quotes is one word.
func cutWord(rule string) (word, rest string) {
	quoted := false
	for i := 0; i < len(rule); i++ {
		switch c := rule[i]; {
		case c == '\\' && quoted:
			i++
		case c == '"':
			quoted = !quoted
		case c == ' ' && !quoted:
			return rule[:i], rule[i+1:]
		}
	}
	return rule, ""
}
