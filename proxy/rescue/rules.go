package rescue

import (
	"encoding/hex"
	"net/netip"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
)

// Names in the kernel. What belongs to one target ends in its address in hexadecimal, as a name
// takes no colons.
const (
	tableName   = "landfall-rescue"
	chainStrays = "strays"
	setPeers    = "peers"
	setRing     = "ring"
	prefixTo    = "to-"
	prefixVIPs  = "vips-"
	prefixFlows = "flows-"
)

// What has been handed over once goes the same way again, whoever owns the VIP by then, until it
// has been silent for flowTimeout.
const (
	flowTimeout = lb.FlowMemory
	maxFlows    = 131072 // for each target; about 16 MiB if a flood fills it
)

// A packet that goes round a ring has its TTL set by the node that began it, to spent and as many
// more as hands it may pass through: each of them takes one away, as dup does that. At spent it
// goes no further. Only what is outside of spent to spent+maxHops is ever set, so nothing goes
// round for ever, whatever the nodes think of the ring. No client's packets come with such a TTL:
// they begin with 64, 128 or 255 and pass through few routers.
//
// A node may take a packet for one of a former connection of the same ports, which conntrack knows
// for minutes after its end. Outside of the window of that one it is invalid, but it may belong to
// a connection that another node knows, or to one of this node after all. So it goes on, and what
// all of this holds for has the bits of doubt changed: at spent^doubt it goes no further either,
// and nothing is refused.
const (
	spent   = 200
	maxHops = lb.MaxRing
	doubt   = 0x60
)

func name(prefix string, node netip.Addr) string { return prefix + hex.EncodeToString(node.AsSlice()) }

// nodeOf reads back what name has made.
func nodeOf(prefix, text string) (netip.Addr, bool) {
	digits, ok := strings.CutPrefix(text, prefix)
	if !ok {
		return netip.Addr{}, false
	}
	b, err := hex.DecodeString(digits)
	if err != nil {
		return netip.Addr{}, false
	}
	return netip.AddrFromSlice(b)
}

// header says where things are in the IP header of a family.
type header struct {
	family             nftables.TableFamily
	source, dest, size uint32
	hops               uint32 // TTL or hop limit
	address            nftables.SetDatatype
	// registers take a connection's four parts, one after the other.
	registers [4]uint32
}

func headerOf(family lb.Family) header {
	if family == lb.IPv6 {
		return header{nftables.TableFamilyIPv6, 8, 24, 16, 7, nftables.TypeIP6Addr,
			[4]uint32{unix.NFT_REG_1, unix.NFT_REG32_04, unix.NFT_REG32_05, unix.NFT_REG32_09}}
	}
	return header{nftables.TableFamilyIPv4, 12, 16, 4, 8, nftables.TypeIPAddr,
		[4]uint32{unix.NFT_REG_1, unix.NFT_REG32_01, unix.NFT_REG32_02, unix.NFT_REG32_03}}
}

func (h header) table() *nftables.Table { return &nftables.Table{Name: tableName, Family: h.family} }

func (h header) vips(node netip.Addr) *nftables.Set {
	return &nftables.Set{Table: h.table(), Name: name(prefixVIPs, node), KeyType: h.address}
}

func (h header) peers() *nftables.Set {
	return &nftables.Set{Table: h.table(), Name: setPeers, KeyType: nftables.TypeEtherAddr}
}

func (h header) ring() *nftables.Set {
	return &nftables.Set{Table: h.table(), Name: setRing, KeyType: h.address}
}

func (h header) flows(node netip.Addr) *nftables.Set {
	return &nftables.Set{
		Table: h.table(), Name: name(prefixFlows, node), Dynamic: true, HasTimeout: true, Timeout: flowTimeout,
		Size:    maxFlows,
		KeyType: nftables.MustConcatSetType(h.address, nftables.TypeInetService, h.address, nftables.TypeInetService),
	}
}

func (h header) to(node netip.Addr) *nftables.Chain {
	return &nftables.Chain{Table: h.table(), Name: name(prefixTo, node)}
}

// strays is entered after conntrack (-200) has looked at a packet, and before anything is
// translated.
func (h header) strays() *nftables.Chain {
	accept := nftables.ChainPolicyAccept
	return &nftables.Chain{
		Table: h.table(), Name: chainStrays, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookPrerouting,
		Priority: nftables.ChainPriorityMangle, Policy: &accept,
	}
}

type exprs = []expr.Any

func join(parts ...exprs) exprs {
	var all exprs
	for _, part := range parts {
		all = append(all, part...)
	}
	return all
}

func verdict(kind expr.VerdictKind, chain string) exprs {
	return exprs{&expr.Verdict{Kind: kind, Chain: chain}}
}

