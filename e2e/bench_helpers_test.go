package e2e

import (
	"slices"
	"testing"
)

// series are figures of all turns of a benchmark, by their unit.
type series map[string][]float64

func (s series) add(value float64, unit string) { s[unit] = append(s[unit], value) }

// report reports the median of each. It must be called after the last turn: the first one takes back
// what was reported before.
func (s series) report(b *testing.B) {
	for unit, values := range s {
		slices.Sort(values)
		b.ReportMetric(values[(len(values)-1)/2], unit)
	}
}

// inFull returns how many objects a benchmark makes: a twentieth with -short.
func inFull(n int) int {
	if testing.Short() {
		return n / 20
	}
	return n
}

// turn is a benchmark that cleans up at the end of each turn.
type turn struct {
	*testing.B
	after []func()
}

func (t *turn) Cleanup(f func()) { t.after = append(t.after, f) }

// inTurn calls f with a turn of its own, for what else would stay until the end of the benchmark.
func inTurn(b *testing.B, f func(t testing.TB)) {
	t := &turn{B: b}
	defer func() {
		for _, f := range slices.Backward(t.after) {
			f()
		}
	}()
	f(t)
}
