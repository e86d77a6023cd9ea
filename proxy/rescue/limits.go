package rescue

import (
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/nft"
	"github.com/landfall-lb/landfall/proxy/nft/expr"
)

// Whoever can send packets to a VIP can make up stray ones, each of which costs a packet to every
// node of a ring, and memory on the way. So nodes move only so many in a second, and remember a
// connection for long only once it has sent a second packet. What is above a limit is dropped and
// not refused: a real connection sends it again.
const (
	chainUnconfirmed = "limit-unconfirmed" // is asked before a packet is moved whose connection is not remembered
	chainConfirmed   = "limit-confirmed"   // is asked before one of a remembered connection is
	chainOver        = "over-limit"        // where packets above a limit end
	prefixNew        = "new-"
	prefixFresh      = "fresh-"
	// setSure has what is kept of the node's limit for each VIP, however many others are flooded.
	setSure        = "limit-sure"
	setFlooded     = "flooded"
	setShares      = "shares"       // of what is remembered for long
	setFreshShares = "shares-fresh" // and for a short while
	setRenewed     = "renewed"      // connections whose time in the memory has just begun (anew)
)

const (
	// freshTimeout is how long a node remembers a connection from the first packet that it moves:
	// longer than the time between two keepalives of an idle one, which else would be lost at a second
	// move. Nothing makes that longer, so what is held is no more than what was added in this time.
	freshTimeout = 5 * time.Minute
	// flowTimeout is how long a node remembers a connection for long. Its packets renew that, once in
	// renewal and if the share of its VIP has room: a renewal counts like a new connection, so what is
	// held is no more than what was added or renewed in this time.
	flowTimeout = lb.FlowMemory + renewal
	renewal     = 30 * time.Minute
	// burst is of how many seconds of the limit connections of one VIP move at once: only the first
	// packet of each counts.
	burst = 10
	// nodeLimit is how much more than for one VIP is moved for all together. sureLimit of it is kept for
	// packets within the small share that each VIP has, and commonLimit goes to whoever comes first. So it takes
	// floods of commonLimit VIPs to leave another one no more than its small share.
	nodeLimit, sureLimit, commonLimit = sureLimit + commonLimit, 2, 4
	// The small share of a VIP is a sureRate-th of the limit for one VIP, and a sureBurst-th of what that
	// moves in a second at once. So it takes floods of sureLimit*sureRate VIPs to use up what is kept.
	sureRate, sureBurst = 64, 2
	// confirmedLimit is how much more is moved of connections that are remembered.
	confirmedLimit = 250
	// A VIP may have shareBurst connections added to a memory at once, and so many more in each second
	// that they are shareMore within the time for which the memory keeps one. It never holds more than
	// both, so six VIPs have to be flooded to fill a memory.
	shareBurst, shareMore = maxFlows / 8, maxFlows / 16
	// maxLimited is of how many VIPs the rates are known at a time; where there are more, the node's
	// limit holds alone.
	maxLimited   = 65536
	limitTimeout = 2 * burst * time.Second
	sureTimeout  = 2 * sureRate * time.Second / sureBurst // until a share that was used up is whole again, twice
	floodedFor   = time.Minute
)

// DefaultLimit is a Deps.Limit by which more busy connections of one VIP move at once without a
// loss than are remembered. MaxLimit is the greatest one.
const (
	DefaultLimit = 20_000
	MaxLimit     = 100_000
)

func (h header) fresh(node netip.Addr) nft.Set {
	return h.memory(name(prefixFresh, node), freshTimeout)
}

// timed is a set of VIPs that packets add to.
func (h header) timed(name string, timeout time.Duration) nft.Set {
	s := h.addresses(name)
	s.Flags, s.Size, s.Timeout = unix.NFT_SET_EVAL|unix.NFT_SET_TIMEOUT, maxLimited, uint64(timeout.Milliseconds())
	return s
}

// limitSets are the sets that the rules of all targets share.
func (h header) limitSets() []nft.Set {
	return []nft.Set{h.timed(chainUnconfirmed, limitTimeout), h.timed(chainConfirmed, limitTimeout),
		h.timed(setSure, sureTimeout),
		h.timed(setShares, 2*flowTimeout), h.timed(setFreshShares, 2*freshTimeout), h.timed(setFlooded, floodedFor),
		h.memory(setRenewed, renewal)}
}

