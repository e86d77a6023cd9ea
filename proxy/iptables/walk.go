package iptables

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/trace"
)

// WalkedRules are what a Walker runs.
type WalkedRules interface {
	// Chain returns the rules of a chain of the table nat or filter, as iptables-save prints them without
	// the leading -A and chain; nil if there is no such chain.
	Chain(table, chain string) ([]string, error)
	// Recent returns the probability with which a list of the match recent has a client.
	Recent(list string, client netip.Addr) (float64, error)
}

// Walker runs Landfall's rules for a packet, as the kernel does. Rules of others in the built-in chains
// it passes over, and counts.
type Walker struct {
	Family lb.Family
	Rules  WalkedRules
	// Local reports whether an address is the node's own.
	Local func(netip.Addr) bool
	// Foreign counts the rules of others that the packet passed, by table and chain.
	Foreign map[string]int

	hook string
}

// walkedHooks are the hooks at which our rules are, with the priority of the kernel's tables there.
var walkedHooks = []struct {
	hook         uint32
	table, chain string
	priority     int32
}{
	{unix.NF_INET_PRE_ROUTING, "nat", "PREROUTING", unixDestination},
	{unix.NF_INET_LOCAL_OUT, "nat", "OUTPUT", unixDestination},
	{unix.NF_INET_LOCAL_IN, "filter", "INPUT", 0},
	{unix.NF_INET_FORWARD, "filter", "FORWARD", 0},
	{unix.NF_INET_LOCAL_OUT, "filter", "OUTPUT", 0},
	{unix.NF_INET_POST_ROUTING, "nat", "POSTROUTING", -unixDestination},
}

// unixDestination is NF_IP_PRI_NAT_DST of linux/netfilter_ipv4.h.
const unixDestination = -100

// Hooks returns the chains that the kernel enters.
func (w *Walker) Hooks() (all []trace.Chain) {
	for _, b := range walkedHooks {
		all = append(all, trace.Chain{Hook: b.hook, Priority: b.priority, NAT: b.table == "nat",
			Walk: func(p trace.Way) []trace.Way {
				w.hook = strings.ToLower(b.chain)
				ways := w.chain(b.table, b.chain, p, 0)
				for i := range ways {
					if ways[i].Verdict == trace.Return {
						ways[i].Verdict = trace.Undecided
					}
				}
				return ways
			}})
	}
	return all
}

func (w *Walker) step(p *trace.Way, table, chain string, place int, r, does string) {
	_, comment, _ := strings.Cut(r, `--comment "`)
	comment, _, _ = strings.Cut(comment, `"`)
	p.Step(lb.TraceStep{Hook: w.hook, Table: nftFamily(w.Family) + " " + table, Chain: chain, Rule: place + 1,
		Comment: comment, Text: does})
}

const deepest = 16 // jumps

// chain returns the ways out of a chain: decided, or fallen through.
func (w *Walker) chain(table, name string, p trace.Way, depth int) (out []trace.Way) {
	unknown := func(p trace.Way, place int, r, why string) trace.Way {
		p.Verdict = trace.Unknown
		w.step(&p, table, name, place, r, "cannot be evaluated: "+why)
		return p
	}
	rules, err := w.Rules.Chain(table, name)
	switch {
	case err != nil:
		return []trace.Way{unknown(p, -1, "", err.Error())}
	case rules == nil && strings.HasPrefix(name, prefix) || depth > deepest:
		return []trace.Way{unknown(p, -1, "", "there is no such chain")}
	}
	ways := []trace.Way{p}
	for place, r := range rules {
		if !strings.HasPrefix(name, prefix) && !strings.HasPrefix(target(r), prefix) {
			w.Foreign[nftFamily(w.Family)+" "+table+" "+name]++
			continue
		}
		var next []trace.Way
		for _, p := range ways {
			chance, err := w.matches(r, p.Packet)
			if err != nil {
				out = append(out, unknown(p, place, r, err.Error()))
				continue
			}
			if chance < 1 {
				miss := p
				miss.Chance *= 1 - chance
				next = append(next, miss)
			}
			if chance == 0 {
				continue
			}
			hit := p
			hit.Chance *= chance
			for _, e := range w.target(table, name, place, r, hit, depth) {
				if e.Verdict == trace.Undecided {
					next = append(next, e)
				} else {
					out = append(out, e)
				}
			}
		}
		ways = next
	}
	return append(out, ways...)
}

// target runs what a rule does with a packet that it matches.
func (w *Walker) target(table, chain string, place int, r string, p trace.Way, depth int) []trace.Way {
	words := split(r)
	words = words[slices.Index(words, "-j")+1:]
	does := strings.Join(words, " ")
	switch words[0] {
	case "ACCEPT":
		p.Verdict = trace.Accept
	case "DROP":
		p.Verdict = trace.Drop
	case "REJECT":
		p.Verdict = trace.Reject
	case "RETURN":
		p.Verdict = trace.Return
		return []trace.Way{p}
	case "MASQUERADE":
		p.Masqueraded, p.Verdict = true, trace.Masquerade
	case "REDIRECT":
		p.Verdict = trace.Redirect
	case "DNAT":
		to, err := netip.ParseAddrPort(words[len(words)-1])
		if err != nil {
			p.Verdict, does = trace.Unknown, "cannot be evaluated: "+does
			break
		}
		p.Destination, p.Translated, p.Verdict = to, true, trace.Translate
		if chain != chainRelay {
			does = "DNAT to the backend"
			chain = prefixEndpoint + "..." // as the others, of the same Service
		}
	case "MARK":
		value, mask, ok := masks(words[len(words)-1])
		if !ok || words[1] != "--set-xmark" {
			p.Verdict, does = trace.Unknown, "cannot be evaluated: "+does
			break
		}
		p.Mark = p.Mark&^mask ^ value
	default:
		before := p
		// The chains of the endpoints of one Service are told as one.
		r, shown := r, does
		if strings.HasPrefix(words[0], prefixEndpoint) {
			r, shown, place = "", "jump to one of the endpoints' chains", -1
		} else {
			shown = "jump " + shown
		}
		w.step(&p, table, chain, place, r, shown)
		entered := p
		ways := w.chain(table, words[0], p, depth+1)
		for i := range ways {
			if ways[i].Verdict == trace.Return {
				ways[i].Verdict = trace.Undecided
			}
			ways[i].Forget(before, entered)
		}
		return ways
	}
	w.step(&p, table, chain, place, r, does)
	return []trace.Way{p}
}

