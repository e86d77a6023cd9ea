package main

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"os/exec"
	"strings"

	"golang.org/x/sys/unix"
)

// firstMark is the DSCP of first packets, which neither rules nor nodes change: by it they are dropped in front of the
// pod, so that no answer is measured with them.
const firstMark = 1

// dropFirsts drops first packets in the namespace of the thread.
func dropFirsts() error {
	cmd := exec.Command("nft", "-f", "-")
	cmd.Stdin = strings.NewReader(fmt.Sprintf(`table ip firsts {
		chain prerouting { type filter hook prerouting priority -300; ip dscp %d counter drop; }
	}`, firstMark))
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("nft: %w: %s", err, out)
	}
	return nil
}

// firsts sends the first packets of n connections.
func (p *path) firsts(to netip.Addr, n int) error {
	target := unix.SockaddrInet4{Addr: to.As4()}
	for range n {
		packet := firstPacket(p.next(), netip.AddrPortFrom(to, loadPort))
		if err := again(func() error { return unix.Sendto(p.raw, packet, 0, &target) }); err != nil {
			return fmt.Errorf("send: %w", err)
		}
	}
	return nil
}

// Sizes of the headers of a first packet, which has no options and no data.
const ipv4Header, tcpHeader = 20, 20

// firstPacket returns a SYN with its IPv4 header, whose length, identifier and checksum the kernel fills in.
func firstPacket(from, to netip.AddrPort) []byte {
	source, target := from.Addr().As4(), to.Addr().As4()
	packet := make([]byte, ipv4Header+tcpHeader)
	packet[0], packet[1] = 0x45, firstMark<<2
	packet[8], packet[9] = 64, unix.IPPROTO_TCP
	copy(packet[12:], source[:])
	copy(packet[16:], target[:])
	tcp := packet[ipv4Header:]
	binary.BigEndian.PutUint16(tcp, from.Port())
	binary.BigEndian.PutUint16(tcp[2:], to.Port())
	tcp[12], tcp[13] = tcpHeader/4<<4, 0x02
	binary.BigEndian.PutUint16(tcp[14:], 0xffff) // window
	// RFC 9293 section 3.1: the sum covers the addresses, the protocol and the length as well.
	sum := uint32(unix.IPPROTO_TCP + tcpHeader)
	for i := 12; i < len(packet); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(packet[i:]))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	binary.BigEndian.PutUint16(tcp[16:], ^uint16(sum))
	return packet
}
