package expr

import (
	"encoding/binary"
	"time"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/proxy/nfnetlink"
)

// Unknown is an expression that Decode does not know, by the kernel's name.
type Unknown struct{ Name string }

func (e *Unknown) encode(*nfnetlink.Attributes) string { return e.Name }

// Decode reads a list of expressions as the kernel prints it. What this package does not write is
// Unknown.
func Decode(list []byte) (all List) {
	for _, b := range nfnetlink.All(list) {
		all = append(all, decodeOne(b))
	}
	return all
}

func decodeOne(b []byte) Any {
	name := nfnetlink.GetText(b, unix.NFTA_EXPR_NAME)
	if e := decode(name, nfnetlink.Get(b, unix.NFTA_EXPR_DATA)); e != nil {
		return e
	}
	return &Unknown{name}
}

// number returns an attribute of 32 bits, 0 if there is none; has reports whether there is one.
func number(data []byte, kind uint16) uint32 {
	n, _ := nfnetlink.GetNumber(data, kind)
	return n
}

func has(data []byte, kind uint16) bool { return nfnetlink.Get(data, kind) != nil }

func constant(data []byte, kind uint16) []byte {
	return nfnetlink.Get(data, kind, unix.NFTA_DATA_VALUE)
}

// decode reads one expression; nil for one that is not known.
func decode(name string, data []byte) Any {
	switch name {
	case "payload":
		return decodePayload(data)
	case "meta":
		e := &Meta{Key: MetaKey(number(data, unix.NFTA_META_KEY)), Register: number(data, unix.NFTA_META_DREG)}
		if has(data, unix.NFTA_META_SREG) {
			e.SourceRegister, e.Register = true, number(data, unix.NFTA_META_SREG)
		}
		return e
	case "ct":
		e := &Ct{Key: CtKey(number(data, unix.NFTA_CT_KEY)), Register: number(data, unix.NFTA_CT_DREG)}
		if has(data, unix.NFTA_CT_SREG) {
			e.SourceRegister, e.Register = true, number(data, unix.NFTA_CT_SREG)
		}
		direction := nfnetlink.Get(data, unix.NFTA_CT_DIRECTION)
		e.Reply = len(direction) == 1 && direction[0] == 1
		return e
	case "fib":
		of := number(data, unix.NFTA_FIB_FLAGS)
		if number(data, unix.NFTA_FIB_RESULT) != unix.NFT_FIB_RESULT_ADDRTYPE ||
			of != unix.NFTA_FIB_F_DADDR && of != unix.NFTA_FIB_F_SADDR {
			return nil
		}
		return &Fib{Register: number(data, unix.NFTA_FIB_DREG), Source: of == unix.NFTA_FIB_F_SADDR}
	case "immediate":
		if verdict := nfnetlink.Get(data, unix.NFTA_IMMEDIATE_DATA, unix.NFTA_DATA_VERDICT); verdict != nil {
			return &Verdict{Kind: VerdictKind(int32(number(verdict, unix.NFTA_VERDICT_CODE))),
				Chain: nfnetlink.GetText(verdict, unix.NFTA_VERDICT_CHAIN)}
		}
		return &Immediate{Register: number(data, unix.NFTA_IMMEDIATE_DREG), Data: constant(data, unix.NFTA_IMMEDIATE_DATA)}
	case "bitwise":
		e := &Bitwise{SourceRegister: number(data, unix.NFTA_BITWISE_SREG),
			DestRegister: number(data, unix.NFTA_BITWISE_DREG),
			Len:          number(data, unix.NFTA_BITWISE_LEN), Mask: constant(data, unix.NFTA_BITWISE_MASK),
			Xor: constant(data, unix.NFTA_BITWISE_XOR)}
		if len(e.Mask) != int(e.Len) || len(e.Xor) != int(e.Len) { // a shift
			return nil
		}
		return e
	case "cmp":
		return &Cmp{Op: CmpOp(number(data, unix.NFTA_CMP_OP)), Register: number(data, unix.NFTA_CMP_SREG),
			Data: constant(data, unix.NFTA_CMP_DATA)}
	case "range":
		return &Range{Op: CmpOp(number(data, unix.NFTA_RANGE_OP)), Register: number(data, unix.NFTA_RANGE_SREG),
			FromData: constant(data, unix.NFTA_RANGE_FROM_DATA), ToData: constant(data, unix.NFTA_RANGE_TO_DATA)}
	case "lookup":
		return &Lookup{SourceRegister: number(data, unix.NFTA_LOOKUP_SREG), DestRegister: number(data, unix.NFTA_LOOKUP_DREG),
			IsDestRegSet: has(data, unix.NFTA_LOOKUP_DREG),
			Invert:       number(data, unix.NFTA_LOOKUP_FLAGS)&unix.NFT_LOOKUP_F_INV != 0,
			SetName:      nfnetlink.GetText(data, unix.NFTA_LOOKUP_SET)}
	case "dynset":
		return decodeDynset(data)
	}
	return decodeAction(name, data)
}

