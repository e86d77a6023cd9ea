package members

import (
	"context"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/landfall-lb/landfall/internal/lb"
)

// A speaker that is killed does not take its node with it: the kernel there still forwards, and
// clients that know the way go on. So what it answered for is held for a while, in the hope that it
// is back before anybody has to ask for the way. Its node is known to be alive by its kernel, which
// refuses a connection to the port of the speaker that is gone. The same holds for a speaker that
// gets no processor for a while: its kernel accepts the connection; and for one whose gossip a
// packet filter drops: its kernel answers ping. A node that has crashed, is cut off or frozen says
// nothing, and is not waited for.

const (
	// refusalTimeout bounds the wait for that refusal, and for an answer to ping. A kernel says it at
	// once, however busy its programs are.
	refusalTimeout = 50 * time.Millisecond
	// refusalEvery is how often a node that is waited for is looked at, as it may go down after its
	// speaker.
	refusalEvery = 200 * time.Millisecond
)

// hold is what one life of a speaker answered for.
type hold struct {
	born   uint64
	claims map[netip.Addr]entry
	until  time.Time
	node   *memberlist.Node // where to look whether the node is still there; nil if that is known otherwise
}

// holdOf keeps what a page says to be answered for.
func holdOf(p *page, until time.Time) hold {
	h := hold{born: p.born, claims: map[netip.Addr]entry{}, until: until}
	for vip, e := range p.entries {
		if !e.gone && e.claim.Answering && e.claim.Reason == "" {
			h.claims[vip] = e
		}
	}
	return h
}

// claim is what is held of a VIP.
func (h hold) claim(vip netip.Addr, now time.Time) (lb.Claim, bool) {
	e, ok := h.claims[vip]
	if !ok || !now.Before(h.until) {
		return lb.Claim{}, false
	}
	return lb.Claim{Answering: true, Weight: e.claim.Weight, Parted: e.claim.Parted, Held: true}, true
}

// update is what tells a speaker that comes back what it answered for.
func (h hold) update(node string) update {
	u := update{node: node, born: h.born}
	u.entries = slices.SortedFunc(maps.Values(h.claims), func(x, y entry) int { return x.vip.Compare(y.vip) })
	return u
}

// found is a node that was lost and has come back in the same life. It went on meanwhile, and what
// is known of it is what it said before, newest at last.
type found struct {
	born, newest uint64
	until        time.Time
}

// staleFor is how long it may take until that is replaced. Later, the node has had nothing else to
// say.
const staleFor = time.Second

// before tells whether what a page says of a VIP is from before.
func (f found) before(p *page, vip netip.Addr, now time.Time) bool {
	return p.born == f.born && p.entries[vip].seq <= f.newest && now.Before(f.until)
}

// starting tells whether a claim is one that a speaker makes on its way to answering again.
func starting(c lb.Claim) bool {
	switch c.Reason {
	case "":
		return !c.Answering
	case lb.ReasonNotJoined, lb.ReasonFeedUnknown, lb.ReasonNotProgrammed:
		return true
	}
	return false
}

// arrive notes a live member. If it is another process than the one whose words are known, those
// are held. It needs mu.
func (m *Members) arrive(n *memberlist.Node) {
	lost := m.live[n.Name] == nil && m.met[n.Name]
	delete(m.fallen, n.Name)
	delete(m.dead, n.Name)
	m.live[n.Name] = n
	if p := m.book[n.Name]; lost && p != nil {
		m.found[n.Name] = found{p.born, p.newest(), time.Now().Add(staleFor)}
		m.watch.Poke()
	}
	m.macs[n.Name], m.met[n.Name] = metaOf(n).macs, true
	switch p := m.book[n.Name]; {
	case p == nil:
	case p.born < bornOf(n):
		m.keep(n.Name, p, time.Now())
	case m.held[n.Name].born == p.born:
		delete(m.held, n.Name) // a false alarm: this life goes on
	}
}

// spend sees to it that what a member has said up to now is never held: it has taken its leave, or
// its node has gone with it, and others have taken over. It needs mu.
func (m *Members) spend(name string) {
	if p := m.book[name]; p != nil && m.held[name].born < p.born {
		m.held[name] = hold{born: p.born}
	}
}

// bury forgets a member. It needs mu.
func (m *Members) bury(name string) {
	delete(m.live, name)
	delete(m.found, name)
	delete(m.greet, name)
	delete(m.fallen, name)
}

// keep begins to hold what a life of a speaker answered for, once for each life. It needs mu.
func (m *Members) keep(name string, p *page, now time.Time) {
	if h, ok := m.held[name]; ok && h.born >= p.born {
		return
	}
	m.held[name] = holdOf(p, now.Add(m.opts.Hold))
	m.watch.Poke()
}

