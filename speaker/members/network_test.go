package members

import (
	"bytes"
	"encoding/binary"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/hashicorp/memberlist"
)

// noNode is for networks whose clients are no nodes.
func noNode(netip.Addr) bool { return false }

func openTestNetwork(t testing.TB, last byte, encrypted bool) (*network, netip.AddrPort) {
	t.Helper()
	return openNetworkOf(t, last, encrypted, noNode)
}

func openNetworkOf(t testing.TB, last byte, encrypted bool, isNode func(netip.Addr) bool) (*network, netip.AddrPort) {
	t.Helper()
	at := netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 6, byte(rigs.Add(1)), last}), uint16(testPort()))
	n, err := openNetwork(at, encrypted, isNode, &empties{}, slog.New(slog.DiscardHandler))
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

// connect opens a connection to a network, and returns both ends of it.
func connect(t *testing.T, from string, n *network, at netip.AddrPort) (out, in net.Conn) {
	t.Helper()
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
	out, err := d.DialContext(t.Context(), "tcp", at.String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { out.Close() })
	in = <-n.StreamCh()
	t.Cleanup(func() { in.Close() })
	return out, in
}

// passes reports whether what is written to one end of a connection arrives at the other.
func passes(out, in net.Conn) bool {
	_ = in.SetDeadline(time.Now().Add(time.Minute))
	_, err := out.Write([]byte{1})
	if err == nil {
		_, err = io.ReadFull(in, make([]byte, 1))
	}
	return err == nil
}

// Whoever reaches the port can open connections and say nothing. They are few at a time, whatever addresses they come
// from, and none of a node has to leave for them.
func TestConnectionsHaveABound(t *testing.T) {
	const node, more = "127.0.0.9", 20
	n, at := openNetworkOf(t, 1, false, func(a netip.Addr) bool { return a.String() == node })
	ofNode, toNode := connect(t, node, n, at)
	var outs, ins []net.Conn
	for i := range maxFromOthers + more {
		out, in := connect(t, netip.AddrFrom4([4]byte{127, 0, 1, byte(i)}).String(), n, at)
		outs, ins = append(outs, out), append(ins, in)
	}
	for i := range outs {
		if got, want := passes(outs[i], ins[i]), i >= more; got != want {
			t.Errorf("connection %d is served: %v, want %v", i, got, want)
		}
	}
	if !passes(ofNode, toNode) {
		t.Error("connections of others have closed that of a node")
	}
	for _, in := range ins {
		in.Close()
	}
	if left := n.others.Len(); left > 0 {
		t.Errorf("%d connections are counted, and all have ended", left)
	}
}

// What is read before the key shows who has sent it has a bound, but for nodes.
func TestUnprovenMessagesHaveABound(t *testing.T) {
	const node = "127.0.0.9"
	n, at := openNetworkOf(t, 1, true, func(a netip.Addr) bool { return a.String() == node })
	begin := func(from string, size uint32) (in net.Conn, begun bool) {
		out, in := connect(t, from, n, at)
		head := append(binary.BigEndian.AppendUint32([]byte{typeEncrypted}, size), encryptionVersion)
		if _, err := out.Write(head); err != nil {
			t.Fatal(err)
		}
		_, err := io.ReadFull(in, make([]byte, len(head)))
		return in, err == nil
	}
	first, _ := begin("127.0.0.1", maxUnproven/2)
	for _, test := range []struct {
		from string
		size uint32
		want bool
	}{{"127.0.0.2", maxUnproven / 2, true}, {"127.0.0.3", maxUnproven / 2, false}, {"127.0.0.3", smallMessage, true},
		{node, maxOfNodes - maxUnproven/2, true}, {node, maxUnproven, false}, {node, maxUnproven / 2, true}} {
		if _, begun := begin(test.from, test.size); begun != test.want {
			t.Errorf("%d bytes from %s: begun %v, want %v", test.size, test.from, begun, test.want)
		}
	}
	first.Close()
	first.Close() // counts once
	for i, want := range []bool{true, false} {
		if _, begun := begin("127.0.0.3", maxUnproven/2); begun != want {
			t.Errorf("message %d after the first has ended: begun %v, want %v", i+1, begun, want)
		}
	}
}

// BenchmarkPackets sends packets of gossip from one network to another.
func BenchmarkPackets(b *testing.B) {
	for name, open := range map[string]func(netip.AddrPort) (memberlist.NodeAwareTransport, error){
		"ours": func(at netip.AddrPort) (memberlist.NodeAwareTransport, error) {
			return openNetwork(at, true, noNode, &empties{}, slog.New(slog.DiscardHandler))
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
