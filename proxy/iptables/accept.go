package iptables

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// Where a firewall drops what the node forwards, Landfall's own tables cannot change that: a packet
// has to be accepted by each table that it passes. In the chain FORWARD of table filter, of either
// variant of iptables, a rule of ours can. It stands in front, as a rule behind one that takes all
// packets, such as ufw's "reject routed", does nothing.

const (
	chainBuiltInForward = "FORWARD"
	acceptComment       = "landfall: accept what Services forward"
)

// Accepter keeps the chain plan.ChainAccept as it should be. One goroutine uses it.
type Accepter struct {
	// written is what was to be written to a chain last, and as what the kernel's programs print it;
	// some print a rule in another way than we do.
	written map[string][2][]string
}

// LegacyForward returns the chains FORWARD of iptables-legacy, of the families whose table filter is
// in use in the network namespace of the calling thread. Nft does not show them.
func LegacyForward(ctx context.Context) (chains []plan.ForwardChain, err error) {
	for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		used, err := legacyTable(family, "filter")
		if err != nil || !used {
			if err != nil {
				return nil, err
			}
			continue
		}
		c := plan.ForwardChain{Family: nftFamily(family), Table: "filter", Name: chainBuiltInForward, Legacy: true}
		saved, err := readFilter(ctx, c)
		if err != nil {
			return nil, err
		}
		c.Drops, c.Rules = saved.drops, saved.forward()
		chains = append(chains, c)
	}
	return chains, nil
}

// legacyTable reports whether iptables-legacy has a table. It asks the kernel, as iptables-legacy
// itself would create the table.
func legacyTable(family lb.Family, table string) (bool, error) {
	file := "/proc/thread-self/net/ip_tables_names"
	if family == lb.IPv6 {
		file = "/proc/thread-self/net/ip6_tables_names"
	}
	names, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) { // the kernel's module is not loaded
		return false, nil
	}
	return slices.Contains(strings.Fields(string(names)), table), err
}

func nftFamily(family lb.Family) string {
	if family == lb.IPv6 {
		return "ip6"
	}
	return "ip"
}

// Set has a chain FORWARD accept what is wanted, or removes what is ours there, and reports whether
// anything had to be written.
func (a *Accepter) Set(ctx context.Context, c plan.ForwardChain, want plan.Acceptance) (changed bool, err error) {
	if len(want.Networks) == 0 && !c.HasOwn() {
		return false, nil
	}
	commands, err := programs(ctx, c)
	if err != nil {
		return false, err
	}
	saved, err := readFilter(ctx, c)
	if err != nil {
		return false, err
	}
	if len(want.Networks) == 0 {
		delete(a.written, c.String())
		return true, commands.Restore(ctx, saved.removal())
	}
	rules := acceptRules(want)
	c.Rules = saved.forward()
	_, accepted := c.Dropping()
	last := a.written[c.String()]
	if accepted && slices.Equal(last[0], rules) && slices.Equal(last[1], saved.rules[plan.ChainAccept]) {
		return false, nil
	}
	if !accepted || !slices.Equal(rules, saved.rules[plan.ChainAccept]) {
		changed = true
		if err := commands.Restore(ctx, saved.acceptance(rules)); err != nil {
			return true, err
		}
		if saved, err = readFilter(ctx, c); err != nil {
			return true, err
		}
	}
	if a.written == nil {
		a.written = map[string][2][]string{}
	}
	a.written[c.String()] = [2][]string{rules, saved.rules[plan.ChainAccept]}
	return changed, nil
}

// acceptRules renders the rules in the form in which iptables-save prints them: connections whose
// destination was translated to a pod, in both directions; those between pods, and those that other
// nodes send to pods, with their replies.
func acceptRules(want plan.Acceptance) (rules []string) {
	add := func(match string) { rules = append(rules, match+" -j ACCEPT") }
	for _, network := range want.Networks {
		add("-m conntrack --ctstate DNAT --ctreplsrc " + network.String())
		for _, other := range want.Networks {
			add(fmt.Sprintf("-s %s -d %s", network, other))
		}
		for _, direction := range []string{"-s", "-d"} {
			add(direction + " " + network.String() + " -m conntrack --ctstate RELATED,ESTABLISHED")
		}
	}
	for _, node := range want.Nodes {
		for _, network := range want.Networks {
			add(fmt.Sprintf("-s %s -d %s", netip.PrefixFrom(node, node.BitLen()), network))
		}
	}
	return rules
}

