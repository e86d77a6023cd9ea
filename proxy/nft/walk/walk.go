// Package walk runs rules of nftables for a packet, expression by expression, as the kernel does.
// Tests run rules with it that are about to be written, landfall-proxy trace those that the kernel
// has.
package walk

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net/netip"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/nft"
	"github.com/landfall-lb/landfall/proxy/nft/expr"
	"github.com/landfall-lb/landfall/proxy/plan"
	"github.com/landfall-lb/landfall/proxy/trace"
)

// Table is what rules are run over.
type Table interface {
	// Chain returns the rules of a chain.
	Chain(name string) (rules []nft.Listed, ok bool)
	// Set returns the shape of a set or map.
	Set(name string) (shape nft.Shape, ok bool)
	// Get looks keys up, and returns nil for each that the set does not have.
	Get(set string, keys ...[]byte) ([]*nft.Element, error)
	// Write is told that a packet adds an element, begins its time anew, or removes it.
	Write(set string, e nft.Element, remove bool)
}

// Walker runs the rules of one table.
type Walker struct {
	Family lb.Family
	Name   string // of the table
	Inet   bool   // a table of both families
	Table  Table
	// Link is the number of the interface where packets come in; 0 if it is not known.
	Link uint32
	// Local reports whether an address is the node's own.
	Local func(netip.Addr) bool
	// SourcePort is set once a rule has read the source port, which the caller may have made up.
	SourcePort bool

	drawn map[string][]nft.Element // what draws have found
	hook  string
	// foreign is set in chains of other programs: what rests on something made up is not evaluated.
	foreign bool
}

// deepest is how deep jumps may be nested, as in the kernel.
const deepest = 16

// way is a way within one chain that the kernel enters.
type way struct {
	trace.Way
	registers [64]byte
	draws     [16]draw // registers that hold a drawn number
	depth     int
	notes     []string // on what the rule so far has matched
}

// draw is a number that can be any of so many, from first on; none if of is 0.
type draw struct{ of, first uint32 }

// Hook walks a packet through a chain that the kernel enters.
func (w *Walker) Hook(hook uint32, chain string, p trace.Way) (out []trace.Way) {
	w.hook = hookNames[hook]
	for _, end := range w.chain(chain, way{Way: p}) {
		if end.Verdict == trace.Return {
			end.Verdict = trace.Undecided
		}
		out = append(out, end.Way)
	}
	return out
}

var hookNames = map[uint32]string{unix.NF_INET_PRE_ROUTING: "prerouting", unix.NF_INET_LOCAL_IN: "input",
	unix.NF_INET_FORWARD: "forward", unix.NF_INET_LOCAL_OUT: "output", unix.NF_INET_POST_ROUTING: "postrouting"}

// HookName returns what nft calls a hook.
func HookName(hook uint32) string { return hookNames[hook] }

// unknown ends a way where the walk cannot tell what the kernel does.
func (w *Walker) unknown(p way, chain string, place int, r nft.Listed, why string) way {
	p.Verdict = trace.Unknown
	w.step(&p, chain, place, r, why)
	return p
}

// step notes a rule that did something.
func (w *Walker) step(p *way, chain string, place int, r nft.Listed, does string) {
	s := lb.TraceStep{Hook: w.hook, Table: w.family() + " " + w.Name, Chain: chain, Rule: place + 1, Handle: r.Handle,
		Comment: r.Comment, Text: strings.Join(append(p.notes[:len(p.notes):len(p.notes)], does), " "), Foreign: w.foreign}
	if w.foreign {
		s.Comment = strings.TrimRight(fmt.Sprintf("rule %d of the chain %s %s, which another program has: %s", s.Rule,
			s.Table, chain, r.Comment), ": ")
	}
	p.Step(s)
}

func (w *Walker) family() string {
	switch {
	case w.Inet:
		return "inet"
	case w.Family == lb.IPv6:
		return "ip6"
	}
	return "ip"
}

