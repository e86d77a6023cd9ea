// Package expr has the expressions that rules of nftables are made of, in the form in which the
// kernel takes them (linux/netfilter/nf_tables.h). An expression works on registers: one loads a
// part of a packet, the next compares it. The first that does not match ends its rule.
package expr

import (
	"time"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/proxy/nfnetlink"
)

// Any is one of the expressions below.
type Any interface {
	// encode appends the attributes, and returns the kernel's name of the expression.
	encode(*nfnetlink.Attributes) (name string)
}

// List is what a rule is made of, in the order in which it runs.
type List = []Any

// Encode returns the expressions as the list that the kernel takes.
func Encode(list List) []byte {
	var a nfnetlink.Attributes
	for _, e := range list {
		var data nfnetlink.Attributes
		name := e.encode(&data)
		a.Nested(unix.NFTA_LIST_ELEM, func() {
			a.Text(unix.NFTA_EXPR_NAME, name)
			a.Bytes(unix.NLA_F_NESTED|unix.NFTA_EXPR_DATA, data)
		})
	}
	return a
}

// PayloadBase is the header that a Payload is in.
type PayloadBase uint32

// The headers.
const (
	PayloadBaseLLHeader        PayloadBase = unix.NFT_PAYLOAD_LL_HEADER
	PayloadBaseNetworkHeader   PayloadBase = unix.NFT_PAYLOAD_NETWORK_HEADER
	PayloadBaseTransportHeader PayloadBase = unix.NFT_PAYLOAD_TRANSPORT_HEADER
)

// Payload loads bytes of a packet into DestRegister, or, with Write, stores those in SourceRegister
// there.
type Payload struct {
	Write                        bool
	DestRegister, SourceRegister uint32
	Base                         PayloadBase
	Offset, Len                  uint32
	// Checksum has the kernel correct the Internet checksum (RFC 1071) at ChecksumOffset of the
	// header.
	Checksum       bool
	ChecksumOffset uint32
	// PseudoHeader has it correct the transport header's checksum too: the bytes are an address.
	PseudoHeader bool
}

func (e *Payload) encode(a *nfnetlink.Attributes) string {
	if e.Write {
		a.Number(unix.NFTA_PAYLOAD_SREG, e.SourceRegister)
	} else {
		a.Number(unix.NFTA_PAYLOAD_DREG, e.DestRegister)
	}
	a.Number(unix.NFTA_PAYLOAD_BASE, uint32(e.Base))
	a.Number(unix.NFTA_PAYLOAD_OFFSET, e.Offset)
	a.Number(unix.NFTA_PAYLOAD_LEN, e.Len)
	if e.Checksum {
		a.Number(unix.NFTA_PAYLOAD_CSUM_TYPE, unix.NFT_PAYLOAD_CSUM_INET)
		a.Number(unix.NFTA_PAYLOAD_CSUM_OFFSET, e.ChecksumOffset)
	}
	if e.PseudoHeader {
		a.Number(unix.NFTA_PAYLOAD_CSUM_FLAGS, unix.NFT_PAYLOAD_L4CSUM_PSEUDOHDR)
	}
	return "payload"
}

// MetaKey is what is known of a packet besides its bytes.
type MetaKey uint32

// Some keys.
const (
	MetaKeyMARK MetaKey = unix.NFT_META_MARK
	// MetaKeyIIF is the index of the interface where a packet came in; 0 for what the host itself sends.
	MetaKeyIIF     MetaKey = unix.NFT_META_IIF
	MetaKeyIIFNAME MetaKey = unix.NFT_META_IIFNAME
	MetaKeyIIFTYPE MetaKey = unix.NFT_META_IIFTYPE
	MetaKeyOIFNAME MetaKey = unix.NFT_META_OIFNAME
	MetaKeyL4PROTO MetaKey = unix.NFT_META_L4PROTO
	// MetaKeyNFPROTO is netfilter's number of the packet's family.
	MetaKeyNFPROTO MetaKey = unix.NFT_META_NFPROTO
	// MetaKeyPRIORITY is the packet's class for queueing disciplines.
	MetaKeyPRIORITY MetaKey = unix.NFT_META_PRIORITY
)

