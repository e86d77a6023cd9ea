package nftables

import (
	"net"
	"net/netip"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/nft"
	"github.com/landfall-lb/landfall/proxy/nft/expr"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// field is a part of a packet or of a flow that keys are made of.
type field uint8

const (
	fieldDestination field = iota
	fieldSource
	fieldProtocol
	fieldPort // the destination port
	fieldSourcePort
	fieldOriginalSource // as the client sent it
	fieldOriginalDestination
	fieldOriginalPort
	fieldBackend // the address that answers
	fieldNumber  // of a backend
	// fieldGroup is the packet's priority. A key can hold what another map has for the packet only if
	// that is put somewhere in between; no other place is free. It is set back before the packet
	// leaves.
	fieldGroup
	fieldSender // the MAC address of the frame
	fieldDevice // the name of an interface
)

// builder makes rules for one family.
type builder struct{ family lb.Family }

func (b builder) rule(comment string, parts ...expr.List) nft.Rule {
	return nft.Rule{Comment: comment, Exprs: expr.Join(parts...)}
}

// words returns how many registers of four bytes a field takes.
func (b builder) words(f field) uint32 {
	switch f {
	case fieldDestination, fieldSource, fieldOriginalSource, fieldOriginalDestination, fieldBackend:
		if b.family == lb.IPv6 {
			return 4
		}
	}
	return 1
}

// load loads a field, starting at the given register of four bytes.
func (b builder) load(f field, word uint32) expr.Any {
	reg := expr.Register(word)
	length := 4 * b.words(f)
	source, destination, ctSource, ctDestination := uint32(12), uint32(16), uint32(unix.NFT_CT_SRC_IP),
		uint32(unix.NFT_CT_DST_IP)
	if b.family == lb.IPv6 {
		source, destination, ctSource, ctDestination = 8, 24, unix.NFT_CT_SRC_IP6, unix.NFT_CT_DST_IP6
	}
	original := func(key uint32) expr.Any { return &expr.Ct{Register: reg, Key: expr.CtKey(key)} }
	switch f {
	case fieldDestination:
		return expr.Load(reg, expr.PayloadBaseNetworkHeader, destination, length)
	case fieldSource:
		return expr.Load(reg, expr.PayloadBaseNetworkHeader, source, length)
	case fieldProtocol:
		return &expr.Meta{Key: expr.MetaKeyL4PROTO, Register: reg}
	case fieldGroup:
		return &expr.Meta{Key: expr.MetaKeyPRIORITY, Register: reg}
	case fieldPort:
		return expr.Load(reg, expr.PayloadBaseTransportHeader, 2, 2)
	case fieldSourcePort:
		return expr.Load(reg, expr.PayloadBaseTransportHeader, 0, 2)
	case fieldSender:
		return expr.Load(reg, expr.PayloadBaseLLHeader, 6, uint32(macBytes))
	case fieldOriginalSource:
		return original(ctSource)
	case fieldOriginalDestination:
		return original(ctDestination)
	case fieldBackend:
		return &expr.Ct{Register: reg, Key: expr.CtKey(ctSource), Reply: true}
	}
	return original(unix.NFT_CT_PROTO_DST)
}

// keyAt loads fields one after the other, and returns the next free register.
func (b builder) keyAt(word uint32, fields ...field) (expr.List, uint32) {
	var list expr.List
	for _, f := range fields {
		list = append(list, b.load(f, word))
		word += b.words(f)
	}
	return list, word
}

// key loads fields as the key of a set.
func (b builder) key(fields ...field) expr.List {
	list, _ := b.keyAt(0, fields...)
	return list
}

// in matches packets whose frontend or group is in the set, or what else the set is of.
func (b builder) in(id setID) expr.List {
	fields := []field{fieldDestination, fieldProtocol, fieldPort}
	switch {
	case id.ofGroup():
		fields = []field{fieldGroup}
	case id.ofAddress():
		fields = fields[:1]
	case id == setHairpin:
		fields = []field{fieldSource, fieldDestination}
	case id == setNodes:
		fields = []field{fieldSender}
	}
	return expr.Join(b.key(fields...), expr.In(setNames[id]))
}

// sourceRanges renders who may connect to a restricted frontend: its group of networks is looked up
// once for each prefix length that some Service uses.
func (b builder) sourceRanges(lengths []uint32) []nft.Rule {
	const word = 1 // behind the group
	rules := []nft.Rule{b.rule("", b.grouped(setSources))}
	for _, length := range lengths {
		key := b.key(fieldGroup, fieldSource)
		if mask := net.CIDRMask(int(length), 8*nft.AddressBytes(b.family)); int(length) < 8*len(mask) {
			key = append(key, &expr.Bitwise{SourceRegister: expr.Register(word), DestRegister: expr.Register(word),
				Len: uint32(len(mask)), Mask: mask, Xor: make([]byte, len(mask))})
		}
		rules = append(rules, b.rule("", key, expr.In(rangesSet(length)), expr.Return()))
	}
	return append(rules, b.rule("", expr.Drop()))
}

// grouped takes the group of the frontend from a map.
func (b builder) grouped(id setID, frontend ...field) expr.List {
	if len(frontend) == 0 {
		frontend = []field{fieldDestination, fieldProtocol, fieldPort}
	}
	return append(b.key(frontend...), b.lookup(setNames[id], 0), storePriority())
}

// lookup replaces the key that starts at a register of four bytes by what the map has for it.
func (b builder) lookup(name string, word uint32) expr.Any {
	return &expr.Lookup{SourceRegister: expr.Register(word), SetName: name, IsDestRegSet: true,
		DestRegister: expr.Register(word)}
}

// dnat sends to the address that a lookup has found, at the port of the frontend's backends.
func (b builder) dnat() expr.List {
	const word = 4 // behind the address
	port, _ := b.keyAt(word, fieldDestination, fieldProtocol, fieldPort)
	return append(port, b.toPort(setPorts, word)...)
}

// toPort sends to the address in the first registers, at the port that a map has for a key.
func (b builder) toPort(ports setID, key uint32) expr.List {
	return expr.List{b.lookup(setNames[ports], key),
		&expr.DNAT{Family: nft.Family(b.family), RegAddr: expr.Reg, RegPort: expr.Register(key)}}
}

// dnatMixed sends to the address and port that a lookup has found.
func (b builder) dnatMixed() expr.List {
	return expr.List{&expr.DNAT{Family: nft.Family(b.family), RegAddr: expr.Reg,
		RegPort: expr.Register(b.words(fieldDestination))}}
}

// numberWord is the register of a number in the key of a map of backends, behind the group.
const numberWord = 1

func (b builder) random(modulus, first uint32) expr.List {
	return expr.List{&expr.Numgen{Register: expr.Register(numberWord), Type: unix.NFT_NG_RANDOM, Modulus: modulus,
		Offset: first}}
}

func (b builder) turn(modulus, first uint32) expr.List {
	return expr.List{&expr.Numgen{Register: expr.Register(numberWord), Type: unix.NFT_NG_INCREMENTAL, Modulus: modulus,
		Offset: first}}
}

// hashWord is the first register for what is hashed, behind the longest key.
const hashWord = 8

func (b builder) source() []field { return []field{fieldSource} }

// hashed draws by a hash of fields (Jenkins's, as the kernel has it).
func (b builder) hashed(fields []field, modulus, first uint32) expr.List {
	list, end := b.keyAt(hashWord, fields...)
	return append(list, &expr.Hash{
		SourceRegister: expr.Register(hashWord), DestRegister: expr.Register(numberWord), Length: 4 * (end - hashWord),
		Modulus: modulus, Seed: plan.HashSeed, Offset: first,
	})
}

// noPriority sets back what held the group.
func noPriority() expr.List {
	return expr.List{&expr.Immediate{Register: expr.Reg, Data: expr.Host32(0)}, storePriority()}
}

func storePriority() expr.Any {
	return &expr.Meta{Key: expr.MetaKeyPRIORITY, SourceRegister: true, Register: expr.Reg}
}

// fromPod matches packets from pods, or, with not, from elsewhere; nil when these cannot be told
// apart.
func (b builder) fromPod(pods plan.Detector, not bool) expr.List {
	op := expr.CmpOpEq
	if not {
		op = expr.CmpOpNeq
	}
	if pods.Interface != "" {
		if prefix, ok := strings.CutSuffix(pods.Interface, "+"); ok {
			return expr.List{&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: expr.Reg},
				expr.Compare(op, []byte(prefix)...)}
		}
		return expr.CameIn(op, pods.Interface)
	}
	for _, p := range pods.Prefixes {
		if lb.FamilyOf(p.Addr()) != b.family {
			continue
		}
		return b.inNetwork(fieldSource, p, op)
	}
	return nil
}

