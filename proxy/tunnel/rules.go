package tunnel

import (
	"encoding/binary"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/nft"
	"github.com/landfall-lb/landfall/proxy/nft/expr"
)

// Names of chains and sets.
const (
	// setNodes are the nodes from which packets are taken, setDirect the addresses for which they may be handed over.
	// setSenders has, by the MAC addresses of nodes, at which addresses they are sent back, and setMACs has these MAC
	// addresses: Linux 6.1 looks up a key of a map only to load its value.
	setNodes, setDirect, setSenders, setMACs = "nodes", "direct", "senders", "sender-macs"
	// chainPort guards the UDP port, chainInside what comes out of the tunnel; chainRefused counts.
	chainPort    = "port"
	chainInside  = "inside"
	chainMoved   = "moved"
	chainHanded  = "handed"
	chainRefused = "refused"
	// Connection tracking is kept from noting a connection for each moved one, here and there.
	chainReceived = "received"
	chainSent     = "sent"
	// chainSegments keeps clients from sending larger segments than fit into the tunnel.
	chainSegments = "segments"
)

// raw is ahead of connection tracking (-200), and answered behind translation (100): the source of an answer is the
// VIP again.
const raw, answered = -300, 110

// header says where things are in the IP header of a family.
type header struct {
	family            lb.Family
	source, dest, ttl uint32
	size              uint32 // of an address
}

func headerOf(family lb.Family) header {
	size := uint32(nft.AddressBytes(family))
	if family == lb.IPv6 {
		return header{family, 8, 24, 7, size}
	}
	return header{family, 12, 16, 8, size}
}

func (h header) table() nft.Table { return nft.Table{Family: h.family, Name: TableName} }

func (h header) sets() []nft.Set {
	address := nft.TypeAddress(h.family)
	return []nft.Set{{Name: setNodes, KeyType: address, KeyLength: h.size},
		{Name: setDirect, KeyType: address, KeyLength: h.size},
		{Name: setSenders, Flags: unix.NFT_SET_MAP, KeyType: nft.TypeEther, KeyLength: 6, ValueType: address,
			ValueLength: h.size},
		{Name: setMACs, KeyType: nft.TypeEther, KeyLength: 6}}
}

type chain struct {
	name  string
	hook  nft.Hook
	rules []nft.Rule
}

// limits are what the rules depend on. Through the tunnel come ICMP errors, and TCP without SYN, with a TTL from least
// to most, and what nodes hand over, of which segment is the greatest TCP segment that fits; 0 for no bound.
type limits struct {
	port        uint16
	least, most byte
	segment     uint16
}

// chains return the rules. They do not depend on the nodes.
func (h header) chains(l limits) []chain {
	rule := func(comment string, parts ...expr.List) nft.Rule {
		return nft.Rule{Comment: comment, Exprs: expr.Join(parts...)}
	}
	load := func(offset, length uint32) expr.Any {
		return expr.Load(expr.Reg, expr.PayloadBaseNetworkHeader, offset, length)
	}
	toPort := expr.Join(expr.IsProtocol(expr.CmpOpEq, unix.IPPROTO_UDP), expr.List{
		expr.Load(expr.Reg, expr.PayloadBaseTransportHeader, 2, 2),
		expr.Compare(expr.CmpOpEq, binary.BigEndian.AppendUint16(nil, l.port)...)})
	from, to := expr.List{load(h.source, h.size)}, expr.List{load(h.dest, h.size)}
	here := expr.List{&expr.Fib{Register: expr.Reg}, expr.Compare(expr.CmpOpEq, expr.Host32(unix.RTN_LOCAL)...)}
	inside := expr.CameIn(expr.CmpOpEq, lb.TunnelName(h.family))
	const flags, syn = 13, 2 // of a TCP header (RFC 9293 section 3.1)
	isSYN := expr.List{expr.Load(expr.Reg, expr.PayloadBaseTransportHeader, flags, 1), expr.Keep(syn),
		expr.Compare(expr.CmpOpNeq, 0)}
	otherTTL := expr.List{load(h.ttl, 1), &expr.Range{Op: expr.CmpOpNeq, Register: expr.Reg, FromData: []byte{l.least},
		ToData: []byte{l.most}}}
	refuse := expr.Goto(chainRefused)
	moved := []nft.Rule{rule("not moved", otherTTL, expr.Goto(chainHanded))}
	for _, number := range nft.ErrorTypes(h.family) {
		moved = append(moved, rule("", nft.IsError(h.family, number), expr.Accept()))
	}
	moved = append(moved, rule("neither TCP nor an error", expr.IsProtocol(expr.CmpOpNeq, unix.IPPROTO_TCP), refuse),
		rule("a new connection", isSYN, refuse))
	filter := func(hook uint32) nft.Hook { return nft.Hook{Kind: "filter", Number: hook, Priority: raw} }
	// A client is told how much fits in the answer to its SYN: what it sends may come through the tunnel.
	var segments []nft.Rule
	if l.segment != 0 {
		segments = append(segments, rule("fits into the tunnel", expr.IsProtocol(expr.CmpOpEq, unix.IPPROTO_TCP), isSYN, from,
			expr.In(setDirect), expr.List{&expr.Immediate{Register: expr.Reg,
				Data: binary.BigEndian.AppendUint16(nil, l.segment)}, &expr.Segment{Register: expr.Reg}}))
	}
	return []chain{
		{chainSegments, nft.Hook{Kind: "filter", Number: unix.NF_INET_POST_ROUTING, Priority: answered}, segments},
		{chainRefused, nft.Hook{}, []nft.Rule{rule("", expr.List{&expr.Counter{}}, expr.Drop())}},
		{chainPort, filter(unix.NF_INET_LOCAL_IN),
			[]nft.Rule{rule("not from a node", toPort, from, expr.NotIn(setNodes), refuse)}},
		{chainMoved, nft.Hook{}, moved},
		{chainHanded, nft.Hook{}, h.handed(rule, load(h.ttl, 1), to, here, refuse)},
		{chainInside, filter(unix.NF_INET_PRE_ROUTING), []nft.Rule{rule("", inside, expr.Goto(chainMoved))}},
		{chainReceived, filter(unix.NF_INET_PRE_ROUTING),
			[]nft.Rule{rule("", toPort, from, expr.In(setNodes), here, expr.List{&expr.Notrack{}}),
				// A pod's, which many network plugins send on with this node's address as its source.
				rule("for another node, not from a node", toPort, from, expr.NotIn(setNodes), to, expr.In(setNodes), refuse)}},
		{chainSent, filter(unix.NF_INET_LOCAL_OUT),
			[]nft.Rule{rule("", toPort, to, expr.In(setNodes), expr.List{&expr.Notrack{}})}},
	}
}