// masks reads value/mask; without a mask it is all bits.
func masks(s string) (value, mask uint32, ok bool) {
	a, b, two := strings.Cut(s, "/")
	v, err := strconv.ParseUint(a, 0, 32)
	m := uint64(^uint32(0))
	if two && err == nil {
		m, err = strconv.ParseUint(b, 0, 32)
	}
	return uint32(v), uint32(m), err == nil
}

// words that a rule's matches may have and that need no look at the packet, with how many values
// they take.
var passedOver = map[string]int{"-m": 1, "--set": 0, "--reap": 0, "--rsource": 0, "--seconds": 1, "--mask": 1,
	"--mode": 1, "--comment": 1}

// matches returns the probability with which the rule matches: 0 or 1 unless it is left to chance.
func (w *Walker) matches(r string, p trace.Packet) (chance float64, err error) {
	chance = 1
	words := split(r)
	not, recent := false, false
	for i := 0; i < len(words); i++ {
		word, value := words[i], ""
		if i+1 < len(words) {
			value = words[i+1]
		}
		if n, ok := passedOver[word]; ok {
			i += n
			continue
		}
		switch word {
		case "!":
			not = true
			continue
		case "-j":
			return chance, nil
		case "--rcheck":
			recent = true
			continue
		case "--probability":
			share, err := strconv.ParseFloat(value, 64)
			if err != nil {
				return 0, fmt.Errorf("--probability %s", value)
			}
			chance *= share
			i++
			continue
		case "--name":
			if i++; recent {
				client := p.Source.Addr()
				if strings.HasPrefix(value, leases) {
					client = everyoneOf(w.Family)
				}
				share, err := w.Rules.Recent(value, client)
				if err != nil {
					return 0, err
				}
				if chance *= share; chance == 0 {
					return 0, nil
				}
			}
			continue
		}
		ok, known := w.match(word, value, p)
		if !known {
			return 0, fmt.Errorf("the match %s %s", word, value)
		}
		i++
		if ok == not {
			return 0, nil
		}
		not = false
	}
	return 0, fmt.Errorf("it has no target")
}

// match reports whether the packet is as one word of a rule demands, and whether that is known.
func (w *Walker) match(word, value string, p trace.Packet) (ok, known bool) {
	switch word {
	case "-s":
		return masked(value, p.Source.Addr())
	case "-d":
		return masked(value, p.Destination.Addr())
	case "-i":
		if begin, wild := strings.CutSuffix(value, "+"); wild {
			return strings.HasPrefix(p.Interface, begin), true
		}
		return p.Interface == value, true
	case "-p":
		return value == protocolNames[p.Protocol], true
	case "--dport":
		first, last, isRange := strings.Cut(value, ":")
		if !isRange {
			last = first
		}
		from, err := strconv.ParseUint(first, 10, 16)
		to, err2 := strconv.ParseUint(last, 10, 16)
		port := uint64(p.Destination.Port())
		return from <= port && port <= to, err == nil && err2 == nil
	case "--icmp-type", "--icmpv6-type":
		return value == "8" || value == "128", true
	case "--dst-type":
		return w.Local(p.Destination.Addr()), value == "LOCAL"
	case "--src-type":
		return w.Local(p.Source.Addr()), value == "LOCAL"
	case "--mark":
		want, mask, known := masks(value)
		return p.Mark&mask == want, known
	case "--ctstate":
		for state := range strings.SplitSeq(value, ",") {
			ok = ok || state == "NEW" && !p.Invalid || state == "INVALID" && p.Invalid || state == "DNAT" && p.Translated
		}
		return ok, true
	}
	return false, false
}

var protocolNames = map[uint8]string{unix.IPPROTO_TCP: "tcp", unix.IPPROTO_UDP: "udp", unix.IPPROTO_SCTP: "sctp",
	unix.IPPROTO_ICMP: "icmp", unix.IPPROTO_ICMPV6: "ipv6-icmp"}

// masked reports whether addr is what a rule matches, which may be an address with a mask of any
// form, and whether that can be read.
func masked(match string, addr netip.Addr) (ok, known bool) {
	at, mask, two := strings.Cut(match, "/")
	if bits, err := netip.ParseAddr(mask); two && err == nil {
		to, err := netip.ParseAddr(at)
		if err != nil || to.BitLen() != bits.BitLen() {
			return false, false
		}
		want, have, by := to.AsSlice(), addr.AsSlice(), bits.AsSlice()
		if len(have) != len(by) {
			return false, true
		}
		for i := range by {
			if have[i]&by[i] != want[i] {
				return false, true
			}
		}
		return true, true
	}
	if !two {
		to, err := netip.ParseAddr(match)
		return to == addr, err == nil
	}
	network, err := netip.ParsePrefix(match)
	return err == nil && network.Contains(addr), err == nil
}
