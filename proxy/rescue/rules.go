package rescue

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/nft"
	"github.com/landfall-lb/landfall/proxy/nft/expr"
)

// Names in the kernel. What belongs to one target ends in its address in hexadecimal, as a name
// takes no colons.
const (
	tableName   = "landfall-rescue"
	chainStrays = "strays"
	chainErrors = "errors"
	// Each target has some rules about what is remembered. They are in chains of their own, as a
	// chain is written in one transaction, which has to fit into the buffer of the socket.
	chainRecall  = "recall"
	chainOffRing = "recall-off-ring"
	setPeers     = "peers"
	setRing      = "ring"
	// chainSegments keeps clients from sending larger segments than fit into the tunnel.
	chainSegments = "segments"
	prefixRing    = "ring-"
	prefixTo      = "to-"
	prefixVIPs    = "vips-"
	prefixFlows   = "flows-"
	prefixOnRing  = "on-ring-"
)

// TableName is the name of the tables, one in the family ip and one in ip6.
const TableName = tableName

// A connection that was moved goes the same way again, whichever node owns the VIP by then, until
// it has been silent for lb.FlowMemory. What is known after one packet, limits.go says.
const maxFlows = 524288 // for each target

// The TTLs (hop limits) of the ring's protocol, which docs/design/rescue.md specifies. All nodes
// have to agree on them.
const (
	// spent is the TTL at which a packet goes no further. The node that begins a ring sets spent and
	// as many more as there are nodes to ask, of which each takes one away.
	spent = 200
	// maxHops is how many nodes a packet is moved through at most.
	maxHops = lb.MaxRing
	// doubt are the bits of the TTL that change when a node finds the packet out of the window of a
	// connection that it knows: at spentInDoubt the packet goes no further, and no node refuses it.
	doubt        = 0x60
	spentInDoubt = spent ^ doubt
	// Below spentInDoubt a packet only follows connections that nodes remember, down to the floor.
	floor = spentInDoubt - maxHops
	// overrun is how far below its end a TTL still counts as one at the end: a node that has no rules may have the packet
	// routed back here, and each router on the way takes one away.
	overrun = 15
)

func name(prefix string, node netip.Addr) string { return prefix + hex.EncodeToString(node.AsSlice()) }

// nodeOf reads back what name has made of an address of the family.
func (h header) nodeOf(prefix, text string) (netip.Addr, bool) {
	b, err := hex.DecodeString(strings.TrimPrefix(text, prefix))
	if err != nil || len(b) != int(h.size) {
		return netip.Addr{}, false
	}
	node, _ := netip.AddrFromSlice(b)
	return node, name(prefix, node) == text
}

// header says where things are in the IP header of a family.
type header struct {
	family       lb.Family
	source, dest uint32 // the addresses
	size         uint32 // of an address
	ttl          uint32 // TTL or hop limit
}

func headerOf(family lb.Family) header {
	size := uint32(nft.AddressBytes(family))
	if family == lb.IPv6 {
		return header{family, 8, 24, size, 7}
	}
	return header{family, 12, 16, size, 8}
}

func (h header) table() nft.Table { return nft.Table{Family: h.family, Name: tableName} }

// addresses is a set of addresses of the family.
func (h header) addresses(name string) nft.Set {
	return nft.Set{Name: name, KeyType: nft.TypeAddress(h.family), KeyLength: h.size}
}

func (h header) vips(node netip.Addr) nft.Set { return h.addresses(name(prefixVIPs, node)) }

// onRing are the VIPs on whose ring a target is.
func (h header) onRing(node netip.Addr) nft.Set { return h.addresses(name(prefixOnRing, node)) }

// ringOf names the set of VIPs whose packets may pass through so many nodes; all are in setRing too.
func ringOf(hops int) string { return fmt.Sprint(prefixRing, hops) }

// hopsOf reads back what ringOf has made.
func hopsOf(text string) (hops int, ok bool) {
	hops, err := strconv.Atoi(strings.TrimPrefix(text, prefixRing))
	return hops, err == nil && hops > 0 && hops <= maxHops && ringOf(hops) == text
}

