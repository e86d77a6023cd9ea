package relay

import (
	"log/slog"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/nstest"
)

// A datagram with a wrong checksum, which anybody can send, is no sign that the relay is behind. One for which its
// socket had no room is.
func TestContract11AWrongChecksumIsNoOverflow(t *testing.T) {
	t.Parallel()
	ns := nstest.New(t)
	ns.Run(t, "ip", "link", "set", "lo", "up")
	r := &Relay{deps: NewDeps(slog.New(slog.DiscardHandler)),
		receivers: &receivers{open: map[lb.Family]*Conn{}, lacking: map[lb.Family]string{}}}
	ns.Do(t, func() error {
		receiver, err := openUDP(lb.IPv4, 0)
		if err != nil {
			return err
		}
		defer receiver.Close()
		r.receivers.set(lb.IPv4, receiver, nil)
		at, err := receiver.local()
		if err != nil {
			return err
		}
		receive := func(size int) error {
			_ = receiver.file.SetReadDeadline(time.Now().Add(200 * time.Millisecond))
			_, err := receiver.receiveFrom(make([]byte, size), make([]byte, controlSize))
			return err
		}
		before := r.losses()
		if err := sendWrong(at.Port()); err != nil {
			return err
		}
		_ = receive(1 << 16) // the kernel looks at the checksum of a long one here
		now := r.losses()
		if now.dropped == before.dropped {
			t.Error("the kernel has counted nothing: the test shows nothing")
		}
		if now.unknown || now.overflowedSince(before) {
			t.Errorf("taken for an overflow: %+v, %+v before", now, before)
		}

		before = now
		sender, err := DialUDP(netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), at.Port()), 0)
		if err != nil {
			return err
		}
		defer sender.Close()
		for range 4096 {
			if r.receivers.dropped() > before.dropped {
				break
			}
			if err := sender.sendParts(make([]byte, 1<<14)); err != nil {
				return err
			}
		}
		if now := r.losses(); !now.overflowedSince(before) {
			t.Errorf("not taken for an overflow: %+v, %+v before", now, before)
		}
		return nil
	})
}

// sendWrong sends a datagram with a wrong checksum to a port of 127.0.0.1.
func sendWrong(port uint16) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_UDP)
	if err != nil {
		return os.NewSyscallError("socket", err)
	}
	defer unix.Close(fd)
	const size = 512
	packet := make([]byte, size)
	copy(packet, []byte{0x10, 0, byte(port >> 8), byte(port), size >> 8, size & 0xff, 0x12, 0x34})
	return os.NewSyscallError("sendto", unix.Sendto(fd, packet, 0, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}))
}

func TestOverflowsAreRead(t *testing.T) {
	const names = "Udp: InDatagrams NoPorts InErrors OutDatagrams RcvbufErrors SndbufErrors InCsumErrors IgnoredMulti MemErrors\n"
	const old = "Udp: InDatagrams NoPorts InErrors OutDatagrams RcvbufErrors SndbufErrors\n"
	for text, want := range map[string]uint64{
		"Tcp: a\nTcp: 1\n" + names + "Udp: 1 2 3 4 50 6 7 8 900\n": 950,
		old + "Udp: 1 2 3 4 50 6\n":                                50,
	} {
		if got, err := overflows4(text); got != want || err != nil {
			t.Errorf("%q: %d, %v", text, got, err)
		}
	}
	for _, text := range []string{"", names, names + "Udp: 1\n", names + "Udp: 1 2 3 4 x 6 7 8 900\n"} {
		if got, err := overflows4(text); err == nil {
			t.Errorf("%q: %d", text, got)
		}
	}
	text := strings.Join([]string{"Udp6InErrors 7", "Udp6RcvbufErrors                	5", "Udp6MemErrors 30", ""}, "\n")
	if got := overflows6(text); got != 35 {
		t.Errorf("%q: %d", text, got)
	}
}
