package lb

import (
	"cmp"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/labels"
)

// DynamicASN says which AS numbers a peer may have if none is configured.
type DynamicASN string

// The dynamic AS numbers.
const (
	InternalASN DynamicASN = "internal" // the node's own
	ExternalASN DynamicASN = "external" // any other
)

// Peer is one BGPPeer: a router, and the options of the sessions with it.
type Peer struct {
	Name    string
	UID     string
	Created time.Time
	// LocalASN is the AS number of the node towards this peer: localASN, or else myASN.
	LocalASN uint32
	// PeerASN is the AS number that the peer must have; 0 if Dynamic is set.
	PeerASN uint32
	Dynamic DynamicASN
	// Addr is the peer's address; not valid if Interface names the link to it (an unnumbered
	// session).
	Addr      netip.Addr
	Interface string
	// VRF names the VRF on the node that the session is in; "" for the main routing table.
	VRF      string
	Port     uint16
	Source   netip.Addr // not valid if the kernel chooses
	RouterID netip.Addr // not valid if the node's own is used
	// HoldTime is 0 or at least 3 s. KeepaliveTime is 0 for a third of the negotiated hold time.
	HoldTime, KeepaliveTime, ConnectTime time.Duration
	// Password is for TCP MD5; PasswordSecret names the Secret that has it instead (namespace "" is
	// Landfall's own).
	Password       string
	PasswordSecret *Key
	NodeSelectors  []labels.Selector // alternatives; all nodes if empty
	BFDProfile     string            // "" for none

	MultiHop, GracefulRestart, DualStack, AcceptRoutes bool

	// BadSelector says why one of NodeSelectors cannot be read, and selects nothing; nil if all can.
	BadSelector *Refusal
	// Problem is set if the specification cannot be used although the API server accepted it.
	Problem *Refusal
	// Status is the status as last written, by node.
	Status map[string]PeerNode
}

// Router is what a BGPPeer says of the way to the router.
type Router struct {
	Addr netip.Addr // not valid for an unnumbered session
	VRF  string     // "" for the main routing table
}

// PeerNode is one node's entry in the status of a peer: the state of its session.
type PeerNode struct {
	State   string // a state of RFC 4271, or Refused
	Reason  Reason
	Message string
}

// PeerSessions is what the speakers report of the sessions with one BGPPeer.
type PeerSessions struct {
	Name string
	// Addr is the peer's address; not valid if Interface names the link to it.
	Addr      netip.Addr
	Interface string
	PeerASN   uint32 // 0 if any number of the right kind will do
	BFD       bool   // a BFDProfile is named
	Sessions  []PeerSession
}

// PeerSession is one node's entry in the status of a peer.
type PeerSession struct {
	Node string
	PeerNode
	Since time.Time // of the state; zero if unknown
}

// BGPAdvertisement announces addresses of pools to BGP peers.
type BGPAdvertisement struct {
	Name       string
	Generation int64
	Created    time.Time
	// Pools are pool names; all pools if both Pools and PoolSelectors are empty.
	Pools         []string
	PoolSelectors []labels.Selector
	// ServiceSelectors and NodeSelectors are alternatives; all if empty.
	ServiceSelectors []labels.Selector
	NodeSelectors    []labels.Selector
	// BadSelector says why a selector cannot be read, and selects nothing; nil if all can.
	BadSelector *Refusal
	// Peers are names of peers; all if empty.
	Peers []string
	// AggregationLength is 1 to 32, AggregationLengthV6 1 to 128.
	AggregationLength, AggregationLengthV6 int
	LocalPref, MED                         *uint32 // nil if unset
	Prepend                                int
	// Communities are literals or names, as written.
	Communities []string
	// Conditions are the conditions as last written.
	Conditions []Condition
}

// SelectsPool reports whether the advertisement selects the pool.
func (a BGPAdvertisement) SelectsPool(pool Pool) bool {
	return L2Advertisement{Pools: a.Pools, PoolSelectors: a.PoolSelectors}.Selects(pool)
}

// Aggregate returns the prefix that the advertisement announces for addr.
func (a BGPAdvertisement) Aggregate(addr netip.Addr) netip.Prefix {
	bits := a.AggregationLength
	if addr.Is6() {
		bits = a.AggregationLengthV6
	}
	return netip.PrefixFrom(addr, bits).Masked()
}

// BFDProfile holds the parameters of a BFD session.
type BFDProfile struct {
	Name              string
	Receive, Transmit time.Duration // 10 ms to 60 s
	Multiplier        uint8         // 2 to 255
	Passive           bool
	MinimumTTL        uint8 // for multihop sessions, 1 to 254
}

// CommunityNames are the names that one Community object defines.
type CommunityNames struct {
	Name   string
	Values map[string]Community
	// Problem is set if a value cannot be parsed although the API server accepted it.
	Problem *Refusal
}

// Community is a BGP community: two numbers of 16 bits (RFC 1997), or three of 32 bits if Large
// (RFC 8092).
type Community struct {
	Large   bool
	A, B, C uint32
}

// ParseCommunity parses 64512:100 or large:64512:1:2.
func ParseCommunity(s string) (Community, error) {
	rest, large := strings.CutPrefix(s, "large:")
	parts := strings.Split(rest, ":")
	size, count := 16, 2
	if large {
		size, count = 32, 3
	}
	var n [3]uint32
	if len(parts) != count {
		return Community{},
			fmt.Errorf("%q is neither a community such as 64512:100 nor a large community such as large:64512:1:2", s)
	}
	for i, part := range parts {
		v, err := strconv.ParseUint(part, 10, size)
		if err != nil {
			return Community{}, fmt.Errorf("%q in community %q is not a number of %d bits", part, s, size)
		}
		n[i] = uint32(v)
	}
	return Community{Large: large, A: n[0], B: n[1], C: n[2]}, nil
}

// String returns the form that ParseCommunity parses.
func (c Community) String() string {
	if c.Large {
		return fmt.Sprintf("large:%d:%d:%d", c.A, c.B, c.C)
	}
	return fmt.Sprintf("%d:%d", c.A, c.B)
}

// Compare orders communities: plain before large, then by their numbers.
func (c Community) Compare(other Community) int {
	if c.Large != other.Large {
		if other.Large {
			return -1
		}
		return 1
	}
	return cmp.Or(cmp.Compare(c.A, other.A), cmp.Compare(c.B, other.B), cmp.Compare(c.C, other.C))
}
