package vrf

import (
	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/nft"
	"github.com/landfall-lb/landfall/proxy/nft/expr"
)

// TableName is the name of the tables, one in the family ip and one in ip6.
const TableName = "landfall-vrf"

// Names of the chain, and numbers of the kernel.
const (
	chainName = "marks"
	mangle    = -150 // behind connection tracking (-200), ahead of NAT (-100) and of routing
	// statusTranslated is IPS_DST_NAT of linux/netfilter/nf_conntrack_common.h.
	statusTranslated = 1 << 5
	fromClient       = 0
	answer           = 1
)

func table(family lb.Family) nft.Table { return nft.Table{Family: family, Name: TableName} }

var hook = nft.Hook{Kind: "filter", Number: unix.NF_INET_PRE_ROUTING, Priority: mangle}

// chain returns the rules. A packet from outside passes them twice: as one of the port, before its destination is
// translated, and then as one of the VRF.
func (m Marks) chain(vrfs []marked) (rules []nft.Rule) {
	direction := func(of byte) expr.List {
		return expr.List{&expr.Ct{Key: expr.CtKeyDIRECTION, Register: expr.Reg}, expr.Compare(expr.CmpOpEq, of)}
	}
	packet := func(mark uint32) expr.List {
		return expr.List{&expr.Meta{Key: expr.MetaKeyMARK, Register: expr.Reg}, m.put(mark),
			&expr.Meta{Key: expr.MetaKeyMARK, SourceRegister: true, Register: expr.Reg}}
	}
	connection := func(mark uint32) expr.List {
		return expr.List{&expr.Ct{Key: expr.CtKeyMARK, Register: expr.Reg}, m.put(mark),
			&expr.Ct{Key: expr.CtKeyMARK, SourceRegister: true, Register: expr.Reg}}
	}
	for _, v := range vrfs {
		rules = append(rules,
			nft.Rule{Comment: "to a Service, through " + v.name, Exprs: expr.Join(
				expr.CameIn(expr.CmpOpEq, v.name), direction(fromClient),
				expr.HasBits(&expr.Ct{Key: expr.CtKeySTATUS, Register: expr.Reg}, statusTranslated),
				connection(v.mark), packet(m.inward()))},
			nft.Rule{Comment: "back through " + v.name, Exprs: expr.Join(
				direction(answer),
				expr.List{&expr.Ct{Key: expr.CtKeyMARK, Register: expr.Reg}, expr.Keep(expr.Host32(uint32(m))...),
					expr.Compare(expr.CmpOpEq, expr.Host32(v.mark)...)},
				packet(v.mark))})
	}
	return rules
}

// put replaces our bits in a register.
func (m Marks) put(mark uint32) expr.Any {
	return expr.Edit(expr.Host32(^uint32(m)), expr.Host32(mark))
}
