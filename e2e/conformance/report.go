package conformance

import (
	"cmp"
	"encoding/xml"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

// Result is how a spec ended.
type Result string

// The results. NotRun is that of specs that were not selected so far, or that a run was stopped in.
const (
	Passed  Result = "passed"
	Failed  Result = "failed"
	Skipped Result = "skipped"
	NotRun  Result = "not run"
)

// Spec is a spec and its last result.
type Spec struct {
	Name    string  `json:"name"`
	Result  Result  `json:"result"`
	Reason  string  `json:"reason,omitempty"` // why it failed or was skipped
	Seconds float64 `json:"seconds,omitempty"`
	// Date and Landfall say when the result came about, and with which version of Landfall; empty
	// where the spec did not run.
	Date     string `json:"date,omitempty"`
	Landfall string `json:"landfall,omitempty"`
}

// Report has the last result of each spec, by the proxy's mode.
type Report struct {
	Kubernetes string            `json:"kubernetes"` // version of the suite and of the cluster
	Modes      map[string][]Spec `json:"modes"`
}

// junit is what the suite's JUnit report holds that is of interest.
type junit struct {
	Suites []struct {
		Cases []struct {
			Name    string  `xml:"name,attr"`
			Status  string  `xml:"status,attr"`
			Seconds float64 `xml:"time,attr"`
			Skipped *struct {
				Message string `xml:"message,attr"`
			} `xml:"skipped"`
			Failure string `xml:"failure"`
			Error   string `xml:"error"`
		} `xml:"testcase"`
	} `xml:"testsuite"`
}

// Parse returns the specs of the groups that a JUnit report of the suite has, with their results.
func Parse(text []byte, landfall string, date time.Time) ([]Spec, error) {
	var j junit
	if err := xml.Unmarshal(text, &j); err != nil {
		return nil, fmt.Errorf("JUnit report: %w", err)
	}
	var specs []Spec
	for _, suite := range j.Suites {
		for _, c := range suite.Cases {
			name, ok := strings.CutPrefix(c.Name, "[It] ")
			if !ok || group(name) == "" {
				continue
			}
			s := Spec{
				Name: strings.TrimSpace(name), Seconds: c.Seconds, Date: date.UTC().Format(time.DateOnly), Landfall: landfall,
			}
			switch c.Status {
			case "passed":
				s.Result = Passed
			case "failed", "panicked":
				s.Result, s.Reason = Failed, firstLine(cmp.Or(c.Failure, c.Error))
			case "skipped":
				// Without a reason it is one that ginkgo did not select.
				why := ""
				if c.Skipped != nil {
					_, why, _ = strings.Cut(c.Skipped.Message, "skipped - ")
				}
				switch {
				case why != "":
					s.Result, s.Reason = Skipped, firstLine(why)
				case excluded(s.Name) != "":
					s = Spec{Name: s.Name, Result: Skipped, Reason: excluded(s.Name)}
				default:
					s = Spec{Name: s.Name, Result: NotRun}
				}
			default: // timedout, interrupted, aborted, pending: the run's fault
				s = Spec{Name: s.Name, Result: NotRun}
			}
			specs = append(specs, s)
		}
	}
	if len(specs) == 0 {
		return nil, fmt.Errorf("JUnit report: no spec of %s", prefix)
	}
	return specs, nil
}

// firstLine returns the first line of a message of ginkgo that says something.
func firstLine(text string) string {
	const longest = 300
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(strings.TrimPrefix(strings.TrimSpace(line), "[FAILED]"))
		if line == "" {
			continue
		}
		if len(line) > longest {
			line = strings.ToValidUTF8(line[:longest], "") + "…"
		}
		return line
	}
	return ""
}

// Merge takes over the results of a run in a mode. A spec that did not run keeps the result that it
// had. Specs that the suite has no longer are dropped, and so is all of another version of
// Kubernetes.
func (r Report) Merge(mode, kubernetes string, run []Spec) Report {
	merged := Report{Kubernetes: kubernetes, Modes: map[string][]Spec{}}
	if r.Kubernetes == kubernetes {
		maps.Copy(merged.Modes, r.Modes)
	}
	had := map[string]Spec{}
	for _, s := range merged.Modes[mode] {
		had[s.Name] = s
	}
	specs := []Spec{}
	for _, s := range run {
		if old, ok := had[s.Name]; ok && s.Result == NotRun {
			s = old
		}
		specs = append(specs, s)
	}
	slices.SortFunc(specs, func(a, b Spec) int { return strings.Compare(a.Name, b.Name) })
	merged.Modes[mode] = specs
	return merged
}

// counts counts specs by their result.
func counts(specs []Spec) map[Result]int {
	n := map[Result]int{}
	for _, s := range specs {
		n[s.Result]++
	}
	return n
}
