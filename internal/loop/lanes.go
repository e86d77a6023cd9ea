package loop

import (
	"slices"
	"sync"
	"time"
)

const (
	// maxFailing is how many owners are remembered for what has failed of theirs.
	maxFailing = 1000
	// tooSlow is how long something takes that counts as failed: it may have hung, and succeeded in the end.
	tooSlow = 2 * time.Second
)

// Lanes do things that may hang, each in a goroutine of its own: at most so many at once, and fewer of one owner.
// Owners take turns. Half of the room is for the first thing of each owner that has nothing else under way: so few
// owners whose things hang do not fill it. Those whose last one failed, or was slow, have half of the room, one at a
// time each: what hangs of theirs leaves room for the others'. Lanes are safe for concurrent use.
type Lanes struct {
	most, each int

	mu      sync.Mutex
	idle    sync.Cond // running is 0
	waiting map[string][]func() error
	turns   []string // each of waiting once
	busy    map[string]int
	running int
	failing map[string]bool
	suspect int // how many of running are of owners that were failing when they began
}

// NewLanes returns lanes for so many things at once, and for so many of one owner.
func NewLanes(most, each int) *Lanes {
	l := &Lanes{most: most, each: each, waiting: map[string][]func() error{}, busy: map[string]int{},
		failing: map[string]bool{}}
	l.idle.L = &l.mu
	return l
}

// Do calls do as soon as there is room, once. It never blocks.
func (l *Lanes) Do(owner string, do func() error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.waiting[owner]) == 0 {
		l.turns = append(l.turns, owner)
	}
	l.waiting[owner] = append(l.waiting[owner], do)
	l.start()
}

// Wait returns once nothing runs and nothing waits.
func (l *Lanes) Wait() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for l.running > 0 {
		l.idle.Wait()
	}
}

// start begins what there is room for.
func (l *Lanes) start() {
	for l.running < l.most {
		turn := slices.IndexFunc(l.turns, l.hasRoom)
		if turn < 0 {
			return
		}
		owner := l.turns[turn]
		l.turns = slices.Delete(l.turns, turn, turn+1)
		do := l.waiting[owner][0]
		if l.waiting[owner] = slices.Delete(l.waiting[owner], 0, 1); len(l.waiting[owner]) > 0 {
			l.turns = append(l.turns, owner)
		} else {
			delete(l.waiting, owner)
		}
		l.running++
		l.busy[owner]++
		suspect := l.failing[owner]
		if suspect {
			l.suspect++
		}
		go func() {
			began := time.Now()
			failed := do() != nil
			l.end(owner, suspect, failed || time.Since(began) >= tooSlow)
		}()
	}
}

func (l *Lanes) hasRoom(owner string) bool {
	half := max(l.most/2, 1)
	if l.failing[owner] {
		return l.busy[owner] == 0 && l.suspect < half
	}
	further := l.running - len(l.busy) // beyond the first of each owner
	return l.busy[owner] == 0 || l.busy[owner] < l.each && further < half
}

func (l *Lanes) end(owner string, suspect, failed bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.running--
	if suspect {
		l.suspect--
	}
	if l.busy[owner]--; l.busy[owner] == 0 {
		delete(l.busy, owner)
	}
	switch {
	case !failed:
		delete(l.failing, owner)
	case len(l.failing) < maxFailing || l.failing[owner]:
		l.failing[owner] = true
	default: // they may be gone, and who fails again is remembered again
		l.failing = map[string]bool{owner: true}
	}
	if l.start(); l.running == 0 {
		l.idle.Broadcast()
	}
}