// Meta loads what is known of a packet, or, with SourceRegister, changes it.
type Meta struct {
	Key            MetaKey
	SourceRegister bool
	Register       uint32
}

func (e *Meta) encode(a *nfnetlink.Attributes) string {
	a.Number(unix.NFTA_META_KEY, uint32(e.Key))
	if e.SourceRegister {
		a.Number(unix.NFTA_META_SREG, e.Register)
	} else {
		a.Number(unix.NFTA_META_DREG, e.Register)
	}
	return "meta"
}

// CtKey is what connection tracking knows of a packet.
type CtKey uint32

// Some keys, and states by their bits (linux/netfilter/nf_conntrack_common.h).
const (
	CtKeySTATE  CtKey = unix.NFT_CT_STATE
	CtKeySTATUS CtKey = unix.NFT_CT_STATUS
	CtKeyLABELS CtKey = unix.NFT_CT_LABELS
	CtKeyMARK   CtKey = unix.NFT_CT_MARK
	// CtKeyDIRECTION is 0 for packets of who opened the connection, 1 for answers.
	CtKeyDIRECTION CtKey = unix.NFT_CT_DIRECTION

	CtStateBitINVALID     = 1
	CtStateBitESTABLISHED = 2
	CtStateBitNEW         = 8
	CtStateBitUNTRACKED   = 64
)

// Ct loads what connection tracking knows of a packet, or, with SourceRegister, changes it.
// Addresses and ports are those of the original direction unless Reply is set.
type Ct struct {
	Key                   CtKey
	SourceRegister, Reply bool
	Register              uint32
}

func (e *Ct) encode(a *nfnetlink.Attributes) string {
	a.Number(unix.NFTA_CT_KEY, uint32(e.Key))
	if e.SourceRegister {
		a.Number(unix.NFTA_CT_SREG, e.Register)
	} else {
		a.Number(unix.NFTA_CT_DREG, e.Register)
	}
	direction := byte(0)
	if e.Reply {
		direction = 1
	}
	switch e.Key {
	case unix.NFT_CT_SRC_IP, unix.NFT_CT_DST_IP, unix.NFT_CT_SRC_IP6, unix.NFT_CT_DST_IP6, unix.NFT_CT_PROTO_DST:
		a.Bytes(unix.NFTA_CT_DIRECTION, []byte{direction}) // without it the kernel refuses them
	}
	return "ct"
}

// Fib loads the type that the routing table has for the destination address, or the source address,
// such as unix.RTN_LOCAL.
type Fib struct {
	Register uint32
	Source   bool
}

func (e *Fib) encode(a *nfnetlink.Attributes) string {
	of := uint32(unix.NFTA_FIB_F_DADDR)
	if e.Source {
		of = unix.NFTA_FIB_F_SADDR
	}
	a.Number(unix.NFTA_FIB_DREG, e.Register)
	a.Number(unix.NFTA_FIB_FLAGS, of)
	a.Number(unix.NFTA_FIB_RESULT, unix.NFT_FIB_RESULT_ADDRTYPE)
	return "fib"
}

// Immediate loads a constant.
type Immediate struct {
	Register uint32
	Data     []byte
}

func (e *Immediate) encode(a *nfnetlink.Attributes) string {
	a.Number(unix.NFTA_IMMEDIATE_DREG, e.Register)
	value(a, unix.NFTA_IMMEDIATE_DATA, e.Data)
	return "immediate"
}

// value appends a constant.
func value(a *nfnetlink.Attributes, kind uint16, data []byte) {
	a.Nested(kind, func() { a.Bytes(unix.NFTA_DATA_VALUE, data) })
}

