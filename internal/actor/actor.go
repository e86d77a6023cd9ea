// Package actor holds the contract of everything that acts: it is told what is wanted, and makes it
// so in a goroutine of its own.
//
// An actor is told in one of two ways. A Setter gets the whole desired state each time. An Updater
// gets what changes, key by key, after one Begin with all that there is. Neither blocks, and both
// keep the newest only. What an actor has found out it offers as outcomes, and a change there calls
// the function that it was made with.
package actor

import (
	"context"
	"maps"
	"sync"
	"time"
)

// Runner applies what it was told until ctx ends, and returns when all of its goroutines have
// ended. It retries what fails, and repairs what others change.
type Runner interface {
	Run(ctx context.Context) error
	// Busy returns for how long the loop of the actor has been at one thing without progress; 0 at
	// rest. A loop that is at it for too long hangs.
	Busy() time.Duration
}

// A Setter is told the whole desired state. What it is not told of any more goes.
type Setter[D any] interface {
	Runner
	// Set replaces the desired state. It never blocks. desired must not be changed after.
	Set(desired D)
}

// An Updater is told what changes.
type Updater[K comparable, V any] interface {
	Runner
	// Begin says all that is wanted at first. Until then the actor leaves alone what a predecessor
	// left: unknown is not absent. It never blocks.
	Begin(all map[K]V)
	// Update says what is wanted now for the keys that it names. The actor's type says which value
	// stands for a key that is gone. It never blocks.
	Update(changes map[K]V)
}

// Inbox is where an Updater keeps what it was told until it gets to it. The zero value is ready for
// use, and safe for concurrent use.
type Inbox[K comparable, V any] struct {
	mu      sync.Mutex
	begun   bool
	pending map[K]V
}

// Begin takes all that is wanted at first. Updates that came before it are kept where all lacks
// their key.
func (i *Inbox[K, V]) Begin(all map[K]V) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.begun = true
	early := i.pending
	i.pending = make(map[K]V, len(all))
	maps.Copy(i.pending, early)
	maps.Copy(i.pending, all)
}

// Update takes changes; a later one for the same key replaces an earlier one.
func (i *Inbox[K, V]) Update(changes map[K]V) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if len(i.pending) == 0 && len(changes) > 0 {
		i.pending = maps.Clone(changes)
		return
	}
	maps.Copy(i.pending, changes)
}

// Take returns what came since the last Take; ok is false, and nothing is taken, before Begin.
func (i *Inbox[K, V]) Take() (changes map[K]V, ok bool) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if !i.begun {
		return nil, false
	}
	changes = i.pending
	i.pending = nil // clearing a map costs what it once held, also later
	return changes, true
}
