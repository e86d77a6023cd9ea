package members

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/hashicorp/memberlist"
	"golang.org/x/sync/errgroup"

	"github.com/landfall-lb/landfall/internal/loop"
	"github.com/landfall-lb/landfall/speaker/plan"
)

const (
	// joinsAtOnce bounds the calls under way, as all of the nodes may be down.
	joinsAtOnce = 16
	// seeksAtOnce is how many of the live nodes a node calls at a time that has to hear one of them.
	seeksAtOnce = 3
	// headStart is how long the first few calls of a round are waited for: whoever answers one tells of
	// the others, which need no call then. Without it, each speaker of a large cluster that starts would
	// exchange whole states with all others.
	headStart = 100 * time.Millisecond
	// lookTimeout bounds the wait for the kernel of a node that could not be joined.
	lookTimeout = 500 * time.Millisecond
)

// pace is how often this node calls those that the API server knows and that are not members.
type pace struct {
	every time.Duration
	// alone is how long a node that has just started calls the others, every soon, before it believes
	// that it is alone: its network may not be ready yet, and the speakers that start together with it
	// need a moment. It waits for silent if those who do not answer at all may be a majority.
	alone, silent, soon time.Duration
}

var usualPace = pace{every: 3 * time.Second, alone: 2 * time.Second, soon: 200 * time.Millisecond}

// finding is what a call has found.
type finding int

const (
	reached finding = iota // states were exchanged
	nobody                 // the kernel refuses the connection: no speaker runs there
	// it accepts the connection, and there is no understanding: another key, or a program that hangs
	stranger
	silent // no answer
)

// lonely returns how long a node that has exchanged states with nobody has to go on calling until
// it may take itself for the only one; ok is false while it may not. calls are what it has found at
// all others.
func (p pace) lonely(self string, calls map[string]finding) (wait time.Duration, ok bool) {
	known, accounted := []string{self}, []string{self}
	for node, f := range calls {
		known = append(known, node)
		switch f {
		case nobody:
			accounted = append(accounted, node)
		case stranger, reached:
			return 0, false
		}
	}
	slices.Sort(known)
	slices.Sort(accounted)
	if plan.QuorumOf(self, accounted, known).Most() { // of two nodes each might be the one that is cut off
		return p.alone, true
	}
	return p.silent, true
}

// joinStep calls the nodes that should be members and are not.
func (m *Members) joinStep(ctx context.Context) (time.Duration, error) {
	m.mu.Lock()
	ml, known, bind := m.ml, m.peers != nil, m.bind
	missing, live := m.uncalled()
	m.mu.Unlock()
	if ml == nil || !known {
		return 0, nil
	}
	began := time.Now()
	found := m.callAll(ctx, missing, func(name string) finding {
		if m.heard(name) {
			return reached // by way of another one that was called
		}
		return m.call(ml, bind, name, missing[name])
	})
	if ctx.Err() != nil {
		return 0, nil
	}
	m.mu.Lock()
	for name := range m.strange {
		if m.live[name] != nil {
			found[name] = stranger
		}
	}
	m.mu.Unlock()
	return m.pause(m.conclude(began, found, live)), nil
}

// uncalled returns where the nodes are that have to be called, and whether others are live. It needs mu.
//
// Changes arrive in any order, so that each node sees a gap while another one tells many. A node from which
// more has come since the last look is not called.
func (m *Members) uncalled() (missing map[string][]netip.Addr, live bool) {
	missing = map[string][]netip.Addr{}
	partial := map[string]int{}
	for name, addrs := range m.peers {
		page, member := m.book.pages[name], m.live[name] != nil
		live = live || member && (page.whole() || len(addrs) > 0)
		arrives := false
		if member && page != nil && !page.whole() {
			partial[name] = len(page.seen)
			arrives = partial[name] != m.partial[name]
		}
		if len(addrs) > 0 && !arrives && (!member || !page.whole()) {
			missing[name] = addrs
		}
	}
	m.partial = partial
	return missing, live
}

// heard reports whether a node is a member, and all is known that it says.
func (m *Members) heard(name string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.live[name] != nil && m.book.pages[name].whole()
}