// Bitwise keeps the bits of Mask and then flips those of Xor.
type Bitwise struct {
	SourceRegister, DestRegister uint32
	Len                          uint32
	Mask, Xor                    []byte
}

func (e *Bitwise) encode(a *nfnetlink.Attributes) string {
	a.Number(unix.NFTA_BITWISE_SREG, e.SourceRegister)
	a.Number(unix.NFTA_BITWISE_DREG, e.DestRegister)
	a.Number(unix.NFTA_BITWISE_LEN, e.Len)
	value(a, unix.NFTA_BITWISE_MASK, e.Mask)
	value(a, unix.NFTA_BITWISE_XOR, e.Xor)
	return "bitwise"
}

// CmpOp is a comparison.
type CmpOp uint32

// The comparisons.
const (
	CmpOpEq  CmpOp = unix.NFT_CMP_EQ
	CmpOpNeq CmpOp = unix.NFT_CMP_NEQ
	CmpOpLt  CmpOp = unix.NFT_CMP_LT
)

// Cmp matches if the comparison with Data holds.
type Cmp struct {
	Op       CmpOp
	Register uint32
	Data     []byte
}

func (e *Cmp) encode(a *nfnetlink.Attributes) string {
	a.Number(unix.NFTA_CMP_SREG, e.Register)
	a.Number(unix.NFTA_CMP_OP, uint32(e.Op))
	value(a, unix.NFTA_CMP_DATA, e.Data)
	return "cmp"
}

// Range matches what is between FromData and ToData, both included (CmpOpEq), or is not (CmpOpNeq).
type Range struct {
	Op               CmpOp
	Register         uint32
	FromData, ToData []byte
}

func (e *Range) encode(a *nfnetlink.Attributes) string {
	a.Number(unix.NFTA_RANGE_SREG, e.Register)
	a.Number(unix.NFTA_RANGE_OP, uint32(e.Op))
	value(a, unix.NFTA_RANGE_FROM_DATA, e.FromData)
	value(a, unix.NFTA_RANGE_TO_DATA, e.ToData)
	return "range"
}

// Lookup matches what is in a set, or, with Invert, is not. With IsDestRegSet it loads what a map
// has for the key.
type Lookup struct {
	SourceRegister, DestRegister uint32
	IsDestRegSet, Invert         bool
	SetName                      string
}

func (e *Lookup) encode(a *nfnetlink.Attributes) string {
	a.Number(unix.NFTA_LOOKUP_SREG, e.SourceRegister)
	if e.IsDestRegSet {
		a.Number(unix.NFTA_LOOKUP_DREG, e.DestRegister)
	}
	if e.Invert {
		a.Number(unix.NFTA_LOOKUP_FLAGS, unix.NFT_LOOKUP_F_INV)
	}
	a.Text(unix.NFTA_LOOKUP_SET, e.SetName)
	return "lookup"
}

// Dynset adds to a set what a packet brings, or begins an element's time anew.
type Dynset struct {
	SrcRegKey  uint32
	SrcRegData uint32 // of a map; 0 for a set
	SetName    string
	Operation  uint32 // such as unix.NFT_DYNSET_OP_UPDATE
	Timeout    time.Duration
	// Each is an expression that every element has one of, such as a Limit. It is run after the
	// element was added or found.
	Each Any
}

func (e *Dynset) encode(a *nfnetlink.Attributes) string {
	a.Number(unix.NFTA_DYNSET_SREG_KEY, e.SrcRegKey)
	if e.SrcRegData != 0 {
		a.Number(unix.NFTA_DYNSET_SREG_DATA, e.SrcRegData)
	}
	a.Number(unix.NFTA_DYNSET_OP, e.Operation)
	if e.Timeout != 0 {
		a.Number64(unix.NFTA_DYNSET_TIMEOUT, uint64(e.Timeout.Milliseconds()))
	}
	a.Text(unix.NFTA_DYNSET_SET_NAME, e.SetName)
	if e.Each != nil {
		var data nfnetlink.Attributes
		name := e.Each.encode(&data)
		a.Nested(unix.NFTA_DYNSET_EXPR, func() {
			a.Text(unix.NFTA_EXPR_NAME, name)
			a.Bytes(unix.NLA_F_NESTED|unix.NFTA_EXPR_DATA, data)
		})
	}
	return "dynset"
}

