package chaos

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/landfall-lb/landfall/e2e/chaos/flat"
	"github.com/landfall-lb/landfall/e2e/lab"
)

// figure is what a number is of, such as a program on a node, and what it says.
type figure struct{ of, name string }

// allNodes is what figures are of that change hands between nodes, as pods and addresses move.
const (
	allNodes    = "all nodes"
	rescueTable = "landfall-rescue"
)

// The figures of programs, and of the cluster.
const (
	rssMemory   = "resident memory, MiB"
	anonymous   = "anonymous memory, MiB"
	heapGoal    = "Go heap at which it is collected, MiB"
	goroutines  = "goroutines"
	descriptors = "open descriptors"
	sockets     = "open sockets"
	flows       = "conntrack entries, "
	rulesOf     = "rules of "
	elementsOf  = "elements of "
	remembered  = "elements that the kernel forgets by itself, of "
	requests    = "requests of Landfall to the API server, a minute"
	atRest      = requests + " at rest"
)

// boundOf says by how much each figure may grow over a run. What is counted one by one may differ by a few, as a
// connection to the API server or a speaker of another node may just be under way.
func boundOf(name string) flat.Bound {
	switch name {
	case rssMemory, anonymous, heapGoal:
		return flat.Bound{Slack: 2, Share: 0.1}
	case goroutines, descriptors, sockets:
		return flat.Bound{Slack: 3, Share: 0.05}
	case requests: // of a cycle, which a busy machine takes longer for
		return flat.Bound{Shown: true}
	case atRest:
		return flat.Bound{Slack: 20, Share: 0.25}
	}
	switch {
	case strings.HasPrefix(name, remembered):
		return flat.Bound{Shown: true} // until an hour is over
	case strings.HasPrefix(name, flows):
		return flat.Bound{Slack: 100, Share: 0.25}
	case strings.Contains(name, rescueTable): // by who announced an address before
		return flat.Bound{Slack: 10, Share: 0.1}
	}
	return flat.Bound{Slack: 1, Share: 0.01, Shrink: true} // rules and elements, of which none may be lost
}

// figures takes all of them. The cluster is as it was at the beginning when it is called.
func (r *runner) figures(ctx context.Context) (map[figure]float64, error) {
	all := map[figure]float64{}
	for _, program := range []string{"controller", "speaker", "relay", "proxy"} {
		for _, a := range r.lab.Agents(program) {
			if err := programFigures(ctx, a, all); err != nil {
				return nil, err
			}
		}
	}
	for _, n := range r.lab.Cluster().Nodes {
		text, err := r.lab.Exec(ctx, n.Name, "sh", "-c", "conntrack -L 2>/dev/null")
		if err != nil {
			return nil, err
		}
		for line := range strings.Lines(text) {
			if words := strings.Fields(line); len(words) > 3 {
				kind := words[0]
				if kind == "tcp" {
					kind += " " + words[3]
				}
				all[figure{allNodes, flows + kind}]++
			}
		}
		// nft warns on standard error of tables that iptables manages.
		if text, err = r.lab.Exec(ctx, n.Name, "sh", "-c", "nft -j list ruleset 2>/dev/null"); err != nil {
			return nil, err
		}
		if err := countRules(text, all); err != nil {
			return nil, fmt.Errorf("rules of %s: %w", n.Name, err)
		}
	}
	return all, nil
}

// programFigures adds the figures of a program and of those that it has started.
func programFigures(ctx context.Context, a *lab.Agent, all map[figure]float64) error {
	pid, err := a.PID()
	if err != nil {
		return err
	}
	if err := processFigures(pid, a.Name(), all); err != nil {
		return err
	}
	children, err := childrenOf(pid)
	if err != nil {
		return err
	}
	for i, child := range children {
		if err := processFigures(child, fmt.Sprintf("%s' child %d", a.Name(), i+1), all); err != nil {
			return err
		}
	}
	text, err := a.Metrics(ctx)
	if err != nil {
		return err
	}
	all[figure{a.Name(), goroutines}] = sum(text, "go_goroutines", "")
	all[figure{a.Name(), heapGoal}] = sum(text, "go_memstats_next_gc_bytes", "") / (1 << 20)
	return nil
}

