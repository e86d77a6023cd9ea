package l2

import (
	"errors"
	"fmt"
	"net"
	"slices"

	"github.com/mdlayher/ethernet"
	"github.com/mdlayher/packet"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
)

// receiveBuffer holds what arrives while this process cannot run, or faster than it takes packets, which is about
// 50,000 a second: as the kernel counts, some 10,000 small ones, a fifth of a second. With more room, a flood would
// delay answers until clients ask again, which they do after a second.
const receiveBuffer = 4 << 20

// listen opens a socket that sees those packets of a protocol on an interface's own LAN that a filter lets through;
// it needs CAP_NET_RAW.
func listen(i lb.Interface, protocol ethernet.EtherType, filter ...bpf.Instruction) (*packet.Conn, error) {
	program, err := bpf.Assemble(slices.Concat(ownLAN(i), filter))
	if err != nil {
		return nil, err
	}
	conn, err := packet.Listen(&net.Interface{Index: i.Index, Name: i.Name, HardwareAddr: i.MAC}, packet.Raw,
		int(protocol), &packet.Config{Filter: program})
	if err != nil {
		return nil, err
	}
	if err := makeRoom(conn); err != nil {
		conn.Close()
		return nil, fmt.Errorf("set the receive buffer: %w", err)
	}
	return conn, nil
}

// makeRoom gives a socket its receiveBuffer, or without CAP_NET_ADMIN as much of it as the system allows.
func makeRoom(conn *packet.Conn) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	var failure error
	err = raw.Control(func(fd uintptr) {
		if unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, receiveBuffer) != nil {
			failure = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF, receiveBuffer)
		}
	})
	return errors.Join(err, failure)
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
