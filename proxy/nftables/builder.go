package nftables

import (
	"math"
	"net/netip"
	"slices"
	"strings"

	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// exprs are expressions of a rule, in the order in which they run.
type exprs []expr.Any

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
	fieldNumber         // of a backend
	fieldClient         // a hash of the source
	fieldOriginalClient // a hash of the source as the client sent it
)

// builder makes rules for one family.
type builder struct{ family lb.Family }

func (b builder) rule(comment string, parts ...exprs) rule {
	return rule{comment: comment, exprs: slices.Concat(parts...)}
}

// words returns how many registers of four bytes a field takes.
func (b builder) words(f field) uint32 {
	switch f {
	case fieldDestination, fieldSource, fieldOriginalSource, fieldOriginalDestination:
		if b.family == lb.IPv6 {
			return 4
		}
	}
	return 1
}

// register returns the kernel's number of a register of four bytes. Every fourth also has the name
// of the 16 bytes that start there, which is the one that the kernel and nft use.
func register(word uint32) uint32 {
	if word%4 == 0 {
		return unix.NFT_REG_1 + word/4
	}
	return unix.NFT_REG32_00 + word
}

// load loads a field, starting at the given register of four bytes.
func (b builder) load(f field, word uint32) expr.Any {
	reg := register(word)
	length := 4 * b.words(f)
	source, destination, ctSource, ctDestination := uint32(12), uint32(16), uint32(unix.NFT_CT_SRC_IP),
		uint32(unix.NFT_CT_DST_IP)
	if b.family == lb.IPv6 {
		source, destination, ctSource, ctDestination = 8, 24, unix.NFT_CT_SRC_IP6, unix.NFT_CT_DST_IP6
	}
	// direction 0 is the original one
	original := func(key uint32) expr.Any { return &expr.Ct{Register: reg, Key: expr.CtKey(key)} }
	switch f {
	case fieldDestination:
		return &expr.Payload{DestRegister: reg, Base: expr.PayloadBaseNetworkHeader, Offset: destination, Len: length}
	case fieldSource:
		return &expr.Payload{DestRegister: reg, Base: expr.PayloadBaseNetworkHeader, Offset: source, Len: length}
	case fieldProtocol:
		return &expr.Meta{Key: expr.MetaKeyL4PROTO, Register: reg}
	case fieldPort:
		return &expr.Payload{DestRegister: reg, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2}
	case fieldSourcePort:
		return &expr.Payload{DestRegister: reg, Base: expr.PayloadBaseTransportHeader, Offset: 0, Len: 2}
	case fieldOriginalSource:
		return original(ctSource)
	case fieldOriginalDestination:
		return original(ctDestination)
	}
	return original(unix.NFT_CT_PROTO_DST)
}

// keyAt loads fields one after the other, and returns the next free register.
func (b builder) keyAt(word uint32, fields ...field) (exprs, uint32) {
	var list exprs
	for _, f := range fields {
		switch f {
		case fieldClient:
			list = append(list, b.clientHash(fieldSource, word)...)
		case fieldOriginalClient:
			list = append(list, b.clientHash(fieldOriginalSource, word)...)
		default:
			list = append(list, b.load(f, word))
		}
		word += b.words(f)
	}
	return list, word
}

// clientHash loads a hash of an address.
func (b builder) clientHash(of field, word uint32) exprs {
	return exprs{b.load(of, hashWord), &expr.Hash{
		SourceRegister: register(hashWord), DestRegister: register(word), Length: 4 * b.words(of), Modulus: math.MaxUint32,
		Seed: hashSeed,
		Type: expr.HashTypeJenkins,
	}}
}

// key loads fields as the key of a set.
func (b builder) key(fields ...field) exprs {
	list, _ := b.keyAt(0, fields...)
	return list
}

// in matches packets whose frontend is in the set, or what else the set is of.
func (b builder) in(id setID) exprs {
	fields := []field{fieldDestination, fieldProtocol, fieldPort}
	switch id {
	case setClusterIPs, setEcho:
		fields = fields[:1]
	case setHairpin:
		fields = []field{fieldSource, fieldDestination}
	}
	return append(b.key(fields...), &expr.Lookup{SourceRegister: register(0), SetName: plainSets[id]})
}

func (b builder) notFromRange() exprs {
	return append(b.key(fieldDestination, fieldProtocol, fieldPort, fieldSource),
		&expr.Lookup{SourceRegister: register(0), SetName: plainSets[setSourceRanges], Invert: true})
}

// knownClient sends a client that is remembered to its backend.
func (b builder) knownClient(p protocol) rule {
	list := append(b.key(stickyKey(b.family)...), b.lookup(stickyMap(p), 0))
	if b.family == lb.IPv6 {
		port, _ := b.keyAt(b.words(fieldDestination), fieldDestination, fieldPort)
		list = append(append(list, port...), b.lookup(p.String()+"-ports", b.words(fieldDestination)))
	}
	return b.rule("known client", b.isProtocol(p), list, b.dnat())
}

