package l2

import (
	"net"
	"slices"

	"github.com/mdlayher/ethernet"
	"github.com/mdlayher/packet"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
)

// listen opens a socket that sees those packets of a protocol on an interface's own LAN that a filter lets through;
// it needs CAP_NET_RAW.
func listen(i lb.Interface, protocol ethernet.EtherType, filter ...bpf.Instruction) (net.PacketConn, error) {
	program, err := bpf.Assemble(slices.Concat(ownLAN(i), filter))
	if err != nil {
		return nil, err
	}
	return packet.Listen(&net.Interface{Index: i.Index, Name: i.Name, HardwareAddr: i.MAC}, packet.Raw, int(protocol),
		&packet.Config{Filter: program})
}

// ownLAN drops what the kernel hands to a socket on an interface although it came for another one, or on another LAN.
// It has taken the tag of a VLAN off by then. A frame of a VLAN that has an interface here comes in at that one,
// as one to a macvlan does at the macvlan; a frame of any other VLAN counts as one to another host. So do frames
// that are to other hosts and come in while a program listens to everything: they may be of such a VLAN.
func ownLAN(i lb.Interface) []bpf.Instruction {
	drop := bpf.RetConstant{Val: 0}
	filter := []bpf.Instruction{
		bpf.LoadExtension{Num: bpf.ExtType},
		bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: unix.PACKET_OTHERHOST, SkipTrue: 1},
		drop,
	}
	if i.Enslaved && i.VRF == "" {
		return filter // all that comes in at a port of a bond counts as the bond's
	}
	return append(filter,
		bpf.LoadExtension{Num: bpf.ExtInterfaceIndex},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: uint32(i.Index), SkipTrue: 1},
		drop)
}
