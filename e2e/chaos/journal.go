package chaos

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"
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

// announcedAfter returns what a node held at a time, and what it took after it.
func announcedAfter(changes []takeover, node string, at time.Time) []netip.Addr {
	held := map[netip.Addr]bool{}
	for _, c := range changes {
		if c.to == node {
			held[c.vip] = true
		} else if c.line < logTime(at) {
			delete(held, c.vip)
		}
	}
	return slices.SortedFunc(maps.Keys(held), netip.Addr.Compare)
}

// takeover is a line of a speaker's log: a change of the owner. to is empty if the speaker's node stops answering and
// knows no other.
type takeover struct {
	vip      netip.Addr
	to, line string
}

// takeovers returns the changes that a speaker's log shows since then, in their order, save those to a node that has no
// interface to answer on.
func takeovers(log string, since time.Time) []takeover {
	var all []takeover
	for line := range strings.Lines(log) {
		silent := strings.Contains(line, "interfaces=[]")
		if !strings.Contains(line, `msg="owner changes"`) || line < logTime(since) ||
			silent && !strings.Contains(line, ` to="" `) {
			continue
		}
		t := takeover{line: line}
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

// logTime is how a line of a program's log begins.
func logTime(t time.Time) string { return "time=" + t.UTC().Format("2006-01-02T15:04:05.000Z") }

// decisions returns what the agents have logged since then.
func (r *runner) decisions(since time.Time) string {
	var lines []string
	for _, program := range []string{"speaker", "proxy", "controller"} {
		for _, a := range r.lab.Agents(program) {
			for line := range strings.Lines(a.Log()) {
				if strings.HasPrefix(line, "time=") && line >= logTime(since) {
					lines = append(lines, a.Name()+": "+line)
				}
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