// newRules return the rules that move a packet of a connection that is not remembered, or only for
// a short while.
func (h header) newRules(node netip.Addr, link int) []nft.Rule {
	fresh := name(prefixFresh, node)
	var all rules
	all.add("second packet", h.flow(), expr.In(fresh), h.share(setShares, flowTimeout),
		h.dynset(name(prefixFlows, node), unix.NFT_DYNSET_OP_ADD), h.dynset(setRenewed, unix.NFT_DYNSET_OP_ADD),
		expr.Goto(name(prefixTo, node)))
	all.add("above the share", h.flow(), expr.In(fresh), expr.Jump(chainConfirmed))
	all.add("first packet", h.flow(), expr.NotIn(fresh), expr.Jump(chainUnconfirmed))
	all.add("", h.flow(), expr.NotIn(fresh), h.share(setFreshShares, freshTimeout),
		h.dynset(fresh, unix.NFT_DYNSET_OP_ADD))
	all.move(h, node, link)
	return all
}

// share matches while a VIP has room in a memory that keeps connections for some time.
func (h header) share(set string, timeout time.Duration) expr.List {
	return h.perVIP(set, expr.Limit{Rate: uint64(shareMore / (timeout / time.Second)), Burst: shareBurst})
}

// perVIP matches by a limit of which each VIP has one.
func (h header) perVIP(set string, limit expr.Limit) expr.List {
	return expr.List{network(expr.Reg, h.dest, h.size), &expr.Dynset{SrcRegKey: expr.Reg, SetName: set,
		Operation: unix.NFT_DYNSET_OP_UPDATE, Each: &limit}}
}

// limitRules return the rules of the chains of limits. A limit of 0 is none.
func (h header) limitRules(limit int) map[string][]nft.Rule {
	var end rules
	end.add("", expr.List{network(expr.Reg, h.dest, h.size), &expr.Dynset{SrcRegKey: expr.Reg, SetName: setFlooded,
		Operation: unix.NFT_DYNSET_OP_UPDATE}})
	end.add("", expr.List{&expr.Counter{}}, expr.Drop())
	all := map[string][]nft.Rule{chainOver: end, chainUnconfirmed: nil, chainConfirmed: nil}
	if limit > 0 {
		all[chainUnconfirmed] = h.unconfirmed(limit)
		all[chainConfirmed] = h.confirmed(confirmedLimit * limit)
	}
	return all
}

// limitChains are the chains of limitRules, in an order in which they can be written.
var limitChains = []string{chainOver, chainUnconfirmed, chainConfirmed}

// unconfirmed returns the rules for packets of connections that are not remembered. The first one bounds each
// VIP. The second one lets pass what is within the small share of a VIP, as long as the part of the node's limit
// that is kept for such packets lasts. All else shares the rest of the node's limit.
func (h header) unconfirmed(rate int) (all rules) {
	all.add("of the address", h.perVIP(chainUnconfirmed, over(rate, burst)), expr.Goto(chainOver))
	kept := within(sureLimit*rate, sureLimit*rate*burst)
	all.add("kept for the address", h.perVIP(setSure, within(rate/sureRate, rate/sureBurst)), expr.List{&kept},
		expr.Return())
	common := over(commonLimit*rate, burst)
	all.add("of the node", expr.List{&common}, expr.Goto(chainOver))
	return all
}

// confirmed returns the rules for packets of connections that are remembered. They keep nothing for single VIPs,
// as the node's limit is more than a node can move.
func (h header) confirmed(rate int) (all rules) {
	all.add("of the address", h.perVIP(chainConfirmed, over(rate, 1)), expr.Goto(chainOver))
	node := over(nodeLimit*rate, 1)
	all.add("of the node", expr.List{&node}, expr.Goto(chainOver))
	return all
}

// over matches what is above a rate, and what has come in so many seconds at once.
func over(rate, seconds int) expr.Limit {
	return expr.Limit{Rate: uint64(rate), Burst: uint32(rate * seconds), Over: true}
}

// within matches what is within a rate, and so many packets at once.
func within(rate, burst int) expr.Limit {
	return expr.Limit{Rate: uint64(max(rate, 1)), Burst: uint32(max(burst, 1))}
}

// flood is what the actor knows of a flood in one family.
type flood struct {
	counted uint64
	warned  bool
}

// watchFlood counts the packets that were dropped since the last look, and logs for which VIPs,
// once for each flood.
func (a *Actor) watchFlood(family lb.Family, have held) {
	f := a.floods[family]
	if have.dropped < f.counted {
		f.counted = 0 // the table was written anew
	}
	a.dropped.Add(have.dropped - f.counted)
	f.counted = have.dropped
	switch now := len(have.flooded) > 0; {
	case now && !f.warned:
		a.log.Warn("drops packets of unknown connections above the limit", "family", family, "limit", a.limit,
			"addresses", some(have.flooded))
		f.warned = true
	case !now && f.warned:
		a.log.Info("no packets of unknown connections are above the limit any more", "family", family)
		f.warned = false
	}
	a.floods[family] = f
}

// some returns as many addresses as are worth a line.
func some(all []netip.Addr) []netip.Addr { return all[:min(len(all), 10)] }
