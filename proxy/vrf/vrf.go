// Package vrf has a node deliver connections to Services that come in through a VRF, and has answers leave by the VRF
// that the connection came in by.
//
// The kernel looks packets up in the table of the VRF that they come in by, also once their destination is a pod,
// which that table does not know; answers come from a pod, outside of the VRF, and take the main table's routes. So
// packets get a mark, and connections one that says which VRF they came through: routing rules go by it.
// docs/guide/bgp.md has what follows for users.
package vrf

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"strings"
	"sync"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/links"
	"github.com/landfall-lb/landfall/internal/loop"
)

// Deps are what an Actor needs.
type Deps struct {
	Log      *slog.Logger
	Now      func() time.Time
	Kernel   kernel
	Marks    Marks
	Families []lb.Family
	// Narrow keeps packets to backends from the main table's default route.
	Narrow bool
	// Interfaces returns those of the node; false while they are not known.
	Interfaces func() ([]lb.Interface, bool)
	// Wanted returns the names of the VRFs that a router is in, and false while they are not known. Others are left
	// alone.
	Wanted func() (names map[string]bool, known bool)
	// Backends returns addresses of endpoints, to see where the kernel sends packets for them: the same ones in the same
	// order, while there are no others.
	Backends func() []netip.Addr
	// Way returns where the kernel sends packets; see links.FIB.
	Way func(vrf string, mark uint32, addr netip.Addr) (links.Way, error)
	// Tell is called with what States will return, and Changed once it does; they must not block.
	Tell    func(states map[string]string)
	Changed func()
}

// kernel is a Kernel outside of tests.
type kernel interface {
	set(family lb.Family, vrfs []lb.Interface, narrow bool) (left []string, err error)
}

const (
	// lookEvery is how often the actor looks whether the rules are there, while there is a VRF.
	lookEvery = 5 * time.Second
	// hold is for how long what was so stays so, while the kernel does not say whether the rules are there. It is as
	// long as speakers by default wait for a proxy.
	hold = 30 * time.Second
	// patience is how many failures in a row the first States waits for: all of the proxy waits for it.
	patience = 3
)

// Actor keeps the rules.
type Actor struct {
	deps     Deps
	runner   *loop.Runner
	failures loop.Failures
	failed   int               // how often in a row
	since    time.Time         // of the first of these
	wrote    bool              // rules, ever
	strays   map[string]string // what astray last said, by VRF
	clean    bool              // there is nothing to do while no VRF is wanted

	mu     sync.Mutex
	known  bool
	states map[string]string
}

// New returns an Actor that does nothing before Poke is called.
func New(deps Deps) *Actor {
	a := &Actor{deps: deps}
	a.runner = loop.New(a.step, loop.Options{})
	return a
}

// Poke says that interfaces have changed, or which VRFs are wanted. It never blocks.
func (a *Actor) Poke() { a.runner.Poke() }

// Busy returns for how long the actor has been at one thing.
func (a *Actor) Busy() time.Duration { return a.runner.Busy() }

// Run works until ctx ends, and leaves the rules in the kernel.
func (a *Actor) Run(ctx context.Context) error { return a.runner.Run(ctx) }

// States returns for each wanted VRF on the node why the kernel does not deliver what comes in through it, or "". known
// is false until the actor has looked. The caller must not change the map.
func (a *Actor) States() (states map[string]string, known bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.states, a.known
}