// decodeAction reads the expressions that compare nothing.
func decodeAction(name string, data []byte) Any {
	switch name {
	case "limit":
		return &Limit{Rate: number64(data, unix.NFTA_LIMIT_RATE), Burst: number(data, unix.NFTA_LIMIT_BURST),
			Over: number(data, unix.NFTA_LIMIT_FLAGS)&unix.NFT_LIMIT_F_INV != 0}
	case "numgen":
		return &Numgen{Register: number(data, unix.NFTA_NG_DREG), Modulus: number(data, unix.NFTA_NG_MODULUS),
			Type: number(data, unix.NFTA_NG_TYPE), Offset: number(data, unix.NFTA_NG_OFFSET)}
	case "hash":
		if number(data, unix.NFTA_HASH_TYPE) != unix.NFT_HASH_JENKINS {
			return nil
		}
		return &Hash{SourceRegister: number(data, unix.NFTA_HASH_SREG), DestRegister: number(data, unix.NFTA_HASH_DREG),
			Length: number(data, unix.NFTA_HASH_LEN), Modulus: number(data, unix.NFTA_HASH_MODULUS),
			Seed: number(data, unix.NFTA_HASH_SEED), Offset: number(data, unix.NFTA_HASH_OFFSET)}
	case "counter":
		return &Counter{}
	case "reject":
		e := &Reject{Type: number(data, unix.NFTA_REJECT_TYPE)}
		if code := nfnetlink.Get(data, unix.NFTA_REJECT_ICMP_CODE); len(code) == 1 {
			e.Code = code[0]
		}
		return e
	case "nat":
		if number(data, unix.NFTA_NAT_TYPE) != unix.NFT_NAT_DNAT {
			return nil
		}
		return &DNAT{Family: byte(number(data, unix.NFTA_NAT_FAMILY)), RegAddr: number(data, unix.NFTA_NAT_REG_ADDR_MIN),
			RegPort: number(data, unix.NFTA_NAT_REG_PROTO_MIN)}
	case "redir":
		return &Redir{}
	case "masq":
		return &Masq{}
	case "dup":
		return &Dup{RegAddr: number(data, unix.NFTA_DUP_SREG_ADDR), RegDev: number(data, unix.NFTA_DUP_SREG_DEV)}
	case "notrack":
		return &Notrack{}
	case "flow_offload":
		return &FlowOffload{Flowtable: nfnetlink.GetText(data, flowTableName)}
	case "exthdr":
		if !has(data, unix.NFTA_EXTHDR_SREG) {
			return nil
		}
		return &Segment{Register: number(data, unix.NFTA_EXTHDR_SREG)}
	}
	return nil
}

func number64(data []byte, kind uint16) uint64 {
	if n := nfnetlink.Get(data, kind); len(n) == 8 {
		return binary.BigEndian.Uint64(n)
	}
	return 0
}

func decodePayload(data []byte) Any {
	e := &Payload{DestRegister: number(data, unix.NFTA_PAYLOAD_DREG),
		Base: PayloadBase(number(data, unix.NFTA_PAYLOAD_BASE)), Offset: number(data, unix.NFTA_PAYLOAD_OFFSET),
		Len: number(data, unix.NFTA_PAYLOAD_LEN)}
	if has(data, unix.NFTA_PAYLOAD_SREG) {
		e.Write, e.SourceRegister = true, number(data, unix.NFTA_PAYLOAD_SREG)
		e.Checksum = number(data, unix.NFTA_PAYLOAD_CSUM_TYPE) == unix.NFT_PAYLOAD_CSUM_INET
		if e.Checksum {
			e.ChecksumOffset = number(data, unix.NFTA_PAYLOAD_CSUM_OFFSET)
		}
		e.PseudoHeader = number(data, unix.NFTA_PAYLOAD_CSUM_FLAGS)&unix.NFT_PAYLOAD_L4CSUM_PSEUDOHDR != 0
	}
	return e
}

func decodeDynset(data []byte) Any {
	e := &Dynset{SrcRegKey: number(data, unix.NFTA_DYNSET_SREG_KEY), SrcRegData: number(data, unix.NFTA_DYNSET_SREG_DATA),
		SetName: nfnetlink.GetText(data, unix.NFTA_DYNSET_SET_NAME), Operation: number(data, unix.NFTA_DYNSET_OP),
		Timeout: time.Duration(number64(data, unix.NFTA_DYNSET_TIMEOUT)) * time.Millisecond}
	if each := nfnetlink.Get(data, unix.NFTA_DYNSET_EXPR); each != nil {
		e.Each = decodeOne(each)
	}
	return e
}
