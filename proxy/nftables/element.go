package nftables

import (
	"cmp"
	"encoding/binary"
	"net/netip"

	"github.com/landfall-lb/landfall/internal/lb"
)

// setID is one of the sets and maps that hold what Services bring. Their names are in the ruleset.
type setID uint8

const (
	// setClusterIPs are addresses that belong to Services alone: what is not served there is refused.
	setClusterIPs setID = iota
	// setExternal are frontends at addresses that may have other uses: VIPs, external IPs and node
	// ports.
	setExternal
	// setLocal are those external frontends whose policy is Local.
	setLocal
	// setRestricted are frontends with source ranges, which are in setSourceRanges.
	setRestricted
	setSourceRanges
	// setSilent are cluster IPs that are not answered, as their policy is Local and only other nodes
	// have endpoints.
	setSilent
	// setMany and setManyLocal are frontends whose backends are drawn by classes: a draw may miss and
	// has to be repeated.
	setMany
	setManyLocal
	// setScheduled are frontends that have slots instead of draws.
	setScheduled
	// setEcho are addresses that answer echo requests.
	setEcho
	// setHairpin are pairs of the same address: an endpoint that is sent to itself.
	setHairpin
	// setBackends are the maps from frontend and number to target, one for each protocol.
	setBackends
	// setAffinity are frontends with session affinity, in one set for each protocol and timeout.
	setAffinity
	// setPorts are the maps from frontend to the port of all its backends, one for each protocol,
	// where clients are remembered with addresses alone.
	setPorts
)

// protocol is a transport protocol by its number in the IP header (IANA protocol numbers).
type protocol uint8

const (
	tcp  protocol = 6
	udp  protocol = 17
	sctp protocol = 132
)

var protocols = []protocol{tcp, udp, sctp}

func protocolOf(p lb.Protocol) (protocol, bool) {
	switch p {
	case lb.TCP:
		return tcp, true
	case lb.UDP:
		return udp, true
	case lb.SCTP:
		return sctp, true
	}
	return 0, false
}

func (p protocol) String() string {
	switch p {
	case tcp:
		return "tcp"
	case udp:
		return "udp"
	}
	return "sctp"
}

// address is an IP address in a form that is small, comparable and free of pointers: IPv4 in the
// first four bytes.
type address [16]byte

func addressOf(a netip.Addr) (x address) {
	copy(x[:], a.AsSlice())
	return x
}

// ip returns the address in its family.
func (a address) ip(family lb.Family) netip.Addr {
	if family == lb.IPv4 {
		return netip.AddrFrom4([4]byte(a[:4]))
	}
	return netip.AddrFrom16(a)
}

// frontend is what clients connect to.
type frontend struct {
	addr     address
	port     uint16
	protocol protocol
}

// element is what makes an element of one of our sets different from all others. Fields that the
// set does not have are zero.
type element struct {
	frontend
	set setID
	// bits is the length of the prefix in setSourceRanges.
	bits uint8
	// number says which backend, in setBackends, see draw; the timeout in seconds, in setAffinity.
	number uint32
	// source is the prefix's address in setSourceRanges.
	source address
}

// common is an element that Services may share, by what it has.
type common struct {
	addr address
	set  setID
}

func (c common) element() element { return element{set: c.set, frontend: frontend{addr: c.addr}} }

// target is what an element of setBackends leads to; of setPorts, it has the port alone, and in all
// other sets it is zero.
type target struct {
	addr address
	port uint16
}

// entry is an element with what it leads to.
type entry struct {
	element
	to target
}

func (f frontend) compare(other frontend) int {
	if f == other {
		return 0
	}
	return cmp.Or(compareAddresses(f.addr, other.addr), cmp.Compare(f.protocol, other.protocol),
		cmp.Compare(f.port, other.port))
}

// compare orders elements by set, so that those of one set of the kernel travel together, and then
// by what a reader would look for.
func (e element) compare(other element) int {
	switch {
	case e.set != other.set:
		return cmp.Compare(e.set, other.set)
	case e.perProtocol():
		if c := cmp.Compare(e.protocol, other.protocol); c != 0 {
			return c
		}
		if e.set == setAffinity && e.number != other.number {
			return cmp.Compare(e.number, other.number)
		}
	}
	return cmp.Or(e.frontend.compare(other.frontend), cmp.Compare(e.number, other.number),
		compareAddresses(e.source, other.source), cmp.Compare(e.bits, other.bits))
}

// perProtocol reports whether the set is there once for each protocol.
func (e element) perProtocol() bool {
	return e.set == setBackends || e.set == setAffinity || e.set == setPorts
}

func compareAddresses(a, b address) int {
	return cmp.Or(cmp.Compare(binary.BigEndian.Uint64(a[:8]), binary.BigEndian.Uint64(b[:8])),
		cmp.Compare(binary.BigEndian.Uint64(a[8:]), binary.BigEndian.Uint64(b[8:])))
}
