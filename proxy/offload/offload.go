// Package offload has the flowtables of the proxy's rules take packets from the node's interfaces, so that established
// connections to Services pass no chain.
//
// The rules say which connections are offloaded, see proxy/nftables. docs/guide/proxy.md says what that changes.
package offload

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/loop"
)

// Deps are what an Actor needs.
type Deps struct {
	Log    *slog.Logger
	Kernel Kernel
	// Families are those whose rules offload.
	Families []lb.Family
	// Interfaces returns those of the node; false while they are not known.
	Interfaces func() ([]lb.Interface, bool)
}

// Kernel is this node's.
type Kernel interface {
	// Set makes these the devices of a family's flowtable; there is false while it has none.
	Set(family lb.Family, devices []string) (there bool, err error)
}

const (
	// lookEvery is how often the actor looks whether the devices are there: the flowtable of rules that were written
	// anew has none.
	lookEvery = 5 * time.Second
	// lookSoon is how often while there is no flowtable, as before the rules are written.
	lookSoon = 500 * time.Millisecond
	// gap folds the changes of a pod that comes, and bursts of pods.
	gap = 100 * time.Millisecond
)

// Actor keeps the devices.
type Actor struct {
	deps     Deps
	runner   *loop.Runner
	failures loop.Failures
	left     int // out, as last said
}

// New returns an Actor that does nothing before Poke is called.
func New(deps Deps) *Actor {
	a := &Actor{deps: deps}
	a.runner = loop.New(a.step, loop.Options{Gap: gap})
	return a
}

// Poke says that interfaces have changed. It never blocks.
func (a *Actor) Poke() { a.runner.Poke() }

// Busy returns for how long the actor has been at one thing.
func (a *Actor) Busy() time.Duration { return a.runner.Busy() }

// Run works until ctx ends, and leaves the devices in the kernel.
func (a *Actor) Run(ctx context.Context) error { return a.runner.Run(ctx) }

func (a *Actor) step(context.Context) (again time.Duration, err error) {
	interfaces, known := a.deps.Interfaces()
	if !known {
		return lookSoon, nil
	}
	again = lookEvery
	devices, left := Devices(interfaces)
	if left > 0 && a.left == 0 { // pods come and go
		a.deps.Log.Info("connections through some interfaces are not offloaded, as there are too many", "those", left)
	}
	a.left = left
	var errs []error
	for _, family := range a.deps.Families {
		switch there, failed := a.deps.Kernel.Set(family, devices); {
		case failed != nil:
			errs = append(errs, fmt.Errorf("%s: %w", family, failed))
		case !there:
			again = lookSoon
		}
	}
	err = errors.Join(errs...)
	a.failures.Log(a.deps.Log, "cannot offload connections through all interfaces; trying again",
		"offloads connections through all interfaces again", err)
	return again, err
}
