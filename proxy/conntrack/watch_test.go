package conntrack

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/nstest"
	"github.com/landfall-lb/landfall/proxy/nfnetlink"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// watched is a node that redirects the ports 80 and 81 to a server, and a client.
type watched struct {
	t            testing.TB
	node, client *nstest.NS
	addr         netip.Addr
	watch        *Watch
}

func newWatched(t testing.TB, server, client string, bits int) *watched {
	w := &watched{t: t, node: nstest.New(t), client: nstest.New(t), addr: netip.MustParseAddr(server)}
	nstest.Veth(t, w.node, "eth0", fmt.Sprint(server, "/", bits), w.client, "eth0", fmt.Sprint(client, "/", bits))
	w.node.Run(t, "nft", "add table inet t; add chain inet t c { type nat hook prerouting priority -100; }; "+
		"add rule inet t c tcp dport { 80, 81 } redirect to :8080")
	w.node.Do(t, func() error {
		l, err := net.Listen("tcp", netip.AddrPortFrom(w.addr, 8080).String())
		if err != nil {
			return err
		}
		t.Cleanup(func() { l.Close() })
		go func() {
			for {
				conn, err := l.Accept()
				if err != nil {
					return
				}
				go func() {
					defer conn.Close()
					_, _ = conn.Write([]byte("hello"))
					_, _ = io.Copy(io.Discard, conn)
				}()
			}
		}()
		w.watch, err = OpenWatch()
		return err
	})
	t.Cleanup(w.watch.Close)
	return w
}

// connect connects to a port; the connection stands at both ends.
func (w *watched) connect(port uint16) (conn net.Conn) {
	w.t.Helper()
	w.client.Do(w.t, func() (err error) {
		if conn, err = net.DialTimeout("tcp", netip.AddrPortFrom(w.addr, port).String(), 30*time.Second); err != nil {
			return err
		}
		_ = conn.SetDeadline(time.Now().Add(30 * time.Second))
		_, err = io.ReadFull(conn, make([]byte, 5))
		return err
	})
	w.t.Cleanup(func() { conn.Close() })
	return conn
}

// half opens connections that the client does not complete.
func (w *watched) half(port uint16, n int) {
	w.client.Run(w.t, "nft", "add table inet h; add chain inet h c { type filter hook input priority 0; }; "+
		"add rule inet h c tcp flags & (syn|ack) == syn|ack drop")
	w.client.Do(w.t, func() error {
		for range n {
			if conn, err := net.DialTimeout("tcp", netip.AddrPortFrom(w.addr, port).String(), 5*time.Millisecond); err == nil {
				conn.Close()
				w.t.Error("an opening was answered")
			}
		}
		return nil
	})
	w.client.Run(w.t, "nft", "delete table inet h")
}

// heard is what one message of the kernel says.
type heard struct {
	port    uint16
	deleted bool
	state   byte // of TCP
}