// chain returns the ways out of a chain: decided, or fallen through.
func (w *Walker) chain(name string, p way) []way {
	rules, ok := w.Table.Chain(name)
	if p.depth++; !ok || p.depth > deepest {
		return []way{w.unknown(p, name, -1, nft.Listed{}, "there is no such chain")}
	}
	ways, out := []way{p}, []way(nil)
	for place, r := range rules {
		var next []way
		for _, each := range ways {
			each.notes = nil
			for _, after := range w.rule(name, place, r, each) {
				if after.Verdict == trace.Undecided {
					next = append(next, after)
				} else {
					out = append(out, after)
				}
			}
		}
		if ways = next; len(ways) == 0 {
			break
		}
	}
	out = append(out, ways...)
	for i := range out {
		out[i].depth--
	}
	return out
}

// rule runs one rule. Ways that the rule does not match come out undecided.
func (w *Walker) rule(chain string, place int, r nft.Listed, p way) []way {
	ways, out := []way{p}, []way(nil)
	for _, e := range r.Exprs {
		var next []way
		for _, each := range ways {
			matched, missed := w.expr(e, each, func(p *way, does string) { w.step(p, chain, place, r, does) })
			out = append(out, missed...)
			for _, m := range matched {
				if w.foreign && m.Verdict == trace.Unknown && onlyDrops(r) {
					out = append(out, p)
				} else if m.Verdict != trace.Undecided {
					out = append(out, m)
				} else {
					next = append(next, m)
				}
			}
		}
		ways = next
	}
	return append(out, ways...)
}

func at(register uint32) int {
	if register >= unix.NFT_REG32_00 {
		return int(4 * (register - unix.NFT_REG32_00))
	}
	return int(16 * (register - unix.NFT_REG_1))
}

// inside reports whether bytes from a register on are registers.
func inside(register uint32, n int) bool {
	return register >= unix.NFT_REG_1 && n >= 0 && n <= 64 && at(register)+n <= 64
}

func (p *way) store(register uint32, data []byte) {
	n := (len(data) + 3) &^ 3
	if !inside(register, n) {
		return
	}
	clear(p.registers[at(register) : at(register)+n])
	copy(p.registers[at(register):], data)
	clear(p.draws[at(register)/4 : (at(register)+n)/4])
}

func (p *way) load(register uint32, length int) []byte {
	if !inside(register, length) {
		return make([]byte, max(length, 0))
	}
	return bytes.Clone(p.registers[at(register) : at(register)+length])
}

// expr runs one expression and returns the ways that go on with the rule, and those that leave it.
// step notes what it did.
func (w *Walker) expr(e expr.Any, p way, step func(p *way, does string)) (matched, missed []way) {
	is := func(ok bool) ([]way, []way) {
		if ok {
			return []way{p}, nil
		}
		return nil, []way{p}
	}
	unknown := func(why string, args ...any) ([]way, []way) {
		p.Verdict = trace.Unknown
		step(&p, fmt.Sprintf("cannot be evaluated: "+why, args...))
		return []way{p}, nil
	}
	switch {
	case w.foreign && quiet(e):
		return []way{p}, nil
	case w.foreign && !w.certain(e, p):
		return unknown("what it finds is not known of the packet (%T)", e)
	}
	switch e := e.(type) {
	case *expr.Payload:
		if e.Write {
			if !w.write(e, &p) {
				return unknown("it writes into the packet at %d", e.Offset)
			}
			break
		}
		data, ok := w.payload(e, p)
		if !ok {
			return unknown("it reads %d bytes of a header at %d", e.Len, e.Offset)
		}
		p.store(e.DestRegister, data)
	case *expr.Meta:
		if !w.meta(e, &p, step) {
			return unknown("meta %d", e.Key)
		}
	case *expr.Ct:
		if e.SourceRegister { // the label that the client is remembered
			break
		}
		data, ok := w.ct(e, p)
		if !ok {
			return unknown("ct %d", e.Key)
		}
		p.store(e.Register, data)
	case *expr.Fib:
		kind, addr := uint32(unix.RTN_UNICAST), p.Destination.Addr()
		if e.Source {
			addr = p.Source.Addr()
		}
		if w.Local(addr) {
			kind = unix.RTN_LOCAL
		}
		p.store(e.Register, expr.Host32(kind))
	case *expr.Bitwise:
		data := p.load(e.SourceRegister, int(e.Len))
		for i := range data {
			data[i] = data[i]&e.Mask[i] ^ e.Xor[i]
		}
		p.store(e.DestRegister, data)
	case *expr.Cmp:
		return is(compare(e.Op, bytes.Compare(p.load(e.Register, len(e.Data)), e.Data)))
	case *expr.Range:
		have := p.load(e.Register, len(e.FromData))
		between := bytes.Compare(have, e.FromData) >= 0 && bytes.Compare(have, e.ToData) <= 0
		return is(between == (e.Op == expr.CmpOpEq))
	case *expr.Lookup:
		return w.lookup(e, p, unknown)
	case *expr.Immediate:
		p.store(e.Register, e.Data)
	case *expr.Numgen:
		p.store(e.Register, []byte{0})
		if inside(e.Register, 4) {
			p.draws[at(e.Register)/4] = draw{e.Modulus, e.Offset}
		}
	case *expr.Hash:
		h := plan.JenkinsHash(p.load(e.SourceRegister, int(e.Length)), e.Seed)
		p.store(e.DestRegister, expr.Host32(uint32(uint64(h)*uint64(e.Modulus)>>32)+e.Offset))
	case *expr.Dynset:
		shape, ok := w.Table.Set(e.SetName)
		if !ok {
			return unknown("there is no set %s", e.SetName)
		}
		element := nft.Element{Key: p.load(e.SrcRegKey, int(shape.KeyLength))}
		if e.SrcRegData != 0 {
			element.Value = p.load(e.SrcRegData, int(shape.ValueLength))
		}
		w.Table.Write(e.SetName, element, e.Operation == dynsetDelete)
	case *expr.Counter, *expr.FlowOffload:
	case *expr.Segment:
		step(&p, fmt.Sprintf("ask for segments of at most %d bytes", binary.BigEndian.Uint16(p.load(e.Register, 2))))
	case *expr.Limit: // as long as there are few packets
		return is(!e.Over)
	case *expr.Unknown:
		return unknown("expression %s", e.Name)
	default:
		return w.action(e, p, step), nil
	}
	return []way{p}, nil
}