// CleanupForward removes what an Accepter has written, in both families and variants.
func CleanupForward(ctx context.Context) error {
	var errs []error
	for _, family := range []string{"ip", "ip6"} {
		for _, legacy := range []bool{false, true} {
			c := plan.ForwardChain{Family: family, Table: "filter", Name: chainBuiltInForward, Legacy: legacy}
			if err := cleanupForward(ctx, c); err != nil {
				errs = append(errs, fmt.Errorf("%s: %w", c, err))
			}
		}
	}
	return errors.Join(errs...)
}

func cleanupForward(ctx context.Context, c plan.ForwardChain) error {
	commands, err := programs(ctx, c)
	if errors.Is(err, exec.ErrNotFound) {
		return nil // so nothing of ours is there
	} else if err != nil {
		return err
	}
	saved := filterTable{}
	// Without a table, unlike with -t filter, it prints only those that exist.
	if err := commands.Save(ctx, func(out io.Reader) (err error) {
		saved, err = parseFilter(out)
		return err
	}); err != nil {
		return err
	}
	if _, ours := saved.rules[plan.ChainAccept]; !ours {
		return nil
	}
	return commands.Restore(ctx, saved.removal())
}

// programs returns those of the variant that made a chain.
func programs(ctx context.Context, c plan.ForwardChain) (Commands, error) {
	name, variant := "iptables", "-nft"
	if c.Family == "ip6" {
		name = "ip6tables"
	}
	if c.Legacy {
		variant = "-legacy"
	}
	commands := Commands{save: name + variant + "-save", restore: name + variant + "-restore"}
	_, err := exec.LookPath(commands.save)
	if err == nil {
		return commands, nil
	}
	plain := Commands{save: name + "-save", restore: name + "-restore"}
	if _, missing := exec.LookPath(plain.save); missing == nil && plain.Legacy(ctx) == c.Legacy {
		return plain, nil
	}
	return commands, err
}

// filterTable is the table filter of one variant and family.
type filterTable struct {
	drops bool // the policy of FORWARD
	// rules are those of each chain, as they are printed.
	rules map[string][]string
}

func readFilter(ctx context.Context, c plan.ForwardChain) (t filterTable, err error) {
	commands, err := programs(ctx, c)
	if err != nil {
		return t, err
	}
	err = commands.run(ctx, "", func(out io.Reader) (err error) {
		t, err = parseFilter(out)
		return err
	}, commands.save, "-t", "filter")
	return t, err
}

// maxFilterRules bounds how many rules of a table filter are read.
const maxFilterRules = 100_000

// parseFilter reads the table filter of what iptables-save prints.
func parseFilter(out io.Reader) (filterTable, error) {
	t := filterTable{rules: map[string][]string{}}
	in, n := "", 0
	scanner := bufio.NewScanner(out)
	scanner.Buffer(nil, maxLine)
	for scanner.Scan() {
		line := scanner.Text()
		name, rest, _ := strings.Cut(line[min(1, len(line)):], " ")
		switch {
		case strings.HasPrefix(line, "#"):
			if strings.Contains(line, "`filter'") && strings.Contains(line, "is incompatible") {
				return t, fmt.Errorf("iptables-save: %s", strings.Trim(line, "# "))
			}
		case strings.HasPrefix(line, "*"):
			in = line[1:]
		case line == "COMMIT":
			in = ""
		case in != "filter":
		case strings.HasPrefix(line, ":"):
			t.rules[name] = nil
			t.drops = t.drops || name == chainBuiltInForward && strings.HasPrefix(rest, "DROP")
		case strings.HasPrefix(line, "-A "):
			chain, rule, _ := strings.Cut(rest, " ")
			t.rules[chain] = append(t.rules[chain], rule)
			if n++; n > maxFilterRules {
				return t, fmt.Errorf("iptables-save: table filter has more than %d rules", maxFilterRules)
			}
		}
	}
	if err := scanner.Err(); err != nil {
		return t, fmt.Errorf("iptables-save: %w", err)
	}
	if in != "" {
		return t, fmt.Errorf("iptables-save: the output ends within table %s", in)
	}
	return t, nil
}

