package vrf

import (
	"cmp"
	"fmt"
	"math/bits"
	"net/netip"
	"slices"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/links"
)

// Marks are the bits of the packet mark and the connection mark that are ours. All ones says that a packet of a
// connection to a Service came in through a VRF; any other number but 0 is that of a VRF.
type Marks uint32

// DefaultMarks leave out 0xff00, of which Cilium (0x0f00), the portmap plugin (0x2000) and kube-proxy (0xc000) use
// bits; 0xffff0000 (Calico, Tailscale, Weave); 0x80 (the AWS plugin); and small numbers.
const DefaultMarks Marks = 0x70

// Check says what is wrong with a mask.
func (m Marks) Check() error {
	count, span := bits.OnesCount32(uint32(m)), bits.Len32(uint32(m))-bits.TrailingZeros32(uint32(m))
	if m != 0 && (count < 2 || span != count) {
		return fmt.Errorf("%#x is neither 0 nor a mask of at least two adjacent bits", uint32(m))
	}
	return nil
}

// inward is the mark of packets to backends.
func (m Marks) inward() uint32 { return uint32(m) }

// room is how many VRFs can have a mark.
func (m Marks) room() int { return 1<<bits.OnesCount32(uint32(m)) - 2 }

// mark is that of the VRF with a number, from 0.
func (m Marks) mark(number int) uint32 {
	return uint32(number+1) << bits.TrailingZeros32(uint32(m))
}

// marked is a VRF with its mark.
type marked struct {
	name  string
	table int
	mark  uint32
}

// assign gives VRFs their marks: the one that the kernel's rules have for the VRF's table, as live connections carry
// it, or the least that is free. left are the VRFs for which none is free.
func (m Marks) assign(vrfs []lb.Interface, have []links.MarkRule) (all []marked, left []string) {
	taken, free := map[int]uint32{}, map[uint32]bool{}
	for i := range m.room() {
		free[m.mark(i)] = true
	}
	for _, r := range have {
		wanted := slices.ContainsFunc(vrfs, func(i lb.Interface) bool { return i.Table == r.Table })
		if wanted && r.Mask == uint32(m) && taken[r.Table] == 0 && free[r.Mark] {
			taken[r.Table] = r.Mark
			free[r.Mark] = false
		}
	}
	next := 0
	for _, i := range vrfs {
		mark := taken[i.Table]
		for ; mark == 0 && next < m.room(); next++ {
			if free[m.mark(next)] {
				mark = m.mark(next)
			}
		}
		if mark == 0 {
			left = append(left, i.Name)
			continue
		}
		all = append(all, marked{i.Name, i.Table, mark})
	}
	return all, left
}

// rules returns the routing rules. What goes to a backend takes the main table's routes first, as without a VRF; with
// narrow set, not its default route, which may lead elsewhere than the VRF's. Answers take those of their VRF.
func (m Marks) rules(vrfs []marked, narrow bool) []links.MarkRule {
	if len(vrfs) == 0 {
		return nil
	}
	all := []links.MarkRule{{Mark: m.inward(), Mask: uint32(m), Table: links.MainTable, Narrow: narrow}}
	for _, v := range vrfs {
		all = append(all, links.MarkRule{Mark: v.mark, Mask: uint32(m), Table: v.table})
	}
	return all
}

// vrfsOf returns the VRFs among the interfaces that are wanted, by name.
func vrfsOf(interfaces []lb.Interface, wanted map[string]bool) (vrfs []lb.Interface) {
	for _, i := range interfaces {
		if i.Table != 0 && wanted[i.Name] {
			vrfs = append(vrfs, i)
		}
	}
	slices.SortFunc(vrfs, func(a, b lb.Interface) int { return cmp.Compare(a.Name, b.Name) })
	return vrfs
}

// broken says why nothing that comes in through a VRF is forwarded; "" if it may be.
func broken(vrf lb.Interface, interfaces []lb.Interface) string {
	if vrf.Disabled {
		return "the VRF is down"
	}
	if !vrf.Forwards(lb.IPv4) && slices.ContainsFunc(interfaces, func(i lb.Interface) bool {
		return i.VRF == vrf.Name && slices.ContainsFunc(i.Addresses,
			func(p netip.Prefix) bool { return lb.FamilyOf(p.Addr()) == lb.IPv4 })
	}) {
		return fmt.Sprintf("net.ipv4.conf.%s.forwarding is 0", vrf.Name)
	}
	return ""
}
