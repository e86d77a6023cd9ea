package nftables

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/bits"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/e2e/cases"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/seeds"
	"github.com/landfall-lb/landfall/proxy/nft"
	"github.com/landfall-lb/landfall/proxy/nft/expr"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// packet is the first one of a connection on its way through the node's rules.
type packet struct {
	src, dst    netip.AddrPort
	in          string // interface; "" for packets of the node itself
	protocol    protocol
	mark        uint32
	originalDst netip.AddrPort // before translation; valid once translated
	written     netip.Addr     // the destination before rules wrote another; valid once written
	masquerade  bool
	registers   [64]byte
	drawn       [16]draw // registers that hold a drawn number
	priority    uint32
	established bool // the connection has been answered, and its handshake is over
	invalid     bool // conntrack finds it so, and chains of type nat do not see it
}

// draw is a number that can be any of so many, from first on; none if of is 0.
type draw struct{ of, first uint32 }

// way is one way that a packet may take, with its probability. Ways part where rules draw.
type way struct {
	packet
	verdict string // "" when no rule has decided
	chance  float64
}

// walker runs the expressions of rules as the kernel would. It stops the test at anything that it
// does not know.
type walker struct {
	t      *testing.T
	family lb.Family
	rules  ruleset
	sets   map[string]map[string]string
	// numbers are the numbers that are in maps of backends, by the rest of the key.
	numbers map[string][]uint32
	local   []netip.Addr // the node's own addresses
}

func newWalker(t *testing.T, rules ruleset, local []netip.Addr, services ...*service) *walker {
	w := &walker{t: t, family: rules.family, rules: rules, sets: map[string]map[string]string{},
		numbers: map[string][]uint32{}, local: local}
	for _, s := range rules.sets {
		w.sets[s.name] = map[string]string{}
	}
	shared := map[common]bool{}
	for _, s := range services {
		for _, e := range s.shared {
			if !shared[e] {
				w.insert(entry{element: e.element()})
			}
			shared[e] = true
		}
		for _, p := range s.parts {
			for _, e := range p.entries {
				w.insert(e)
			}
		}
	}
	return w
}

func (w *walker) insert(e entry) {
	set, ok := w.sets[e.setName()]
	if !ok {
		w.t.Fatalf("there is no set %s", e.setName())
	}
	key := string(e.appendKey(nil, w.family))
	if _, twice := set[key]; twice {
		w.t.Fatalf("element %+v is there twice", e)
	}
	set[key] = string(e.appendValue(nil, w.family))
	if e.set <= setMixedSCTP {
		rest := e.setName() + key[:len(key)-4]
		w.numbers[rest] = append(w.numbers[rest], e.number)
	}
}

// fate walks a new connection through all hooks and returns where it may end and with which
// probability: at a backend, "reject", "drop" or "none" when nothing matched; and whether it is
// masqueraded.
func (w *walker) fate(p packet) (shares map[string]float64, masqueraded bool) {
	first := "prerouting"
	if p.in == "" {
		first = "output"
	}
	shares = map[string]float64{}
	translated := []way{{packet: p, chance: 1}}
	if !p.invalid {
		translated = w.chain(first, translated[0])
		late := map[string]string{"prerouting": chainUnserved, "output": chainUnservedOutput}[first]
		for i, each := range translated {
			if each.verdict == "" { // what is translated is done with NAT
				translated[i] = w.chain(late, each)[0]
			}
		}
	}
	for _, before := range translated {
		second := []string{"forward", "postrouting"}
		switch isLocal := slices.Contains(w.local, before.dst.Addr()); {
		case isLocal && p.in != "":
			second = []string{"input"}
		case isLocal:
			second = []string{"postrouting", "input"}
		case p.in == "":
			second = []string{"postrouting"}
		}
		if p.invalid {
			second = []string{"forward"}
		}
		ways := []way{before}
		for _, hook := range second {
			var next []way
			for _, each := range ways {
				if slices.Contains([]string{"", "accept", "dnat", "masquerade"}, each.verdict) {
					each.verdict = ""
					next = append(next, w.chain(hook, each)...)
				} else {
					next = append(next, each)
				}
			}
			ways = next
		}
		for _, end := range ways {
			switch {
			case end.verdict == "drop", end.verdict == "reject":
				shares[end.verdict] += end.chance
			case !end.originalDst.IsValid() && end.dst != p.dst:
				w.t.Fatalf("what was sent to %s goes on to %s, untranslated", p.dst, end.dst)
			case !end.originalDst.IsValid():
				shares["none"] += end.chance
			default:
				shares[end.dst.String()] += end.chance
				masqueraded = masqueraded || end.masquerade
			}
		}
	}
	return shares, masqueraded
}

