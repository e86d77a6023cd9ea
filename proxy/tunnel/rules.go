package tunnel

import (
	"encoding/binary"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/nft"
	"github.com/landfall-lb/landfall/proxy/nft/expr"
)

// Names of chains, and of the set of nodes from which packets are taken.
const (
	setNodes = "nodes"
	// chainPort guards the UDP port, chainInside what comes out of the tunnel; chainRefused counts.
	chainPort    = "port"
	chainInside  = "inside"
	chainMoved   = "moved"
	chainRefused = "refused"
	// Connection tracking is kept from noting a connection for each moved one, here and there.
	chainReceived = "received"
	chainSent     = "sent"
)

// raw is ahead of connection tracking (-200).
const raw = -300

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

func (h header) nodes() nft.Set {
	return nft.Set{Name: setNodes, KeyType: nft.TypeAddress(h.family), KeyLength: h.size}
}

type chain struct {
	name  string
	hook  nft.Hook
	rules []nft.Rule
}

// chains return the rules. They do not depend on the nodes. Through the tunnel come ICMP errors, and TCP
// without SYN, with a TTL from least to most.
func (h header) chains(port uint16, least, most byte) []chain {
	rule := func(comment string, parts ...expr.List) nft.Rule {
		return nft.Rule{Comment: comment, Exprs: expr.Join(parts...)}
	}
	load := func(offset, length uint32) expr.Any {
		return expr.Load(expr.Reg, expr.PayloadBaseNetworkHeader, offset, length)
	}
	toPort := expr.Join(expr.IsProtocol(expr.CmpOpEq, unix.IPPROTO_UDP), expr.List{
		expr.Load(expr.Reg, expr.PayloadBaseTransportHeader, 2, 2),
		expr.Compare(expr.CmpOpEq, binary.BigEndian.AppendUint16(nil, port)...)})
	from, to := expr.List{load(h.source, h.size)}, expr.List{load(h.dest, h.size)}
	here := expr.List{&expr.Fib{Register: expr.Reg}, expr.Compare(expr.CmpOpEq, expr.Host32(unix.RTN_LOCAL)...)}
	name := make([]byte, unix.IFNAMSIZ)
	copy(name, lb.TunnelName(h.family))
	inside := expr.List{&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: expr.Reg}, expr.Compare(expr.CmpOpEq, name...)}
	const flags, syn = 13, 2 // of a TCP header (RFC 9293 section 3.1)
	isSYN := expr.List{expr.Load(expr.Reg, expr.PayloadBaseTransportHeader, flags, 1), expr.Keep(syn),
		expr.Compare(expr.CmpOpNeq, 0)}
	otherTTL := expr.List{load(h.ttl, 1), &expr.Range{Op: expr.CmpOpNeq, Register: expr.Reg, FromData: []byte{least},
		ToData: []byte{most}}}
	refuse := expr.Goto(chainRefused)
	moved := []nft.Rule{rule("not moved", otherTTL, refuse)}
	for _, number := range nft.ErrorTypes(h.family) {
		moved = append(moved, rule("", nft.IsError(h.family, number), expr.Accept()))
	}
	moved = append(moved, rule("neither TCP nor an error", expr.IsProtocol(expr.CmpOpNeq, unix.IPPROTO_TCP), refuse),
		rule("a new connection", isSYN, refuse))
	filter := func(hook uint32) nft.Hook { return nft.Hook{Kind: "filter", Number: hook, Priority: raw} }
	return []chain{
		{chainRefused, nft.Hook{}, []nft.Rule{rule("", expr.List{&expr.Counter{}}, expr.Drop())}},
		{chainPort, filter(unix.NF_INET_LOCAL_IN),
			[]nft.Rule{rule("not from a node", toPort, from, expr.NotIn(setNodes), refuse)}},
		{chainMoved, nft.Hook{}, moved},
		{chainInside, filter(unix.NF_INET_PRE_ROUTING), []nft.Rule{rule("", inside, expr.Goto(chainMoved))}},
		{chainReceived, filter(unix.NF_INET_PRE_ROUTING),
			[]nft.Rule{rule("", toPort, from, expr.In(setNodes), here, expr.List{&expr.Notrack{}})}},
		{chainSent, filter(unix.NF_INET_LOCAL_OUT),
			[]nft.Rule{rule("", toPort, to, expr.In(setNodes), expr.List{&expr.Notrack{}})}},
	}
}
