package nftables

import (
	"errors"
	"fmt"
	"maps"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
)

// fakeKernel is a kernel in memory. Like the real one it refuses a change as a whole.
type fakeKernel struct {
	mu     sync.Mutex
	family lb.Family
	state  state
	// refuse may refuse a change; unanswered makes the next commits happen, or not, without an answer.
	refuse     func(change) error
	unanswered []bool
	loadErr    error
	after      func() // called after each change of elements
	commits    int
	loads      int
	largest    int
}

func newFakeKernel(family lb.Family) *fakeKernel {
	return &fakeKernel{family: family, state: state{elements: map[element]target{}}}
}

func (k *fakeKernel) load() (state, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.loads++
	if k.loadErr != nil {
		return state{}, k.loadErr
	}
	st := k.state
	st.elements = maps.Clone(st.elements)
	return st, nil
}

func (k *fakeKernel) commit(c change) error {
	k.mu.Lock()
	defer k.mu.Unlock()
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
	if k.after != nil && c.rules == nil {
		k.after()
	}
	if silent {
		return errUnanswered
	}
	return nil
}

func (k *fakeKernel) change(c change) error {
	st := k.state
	if c.rules != nil {
		st = k.install(c)
	}
	if !st.exists {
		return fmt.Errorf("no table: %w", unix.ENOENT)
	}
	removed := map[element]bool{}
	for _, e := range c.remove {
		if _, ok := st.elements[e.element]; !ok || removed[e.element] {
			return fmt.Errorf("remove %+v: %w", e, unix.ENOENT)
		}
		removed[e.element] = true
	}
	added := map[element]bool{}
	for _, e := range c.add {
		if _, ok := st.elements[e.element]; ok && !removed[e.element] || added[e.element] {
			return fmt.Errorf("add %+v: %w", e, unix.EEXIST)
		}
		if _, ok := st.sets[e.setName()]; !ok {
			return fmt.Errorf("add %+v: %w", e, unix.ENOENT)
		}
		added[e.element] = true
	}
	for e := range removed {
		delete(st.elements, e)
	}
	for _, e := range c.add {
		st.elements[e.element] = e.to
	}
	k.state = st
	return nil
}

// install returns the state with other rules.
func (k *fakeKernel) install(c change) state {
	st := c.rules.state()
	st.elements = map[element]target{}
	if !c.replace {
		for e, to := range k.state.elements {
			if _, ok := st.sets[e.setName()]; ok {
				st.elements[e] = to
			}
		}
	}
	return st
}

// wipe removes the table behind the actor's back.
func (k *fakeKernel) wipe() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.state = state{elements: map[element]target{}}
}

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