func (h header) peers() nft.Set {
	return nft.Set{Name: setPeers, KeyType: nft.TypeEther, KeyLength: uint32(len(mac{}))}
}

func (h header) flows(node netip.Addr) nft.Set {
	return h.memory(name(prefixFlows, node), flowTimeout)
}

// memory is a set of connections, each of which is forgotten after a time.
func (h header) memory(name string, timeout time.Duration) nft.Set {
	address := nft.TypeAddress(h.family)
	return nft.Set{
		Name: name, Flags: unix.NFT_SET_EVAL | unix.NFT_SET_TIMEOUT, Size: maxFlows,
		Timeout:   uint64(timeout.Milliseconds()),
		KeyType:   nft.TypeOf(address, nft.TypePort, address, nft.TypePort),
		KeyLength: 2 * (h.size + 4), // a port is padded
	}
}

// strayHook is entered after conntrack (-200) has looked at a packet, and before anything is
// translated.
var strayHook = nft.Hook{Kind: "filter", Number: unix.NF_INET_PRE_ROUTING, Priority: -150}

// span matches TTLs that are (CmpOpEq) or are not (CmpOpNeq) between two, both included.
func (h header) span(op expr.CmpOp, from, to byte) expr.List {
	return expr.List{h.loadTTL(), &expr.Range{Op: op, Register: expr.Reg, FromData: []byte{from}, ToData: []byte{to}}}
}

// isTTL matches a TTL.
func (h header) isTTL(op expr.CmpOp, ttl byte) expr.List {
	return expr.List{h.loadTTL(), expr.Compare(op, ttl)}
}

func (h header) loadTTL() expr.Any { return network(expr.Reg, h.ttl, 1) }

func network(register, offset, length uint32) expr.Any {
	return expr.Load(register, expr.PayloadBaseNetworkHeader, offset, length)
}

func transport(register, offset, length uint32) expr.Any {
	return expr.Load(register, expr.PayloadBaseTransportHeader, offset, length)
}

func isTCP(op expr.CmpOp) expr.List { return expr.IsProtocol(op, unix.IPPROTO_TCP) }

// flags matches TCP packets with some (CmpOpNeq) or none (CmpOpEq) of the flags.
func flags(op expr.CmpOp, bits byte) expr.List {
	return append(isTCP(expr.CmpOpEq), transport(expr.Reg, 13, 1), expr.Keep(bits), expr.Compare(op, 0))
}

// flow loads what tells a connection from others.
func (h header) flow() expr.List {
	words := h.size / 4
	return append(isTCP(expr.CmpOpEq),
		network(expr.Register(0), h.source, h.size), transport(expr.Register(words), 0, 2),
		network(expr.Register(words+1), h.dest, h.size), transport(expr.Register(2*words+1), 2, 2))
}

// isFor matches packets for an address in a set.
func (h header) isFor(set string) expr.List {
	return append(expr.List{network(expr.Reg, h.dest, h.size)}, expr.In(set)...)
}

func (h header) isNotFor(set string) expr.List {
	return append(expr.List{network(expr.Reg, h.dest, h.size)}, expr.NotIn(set)...)
}

// setTTL is what nft makes of "ip ttl set" and "ip6 hoplimit set".
func (h header) setTTL(ttl byte) expr.List { return h.editTTL(0, ttl) }

// editTTL keeps the bits of the TTL that are in keep, and then changes those in flip.
func (h header) editTTL(keep, flip byte) expr.List {
	write := &expr.Payload{Write: true, SourceRegister: expr.Reg, Base: expr.PayloadBaseNetworkHeader, Offset: h.ttl,
		Len: 1}
	switch {
	case h.family == lb.IPv4: // with the byte behind it, as the checksum is one of 16 bits
		const checksum = 10 // in the header
		write.Len, write.Checksum, write.ChecksumOffset = 2, true, checksum
		return expr.List{network(expr.Reg, h.ttl, 2), expr.Edit([]byte{keep, 255}, []byte{flip, 0}), write}
	case keep == 0:
		return expr.List{&expr.Immediate{Register: expr.Reg, Data: []byte{flip}}, write}
	}
	return expr.List{h.loadTTL(), expr.Edit([]byte{keep}, []byte{flip}), write}
}

