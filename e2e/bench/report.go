package main

import (
	"fmt"
	"slices"
)

// report is all figures of a run.
type report struct {
	Machine machine `json:"machine"`
	// LeftOut are sentences about what could not be measured, and why.
	LeftOut     []string        `json:"left_out,omitempty"`
	Churn       []churnRow      `json:"churn,omitempty"`
	Connections []connectionRow `json:"connections,omitempty"`
	Outside     []outsideRow    `json:"outside,omitempty"`
	Benchmarks  []benchmark     `json:"benchmarks,omitempty"`
}

// quantiles are in milliseconds, from the call of the API server to the first right answer. Call is
// the median until the API server itself had answered, which no proxy can do anything about.
type quantiles struct {
	P50  float64 `json:"p50_ms"`
	Max  float64 `json:"max_ms"`
	Call float64 `json:"call_p50_ms"`
}

func (q quantiles) String() string {
	if q == (quantiles{}) {
		return "" // was not measured
	}
	return fmt.Sprintf("%.1f / %.1f (%.1f)", q.P50, q.Max, q.Call)
}

// churnRow is what one proxy did at one number of Services of two endpoints each.
type churnRow struct {
	Proxy    string `json:"proxy"`
	Services int    `json:"services"`
	// Start is from the start of the process to the first answers of all sentinels, in milliseconds.
	Start float64 `json:"start_ms"`
	// Change, New and Behind are from the call of the API server to the first right answer: a change
	// of endpoints, a new Service, and a change of endpoints after 200 others.
	Change quantiles `json:"change"`
	New    quantiles `json:"new_service"`
	Behind quantiles `json:"behind_200"`
	// Memory is the peak of the resident size, in MiB.
	Memory float64 `json:"peak_rss_mib"`
	// StartCPU and CPU are processor seconds up to the end of the first sync, and for all changes
	// after it.
	StartCPU float64 `json:"start_cpu_s"`
	CPU      float64 `json:"churn_cpu_s"`
	// Over is what took longer than the limit. What comes after it is missing.
	Over string `json:"over_limit,omitempty"`
}

// What may be over the limit.
const (
	ofStart  = "start"
	ofChange = "change"
	ofNew    = "new Service"
	ofBehind = "change behind others"
	// Until it is quiet, after the start and after all changes.
	ofStartCPU = "CPU of the start"
	ofCPU      = "CPU of the changes"
)

func (r churnRow) String() string {
	if r.Over != "" {
		return fmt.Sprintf("%d Services, %s: %s: %v", r.Services, r.Proxy, r.Over, errOverLimit)
	}
	return fmt.Sprintf(
		"%d Services, %s: start %.0f ms, change %s ms, new %s ms, behind 200 %s ms, %.0f MiB, CPU %.2f + %.2f s",
		r.Services, r.Proxy, r.Start, r.Change, r.New, r.Behind, r.Memory, r.StartCPU, r.CPU)
}

// connectionRow is how many new connections per second went some way: the median of the rounds.
type connectionRow struct {
	Path      string  `json:"path"`
	PerSecond float64 `json:"per_second"`
	Min       float64 `json:"min"`
	Max       float64 `json:"max"`
	// Over is set where the proxy was not ready within the limit: nothing was measured.
	Over bool `json:"over_limit,omitempty"`
}

// outsideRow is what a client outside of the node gets over one path.
type outsideRow struct {
	Path       string `json:"path"`
	Policy     string `json:"policy,omitempty"`
	Services   int    `json:"services,omitempty"`
	First      share  `json:"first_packets"`
	Connection share  `json:"new_connections"`
	RoundTrip  share  `json:"round_trips"`
	Bulk       share  `json:"bulk"`
	// Over is set where the proxy was not ready within the limit: nothing was measured.
	Over bool `json:"over_limit,omitempty"`
}

func (r outsideRow) order() string { return fmt.Sprintf("%05d %s %s", r.Services, r.Policy, r.Path) }

// sample is one measurement of a path beside the bare node's before and after it.
type sample struct {
	timing
	share, shareWall float64
}

// share is how much a path does in the processor time that a bare node takes for 1: the median of the
// rounds, and the quartiles.
type share struct {
	Share float64 `json:"share"`
	Low   float64 `json:"low_quartile"`
	High  float64 `json:"high_quartile"`
	// Wall is the same by the time on the clock.
	Wall float64 `json:"share_of_time"`
	// CPU is the processor time for one, client and pod included, in microseconds.
	CPU float64 `json:"cpu_us"`
}

func newShare(samples []sample) share {
	at := func(part float64, of func(sample) float64) float64 {
		values := make([]float64, 0, len(samples))
		for _, s := range samples {
			values = append(values, of(s))
		}
		slices.Sort(values)
		return values[int(part*float64(len(values)-1))]
	}
	cpu := func(s sample) float64 { return s.share }
	return share{Share: at(0.5, cpu), Low: at(0.25, cpu), High: at(0.75, cpu),
		Wall: at(0.5, func(s sample) float64 { return s.shareWall }),
		CPU:  1e6 * at(0.5, func(s sample) float64 { return s.cpu })}
}

func (s share) String() string {
	if s == (share{}) {
		return "" // was not measured
	}
	return fmt.Sprintf("%.2f (%.2f to %.2f, %.1f)", s.Share, s.Low, s.High, s.CPU)
}
