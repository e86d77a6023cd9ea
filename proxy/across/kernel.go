package across

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"time"

	"github.com/vishvananda/netns"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/links"
	"github.com/landfall-lb/landfall/proxy/tunnel"
)

// Kernel is the way through this node's tunnels: the questions are ICMP echo requests (RFC 792, RFC 4443) with the
// TTL of what is handed over. The answers come by the route that the other node has to this one, in IPv6
// through the tunnel. It is not safe for concurrent use.
type Kernel struct {
	sockets map[lb.Family]int
	routes  *links.FIB
	changes *links.RouteChanges
	// through are the aliases that the kernel is known to find over an interface, the tunnel. What it finds elsewhere is
	// looked up each time: of routes that go with their interface the kernel does not tell.
	through map[netip.Addr]found
	// id tells our answers from those to others, and is not known to who cannot see our packets.
	id       uint16
	sequence uint16
}

// maxAnswers is how many answers are taken at once.
const maxAnswers = 4 * MaxNodes

// Open opens the way for some families, in the network namespace of the calling thread.
func Open(families []lb.Family) (*Kernel, error) {
	var id [2]byte
	_, _ = rand.Read(id[:]) // never fails
	routes, err := links.OpenFIB(netns.None())
	if err != nil {
		return nil, err
	}
	changes, err := links.OpenRouteChanges()
	if err != nil {
		routes.Close()
		return nil, err
	}
	k := &Kernel{sockets: map[lb.Family]int{}, routes: routes, changes: changes, through: map[netip.Addr]found{},
		id: binary.BigEndian.Uint16(id[:])}
	for _, family := range families {
		socket, err := open(family, k.id)
		if err != nil {
			k.Close()
			return nil, fmt.Errorf("open a socket for ICMP, %s: %w", family, err)
		}
		k.sockets[family] = socket
	}
	return k, nil
}

// icmp has the numbers of a family: types of messages, and where the option for the TTL is.
type icmp struct {
	domain, protocol, level, ttl int
	request, reply               byte
}

func icmpOf(family lb.Family) icmp {
	if family == lb.IPv6 {
		return icmp{unix.AF_INET6, unix.IPPROTO_ICMPV6, unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS, 128, 129}
	}
	return icmp{unix.AF_INET, unix.IPPROTO_ICMP, unix.IPPROTO_IP, unix.IP_TTL, 8, 0}
}

func open(family lb.Family, id uint16) (socket int, err error) {
	of := icmpOf(family)
	socket, err = unix.Socket(of.domain, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, of.protocol)
	if err != nil {
		return -1, err
	}
	if err = unix.SetsockoptInt(socket, of.level, of.ttl, lb.HandedTTL); err == nil {
		err = filter(socket, family, of.reply, id)
	}
	if err != nil {
		_ = unix.Close(socket)
	}
	return socket, err
}

// filter has the socket take answers to us alone: it would get those to everybody.
func filter(socket int, family lb.Family, reply byte, id uint16) error {
	begin := bpf.Instruction(bpf.LoadMemShift{Off: 0}) // behind the IP header, which is there in IPv4
	if family == lb.IPv6 {
		begin = bpf.LoadConstant{Dst: bpf.RegX, Val: 0}
	}
	program, err := bpf.Assemble([]bpf.Instruction{begin,
		bpf.LoadIndirect{Off: 0, Size: 1}, bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: uint32(reply), SkipTrue: 3},
		bpf.LoadIndirect{Off: 4, Size: 2}, bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: uint32(id), SkipTrue: 1},
		bpf.RetConstant{Val: 1 << 16}, bpf.RetConstant{Val: 0}})
	if err != nil {
		return err
	}
	raw := make([]unix.SockFilter, len(program))
	for i, in := range program {
		raw[i] = unix.SockFilter{Code: in.Op, Jt: in.Jt, Jf: in.Jf, K: in.K}
	}
	return unix.SetsockoptSockFprog(socket, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER,
		&unix.SockFprog{Len: uint16(len(raw)), Filter: &raw[0]})
}

// Close closes it.
func (k *Kernel) Close() {
	k.routes.Close()
	k.changes.Close()
	for _, socket := range k.sockets {
		_ = unix.Close(socket)
	}
}

// header is how long that of an echo message is, in bytes.
const header = 8