// Bits of a TCP header (RFC 9293 section 3.1).
const fin, syn, rst = 1, 2, 4

// Packets that conntrack knows no connection of have one of these states. The end of an unknown
// connection is invalid, and so is what is out of the window of a known one.
const unknownStates = expr.CtStateBitINVALID | expr.CtStateBitNEW

// strayRules return the rules of the chain of stray packets. All other packets leave it after one
// rule, and the first packets of connections, which have a SYN, after some more.
func (h header) strayRules(t *table) []nft.Rule {
	nodes := t.nodes()
	var all rules
	all.add("known connections", expr.HasNoBits(expr.State(), unknownStates), expr.Accept())
	for _, number := range nft.ErrorTypes(h.family) {
		all.add("", nft.IsError(h.family, number), expr.Goto(chainErrors))
	}
	all.add("", isTCP(expr.CmpOpNeq), expr.Accept())
	all.add("new connections", flags(expr.CmpOpNeq, syn), expr.Accept())
	all.add("", h.isTTL(expr.CmpOpLt, 2), expr.Accept())
	inDoubt := expr.Join(expr.HasBits(expr.State(), expr.CtStateBitINVALID), flags(expr.CmpOpEq, fin|rst))
	notInDoubt := h.span(expr.CmpOpNeq, floor-overrun, spentInDoubt+maxHops)
	endsInDoubt := h.span(expr.CmpOpEq, floor-overrun, spentInDoubt)
	ring := len(t.ring) > 0
	if ring {
		all.add("out of the tunnel, for another address", h.inTunnel(), h.isNotFor(setRing), expr.Drop())
		all.add("ring begins", h.isFor(setRing), h.unmarked(), h.setTTL(spent+maxHops))
		all.add("ring ends, in doubt", inDoubt, h.isFor(setRing), h.ends(spent), expr.Drop())
		all.add("ring, in doubt from here", inDoubt, h.isFor(setRing), h.span(expr.CmpOpEq, spent, spent+maxHops),
			h.editTTL(255, doubt))
	}
	for _, node := range nodes { // the previous owner is the only one to ask
		all.add("", inDoubt, h.isFor(name(prefixVIPs, node)), notInDoubt, h.setTTL(spentInDoubt+1))
	}
	if ring {
		all.add("ring ends, in doubt", h.isFor(setRing), endsInDoubt, expr.Drop())
	}
	all.add("moved here, in doubt", fromPeer(), endsInDoubt, expr.Drop())
	all.add("", inDoubt, notInDoubt, expr.Accept()) // of no VIP
	if ring {
		// Not left to what delivers here: with policy Local and no endpoint that would be silence.
		all.add("ring ends", isTCP(expr.CmpOpEq), h.isFor(setRing), h.ends(spent),
			expr.Refuse(unix.NFT_REJECT_TCP_RST, 0))
	}
	// Also where this node has no ring: another one may have.
	all.add("", h.ends(spent), expr.Accept())
	all.add("", h.ends(floor), expr.Accept())
	h.recall(&all, t)
	// A packet that another node has moved here, of a connection that this node does not know, is not
	// moved on, lest it go round in circles. On a ring it goes on until its TTL is spent.
	all.add("moved here", fromPeer(), h.offRing(t), expr.Accept())
	for _, node := range nodes {
		if len(t.targets[node]) > 0 {
			all.add("", h.isFor(name(prefixVIPs, node)), expr.Goto(name(prefixNew, node)))
		}
	}
	if ring { // of a VIP whose next node changes while the packet passes through these rules
		all.add("ring changes", isTCP(expr.CmpOpEq), h.isFor(setRing), expr.Drop())
	}
	return all
}

