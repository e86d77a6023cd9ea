package walk

import (
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/nft"
	"github.com/landfall-lb/landfall/proxy/nft/expr"
	"github.com/landfall-lb/landfall/proxy/trace"
)

// oneChain is a table whose chains have the same rules.
type oneChain struct {
	Table
	rules []nft.Listed
}

func (t oneChain) Chain(string) ([]nft.Listed, bool) { return t.rules, true }

// A rule that asks for the interface is not blamed for a packet whose interface is unknown.
func TestAnInterfaceThatIsMadeUpDecidesNothing(t *testing.T) {
	name := append([]byte("eth0"), make([]byte, 12)...)
	accept := nft.Rule{Exprs: []expr.Any{&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: unix.NFT_REG_1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: unix.NFT_REG_1, Data: name}, &expr.Verdict{Kind: expr.VerdictAccept}}}
	for link, dropped := range map[uint32]bool{0: false, 7: true} {
		w := &Walker{Family: lb.IPv4, Name: "filter", Inet: true, Link: link, Local: func(netip.Addr) bool { return false },
			Table: oneChain{rules: []nft.Listed{{Rule: accept}}}}
		p := trace.Way{Packet: trace.Packet{Source: netip.MustParseAddrPort("198.51.100.7:49152"),
			Destination: netip.MustParseAddrPort("192.0.2.10:80"), Interface: "eth1", Protocol: unix.IPPROTO_TCP}}
		ways, why := w.Foreign(unix.NF_INET_FORWARD, 0, true, "forward", p)
		if got := ways[0].Verdict == trace.Drop; got != dropped {
			t.Errorf("link %d: dropped %v (%s), want %v", link, got, why, dropped)
		}
	}
}
