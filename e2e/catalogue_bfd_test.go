package e2e

import (
	"encoding/binary"
	"errors"
	"fmt"
	"testing"
	"time"

	"golang.org/x/net/ipv4"

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

// hostileBFD sends packets to the port of BFD from the address of the hostile peer, whose session
// is down. Each is counted by the reason why it is left alone.
func hostileBFD(t *testing.T, l *lab.Lab) {
	// BFD is there once the BGP session is. Its hold time is longer than all of this takes.
	session := bgpConnect(t, l, atEstablished)
	defer session.Close()
	set := func(at int, value ...byte) []byte { return bfdPacket(func(b []byte) { copy(b[at:], value) }) }
	eventually(t, "BFD listens", func() error {
		conn, err := l.Dial(t.Context(), hostileHost, "udp", "172.26.236.177:3784")
		if err != nil {
			return err
		}
		defer conn.Close()
		const dropped = `landfall_bfd_dropped_packets_total{reason="version"}`
		before := counter(t, l.Agent("speaker", besieged), dropped)
		_, _ = conn.Write(set(0, 0))
		time.Sleep(50 * time.Millisecond)
		if counter(t, l.Agent("speaker", besieged), dropped) == before {
			return errors.New("nothing is counted")
		}
		return nil
	})
	for _, row := range bfdRows() {
		t.Run(row.name, func(t *testing.T) {
			from, ttl := row.from, row.ttl
			if from == "" {
				from = hostileHost
			}
			if ttl == 0 {
				ttl = 255
			}
			conn, err := l.Dial(t.Context(), from, "udp", "172.26.236.177:3784")
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			if err := ipv4.NewConn(conn).SetTTL(ttl); err != nil {
				t.Fatal(err)
			}
			wantCounted(t, l.Agent("speaker", besieged),
				fmt.Sprintf("landfall_bfd_dropped_packets_total{reason=%q}", row.reason), 10, func() error {
					_, err := conn.Write(row.packet)
					return err
				})
		})
	}
	t.Run("20,000 packets", func(t *testing.T) {
		conn, err := l.Dial(t.Context(), hostileHost, "udp", "172.26.236.177:3784")
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		for range 20000 {
			_, _ = conn.Write(set(0, 0))
		}
		wantCounted(t, l.Agent("speaker", besieged), `landfall_bfd_dropped_packets_total{reason="version"}`, 1,
			func() error { _, err := conn.Write(set(0, 0)); return err })
	})
}

func bytesOf(b byte, n int) []byte {
	all := make([]byte, n)
	for i := range all {
		all[i] = b
	}
	return all
}