// forward returns what the rules of all chains do.
func (t filterTable) forward() map[string][]plan.ForwardRule {
	all := map[string][]plan.ForwardRule{}
	for chain, rules := range t.rules {
		for _, r := range rules {
			all[chain] = append(all[chain], t.read(r))
		}
	}
	return all
}

// read says what a rule does, as far as that is known.
func (t filterTable) read(text string) (r plan.ForwardRule) {
	words := split(text)
	for i := 0; i < len(words); i++ {
		next := ""
		if i+1 < len(words) {
			next = words[i+1]
		}
		negated := i > 0 && words[i-1] == "!"
		switch word := words[i]; word {
		case "-m":
			if next == "comment" && i+2 < len(words) && words[i+2] == "--comment" {
				i += 2
			} else {
				r.Conditional = true
			}
			i++
		case "-j", "-g":
			if _, chain := t.rules[next]; chain {
				r.To, r.Goto = next, word == "-g"
			} else {
				r.Verdict = plan.VerdictOf(next)
			}
			return r // the others are options of the target
		default:
			r.Conditional = true
			if !negated {
				condition(&r, word, next)
			}
		}
	}
	return r
}

// condition notes what is known of a match.
func condition(r *plan.ForwardRule, option, value string) {
	switch option {
	case "-i", "-o":
		if name, any := strings.CutSuffix(value, "+"); any {
			value = name + "*"
		}
		r.Interfaces = append(r.Interfaces, value)
	case "-p":
		r.ICMP = r.ICMP || slices.Contains([]string{"icmp", "icmpv6", "ipv6-icmp"}, strings.ToLower(value))
	case "--ctstate", "--state":
		known := true
		for state := range strings.SplitSeq(value, ",") {
			known = known && (state == "RELATED" || state == "ESTABLISHED")
		}
		r.Established = r.Established || known
	}
}

// split cuts a rule into its words. A comment with spaces is in quotes.
func split(rule string) (words []string) {
	var word strings.Builder
	quoted, escaped, some := false, false, false
	for _, c := range rule {
		switch {
		case escaped:
			escaped = false
			word.WriteRune(c)
		case c == '\\' && quoted:
			escaped = true
		case c == '"':
			quoted, some = !quoted, true
		case c == ' ' && !quoted:
			if some {
				words = append(words, word.String())
			}
			word.Reset()
			some = false
		default:
			word.WriteRune(c)
			some = true
		}
	}
	if some {
		words = append(words, word.String())
	}
	return words
}

// acceptance returns the input for iptables-restore that writes our chain, and puts the jump to it
// in front of all other rules.
func (t filterTable) acceptance(rules []string) string {
	var s strings.Builder
	fmt.Fprintf(&s, "*filter\n:%s - [0:0]\n", plan.ChainAccept) // flushes it
	t.unhook(&s)
	fmt.Fprintf(&s, "-I %s 1 %s\n", chainBuiltInForward, rule{comment: acceptComment, target: plan.ChainAccept}.hook())
	for _, r := range rules {
		fmt.Fprintf(&s, "-A %s %s\n", plan.ChainAccept, r)
	}
	s.WriteString("COMMIT\n")
	return s.String()
}

// removal returns the input that removes our chain and the jumps to it.
func (t filterTable) removal() string {
	var s strings.Builder
	s.WriteString("*filter\n")
	if _, ours := t.rules[plan.ChainAccept]; ours {
		fmt.Fprintf(&s, ":%s - [0:0]\n", plan.ChainAccept)
		t.unhook(&s)
		fmt.Fprintf(&s, "-X %s\n", plan.ChainAccept)
	}
	s.WriteString("COMMIT\n")
	return s.String()
}

// unhook writes the removal of all jumps to our chain.
func (t filterTable) unhook(s *strings.Builder) {
	for _, r := range t.rules[chainBuiltInForward] {
		if t.read(r).To == plan.ChainAccept {
			fmt.Fprintf(s, "-D %s %s\n", chainBuiltInForward, r)
		}
	}
}
