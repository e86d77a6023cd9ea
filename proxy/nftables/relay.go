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

// CommentRelay is the comment of the rules that send connections to the relay.
const CommentRelay = "relay"

// relay renders what sends connections to relayed frontends to the relay. Those of the node itself go on:
// the relay's own would come back to it where an endpoint is an address of a relayed Service.
func (b builder) relay(config plan.Config) []nft.Rule {
	if !config.Relay {
		return nil
	}
	var rules []nft.Rule
	for _, p := range []protocol{tcp, udp} { // nft reads back no translation to a port without a protocol
		rules = append(rules, b.rule(CommentRelay, b.isProtocol(p), b.in(setRelayed), b.notFromNode(),
			b.key(fieldProtocol), expr.List{b.lookup(relayMap, 0)}, b.dnatMixed()))
	}
	return rules
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
	e := relayElement(way.Protocol)
	e.Value, e.Timeout = appendPort(to.Addr().AsSlice(), to.Port()), lasting
	add := func(remove bool) error {
		b := l.batch(way.Family)
		if remove {
			b.RemoveElements(relayMap, one(relayElement(way.Protocol)))
		}
		b.AddElements(relayMap, one(e))
		return b.Commit(l.conn)
	}
	err := add(true)
	if errors.Is(err, unix.ENOENT) { // there was none
		err = add(false)
	}
	if err != nil {
		return fmt.Errorf("lead %s of %s to the relay: %w", way.Protocol, way.Family, err)
	}
	return nil
}

// End has the rules lead to no relay.
func (l *Lease) End(way plan.RelayWay) error {
	b := l.batch(way.Family)
	b.RemoveElements(relayMap, one(relayElement(way.Protocol)))
	if err := b.Commit(l.conn); err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("lead %s of %s to no relay: %w", way.Protocol, way.Family, err)
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