// lookup replaces the key that starts at a register of four bytes by what the map has for it.
func (b builder) lookup(name string, word uint32) expr.Any {
	return &expr.Lookup{SourceRegister: register(word), SetName: name, IsDestRegSet: true, DestRegister: register(word)}
}

// dnat sends to the address and port that lookups have found.
func (b builder) dnat() exprs {
	return exprs{&expr.NAT{
		Type: expr.NATTypeDestNAT, Family: uint32(b.nfproto()), RegAddrMin: register(0),
		RegProtoMin: register(b.words(fieldDestination)),
	}}
}

func (b builder) nfproto() byte {
	if b.family == lb.IPv6 {
		return unix.NFPROTO_IPV6
	}
	return unix.NFPROTO_IPV4
}

// numberWord is the register of a number in the key of a map of backends, behind address and port.
func (b builder) numberWord() uint32 { return b.words(fieldDestination) + 1 }

func (b builder) random(modulus, first uint32) exprs {
	return exprs{&expr.Numgen{Register: register(b.numberWord()), Type: unix.NFT_NG_RANDOM, Modulus: modulus,
		Offset: first}}
}

func (b builder) turn(modulus, first uint32) exprs {
	return exprs{&expr.Numgen{Register: register(b.numberWord()), Type: unix.NFT_NG_INCREMENTAL, Modulus: modulus,
		Offset: first}}
}

// hashSeed is the same on all nodes, so that they agree.
const hashSeed = 0x4c46

// hashWord is the first register for what is hashed, behind the longest key.
const hashWord = 8

func (b builder) source() []field { return []field{fieldSource} }

// hashed draws by a hash of fields (Jenkins's, as the kernel has it).
func (b builder) hashed(fields []field, modulus, first uint32) exprs {
	list, end := b.keyAt(hashWord, fields...)
	return append(list, &expr.Hash{
		SourceRegister: register(hashWord), DestRegister: register(b.numberWord()), Length: 4 * (end - hashWord),
		Modulus: modulus, Seed: hashSeed, Offset: first,
		Type: expr.HashTypeJenkins,
	})
}

// remember notes which backend a client was sent to, in a packet on its way there.
func (b builder) remember(p protocol, seconds uint32) rule {
	gate, _ := b.keyAt(0, fieldOriginalDestination, fieldOriginalPort)
	gate = append(gate, &expr.Lookup{SourceRegister: register(0), SetName: affinitySet(p, seconds)})
	original := map[field]field{
		fieldSource: fieldOriginalSource, fieldClient: fieldOriginalClient, fieldDestination: fieldOriginalDestination,
		fieldPort: fieldOriginalPort,
	}
	var fields []field
	for _, f := range stickyKey(b.family) {
		fields = append(fields, original[f])
	}
	key, end := b.keyAt(0, fields...)
	end = (end + 3) &^ 3 // nft starts values at the next 16 bytes
	value, _ := b.keyAt(end, newSticky(b.family, p).value...)
	update := &expr.Dynset{
		SrcRegKey: register(0), SrcRegData: register(end), SetName: stickyMap(p), Operation: unix.NFT_DYNSET_OP_UPDATE,
		Timeout: seconds2duration(seconds),
	}
	// The port is compared for nft alone, which cannot read the rule back without a word on the
	// protocol.
	return b.rule("", b.isProtocol(p), b.key(fieldPort),
		exprs{&expr.Cmp{Op: expr.CmpOpNeq, Register: register(0), Data: []byte{0, 0}}}, gate, key, value, exprs{update})
}