func (a *Actor) step(context.Context) (again time.Duration, err error) {
	interfaces, listed := a.deps.Interfaces()
	wanted, known := a.deps.Wanted()
	if !listed || !known {
		return 0, nil
	}
	vrfs := vrfsOf(interfaces, wanted)
	if len(vrfs) == 0 && a.clean {
		return 0, nil
	}
	states, err := a.apply(vrfs, interfaces)
	a.wrote = a.wrote || len(vrfs) > 0
	if err != nil && !a.wrote {
		a.deps.Log.Debug("cannot look for rules for VRFs that an earlier proxy has left", "error", err)
		err = nil
	}
	a.clean = err == nil && len(vrfs) == 0
	a.failures.Log(a.deps.Log, "cannot deliver what comes in through VRFs; trying again",
		"can deliver what comes in through VRFs again", err)
	if err == nil {
		a.failed = 0
	} else if a.failed++; len(states) > 0 && !a.known && a.failed < patience {
		return 0, err
	}
	changed := !a.known || !maps.Equal(a.states, states)
	if changed {
		a.deps.Tell(states)
	}
	a.mu.Lock()
	a.known, a.states = true, states
	a.mu.Unlock()
	if changed {
		a.deps.Changed()
	}
	if len(states) > 0 {
		again = lookEvery
	}
	return again, err
}

// apply makes the rules as they shall be, and returns what is so then.
func (a *Actor) apply(vrfs, interfaces []lb.Interface) (states map[string]string, err error) {
	problems := map[string][]string{}
	for _, v := range vrfs {
		problems[v.Name] = nil
		if text := broken(v, interfaces); text != "" {
			problems[v.Name] = append(problems[v.Name], text)
		}
	}
	open := false // the kernel has not said whether the rules are there
	for _, family := range a.deps.Families {
		left, failed := a.deps.Kernel.set(family, vrfs, a.deps.Narrow)
		if failed != nil {
			err = fmt.Errorf("%s: %w", family, failed)
			lacks := errors.As(failed, new(missingError))
			open = open || !lacks
			for name := range problems {
				if _, said := a.states[name]; lacks || !said || a.overdue() {
					problems[name] = append(problems[name], err.Error())
				}
			}
		}
		for _, name := range left {
			problems[name] = append(problems[name], "the node has more VRFs than --vrf-mark has room for")
		}
	}
	var targets []target
	if len(vrfs) > 0 && !open {
		targets = a.targets()
	}
	states, strays := make(map[string]string, len(problems)), map[string]string{}
	for name, texts := range problems {
		if strays[name] = a.strays[name]; !open && len(texts) == 0 {
			strays[name] = a.astray(name, targets)
		}
		switch {
		case len(texts) > 0:
		case open:
			texts = []string{a.states[name]}
		default:
			texts = []string{strays[name]}
		}
		states[name] = strings.Join(texts, "; ")
	}
	a.strays = strays
	return states, err
}

// overdue reports whether the kernel has failed for so long that what was so no longer counts.
func (a *Actor) overdue() bool {
	if a.failed == 0 {
		a.since = a.deps.Now()
	}
	return a.deps.Now().Sub(a.since) >= hold
}

// target is an endpoint, and where the kernel sends packets for it that come from outside of VRFs.
type target struct {
	addr netip.Addr
	way  links.Way
}

// asked is for how many endpoints the kernel is asked where packets from a VRF go.
const asked = 16

// targets returns the first endpoints that the node has a way to.
func (a *Actor) targets() (targets []target) {
	for _, addr := range a.deps.Backends() {
		way, err := a.deps.Way("", 0, addr)
		if err != nil || way.Kind == lb.RouteNone || way.Local || a.deps.Narrow && way.Kind != lb.RouteOwn {
			continue
		}
		if targets = append(targets, target{addr, way}); len(targets) == asked {
			break
		}
	}
	return targets
}

// astray asks the kernel where it sends packets from a VRF for targets, and says so if that is for none of them where
// it sends those from outside of VRFs. Without an answer it is as it was.
func (a *Actor) astray(vrf string, targets []target) (problem string) {
	problem = a.strays[vrf]
	for _, t := range targets {
		way, err := a.deps.Way(vrf, a.deps.Marks.inward(), t.addr)
		if err != nil {
			continue
		}
		if way.Kind == t.way.Kind && way.Link == t.way.Link {
			return ""
		}
		problem = fmt.Sprintf("packets from the VRF for the endpoint %s take another way than packets from elsewhere; "+
			"see ip rule for rules ahead of %d", t.addr, Priority)
	}
	return problem
}