// handable are the protocols that are forwarded directly.
var handable = []byte{unix.IPPROTO_TCP, unix.IPPROTO_UDP}

// handed returns the rules for what other nodes hand over. What is for an address that is not forwarded directly
// here, as this node has not heard of it yet, goes back to its sender, which masquerades it. The kernel answers the
// questions of nodes to which it could send something back.
func (h header) handed(rule func(string, ...expr.List) nft.Rule, ttl expr.Any, to, here, refuse expr.List) (
	rules []nft.Rule) {
	for _, protocol := range handable {
		rules = append(rules, rule("came back", expr.List{ttl, expr.Compare(expr.CmpOpEq, lb.HandedTTL-1)}, to,
			expr.In(setDirect), expr.IsProtocol(expr.CmpOpEq, protocol), expr.Accept()))
	}
	question := isICMP(unix.IPPROTO_ICMP, 8) // an echo request (RFC 792)
	if h.family == lb.IPv6 {                 // whose kernel answers over the interface where it was asked (RFC 4443)
		question = isICMP(unix.IPPROTO_ICMPV6, 128)
		rules = append(rules, rule("an answer", isICMP(unix.IPPROTO_ICMPV6, 129), here, fromSender(), expr.In(setMACs),
			expr.Accept()))
	}
	rules = append(rules, rule("neither moved nor handed over", expr.List{ttl,
		expr.Compare(expr.CmpOpNeq, lb.HandedTTL)}, refuse))
	for _, protocol := range handable {
		rules = append(rules, rule("", to, expr.In(setDirect), expr.IsProtocol(expr.CmpOpEq, protocol), expr.Accept()))
	}
	for _, protocol := range handable {
		rules = append(rules, rule("back", expr.IsProtocol(expr.CmpOpEq, protocol), fromSender(), expr.List{
			&expr.Lookup{SetName: setSenders, SourceRegister: expr.Reg, DestRegister: expr.Reg, IsDestRegSet: true},
			&expr.Dup{RegAddr: expr.Reg}}, expr.Drop()))
	}
	return append(rules, rule("a question", question, here, fromSender(), expr.In(setMACs), expr.Accept()),
		rule("neither", refuse))
}

func isICMP(protocol, number byte) expr.List {
	return append(expr.IsProtocol(expr.CmpOpEq, protocol),
		expr.Load(expr.Reg, expr.PayloadBaseTransportHeader, 0, 1), expr.Compare(expr.CmpOpEq, number))
}

// fromSender loads the MAC address of a packet's sender.
func fromSender() expr.List {
	return expr.List{&expr.Meta{Key: expr.MetaKeyIIFTYPE, Register: expr.Reg},
		expr.Compare(expr.CmpOpEq, expr.Host16(unix.ARPHRD_ETHER)...),
		expr.Load(expr.Reg, expr.PayloadBaseLLHeader, 6, 6)}
}
