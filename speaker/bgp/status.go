package bgp

import (
	"net/netip"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
)

// State of a session, as RFC 4271 section 8.2.2 names it. Active does not occur: between
// attempts a session is Idle, though a connection of the peer then begins one.
type State string

// The states.
const (
	Idle        State = "Idle"
	Connect     State = "Connect"
	OpenSent    State = "OpenSent"
	OpenConfirm State = "OpenConfirm"
	Established State = "Established"
)

// Status is what is really so of one session.
type Status struct {
	State State     `json:"state"`
	Since time.Time `json:"since"`
	// Reason and LastError say why the session is not, or was last not, established. LastError names
	// codes of NOTIFICATION messages as RFC 4271 does.
	Reason      lb.Reason `json:"reason,omitempty"`
	LastError   string    `json:"lastError,omitempty"`
	LastErrorAt time.Time `json:"lastErrorAt,omitzero"`
	// Flaps counts how often the session was lost.
	Flaps int `json:"flaps"`
	// Negotiated is nil unless the session is established.
	Negotiated *Negotiated `json:"negotiated,omitempty"`
	// Local is the node's address of the last connection; not valid before the first. It is known before the session
	// is established.
	Local netip.Addr `json:"-"`
	// Synced is set when all that the peer shall hear is on the wire, and nothing else.
	Synced bool `json:"synced"`
	// Prefixes is how many prefixes the peer hears, Heard how often that has changed within sessions.
	Prefixes int    `json:"prefixes"`
	Heard    uint64 `json:"-"`
	// Held are routes that cannot be sent over this session, by family, with the reason.
	Held map[lb.Family]lb.Refusal `json:"held,omitempty"`
	// Received is how many prefixes the peer announces, if it may; Routes are the first of them.
	Received int             `json:"received"`
	Routes   []ReceivedRoute `json:"routes,omitempty"`
	// Returned is how many prefixes that were announced from this AS the peer announces itself: it has
	// taken the routes of another node, and most likely those of this one.
	Returned int      `json:"returned"`
	Counters Counters `json:"counters"`
}

// PeerNode returns the status in the form that a BGPPeer shows. It does not change while an attempt
// to connect goes through its states, so that the speaker does not write again and again about a
// router that is away.
func (s Status) PeerNode() lb.PeerNode {
	if s.State != Established {
		return lb.PeerNode{State: string(Idle), Reason: s.Reason, Message: s.LastError}
	}
	node := lb.PeerNode{State: string(Established)}
	for _, f := range []lb.Family{lb.IPv4, lb.IPv6} {
		if held, ok := s.Held[f]; ok {
			node.Reason, node.Message = held.Reason, held.Message
		}
	}
	return node
}

// Negotiated is what both ends of a session have agreed on.
type Negotiated struct {
	PeerASN uint32         `json:"peerASN"`
	PeerID  netip.Addr     `json:"peerRouterID"`
	Local   netip.AddrPort `json:"local"`
	Peer    netip.AddrPort `json:"peer"`
	// Incoming is set when the peer has opened the connection.
	Incoming        bool          `json:"incoming"`
	Families        []lb.Family   `json:"families"`
	HoldTime        time.Duration `json:"holdTime"`
	KeepaliveTime   time.Duration `json:"keepaliveTime"`
	FourOctetASN    bool          `json:"fourOctetASN"`
	RouteRefresh    bool          `json:"routeRefresh"`
	ExtendedNextHop bool          `json:"extendedNextHop"`
	// GracefulRestart is set when the peer keeps routes while the speaker restarts, for as long as
	// RestartTime.
	GracefulRestart bool          `json:"gracefulRestart"`
	RestartTime     time.Duration `json:"restartTime,omitzero"`
}

// ReceivedRoute is a route that the peer announces. It is shown and used for nothing.
type ReceivedRoute struct {
	Prefix      netip.Prefix `json:"prefix"`
	NextHop     netip.Addr   `json:"nextHop"`
	ASPath      string       `json:"asPath"`
	Communities []string     `json:"communities,omitempty"`
}

// Counters count messages and bytes since the session was configured.
type Counters struct {
	MessagesIn  uint64 `json:"messagesIn"`
	MessagesOut uint64 `json:"messagesOut"`
	UpdatesIn   uint64 `json:"updatesIn"`
	UpdatesOut  uint64 `json:"updatesOut"`
	BytesIn     uint64 `json:"bytesIn"`
	BytesOut    uint64 `json:"bytesOut"`
}