// Limit matches up to Rate packets a second, and Burst at once after a silence. With Over it
// matches what is above that.
type Limit struct {
	Rate  uint64
	Burst uint32
	Over  bool
}

func (e *Limit) encode(a *nfnetlink.Attributes) string {
	const second = 1 // the unit
	a.Number64(unix.NFTA_LIMIT_RATE, e.Rate)
	a.Number64(unix.NFTA_LIMIT_UNIT, second)
	a.Number(unix.NFTA_LIMIT_BURST, e.Burst)
	a.Number(unix.NFTA_LIMIT_TYPE, unix.NFT_LIMIT_PKTS)
	flags := uint32(0)
	if e.Over {
		flags = unix.NFT_LIMIT_F_INV
	}
	a.Number(unix.NFTA_LIMIT_FLAGS, flags)
	return "limit"
}

// Numgen loads a number from Offset to below Offset+Modulus: a random one (unix.NFT_NG_RANDOM) or
// the next (unix.NFT_NG_INCREMENTAL).
type Numgen struct {
	Register, Modulus, Type, Offset uint32
}

func (e *Numgen) encode(a *nfnetlink.Attributes) string {
	a.Number(unix.NFTA_NG_DREG, e.Register)
	a.Number(unix.NFTA_NG_MODULUS, e.Modulus)
	a.Number(unix.NFTA_NG_TYPE, e.Type)
	a.Number(unix.NFTA_NG_OFFSET, e.Offset)
	return "numgen"
}

// Hash loads a number from Offset to below Offset+Modulus that Jenkins's hash of registers leads
// to.
type Hash struct {
	SourceRegister, DestRegister  uint32
	Length, Modulus, Seed, Offset uint32
}

func (e *Hash) encode(a *nfnetlink.Attributes) string {
	a.Number(unix.NFTA_HASH_SREG, e.SourceRegister)
	a.Number(unix.NFTA_HASH_DREG, e.DestRegister)
	a.Number(unix.NFTA_HASH_LEN, e.Length)
	a.Number(unix.NFTA_HASH_MODULUS, e.Modulus)
	a.Number(unix.NFTA_HASH_SEED, e.Seed)
	a.Number(unix.NFTA_HASH_OFFSET, e.Offset)
	a.Number(unix.NFTA_HASH_TYPE, unix.NFT_HASH_JENKINS)
	return "hash"
}

// Counter counts packets and bytes.
type Counter struct{}

func (*Counter) encode(a *nfnetlink.Attributes) string {
	a.Number64(unix.NFTA_COUNTER_BYTES, 0)
	a.Number64(unix.NFTA_COUNTER_PACKETS, 0)
	return "counter"
}

// VerdictKind is how a rule ends.
type VerdictKind int32

// Some verdicts.
const (
	VerdictGoto   VerdictKind = unix.NFT_GOTO
	VerdictJump   VerdictKind = unix.NFT_JUMP
	VerdictReturn VerdictKind = unix.NFT_RETURN
	VerdictDrop   VerdictKind = 0 // NF_DROP
	VerdictAccept VerdictKind = 1 // NF_ACCEPT
)

// Verdict says what to do with a packet.
type Verdict struct {
	Kind  VerdictKind
	Chain string
}

func (e *Verdict) encode(a *nfnetlink.Attributes) string {
	a.Number(unix.NFTA_IMMEDIATE_DREG, unix.NFT_REG_VERDICT)
	a.Nested(unix.NFTA_IMMEDIATE_DATA, func() {
		a.Nested(unix.NFTA_DATA_VERDICT, func() {
			a.Number(unix.NFTA_VERDICT_CODE, uint32(e.Kind))
			if e.Chain != "" {
				a.Text(unix.NFTA_VERDICT_CHAIN, e.Chain)
			}
		})
	})
	return "immediate"
}