// dynsetDelete removes an element (NFT_DYNSET_OP_DELETE of linux/netfilter/nf_tables.h).
const dynsetDelete = 2

// compare reports whether a comparison holds, by the sign of what is compared with the constant.
func compare(op expr.CmpOp, sign int) bool {
	switch op {
	case expr.CmpOpEq:
		return sign == 0
	case expr.CmpOpNeq:
		return sign != 0
	case expr.CmpOpLt:
		return sign < 0
	case unix.NFT_CMP_LTE:
		return sign <= 0
	case unix.NFT_CMP_GT:
		return sign > 0
	}
	return sign >= 0
}

// action runs an expression that decides, and returns where the packet goes.
func (w *Walker) action(e expr.Any, p way, step func(p *way, does string)) []way {
	does := ""
	switch e := e.(type) {
	case *expr.DNAT:
		to, _ := netip.AddrFromSlice(p.load(e.RegAddr, nft.AddressBytes(w.Family)))
		p.Destination = netip.AddrPortFrom(to, binary.BigEndian.Uint16(p.load(e.RegPort, 2)))
		p.Translated, p.Verdict, does = true, trace.Translate, "dnat to the backend"
	case *expr.Redir:
		p.Verdict, does = trace.Redirect, "redirect to the node itself"
	case *expr.Masq:
		p.Masqueraded, p.Verdict, does = true, trace.Masquerade, "masquerade"
	case *expr.Reject:
		p.Verdict, does = trace.Reject, "reject with ICMP port unreachable"
		if e.Type == unix.NFT_REJECT_TCP_RST {
			does = "reject with a TCP reset"
		}
	case *expr.Dup:
		to, _ := netip.AddrFromSlice(p.load(e.RegAddr, nft.AddressBytes(w.Family)))
		does = fmt.Sprintf("send a copy to the node %s", to)
	case *expr.Verdict:
		return w.verdict(e, p, step)
	default:
		p.Verdict, does = trace.Unknown, fmt.Sprintf("cannot be evaluated: %T", e)
	}
	step(&p, does)
	return []way{p}
}