// inNetwork matches packets with an address in a network, or, with CmpOpNeq, elsewhere.
func (b builder) inNetwork(f field, p netip.Prefix, op expr.CmpOp) expr.List {
	network := p.Masked().Addr().AsSlice()
	mask := make([]byte, len(network))
	for i := range p.Bits() {
		mask[i/8] |= 0x80 >> (i % 8)
	}
	list := b.key(f)
	if p.Bits() < p.Addr().BitLen() {
		list = append(list, expr.Keep(mask...))
	}
	return append(list, expr.Compare(op, network...))
}

// unserved renders what happens to connections to addresses of Services that no chain has
// translated. An address that the node itself has is left alone.
func (b builder) unserved(networks []netip.Prefix) []nft.Rule {
	notLocal := expr.List{&expr.Fib{Register: expr.Reg},
		expr.Compare(expr.CmpOpNeq, expr.Host32(unix.RTN_LOCAL)...)}
	rules := []nft.Rule{b.rule("port or protocol that no Service has at a VIP", b.in(setVIPs), notLocal,
		expr.Goto(chainUnservedVIP))}
	for _, p := range networks {
		if lb.FamilyOf(p.Addr()) == b.family {
			rules = append(rules, b.rule("cluster IP that no Service has", b.inNetwork(fieldDestination, p, expr.CmpOpEq),
				notLocal, expr.Drop()))
		}
	}
	return rules
}

