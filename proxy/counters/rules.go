package counters

import (
	"slices"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/nft"
	"github.com/landfall-lb/landfall/proxy/nft/expr"
)

// TableName is the name of the tables, one in the family ip and one in ip6.
const TableName = "landfall-counters"

// kind is what an element counts.
type kind int

// The kinds. Attempts come first: reading them before the connections never finds more refusals
// than there were.
const (
	attempts    kind = iota // first packets, before anything is translated
	connections             // those of them that were translated
	received                // packets from clients
	sent                    // packets to clients
	kinds
)

var kindNames = [kinds]string{"attempts", "connections", "received", "sent"}

// prefixNodePorts begins the names of the sets of node ports.
const prefixNodePorts = "node-port-"

// Just ahead of the rules of both dialects, and just behind them.
const (
	priorityBefore = -102
	priorityAfter  = -98
)

// Bits of the status of linux/netfilter/nf_conntrack_common.h.
const (
	statusConfirmed  = 1 << 3
	statusTranslated = 1 << 5 // IPS_DST_NAT
)

// table makes the rules of one family.
type table struct{ family lb.Family }

func (t table) nft() nft.Table { return nft.Table{Family: t.family, Name: TableName} }

func setName(k kind, nodePort bool) string {
	if nodePort {
		return prefixNodePorts + kindNames[k]
	}
	return kindNames[k]
}

func (t table) sets() []nft.Set {
	var sets []nft.Set
	for k := range kinds {
		frontends := nft.Set{
			Name: setName(k, false), Counted: true, KeyLength: uint32(nft.AddressBytes(t.family)) + 8,
			KeyType: nft.TypeOf(nft.TypeAddress(t.family), nft.TypeProto, nft.TypePort),
		}
		nodePorts := nft.Set{
			Name: setName(k, true), Counted: true, KeyLength: 8, KeyType: nft.TypeOf(nft.TypeProto, nft.TypePort),
		}
		sets = append(sets, frontends, nodePorts)
	}
	return sets
}

// chain is a chain with its rules; hook is zero for one that is only jumped to.
type chain struct {
	name  string
	hook  nft.Hook
	rules []nft.Rule
}

func (t table) chains() []chain {
	hook := func(kind string, number uint32, priority int32) nft.Hook {
		return nft.Hook{Kind: kind, Number: number, Priority: priority}
	}
	// Chains of type nat see the first packet of a connection only, those of type filter see all.
	isService := expr.HasBits(&expr.Ct{Register: expr.Reg, Key: expr.CtKeySTATUS}, statusTranslated)
	isNew := expr.HasNoBits(&expr.Ct{Register: expr.Reg, Key: expr.CtKeySTATUS}, statusConfirmed)
	const original, reply = 0, 1
	direction := func(d byte) expr.List {
		return expr.List{&expr.Ct{Register: expr.Reg, Key: unix.NFT_CT_DIRECTION}, expr.Compare(expr.CmpOpEq, d)}
	}
	toLocal := expr.List{&expr.Fib{Register: expr.Reg},
		expr.Compare(expr.CmpOpEq, expr.Host32(unix.RTN_LOCAL)...)}
	return []chain{
		{name: "attempts", rules: []nft.Rule{
			rule(t.packet(), expr.In(setName(attempts, false)), expr.Return()),
			rule(toLocal, nodePort(packetPort(1)), expr.In(setName(attempts, true))),
		}},
		{name: "connections", rules: t.find(connections)},
		{name: "sent", rules: t.find(sent)},
		{name: "packets", rules: slices.Concat([]nft.Rule{
			rule(direction(reply), expr.Goto("sent")),
			rule(direction(original), isNew, expr.Jump("connections")),
		}, t.find(received))},
		{name: "before", hook: hook("nat", unix.NF_INET_PRE_ROUTING, priorityBefore),
			rules: []nft.Rule{rule(expr.Goto("attempts"))}},
		{name: "before-output", hook: hook("nat", unix.NF_INET_LOCAL_OUT, priorityBefore),
			rules: []nft.Rule{rule(expr.Goto("attempts"))}},
		// What comes over the loopback interface has passed the output chain.
		{name: "after", hook: hook("filter", unix.NF_INET_PRE_ROUTING, priorityAfter),
			rules: []nft.Rule{rule(isService, notFrom("lo"), expr.Goto("packets"))}},
		{name: "after-output", hook: hook("filter", unix.NF_INET_LOCAL_OUT, priorityAfter),
			rules: []nft.Rule{rule(isService, expr.Goto("packets"))}},
	}
}

// find counts a packet of a translated connection at the frontend that its client connected to. Each
// protocol has rules of its own, as nft 1.0.6 cannot read back a port of conntrack's without.
func (t table) find(k kind) []nft.Rule {
	var frontends, nodePorts []nft.Rule
	for _, p := range []byte{unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_SCTP} {
		is := expr.IsProtocol(expr.CmpOpEq, p)
		frontends = append(frontends, rule(is, t.flow(), expr.In(setName(k, false)), expr.Return()))
		nodePorts = append(nodePorts, rule(is, nodePort(flowPort(1)), expr.In(setName(k, true))))
	}
	return append(frontends, nodePorts...)
}

func rule(parts ...expr.List) nft.Rule { return nft.Rule{Exprs: expr.Join(parts...)} }

// words is how many registers of four bytes an address takes.
func (t table) words() uint32 { return uint32(nft.AddressBytes(t.family)) / 4 }

// packet loads the address, protocol and port that a packet is for.
func (t table) packet() expr.List {
	offset := uint32(16)
	if t.family == lb.IPv6 {
		offset = 24
	}
	address := expr.Load(expr.Reg, expr.PayloadBaseNetworkHeader, offset, 4*t.words())
	return expr.List{address, protocol(t.words()), packetPort(t.words() + 1)}
}

// flow loads the address, protocol and port that the client of a connection sent its packets to.
func (t table) flow() expr.List {
	key := expr.CtKey(unix.NFT_CT_DST_IP)
	if t.family == lb.IPv6 {
		key = unix.NFT_CT_DST_IP6
	}
	return expr.List{&expr.Ct{Register: expr.Reg, Key: key}, protocol(t.words()), flowPort(t.words() + 1)}
}

// nodePort loads the protocol, and the port that load loads into the second register.
func nodePort(load expr.Any) expr.List { return expr.List{protocol(0), load} }

func protocol(word uint32) expr.Any {
	return &expr.Meta{Key: expr.MetaKeyL4PROTO, Register: expr.Register(word)}
}

func packetPort(word uint32) expr.Any {
	return expr.Load(expr.Register(word), expr.PayloadBaseTransportHeader, 2, 2)
}

func flowPort(word uint32) expr.Any {
	return &expr.Ct{Register: expr.Register(word), Key: unix.NFT_CT_PROTO_DST}
}

func notFrom(name string) expr.List {
	return expr.CameIn(expr.CmpOpNeq, name)
}
