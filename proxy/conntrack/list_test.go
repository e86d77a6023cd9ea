package conntrack

import (
	"fmt"
	"net"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/nstest"
	"github.com/landfall-lb/landfall/proxy/nfnetlink"
)

// What conntrack knows of real connections, in both families: by address, by address and port, and by node
// port; and no more of them than asked for.
func TestList(t *testing.T) {
	for _, test := range []struct{ family, server, client string }{
		{"ip", "172.31.0.1", "172.31.0.2"}, {"ip6", "fd31::1", "fd31::2"},
	} {
		t.Run(test.family, func(t *testing.T) {
			node, outside := nstest.New(t), nstest.New(t)
			long := map[string]string{"ip": "/24", "ip6": "/64"}[test.family]
			nstest.Veth(t, node, "eth0", test.server+long, outside, "eth0", test.client+long)
			node.Run(t, "sysctl", "-qw", "net.netfilter.nf_conntrack_acct=1")
			// Without a rule that asks for it there is no conntrack in a namespace.
			node.Run(t, "nft", "add table inet t; add chain inet t c { type filter hook input priority 0; ct state new accept; }")
			const connections = 5
			addr := netip.MustParseAddr(test.server)
			var listener net.Listener
			node.Do(t, func() (err error) {
				listener, err = net.Listen("tcp", netip.AddrPortFrom(addr, 8080).String())
				return err
			})
			defer listener.Close()
			for range connections {
				outside.Do(t, func() error {
					conn, err := net.Dial("tcp", listener.Addr().String())
					if err == nil {
						t.Cleanup(func() { conn.Close() })
					}
					return err
				})
			}
			var table Netlink
			node.Do(t, func() (err error) { table, err = Open(); return err })
			defer table.Close()
			local := func(a netip.Addr) bool { return a == addr }
			for _, ask := range []struct {
				target lb.FlowTarget
				want   int
			}{
				{lb.FlowTarget{Addr: addr}, connections},
				{lb.FlowTarget{Addr: addr, Port: 8080, Protocol: lb.TCP}, connections},
				{lb.FlowTarget{Port: 8080, Protocol: lb.TCP}, connections}, // as a node port
				{lb.FlowTarget{Addr: addr, Port: 8080, Protocol: lb.UDP}, 0},
				{lb.FlowTarget{Addr: addr, Port: 8081}, 0},
				{lb.FlowTarget{Addr: netip.MustParseAddr(test.client)}, 0},
			} {
				flows, err := table.List([]lb.FlowTarget{ask.target}, 2, local)
				if err != nil || flows.Total != ask.want || len(flows.Flows) != min(2, ask.want) {
					t.Errorf("%s: %v, %+v, want %d", ask.target, err, flows, ask.want)
					continue
				}
				for _, f := range flows.Flows {
					if f.Client.Addr().String() != test.client || f.Backend != netip.AddrPortFrom(addr, 8080) || f.To != f.Backend ||
						f.State != "ESTABLISHED" || f.Packets < 3 || f.Bytes == 0 || f.Expires == 0 || f.Masqueraded {
						t.Errorf("%s: %+v", ask.target, f)
					}
				}
				if ask.want > 0 && (!flows.Accounted || fmt.Sprint(flows.Counts) !=
					fmt.Sprintf("[{%s ESTABLISHED %d}]", netip.AddrPortFrom(addr, 8080), connections)) {
					t.Errorf("%s: %+v", ask.target, flows)
				}
			}
		})
	}
}

// FuzzDecodeFlow checks that what the kernel sends is read within its bounds.
func FuzzDecodeFlow(f *testing.F) {
	f.Add([]byte{})
	f.Add([]byte(toAddress(netip.MustParseAddr("192.0.2.1"))))
	f.Fuzz(func(t *testing.T, b []byte) {
		if flow, ok := decodeFlow(b); ok && (flow.State == "" || !flow.To.IsValid() || flow.Protocol == "") {
			t.Errorf("%x is %+v", b, flow)
		}
	})
}

// Of a connection that is offloaded the kernel says no state: it is open, and shown as offloaded.
func TestOffloadedConnectionIsOpen(t *testing.T) {
	client, flow := netip.MustParseAddrPort("192.0.2.1:4000"), Flow{Protocol: unix.IPPROTO_TCP,
		To: netip.MustParseAddrPort("198.51.100.1:80"), From: netip.MustParseAddrPort("10.0.0.1:8080")}
	for status, want := range map[uint32]string{statusAssured: "ASSURED", statusAssured | statusOffloaded: "OFFLOAD"} {
		message := flowAttributes(client, flow, 0)
		var bare nfnetlink.Attributes
		for kind, data := range nfnetlink.All(message) {
			if kind != protocolInfo && kind != attrStatus {
				bare.Bytes(kind, data)
			}
		}
		bare.Number(attrStatus, status)
		_, open := decodeConnection(bare)
		if f, ok := decodeFlow(bare); !ok || f.State != want || open != (want == "OFFLOAD") {
			t.Errorf("status %#x: %+v, open %v; want %s", status, f, open, want)
		}
	}
}
