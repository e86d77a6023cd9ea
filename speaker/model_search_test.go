package main

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

// step of a trace: a move after so many ticks.
type modelStep struct {
	After int
	Move  string
}

// trace is how a world came to be.
type trace struct {
	Owner int
	Steps []modelStep
}

func (t trace) then(after int, name string) trace {
	steps := make([]modelStep, len(t.Steps), len(t.Steps)+1)
	copy(steps, t.Steps)
	return trace{t.Owner, append(steps, modelStep{after, name})}
}

func moveNamed(name string) (move, bool) {
	for _, m := range moves {
		if m.name == name {
			return m, true
		}
	}
	return move{}, false
}

// replay plays a trace and so many ticks more, and returns the first violations with the story.
func replay(h *hooks, t trace, more int) (found []violation, story string) {
	w := newWorld(h, t.Owner)
	w.begin()
	w.story = &strings.Builder{}
	for _, s := range append(t.Steps, modelStep{After: more}) {
		for range s.After {
			if w.pass(); len(w.found) > 0 {
				return w.found, w.story.String()
			}
		}
		if m, ok := moveNamed(s.Move); ok {
			if w.play(m); len(w.found) > 0 {
				return w.found, w.story.String()
			}
		}
	}
	return nil, w.story.String()
}

// search goes through all worlds that a few moves lead to.
type search struct {
	hooks   *hooks
	choices []bool // after how many ticks a move may follow
	moves   []move
	whole   bool // it goes on after each move until the last choice
	visited map[uint64]bool
	ticks   int
}

// failure is what a search has found.
type failure struct {
	trace
	More  int
	Found []violation
}

// deepen searches with one move, then with two, and so on, so that what it finds takes the fewest.
func (s *search) deepen(t trace, most int) *failure {
	start := newWorld(s.hooks, t.Owner)
	for _, step := range t.Steps {
		for range step.After {
			start.pass()
		}
		m, _ := moveNamed(step.Move)
		start.play(m)
	}
	for n := 1; n <= most; n++ {
		s.visited = map[uint64]bool{}
		if f := s.from(start.copy(), t, n); f != nil {
			return f
		}
	}
	return nil
}

// from lets time pass in a world, and makes each move at each time that is chosen. The world is its own.
func (s *search) from(w *world, t trace, left int) *failure {
	for age := 0; age == 0 || age < len(s.choices) && !s.over(w, t, age); age++ {
		if age > 0 {
			w.pass()
			s.ticks++
			if len(w.found) > 0 {
				return &failure{t, age, w.found}
			}
		}
		if !s.choices[age] && age%8 != 0 {
			continue // to look costs as much as a tick
		}
		key := w.digest() * 31
		key += uint64(left)
		if s.choices[age] && left > 0 {
			key = key*31 + 1
		}
		if s.visited[key] {
			return nil
		}
		s.visited[key] = true
		if !s.choices[age] || left == 0 {
			continue
		}
		for _, m := range s.moves {
			if !m.may(w) {
				continue
			}
			next := w.copy()
			next.play(m)
			path := t.then(age, m.name)
			if len(next.found) > 0 {
				return &failure{path, 0, next.found}
			}
			if f := s.from(next, path, left-1); f != nil {
				return f
			}
		}
	}
	return nil
}

// over reports whether everything that is under way has ended: nothing is at first, and most of it is
// within the bounds of what a majority does.
func (s *search) over(w *world, t trace, age int) bool {
	return !s.whole && (len(t.Steps) == 0 || w.majority() != nil && time.Duration(age-1)*tick > yieldsWithin)
}

// choicesAt returns the ticks at which moves may follow one another, the last of which is the end.
func choicesAt(ticks ...int) []bool {
	all := make([]bool, ticks[len(ticks)-1]+1)
	for _, at := range ticks {
		all[at] = true
	}
	return all
}

// report tells a failure.
func (f *failure) report(t testing.TB, h *hooks) {
	t.Helper()
	_, story := replay(h, f.trace, f.More+1)
	var steps []string
	for _, s := range f.Steps {
		steps = append(steps, fmt.Sprintf("{%d, %q}", s.After, s.Move))
	}
	t.Errorf("%v\n%s\nto replay: trace{%d, []modelStep{%s}}, %d", f.Found, story, f.Owner, strings.Join(steps, ", "),
		f.More)
}