// Reject answers a packet: with a reset (unix.NFT_REJECT_TCP_RST) or ICMP
// (unix.NFT_REJECT_ICMP_UNREACH) of a code.
type Reject struct {
	Type uint32
	Code byte
}

func (e *Reject) encode(a *nfnetlink.Attributes) string {
	a.Number(unix.NFTA_REJECT_TYPE, e.Type)
	a.Bytes(unix.NFTA_REJECT_ICMP_CODE, []byte{e.Code})
	return "reject"
}

// DNAT translates the destination of a connection to the address and port in registers.
type DNAT struct {
	Family           byte
	RegAddr, RegPort uint32
}

func (e *DNAT) encode(a *nfnetlink.Attributes) string {
	a.Number(unix.NFTA_NAT_TYPE, unix.NFT_NAT_DNAT)
	a.Number(unix.NFTA_NAT_FAMILY, uint32(e.Family))
	a.Number(unix.NFTA_NAT_REG_ADDR_MIN, e.RegAddr)
	a.Number(unix.NFTA_NAT_REG_PROTO_MIN, e.RegPort)
	return "nat"
}

// Redir translates the destination of a connection to an address of the interface where it came in.
type Redir struct{}

func (*Redir) encode(*nfnetlink.Attributes) string { return "redir" }

// Masq translates the source of a connection to an address of the interface where it goes out, with
// a port drawn at random.
type Masq struct{}

func (*Masq) encode(a *nfnetlink.Attributes) string {
	const fullyRandom = 1 << 4 // NF_NAT_RANGE_PROTO_RANDOM_FULLY of linux/netfilter/nf_nat.h
	a.Number(unix.NFTA_MASQ_FLAGS, fullyRandom)
	return "masq"
}

// Dup sends a copy of a packet to the node whose address is in a register, over the interface whose
// index is in another one; 0 for the one that routes lead to.
type Dup struct{ RegAddr, RegDev uint32 }

func (e *Dup) encode(a *nfnetlink.Attributes) string {
	a.Number(unix.NFTA_DUP_SREG_ADDR, e.RegAddr)
	if e.RegDev != 0 {
		a.Number(unix.NFTA_DUP_SREG_DEV, e.RegDev)
	}
	return "dup"
}

// Notrack keeps connection tracking from looking at a packet.
type Notrack struct{}

func (*Notrack) encode(*nfnetlink.Attributes) string { return "notrack" }

// FlowOffload adds a packet's connection to a flowtable.
type FlowOffload struct{ Flowtable string }

// flowTableName is NFTA_FLOW_TABLE_NAME of linux/netfilter/nf_tables.h.
const flowTableName = 1

func (e *FlowOffload) encode(a *nfnetlink.Attributes) string {
	a.Text(flowTableName, e.Flowtable)
	return "flow_offload"
}

// Segment writes the greatest segment that a TCP packet with SYN asks for (RFC 9293 section 3.7.1),
// from a register and in the network's byte order. The kernel makes it smaller only.
type Segment struct{ Register uint32 }

func (e *Segment) encode(a *nfnetlink.Attributes) string {
	const kind, at, size = 2, 2, 2 // the option, and where it has the size
	a.Bytes(unix.NFTA_EXTHDR_TYPE, []byte{kind})
	a.Number(unix.NFTA_EXTHDR_OFFSET, at)
	a.Number(unix.NFTA_EXTHDR_LEN, size)
	a.Number(unix.NFTA_EXTHDR_OP, unix.NFT_EXTHDR_OP_TCPOPT)
	a.Number(unix.NFTA_EXTHDR_SREG, e.Register)
	return "exthdr"
}
