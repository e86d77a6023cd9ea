package e2e

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"

	"github.com/landfall-lb/landfall/e2e/lab"
)

// bfdPacket returns a BFD control packet (RFC 5880 section 4.1) of state Down, changed.
func bfdPacket(change func(b []byte)) []byte {
	b := make([]byte, 24)
	b[0], b[1], b[2], b[3] = 1<<5, 1<<6, 3, 24
	binary.BigEndian.PutUint32(b[4:], 0x1234)
	binary.BigEndian.PutUint32(b[12:], 1_000_000)
	binary.BigEndian.PutUint32(b[16:], 1_000_000)
	if change != nil {
		change(b)
	}
	return b
}

// bfdRow is a packet, and the reason why it is left alone.
type bfdRow struct {
	name, reason string
	packet       []byte
	ttl          int    // 0 for 255
	from         string // empty for the peer
}

func bfdRows() []bfdRow {
	set := func(at int, value ...byte) []byte { return bfdPacket(func(b []byte) { copy(b[at:], value) }) }
	return []bfdRow{
		{"nothing", "short", []byte{}, 0, ""},
		{"one byte", "short", []byte{1 << 5}, 0, ""},
		{"23 bytes", "short", bfdPacket(nil)[:23], 0, ""},
		{"version 0", "version", set(0, 0), 0, ""},
		{"version 2", "version", set(0, 2<<5), 0, ""},
		{"version 7", "version", set(0, 7<<5), 0, ""},
		{"a length of 0", "short", set(3, 0), 0, ""},
		{"a length of 23", "short", set(3, 23), 0, ""},
		{"a length of 255", "truncated", set(3, 255), 0, ""},
		{"authenticated in 24 bytes", "short", set(1, 1<<6|1<<2), 0, ""},
		{"authenticated", "authentication", append(set(1, 1<<6|1<<2, 3, 26), 1, 2), 0, ""},
		{"multiplier 0", "multiplier", set(2, 0), 0, ""},
		{"multipoint", "multipoint", set(1, 1<<6|1), 0, ""},
		{"discriminator 0", "my-discriminator", set(4, 0, 0, 0, 0), 0, ""},
		{"the discriminator of nobody", "no-session", set(8, 1, 2, 3, 4), 0, ""},
		{"up for nobody", "state", set(1, 3<<6), 0, ""},
		{"in state Init for nobody", "state", set(1, 2<<6), 0, ""},
		{"over a router", "ttl", bfdPacket(nil), 254, ""},
		{"from far away", "ttl", bfdPacket(nil), 64, ""},
		{"from a stranger", "no-session", bfdPacket(nil), 0, "my-nginx-1"},
		{"1400 bytes of ones", "version", bytesOf(0xff, 1400), 0, ""},
		{"HTTP", "version", []byte("GET / HTTP/1.1\r\nHost: example.com\r\n\r\n"), 0, ""},
	}
}

// bfdEach is how often each packet is sent: all of them fit into the buffer of a socket.
const bfdEach = 3

// hostileBFD sends packets to the port of BFD that belong to no session, and reads of how many the
// speaker says why it left them alone. It says so every few seconds, so all are sent first.
func hostileBFD(t *testing.T, l *lab.Lab) {
	for _, peer := range hostilePeers() {
		t.Run(peer.at.Addr().String(), func(t *testing.T) { peer.hostileBFD(t, l) })
	}
}

func (p hostilePeer) hostileBFD(t *testing.T, l *lab.Lab) {
	a, rows := l.Agent("speaker", besieged), bfdRows()
	// BFD is there once the BGP session is, which no row ends.
	session := p.keep(t, l)
	defer session.Close()
	probe := bfdPacket(func(b []byte) { b[0] = 0 })
	eventually(t, "BFD listens", func() error {
		before := counter(t, a, bfdDropped("version"))
		if err := p.sendBFD(t, l, hostileHost, 255, probe); err != nil {
			return err
		}
		return within(10*time.Second, func() error {
			if counter(t, a, bfdDropped("version")) == before {
				return errors.New("nothing is counted")
			}
			return nil
		})
	})
	before, want := map[string]float64{}, map[string]float64{}
	for _, row := range rows {
		before[row.reason] = counter(t, a, bfdDropped(row.reason))
		want[row.reason] += bfdEach
	}
	for _, row := range rows {
		for range bfdEach {
			from, ttl := cmp.Or(row.from, hostileHost), cmp.Or(row.ttl, 255)
			if err := p.sendBFD(t, l, from, ttl, row.packet); err != nil {
				t.Fatalf("%s: %v", row.name, err)
			}
		}
	}
	for _, row := range rows {
		t.Run(row.name, func(t *testing.T) {
			eventually(t, "it is counted", func() error {
				if n := counter(t, a, bfdDropped(row.reason)) - before[row.reason]; n != want[row.reason] {
					return fmt.Errorf("%v packets were dropped for %q, want %v", n, row.reason, want[row.reason])
				}
				return nil
			})
		})
	}
	t.Run("20,000 packets", func(t *testing.T) {
		flood := counter(t, a, bfdDropped("version"))
		conn, err := l.Dial(t.Context(), hostileHost, "udp", p.bfdTarget())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		for range 20000 {
			_, _ = conn.Write(probe)
		}
		before := counter(t, a, bfdDropped("multipoint"))
		eventually(t, "what follows is read", func() error {
			if err := p.sendBFD(t, l, hostileHost, 255, bfdPacket(func(b []byte) { b[1] |= 1 })); err != nil {
				return err
			}
			return within(10*time.Second, func() error {
				if counter(t, a, bfdDropped("multipoint")) == before {
					return errors.New("it is not counted")
				}
				return nil
			})
		})
		if counter(t, a, bfdDropped("version")) == flood {
			t.Error("none of the flood is counted")
		}
	})
}

func (p hostilePeer) bfdTarget() string { return netip.AddrPortFrom(p.at.Addr(), 3784).String() }

func bfdDropped(reason string) string {
	return fmt.Sprintf("landfall_bfd_dropped_packets_total{reason=%q}", reason)
}

// sendBFD sends a packet from a host to the besieged node.
func (p hostilePeer) sendBFD(t *testing.T, l *lab.Lab, from string, ttl int, packet []byte) error {
	conn, err := l.Dial(t.Context(), from, "udp", p.bfdTarget())
	if err != nil {
		return err
	}
	defer conn.Close()
	if p.six {
		err = ipv6.NewConn(conn).SetHopLimit(ttl)
	} else {
		err = ipv4.NewConn(conn).SetTTL(ttl)
	}
	if err != nil {
		return err
	}
	_, err = conn.Write(packet)
	return err
}

func bytesOf(b byte, n int) []byte {
	all := make([]byte, n)
	for i := range all {
		all[i] = b
	}
	return all
}
