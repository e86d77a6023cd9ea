// Package explain judges what landfallctl has read of a cluster: from values to a verdict, with
// the most likely cause and what cures it. It reads nothing itself.
package explain

import (
	"fmt"
	"slices"
	"strings"

	"github.com/landfall-lb/landfall/internal/lb"
)

// Level says how good the outcome of a check is.
type Level string

// The levels, from good to bad.
const (
	OK Level = "ok"
	// Note is worth knowing, and keeps nothing from working.
	Note Level = "note"
	// Unknown could not be checked.
	Unknown Level = "unknown"
	// Warning is likely to go wrong soon, or goes wrong for a part of the clients.
	Warning Level = "warning"
	Wrong   Level = "wrong"
)

// levels are in the order of their weight.
var levels = []Level{OK, Note, Unknown, Warning, Wrong}

// Worse reports whether l is worse than other.
func (l Level) Worse(other Level) bool { return slices.Index(levels, l) > slices.Index(levels, other) }

// Check is one line of a checklist.
type Check struct {
	Level Level `json:"level"`
	// What names the part that was checked, such as pool, address or node n1.
	What string `json:"what"`
	// Reason is the product's word for it; "" if it has none.
	Reason lb.Reason `json:"reason,omitempty"`
	Text   string    `json:"text"`
	// Cure is a command, or another step, that ends what is wrong; "" for that of the reason.
	Cure string `json:"cure,omitempty"`
	// Parts are the checks that this one is made of.
	Parts []Check `json:"parts,omitempty"`
}

// Verdict is what a checklist comes to.
type Verdict struct {
	// Subject is what was asked for, such as Service default/web.
	Subject string `json:"subject"`
	Level   Level  `json:"level"`
	// Line is the verdict in one line.
	Line   string    `json:"verdict"`
	Reason lb.Reason `json:"reason,omitempty"`
	// Cause is the most likely cause in other words, Cure what ends it; "" if nothing is wrong.
	Cause  string  `json:"cause,omitempty"`
	Cure   string  `json:"cure,omitempty"`
	Checks []Check `json:"checks"`
}

// In returns the verdict about an installation in a namespace: cures are written for landfall-system.
func (v Verdict) In(namespace string) Verdict {
	words := []string{"kubectl -n landfall-system ", "kubectl -n " + namespace + " "}
	if namespace != "landfall-system" {
		words = append(words, "landfallctl explain ", "landfallctl --landfall-namespace "+namespace+" explain ")
	}
	there := strings.NewReplacer(words...)
	var in func([]Check) []Check
	in = func(checks []Check) []Check {
		checks = slices.Clone(checks)
		for i, c := range checks {
			checks[i].Cure, checks[i].Parts = there.Replace(c.Cure), in(c.Parts)
		}
		return checks
	}
	v.Cure, v.Checks = there.Replace(v.Cure), in(v.Checks)
	return v
}

// notChecked comes ahead of what could not be looked at.
const notChecked = "; not checked: "

// judge makes a verdict of a checklist in the order of causes: the first of the worst checks is the
// most likely cause. good is the line if nothing is wrong.
func judge(subject, good string, checks []Check) Verdict {
	v := Verdict{Subject: subject, Level: OK, Line: subject + ": " + good, Checks: checks}
	worst, found := Check{Level: Note}, false
	for _, c := range flatten(checks) {
		if c.Level.Worse(worst.Level) {
			worst, found = c, true
		}
	}
	switch {
	case !found:
		return v
	case worst.Level == Unknown:
		// The rest is well: say what could not be looked at beside it.
		v.Line += notChecked + worst.Text
		v.Cure = worst.Cure
		return v
	}
	v.Level, v.Reason = worst.Level, worst.Reason
	v.Line = subject + ": " + worst.Text
	if worst.Reason != "" {
		v.Line += fmt.Sprintf(" (%s)", worst.Reason)
	}
	entry := Reasons[worst.Reason]
	v.Cause, v.Cure = entry.Meaning, worst.Cure
	if v.Cure == "" {
		v.Cure = entry.Cure
	}
	return v
}

// flatten lists checks and their parts, a part before its whole, which only sums up.
func flatten(checks []Check) []Check {
	var all []Check
	for _, c := range checks {
		all = append(append(all, flatten(c.Parts)...), c)
	}
	return all
}

// worst returns the worst level of some checks.
func worst(checks []Check) Level {
	level := OK
	for _, c := range flatten(checks) {
		if c.Level.Worse(level) {
			level = c.Level
		}
	}
	return level
}

// missing returns the verdict about an object that is not there.
func missing(subject, text, cure string) Verdict {
	c := Check{Level: Wrong, What: "object", Text: text, Cure: cure}
	return judge(subject, "", []Check{c})
}

// unreadable returns the verdict about an object of a kind that could not be read.
func (c Cluster) unreadable(subject, kind string) Verdict {
	v := judge(subject, "it cannot be read", c.unread())
	v.Level = Unknown
	for _, u := range c.Unread {
		if u.What == kind {
			v.Line, v.Cure = fmt.Sprintf("%s: it cannot be read: %s", subject, u.Why), u.Grant
		}
	}
	return v
}

// list names at most that many, and counts the others.
func list(names []string, most int) string {
	if len(names) <= most {
		return strings.Join(names, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(names[:most], ", "), len(names)-most)
}

// plural returns "1 pod" or "2 pods".
func plural(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}
