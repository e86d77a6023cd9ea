package plan

import (
	"net/netip"
	"slices"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
)

// Route is how one prefix is announced to one peer.
type Route struct {
	// LocalPref is sent to internal peers only.
	LocalPref uint32
	MED       uint32
	HasMED    bool
	// Prepend is how many more times the AS number stands in the path, towards external peers only.
	Prepend int
	// Communities are sorted and distinct.
	Communities []lb.Community
}

// DefaultLocalPref is LOCAL_PREF where nothing is configured.
const DefaultLocalPref = 100

// Equal reports whether two routes have the same attributes.
func (r Route) Equal(other Route) bool {
	return r.LocalPref == other.LocalPref && r.MED == other.MED && r.HasMED == other.HasMED &&
		r.Prepend == other.Prepend &&
		slices.Equal(r.Communities, other.Communities)
}

// leaving reports whether the route is about to end.
func (r Route) leaving() bool {
	return r.LocalPref == 0 && slices.Contains(r.Communities, GracefulShutdown)
}

// BGPSession is the whole truth of one session: how to have it, and what the peer hears over it.
type BGPSession struct {
	LocalASN, PeerASN uint32
	Dynamic           lb.DynamicASN
	// Addr and Port are the peer's; with Interface set, the peer's address is found by its router
	// advertisements there.
	Addr      netip.Addr
	Interface string
	// VRF names the VRF that the session is in; "" for the main routing table.
	VRF string
	// VRFIndex is the index of the VRF's interface. A VRF that is deleted and made anew has another one, and
	// sockets do not follow the name.
	VRFIndex int
	Port     uint16
	Source   netip.Addr
	RouterID netip.Addr
	HoldTime time.Duration
	// KeepaliveTime is 0 for a third of the negotiated hold time.
	KeepaliveTime, ConnectTime time.Duration
	Password                   string
	MultiHop, GracefulRestart  bool
	// Families are those that are offered to the peer.
	Families []lb.Family
	// NextHops are the node's addresses for routes of a family other than that of the session's own
	// addresses; not valid where the node has none. IPv4 routes over an IPv6 session prefer the
	// session's own address if the peer can take it (RFC 8950).
	NextHop4, NextHop6 netip.Addr
	AcceptRoutes       bool
	// BFDDown ends the session, and holds it down, while it is set.
	BFDDown bool
	// Routes must not be changed once they are handed on.
	Routes map[netip.Prefix]Route
}

// Internal reports whether a peer with that AS number is in the node's own AS.
func (s BGPSession) Internal(peerASN uint32) bool { return peerASN == s.LocalASN }