// untracked renders the refusal of messages of neighbor discovery and of groups to a VIP: connection tracking leaves
// them out, so chains of type nat do not see them, and the node would route them on.
func (b builder) untracked() nft.Rule {
	return b.rule("neighbor discovery to a VIP", expr.HasBits(expr.State(), expr.CtStateBitUNTRACKED),
		expr.IsProtocol(expr.CmpOpEq, unix.IPPROTO_ICMPV6), b.in(setVIPs), expr.Goto(chainRefuse))
}

// notFromNode matches packets whose source is none of the node's addresses.
func (b builder) notFromNode() expr.List { return b.sourceType(expr.CmpOpNeq) }

// fromNode matches packets that the node itself sends, from one of its addresses. Only these came in at
// no interface, so the kernel looks up no route for those of others.
func (b builder) fromNode() expr.List {
	return append(expr.List{&expr.Meta{Key: expr.MetaKeyIIF, Register: expr.Reg},
		expr.Compare(expr.CmpOpEq, expr.Host32(0)...)}, b.sourceType(expr.CmpOpEq)...)
}

func (b builder) sourceType(op expr.CmpOp) expr.List {
	return expr.List{&expr.Fib{Register: expr.Reg, Source: true}, expr.Compare(op, expr.Host32(unix.RTN_LOCAL)...)}
}

func (b builder) isProtocol(p protocol) expr.List { return expr.IsProtocol(expr.CmpOpEq, byte(p)) }

// unreachable answers that no process listens at the port (RFC 792, RFC 4443 section 3.1).
func (b builder) unreachable() expr.List {
	const icmpPortUnreachable, icmp6PortUnreachable = 3, 4
	if b.family == lb.IPv6 {
		return expr.Refuse(unix.NFT_REJECT_ICMP_UNREACH, icmp6PortUnreachable)
	}
	return expr.Refuse(unix.NFT_REJECT_ICMP_UNREACH, icmpPortUnreachable)
}

// isEchoRequest matches the question of a ping (RFC 792, RFC 4443 section 4.1).
func (b builder) isEchoRequest() expr.List {
	protocol, request := byte(unix.IPPROTO_ICMP), byte(8)
	if b.family == lb.IPv6 {
		protocol, request = unix.IPPROTO_ICMPV6, 128
	}
	return append(expr.IsProtocol(expr.CmpOpEq, protocol),
		expr.Load(expr.Reg, expr.PayloadBaseTransportHeader, 0, 1), expr.Compare(expr.CmpOpEq, request))
}

// redirect sends to an address of the interface where the packet came in.
func redirect() expr.List { return expr.List{&expr.Redir{}} }

func masquerade() expr.List { return expr.List{&expr.Masq{}} }

// Bits of the status of linux/netfilter/nf_conntrack_common.h.
const (
	statusSeenReply  = 1 << 1
	statusAssured    = 1 << 2
	statusTranslated = 1 << 5 // IPS_DST_NAT
)

// rememberedLabel is the bit of the connection's label that is set once its client is remembered.
const rememberedLabel = 76

// isTranslated matches packets of flows whose destination has been translated.
func isTranslated() expr.List {
	return expr.HasBits(&expr.Ct{Register: expr.Reg, Key: expr.CtKeySTATUS}, statusTranslated)
}

func isInvalid() expr.List { return expr.HasBits(expr.State(), expr.CtStateBitINVALID) }

func hasMark(bit int) expr.List {
	mark := expr.Host32(1 << bit)
	return expr.List{loadMark(), expr.Keep(mark...), expr.Compare(expr.CmpOpEq, mark...)}
}

func setMark(bit int) expr.List {
	return expr.List{loadMark(), editMark(^uint32(1<<bit), 1<<bit), storeMark()}
}

func clearMark(bit int) expr.List {
	return expr.List{loadMark(), editMark(^uint32(0), 1<<bit), storeMark()}
}

func loadMark() expr.Any { return &expr.Meta{Key: expr.MetaKeyMARK, Register: expr.Reg} }

func editMark(mask, flip uint32) expr.Any { return expr.Edit(expr.Host32(mask), expr.Host32(flip)) }

func storeMark() expr.Any {
	return &expr.Meta{Key: expr.MetaKeyMARK, SourceRegister: true, Register: expr.Reg}
}
