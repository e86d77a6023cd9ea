package nftables

import (
	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/nft"
	"github.com/landfall-lb/landfall/proxy/nft/expr"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// priorityHand is behind conntrack (-200), which knows the connections that this node serves, and ahead
// of the rescue (-150): the table says where a packet belongs, the rescue who else may know it.
const priorityHand = -160

// handed renders what has packets for backends of other nodes handed there, in the places in which the
// group has these backends.
func (s *service) handed(g *group) []entry {
	w := writer{at: frontend{group: g.id}}
	near := map[address]bool{}
	for _, p := range s.input.Ports {
		for _, b := range p.Backends.Cluster {
			if b.Local {
				near[addressOf(b.Addr.Addr())] = true
			}
		}
	}
	seen := map[address]bool{}
	for _, b := range g.backends {
		if near[b.addr] && !seen[b.addr] {
			seen[b.addr] = true
			w.entries = append(w.entries, entry{element: element{set: setNear, frontend: w.at, source: b.addr}})
		}
	}
	family := s.input.Ports[0].Family
	hand := func(number uint32, b target) {
		if node, ok := s.input.Handed[b.addr.ip(family)]; ok && !near[b.addr] {
			w.number(setHanded, number, target{addr: addressOf(node)})
		}
	}
	switch {
	case g.class != 0:
		for i, place := range slots(g.scheduler, g.backends, g.weights, g.class) {
			hand(numbers(g.scheduler, g.class)+uint32(i), g.backends[place])
		}
	case len(g.backends) == 1:
		hand(numbers(plan.Random, 1), g.backends[0])
	}
	return w.entries
}

// direct renders what happens to connections to frontends that are forwarded directly, if they are not
// handed to another node. Those of pods and of the node itself are masqueraded, as their answers have to
// come back here; of the others only those to backends elsewhere, see far.
func (b builder) direct(config plan.Config) []nft.Rule {
	var rules []nft.Rule
	if match := b.fromPod(config.Pods, false); match != nil {
		rules = append(rules, b.rule("from a pod", match, expr.Goto(chainMarked)))
	}
	return append(rules, b.rule("from the node itself", b.fromNode(), expr.Goto(chainMarked)),
		b.rule("", expr.Goto(chainPick)))
}

// far renders the masquerading of connections to frontends that are forwarded directly, and that got a
// backend elsewhere here: to its node no packet is handed.
func (b builder) far() []nft.Rule {
	var rules []nft.Rule
	for _, p := range []protocol{tcp, udp} {
		rules = append(rules, b.rule("direct, to another node", isTranslated(), b.originalGroup(setDirect, p),
			b.key(fieldGroup, fieldDestination), expr.NotIn(setNames[setNear]), noPriority(), masquerade()))
	}
	return append(rules, b.rule("", isTranslated(), noPriority()))
}

// handover adds the chains that hand packets to the nodes of their backends. What this node knows stays
// here: connections from before the Service was forwarded directly, or that were masqueraded. A packet
// that another node has handed or moved here stays here too, so that none goes round in circles.
func (r *ruleset) handover(b builder, config plan.Config) {
	const states = expr.CtStateBitINVALID | expr.CtStateBitNEW
	const flags, fin, rst = 13, 1, 4 // of a TCP header (RFC 9293 section 3.1)
	toGroup := []nft.Rule{
		b.rule("known connections", expr.HasNoBits(expr.State(), states), expr.Accept()),
		b.rule("from another node", b.isMarked(), isEthernet(), b.in(setNodes), expr.Accept()),
		b.rule("", b.isTTL(expr.CmpOpLt, 2), expr.Accept()),
	}
	for _, name := range config.VRFInterfaces {
		toGroup = append(toGroup, b.rule("from a VRF", expr.CameIn(expr.CmpOpEq, name), expr.Accept()))
	}
	if match := b.fromPod(config.Pods, false); match != nil {
		toGroup = append(toGroup, b.rule("from a pod", match, expr.Accept()))
	}
	r.hook("hand", "filter", unix.NF_INET_PRE_ROUTING, priorityHand,
		append(toGroup, b.rule("", b.grouped(setDirect), expr.Goto(chainHand)))...)
	// The end of a connection that conntrack does not know is invalid to it.
	rules := []nft.Rule{
		b.rule("out of window", b.isProtocol(tcp), expr.HasBits(expr.State(), expr.CtStateBitINVALID),
			expr.List{expr.Load(expr.Reg, expr.PayloadBaseTransportHeader, flags, 1), expr.Keep(fin | rst),
				expr.Compare(expr.CmpOpEq, 0)}, expr.Goto(chainStay)),
		b.rule("its client has set such a TTL", b.isMarked(), expr.Goto(chainRound)),
	}
	r.add(chainHand, append(rules, b.hands(b.setTTL(lb.HandedTTL+1))...)...)
	// Or it is from a node with an unknown MAC address: what goes round between such nodes has to end.
	r.add(chainRound, append([]nft.Rule{b.rule("went round", b.isTTL(expr.CmpOpEq, lb.LeastMovedTTL), expr.Drop())},
		b.hands(nil)...)...)
	r.add(chainStay, b.rule("", noPriority()))
}

// hands renders the handing over of packets of a group, which change makes ready to go. Copies do not take
// the group's number along: as their priority, it could choose a class of a queueing discipline.
func (b builder) hands(change expr.List) []nft.Rule {
	var rules []nft.Rule
	const zero = hashWord // behind the address of the node
	noPriority := expr.List{&expr.Immediate{Register: expr.Register(zero), Data: expr.Host32(0)},
		&expr.Meta{Key: expr.MetaKeyPRIORITY, SourceRegister: true, Register: expr.Register(zero)}}
	hand := func(p protocol, number expr.List) {
		rules = append(rules, b.rule("", b.isProtocol(p), b.key(fieldGroup), number,
			expr.List{b.lookup(setNames[setHanded], 0)}, change, noPriority, expr.List{&expr.Dup{RegAddr: expr.Reg}},
			expr.Drop()))
	}
	for _, p := range []protocol{tcp, udp} {
		hand(p, b.random(1, numbers(plan.Random, 1)))
		for _, class := range plan.SlotSizes {
			hand(p, b.hashed(append(b.source(), fieldSourcePort), class, numbers(plan.Maglev, class)))
			hand(p, b.hashed(b.source(), class, numbers(plan.SourceHash, class)))
		}
	}
	return append(rules, b.rule("", expr.Goto(chainStay)))
}

// isMarked matches TTLs by which nodes mark what they hand over, or move as the rescue does.
func (b builder) isMarked() expr.List {
	return expr.List{b.loadTTL(), &expr.Range{Op: expr.CmpOpEq, Register: expr.Reg, FromData: []byte{lb.LeastMovedTTL},
		ToData: []byte{lb.HandedTTL}}}
}

// isEthernet matches packets of interfaces whose frames have MAC addresses.
func isEthernet() expr.List {
	return expr.List{&expr.Meta{Key: expr.MetaKeyIIFTYPE, Register: expr.Reg},
		expr.Compare(expr.CmpOpEq, expr.Host16(unix.ARPHRD_ETHER)...)}
}

func (b builder) ttlOffset() uint32 {
	if b.family == lb.IPv6 {
		return 7
	}
	return 8
}

func (b builder) isTTL(op expr.CmpOp, ttl byte) expr.List {
	return expr.List{b.loadTTL(), expr.Compare(op, ttl)}
}

func (b builder) loadTTL() expr.Any {
	return expr.Load(expr.Reg, expr.PayloadBaseNetworkHeader, b.ttlOffset(), 1)
}

// setTTL is what nft makes of "ip ttl set" and "ip6 hoplimit set". It leaves the first registers alone.
func (b builder) setTTL(ttl byte) expr.List {
	register := expr.Register(hashWord)
	write := &expr.Payload{Write: true, SourceRegister: register, Base: expr.PayloadBaseNetworkHeader,
		Offset: b.ttlOffset(), Len: 1}
	if b.family == lb.IPv6 {
		return expr.List{&expr.Immediate{Register: register, Data: []byte{ttl}}, write}
	}
	// With the byte behind it, as the checksum is one of 16 bits.
	write.Len, write.Checksum, write.ChecksumOffset = 2, true, 10
	return expr.List{expr.Load(register, expr.PayloadBaseNetworkHeader, b.ttlOffset(), 2),
		&expr.Bitwise{SourceRegister: register, DestRegister: register, Len: 2, Mask: []byte{0, 255}, Xor: []byte{ttl, 0}},
		write}
}
