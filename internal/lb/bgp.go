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

// DynamicASN says which AS number a peer may have whose number is not configured.
type DynamicASN string

// The dynamic AS numbers.
const (
	InternalASN DynamicASN = "internal" // the node's own
	ExternalASN DynamicASN = "external" // any other
)

// Peer is one BGPPeer: a router, and how nodes speak to it.
type Peer struct {
	Name    string
	UID     string
	Created time.Time
	// LocalASN is the AS number of the node towards this peer: localASN, or else myASN.
	LocalASN uint32
	// PeerASN is the AS number that the peer must have; 0 when Dynamic says.
	PeerASN uint32
	Dynamic DynamicASN
	// Addr is the peer's address; not valid when Interface names the link to it (an unnumbered
	// session).
	Addr      netip.Addr
	Interface string
	Port      uint16
	Source    netip.Addr // not valid when the kernel chooses
	RouterID  netip.Addr // not valid when the node's is taken
	// HoldTime is 0 or at least 3 s. KeepaliveTime is 0 for a third of the negotiated hold time.
	HoldTime, KeepaliveTime, ConnectTime time.Duration
	// Password is for TCP MD5; PasswordSecret names the Secret that has it instead (namespace "" is
	// Landfall's own).
	Password       string
	PasswordSecret *Key
	NodeSelectors  []labels.Selector // alternatives; all nodes when empty
	BFDProfile     string            // "" for none

	MultiHop, GracefulRestart, DualStack, AcceptRoutes bool

	// Problem is set when the specification cannot be used although the API server took it.
	Problem *Refusal
	// Status is what was last written, by node.
	Status map[string]PeerNode
}

// PeerNode is what one node says of its session with a peer, in the peer's status.
type PeerNode struct {
	State   string // as RFC 4271 names it, or Refused
	Reason  Reason
	Message string
}

// BGPAdvertisement announces addresses of pools to BGP peers.
type BGPAdvertisement struct {
	Name       string
	Generation int64
	Created    time.Time
	// Pools are pool names; all pools when both Pools and PoolSelectors are empty.
	Pools         []string
	PoolSelectors []labels.Selector
	// ServiceSelectors and NodeSelectors are alternatives; all when empty.
	ServiceSelectors []labels.Selector
	NodeSelectors    []labels.Selector
	// Peers are names of peers; all when empty.
	Peers []string
	// AggregationLength is 1 to 32, AggregationLengthV6 1 to 128.
	AggregationLength, AggregationLengthV6 int
	LocalPref, MED                         *uint32 // nil when unset
	Prepend                                int
	// Communities are as written: literals or names.
	Communities []string
	// Conditions are what was last written.
	Conditions []Condition
}

// SelectsPool tells whether the advertisement is for the pool.
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

// CommunityNames are the names that one Community object gives.
type CommunityNames struct {
	Name   string
	Values map[string]Community
	// Problem is set when a value cannot be read although the API server took it.
	Problem *Refusal
}

// Community is a BGP community: two numbers of 16 bits (RFC 1997), or three of 32 bits if Large
// (RFC 8092).
type Community struct {
	Large   bool
	A, B, C uint32
}

// GracefulShutdown asks the peer to prefer any other route (RFC 8326).
var GracefulShutdown = Community{A: 65535, B: 0}

// wellKnown are the names that need no Community object (IANA, BGP Well-known Communities).
var wellKnown = map[string]Community{
	"graceful-shutdown": GracefulShutdown,
	"accept-own":        {A: 65535, B: 1},
	"blackhole":         {A: 65535, B: 666},
	"no-export":         {A: 65535, B: 65281},
	"no-advertise":      {A: 65535, B: 65282},
	"local-as":          {A: 65535, B: 65283},
	"no-peer":           {A: 65535, B: 65284},
}

// WellKnownCommunity returns the community of a name that IANA has registered.
func WellKnownCommunity(name string) (Community, bool) {
	c, ok := wellKnown[name]
	return c, ok
}

// ParseCommunity reads 64512:100 or large:64512:1:2.
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

// String returns the form that ParseCommunity reads.
func (c Community) String() string {
	if c.Large {
		return fmt.Sprintf("large:%d:%d:%d", c.A, c.B, c.C)
	}
	return fmt.Sprintf("%d:%d", c.A, c.B)
}

// Compare orders communities: plain ones first, then by their numbers.
func (c Community) Compare(other Community) int {
	if c.Large != other.Large {
		if other.Large {
			return -1
		}
		return 1
	}
	return cmp.Or(cmp.Compare(c.A, other.A), cmp.Compare(c.B, other.B), cmp.Compare(c.C, other.C))
}