// processFigures adds what the kernel says of a process.
func processFigures(pid int, of string, all map[figure]float64) error {
	folder := filepath.Join("/proc", strconv.Itoa(pid))
	status, err := os.ReadFile(filepath.Join(folder, "status"))
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(status)) {
		name, value, _ := strings.Cut(line, ":")
		kib, _ := strconv.ParseFloat(strings.TrimSuffix(strings.TrimSpace(value), " kB"), 64)
		switch name {
		case "VmRSS":
			all[figure{of, rssMemory}] = kib / 1024
		case "RssAnon":
			all[figure{of, anonymous}] = kib / 1024
		}
	}
	open, err := os.ReadDir(filepath.Join(folder, "fd"))
	if err != nil {
		return err
	}
	all[figure{of, descriptors}], all[figure{of, sockets}] = float64(len(open)), 0
	for _, fd := range open {
		if to, err := os.Readlink(filepath.Join(folder, "fd", fd.Name())); err == nil && strings.HasPrefix(to, "socket:") {
			all[figure{of, sockets}]++ // else it was closed meanwhile
		}
	}
	return nil
}

// childrenOf returns the processes that a process has started and that run.
func childrenOf(pid int) (children []int, err error) {
	lists, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	for _, list := range lists {
		text, failed := os.ReadFile(list)
		if failed != nil {
			continue // the thread has ended
		}
		for word := range strings.FieldsSeq(string(text)) {
			child, err := strconv.Atoi(word)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", list, err)
			}
			children = append(children, child)
		}
	}
	return children, err
}

// sum adds up the values of a metric whose labels contain a text.
func sum(metrics, name, label string) (total float64) {
	lines := bufio.NewScanner(strings.NewReader(metrics))
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		series, value, _ := strings.Cut(lines.Text(), " ")
		if of, labels, _ := strings.Cut(series, "{"); of != name || !strings.Contains(labels, label) {
			continue
		}
		if n, err := strconv.ParseFloat(value, 64); err == nil {
			total += n
		}
	}
	return total
}

// asked returns how many requests Landfall's programs have sent so far. The API server tells them from the lab's own by
// whose they are.
func (r *runner) asked(ctx context.Context) (float64, error) {
	text, err := r.lab.Kube().CoreV1().RESTClient().Get().AbsPath("/metrics").DoRaw(ctx)
	if err != nil {
		return 0, fmt.Errorf("metrics of the API server: %w", err)
	}
	return sum(string(text), "apiserver_flowcontrol_dispatched_requests_total", `flow_schema="service-accounts"`), nil
}

// countRules adds up the rules of Landfall's tables, and the elements of their sets and maps, over all nodes: pods move
// between nodes, and what a single one holds with them.
func countRules(listing string, all map[figure]float64) error {
	type object struct {
		Family, Table, Name string
		Elem                []json.RawMessage
		Flags               flags
	}
	var ruleset struct {
		Nftables []struct{ Rule, Set, Map *object }
	}
	if err := json.Unmarshal([]byte(listing), &ruleset); err != nil {
		return err
	}
	for _, o := range ruleset.Nftables {
		if o.Rule != nil && strings.HasPrefix(o.Rule.Table, "landfall") {
			all[figure{allNodes, rulesOf + o.Rule.Family + " " + o.Rule.Table}]++
		}
		if set := cmp.Or(o.Set, o.Map); set != nil && strings.HasPrefix(set.Table, "landfall") {
			kind, name := elementsOf, set.Name
			if slices.Contains(set.Flags, "timeout") {
				kind = remembered
			}
			if set.Table == rescueTable { // some are by node, or by a number of nodes
				name, _, _ = strings.Cut(name, "-")
			}
			all[figure{allNodes, kind + set.Family + " " + set.Table + " " + name}] += float64(len(set.Elem))
		}
	}
	return nil
}

// flags are those of a set, of which nft lists a single one without a list.
type flags []string

// UnmarshalJSON implements json.Unmarshaler.
func (f *flags) UnmarshalJSON(text []byte) error {
	if len(text) > 0 && text[0] == '[' {
		return json.Unmarshal(text, (*[]string)(f))
	}
	*f = make(flags, 1)
	return json.Unmarshal(text, &(*f)[0])
}