func load(register uint32, base expr.PayloadBase, offset, length uint32) expr.Any {
	return &expr.Payload{DestRegister: register, Base: base, Offset: offset, Len: length}
}

func compare(op expr.CmpOp, data ...byte) expr.Any {
	return &expr.Cmp{Op: op, Register: unix.NFT_REG_1, Data: data}
}

// span matches what is in (CmpOpEq) or outside of (CmpOpNeq) from to to.
func span(op expr.CmpOp, from, to byte) expr.Any {
	return &expr.Range{Op: op, Register: unix.NFT_REG_1, FromData: []byte{from}, ToData: []byte{to}}
}

func mask(mask ...byte) expr.Any {
	return &expr.Bitwise{SourceRegister: unix.NFT_REG_1, DestRegister: unix.NFT_REG_1, Len: uint32(len(mask)), Mask: mask,
		Xor: make([]byte, len(mask))}
}

func isTCP(op expr.CmpOp) exprs {
	return exprs{&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: unix.NFT_REG_1}, compare(op, unix.IPPROTO_TCP)}
}

// flags matches TCP packets with some (CmpOpNeq) or none (CmpOpEq) of the flags.
func flags(op expr.CmpOp, bits byte) exprs {
	return join(isTCP(expr.CmpOpEq), exprs{load(unix.NFT_REG_1, expr.PayloadBaseTransportHeader, 13, 1), mask(bits),
		compare(op, 0)})
}

// state matches packets in some (CmpOpNeq) or none (CmpOpEq) of the states of conntrack.
func state(op expr.CmpOp, bits uint32) exprs {
	return exprs{&expr.Ct{Key: expr.CtKeySTATE, Register: unix.NFT_REG_1},
		mask(binaryutil.NativeEndian.PutUint32(bits)...), compare(op, 0, 0, 0, 0)}
}

// flow loads what tells a connection from others.
func (h header) flow() exprs {
	return join(isTCP(expr.CmpOpEq), exprs{
		load(h.registers[0], expr.PayloadBaseNetworkHeader, h.source, h.size),
		load(h.registers[1], expr.PayloadBaseTransportHeader, 0, 2),
		load(h.registers[2], expr.PayloadBaseNetworkHeader, h.dest, h.size),
		load(h.registers[3], expr.PayloadBaseTransportHeader, 2, 2),
	})
}

func in(set string) exprs { return exprs{&expr.Lookup{SourceRegister: unix.NFT_REG_1, SetName: set}} }

func notIn(set string) exprs {
	return exprs{&expr.Lookup{SourceRegister: unix.NFT_REG_1, SetName: set, Invert: true}}
}

// dst loads where a packet is for, and ttl its TTL.
func (h header) dst() exprs {
	return exprs{load(unix.NFT_REG_1, expr.PayloadBaseNetworkHeader, h.dest, h.size)}
}

func (h header) ttl() expr.Any { return load(unix.NFT_REG_1, expr.PayloadBaseNetworkHeader, h.hops, 1) }

// setTTL is what nft makes of "ip ttl set" and "ip6 hoplimit set".
func (h header) setTTL(ttl byte) exprs { return h.editTTL(0, ttl) }

// editTTL keeps the bits of the TTL that are in keep, and then changes those in flip.
func (h header) editTTL(keep, flip byte) exprs {
	if h.family == nftables.TableFamilyIPv6 {
		edit := []expr.Any{
			h.ttl(),
			&expr.Bitwise{SourceRegister: unix.NFT_REG_1, DestRegister: unix.NFT_REG_1, Len: 1, Mask: []byte{keep},
				Xor: []byte{flip}},
		}
		if keep == 0 {
			edit = []expr.Any{&expr.Immediate{Register: unix.NFT_REG_1, Data: []byte{flip}}}
		}
		return append(edit, &expr.Payload{OperationType: expr.PayloadWrite, SourceRegister: unix.NFT_REG_1,
			Base: expr.PayloadBaseNetworkHeader, Offset: h.hops, Len: 1})
	}
	const checksum = 10 // in the header
	return exprs{
		load(unix.NFT_REG_1, expr.PayloadBaseNetworkHeader, h.hops, 2),
		&expr.Bitwise{SourceRegister: unix.NFT_REG_1, DestRegister: unix.NFT_REG_1, Len: 2, Mask: []byte{keep, 255},
			Xor: []byte{flip, 0}},
		&expr.Payload{
			OperationType: expr.PayloadWrite, SourceRegister: unix.NFT_REG_1, Base: expr.PayloadBaseNetworkHeader,
			Offset: h.hops, Len: 2,
			CsumType: expr.CsumTypeInet, CsumOffset: checksum,
		},
	}
}

