package members

import (
	"net/netip"
	"slices"

	"github.com/landfall-lb/landfall/speaker/plan"
)

const (
	// recentVIPs is of how many VIPs a page remembers when they were last spoken of, although it knows
	// all changes up to then.
	recentVIPs = 64
	// maxSeen bounds the changes that a page remembers to have seen after one that it has missed.
	maxSeen = 1 << 16
	// fewLoose and maxLoose are how many entries said and seen have in a page, and in all pages of a book beside so
	// many of each. They have room for all changes of 200 nodes that begin to claim 10,000 VIPs at once.
	fewLoose = 1 << 10
	maxLoose = 1 << 22
)

// page is what is known of one process of a node.
type page struct {
	born uint64
	// floor is the last change up to which the page knows all.
	floor uint64
	index *index
	cells []uint32 // what the node says now, as far as is known
	// shared is set while an update has the cells, too: they are copied before the next change.
	shared bool
	// said is the last change of each VIP: of all that were spoken of after floor, and of some before,
	// none of which is older than forgotten.
	said      map[netip.Addr]uint64 // of maxVIPs at most
	forgotten uint64
	seen      map[uint64]bool // changes after floor
	before    *page           // of the last process before that announced an address, or nil
}

func newPage(born uint64, x *index) *page {
	return &page{born: born, index: x, said: map[netip.Addr]uint64{}, seen: map[uint64]bool{}}
}

// get returns what the node says of a VIP.
func (p *page) get(vip netip.Addr) (plan.Claim, bool) {
	if at, ok := p.index.vipAt[vip]; ok && at < len(p.cells) && p.cells[at] != 0 {
		return p.index.claim(p.cells[at]), true
	}
	return plan.Claim{}, false
}

// put sets the number of the claim on the VIP at a position, and reports whether it was another
// one.
func (p *page) put(at int, number uint32) bool {
	if p.shared {
		p.cells, p.shared = slices.Clone(p.cells), false
	}
	if at >= len(p.cells) {
		p.cells = append(p.cells, make([]uint32, at+1-len(p.cells))...)
	}
	old := p.cells[at]
	p.cells[at] = number
	return old != number
}

// vips returns the VIPs of which the node says something.
func (p *page) vips() []netip.Addr {
	var vips []netip.Addr
	for i, number := range p.cells {
		if number != 0 {
			vips = append(vips, p.index.vips[i])
		}
	}
	return vips
}

// merge takes in an update of the page's process, and marks the VIPs of which the page says
// something else now. Changes for which there is no room are left to the exchange of states, like
// those that were lost on the way.
func (p *page) merge(u update, m *merging) {
	if u.floor > p.floor {
		p.replace(u, m)
		p.rise()
		p.forget()
	}
	room := fewLoose
	if p.remembered()+2*len(u.entries) > room {
		room += max(0, maxLoose-(m.loose()-p.loose()))
	}
	for _, e := range u.entries {
		if e.seq <= p.floor {
			continue // the page knows it, or something newer
		}
		if _, spoken := p.said[e.vip]; p.remembered() >= room || !spoken && len(p.said) >= maxVIPs {
			continue
		}
		if len(p.seen) < maxSeen {
			p.seen[e.seq] = true
		}
		if e.seq <= p.said[e.vip] {
			continue
		}
		p.said[e.vip] = e.seq
		number := uint32(0)
		if !e.gone {
			number = p.index.number(e.claim)
			_, announced := p.held(e.vip)
			m.ended = m.ended || announced && !e.claim.Announces()
		}
		if at := p.index.position(e.vip); p.put(at, number) {
			m.mark(at)
		}
	}
	if p.rise() {
		p.forget()
	}
}

// remembered returns how many entries said and seen have, and loose how many beside a few.
func (p *page) remembered() int { return len(p.said) + len(p.seen) }
func (p *page) loose() int      { return max(0, p.remembered()-fewLoose) }

