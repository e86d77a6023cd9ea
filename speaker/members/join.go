package members

import (
	"context"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/hashicorp/memberlist"
	"golang.org/x/sync/errgroup"
)

// joinsAtOnce bounds the calls under way, as all of the nodes may be down.
const joinsAtOnce = 16

// pace is how often this node calls those that the API server knows and that are not members.
type pace struct {
	every time.Duration
	// alone is how long a node that has just started calls the others, every soon, before it believes
	// that it is alone: its network may not be ready yet, and the speakers that start together with it
	// need a moment.
	alone, soon time.Duration
}

var usualPace = pace{every: 3 * time.Second, alone: 2 * time.Second, soon: 200 * time.Millisecond}

// joinStep calls the nodes that should be members and are not.
func (m *Members) joinStep(ctx context.Context) (time.Duration, error) {
	m.mu.Lock()
	ml, known, bind := m.ml, m.peers != nil, m.bind
	missing := map[string][]netip.Addr{}
	for name, addrs := range m.peers {
		if m.live[name] == nil && len(addrs) > 0 {
			missing[name] = addrs
		}
	}
	m.mu.Unlock()
	if ml == nil || !known {
		return 0, nil
	}
	var group errgroup.Group
	group.SetLimit(joinsAtOnce)
	for _, name := range slices.Sorted(maps.Keys(missing)) {
		if ctx.Err() != nil {
			break
		}
		group.Go(func() error { return m.call(ml, bind, name, missing[name]) })
	}
	if err := group.Wait(); err != nil {
		m.opts.Log.Debug("gossip does not reach every node", "error", err)
	}
	if len(missing) > 0 && m.hope(time.Now()) {
		return m.opts.pace.soon, nil
	}
	m.meet()
	return m.opts.pace.every, nil
}

// hope reports whether a node that has met no other should go on calling before it takes itself for
// the only one.
func (m *Members) hope(now time.Time) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.alone.IsZero() {
		m.alone = now.Add(m.opts.pace.alone)
	}
	return !m.joined && now.Before(m.alone)
}

// call exchanges states with one node, at the first of its addresses that answers.
func (m *Members) call(ml *memberlist.Memberlist, bind netip.Addr, name string, addrs []netip.Addr) error {
	var err error
	for _, addr := range addrs {
		if addr.Is4() != bind.Is4() {
			continue // gossip is bound to an address of one family
		}
		target := netip.AddrPortFrom(addr, uint16(m.opts.Port)).String()
		if _, err = ml.Join([]string{name + "/" + target}); err == nil {
			m.meet()
			return nil
		}
	}
	return err
}

// meet notes that this node knows the others as well as it can.
func (m *Members) meet() {
	m.mu.Lock()
	was := m.joined
	m.joined = true
	m.mu.Unlock()
	if !was {
		m.opts.Changed(nil)
	}
}