// Ask implements Line.
func (k *Kernel) Ask(self, node netip.Addr, nonce Nonce) error {
	family := lb.FamilyOf(node)
	socket, is := k.sockets[family]
	if !is {
		return errNoTunnel
	}
	link, err := indexOf(socket, lb.TunnelName(family))
	if err != nil {
		return err
	}
	// A question names the interface, a packet that is handed over does not (nf_dup): it takes the kernel's way to the
	// alias, which rules ahead of the tunnel's may change.
	if leads, err := k.leads(tunnel.Alias(node), int(link)); err != nil {
		return err
	} else if !leads {
		return errDiverted
	}
	k.sequence++
	packet := append([]byte{icmpOf(family).request, 0, 0, 0}, make([]byte, 4)...)
	binary.BigEndian.PutUint16(packet[4:], k.id)
	binary.BigEndian.PutUint16(packet[6:], k.sequence)
	packet = append(packet, nonce[:]...)
	if family == lb.IPv6 { // whose checksum the kernel fills in
		return unix.Sendmsg(socket, packet, unix.PktInfo6(&unix.Inet6Pktinfo{Addr: self.As16(),
			Ifindex: link}), &unix.SockaddrInet6{Addr: node.As16()}, 0)
	}
	binary.BigEndian.PutUint16(packet[2:], checksum(packet))
	return unix.Sendmsg(socket, packet, unix.PktInfo4(&unix.Inet4Pktinfo{Spec_dst: self.As4(),
		Ifindex: int32(link)}), &unix.SockaddrInet4{Addr: node.As4()}, 0)
}

// found is the interface over which the kernel finds an alias, and when it was asked.
type found struct {
	link int
	at   time.Time
}

// lookAgain is after which time the kernel is asked again without a reason: not of all that changes a way does it tell,
// such as a sysctl, or a carrier that comes back.
const lookAgain = 5 * time.Second

// leads reports whether the kernel's way to an alias is over an interface, the tunnel. It asks the kernel if that may
// have changed: a look-up costs nearly as much as the rest of a question.
func (k *Kernel) leads(alias netip.Addr, link int) (bool, error) {
	changes, err := k.changes.Read()
	if err != nil {
		clear(k.through)
		return false, err
	}
	for _, c := range changes {
		maps.DeleteFunc(k.through, func(alias netip.Addr, f found) bool {
			return c.All || c.Link == f.link || c.Prefix.IsValid() && c.Prefix.Contains(alias)
		})
	}
	if f := k.through[alias]; f.link == link && time.Since(f.at) < lookAgain {
		return true, nil
	}
	way, err := k.routes.Way(alias)
	if err != nil || way.Link != link {
		delete(k.through, alias)
		return false, err
	}
	if len(k.through) >= 2*MaxNodes { // of nodes that are asked no more
		clear(k.through)
	}
	k.through[alias] = found{link, time.Now()}
	return true, nil
}

// indexOf returns an interface's index. What the net package does for this costs more with each interface that there
// is, and each pod has one.
func indexOf(socket int, name string) (uint32, error) {
	request, err := unix.NewIfreq(name)
	if err != nil {
		return 0, err
	}
	err = unix.IoctlIfreq(socket, unix.SIOCGIFINDEX, request)
	if errors.Is(err, unix.ENODEV) {
		return 0, errNoTunnel
	}
	return request.Uint32(), err
}

// checksum returns that of RFC 1071. The length is even.
func checksum(packet []byte) uint16 {
	sum := uint32(0)
	for i := 0; i < len(packet); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(packet[i:]))
	}
	sum = sum&0xffff + sum>>16
	return ^uint16(sum + sum>>16)
}

// Answers implements Line.
func (k *Kernel) Answers(family lb.Family) (all []Answer, err error) {
	socket, is := k.sockets[family]
	if !is {
		return nil, nil
	}
	buffer := make([]byte, 128)
	for range maxAnswers {
		n, from, err := unix.Recvfrom(socket, buffer, 0)
		switch {
		case errors.Is(err, unix.EAGAIN):
			return all, nil
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return all, err
		}
		if answer, ok := parse(family, buffer[:n], from); ok {
			all = append(all, answer)
		}
	}
	return all, nil
}

// parse reads an answer. The filter has looked at type and id.
func parse(family lb.Family, packet []byte, from unix.Sockaddr) (a Answer, ok bool) {
	switch from := from.(type) {
	case *unix.SockaddrInet4:
		a.Node = netip.AddrFrom4(from.Addr)
	case *unix.SockaddrInet6:
		a.Node = netip.AddrFrom16(from.Addr)
	}
	if family == lb.IPv4 {
		if len(packet) == 0 || len(packet) < int(packet[0]&15)*4 {
			return a, false
		}
		packet = packet[int(packet[0]&15)*4:]
	}
	if len(packet) != header+len(a.Nonce) {
		return a, false
	}
	copy(a.Nonce[:], packet[header:])
	return a, true
}
