// Package flat judges whether figures that were taken again and again, each time in the same state, stay as they were.
package flat

import (
	"math"
	"slices"
	"time"
)

// least is how many values a judgement needs, and inQuarter how many at least are the first and the last quarter.
const (
	least     = 4
	inQuarter = 2
)

// Bound is by how much a figure may grow over a run.
type Bound struct {
	// Slack is in the figure's own unit, Share a part of what it was in the first quarter. Both together are allowed.
	Slack float64 `json:"slack"`
	Share float64 `json:"share"`
	// Shrink has the figure judged by both directions: less than before is as wrong as more.
	Shrink bool `json:"shrink,omitempty"`
	// Shown has the figure only be shown.
	Shown bool `json:"shown,omitempty"`
}

// Series is one figure at some times.
type Series struct {
	Of     string          `json:"of"`
	Figure string          `json:"figure"`
	At     []time.Duration `json:"at"` // in order
	Values []float64       `json:"values"`
	Bound  Bound           `json:"bound"`
}

// Verdict is what a series shows.
type Verdict struct {
	Of     string `json:"of"`
	Figure string `json:"figure"`
	// First and Last are the medians of the first and the last quarter.
	First float64 `json:"first"`
	Last  float64 `json:"last"`
	// Fit is by how much the line of best fit rises from the first value to the last, Allowed by how much it may.
	Fit     float64 `json:"fit"`
	Allowed float64 `json:"allowed"`
	Flat    bool    `json:"flat"`
	// Values is how many there are; fewer than four are never flat.
	Values int `json:"values"`
}

// Judge says whether a series is flat: neither its fit nor the difference of its quarters is beyond the bound.
func Judge(s Series) Verdict {
	v := Verdict{Of: s.Of, Figure: s.Figure, Values: len(s.Values)}
	if len(s.Values) == 0 {
		return v
	}
	quarter := min(len(s.Values), max(inQuarter, len(s.Values)/4))
	v.First, v.Last = median(s.Values[:quarter]), median(s.Values[len(s.Values)-quarter:])
	v.Fit = slope(s) * float64(s.At[len(s.At)-1]-s.At[0])
	v.Allowed = s.Bound.Slack + s.Bound.Share*v.First
	if s.Bound.Shown {
		v.Flat = true
		return v
	}
	v.Flat = len(s.Values) >= least
	for _, grown := range []float64{v.Fit, v.Last - v.First} {
		if s.Bound.Shrink {
			grown = math.Abs(grown)
		}
		v.Flat = v.Flat && grown <= v.Allowed
	}
	return v
}

// Worse compares two verdicts by how much of what is allowed was used; those that are not flat come first.
func Worse(a, b Verdict) int {
	used := func(v Verdict) float64 {
		if grown := max(v.Fit, v.Last-v.First); grown > 0 || !v.Flat {
			return grown / max(v.Allowed, 1e-9)
		}
		return 0
	}
	switch {
	case a.Flat != b.Flat && b.Flat, a.Flat == b.Flat && used(a) > used(b):
		return -1
	case a.Flat == b.Flat && used(a) == used(b):
		return 0
	}
	return 1
}

// slope returns the median of the slopes between all pairs of values (Theil and Sen), which a few outliers do not move,
// for each nanosecond.
func slope(s Series) float64 {
	var all []float64
	for i := range s.Values {
		for j := range i {
			if apart := s.At[i] - s.At[j]; apart > 0 {
				all = append(all, (s.Values[i]-s.Values[j])/float64(apart))
			}
		}
	}
	if len(all) == 0 {
		return 0
	}
	return median(all)
}

func median(values []float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	middle := len(sorted) / 2
	if len(sorted)%2 == 1 {
		return sorted[middle]
	}
	return (sorted[middle-1] + sorted[middle]) / 2
}
