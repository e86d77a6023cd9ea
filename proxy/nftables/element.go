package nftables

import (
	"cmp"
	"encoding/binary"
	"net/netip"

	"github.com/landfall-lb/landfall/internal/lb"
)

// setID is one of the sets and maps that hold what Services bring. Their names are in the ruleset.
// What elements lead to comes before them, see change.parts.
type setID uint8

const (
	// setBackends is the map from group and number to a backend's address.
	setBackends setID = iota
	// setMixedTCP and the next two are the same where the backends' ports differ, from group and
	// number to address and port.
	setMixedTCP
	setMixedUDP
	setMixedSCTP
	// setMany are groups whose backends are drawn by classes: a draw may miss and has to be repeated.
	setMany
	// setScheduled are groups that have slots instead of draws.
	setScheduled
	// setMixed are the groups in the maps of mixed ports.
	setMixed
	// setHanded is the map from group and number to the node to which packets for the backend are handed.
	setHanded
	// setNear are the backends of this node of groups that are forwarded directly, by group and address:
	// connections to others are masqueraded.
	setNear
	// setRemember are the groups with session affinity, in one set for each memory.
	setRemember
	// setSourceRanges are the networks of the groups in setSources, in one set for each prefix length.
	setSourceRanges
	// setAffinityPorts is the map from group and address to port of the backends in setAffinity whose ports
	// differ.
	setAffinityPorts
	// setAffinity are the backends of groups with session affinity, by group and address.
	setAffinity
	// setHairpin are pairs of the same address: an endpoint that is sent to itself.
	setHairpin
	// setPorts is the map from frontend to the port of all its backends.
	setPorts
	// setSources is the map from restricted frontend to the group of networks whose clients may
	// connect. A frontend in setRestricted that is not in it admits nobody.
	setSources
	setRestricted
	// setLocalGroups is the map from external frontend with policy Local to its group for those from
	// outside.
	setLocalGroups
	// setSilent are cluster IPs that are not answered, as their policy is Local and only other nodes
	// have endpoints.
	setSilent
	// setPassed are those in setLocal that are routed on where no endpoint of this node is usable.
	setPassed
	// setGroups is the map from frontend to its group of backends.
	setGroups
	// setDirect is the map from frontends that are forwarded directly to their groups.
	setDirect
	// setLocal are those external frontends whose policy is Local.
	setLocal
	// setRelayed are the frontends whose connections the node's relay ends, while it is there.
	setRelayed
	// setRelayOwners is the map from those of UDP to the number of their namespace.
	setRelayOwners
	// setExternal are frontends at addresses that may have other uses: VIPs, external IPs and node
	// ports.
	setExternal
	// setEcho are addresses that answer echo requests.
	setEcho
	// setClusterIPs are addresses that belong to Services alone: what is not served there is refused.
	setClusterIPs
	// setVIPs are VIPs of which the same holds, as far as nobody else translates packets to them.
	setVIPs
	// setNodes are the MAC addresses of the nodes that hand packets over.
	setNodes
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

// frontend is what clients connect to, or, without an address, a group of backends or of sources.
type frontend struct {
	addr     address
	port     uint16
	protocol protocol
	group    uint32
}

// element is what makes an element of one of our sets different from all others. Fields that the
// set does not have are zero.
type element struct {
	frontend
	set setID
	// number says which backend, in maps of backends; which of the sets of one kind, where there are
	// several: the memory, in setRemember, and the prefix length, in setSourceRanges.
	number uint32
	// source is the network's address in setSourceRanges, the backend's in sets and maps of backends by address.
	source address
}

// common is an element that Services may share, by what it has.
type common struct {
	addr address
	set  setID
}

func (c common) element() element { return element{set: c.set, frontend: frontend{addr: c.addr}} }

// target is what an element of a map leads to: an address, a port, both or a group; in sets it is
// zero.
type target struct {
	addr  address
	port  uint16
	group uint32
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
	return cmp.Or(cmp.Compare(f.group, other.group), compareAddresses(f.addr, other.addr),
		cmp.Compare(f.protocol, other.protocol), cmp.Compare(f.port, other.port))
}

// compare orders elements by set, so that those of one set of the kernel travel together, and then
// by what a reader would look for.
func (e element) compare(other element) int {
	if e.set != other.set {
		return cmp.Compare(e.set, other.set)
	}
	if e.set.isNumbered() && e.number != other.number {
		return cmp.Compare(e.number, other.number)
	}
	return cmp.Or(e.frontend.compare(other.frontend), cmp.Compare(e.number, other.number),
		compareAddresses(e.source, other.source))
}

// isMap reports whether elements of a set have a value, ofGroup whether their key begins with a
// group.
func (id setID) isMap() bool {
	return id.isNumber() || id.leadsToPort() || id.leadsToGroup()
}

// isNumber reports whether the keys of a map are a group and a number in it, leadsToPort and
// leadsToGroup whether the values of a map are ports or groups.
func (id setID) isNumber() bool { return id <= setMixedSCTP || id == setHanded }

func (id setID) leadsToPort() bool { return id == setPorts || id == setAffinityPorts }

func (id setID) leadsToGroup() bool {
	return id == setGroups || id == setLocalGroups || id == setSources || id == setDirect || id == setRelayOwners
}

// isBackend reports whether the keys of a set or map are a group and the address of one of its backends.
func (id setID) isBackend() bool {
	return id == setAffinity || id == setAffinityPorts || id == setNear
}

// isNumbered reports whether there are several sets of this kind, told apart by a number.
func (id setID) isNumbered() bool { return id == setRemember || id == setSourceRanges }

func (id setID) ofGroup() bool { return id <= setAffinity }

// ofAddress reports whether the key of a set is an address alone.
func (id setID) ofAddress() bool { return id == setEcho || id == setClusterIPs || id == setVIPs }

func (id setID) isMixed() bool { return id >= setMixedTCP && id <= setMixedSCTP }

// mixedOf returns the map of backends with ports that differ.
func mixedOf(p protocol) setID {
	switch p {
	case tcp:
		return setMixedTCP
	case udp:
		return setMixedUDP
	}
	return setMixedSCTP
}

func compareAddresses(a, b address) int {
	return cmp.Or(cmp.Compare(binary.BigEndian.Uint64(a[:8]), binary.BigEndian.Uint64(b[:8])),
		cmp.Compare(binary.BigEndian.Uint64(a[8:]), binary.BigEndian.Uint64(b[8:])))
}