// fromPod matches packets from pods, or, with not, from elsewhere; nil when these cannot be told
// apart.
func (b builder) fromPod(pods plan.Detector, not bool) exprs {
	op := expr.CmpOpEq
	if not {
		op = expr.CmpOpNeq
	}
	if pods.Interface != "" {
		name := append([]byte(pods.Interface), 0)
		if prefix, ok := strings.CutSuffix(pods.Interface, "+"); ok {
			name = []byte(prefix)
		} else {
			name = append(name, make([]byte, unix.IFNAMSIZ)...)[:unix.IFNAMSIZ]
		}
		return exprs{&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: register(0)},
			&expr.Cmp{Op: op, Register: register(0), Data: name}}
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
func (b builder) inNetwork(f field, p netip.Prefix, op expr.CmpOp) exprs {
	network := p.Masked().Addr().AsSlice()
	mask := make([]byte, len(network))
	for i := range p.Bits() {
		mask[i/8] |= 0x80 >> (i % 8)
	}
	list := b.key(f)
	if p.Bits() < p.Addr().BitLen() {
		list = append(list, &expr.Bitwise{SourceRegister: register(0), DestRegister: register(0), Len: uint32(len(mask)),
			Mask: mask, Xor: make([]byte, len(mask))})
	}
	return append(list, &expr.Cmp{Op: op, Register: register(0), Data: network})
}

// unserved renders the drop of connections to cluster IPs that nobody has translated. An address
// that the node itself has is somebody's.
func (b builder) unserved(networks []netip.Prefix) []rule {
	var rules []rule
	for _, p := range networks {
		if lb.FamilyOf(p.Addr()) == b.family {
			rules = append(rules, b.rule("cluster IP that no Service has", b.inNetwork(fieldDestination, p, expr.CmpOpEq), exprs{
				&expr.Fib{Register: register(0), FlagDADDR: true, ResultADDRTYPE: true},
				&expr.Cmp{Op: expr.CmpOpNeq, Register: register(0), Data: host32(unix.RTN_LOCAL)},
			}, drop()))
		}
	}
	return rules
}

// fromNode matches packets whose source is one of the node's addresses.
func (b builder) fromNode() exprs {
	return exprs{
		&expr.Fib{Register: register(0), FlagSADDR: true, ResultADDRTYPE: true},
		&expr.Cmp{Op: expr.CmpOpEq, Register: register(0), Data: host32(unix.RTN_LOCAL)},
	}
}

func (b builder) isProtocol(p protocol) exprs {
	return exprs{b.load(fieldProtocol, 0), &expr.Cmp{Op: expr.CmpOpEq, Register: register(0), Data: []byte{byte(p)}}}
}

// unreachable answers that nobody listens at the port (RFC 792, RFC 4443 section 3.1).
func (b builder) unreachable() exprs {
	const icmpPortUnreachable, icmp6PortUnreachable = 3, 4
	if b.family == lb.IPv6 {
		return reject(unix.NFT_REJECT_ICMP_UNREACH, icmp6PortUnreachable)
	}
	return reject(unix.NFT_REJECT_ICMP_UNREACH, icmpPortUnreachable)
}

func reject(kind uint32, code uint8) exprs { return exprs{&expr.Reject{Type: kind, Code: code}} }

func drop() exprs { return exprs{&expr.Verdict{Kind: expr.VerdictDrop}} }

func jumpTo(kind expr.VerdictKind, chain string) exprs {
	return exprs{&expr.Verdict{Kind: kind, Chain: chain}}
}

// isEchoRequest matches the question of a ping (RFC 792, RFC 4443 section 4.1).
func (b builder) isEchoRequest() exprs {
	protocol, request := byte(unix.IPPROTO_ICMP), byte(8)
	if b.family == lb.IPv6 {
		protocol, request = unix.IPPROTO_ICMPV6, 128
	}
	return exprs{
		b.load(fieldProtocol, 0), &expr.Cmp{Op: expr.CmpOpEq, Register: register(0), Data: []byte{protocol}},
		&expr.Payload{DestRegister: register(0), Base: expr.PayloadBaseTransportHeader, Offset: 0, Len: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: register(0), Data: []byte{request}},
	}
}

// redirect sends to an address of the interface where the packet came in.
func redirect() exprs { return exprs{&expr.Redir{}} }

func masquerade() exprs { return exprs{&expr.Masq{FullyRandom: true}} }

const statusTranslated = 1 << 5 // IPS_DST_NAT of linux/netfilter/nf_conntrack_common.h

// isTranslated matches packets of flows whose destination has been translated.
func isTranslated() exprs {
	return hasBit(&expr.Ct{Register: register(0), Key: expr.CtKeySTATUS}, statusTranslated)
}

func isInvalid() exprs {
	return hasBit(&expr.Ct{Register: register(0), Key: expr.CtKeySTATE}, expr.CtStateBitINVALID)
}

func hasBit(load expr.Any, bit uint32) exprs {
	return exprs{load, bitwise(bit, 0), &expr.Cmp{Op: expr.CmpOpNeq, Register: register(0), Data: host32(0)}}
}

func hasMark(bit int) exprs {
	return exprs{loadMark(), bitwise(1<<bit, 0),
		&expr.Cmp{Op: expr.CmpOpEq, Register: register(0), Data: host32(1 << bit)}}
}

func setMark(bit int) exprs { return exprs{loadMark(), bitwise(^uint32(1<<bit), 1<<bit), storeMark()} }

func clearMark(bit int) exprs { return exprs{loadMark(), bitwise(^uint32(0), 1<<bit), storeMark()} }

func loadMark() expr.Any { return &expr.Meta{Key: expr.MetaKeyMARK, Register: register(0)} }

func storeMark() expr.Any {
	return &expr.Meta{Key: expr.MetaKeyMARK, SourceRegister: true, Register: register(0)}
}

// bitwise keeps the bits of mask and then flips those of flip.
func bitwise(mask, flip uint32) expr.Any {
	return &expr.Bitwise{SourceRegister: register(0), DestRegister: register(0), Len: 4, Mask: host32(mask),
		Xor: host32(flip)}
}

// host32 returns a number in the byte order of this machine, as the kernel's registers have it.
func host32(n uint32) []byte { return binaryutil.NativeEndian.PutUint32(n) }