// seekStep calls some of the live nodes while this node has to hear one, also while it is unknown which
// nodes there are, and at first others too. It waits for none of them: one that has died does not hold up
// the others.
func (m *Members) seekStep(ctx context.Context) (time.Duration, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.ml == nil || m.seeks.IsZero() && m.joined {
		return 0, nil
	}
	var live, others []string
	for name := range m.live {
		if !m.called[name] && (m.peers == nil || m.knows(name)) {
			live = append(live, name)
		}
	}
	for name, addrs := range m.peers {
		// A round of joinStep may have begun before it could succeed.
		if m.anew && len(addrs) > 0 && m.live[name] == nil && !m.called[name] {
			others = append(others, name)
		}
	}
	m.anew = false
	rand.Shuffle(len(live), func(i, j int) { live[i], live[j] = live[j], live[i] })
	rand.Shuffle(len(others), func(i, j int) { others[i], others[j] = others[j], others[i] })
	live, others = live[:min(len(live), seeksAtOnce)], others[:min(len(others), joinsAtOnce)]
	for _, name := range slices.Concat(live, others) {
		m.called[name] = true
		ml, bind, addrs := m.ml, m.bind, m.whereabouts(name)
		m.seeking.Go(func() {
			found := silent
			if ctx.Err() == nil {
				found = m.call(ml, bind, name, addrs)
			}
			m.mu.Lock()
			defer m.mu.Unlock()
			delete(m.called, name)
			delete(m.strange, name)
			if found == stranger {
				m.strange[name] = true
			}
		})
	}
	return m.pauseSeeking(), nil
}

// whereabouts returns the addresses of a node: those of its Node, or else the one that gossip knows. It needs mu.
func (m *Members) whereabouts(name string) []netip.Addr {
	addrs := m.peers[name]
	if n := m.live[name]; n != nil && len(addrs) == 0 {
		if addr, ok := netip.AddrFromSlice(n.Addr); ok {
			addrs = []netip.Addr{addr.Unmap()}
		}
	}
	return addrs
}

// pause returns the time until the next round of calls.
func (m *Members) pause(soon bool) time.Duration {
	m.mu.Lock()
	defer m.mu.Unlock()
	if soon {
		return m.pauseSeeking()
	}
	return m.opts.pace.every
}

// pauseSeeking returns the time until the next round of calls while this node has to hear another.
// It gets longer, as there may be nobody for days. It needs mu.
func (m *Members) pauseSeeking() time.Duration {
	p := m.opts.pace
	return max(p.soon, min(p.every, time.Since(m.sought)/8))
}

// callAll calls nodes at once, as far as is allowed, and returns what it has found. Each node calls in an
// order of its own: otherwise all of a cluster that starts would call the same few first.
func (m *Members) callAll(ctx context.Context, nodes map[string][]netip.Addr, call func(name string) finding,
) map[string]finding {
	var mu sync.Mutex
	found := make(map[string]finding, len(nodes))
	first := make(chan struct{}, len(nodes)) // calls that have reached a node
	var group errgroup.Group
	group.SetLimit(joinsAtOnce)
	names := slices.Collect(maps.Keys(nodes))
	rand.Shuffle(len(names), func(i, j int) { names[i], names[j] = names[j], names[i] })
	for i, name := range names {
		if i == seeksAtOnce {
			select {
			case <-first:
			case <-time.After(headStart):
			case <-ctx.Done():
			}
		}
		if ctx.Err() != nil {
			break
		}
		group.Go(func() error {
			f := call(name)
			loop.Progress(ctx)
			if f == reached {
				first <- struct{}{}
			}
			mu.Lock()
			found[name] = f
			mu.Unlock()
			return nil
		})
	}
	_ = group.Wait() // no call returns an error
	return found
}