// hopsOf reads back from the rules how many hands a packet may pass through; 0 if no rule says so.
func hopsOf(rules []*nftables.Rule) int {
	for _, r := range rules {
		for i, e := range r.Exprs {
			write, ok := e.(*expr.Payload)
			if !ok || write.OperationType != expr.PayloadWrite || i == 0 {
				continue
			}
			var value []byte
			switch before := r.Exprs[i-1].(type) {
			case *expr.Bitwise:
				value = before.Xor
			case *expr.Immediate:
				value = before.Data
			}
			if len(value) > 0 {
				return int(value[0]) - spent
			}
		}
	}
	return 0
}

// Bits of a TCP header and of conntrack's states (linux/netfilter/nf_conntrack_common.h).
const (
	fin, syn, rst  = 1, 2, 4
	invalid, fresh = 1, 8
)

// strayRules tells strays apart. All but the first packets of connections, which have a SYN, and
// strays are through after one rule.
func (h header) strayRules(nodes []netip.Addr, t table) []exprs {
	accept, drop := verdict(expr.VerdictAccept, ""), verdict(expr.VerdictDrop, "")
	// Conntrack finds the end of an unknown connection invalid, and what is out of the window of a
	// known one.
	doubtful := join(state(expr.CmpOpNeq, invalid), flags(expr.CmpOpEq, fin|rst))
	isSpent := exprs{h.ttl(), compare(expr.CmpOpEq, spent)}
	isSpentInDoubt := exprs{h.ttl(), compare(expr.CmpOpEq, spent^doubt)}
	notInDoubt := exprs{h.ttl(), span(expr.CmpOpNeq, spent^doubt, spent^doubt+maxHops)}
	fromPeer := join(exprs{
		&expr.Meta{Key: expr.MetaKeyIIFTYPE, Register: unix.NFT_REG_1},
		compare(expr.CmpOpEq, binaryutil.NativeEndian.PutUint16(unix.ARPHRD_ETHER)...),
		load(unix.NFT_REG_1, expr.PayloadBaseLLHeader, 6, 6),
	}, in(setPeers))
	rules := []exprs{
		join(state(expr.CmpOpEq, invalid|fresh), accept),
		join(isTCP(expr.CmpOpNeq), accept),
		join(flags(expr.CmpOpNeq, syn), accept),
		{h.ttl(), compare(expr.CmpOpLt, 2), accept[0]},
		join(h.dst(), in(setRing), exprs{h.ttl(), span(expr.CmpOpNeq, spent, spent+maxHops)}, notInDoubt,
			h.setTTL(byte(spent+t.hops))),
		join(doubtful, h.dst(), in(setRing), isSpent, drop),
		join(doubtful, h.dst(), in(setRing), exprs{h.ttl(), span(expr.CmpOpEq, spent, spent+maxHops)}, h.editTTL(255, doubt)),
	}
	for _, node := range nodes { // a former owner is the only one to ask
		rules = append(rules, join(doubtful, h.dst(), in(name(prefixVIPs, node)), notInDoubt, h.setTTL(spent^doubt+1)))
	}
	rules = append(rules,
		join(h.dst(), in(setRing), isSpentInDoubt, drop),
		join(fromPeer, isSpentInDoubt, drop),
		join(doubtful, notInDoubt, accept), // of no VIP
		// Not left to what delivers here: with policy Local and no endpoint that would be silence.
		join(isTCP(expr.CmpOpEq), h.dst(), in(setRing), isSpent, exprs{&expr.Reject{Type: unix.NFT_REJECT_TCP_RST}}),
		join(isSpent, accept),
	)
	for _, node := range nodes {
		rules = append(rules, join(h.flow(), in(name(prefixFlows, node)), verdict(expr.VerdictGoto, name(prefixTo, node))))
	}
	// What another node has handed over and nobody knows is not handed on, lest it go round in
	// circles. Round a ring it goes until it is spent.
	rules = append(rules, join(fromPeer, h.dst(), notIn(setRing), accept))
	for _, node := range nodes {
		if len(t.targets[node]) > 0 {
			rules = append(rules, join(h.dst(), in(name(prefixVIPs, node)), verdict(expr.VerdictGoto, name(prefixTo, node))))
		}
	}
	return rules
}

// toRules hand a packet over as it is: a copy goes out to the node, and this one ends here, so that
// conntrack forgets it.
func (h header) toRules(node netip.Addr) []exprs {
	return []exprs{
		join(
			h.flow(),
			exprs{&expr.Dynset{SrcRegKey: unix.NFT_REG_1, SetName: name(prefixFlows, node),
				Operation: unix.NFT_DYNSET_OP_UPDATE}}),
		{&expr.Counter{}, &expr.Immediate{Register: unix.NFT_REG_1, Data: node.AsSlice()},
			&expr.Dup{RegAddr: unix.NFT_REG_1}},
		verdict(expr.VerdictDrop, ""),
	}
}
