package nft

import (
	"bytes"
	"encoding/binary"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/proxy/nfnetlink"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// rule is what a rule does with a packet.
type rule struct {
	plan.ForwardRule
	loaded loaded // what the register has that the next expression compares
	// portSet is the set that must have the destination port; "" if there is none.
	portSet string
}

// loaded is what an expression has loaded to be compared.
type loaded struct {
	what int
	mask uint32 // of a conntrack state
}

// What may be loaded.
const (
	loadedOther = iota
	loadedInterface
	loadedProtocol
	loadedState
	loadedPort
)

// The bits of states of known connections, in ct state and in iptables' match conntrack alike.
const knownStates = 1<<1 | 1<<2 // established, related

// readRule reads the expressions of a rule.
func readRule(expressions []byte) (r rule) {
	for _, e := range nfnetlink.All(expressions) {
		data := nfnetlink.Get(e, unix.NFTA_EXPR_DATA)
		before := r.loaded
		r.loaded = loaded{}
		name := nfnetlink.GetText(e, unix.NFTA_EXPR_NAME)
		switch name {
		case "meta":
			r.loaded.what = loadedMeta(data)
		case "payload":
			base, _ := nfnetlink.GetNumber(data, unix.NFTA_PAYLOAD_BASE)
			offset, _ := nfnetlink.GetNumber(data, unix.NFTA_PAYLOAD_OFFSET)
			size, _ := nfnetlink.GetNumber(data, unix.NFTA_PAYLOAD_LEN)
			if base == unix.NFT_PAYLOAD_NETWORK_HEADER && offset == protocolOffset && size == 1 {
				r.loaded.what = loadedProtocol // of IPv4
			}
			if base == unix.NFT_PAYLOAD_TRANSPORT_HEADER && offset == portOffset && size == 2 {
				r.loaded.what = loadedPort
			}
		case "ct":
			if key, ok := nfnetlink.GetNumber(data, unix.NFTA_CT_KEY); ok && key == unix.NFT_CT_STATE {
				r.loaded = loaded{loadedState, ^uint32(0)}
			}
		case "bitwise":
			if mask := nfnetlink.Get(data, unix.NFTA_BITWISE_MASK, unix.NFTA_DATA_VALUE); before.what == loadedState &&
				len(mask) == 4 {
				r.loaded = loaded{loadedState, binary.NativeEndian.Uint32(mask)}
			}
		case "cmp":
			r.compare(before, data)
			r.Conditional = true
		case "match":
			switch nfnetlink.GetText(data, unix.NFTA_MATCH_NAME) {
			case "comment":
			case "conntrack":
				r.Established = r.Established || onlyKnown(data)
				r.Conditional = true
			case "tcp", "udp", "multiport":
				r.ports(nfnetlink.GetText(data, unix.NFTA_MATCH_NAME), nfnetlink.Get(data, unix.NFTA_MATCH_INFO))
				r.Conditional = true
			default:
				r.Conditional = true
			}
		case "immediate":
			r.verdict(nfnetlink.Get(data, unix.NFTA_IMMEDIATE_DATA, unix.NFTA_DATA_VERDICT))
		case "lookup": // in a map it may find any verdict
			register, ok := nfnetlink.GetNumber(data, unix.NFTA_LOOKUP_DREG)
			if ok && register == unix.NFT_REG_VERDICT {
				r.Verdict = plan.VerdictAccept
			} else if flags, _ := nfnetlink.GetNumber(data, unix.NFTA_LOOKUP_FLAGS); before.what == loadedPort && flags == 0 {
				r.portSet = nfnetlink.GetText(data, unix.NFTA_LOOKUP_SET)
			}
			r.Conditional = true
		case "queue": // another program decides
			r.Verdict = plan.VerdictAccept
		case "reject":
			r.Verdict = plan.VerdictDrop
		case "target":
			r.Verdict = plan.VerdictOf(nfnetlink.GetText(data, unix.NFTA_TARGET_NAME))
		case "counter", "log":
		default:
			r.Conditional = true
		}
	}
	return r
}

// verdict notes the verdict of an expression, which may be none: it loads something else then.
func (r *rule) verdict(data []byte) {
	code, ok := nfnetlink.GetNumber(data, unix.NFTA_VERDICT_CODE)
	if !ok {
		return
	}
	switch int32(code) {
	case unix.NFT_JUMP, unix.NFT_GOTO:
		r.To, r.Goto = nfnetlink.GetText(data, unix.NFTA_VERDICT_CHAIN), int32(code) == unix.NFT_GOTO
	case unix.NFT_RETURN:
		r.Verdict = plan.VerdictReturn
	case dropVerdict:
		r.Verdict = plan.VerdictDrop
	case acceptVerdict:
		r.Verdict = plan.VerdictAccept
	}
}

const (
	dropVerdict    = 0 // NF_DROP
	acceptVerdict  = 1 // NF_ACCEPT
	protocolOffset = 9 // of the protocol in the header of IPv4
	portOffset     = 2 // of the destination port in the headers of TCP, UDP and SCTP
)

func loadedMeta(data []byte) int {
	switch key, _ := nfnetlink.GetNumber(data, unix.NFTA_META_KEY); key {
	case unix.NFT_META_IIFNAME, unix.NFT_META_OIFNAME:
		return loadedInterface
	case unix.NFT_META_L4PROTO:
		return loadedProtocol
	}
	return loadedOther
}

// compare notes what a comparison with what was loaded demands.
func (r *rule) compare(with loaded, data []byte) {
	op, ok := nfnetlink.GetNumber(data, unix.NFTA_CMP_OP)
	value := nfnetlink.Get(data, unix.NFTA_CMP_DATA, unix.NFTA_DATA_VALUE)
	equal := ok && op == unix.NFT_CMP_EQ
	switch with.what {
	case loadedInterface:
		if equal {
			name, _, whole := bytes.Cut(value, []byte{0})
			if !whole && len(value) < unix.IFNAMSIZ {
				name = append(bytes.Clone(name), '*')
			}
			r.Interfaces = append(r.Interfaces, string(name))
		}
	case loadedProtocol:
		if equal && len(value) == 1 && (value[0] == unix.IPPROTO_ICMP || value[0] == unix.IPPROTO_ICMPV6) {
			r.ICMP = true
		}
		if equal && len(value) == 1 && !r.ICMP {
			r.NotTCP = r.NotTCP || value[0] != unix.IPPROTO_TCP
			r.NotUDP = r.NotUDP || value[0] != unix.IPPROTO_UDP
		}
	case loadedPort:
		if equal && len(value) == 2 {
			r.Ports = []uint16{binary.BigEndian.Uint16(value)}
		}
	case loadedState:
		if len(value) != 4 {
			return
		}
		state := binary.NativeEndian.Uint32(value)
		some := op == unix.NFT_CMP_NEQ && state == 0 && with.mask&^knownStates == 0
		one := equal && state != 0 && state&^knownStates == 0
		r.Established = r.Established || some || one
	}
}

// ports notes what iptables' matches for ports demand: xt_tcp, xt_udp and xt_multiport_v1, which have
// ports in the order of the host.
func (r *rule) ports(match string, info []byte) {
	at := func(place int) uint16 { return binary.NativeEndian.Uint16(info[place:]) }
	inverted := map[string]int{"tcp": 11, "udp": 8}[match] // where the flags are that invert
	r.NotTCP, r.NotUDP = r.NotTCP || match == "udp", r.NotUDP || match == "tcp"
	switch {
	case inverted > 0 && len(info) > inverted:
		if from, to := at(4), at(6); info[inverted] == 0 && from == to {
			r.Ports = []uint16{from}
		}
	case match == "multiport" && len(info) >= 48:
		const destination, first, flags, inverted = 1, 2, 32, 47
		count := int(info[1])
		if info[0] != destination || count > 15 || info[inverted] != 0 {
			return
		}
		var ports []uint16
		for i := range count {
			if info[flags+i] != 0 { // the beginning of a range
				return
			}
			ports = append(ports, at(first+2*i))
		}
		r.Ports = ports
	}
}

// iptables' match conntrack (struct xt_conntrack_mtinfo3, which differs from 2 behind these).
const (
	conntrackFlags     = 146
	conntrackInverted  = 148
	conntrackStates    = 150
	conntrackStateFlag = 1 << 0
)

// onlyKnown reports whether iptables' match conntrack is for packets of known connections only.
func onlyKnown(data []byte) bool {
	revision, _ := nfnetlink.GetNumber(data, unix.NFTA_MATCH_REV)
	info := nfnetlink.Get(data, unix.NFTA_MATCH_INFO)
	if revision < 2 || revision > 3 || len(info) < conntrackStates+2 {
		return false
	}
	flags, inverted, states := binary.NativeEndian.Uint16(info[conntrackFlags:]),
		binary.NativeEndian.Uint16(info[conntrackInverted:]), binary.NativeEndian.Uint16(info[conntrackStates:])
	return flags&conntrackStateFlag != 0 && inverted&conntrackStateFlag == 0 && states&^knownStates == 0
}
