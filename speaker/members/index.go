package members

import (
	"net/netip"

	"github.com/landfall-lb/landfall/speaker/plan"
)

// sheet gives numbers to VIPs and claims, so that what a node says of all VIPs is a row of cells:
// cell i belongs to the VIP i and holds a number of a claim, 0 where the node says nothing.
type sheet struct {
	vips   []netip.Addr
	claims []plan.Claim // the first one has the number 1
}

// claim returns the claim with a number that is not 0.
func (s *sheet) claim(number uint32) plan.Claim { return s.claims[number-1] }

// index is a sheet that grows. All pages of a book share one: most nodes say the same of most VIPs,
// and a node's word on a VIP takes 4 bytes.
type index struct {
	sheet
	vipAt   map[netip.Addr]int
	claimAt map[plan.Claim]uint32
	kept    int // VIPs and claims after the last call of tidy
	words   int // bytes of all words of the claims, those of each counted for itself
}

// merging is what updates that are merged together share.
type merging struct {
	book
	changed []bool // VIPs of the index of which something else is known now
	ended   bool   // one of them was announced by a node that says now that it cannot
	known   map[*sheet]*translation
}

// translation is what has been looked up of another sheet: places of VIPs plus 1, and numbers of
// claims.
type translation struct {
	places, numbers []uint32
}

func (m *merging) mark(at int) {
	if at >= len(m.changed) {
		m.changed = append(m.changed, make([]bool, at+1-len(m.changed))...)
	}
	m.changed[at] = true
}

// translate returns where the index has the VIP i of a sheet, and the number that it has for a
// claim.
func (m *merging) translate(s *sheet, i int, claim uint32) (at int, number uint32) {
	t := m.known[s]
	if t == nil {
		t = &translation{places: make([]uint32, len(s.vips)), numbers: make([]uint32, len(s.claims)+1)}
		if m.known == nil {
			m.known = map[*sheet]*translation{}
		}
		m.known[s] = t
	}
	if t.places[i] == 0 {
		t.places[i] = uint32(m.index.position(s.vips[i]) + 1)
	}
	if t.numbers[claim] == 0 {
		t.numbers[claim] = m.index.number(s.claim(claim))
	}
	return int(t.places[i] - 1), t.numbers[claim]
}

func newIndex() *index {
	return &index{vipAt: map[netip.Addr]int{}, claimAt: map[plan.Claim]uint32{}}
}

// position returns the number of a VIP, which may be new.
func (x *index) position(vip netip.Addr) int {
	at, ok := x.vipAt[vip]
	if !ok {
		at = len(x.vips)
		x.vips, x.vipAt[vip] = append(x.vips, vip), at
	}
	return at
}

// number returns the number of a claim, which may be new.
func (x *index) number(claim plan.Claim) uint32 {
	n, ok := x.claimAt[claim]
	if !ok {
		x.claims = append(x.claims, claim)
		n = uint32(len(x.claims))
		x.claimAt[claim] = n
		x.words += wordsOf(claim)
	}
	return n
}

// wordsOf returns how many bytes the words of a claim have.
func wordsOf(claim plan.Claim) int {
	return len(claim.Reason) + len(claim.Routes) + len(claim.Unrouted)
}

// tidy forgets VIPs and claims of which no page says anything, once there may be many.
func (x *index) tidy(pages []*page) {
	const spare = 1024
	if len(x.vips)+len(x.claims) <= 2*x.kept+spare {
		return
	}
	fresh := newIndex()
	for _, p := range pages {
		cells := p.cells
		p.cells, p.shared = nil, false
		for i, number := range cells {
			if number != 0 {
				p.put(fresh.position(x.vips[i]), fresh.number(x.claim(number)))
			}
		}
	}
	fresh.kept = len(fresh.vips) + len(fresh.claims)
	*x = *fresh
}
