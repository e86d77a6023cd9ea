package plan

import (
	"maps"
	"net/netip"

	"github.com/landfall-lb/landfall/internal/lb"
)

// Summary counts the Services that are ours.
type Summary struct {
	Assigned int               // those that have what they ask for
	Pending  map[lb.Reason]int // the others
}

// Summary counts the Services by what was decided last.
func (b *Book) Summary() Summary {
	return Summary{Assigned: b.summary.Assigned, Pending: maps.Clone(b.summary.Pending)}
}

// count puts e under another reason in the summary, "" for none.
func (b *Book) count(e *entry, reason lb.Reason) {
	switch e.reason {
	case "":
	case lb.ReasonAssigned:
		b.summary.Assigned--
	default:
		if b.summary.Pending[e.reason]--; b.summary.Pending[e.reason] == 0 {
			delete(b.summary.Pending, e.reason)
		}
	}
	switch e.reason = reason; reason {
	case "":
	case lb.ReasonAssigned:
		b.summary.Assigned++
	default:
		b.summary.Pending[reason]++
	}
}

// wait notes whether e waits for something, and for which addresses by name.
func (b *Book) wait(e *entry, asks []netip.Addr, waits bool) {
	for _, addr := range e.asks {
		delete(b.asking[addr], e)
		if len(b.asking[addr]) == 0 {
			delete(b.asking, addr)
		}
	}
	e.asks = nil
	if !waits {
		b.unlist(e)
		return
	}
	if e.place == 0 {
		b.waiting = append(b.waiting, e)
		e.place = len(b.waiting)
	}
	e.asks = asks
	for _, addr := range asks {
		if b.asking[addr] == nil {
			b.asking[addr] = map[*entry]bool{}
		}
		b.asking[addr][e] = true
	}
}

// unlist takes e from those who wait; the last of them takes its place.
func (b *Book) unlist(e *entry) {
	if e.place == 0 {
		return
	}
	end := len(b.waiting) - 1
	last := b.waiting[end]
	b.waiting[e.place-1], last.place = last, e.place
	b.waiting[end] = nil
	b.waiting, e.place = b.waiting[:end], 0
}
