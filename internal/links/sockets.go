package links

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
)

// Connected reports whether a program in the calling thread's network namespace has an established TCP connection
// between a local address and a port of a peer, or between the peer and that port here: whoever opened it. What is in a
// VRF does not count: the peer's address there is another host's.
func Connected(local netip.Addr, peer netip.AddrPort) (found bool, err error) {
	return connected(local, peer, inVRF)
}

// connected is Connected without the connections that are bound to a device of which elsewhere says so.
func connected(local netip.Addr, peer netip.AddrPort, elsewhere func(device int) bool) (found bool, err error) {
	families := []uint8{unix.AF_INET6}
	if lb.FamilyOf(peer.Addr()) == lb.IPv4 {
		families = []uint8{unix.AF_INET, unix.AF_INET6} // also as ::ffff:192.0.2.1, of a socket for both families
	}
	for _, family := range families {
		for _, r := range []socketRequest{{family: family, peerPort: peer.Port()}, {family: family, port: peer.Port()}} {
			_, err := complete(func() ([]struct{}, error) {
				request := nl.NewNetlinkRequest(nl.SOCK_DIAG_BY_FAMILY, unix.NLM_F_DUMP)
				request.AddData(r)
				return nil, request.ExecuteIter(unix.NETLINK_INET_DIAG, nl.SOCK_DIAG_BY_FAMILY, func(m []byte) bool {
					from, to, device, ok := endsOf(m)
					if ok && from == local.WithZone("") && to == peer.Addr().WithZone("") && !elsewhere(device) {
						found = true
					}
					return true
				})
			})
			switch {
			case err != nil:
				return false, fmt.Errorf("list TCP connections: %w", err)
			case found:
				return true, nil
			}
		}
	}
	return false, nil
}

// socketRequest asks for the established TCP connections of a family with one of these ports (struct
// inet_diag_req_v2 of linux/inet_diag.h).
type socketRequest struct {
	family         uint8
	port, peerPort uint16
}

const (
	sizeofSocketRequest = 56
	// Where things are in struct inet_diag_msg.
	socketSource, socketPeer, socketDevice, sizeofSocketEnds = 8, 24, 40, 44
	established                                              = 1 // TCP_ESTABLISHED of linux/tcp_states.h
)

func (r socketRequest) Len() int { return sizeofSocketRequest }

func (r socketRequest) Serialize() []byte {
	b := []byte{r.family, unix.IPPROTO_TCP, 0, 0}
	b = binary.NativeEndian.AppendUint32(b, 1<<established)
	b = binary.BigEndian.AppendUint16(b, r.port)
	b = binary.BigEndian.AppendUint16(b, r.peerPort)
	return append(b, make([]byte, sizeofSocketRequest-len(b))...)
}

// endsOf returns the addresses of both ends of a connection, and the index of the device that it is bound to; 0 for
// none.
func endsOf(m []byte) (from, to netip.Addr, device int, ok bool) {
	if len(m) < sizeofSocketEnds {
		return from, to, 0, false
	}
	size := 16
	if m[0] == unix.AF_INET {
		size = 4
	}
	from, _ = netip.AddrFromSlice(m[socketSource : socketSource+size])
	to, _ = netip.AddrFromSlice(m[socketPeer : socketPeer+size])
	return from.Unmap(), to.Unmap(), int(binary.NativeEndian.Uint32(m[socketDevice:])), true
}

// inVRF reports whether a device is a VRF or a port of one, as far as the kernel tells.
func inVRF(device int) bool {
	if device == 0 {
		return false
	}
	link, err := netlink.LinkByIndex(device)
	if err == nil && link.Attrs().MasterIndex != 0 && link.Type() != "vrf" {
		link, err = netlink.LinkByIndex(link.Attrs().MasterIndex)
	}
	return err == nil && link.Type() == "vrf"
}

var _ nl.NetlinkRequestData = socketRequest{}

// LocalTo returns the address from which the kernel sends to another, not valid if it knows no way there.
func LocalTo(peer netip.Addr) netip.Addr {
	routes, err := netlink.RouteGet(peer.AsSlice())
	if err != nil || len(routes) == 0 {
		return netip.Addr{}
	}
	local, _ := netip.AddrFromSlice(routes[0].Src)
	return local.Unmap()
}
