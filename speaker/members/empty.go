package members

import (
	"errors"
	"io"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// empties are the streams of nodes that the other end has closed before anything came. Speakers open such streams to
// learn whether a kernel or a speaker still answers, and one that was frozen finds all of them at once when it goes on.
// memberlist's line about them is the one about a stream of another protocol.
type empties struct {
	count atomic.Uint64
	mu    sync.Mutex
	open  map[string]bool // not closed at this end yet, by the other end as memberlist names it
	due   bool            // a line is about to tell of some
	said  time.Time       // of the last line about any
	told  uint64          // the count that it told
}

// add notes that a stream is empty.
func (e *empties) add(from string) {
	e.count.Add(1)
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.open == nil {
		e.open = map[string]bool{}
	}
	e.open[from] = true
}

// remove notes that a stream is closed: its port may belong to another one soon.
func (e *empties) remove(from string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.open, from)
}

// about reports whether a line of memberlist is about an empty stream.
func (e *empties) about(line string) bool {
	const from = " from=" // the last word
	at := strings.LastIndex(line, from)
	if e == nil || at < 0 {
		return false
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.open[line[at+len(from):]]
}

// emptyEvery is how often a line tells of empty streams at most. emptyDelay is how long it waits
// for the others of a burst.
const emptyEvery, emptyDelay = time.Minute, time.Second

// tell has say called soon with how many there were since the last line, unless it is about to be
// called.
func (e *empties) tell(say func(n uint64)) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.due {
		return
	}
	e.due = true
	wait := emptyDelay
	if !e.said.IsZero() {
		wait = max(wait, emptyEvery-time.Since(e.said))
	}
	time.AfterFunc(wait, func() {
		if n := e.more(); n > 0 {
			say(n)
		}
	})
}

// more returns how many there were since it was called last.
func (e *empties) more() uint64 {
	e.mu.Lock()
	defer e.mu.Unlock()
	count := e.count.Load()
	n := count - e.told
	e.due, e.said, e.told = false, time.Now(), count
	return n
}

// closedEmpty reports whether an error of the first read says that the other end has closed the stream. One that is
// left open without a word is none of ours.
func closedEmpty(err error) bool { return errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET) }

// Empty returns how many connections nodes have closed without a message.
func (m *Members) Empty() uint64 { return m.empties.count.Load() }
