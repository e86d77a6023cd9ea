package iptables

import (
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/landfall-lb/landfall/internal/lb"
)

// packet is the first one of a connection on its way through the node's rules.
type packet struct {
	src, dst netip.AddrPort
	in       string // interface; "" for packets of the node itself
	protocol lb.Protocol
	mark     bool
	dnat     netip.AddrPort
	invalid  bool // conntrack finds it so, and nat does not see it
}

// walker interprets rules as iptables-save prints them. It stops the test at anything that it does
// not know.
type walker struct {
	t     *testing.T
	rules tables
	hooks tables
	local []netip.Addr // the node's own addresses
	marks string
}

// end is where one way through the rules ends. Ways part where rules pick at random.
type end struct {
	p       packet
	verdict string // "" when no rule decided
}

// fate walks a new connection through all hooks and returns where it may end: a backend, "reject",
// "drop" or "none" when nothing matched; and whether it is masqueraded.
func (w walker) fate(p packet) (ends []string, masqueraded bool) {
	first, second := "PREROUTING", "FORWARD"
	if p.in == "" {
		first, second = "OUTPUT", "OUTPUT"
	}
	translated := []end{{p: p}}
	if !p.invalid {
		translated = w.chain(w.hooks.nat, w.rules.nat, first, p)
	}
	for _, e := range translated {
		to := e.p.dst
		if e.p.dnat.IsValid() {
			to = e.p.dnat
		}
		e.p.dst = to
		hooks := []string{second}
		switch isLocal := slices.Contains(w.local, to.Addr()); {
		case isLocal && p.in != "":
			hooks = []string{"INPUT"}
		case isLocal:
			hooks = []string{"OUTPUT", "INPUT"}
		}
		verdict := ""
		for _, hook := range hooks {
			for _, f := range w.chain(w.hooks.filter, w.rules.filter, hook, e.p) {
				if verdict == "" && f.verdict != "accept" {
					verdict = f.verdict
				}
			}
		}
		switch {
		case verdict != "":
			ends = append(ends, verdict)
			continue
		case !e.p.dnat.IsValid():
			ends = append(ends, "none")
			continue
		}
		ends = append(ends, to.String())
		for _, f := range w.chain(w.hooks.nat, w.rules.nat, "POSTROUTING", e.p) {
			masqueraded = masqueraded || f.verdict == "masquerade"
		}
	}
	slices.Sort(ends)
	return slices.Compact(ends), masqueraded
}

// chain runs p through a chain and returns all ways out of it.
func (w walker) chain(hooks, rules chains, name string, p packet) []end {
	list, ok := rules[name]
	if !ok {
		if list, ok = hooks[name]; !ok {
			w.t.Fatalf("a rule jumps to %s, which does not exist", name)
		}
	}
	ways, ends := []packet{p}, []end(nil)
	for _, r := range list {
		var next []packet
		for _, p := range ways {
			matches, maybe := w.matches(r, p)
			if !matches || maybe {
				next = append(next, p)
			}
			if !matches {
				continue
			}
			for _, e := range w.target(hooks, rules, r, p) {
				if e.verdict == "" {
					next = append(next, e.p)
				} else {
					ends = append(ends, e)
				}
			}
		}
		ways = next
	}
	for _, p := range ways {
		ends = append(ends, end{p: p})
	}
	for i, e := range ends {
		if e.verdict == "return" {
			ends[i].verdict = ""
		}
	}
	return ends
}

func (w walker) target(hooks, rules chains, r string, p packet) []end {
	_, action, _ := strings.Cut(" "+r, " -j ")
	fields := strings.Fields(action)
	switch fields[0] {
	case "ACCEPT", "DROP", "REJECT", "RETURN", "MASQUERADE":
		return []end{{p, strings.ToLower(fields[0])}}
	case "DNAT":
		p.dnat = netip.MustParseAddrPort(fields[2])
		return []end{{p, "dnat"}}
	case "MARK":
		p.mark = fields[2] == w.marks+"/"+w.marks
		return []end{{p: p}}
	}
	return w.chain(hooks, rules, fields[0], p)
}

// matches reports whether the rule matches, and whether that is left to chance.
func (w walker) matches(r string, p packet) (matches, maybe bool) {
	rest := strings.Fields(stripComment(r))
	not := false
	take := func() string {
		s := rest[0]
		rest = rest[1:]
		return s
	}
	require := func(ok bool) bool {
		ok = ok != not
		not = false
		return ok
	}
	for {
		ok := true
		switch word := take(); word {
		case "!":
			not = true
			continue
		case "-s":
			ok = require(netip.MustParsePrefix(take()).Contains(p.src.Addr()))
		case "-d":
			ok = require(masked(take(), p.dst.Addr()))
		case "-i":
			name := take()
			if wild, isWild := strings.CutSuffix(name, "+"); isWild {
				ok = require(strings.HasPrefix(p.in, wild))
			} else {
				ok = require(p.in == name)
			}
		case "-p":
			ok = require(p.protocol.Lower() == take())
		case "-m":
			take()
		case "--dport":
			first, last, isRange := strings.Cut(take(), ":")
			if !isRange {
				last = first
			}
			port := int(p.dst.Port())
			ok = require(atoi(w.t, first) <= port && port <= atoi(w.t, last))
		case "--dst-type":
			take() // LOCAL
			ok = require(slices.Contains(w.local, p.dst.Addr()) || p.dst.Addr().IsLoopback())
		case "--src-type":
			take()
			ok = require(slices.Contains(w.local, p.src.Addr()) || p.src.Addr().IsLoopback())
		case "--mark":
			take()
			ok = require(p.mark)
		case "--ctstate":
			states := strings.Split(take(), ",")
			ok = require(slices.Contains(states, "NEW") && !p.invalid || slices.Contains(states, "INVALID") && p.invalid ||
				slices.Contains(states, "DNAT") && p.dnat.IsValid())
		case "--mode":
			take()
		case "--probability":
			take()
			maybe = true
		case "--rcheck": // the client may be known
			maybe = true
		case "--set", "--reap", "--rsource":
		case "--seconds", "--name", "--mask":
			take()
		case "-j":
			return true, maybe
		default:
			w.t.Fatalf("rule %q: what is %s?", r, word)
		}
		if !ok {
			return false, false
		}
	}
}

// masked reports whether addr is what a rule matches, which may be an address with a mask of any
// form.
func masked(match string, addr netip.Addr) bool {
	at, mask, _ := strings.Cut(match, "/")
	bits, err := netip.ParseAddr(mask)
	if err != nil {
		return netip.MustParsePrefix(match).Contains(addr)
	}
	want, have, by := netip.MustParseAddr(at).As16(), addr.As16(), bits.As16()
	for i := range by {
		if addr.Is4() && i < 12 {
			continue
		}
		if have[i]&by[i] != want[i] {
			return false
		}
	}
	return bits.Is4() == addr.Is4()
}

func atoi(t *testing.T, s string) int {
	n, err := strconv.Atoi(s)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func stripComment(r string) string {
	before, rest, ok := strings.Cut(r, `--comment "`)
	if !ok {
		return r
	}
	_, after, _ := strings.Cut(rest, `"`)
	return before + after
}
