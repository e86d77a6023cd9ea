package chaos

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/landfall-lb/landfall/e2e/chaos/contract"
)

// journal is what happened, line by line.
type journal struct {
	mu       sync.Mutex
	progress func(string)
	lines    []entry
}

type entry struct {
	at   time.Time
	text string
}

func (j *journal) add(format string, args ...any) {
	j.mu.Lock()
	defer j.mu.Unlock()
	e := entry{time.Now(), fmt.Sprintf(format, args...)}
	j.lines = append(j.lines, e)
	if j.progress != nil {
		j.progress(e.at.Format("15:04:05.000 ") + e.text)
	}
}

// since returns what happened from a time on.
func (j *journal) since(t time.Time) string {
	j.mu.Lock()
	defer j.mu.Unlock()
	var b strings.Builder
	for _, e := range j.lines {
		if !e.at.Before(t) {
			fmt.Fprintf(&b, "%s %s\n", e.at.Format("15:04:05.000"), e.text)
		}
	}
	return b.String()
}

// logs are what programs have logged, by the program's name.
type logs map[string]string

// lengths are how long logs were at some time.
type lengths map[string]int

func (l logs) lengths() lengths {
	n := lengths{}
	for name, text := range l {
		n[name] = len(text)
	}
	return n
}

// after returns what was logged after logs were so long. The time of a line does not say so: the clock of its program
// may have been set wrong.
func (l logs) after(n lengths) logs {
	rest := logs{}
	for name, text := range l {
		rest[name] = text[min(n[name], len(text)):]
	}
	return rest
}

// mark is how long the logs were at a time.
type mark struct {
	at time.Time
	lengths
}

// markBefore returns the last mark up to a time; without one, all logs count from their beginning.
func markBefore(marks []mark, t time.Time) lengths {
	var last lengths
	for _, m := range marks {
		if !m.at.After(t) {
			last = m.lengths
		}
	}
	return last
}

// bounds are how long the logs were when an event began and ended.
type bounds struct{ began, ended lengths }

// announcedAfter returns what a node held at the end of an event, and what it took after it.
func announcedAfter(l logs, of bounds, speaker, node string) []netip.Addr {
	whole, after := l.after(of.began)[speaker], l.after(of.ended)[speaker]
	held := map[netip.Addr]bool{}
	for _, c := range takeovers(strings.TrimSuffix(whole, after)) {
		if c.to == node {
			held[c.vip] = true
		} else {
			delete(held, c.vip)
		}
	}
	for _, c := range takeovers(after) {
		if c.to == node {
			held[c.vip] = true
		}
	}
	return slices.SortedFunc(maps.Keys(held), netip.Addr.Compare)
}

// takeover is a line of a speaker's log: a change of the owner. to is empty if the speaker's node stops answering and
// knows no other.
type takeover struct {
	vip netip.Addr
	to  string
}

// takeovers returns the changes that a speaker's log shows, in their order, save those to a node that has no interface
// to answer on.
func takeovers(log string) []takeover {
	var all []takeover
	for line := range strings.Lines(log) {
		silent := strings.Contains(line, "interfaces=[]")
		if !strings.Contains(line, `msg="owner changes"`) || silent && !strings.Contains(line, ` to="" `) {
			continue
		}
		var t takeover
		for field := range strings.FieldsSeq(line) {
			if text, ok := strings.CutPrefix(field, "vip="); ok {
				t.vip, _ = netip.ParseAddr(text)
			} else if text, ok := strings.CutPrefix(field, "to="); ok {
				t.to = strings.Trim(text, `"`)
			}
		}
		all = append(all, t)
	}
	return all
}

// logs returns what the agents of some programs have logged.
func (r *runner) logs(programs ...string) logs {
	all := logs{}
	for _, program := range programs {
		for _, a := range r.lab.Agents(program) {
			all[a.Name()] = a.Log()
		}
	}
	return all
}

// finish reads from what the speakers logged meanwhile what the node of an event lost.
func (r *runner) finish(span *contract.Span, l logs) {
	for _, a := range r.lab.Agents("speaker") {
		for _, d := range takeovers(l[a.Name()]) {
			if d.to == a.Node && a.Node != span.Node && slices.Contains(span.OwnedBefore, d.vip) {
				span.Lost = append(span.Lost, d.vip)
			}
		}
	}
}

// returned notes what the node of a fault announced once the fault had healed: what it held then, and what it took
// later. What it takes and gives up while it is cut off does no harm.
func (r *runner) returned(span *contract.Span) {
	if a := r.lab.Agent("speaker", span.Node); a != nil {
		span.Took = announcedAfter(logs{a.Name(): a.Log()}, r.logged[span.ID], a.Name(), span.Node)
	}
}

// deciders are the programs whose logs are reported.
var deciders = []string{"speaker", "proxy", "controller"}

// decisions returns what the agents have logged since the beginning of a round: the last that began up to that time.
func (r *runner) decisions(since time.Time) string {
	var lines []string
	for name, text := range r.logs(deciders...).after(markBefore(r.rounds, since)) {
		for line := range strings.Lines(text) {
			if strings.HasPrefix(line, "time=") {
				lines = append(lines, name+": "+line)
			}
		}
	}
	slices.SortStableFunc(lines, func(a, b string) int {
		_, a, _ = strings.Cut(a, "time=")
		_, b, _ = strings.Cut(b, "time=")
		return strings.Compare(a, b)
	})
	return strings.Join(lines, "")
}
