package nftables

import (
	"errors"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/nfnetlink"
	"github.com/landfall-lb/landfall/proxy/nft"
	"github.com/landfall-lb/landfall/proxy/nft/expr"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// relayMap leads from a protocol to the address and port of the node's relay. Its elements time out, so
// that the rules never lead for long to a relay that is not there: without one they go on.
const relayMap = "relay"

// relayRates has how many flows of UDP the rules may lead to the relay from each namespace, and relayPorts the ports
// at which the relay receives UDP, which time out as the elements of relayMap do. So do those of relayLeased, the
// protocols that relayMap has: Linux 6.1 looks up a key of a map only to load its value. One that gets another key
// needs another name: the whole table is written anew where a set has another shape.
const relayRates, relayPorts, relayLeased = "relay-shares", "relay-ports", "relay-leased"

// Bounds of relayRates: a namespace with room in its rate again is forgotten, and flows of one for which there is no
// place go straight to endpoints.
const (
	maxRelayRates = 1 << 14
	relayRateFor  = 10 * time.Second
	// relayRateOfAll is how many times the rate of one namespace all have.
	relayRateOfAll = 2
	// relayBurst is which part of a second's flows may come at once after a silence. Of all there are fewer with the
	// standard rate than the relay asks the proxy about at once.
	relayBurst = 4
)

// Chains of the relay's UDP.
const (
	chainRelayUDP   = "relay-udp"
	chainRelayInput = "relay-input"
)

// CommentRelay is the comment of the rules that send connections to the relay.
const CommentRelay = "relay"

// relay renders what sends connections to relayed frontends to the relay. Those of the node itself go on:
// the relay's own would come back to it where an endpoint is an address of a relayed Service. So do those that
// come in through a VRF: the relay's sockets are in none, and the kernel would refuse them.
func (b builder) relay(config plan.Config) []nft.Rule {
	if !config.Relay {
		return nil
	}
	outside := b.notFromNode()
	for _, name := range config.VRFInterfaces {
		outside = append(outside, expr.CameIn(expr.CmpOpNeq, name)...)
	}
	relayed := func(p protocol, then expr.List) nft.Rule {
		return b.rule(CommentRelay, b.isProtocol(p), b.in(setRelayed), outside, then)
	}
	return []nft.Rule{relayed(tcp, b.toRelay()), relayed(udp, expr.Jump(chainRelayUDP))}
}

// toRelay sends to the relay that is leased for the protocol.
func (b builder) toRelay() expr.List { // nft reads back no translation to a port without a protocol
	return expr.Join(b.key(fieldProtocol), expr.List{b.lookup(relayMap, 0)}, b.dnatMixed())
}

// relayUDP renders which flows of UDP go to the relay: so many a second of each namespace, and of all. Others go
// straight to endpoints, as without a relay. So a flood to the Services of one namespace keeps no relay from others.
func (b builder) relayUDP(rate int) []nft.Rule {
	var within expr.List
	if rate > 0 {
		limit := func(times int) *expr.Limit {
			return &expr.Limit{Rate: uint64(times * rate), Burst: uint32(times*rate)/relayBurst + 1}
		}
		within = expr.Join(b.grouped(setRelayOwners), b.key(fieldGroup), expr.List{&expr.Dynset{SrcRegKey: expr.Reg,
			SetName: relayRates, Operation: unix.NFT_DYNSET_OP_UPDATE, Timeout: relayRateFor, Each: limit(1)},
			limit(relayRateOfAll)})
	}
	return []nft.Rule{b.rule(CommentRelay, b.isProtocol(udp), within, b.toRelay()),
		b.rule("beyond the rate", b.key(fieldProtocol), expr.In(relayLeased), expr.List{&expr.Counter{}})}
}

// relayInput drops what begins a flow to the relay's port and no relayed frontend: sent to the port itself, or led
// there by others. The relay would have to ask the proxy about each.
func (b builder) relayInput() nft.Rule {
	return b.rule("to no relayed frontend", b.isProtocol(udp), b.key(fieldProtocol, fieldPort), expr.In(relayPorts),
		expr.HasBits(expr.State(), expr.CtStateBitNEW),
		b.key(fieldOriginalDestination, fieldProtocol, fieldOriginalPort), expr.NotIn(setNames[setRelayed]),
		expr.List{&expr.Counter{}}, expr.Drop())
}

// Lease has the rules lead to the node's relay for a while. It has a socket of its own, and its methods
// are not safe for concurrent use.
type Lease struct{ conn *nfnetlink.Conn }

// OpenLease opens the way to the network namespace of the calling thread.
func OpenLease() (*Lease, error) {
	conn, err := nfnetlink.Open()
	if err != nil {
		return nil, err
	}
	return &Lease{conn}, nil
}

// Close closes the socket. What was leased ends with its time.
func (l *Lease) Close() { l.conn.Close() }

// Renew has the rules lead what is relayed to an address and port of this node for the given time from now, in
// place of what was leased before.
func (l *Lease) Renew(way plan.RelayWay, to netip.AddrPort, lasting time.Duration) error {
	if lb.FamilyOf(to.Addr()) != way.Family {
		return fmt.Errorf("lead %s to the relay: %s is of another family", way.Family, to)
	}
	err := l.renew(way.Family, relayLeased, relayElement(way.Protocol), lasting)
	if err == nil && way.Protocol == lb.UDP {
		number, _ := protocolOf(way.Protocol)
		key := appendPort([]byte{byte(number), 0, 0, 0}, to.Port())
		err = l.renew(way.Family, relayPorts, nft.Element{Key: key}, lasting)
	}
	if err == nil { // the last, as it is what leads to the relay
		e := relayElement(way.Protocol)
		e.Value = appendPort(to.Addr().AsSlice(), to.Port())
		err = l.renew(way.Family, relayMap, e, lasting)
	}
	if err != nil {
		return fmt.Errorf("lead %s of %s to the relay: %w", way.Protocol, way.Family, err)
	}
	return nil
}

// renew has an element be in a set for the given time from now.
func (l *Lease) renew(family lb.Family, set string, e nft.Element, lasting time.Duration) error {
	e.Timeout = lasting
	add := func(remove bool) error {
		b := l.batch(family)
		if remove {
			b.RemoveElements(set, one(nft.Element{Key: e.Key}))
		}
		b.AddElements(set, one(e))
		return b.Commit(l.conn)
	}
	err := add(true)
	if errors.Is(err, unix.ENOENT) { // there was none
		err = add(false)
	}
	return err
}

// RelayCounts are what the rules have counted since they were written.
type RelayCounts struct {
	Straight uint64 // flows of UDP beyond the rate, which went straight to endpoints
	Dropped  uint64 // datagrams to the relay's port and no relayed frontend
}

// Counts returns what the rules of these families have counted.
func (l *Lease) Counts(families []lb.Family) (counts RelayCounts, err error) {
	for _, family := range families {
		chains, err := nft.Listing{Conn: l.conn, Table: nft.Table{Family: family, Name: TableName}}.Chains()
		if err != nil && !errors.Is(err, unix.ENOENT) { // the table may not be written yet
			return counts, fmt.Errorf("read the counters of the relay's rules: %w", err)
		}
		counts.Straight += chains[chainRelayUDP].Packets
		counts.Dropped += chains[chainRelayInput].Packets
	}
	return counts, nil
}

// End has the rules lead to no relay.
func (l *Lease) End(way plan.RelayWay) error {
	for _, set := range []string{relayMap, relayLeased} {
		b := l.batch(way.Family)
		b.RemoveElements(set, one(relayElement(way.Protocol)))
		if err := b.Commit(l.conn); err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("lead %s of %s to no relay: %w", way.Protocol, way.Family, err)
		}
	}
	return nil
}

func (l *Lease) batch(family lb.Family) *nft.Batch {
	return nft.NewBatch(nft.Table{Family: family, Name: TableName})
}

func relayElement(p lb.Protocol) nft.Element {
	number, _ := protocolOf(p)
	return nft.Element{Key: []byte{byte(number)}}
}