// recall adds the rules for packets of connections that are remembered to have gone to some node. It may have been an
// older connection, with the same addresses and ports. So on a ring memory is followed at the begin only, and then all
// nodes are asked in order, but for those that are off the ring: they are asked by memory alone.
func (h header) recall(all *rules, t *table) {
	if len(t.ring) == 0 {
		all.add("recalled", expr.Jump(chainRecall))
		return
	}
	for _, end := range []int{spent, spentInDoubt} {
		all.add("ring begins, recalled", h.span(expr.CmpOpEq, byte(end+maxHops-recalls+1), byte(end+maxHops)),
			h.isFor(setRing), expr.Jump(chainRecall))
		h.cap(all, t, end, spare)
	}
	all.add("off the ring, recalled", expr.Jump(chainOffRing))
}

// recallRules return the rules that follow what is remembered.
func (h header) recallRules(t *table) []nft.Rule {
	var all rules
	for _, node := range t.nodes() {
		all.add("", h.remembered(prefixFlows, node), expr.Goto(name(prefixTo, node)))
		all.add("", h.remembered(prefixFresh, node), expr.Goto(name(prefixNew, node)))
	}
	return all
}

// offRingRules return the rules that follow it to nodes off the ring, and to the next one in order.
func (h header) offRingRules(t *table) []nft.Rule {
	if len(t.ring) == 0 {
		return nil
	}
	var all rules
	for _, node := range t.nodes() {
		offRing := h.isNotFor(h.onRing(node).Name)
		all.add("", offRing, h.remembered(prefixFlows, node), expr.Goto(name(prefixTo, node)))
		all.add("", offRing, h.remembered(prefixFresh, node), expr.Goto(name(prefixNew, node)))
		if len(t.targets[node]) > 0 {
			all.add("", h.isFor(name(prefixVIPs, node)), h.remembered(prefixFlows, node), expr.Goto(name(prefixTo, node)))
		}
	}
	return all
}

// remembered matches packets of connections that are in a memory of a node.
func (h header) remembered(memory string, node netip.Addr) expr.List {
	return append(h.flow(), expr.In(name(memory, node))...)
}

// errorRules return the rules for ICMP errors about packets of connections that this node does not know. They
// go round as stray packets do, and nothing is remembered of them.
func (h header) errorRules(t *table) []nft.Rule {
	var all rules
	all.add("", h.isTTL(expr.CmpOpLt, 2), expr.Accept())
	if len(t.ring) > 0 {
		all.add("out of the tunnel, for another address", h.inTunnel(), h.isNotFor(setRing), expr.Drop())
		all.add("ring begins", h.isFor(setRing), h.unmarked(), h.setTTL(spent+maxHops))
		h.cap(&all, t, spent, 0) // nothing is remembered of errors
		all.add("ring ends", h.isFor(setRing), h.span(expr.CmpOpNeq, spent+1, spent+maxHops), expr.Drop())
	}
	all.add("", h.ends(spent), expr.Accept()) // of a ring that this node does not have
	all.add("moved here", fromPeer(), h.offRing(t), expr.Accept())
	for _, node := range t.nodes() {
		if len(t.targets[node]) > 0 {
			isForNode := h.isFor(name(prefixVIPs, node))
			all.add("", isForNode, expr.Jump(chainUnconfirmed))
			all.add("", isForNode, h.unmarked(), h.setTTL(spent+1)) // one hop
			all.add("", isForNode, copyTo(node, t.carried[node]), expr.Drop())
		}
	}
	return all
}

// fromPeer matches packets of nodes that move packets here.
func fromPeer() expr.List {
	return expr.Join(expr.List{
		&expr.Meta{Key: expr.MetaKeyIIFTYPE, Register: expr.Reg},
		expr.Compare(expr.CmpOpEq, expr.Host16(unix.ARPHRD_ETHER)...),
		expr.Load(expr.Reg, expr.PayloadBaseLLHeader, 6, 6),
	}, expr.In(setPeers))
}

// offRing matches packets for addresses without a ring.
func (h header) offRing(t *table) expr.List {
	if len(t.ring) == 0 {
		return nil
	}
	return h.isNotFor(setRing)
}

// inTunnel matches packets that come out of the tunnel.
func (h header) inTunnel() expr.List {
	return expr.CameIn(expr.CmpOpEq, lb.TunnelName(h.family))
}

// recalls is how often memory is followed on a ring: by the first node and by those that follow. It ends before the way
// in order begins if that has up to maxHops - recalls moves.
const recalls = 4

