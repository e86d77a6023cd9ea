package lab

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"
)

// counters matches what changes in a listing without a change of rules.
var counters = regexp.MustCompile(`\[\d+:\d+\]`)

// Rules lists a node's rules as iptables-save prints them, without counters, times and comments of
// the listing itself.
func (l *Lab) Rules(ctx context.Context, node string) (string, error) {
	out, err := l.Exec(ctx, node, "iptables-save")
	if err != nil {
		return "", err
	}
	var b strings.Builder
	for line := range strings.Lines(out) {
		if !strings.HasPrefix(line, "#") {
			b.WriteString(counters.ReplaceAllString(line, "[0:0]"))
		}
	}
	return b.String(), nil
}

// RuleChange is one change to a node's rules, as the kernel reported it.
type RuleChange struct {
	// Add is false for a deletion.
	Add bool
	// What is "rule", "chain", "table", "set" or "element".
	What string
	// Table and Chain name where; Chain is empty for a table.
	Table, Chain string
	// Text is the line as "nft monitor" prints it.
	Text string
}

// RuleWatch records each change to a node's rules. See [Lab.WatchRules].
type RuleWatch struct {
	lab     *Lab
	node    string
	process *process
	mu      sync.Mutex
	out     bytes.Buffer
}

const (
	canaryTable = "landfall-lab-canary"
	// probeTable is what a proxy tries the kernel with when it starts; it adds and deletes it in one
	// transaction.
	probeTable = "landfall-probe"
)

// WatchRules records each change to a node's rules from now on, whoever makes it, through iptables
// (in its nf_tables variant, which is the default) or nft. What replaces rules by the same rules
// shows as well: it is how a test sees that rules that are right are left alone.
func (l *Lab) WatchRules(ctx context.Context, node string) (*RuleWatch, error) {
	w := &RuleWatch{lab: l, node: node}
	cmd := l.prepare(context.Background(), command{Host: node, Argv: []string{"nft", "monitor"}})
	cmd.Stdout, cmd.Stderr = w, w
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	w.process = &process{cmd: cmd, done: make(chan struct{})}
	go func() {
		w.process.err = cmd.Wait()
		close(w.process.done)
	}()
	// It listens once it has seen a change of ours.
	if err := w.sync(ctx); err != nil {
		_ = w.process.kill()
		return nil, err
	}
	return w, nil
}

// Write takes the monitor's output.
func (w *RuleWatch) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.out.Write(p)
}

// Stop ends the watch and returns all changes in their order.
func (w *RuleWatch) Stop(ctx context.Context) ([]RuleChange, error) {
	err := w.sync(ctx)
	_ = w.process.kill()
	w.mu.Lock()
	defer w.mu.Unlock()
	return parseMonitor(w.out.String()), err
}

// sync waits until the monitor has printed what has happened so far, by changing something that it
// will print.
func (w *RuleWatch) sync(ctx context.Context) error {
	name := fmt.Sprintf("%s-%d", canaryTable, time.Now().UnixNano())
	return WaitFor(ctx, w.lab.progress, "nft monitor on "+w.node, 10*time.Second, func(ctx context.Context) error {
		if !w.process.running() {
			return permanent{fmt.Errorf("ended: %s", w.out.String())}
		}
		if _, err := w.lab.Exec(ctx, w.node, "nft", "add table ip "+name+"; delete table ip "+name); err != nil {
			return err
		}
		w.mu.Lock()
		defer w.mu.Unlock()
		if !strings.Contains(w.out.String(), name) {
			return fmt.Errorf("has not seen table %s", name)
		}
		return nil
	})
}

// parseMonitor reads what "nft monitor" prints: add or delete, what, family, table, chain.
func parseMonitor(text string) []RuleChange {
	var changes []RuleChange
	for s := bufio.NewScanner(strings.NewReader(text)); s.Scan(); {
		f := strings.Fields(s.Text())
		if len(f) < 4 || !slices.Contains([]string{"add", "create", "insert", "replace", "delete"}, f[0]) ||
			strings.HasPrefix(f[3], canaryTable) || f[3] == probeTable {
			continue
		}
		c := RuleChange{Add: f[0] != "delete", What: f[1], Table: f[3], Text: s.Text()}
		if len(f) > 4 && f[1] != "table" {
			c.Chain = f[4]
		}
		changes = append(changes, c)
	}
	return changes
}
