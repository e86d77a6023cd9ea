package members

import (
	"net/netip"
	"slices"

	"github.com/landfall-lb/landfall/speaker/plan"
)

// book holds the latest claim of each node on each VIP. Merging updates in any order, any number of
// times, gives the same book.
type book struct {
	index *index
	pages map[string]*page
}

func newBook() book { return book{index: newIndex(), pages: map[string]*page{}} }

// merge takes in updates and returns the VIPs of which something else is known now, and whether a node
// that announced one of them says that it cannot any more.
func (b book) merge(updates ...update) (vips []netip.Addr, ended bool) {
	m := merging{book: b}
	for _, u := range updates {
		b.mergeOne(u, &m)
	}
	for at, is := range m.changed {
		if is {
			vips = append(vips, b.index.vips[at])
		}
	}
	vips = append(vips, b.tidy()...)
	slices.SortFunc(vips, netip.Addr.Compare)
	return slices.Compact(vips), m.ended
}

func (b book) mergeOne(u update, m *merging) {
	p := b.pages[u.node]
	switch {
	case p == nil, p.born < u.born: // a new process: what the old one said is void
		next := newPage(u.born, b.index)
		if p != nil {
			next.before = p
			if p.before != nil && !p.announces() {
				next.before = p.before
			}
			p.before = nil
			for at, number := range p.cells {
				if number != 0 {
					m.mark(at)
				}
			}
		}
		p = next
		b.pages[u.node] = p
	case p.born > u.born:
		return
	}
	p.merge(u, m)
}

// Limits of a book: how many VIPs and claims all pages name, how many bytes the words of the claims
// have, and how many cells the pages have.
const (
	maxIndexed = 2 * maxVIPs
	maxWords   = 1 << 26
	maxBook    = 1 << 25
)

// tidy bounds what the book remembers of VIPs that are gone. A book that is too large even so loses
// its largest pages, whose VIPs it returns: nodes that are live are called if they have none.
func (b book) tidy() (lost []netip.Addr) {
	pages, _ := b.all()
	b.index.tidy(pages)
	if !b.over(8) {
		return nil
	}
	b.squeeze()
	for b.over(7) { // a book that stays full would be squeezed with each message
		lost = append(lost, b.drop()...)
		b.squeeze()
	}
	return lost
}

// squeeze forgets VIPs and claims of which no page says anything.
func (b book) squeeze() {
	b.index.kept = 0
	pages, _ := b.all()
	b.index.tidy(pages)
}

// over reports whether the book has more than so many eighths of what it may have.
func (b book) over(eighths int) bool {
	_, cells := b.all()
	return max(len(b.index.vips), len(b.index.claims)) > maxIndexed/8*eighths || b.index.words > maxWords/8*eighths ||
		cells > maxBook/8*eighths
}

// loose returns how many changes the pages remember, beside a few of each: see maxLoose.
func (b book) loose() (n int) {
	pages, _ := b.all()
	for _, p := range pages {
		n += p.loose()
	}
	return n
}

// all returns all pages, and how many cells they have.
func (b book) all() (pages []*page, cells int) {
	for _, p := range b.pages {
		for ; p != nil; p = p.before {
			pages = append(pages, p)
			cells += len(p.cells)
		}
	}
	return pages, cells
}

// drop forgets the node of which the most is known, and returns the VIPs that it names.
func (b book) drop() []netip.Addr {
	const ofCell = 64 // some bytes for a VIP and a claim, beside its words
	largest, most := "", -1
	for node, p := range b.pages {
		size := 0
		for ; p != nil; p = p.before {
			for _, number := range p.cells {
				if number != 0 {
					size += ofCell + wordsOf(b.index.claim(number))
				}
			}
		}
		if size > most {
			largest, most = node, size
		}
	}
	vips := b.pages[largest].vips()
	delete(b.pages, largest)
	return vips
}

// updates returns all that is known of the live nodes, and what is reserved for those that are
// expected back, entries in any order. They stay as they are when the book changes.
func (b book) updates(standings map[string]plan.Standing) []update {
	var updates []update
	all := b.index.sheet // which only grows at its ends, or is replaced
	for node, standing := range standings {
		p := b.pages[node]
		if standing.Live && p != nil {
			updates = append(updates, p.update(node, &all))
		}
		if life := p.life(standing.Held); life != nil {
			updates = append(updates, life.reserved(node))
		}
	}
	return updates
}

// claims returns what counts of what the nodes say of a VIP.
func (b book) claims(vip netip.Addr, standings map[string]plan.Standing) map[string]plan.Claim {
	claims := make(map[string]plan.Claim, len(standings))
	for node, standing := range standings {
		p := b.pages[node]
		if p == nil {
			continue
		}
		var said, reserved *plan.Claim
		if claim, ok := p.life(standing.Held).held(vip); ok {
			reserved = &claim
		}
		// A process that has joined since does not count yet, as what is reserved for it is not known.
		if known := p.life(standing.Born); known != nil {
			p = known
		}
		if claim, ok := p.get(vip); ok {
			said = &claim
		}
		if claim, ok := standing.Counts(said, plan.Point{Born: p.born, Seq: p.seq(vip)}, reserved); ok {
			claims[node] = claim
		}
	}
	return claims
}