// remember takes in what others know of the life of this speaker before this one. It needs mu.
func (m *Members) remember(u update, now time.Time) {
	if u.born >= m.own.born || u.born <= m.former.born || m.opts.Hold == 0 {
		return
	}
	p := &page{born: u.born, entries: map[netip.Addr]entry{}}
	for _, e := range u.entries {
		p.entries[e.vip] = e
	}
	m.former = holdOf(p, now.Add(m.opts.Hold))
}

// Former tells whether this node's speaker answered for the VIP before it was started anew, a
// moment ago.
func (m *Members) Former(vip netip.Addr) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	_, ok := m.former.claim(vip, time.Now())
	return ok
}

// watchStep finds out what has become of members that answer nobody, looks after those that are
// waited for, and ends holds.
func (m *Members) watchStep(ctx context.Context) (time.Duration, error) {
	now := time.Now()
	m.mu.Lock()
	fallen := maps.Clone(m.fallen)
	waitedFor := map[string]hold{}
	for name, h := range m.held {
		if m.live[name] == nil && h.node != nil && now.Before(h.until) {
			waitedFor[name] = h
		}
	}
	m.mu.Unlock()
	var group sync.WaitGroup
	for name, node := range fallen {
		group.Go(func() {
			there, _ := m.opts.reaches(ctx, node)
			m.settle(name, node, there)
		})
	}
	for name, h := range waitedFor {
		group.Go(func() {
			if there, _ := m.opts.reaches(ctx, h.node); !there {
				m.abandon(name, h.born)
			}
		})
	}
	group.Wait()
	next := m.expire(time.Now())
	if len(waitedFor) > 0 || len(fallen) > 0 {
		next = min(next, refusalEvery)
	}
	return next, nil
}

// settle notes what was found out about a member that had answered nobody: whether its kernel is
// there. One that accepts connections has a speaker that gets no processor for a while, that hangs
// or that has just been started anew; it is waited for like one that was killed.
func (m *Members) settle(name string, node *memberlist.Node, there bool) {
	m.mu.Lock()
	if m.fallen[name] != node {
		m.mu.Unlock()
		return // back, or gone another way
	}
	m.bury(name)
	if !there {
		m.dead[name] = true
		m.spend(name)
	}
	if p := m.book[name]; there && p != nil {
		m.keep(name, p, time.Now())
		if h := m.held[name]; h.born == p.born {
			h.node = node
			m.held[name] = h
		}
	}
	m.mu.Unlock()
	m.opts.Log.Info("node is gone", "member", name, "address", node.Address(), "only its speaker", there)
	m.opts.Changed(nil)
}

// abandon ends a hold, as the node has followed its speaker.
func (m *Members) abandon(name string, born uint64) {
	m.mu.Lock()
	h := m.held[name]
	ours := h.born == born && m.live[name] == nil
	if ours {
		h.until = time.Time{}
		m.held[name] = h
		m.dead[name] = true
	}
	m.mu.Unlock()
	if ours {
		m.opts.Changed(nil) // it counts as dead, whether or not it had answered for something
	}
}

// Dead returns the nodes that have gone without taking their leave and whose kernels do not answer
// either, sorted. If this node does not see a majority of the speakers, it may be this node that is
// cut off, and none are returned.
func (m *Members) Dead() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	seen := 1 + len(m.live)
	if 2*seen <= seen+len(m.dead) {
		return nil
	}
	return slices.Sorted(maps.Keys(m.dead))
}

// expire tells of what is held no longer, and returns when the next hold ends.
func (m *Members) expire(now time.Time) time.Duration {
	var next time.Duration
	var changed []netip.Addr
	m.mu.Lock()
	for name, h := range m.held {
		switch {
		case now.Before(h.until):
			if wait := h.until.Sub(now); next == 0 || wait < next {
				next = wait
			}
		case len(h.claims) > 0:
			changed = slices.AppendSeq(changed, maps.Keys(h.claims))
			m.held[name] = hold{born: h.born, until: h.until} // so that the same life is not held again
		}
	}
	for name, f := range m.found {
		if wait := f.until.Sub(now); wait > 0 {
			if next == 0 || wait < next {
				next = wait
			}
			continue
		}
		delete(m.found, name)
		if p := m.book[name]; p != nil {
			changed = slices.AppendSeq(changed, maps.Keys(p.entries))
		}
	}
	m.mu.Unlock()
	if len(changed) > 0 {
		m.opts.Changed(changed)
	}
	return next
}