// establish walks a later packet of a connection that was sent to a backend.
func (w *walker) establish(p packet, backend netip.AddrPort) {
	p.originalDst, p.dst, p.established, p.priority = p.dst, backend, true, 7
	for _, end := range w.chain("remember-postrouting", way{packet: p, chance: 1}) {
		if end.verdict != "" || end.priority != 0 {
			w.t.Fatalf("after the handshake: %+v", end)
		}
	}
}

// chain returns the ways out of a chain: decided, or fallen through.
func (w *walker) chain(name string, p way) []way {
	c, ok := w.rules.chain(name)
	if !ok {
		return []way{p}
	}
	ways, out := []way{p}, []way(nil)
	for _, r := range c.rules {
		var next []way
		for _, each := range ways {
			for _, after := range w.rule(r, each) {
				switch {
				case after.verdict == "return":
					after.verdict = ""
					out = append(out, after)
				case after.verdict != "":
					out = append(out, after)
				default:
					next = append(next, after)
				}
			}
		}
		if ways = next; len(ways) == 0 {
			break
		}
	}
	return append(out, ways...)
}

// rule runs one rule. Ways that the rule does not match come out undecided.
func (w *walker) rule(r nft.Rule, p way) []way {
	ways, out := []way{p}, []way(nil)
	for _, e := range r.Exprs {
		var next []way
		for _, each := range ways {
			matched, missed := w.expr(e, each)
			out = append(out, missed...)
			for _, m := range matched {
				if m.verdict != "" {
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

func at(register uint32) uint32 {
	if register >= unix.NFT_REG32_00 {
		return 4 * (register - unix.NFT_REG32_00)
	}
	return 16 * (register - unix.NFT_REG_1)
}

func (p *way) store(register uint32, data []byte) {
	at := at(register)
	n := (len(data) + 3) &^ 3
	clear(p.registers[at : int(at)+n])
	copy(p.registers[at:], data)
	for i := range n / 4 {
		p.drawn[int(at)/4+i] = draw{}
	}
}

func (p *way) load(register, length uint32) []byte {
	at := at(register)
	return bytes.Clone(p.registers[at : at+length])
}

// expr runs one expression and returns the ways that go on with the rule, and those that leave it.
func (w *walker) expr(e expr.Any, p way) (matched, missed []way) {
	is := func(ok bool) ([]way, []way) {
		if ok {
			return []way{p}, nil
		}
		return nil, []way{p}
	}
	switch e := e.(type) {
	case *expr.Payload:
		if e.Write {
			return []way{w.write(e, p)}, nil
		}
		p.store(e.DestRegister, w.payload(e, p))
	case *expr.Meta:
		return w.meta(e, p), nil
	case *expr.Ct:
		if !e.SourceRegister { // what is set is the label that the client is remembered
			p.store(e.Register, w.ct(e, p))
		}
	case *expr.Fib:
		kind, addr := uint32(unix.RTN_UNICAST), p.dst.Addr()
		if e.Source {
			addr = p.src.Addr()
		}
		if slices.Contains(w.local, addr) {
			kind = unix.RTN_LOCAL
		}
		p.store(e.Register, expr.Host32(kind))
	case *expr.Bitwise:
		data := p.load(e.SourceRegister, e.Len)
		for i := range data {
			data[i] = data[i]&e.Mask[i] ^ e.Xor[i]
		}
		p.store(e.DestRegister, data)
	case *expr.Cmp:
		equal := bytes.Equal(p.load(e.Register, uint32(len(e.Data))), e.Data)
		return is(equal == (e.Op == expr.CmpOpEq))
	case *expr.Numgen:
		p.store(e.Register, []byte{0})
		p.drawn[at(e.Register)/4] = draw{e.Modulus, e.Offset}
	case *expr.Hash:
		h := jhash(p.load(e.SourceRegister, e.Length), e.Seed)
		p.store(e.DestRegister, expr.Host32(uint32(uint64(h)*uint64(e.Modulus)>>32)+e.Offset))
	case *expr.Lookup:
		return w.lookup(e, p)
	case *expr.DNAT:
		length := uint32(nft.AddressBytes(w.family))
		to, _ := netip.AddrFromSlice(p.load(e.RegAddr, length))
		p.originalDst, p.dst = p.original(), netip.AddrPortFrom(to, binary.BigEndian.Uint16(p.load(e.RegPort, 2)))
		p.verdict = "dnat"
	case *expr.Masq:
		p.masquerade, p.verdict = true, "masquerade"
	case *expr.Reject:
		p.verdict = "reject"
	case *expr.Dynset:
		s, _ := w.rules.set(e.SetName)
		key, value := p.load(e.SrcRegKey, length(w.family, s.key)), p.load(e.SrcRegData, length(w.family, s.value))
		switch _, there := w.sets[e.SetName][string(key)]; {
		case e.Operation == dynsetDelete:
			delete(w.sets[e.SetName], string(key))
		case !there: // else only its time begins anew
			w.sets[e.SetName][string(key)] = string(value)
		}
	case *expr.Immediate:
		p.store(e.Register, e.Data)
	case *expr.Verdict:
		return w.verdict(e, p), nil
	default:
		w.t.Fatalf("unknown %T", e)
	}
	return []way{p}, nil
}

// write changes the packet's destination address.
func (w *walker) write(e *expr.Payload, p way) way {
	v4 := e.Offset == 16 && e.Len == 4 && e.Checksum && e.ChecksumOffset == 10
	if v6 := e.Offset == 24 && e.Len == 16 && !e.Checksum; w.family == lb.IPv6 && !v6 || w.family == lb.IPv4 && !v4 ||
		e.Base != expr.PayloadBaseNetworkHeader || !e.PseudoHeader {
		w.t.Fatalf("unknown %+v", e)
	}
	if !p.written.IsValid() {
		p.written = p.dst.Addr()
	}
	to, _ := netip.AddrFromSlice(p.load(e.SourceRegister, e.Len))
	p.dst = netip.AddrPortFrom(to, p.dst.Port())
	return p
}

// original returns where the packet was sent to.
func (p packet) original() netip.AddrPort {
	switch {
	case p.originalDst.IsValid():
		return p.originalDst
	case p.written.IsValid():
		return netip.AddrPortFrom(p.written, p.dst.Port())
	}
	return p.dst
}

func (w *walker) payload(e *expr.Payload, p way) []byte {
	port := func(a netip.AddrPort) []byte { return binary.BigEndian.AppendUint16(nil, a.Port()) }
	v6 := w.family == lb.IPv6
	switch {
	case e.Base == expr.PayloadBaseTransportHeader && e.Offset == 2 && e.Len == 2:
		return port(p.dst)
	case e.Base == expr.PayloadBaseTransportHeader && e.Offset == 0 && e.Len == 2:
		return port(p.src)
	case e.Base != expr.PayloadBaseNetworkHeader:
	case !v6 && e.Offset == 12 && e.Len == 4, v6 && e.Offset == 8 && e.Len == 16:
		return p.src.Addr().AsSlice()
	case !v6 && e.Offset == 16 && e.Len == 4, v6 && e.Offset == 24 && e.Len == 16:
		return p.dst.Addr().AsSlice()
	}
	w.t.Fatalf("unknown %+v", e)
	return nil
}

func (w *walker) meta(e *expr.Meta, p way) []way {
	switch {
	case e.Key == expr.MetaKeyMARK && e.SourceRegister:
		p.mark = binary.NativeEndian.Uint32(p.load(e.Register, 4))
	case e.Key == expr.MetaKeyMARK:
		p.store(e.Register, expr.Host32(p.mark))
	case e.Key == expr.MetaKeyPRIORITY && e.SourceRegister:
		p.priority = binary.NativeEndian.Uint32(p.load(e.Register, 4))
	case e.Key == expr.MetaKeyPRIORITY:
		p.store(e.Register, expr.Host32(p.priority))
	case e.Key == expr.MetaKeyL4PROTO:
		p.store(e.Register, []byte{byte(p.protocol)})
	case e.Key == expr.MetaKeyIIFNAME:
		p.store(e.Register, append([]byte(p.in), make([]byte, unix.IFNAMSIZ-len(p.in))...))
	default:
		w.t.Fatalf("unknown %+v", e)
	}
	return []way{p}
}

func (w *walker) ct(e *expr.Ct, p way) []byte {
	switch e.Key {
	case expr.CtKeySTATE:
		if p.invalid {
			return expr.Host32(expr.CtStateBitINVALID)
		}
		return expr.Host32(expr.CtStateBitNEW)
	case expr.CtKeySTATUS:
		status := uint32(0)
		if p.originalDst.IsValid() {
			status |= statusTranslated
		}
		if p.established {
			status |= statusSeenReply | statusAssured
		}
		return expr.Host32(status)
	case expr.CtKeyLABELS:
		return make([]byte, 16)
	case unix.NFT_CT_SRC_IP, unix.NFT_CT_SRC_IP6:
		if e.Reply {
			return p.dst.Addr().AsSlice()
		}
		return p.src.Addr().AsSlice()
	case unix.NFT_CT_DST_IP, unix.NFT_CT_DST_IP6:
		return p.original().Addr().AsSlice()
	case unix.NFT_CT_PROTO_DST:
		return binary.BigEndian.AppendUint16(nil, p.originalDst.Port())
	}
	w.t.Fatalf("unknown %+v", e)
	return nil
}

func (w *walker) verdict(e *expr.Verdict, p way) []way {
	switch e.Kind {
	case expr.VerdictDrop:
		p.verdict = "drop"
		return []way{p}
	case expr.VerdictAccept:
		p.verdict = "accept"
		return []way{p}
	case expr.VerdictReturn:
		p.verdict = "return"
		return []way{p}
	case expr.VerdictJump:
		return w.chain(e.Chain, p)
	case expr.VerdictGoto:
		ways := w.chain(e.Chain, p)
		for i := range ways {
			if ways[i].verdict == "" {
				ways[i].verdict = "return"
			}
		}
		return ways
	}
	w.t.Fatalf("unknown %+v", e)
	return nil
}

// lookup looks a key up. Where the key holds a drawn number, all numbers are tried.
func (w *walker) lookup(e *expr.Lookup, p way) (matched, missed []way) {
	s, ok := w.rules.set(e.SetName)
	if !ok {
		w.t.Fatalf("there is no set %s", e.SetName)
	}
	size := length(w.family, s.key)
	key := p.load(e.SourceRegister, size)
	word := (at(e.SourceRegister) + size) / 4
	if d := p.drawn[word-1]; d.of > 0 {
		left := p.chance
		for _, n := range w.numbers[e.SetName+string(key[:size-4])] {
			if n < d.first || n >= d.first+d.of {
				continue
			}
			copy(key[size-4:], expr.Host32(n))
			hit := p
			hit.store(e.DestRegister, []byte(w.sets[e.SetName][string(key)]))
			hit.chance = p.chance / float64(d.of)
			left -= hit.chance
			matched = append(matched, hit)
		}
		if p.chance = left; len(matched) < int(d.of) {
			missed = append(missed, p)
		}
		return matched, missed
	}
	value, found := w.sets[e.SetName][string(key)]
	if e.IsDestRegSet && found {
		p.store(e.DestRegister, []byte(value))
	}
	if found == !e.Invert {
		return []way{p}, nil
	}
	return nil, []way{p}
}

// jhash is the kernel's (include/linux/jhash.h).
func jhash(k []byte, seed uint32) uint32 {
	word := func(i int) uint32 { return binary.NativeEndian.Uint32(k[i:]) }
	a := uint32(0xdeadbeef) + uint32(len(k)) + seed
	b, c := a, a
	for len(k) > 12 {
		a, b, c = a+word(0), b+word(4), c+word(8)
		a = (a - c) ^ bits.RotateLeft32(c, 4)
		c += b
		b = (b - a) ^ bits.RotateLeft32(a, 6)
		a += c
		c = (c - b) ^ bits.RotateLeft32(b, 8)
		b += a
		a = (a - c) ^ bits.RotateLeft32(c, 16)
		c += b
		b = (b - a) ^ bits.RotateLeft32(a, 19)
		a += c
		c = (c - b) ^ bits.RotateLeft32(b, 4)
		b += a
		k = k[12:]
	}
	rest := make([]byte, 12)
	if copy(rest, k) == 0 {
		return c
	}
	a, b, c = a+binary.LittleEndian.Uint32(rest), b+binary.LittleEndian.Uint32(rest[4:]),
		c+binary.LittleEndian.Uint32(rest[8:])
	c = (c ^ b) - bits.RotateLeft32(b, 14)
	a = (a ^ c) - bits.RotateLeft32(c, 11)
	b = (b ^ a) - bits.RotateLeft32(a, 25)
	c = (c ^ b) - bits.RotateLeft32(b, 16)
	a = (a ^ c) - bits.RotateLeft32(c, 4)
	b = (b ^ a) - bits.RotateLeft32(a, 14)
	c = (c ^ b) - bits.RotateLeft32(b, 24)
	return c
}

// walkOf renders a case for the walker.
func walkOf(t *testing.T, w cases.World, c cases.Case) *walker {
	service, config := serviceOf(w, c)
	service = service.Only(w.Family)
	rendered := newRenderer(w.Family, config).service(service.Key, service)
	return newWalker(t, newRuleset(w.Family, config, neededBy(rendered)), c.LocalAddresses(w), rendered)
}

// neededBy returns the numbered sets that Services need.
func neededBy(services ...*service) needs {
	c := newClaims(lb.IPv4, nil)
	for _, s := range services {
		c.count(s, 1)
	}
	return c.needed()
}

// serviceOf plans a case as the mode does.
func serviceOf(w cases.World, c cases.Case) (plan.Service, plan.Config) {
	service, config := c.Plan(w)
	return service, WithAddresses(config, []netip.Addr{w.Node, w.Node2})
}

// packetOf returns the first packet of the case's connection.
func packetOf(w cases.World, c cases.Case) packet {
	protocol, _ := protocolOf(c.Transport())
	return packet{src: netip.AddrPortFrom(c.Source(w), 40000), dst: c.Destination(w), in: c.Interface(),
		protocol: protocol, invalid: c.Invalid}
}

// Every number of backends is spread evenly by random draws.
func TestRandomSpreadIsEven(t *testing.T) {
	t.Parallel()
	for _, n := range []int{1, 2, 3, 4, 5, 7, 8, 9, 33, 100, seeds.Of(600, 1500)} {
		w := cases.WorldOf(lb.IPv4)
		c := cases.Case{From: "pod", To: "cluster"}
		walk := walkOf(t, w, c)
		at := frontend{addr: addressOf(w.ClusterIP), port: cases.ServicePort, protocol: tcp}
		group := group{id: 77, backends: targets(n)}
		walk.sets["groups"] = map[string]string{}
		walk.insert(entry{element: element{set: setGroups, frontend: at}, to: target{group: 77}})
		for _, e := range group.part(0).entries {
			walk.insert(e)
		}
		shares, _ := walk.fate(packetOf(w, c))
		if len(shares) != n && len(shares) != n+1 {
			t.Errorf("%d backends: %d ends", n, len(shares))
		}
		for end, share := range shares {
			switch even := 1 / float64(n); {
			case end == "reject" && share > 1e-9:
				t.Errorf("%d backends: %g of connections find none", n, share)
			case end != "reject" && (share < even*(1-1e-8) || share > even*(1+1e-8)):
				t.Errorf("%d backends: %s gets %.12f, want %.12f", n, end, share, even)
			}
		}
	}
}

func manyBackends(family lb.Family, n int) []lb.Backend {
	first := addr("10.1.0.0")
	if family == lb.IPv6 {
		first = addr("fd00:1::")
	}
	var all []lb.Backend
	for range n {
		all = append(all, lb.Backend{Addr: netip.AddrPortFrom(first, 8080), Ready: true})
		first = first.Next()
	}
	return all
}

// A ruleset has the same number of rules whatever there is to serve, but for the affinity timeouts.
func TestRulesAreConstant(t *testing.T) {
	for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		rules := newRuleset(family, seedConfig, nil)
		var counts []string
		total := 0
		for _, c := range rules.chains {
			total += len(c.rules)
			counts = append(counts, fmt.Sprintf("%s %d", c.name, len(c.rules)))
		}
		if total > 260 || len(rules.chains) > 45 {
			t.Errorf("%d rules in %d chains: %s", total, len(rules.chains), strings.Join(counts, ", "))
		}
		t.Logf("%s: %d rules, %d chains, %d sets", family, total, len(rules.chains), len(rules.sets))
	}
}