// The kernel itself leaves out what no count depends on: half-open connections, those of other
// destinations, and the states after the first farewell.
func TestKernelFiltersEvents(t *testing.T) {
	for _, family := range []struct {
		server, client, other string
		bits                  int
	}{{"172.31.0.1", "172.31.0.2", "172.31.0.9", 24}, {"fd31::1", "fd31::2", "fd31::9", 64}} {
		other := netip.MustParseAddr(family.other)
		for _, tt := range []struct {
			name   string
			filter func(w *watched) ([]netip.Addr, []uint16)
			ports  []uint16 // of which something is heard
		}{
			{"all", func(*watched) ([]netip.Addr, []uint16) { return nil, nil }, []uint16{80, 81}},
			{"an address", func(w *watched) ([]netip.Addr, []uint16) { return []netip.Addr{other, w.addr}, nil },
				[]uint16{80, 81}},
			{"a port", func(*watched) ([]netip.Addr, []uint16) { return []netip.Addr{other}, []uint16{79, 81} }, []uint16{81}},
			{"too many", func(*watched) ([]netip.Addr, []uint16) { return nil, make([]uint16, maxFiltered+1) },
				[]uint16{80, 81}},
			{"as many as go", func(*watched) ([]netip.Addr, []uint16) {
				return nil, append(make([]uint16, maxFiltered-1), 81)
			}, []uint16{81}},
		} {
			t.Run(family.server+" "+tt.name, func(t *testing.T) {
				w := newWatched(t, family.server, family.client, family.bits)
				if err := w.watch.Filter(tt.filter(w)); err != nil {
					t.Fatal(err)
				}
				messages := make(chan heard, 1000)
				ctx, cancel := context.WithCancel(t.Context())
				done := make(chan error)
				go func() {
					done <- w.watch.events.Each(ctx, func(m nfnetlink.Message) {
						_, _, to := tuple(nfnetlink.Get(m.Attributes(), tupleOriginal))
						h := heard{port: to.Port(), deleted: m.Kind == deleteFlow}
						if state := nfnetlink.Get(m.Attributes(), protocolInfo, infoTCP, infoState); len(state) == 1 {
							h.state = state[0]
						}
						messages <- h
					}, func() { t.Error("events were lost") })
				}()
				w.half(80, 20)
				w.half(81, 20)
				w.node.Run(t, "conntrack", "-F")
				w.connect(80).Close()
				w.connect(81).Close()
				var all []heard
				for ended := false; !ended; {
					select {
					case h := <-messages:
						all = append(all, h)
						ended = h.port == 81 && h.state > establishedTCP
					case <-time.After(30 * time.Second):
						t.Fatalf("heard %v", all)
					}
				}
				cancel()
				if err := <-done; err != nil {
					t.Error(err)
				}
				for _, h := range all {
					if !slices.Contains(tt.ports, h.port) || !h.deleted && !slices.Contains([]byte{3, 4, 5, 8}, h.state) {
						t.Errorf("heard %+v", h)
					}
				}
				for _, port := range tt.ports {
					if !slices.Contains(all, heard{port: port, state: establishedTCP}) {
						t.Errorf("did not hear of port %d: %v", port, all)
					}
				}
			})
		}
	}
}

