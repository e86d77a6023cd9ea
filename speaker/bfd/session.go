package bfd

import (
	"net/netip"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
)

// Key names a session: with whom, and over what.
type Key struct {
	// Peer is the address that the peer sends from and listens on. A link-local one (unnumbered BGP)
	// has its interface as zone.
	Peer netip.Addr
	// Local is the address to send from; the zero Addr lets the kernel choose.
	Local netip.Addr
	// Interface is the only one to send and receive on; "" is any, or the zone of Peer.
	Interface string
	// VRF is the VRF to send and receive in; "" for the main routing table.
	VRF string
	// VRFIndex is the index of the VRF's interface. Of a VRF that was deleted and made anew it differs, which makes
	// another session: a socket stays bound to the interface of before.
	VRFIndex int
	// Multihop is for peers that are not on the same link (RFC 5883).
	Multihop bool
}

// Reasons to refuse a session or a part of it.
const (
	ReasonPeerInvalid     lb.Reason = "PeerInvalid"     // the key makes no sense
	ReasonProfileInvalid  lb.Reason = "ProfileInvalid"  // a number is out of its range
	ReasonEchoUnsupported lb.Reason = "EchoUnsupported" // echo mode is asked for; the session runs without
)

// check says why there can be no such session, or nil.
func (k Key) check() *lb.Refusal {
	switch {
	case !k.Peer.IsValid() || k.Peer.IsUnspecified() || k.Peer.IsMulticast() || k.Peer.Is4In6():
		return lb.Refuse(ReasonPeerInvalid, "peer address %q is not that of one router", k.Peer)
	case k.Local.IsValid() && k.Local.Is4() != k.Peer.Is4():
		return lb.Refuse(ReasonPeerInvalid, "local address %s is not of the family of peer %s", k.Local, k.Peer)
	case k.Peer.Is6() && k.Peer.IsLinkLocalUnicast() && k.device() == "":
		return lb.Refuse(ReasonPeerInvalid, "link-local peer %s needs an interface", k.Peer)
	case k.Peer.Zone() != "" && k.Interface != "" && k.Peer.Zone() != k.Interface:
		return lb.Refuse(ReasonPeerInvalid, "peer %s is not on interface %s", k.Peer, k.Interface)
	case k.Peer.IsLinkLocalUnicast() && k.Multihop:
		return lb.Refuse(ReasonPeerInvalid, "link-local peer %s cannot be several hops away", k.Peer)
	}
	return nil
}

// device is the interface that the session is bound to, or "".
func (k Key) device() string {
	if k.Interface != "" {
		return k.Interface
	}
	return k.Peer.Zone()
}

func (k Key) String() string {
	s := k.Peer.String()
	if k.Multihop {
		s += " multihop"
	}
	if k.Local.IsValid() {
		s += " from " + k.Local.String()
	}
	if k.Interface != "" && k.Peer.Zone() == "" {
		s += " on " + k.Interface
	}
	if k.VRF != "" {
		s += " in VRF " + k.VRF
	}
	return s
}

// Profile is how a session runs. Zero values take the defaults.
type Profile struct {
	// TransmitInterval is the least time between packets that we would like (Desired Min TX), 10 ms to
	// 60 s, whole microseconds; default 300 ms.
	TransmitInterval time.Duration
	// ReceiveInterval is the least time between packets that we put up with (Required Min RX), as
	// above.
	ReceiveInterval time.Duration
	// DetectMultiplier is how many of our packets in a row the peer may miss before it calls the
	// session down, 2 to 255; default 3.
	DetectMultiplier uint8
	// Passive waits for the peer's first packet before sending any.
	Passive bool
	// MinimumTTL is the least TTL or hop limit that a packet of a multihop session arrives with, 1 to
	// 254; default 254, one router in between. Without Multihop it is always 255 (RFC 5881 section 5)
	// and this is not used.
	MinimumTTL uint8
	// Echo asks for echo mode, which does not exist here: Check says so.
	Echo bool
}

const (
	minInterval = 10 * time.Millisecond
	maxInterval = 60 * time.Second
)

// Check returns what is refused of the profile. Fatal is why it cannot be used at all; ignored is
// what it is used without.
func (p Profile) Check() (fatal, ignored *lb.Refusal) {
	p = p.withDefaults()
	for _, i := range [...]struct {
		name  string
		value time.Duration
	}{{"transmit interval", p.TransmitInterval}, {"receive interval", p.ReceiveInterval}} {
		if i.value < minInterval || i.value > maxInterval {
			return lb.Refuse(ReasonProfileInvalid, "%s %v is not between %v and %v", i.name, i.value, minInterval, maxInterval),
				nil
		}
		if i.value%time.Microsecond != 0 {
			return lb.Refuse(ReasonProfileInvalid, "%s %v is not in whole microseconds", i.name, i.value), nil
		}
	}
	if p.DetectMultiplier < 2 {
		return lb.Refuse(ReasonProfileInvalid, "detect multiplier %d is not between 2 and 255", p.DetectMultiplier), nil
	}
	if p.MinimumTTL > 254 {
		return lb.Refuse(ReasonProfileInvalid, "minimum TTL %d is not between 1 and 254", p.MinimumTTL), nil
	}
	if p.Echo {
		ignored = lb.Refuse(ReasonEchoUnsupported,
			"echo mode is not supported: the session runs in asynchronous mode only, at its transmit and receive intervals")
	}
	return nil, ignored
}

func (p Profile) withDefaults() Profile {
	const interval, multiplier, ttl = 300 * time.Millisecond, 3, 254
	if p.TransmitInterval == 0 {
		p.TransmitInterval = interval
	}
	if p.ReceiveInterval == 0 {
		p.ReceiveInterval = interval
	}
	if p.DetectMultiplier == 0 {
		p.DetectMultiplier = multiplier
	}
	if p.MinimumTTL == 0 {
		p.MinimumTTL = ttl
	}
	return p
}

// minTTL is the least TTL or hop limit that a packet of the session may arrive with.
func minTTL(k Key, p Profile) int {
	if k.Multihop {
		return int(p.MinimumTTL)
	}
	return 255
}
