package members

import (
	"bytes"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/hashicorp/memberlist"
)

func openTestNetwork(t testing.TB, last byte, encrypted bool) (*network, netip.AddrPort) {
	t.Helper()
	at := netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 6, byte(rigs.Add(1)), last}), uint16(testPort()))
	n, err := openNetwork(at, encrypted, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Shutdown(); err != nil {
			t.Error(err)
		}
	})
	return n, at
}

// A packet stays as it came while later ones are read into the same buffer, whatever their sizes.
func TestPacketsStayAsTheyCame(t *testing.T) {
	a, at := openTestNetwork(t, 1, false)
	b, from := openTestNetwork(t, 2, false)
	sizes := []int{1, 1400, 60_000, 3}
	var got []*memberlist.Packet
	for i, size := range sizes {
		if _, err := b.WriteTo(bytes.Repeat([]byte{byte(i + 1)}, size), at.String()); err != nil {
			t.Fatal(err)
		}
		got = append(got, <-a.PacketCh())
	}
	for i, size := range sizes {
		if want := bytes.Repeat([]byte{byte(i + 1)}, size); !bytes.Equal(got[i].Buf, want) {
			t.Errorf("packet %d has %d bytes, the first %d; want %d of %d", i, len(got[i].Buf), got[i].Buf[0], size, i+1)
		}
		if got[i].From.String() != from.String() || got[i].Timestamp.IsZero() {
			t.Errorf("packet %d is from %s at %s, want %s", i, got[i].From, got[i].Timestamp, from)
		}
	}
}

// An empty packet, and with encryption one of another version, does not reach memberlist.
func TestNetworkLeavesPacketsOut(t *testing.T) {
	a, at := openTestNetwork(t, 1, true)
	b, _ := openTestNetwork(t, 2, false)
	good := append([]byte{typeLabel, 1, 'x', encryptionVersion}, 1, 2, 3)
	for _, packet := range [][]byte{{}, {0, 1}, {typeLabel, 1, 'x', 0, 1}, {typeLabel, 9}, good} {
		if _, err := b.WriteTo(packet, at.String()); err != nil {
			t.Fatal(err)
		}
	}
	if got := <-a.PacketCh(); !bytes.Equal(got.Buf, good) {
		t.Errorf("got % x", got.Buf)
	}
}

// The end waits for nobody who takes packets or connections, and closes those that nobody took.
func TestNetworkEnds(t *testing.T) {
	a, at := openTestNetwork(t, 1, false)
	b, _ := openTestNetwork(t, 2, false)
	if _, err := b.WriteTo([]byte{1}, at.String()); err != nil {
		t.Fatal(err)
	}
	conn, err := b.DialTimeout(at.String(), 5*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if err := a.Shutdown(); err != nil {
		t.Fatal(err)
	}
	if n, err := conn.Read(make([]byte, 1)); err == nil {
		t.Errorf("read %d bytes", n)
	}
	if _, err := b.DialTimeout(at.String(), time.Second); err == nil {
		t.Error("the port still answers")
	}
	if err := a.Shutdown(); err != nil {
		t.Errorf("the second time: %v", err)
	}
}

// With encryption both ends of a connection look at what comes.
func TestNetworkGuardsStreams(t *testing.T) {
	a, at := openTestNetwork(t, 1, true)
	b, _ := openTestNetwork(t, 2, true)
	out, err := b.DialAddressTimeout(memberlist.Address{Addr: at.String()}, 5*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	in := <-a.StreamCh()
	for _, way := range []struct{ from, to net.Conn }{{out, in}, {in, out}} {
		if _, err := way.from.Write([]byte{typeEncrypted, 0, 0, 0, encryptedEmpty, encryptionVersion}); err != nil {
			t.Fatal(err)
		}
		if got, err := io.ReadAll(way.to); err == nil {
			t.Errorf("got % x", got)
		}
	}
}

// BenchmarkPackets sends packets of gossip from one network to another.
func BenchmarkPackets(b *testing.B) {
	for name, open := range map[string]func(netip.AddrPort) (memberlist.NodeAwareTransport, error){
		"ours": func(at netip.AddrPort) (memberlist.NodeAwareTransport, error) {
			return openNetwork(at, true, slog.New(slog.DiscardHandler))
		},
		"memberlist": func(at netip.AddrPort) (memberlist.NodeAwareTransport, error) {
			return memberlist.NewNetTransport(&memberlist.NetTransportConfig{BindAddrs: []string{at.Addr().String()},
				BindPort: int(at.Port())})
		},
	} {
		b.Run(name, func(b *testing.B) {
			at := netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 6, byte(rigs.Add(1)), 1}), uint16(testPort()))
			n, err := open(at)
			if err != nil {
				b.Fatal(err)
			}
			packet := append([]byte{encryptionVersion}, make([]byte, 100)...)
			b.ReportAllocs()
			for b.Loop() {
				if _, err := n.WriteTo(packet, at.String()); err != nil {
					b.Fatal(err)
				}
				<-n.PacketCh()
			}
			if err := n.Shutdown(); err != nil {
				b.Fatal(err)
			}
		})
	}
}
