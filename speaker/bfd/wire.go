package bfd

import (
	"net/netip"
	"time"
)

// The UDP ports (RFC 5881 section 4, RFC 5883 section 5).
const (
	portSingleHop = 3784
	portMultihop  = 4784
	minSourcePort = 49152 // up to 65535
)

// listener is one of the sockets that packets arrive on. The one without a VRF gets nothing that comes in through
// a VRF.
type listener struct {
	v6, multihop bool
	vrf          string
	vrfIndex     int
}

func (k Key) listener() listener {
	return listener{v6: k.Peer.Is6(), multihop: k.Multihop, vrf: k.VRF, vrfIndex: k.VRFIndex}
}

func (l listener) port() uint16 {
	if l.multihop {
		return portMultihop
	}
	return portSingleHop
}

// wire is the network as the engine sees it. All but wake is called by one goroutine.
type wire interface {
	// wait returns when something may have arrived, wake was called, or the time has come; the zero
	// time never comes.
	wait(until time.Time)
	// wake makes the wait that runs, or the next one, return. It never blocks.
	wake()
	// receive takes what has arrived, without waiting. All that arrived before the horizon has been
	// handed out; it is now once nothing is left. What is returned is overwritten by the next call.
	receive(now time.Time) (arrived []datagram, horizon time.Time)
	listen(l listener) error
	unlisten(l listener)
	// dial opens what packets of a session go out by, from the source port if it is free; 0 is any.
	dial(k Key, sourcePort uint16, random func() uint32) (link, error)
	close()
}

// link sends the packets of one session.
type link interface {
	send(b []byte) error // keeps nothing of b
	sourcePort() uint16
	// device is the index of the interface that the session is bound to, or 0.
	device() int
	// toward are the indexes of the interfaces that lead to the peer of a session that is bound to none;
	// none if that is unknown.
	toward() []int
	close()
}

// datagram is a UDP payload and what the kernel knows of it.
type datagram struct {
	payload  []byte
	listener listener
	from, to netip.Addr // without zone
	device   int        // index of the interface that it came in by
	ttl      int        // or hop limit; -1 is unknown
	at       time.Time  // when it arrived
	lost     bool       // others were lost before it for want of room in the socket
}
