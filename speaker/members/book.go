package members

import (
	"maps"
	"net/netip"
	"slices"

	"github.com/landfall-lb/landfall/speaker/plan"
)

// book holds the latest claim of each node on each VIP. Merging updates in any order, any number of
// times, gives the same book.
type book map[string]*page

// page is what is known of one node.
type page struct {
	born, floor uint64
	entries     map[netip.Addr]entry
	before      *page // of the last process before that announced an address, or nil
}

// merge takes in an update and returns the VIPs of which something else is known now.
func (b book) merge(u update) []netip.Addr {
	p := b[u.node]
	changed := map[netip.Addr]bool{}
	switch {
	case p == nil, p.born < u.born: // a new process: what the old one said is void
		next := &page{born: u.born, entries: map[netip.Addr]entry{}, before: p}
		if p != nil {
			if p.before != nil && !p.announces() {
				next.before = p.before
			}
			p.before = nil
			for vip := range p.entries {
				changed[vip] = true
			}
		}
		p = next
		b[u.node] = p
	case p.born > u.born:
		return nil
	}
	p.merge(u, changed)
	return slices.SortedFunc(maps.Keys(changed), netip.Addr.Compare)
}

// merge takes in an update of the page's process, and adds to changed the VIPs of which the page
// says something else now.
func (p *page) merge(u update, changed map[netip.Addr]bool) {
	named := make(map[netip.Addr]bool, len(u.entries))
	for _, e := range u.entries {
		named[e.vip] = true
		old, ok := p.entries[e.vip]
		if ok && old.seq >= e.seq || !ok && e.seq <= p.floor {
			continue // the page knows better: it has something newer, or that this is gone
		}
		if !ok || old.gone != e.gone || old.claim != e.claim {
			changed[e.vip] = true
		}
		p.entries[e.vip] = e
	}
	p.raise(u.floor, named, changed)
}

// raise forgets what an update that is complete up to floor does not name, and the marks of what is
// gone that it makes needless.
func (p *page) raise(floor uint64, named, changed map[netip.Addr]bool) {
	if floor <= p.floor {
		return
	}
	p.floor = floor
	for vip, e := range p.entries {
		if e.seq > floor {
			continue
		}
		if !named[vip] && !e.gone {
			changed[vip] = true
		}
		if !named[vip] || e.gone {
			delete(p.entries, vip)
		}
	}
}

// newest returns the last change that is known.
func (p *page) newest() plan.Point {
	newest := p.floor
	for _, e := range p.entries {
		newest = max(newest, e.seq)
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
	for vip := range p.entries {
		if _, announces := p.held(vip); announces {
			return true
		}
	}
	return false
}

// held returns what is reserved of a VIP for the node's next speaker: that this one announced it.
func (p *page) held(vip netip.Addr) (entry, bool) {
	if p == nil {
		return entry{}, false
	}
	e, ok := p.entries[vip]
	return e, ok && !e.gone && e.claim.Answering && e.claim.Reason == ""
}

// updates returns all that is known of the live nodes, and what is reserved for those that are
// expected back.
func (b book) updates(standings map[string]plan.Standing) []update {
	var updates []update
	for node, standing := range standings {
		p := b[node]
		if standing.Live && p != nil {
			updates = append(updates, update{node: node, born: p.born, floor: p.floor,
				entries: p.sorted(func(entry) bool { return true })})
		}
		if life := p.life(standing.Held); life != nil {
			updates = append(updates, update{node: node, born: life.born,
				entries: life.sorted(func(e entry) bool { _, ok := life.held(e.vip); return ok })})
		}
	}
	return updates
}

// sorted returns the entries to keep by VIP.
func (p *page) sorted(keep func(entry) bool) []entry {
	var entries []entry
	for _, e := range p.entries {
		if keep(e) {
			entries = append(entries, e)
		}
	}
	slices.SortFunc(entries, func(x, y entry) int { return x.vip.Compare(y.vip) })
	return entries
}

// claims returns what counts of what the nodes say of a VIP.
func (b book) claims(vip netip.Addr, standings map[string]plan.Standing) map[string]plan.Claim {
	claims := map[string]plan.Claim{}
	for node, standing := range standings {
		p := b[node]
		if p == nil {
			continue
		}
		e, said := p.entries[vip]
		said = said && !e.gone && standing.Live && p.born >= standing.Born
		if said {
			claim := e.claim
			claim.Stale = p.born == standing.Stale.Born && e.seq <= standing.Stale.Seq
			claims[node] = claim
		}
		if h, held := p.life(standing.Held).held(vip); held && (!said || plan.Resuming(e.claim)) {
			claims[node] = plan.Claim{Answering: true, Weight: h.claim.Weight, Parted: h.claim.Parted, Held: true}
		}
	}
	return claims
}

// journal is a node's own page: it numbers what the node says.
type journal struct {
	node    string
	born    uint64
	seq     uint64
	entries map[netip.Addr]entry
	pending map[netip.Addr]entry // changes that were not sent yet, with marks of what is gone
}

func newJournal(node string, born uint64) *journal {
	return &journal{node: node, born: born, entries: map[netip.Addr]entry{}, pending: map[netip.Addr]entry{}}
}

// whole returns the changes that make claims all that is said.
func (j *journal) whole(claims map[netip.Addr]*plan.Claim) map[netip.Addr]*plan.Claim {
	changes := make(map[netip.Addr]*plan.Claim, len(claims))
	for vip := range j.entries {
		changes[vip] = nil
	}
	maps.Copy(changes, claims)
	return changes
}

// set takes changes to the claims, nil to take one back, and reports whether there is
// something to send.
func (j *journal) set(changes map[netip.Addr]*plan.Claim) bool {
	for vip, claim := range changes {
		old, ok := j.entries[vip]
		switch {
		case claim == nil && ok:
			j.seq++
			delete(j.entries, vip)
			j.pending[vip] = entry{vip: vip, seq: j.seq, gone: true}
		case claim != nil && (!ok || old.claim != *claim):
			j.seq++
			e := entry{vip: vip, seq: j.seq, claim: *claim}
			j.entries[vip], j.pending[vip] = e, e
		}
	}
	return len(j.pending) > 0
}

// full returns the whole page.
func (j *journal) full() update {
	u := update{node: j.node, born: j.born, floor: j.seq}
	for _, e := range j.entries {
		u.entries = append(u.entries, e)
	}
	slices.SortFunc(u.entries, func(x, y entry) int { return x.vip.Compare(y.vip) })
	return u
}

// take returns what was not sent yet.
func (j *journal) take() []entry {
	var entries []entry
	for _, e := range j.pending {
		entries = append(entries, e)
	}
	clear(j.pending)
	slices.SortFunc(entries, func(x, y entry) int { return x.vip.Compare(y.vip) })
	return entries
}

// outlive makes this process the newer one of two of the same node, if another node has heard of
// another that seems newer: one that ran before the clock was set back. It reports whether that was
// needed, and everything has to be said again.
func (j *journal) outlive(u update) bool {
	if u.node != j.node || u.born < j.born {
		return false
	}
	if u.born == j.born {
		newest := u.floor
		for _, e := range u.entries {
			newest = max(newest, e.seq)
		}
		if newest <= j.seq {
			return false // our own words
		}
	}
	j.born = u.born + 1
	maps.Copy(j.pending, j.entries)
	return true
}