// replace takes in all that a node has said up to the floor of an update.
func (p *page) replace(u update, m *merging) {
	all := page{cells: make([]uint32, len(p.index.vips))}
	for i, claim := range u.row.expand() {
		if claim != 0 {
			all.put(m.translate(u.sheet, i, claim))
		}
	}
	for _, e := range u.entries {
		if e.seq <= u.floor && !e.gone {
			all.put(p.index.position(e.vip), p.index.number(e.claim))
		}
	}
	if p.floor == 0 && len(p.said) == 0 { // nothing is known yet
		p.cells, p.shared, p.forgotten = all.cells, false, u.floor
		for at, number := range p.cells {
			if number != 0 {
				m.mark(at)
			}
		}
	}
	for at, number := range all.cells {
		if at < len(p.cells) && p.cells[at] == number || at >= len(p.cells) && number == 0 {
			continue
		}
		if vip := p.index.vips[at]; p.said[vip] <= u.floor {
			p.put(at, number)
			p.said[vip] = u.floor
			m.mark(at)
		}
	}
	p.floor = u.floor
}

// rise raises the floor over all changes that follow it without a gap, and reports whether there are any.
func (p *page) rise() (some bool) {
	for p.seen[p.floor+1] {
		delete(p.seen, p.floor+1)
		p.floor++
		some = true
	}
	return some
}

// forget forgets what a higher floor makes needless.
func (p *page) forget() {
	for seq := range p.seen {
		if seq <= p.floor {
			delete(p.seen, seq)
		}
	}
	if len(p.said) <= recentVIPs {
		return
	}
	for vip, seq := range p.said {
		if seq <= p.floor {
			p.forgotten = max(p.forgotten, seq)
			delete(p.said, vip)
		}
	}
}

// whole reports whether what came first had no gap, or the gap has been filled: a greeting in a large
// cluster brings the last changes only. Gaps that come later are left to the exchange of states.
func (p *page) whole() bool { return p != nil && (p.floor > 0 || len(p.seen) == 0) }

// seq returns the change in which the VIP was last spoken of, or a later one before the next.
func (p *page) seq(vip netip.Addr) uint64 {
	if seq, ok := p.said[vip]; ok {
		return seq
	}
	return p.forgotten
}

// newest returns the last change that is known.
func (p *page) newest() plan.Point {
	newest := p.floor
	for _, seq := range p.said {
		newest = max(newest, seq)
	}
	return plan.Point{Born: p.born, Seq: newest}
}

// life returns the page of the process that was started at born, or nil.
func (p *page) life(born uint64) *page {
	for ; p != nil && born != 0; p = p.before {
		if p.born == born {
			return p
		}
	}
	return nil
}

// announces reports whether the process announces an address.
func (p *page) announces() bool {
	return slices.ContainsFunc(p.cells, func(number uint32) bool {
		return number != 0 && p.index.claim(number).Announces()
	})
}

// held returns what is reserved of a VIP for the node's next speaker: that this one announced it.
func (p *page) held(vip netip.Addr) (plan.Claim, bool) {
	if p == nil {
		return plan.Claim{}, false
	}
	claim, ok := p.get(vip)
	return claim, ok && claim.Announces()
}

// update returns all that the page knows, with a copy of its index' sheet, entries in any order. It
// stays as it is when the page changes.
func (p *page) update(node string, s *sheet) update {
	u := update{node: node, born: p.born, floor: p.floor}
	if p.floor > 0 {
		u.sheet, u.row = s, row{cells: p.cells}
		p.shared = true
	}
	for vip, seq := range p.said {
		if seq > p.floor {
			claim, ok := p.get(vip)
			u.entries = append(u.entries, entry{vip: vip, seq: seq, claim: claim, gone: !ok})
		}
	}
	return u
}

// reserved returns what is reserved for the node's next speaker.
func (p *page) reserved(node string) update {
	u := update{node: node, born: p.born}
	for _, vip := range p.vips() {
		if claim, ok := p.held(vip); ok {
			u.entries = append(u.entries, entry{vip: vip, seq: p.seq(vip), claim: claim})
		}
	}
	return u
}

func sortEntries(entries []entry) {
	slices.SortFunc(entries, func(x, y entry) int { return x.vip.Compare(y.vip) })
}