// A watch tells when connections are open and when they end, whichever way, and lists the open ones.
func TestWatchTellsOpenConnections(t *testing.T) {
	w := newWatched(t, "172.31.0.1", "172.31.0.2", 24)
	events := make(chan plan.Tracked, 100)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- w.watch.Each(ctx, func(c plan.Tracked) { events <- c }, func() { t.Error("lost") }) }()
	wait := func(conn net.Conn, open bool) {
		t.Helper()
		client := conn.LocalAddr().(*net.TCPAddr).AddrPort()
		for {
			select {
			case c := <-events:
				want := plan.Tracked{Protocol: lb.TCP, Client: client, To: netip.AddrPortFrom(w.addr, 80),
					Backend: netip.AddrPortFrom(w.addr, 8080), Open: open}
				if c == want {
					return
				}
				if c.Client == client {
					t.Errorf("%+v, want %+v", c, want)
				}
			case <-time.After(30 * time.Second):
				t.Fatalf("never heard that %s is open: %v", client, open)
			}
		}
	}
	listed := func() (clients []netip.AddrPort) {
		t.Helper()
		if err := w.watch.List(func(c plan.Tracked) { clients = append(clients, c.Client) }); err != nil {
			t.Fatal(err)
		}
		return clients
	}
	closed, reset, deleted := w.connect(80), w.connect(80), w.connect(80)
	for _, conn := range []net.Conn{closed, reset, deleted} {
		wait(conn, true)
	}
	if got := listed(); len(got) != 3 {
		t.Errorf("listed %v", got)
	}
	closed.Close()
	wait(closed, false)
	_ = reset.(*net.TCPConn).SetLinger(0)
	reset.Close()
	wait(reset, false)
	client := deleted.LocalAddr().(*net.TCPAddr).AddrPort()
	if got := listed(); !slices.Equal(got, []netip.AddrPort{client}) {
		t.Errorf("listed %v, want %s", got, client)
	}
	w.node.Run(t, "conntrack", "-D", "-p", "tcp", "--sport", fmt.Sprint(client.Port()))
	wait(deleted, false)
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// What is not assured, not translated, or of a state that tells nothing, is no news.
func TestDecodeTracked(t *testing.T) {
	at := netip.MustParseAddrPort
	message := func(protocol uint8, status uint32, info, state uint8) []byte {
		var all nfnetlink.Attributes
		for kind, ends := range map[uint16][2]netip.AddrPort{
			tupleOriginal: {at("172.31.0.2:4000"), at("10.96.0.10:80")}, tupleReply: {at("192.168.1.2:8080"), at("172.31.0.2:4000")},
		} {
			all.Nested(kind, func() {
				all.Nested(tupleIP, func() {
					all.Bytes(sourceIPv4, ends[0].Addr().AsSlice())
					all.Bytes(destIPv4, ends[1].Addr().AsSlice())
				})
				all.Nested(tupleProtocol, func() {
					all.Bytes(attrProtocol, []byte{protocol})
					all.Bytes(attrSourcePort, []byte{byte(ends[0].Port() >> 8), byte(ends[0].Port())})
					all.Bytes(attrPort, []byte{byte(ends[1].Port() >> 8), byte(ends[1].Port())})
				})
			})
		}
		all.Number(attrStatus, status)
		if info != 0 {
			all.Nested(protocolInfo, func() { all.Nested(uint16(info), func() { all.Bytes(infoState, []byte{state}) }) })
		}
		return all
	}
	const both = statusAssured | statusTranslated
	for _, tt := range []struct {
		name     string
		message  []byte
		gone     bool
		ok, open bool
	}{
		{"open", message(unix.IPPROTO_TCP, both, infoTCP, 3), false, true, true},
		{"farewell", message(unix.IPPROTO_TCP, both, infoTCP, 4), false, true, false},
		{"offloaded", message(unix.IPPROTO_TCP, both|statusOffloaded, 0, 0), false, true, true},
		{"a label", message(unix.IPPROTO_TCP, both, 0, 0), false, false, false},
		{"not assured", message(unix.IPPROTO_TCP, statusTranslated, infoTCP, 3), false, false, false},
		{"not translated", message(unix.IPPROTO_TCP, statusAssured, infoTCP, 3), false, false, false},
		{"deleted", message(unix.IPPROTO_TCP, both, infoTCP, 3), true, true, false},
		{"UDP", message(unix.IPPROTO_UDP, both, 0, 0), false, true, true},
		{"UDP, deleted", message(unix.IPPROTO_UDP, both, 0, 0), true, true, false},
		{"SCTP", message(unix.IPPROTO_SCTP, both, infoSCTP, 4), false, true, true},
		{"SCTP, farewell", message(unix.IPPROTO_SCTP, both, infoSCTP, 5), false, true, false},
		{"ICMP", message(unix.IPPROTO_ICMP, both, 0, 0), false, false, false},
		{"nothing", nil, false, false, false},
	} {
		got, ok := decodeTracked(tt.message, tt.gone)
		if ok != tt.ok || got.Open && !tt.open || ok && (got.Open != tt.open || got.Client != at("172.31.0.2:4000") ||
			got.To != at("10.96.0.10:80") || got.Backend != at("192.168.1.2:8080")) {
			t.Errorf("%s: %+v, %v", tt.name, got, ok)
		}
	}
}

// FuzzDecodeTracked checks that what the kernel sends is read within its bounds.
func FuzzDecodeTracked(f *testing.F) {
	f.Add([]byte{}, false)
	f.Fuzz(func(t *testing.T, b []byte, gone bool) {
		if c, ok := decodeTracked(b, gone); ok && (!c.Client.IsValid() || !c.To.IsValid() || c.Protocol == "" || c.Open && gone) {
			t.Errorf("%+v", c)
		}
	})
}