// spare is how often a stray packet on a ring is moved in order beyond the nodes to ask: a node on its way may have
// left the ring that remembers where it went, or that knows its connection.
const spare = 1

// cap adds the rules that bound how far packets are from the end of their way, at a TTL, by the length of a ring and by
// how many more moves they may make: of packets that begin here, and of those whose TTL says more, as whoever can send
// to a node can choose it.
func (h header) cap(all *rules, t *table, end, more int) {
	for _, hops := range t.lengths() {
		if left := hops + more; left < maxHops {
			all.add("ring, in order", h.isFor(ringOf(hops)),
				h.span(expr.CmpOpEq, byte(end+left+1), byte(end+maxHops)), h.setTTL(byte(end+left)))
		}
	}
}

// unmarked matches TTLs that are none of the protocol's.
func (h header) unmarked() expr.List { return h.span(expr.CmpOpNeq, floor-overrun, spent+maxHops) }

// ends matches TTLs at an end, or at most overrun below.
func (h header) ends(at byte) expr.List { return h.span(expr.CmpOpEq, at-overrun, at) }

type rules []nft.Rule

func (r *rules) add(comment string, parts ...expr.List) {
	*r = append(*r, nft.Rule{Comment: comment, Exprs: expr.Join(parts...)})
}

// toRules return the rules that move a packet of a connection to remember.
func (h header) toRules(node netip.Addr, link int) []nft.Rule {
	var all rules
	all.add("to renew", h.flow(), expr.NotIn(setRenewed), h.share(setShares, flowTimeout),
		h.dynset(name(prefixFlows, node), unix.NFT_DYNSET_OP_UPDATE), h.dynset(setRenewed, unix.NFT_DYNSET_OP_ADD))
	all.add("", expr.Jump(chainConfirmed))
	all.move(h, node, link)
	return all
}

// dynset adds a packet's connection to a memory. With an update its time there begins anew if it is
// there already.
func (h header) dynset(memory string, operation uint32) expr.List {
	return append(h.flow(), &expr.Dynset{SrcRegKey: expr.Reg, SetName: memory, Operation: operation})
}

// move moves a packet: a copy goes out to the node, over the tunnel if link is not 0, and this one ends here, so that
// conntrack forgets it. Two nodes that each remember that the other had it would move it for as long as its TTL lasts,
// so it has one of the protocol's.
func (r *rules) move(h header, node netip.Addr, link int) {
	r.add("moved one by one", h.unmarked(), h.setTTL(spent+maxHops))
	r.add("", copyTo(node, link))
	r.add("", expr.Drop())
}

func copyTo(node netip.Addr, link int) expr.List {
	to := expr.List{&expr.Counter{}, &expr.Immediate{Register: expr.Reg, Data: node.AsSlice()}}
	if link == 0 {
		return append(to, &expr.Dup{RegAddr: expr.Reg})
	}
	return append(to, &expr.Immediate{Register: unix.NFT_REG_2, Data: expr.Host32(uint32(link))},
		&expr.Dup{RegAddr: expr.Reg, RegDev: unix.NFT_REG_2})
}

// Headers without options, in bytes.
const ipv6Header, tcpHeader = 40, 20

// segmentHook is entered behind translation (100): the source of an answer is the VIP again.
var segmentHook = nft.Hook{Kind: "filter", Number: unix.NF_INET_POST_ROUTING, Priority: 110}

// segmentRules return the rules that tell clients how much fits into the tunnel, for connections
// that may be moved later.
func (h header) segmentRules(t *table) []nft.Rule {
	if t.segment == 0 {
		return nil
	}
	var all rules
	all.add("fits into the tunnel", isTCP(expr.CmpOpEq), flags(expr.CmpOpNeq, syn),
		expr.List{network(expr.Reg, h.source, h.size)}, expr.In(setRing),
		expr.List{&expr.Immediate{Register: expr.Reg, Data: binary.BigEndian.AppendUint16(nil, uint16(t.segment))},
			&expr.Segment{Register: expr.Reg}})
	return all
}