// conclude takes in what a round of calls has found, and reports whether the next one is to follow
// soon.
func (m *Members) conclude(began time.Time, found map[string]finding, live bool) (soon bool) {
	now := time.Now()
	m.mu.Lock()
	if m.calling.IsZero() {
		m.calling = began
	}
	joined, told, seeks, called := m.joined, m.wasTold, !m.seeks.IsZero(), now.Sub(m.calling)
	wait, may := m.opts.pace.lonely(m.opts.Self, found)
	m.tellTrouble(found, called)
	m.mu.Unlock()
	switch {
	case len(found) == 0 && !live:
		m.met(now) // there is nobody else
		return false
	case !joined && live && told && called >= m.opts.pace.alone && m.isAnswered():
		// A filter drops this node's calls and no others' calls.
		m.met(began)
		return false
	case !joined && !live && may && called >= wait:
		if wait == m.opts.pace.silent {
			m.opts.Log.Warn("no other speaker answers; this one takes itself for the only one", "after", wait)
		} else {
			m.opts.Log.Warn("no other speaker is found; this one takes itself for the only one: nodes that refuse "+
				"connections run none, unless a packet filter rejects them", "refuse", some(those(found, nobody)),
				"port", m.opts.Port)
		}
		m.met(began)
		return false
	case joined && seeks && !live && may && wait == m.opts.pace.alone:
		m.met(began) // none of the others runs a speaker
		return false
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return !m.joined || !m.seeks.IsZero()
}

// those returns the nodes of which calls have found so much, by name.
func those(found map[string]finding, f finding) (names []string) {
	for _, name := range slices.Sorted(maps.Keys(found)) {
		if found[name] == f {
			names = append(names, name)
		}
	}
	return names
}

// isAnswered reports whether one of the live nodes answers a question of gossip: a recorded state makes nodes live
// that are not.
func (m *Members) isAnswered() bool {
	m.mu.Lock()
	var name string
	var at netip.AddrPort
	for _, n := range m.live {
		if addr, ok := netip.AddrFromSlice(n.Addr); ok {
			name, at = n.Name, netip.AddrPortFrom(addr.Unmap(), n.Port)
			break
		}
	}
	m.mu.Unlock()
	return name != "" && m.Ping(name, at)
}

// tellTrouble notes and logs which nodes cannot be joined, once this node has called for long
// enough. It needs mu.
func (m *Members) tellTrouble(found map[string]finding, called time.Duration) {
	strangers, quiet := those(found, stranger), those(found, silent)
	var parts []string
	if len(strangers) > 0 {
		parts = append(parts, fmt.Sprintf(
			"%s: connected, but no exchange of states: a different --gossip-key-file, a newer version, or a speaker that hangs",
			some(strangers)))
	}
	if len(quiet) > 0 && !m.joined {
		parts = append(parts, fmt.Sprintf("%s: no answer on port %d, which must be open between all nodes", some(quiet),
			m.opts.Port))
	}
	text := strings.Join(parts, "; ")
	if called < m.opts.pace.alone || text == m.trouble {
		return
	}
	m.trouble = text
	if text != "" {
		m.opts.Log.Warn("cannot join other speakers; retrying", "problem", text)
	} else {
		m.opts.Log.Info("the other speakers can be joined again")
	}
}

// some names a few of a list.
func some(names []string) string {
	const most = 5
	if more := len(names) - most; more > 0 {
		return fmt.Sprintf("%s and %d more", strings.Join(names[:most], ", "), more)
	}
	return strings.Join(names, ", ")
}

// call exchanges states with one node, at the first of its addresses that answers. At this node's own address, which
// another Node may show, it would hear itself.
func (m *Members) call(ml *memberlist.Memberlist, bind netip.Addr, name string, addrs []netip.Addr) finding {
	addrs = slices.DeleteFunc(slices.Clone(addrs), func(addr netip.Addr) bool {
		return addr.Is4() != bind.Is4() // gossip is bound to an address of one family
	})
	if len(addrs) == 1 && addrs[0] == bind {
		return nobody
	}
	found := silent
	for _, addr := range addrs {
		if addr == bind {
			continue
		}
		target := netip.AddrPortFrom(addr, uint16(m.opts.Port)).String()
		began, before := time.Now(), m.understood.Load()
		_, err := ml.Join([]string{name + "/" + target})
		switch {
		case err == nil && m.understood.Load() != before:
			m.met(began)
			return reached
		case err == nil:
			return stranger // what it answered is in a version that this speaker does not know
		}
		m.opts.Log.Debug("gossip does not reach a node", "member", name, "error", err)
		if found == silent {
			found = m.look(target)
		}
	}
	return found
}

// look finds out why a node could not be joined.
func (m *Members) look(target string) finding {
	dial := func() (net.Conn, error) { return net.DialTimeout("tcp", target, lookTimeout) }
	if m.opts.transport != nil {
		dial = func() (net.Conn, error) { return m.opts.transport.DialTimeout(target, lookTimeout) }
	}
	conn, err := dial()
	switch {
	case err == nil:
		conn.Close()
		return stranger
	case errors.Is(err, syscall.ECONNREFUSED):
		return nobody
	}
	return silent
}

// Seek has this node call others until one has been heard, and anew whenever since is another time;
// with the zero time it calls nobody.
func (m *Members) Seek(since time.Time) {
	m.mu.Lock()
	anew := !since.IsZero() && !since.Equal(m.seeks)
	m.seeks = since
	if anew {
		m.sought, m.anew = time.Now(), true
	}
	m.mu.Unlock()
	if anew {
		m.seek.Poke()
		m.join.Poke()
	}
}

// Met returns when the last call to another speaker began that exchanged states, or that showed
// that there is none.
func (m *Members) Met() time.Time {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.lastMet
}

// Trouble says which other speakers cannot be joined; "" for none.
func (m *Members) Trouble() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.trouble
}

// met notes that this node knows the others as well as it can, since a call that began then.
func (m *Members) met(began time.Time) {
	m.mu.Lock()
	was, seeks := m.joined, !m.seeks.IsZero()
	m.joined = true
	if m.lastMet.Before(began) {
		m.lastMet = began
	}
	m.mu.Unlock()
	switch {
	case !was:
		m.opts.Changed(nil)
	case seeks:
		m.opts.Changed([]netip.Addr{}) // of no VIP, but Met is later
	}
}
