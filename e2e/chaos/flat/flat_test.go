package flat

import (
	"slices"
	"testing"
	"time"
)

// series makes one with a value each minute.
func series(b Bound, value func(minute int) float64) Series {
	s := Series{Bound: b}
	for minute := range 60 {
		s.At, s.Values = append(s.At, time.Duration(minute)*time.Minute), append(s.Values, value(minute))
	}
	return s
}

func TestJudge(t *testing.T) {
	saw := func(minute int) float64 { return 100 + float64(minute%7)*4 }
	memory, exact := Bound{Slack: 4, Share: 0.1}, Bound{Shrink: true}
	for name, tt := range map[string]struct {
		series Series
		flat   bool
	}{
		"constant":                      {series(exact, func(int) float64 { return 7 }), true},
		"a saw":                         {series(memory, saw), true},
		"one outlier":                   {series(memory, func(m int) float64 { return saw(m) + map[bool]float64{true: 900}[m == 59] }), true},
		"noise that ends":               {series(memory, func(m int) float64 { return 130 - float64(m)/2 }), true},
		"a leak":                        {series(memory, func(m int) float64 { return saw(m) + float64(m)/2 }), false},
		"a goroutine each five minutes": {series(Bound{Slack: 5}, func(m int) float64 { return 50 + float64(m/5) }), false},
		"a step in the middle": {series(memory, func(m int) float64 {
			return 100 + map[bool]float64{true: 40}[m > 40]
		}), false},
		"a leak that begins late":            {series(memory, func(m int) float64 { return 100 + max(0, float64(m-45))*3 }), false},
		"elements that are lost":             {series(exact, func(m int) float64 { return 9 - float64(m/50) }), false},
		"elements that are lost, and may be": {series(Bound{}, func(m int) float64 { return 9 - float64(m/50) }), true},
		"a leak that is only shown":          {series(Bound{Shown: true}, func(m int) float64 { return float64(m) }), true},
		"a saw of six": {Series{At: []time.Duration{1, 2, 3, 4, 5, 6}, Values: []float64{158, 240, 197, 185, 157, 256},
			Bound: Bound{Slack: 20, Share: 0.1}}, true},
		"none":          {Series{Bound: memory}, false},
		"three":         {Series{At: []time.Duration{1, 2, 3}, Values: []float64{1, 1, 1}, Bound: memory}, false},
		"four":          {Series{At: []time.Duration{1, 2, 3, 4}, Values: []float64{1, 1, 1, 1}, Bound: memory}, true},
		"of one moment": {Series{At: []time.Duration{1, 1, 1, 1}, Values: []float64{1, 1, 1, 1}, Bound: memory}, true},
	} {
		if got := Judge(tt.series); got.Flat != tt.flat {
			t.Errorf("%s: %+v, want flat %v", name, got, tt.flat)
		}
	}
}

func TestWorse(t *testing.T) {
	all := []Verdict{
		{Of: "shrinks", Flat: true, First: 9, Last: 3, Fit: -6, Allowed: 10},
		{Of: "some", Flat: true, Fit: 5, Allowed: 10},
		{Of: "grows", Fit: 11, Allowed: 10},
		{Of: "grows without being allowed to", Fit: 1},
		{Of: "more", Flat: true, Fit: 8, Allowed: 10},
	}
	slices.SortStableFunc(all, Worse)
	for i, want := range []string{"grows without being allowed to", "grows", "more", "some", "shrinks"} {
		if all[i].Of != want {
			t.Errorf("place %d: %s, want %s", i, all[i].Of, want)
		}
	}
}
