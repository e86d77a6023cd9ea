package nftables

import (
	"errors"
	"fmt"
	"maps"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
)

// fakeKernel is a kernel in memory. Like the real one it refuses a change as a whole.
type fakeKernel struct {
	family lb.Family
	state  state
	known  []client
	// refuse may refuse a change; unanswered makes the next commits happen, or not, without an answer.
	refuse     func(change) error
	unanswered []bool
	loadErr    error
	commits    int
	largest    int
}

func newFakeKernel(family lb.Family) *fakeKernel {
	return &fakeKernel{family: family, state: state{elements: map[element]target{}}}
}

func (k *fakeKernel) load() (state, error) {
	if k.loadErr != nil {
		return state{}, k.loadErr
	}
	st := k.state
	st.elements = maps.Clone(st.elements)
	return st, nil
}

func (k *fakeKernel) clients() ([]client, error) { return k.known, nil }

func (k *fakeKernel) commit(c change) error {
	k.commits++
	k.largest = max(k.largest, len(c.add)+len(c.remove))
	if k.refuse != nil {
		if err := k.refuse(c); err != nil {
			return err
		}
	}
	happens, silent := true, len(k.unanswered) > 0
	if silent {
		happens, k.unanswered = k.unanswered[0], k.unanswered[1:]
	}
	if happens {
		if err := k.change(c); err != nil {
			return err
		}
	}
	if silent {
		return errUnanswered
	}
	return nil
}

func (k *fakeKernel) change(c change) error {
	next := state{exists: k.state.exists, sets: k.state.sets, chains: k.state.chains, elements: maps.Clone(k.state.elements)}
	if c.rules != nil {
		if c.replace {
			next = state{elements: map[element]target{}}
		}
		next.exists = true
		next.sets, next.chains = map[string]shape{}, map[string]chainState{}
		for _, s := range c.rules.sets {
			next.sets[s.name] = s.shape(k.family)
		}
		for e := range next.elements {
			if _, ok := next.sets[e.setName()]; !ok {
				delete(next.elements, e)
			}
		}
		for _, ch := range c.rules.chains {
			var st chainState
			if ch.hook != nil {
				st.hook = *ch.hook
			}
			for _, r := range ch.rules {
				body, err := r.encode(builder{k.family}.nfproto())
				if err != nil {
					return err
				}
				st.rules = append(st.rules, string(r.userdata(body)))
			}
			next.chains[ch.name] = st
		}
	}
	if !next.exists {
		return fmt.Errorf("no table: %w", unix.ENOENT)
	}
	for _, e := range c.remove {
		if _, ok := next.elements[e.element]; !ok {
			return fmt.Errorf("remove %+v: %w", e, unix.ENOENT)
		}
		delete(next.elements, e.element)
	}
	for _, e := range c.add {
		if _, ok := next.elements[e.element]; ok {
			return fmt.Errorf("add %+v: %w", e, unix.EEXIST)
		}
		if _, ok := next.sets[e.setName()]; !ok {
			return fmt.Errorf("add %+v: %w", e, unix.ENOENT)
		}
		next.elements[e.element] = e.to
	}
	k.state = next
	return nil
}

// wipe removes the table behind the actor's back.
func (k *fakeKernel) wipe() { k.state = state{elements: map[element]target{}} }

var errPoison = errors.New("poison")

// poisoned refuses changes that add a frontend at the port.
func poisoned(port uint16) func(change) error {
	return func(c change) error {
		for _, e := range c.add {
			if e.port == port {
				return fmt.Errorf("add %s: %w", e.setName(), errPoison)
			}
		}
		return nil
	}
}
