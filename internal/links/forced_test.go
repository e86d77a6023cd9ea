package links

import (
	"encoding/binary"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
)

// link6 is a message about the IPv6 of an interface with as many parameters as the kernel has, of which the last is on.
func link6(index uint32, parameters int) []byte {
	attribute := func(kind uint16, value []byte) []byte {
		a := binary.NativeEndian.AppendUint16(nil, uint16(unix.SizeofRtAttr+len(value)))
		return append(binary.NativeEndian.AppendUint16(a, kind), value...)
	}
	values := make([]byte, 4*parameters)
	binary.NativeEndian.PutUint32(values[4*(parameters-1):], 1)
	m := make([]byte, unix.SizeofIfInfomsg)
	m[0] = unix.AF_INET6
	binary.NativeEndian.PutUint32(m[4:], index)
	flags := attribute(1, make([]byte, 4)) // IFLA_INET6_FLAGS
	m = append(m, attribute(unix.IFLA_IFNAME, []byte("eth\x00"))...)
	return append(m, attribute(unix.IFLA_PROTINFO, append(flags, attribute(inet6Conf, values)...))...)
}

func TestContract1ForwardingOfSingleInterfaces(t *testing.T) {
	const eth0, cni0 = 2, 3
	const since617, before = 60, 59 // how many parameters of IPv6 Linux has
	for name, test := range map[string]struct {
		ipv4, ipv6 forwarding
		link       []byte
		want       [3]bool // eth0 of IPv4, eth0 of IPv6, cni0 of IPv6
	}{
		"nothing is known": {want: [3]bool{true, true, true}},
		"all forward":      {forwarding{eth0: true}, forwarding{netconfAll: true}, nil, [3]bool{true, true, true}},
		"none forwards":    {forwarding{eth0: false}, forwarding{netconfAll: false}, nil, [3]bool{false, false, false}},
		"one forwards": {forwarding{netconfAll: false, eth0: true}, forwarding{netconfAll: false}, link6(eth0, since617),
			[3]bool{true, true, false}},
		"forwarding of an interface is none of IPv6": {nil, forwarding{netconfAll: false, eth0: true}, nil,
			[3]bool{true, false, false}},
		"a kernel without force_forwarding": {nil, forwarding{netconfAll: false}, link6(eth0, before),
			[3]bool{true, false, false}},
	} {
		forced := map[int]bool{}
		if index, on := parseForced(test.link); on {
			forced[index] = true
		}
		all := []lb.Interface{{Index: eth0}, {Index: cni0}}
		markForwarding(all, test.ipv4, test.ipv6, forced)
		got := [3]bool{all[0].Forwards(lb.IPv4), all[0].Forwards(lb.IPv6), all[1].Forwards(lb.IPv6)}
		if got != test.want {
			t.Errorf("%s: forwards %v, want %v", name, got, test.want)
		}
	}
}

// FuzzParseForced checks that an interface is said to forward only by a message with all parameters.
func FuzzParseForced(f *testing.F) {
	whole := link6(7, forceForwarding+1)
	f.Add(whole)
	f.Add(whole[:len(whole)-1])
	f.Add(link6(7, forceForwarding))
	f.Add([]byte{unix.AF_INET6})
	f.Fuzz(func(t *testing.T, message []byte) {
		if index, on := parseForced(message[:len(message):len(message)]); on &&
			(message[0] != unix.AF_INET6 || len(message) < 16+4+4+4*(forceForwarding+1)) {
			t.Errorf("%x: interface %d forwards", message, index)
		}
	})
}