func (w *Walker) verdict(e *expr.Verdict, p way, step func(p *way, does string)) []way {
	switch e.Kind {
	case expr.VerdictDrop:
		p.Verdict = trace.Drop
		step(&p, "drop")
	case expr.VerdictAccept:
		p.Verdict = trace.Accept
		if len(p.notes) > 0 { // not the rules for everything that is none of theirs
			step(&p, "accept")
		}
	case expr.VerdictReturn:
		p.Verdict = trace.Return
		step(&p, "return")
	case expr.VerdictJump, expr.VerdictGoto:
		does := "jump "
		if e.Kind == expr.VerdictGoto {
			does = "goto "
		}
		before := p.Way
		step(&p, does+e.Chain)
		entered := p.Way
		p.notes = nil
		ways := w.chain(e.Chain, p)
		for i := range ways {
			switch {
			case e.Kind == expr.VerdictJump && ways[i].Verdict == trace.Return:
				ways[i].Verdict = trace.Undecided
			case e.Kind == expr.VerdictGoto && ways[i].Verdict == trace.Undecided:
				ways[i].Verdict = trace.Return
			}
			ways[i].Forget(before, entered) // a chain that did nothing says nothing
		}
		return ways
	default:
		p.Verdict = trace.Unknown
		step(&p, fmt.Sprintf("cannot be evaluated: verdict %d", e.Kind))
	}
	return []way{p}
}

// lookup looks a key up. Where the key holds a drawn number, all numbers are tried.
func (w *Walker) lookup(e *expr.Lookup, p way, unknown func(string, ...any) ([]way, []way)) (matched, missed []way) {
	shape, ok := w.Table.Set(e.SetName)
	if !ok {
		return unknown("there is no set %s", e.SetName)
	}
	size := int(shape.KeyLength)
	key := p.load(e.SourceRegister, size)
	if last := at(e.SourceRegister) + (size+3)&^3 - 4; last >= 0 && last < 64 && p.draws[last/4].of > 0 && size >= 4 {
		return w.draw(e, p, key, p.draws[last/4], unknown)
	}
	found, err := w.Table.Get(e.SetName, key)
	if err != nil {
		return unknown("%v", err)
	}
	hit := found[0] != nil
	if hit == e.Invert {
		return nil, []way{p}
	}
	if e.IsDestRegSet && e.DestRegister == unix.NFT_REG_VERDICT {
		return unknown("a map of verdicts has %s", format(shape.KeyType, key))
	}
	note := "@" + e.SetName + " has " + format(shape.KeyType, key)
	switch {
	case !hit:
		note = "@" + e.SetName + " lacks " + format(shape.KeyType, key)
	case e.IsDestRegSet:
		p.store(e.DestRegister, found[0].Value)
		note = fmt.Sprintf("@%s[%s] is %s", e.SetName, format(shape.KeyType, key), format(shape.ValueType, found[0].Value))
	}
	if !e.IsDestRegSet || e.SetName != "ports" {
		p.notes = append(p.notes[:len(p.notes):len(p.notes)], note)
	}
	return []way{p}, nil
}

// maxDraw is the greatest range of a draw that is tried.
const maxDraw = 1 << 14

// draw tries all numbers of a draw.
func (w *Walker) draw(e *expr.Lookup, p way, key []byte, d draw, unknown func(string, ...any) ([]way, []way)) (
	matched, missed []way) {
	if d.of > maxDraw {
		return unknown("it draws one of %d", d.of)
	}
	prefix := key[:len(key)-4]
	cached := fmt.Sprintf("%s %x %v", e.SetName, prefix, d)
	hits, known := w.drawn[cached]
	if !known {
		keys := make([][]byte, d.of)
		for i := range keys {
			keys[i] = append(bytes.Clone(prefix), expr.Host32(d.first+uint32(i))...)
		}
		found, err := w.Table.Get(e.SetName, keys...)
		if err != nil {
			return unknown("%v", err)
		}
		for _, f := range found {
			if f != nil {
				hits = append(hits, *f)
			}
		}
		if w.drawn == nil {
			w.drawn = map[string][]nft.Element{}
		}
		w.drawn[cached] = hits
	}
	note := fmt.Sprintf("draws one of %d in @%s", d.of, e.SetName)
	left := p
	left.Chance = p.Chance * float64(int(d.of)-len(hits)) / float64(d.of)
	for _, found := range hits {
		hit := p
		hit.Chance = p.Chance / float64(d.of)
		hit.notes = append(p.notes[:len(p.notes):len(p.notes)], note)
		if e.IsDestRegSet {
			hit.store(e.DestRegister, found.Value)
		}
		matched = append(matched, hit)
	}
	if len(hits) < int(d.of) {
		missed = append(missed, left)
	}
	return matched, missed
}
