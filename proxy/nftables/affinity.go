package nftables

import (
	"encoding/binary"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/nft"
	"github.com/landfall-lb/landfall/proxy/nft/expr"
)

// recall looks up which backend is remembered for a client, in groups whose places are halved so
// often. The packet's destination holds it in between: with the group it is the key of a set, and
// nft can write a key that holds what a map has only if that is put somewhere.
func (b builder) recall(split uint32) nft.Rule {
	n, first := places(split)
	return b.rule("known client", b.key(fieldGroup), b.hashed(b.source(), n, first),
		expr.List{b.lookup(stickyMap, 0), b.setDestination()}, expr.Jump(chainKnown))
}

// known sends a client to the backend that is remembered for it, if its group still has that; else
// the packet goes on as it came.
func (b builder) known() []nft.Rule {
	const word = 4 // behind the address
	var rules []nft.Rule
	for _, p := range protocols {
		port, _ := b.keyAt(word, fieldOriginalDestination, fieldProtocol, fieldPort)
		rules = append(rules, b.rule("", b.isProtocol(p), b.key(fieldGroup, fieldDestination),
			expr.In(setNames[setAffinity]), b.key(fieldDestination), port, b.toPort(setPorts, word)))
	}
	for _, p := range protocols {
		key, _ := b.keyAt(word, fieldGroup, fieldDestination)
		rules = append(rules, b.rule("ports that differ", b.isProtocol(p), b.key(fieldDestination), key,
			b.toPort(setAffinityPorts, word)))
	}
	return append(rules, b.rule("", b.key(fieldOriginalDestination), expr.List{b.setDestination()}))
}

// dynsetDelete removes an element (NFT_DYNSET_OP_DELETE of linux/netfilter/nf_tables.h).
const dynsetDelete = 2

// forget removes what is remembered for a client: a backend that its group no longer has. What
// packets write only renews the time of an entry that is there.
func (b builder) forget(split uint32) nft.Rule {
	n, first := places(split)
	const end = 4 // of the key; the kernel wants a value, and ignores it
	value, _ := b.keyAt(end, fieldDestination)
	return b.rule("", b.key(fieldGroup), b.hashed(b.source(), n, first), value, expr.List{&expr.Dynset{
		SrcRegKey: expr.Reg, SrcRegData: expr.Register(end), SetName: stickyMap, Operation: dynsetDelete,
	}})
}

// setDestination writes the packet's destination address, with the checksums that it is part of.
func (b builder) setDestination() expr.Any {
	w := expr.Payload{Write: true, SourceRegister: expr.Reg, Base: expr.PayloadBaseNetworkHeader, PseudoHeader: true}
	if b.family == lb.IPv6 {
		w.Offset, w.Len = 24, 16
	} else {
		w.Offset, w.Len, w.Checksum, w.ChecksumOffset = 16, 4, true, 10
	}
	return &w
}

// remembered matches packets of connections to Services whose client has proved to be there, once
// for each connection: in TCP and SCTP after the handshake, so that a flood of forged openings is
// not remembered, and in UDP, which has none, after the first answer.
func (b builder) remembered(udpOnly bool) expr.List {
	proof, protocol := uint32(statusAssured), expr.List(nil)
	if udpOnly {
		proof, protocol = statusSeenReply, b.isProtocol(udp)
	}
	proof |= statusTranslated
	label := make([]byte, 16)
	binary.NativeEndian.PutUint32(label[4*(rememberedLabel/32):], 1<<(rememberedLabel%32))
	return expr.Join(protocol, expr.List{
		&expr.Ct{Register: expr.Reg, Key: expr.CtKeySTATUS}, expr.Keep(expr.Host32(proof)...),
		expr.Compare(expr.CmpOpEq, expr.Host32(proof)...),
		&expr.Ct{Register: expr.Reg, Key: expr.CtKeyLABELS}, expr.Keep(label...),
		expr.Compare(expr.CmpOpEq, make([]byte, 16)...),
		&expr.Immediate{Register: expr.Reg, Data: label},
		&expr.Ct{Register: expr.Reg, Key: expr.CtKeyLABELS, SourceRegister: true},
	})
}

// group takes the group that the client's frontend has in a map. The port is compared for nft
// alone, which cannot read the rule back without a word on the protocol.
func (b builder) originalGroup(id setID, p protocol) expr.List {
	return expr.Join(b.isProtocol(p), b.key(fieldPort), expr.List{expr.Compare(expr.CmpOpNeq, 0, 0)},
		b.grouped(id, fieldOriginalDestination, fieldProtocol, fieldOriginalPort))
}

// remember notes which backend a client of the group got, in groups with this memory.
func (b builder) remember(m memory) nft.Rule {
	n, first := places(splitOf(m))
	const end = 4 // nft starts values at the next 16 bytes
	value, _ := b.keyAt(end, fieldBackend)
	return b.rule("", b.key(fieldGroup), expr.In(rememberSet(m)),
		b.key(fieldGroup), b.hashed([]field{fieldOriginalSource}, n, first), value, expr.List{&expr.Dynset{
			SrcRegKey: expr.Reg, SrcRegData: expr.Register(end), SetName: stickyMap, Operation: unix.NFT_DYNSET_OP_UPDATE,
			Timeout: secondsOf(m),
		}})
}
