package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/landfall-lb/landfall/ctl/explain"
	"github.com/landfall-lb/landfall/internal/kube"
	"github.com/landfall-lb/landfall/internal/lb"
)

const (
	// drainEvery is the time between two questions to a node that drains. It is drained once it has
	// said drainQuiet times in a row that nothing is left.
	drainEvery = time.Second
	drainQuiet = 2
	// barWidth is how many characters the progress bar has.
	barWidth = 24
)

// nodeKinds are the names of Nodes' kind.
var nodeKinds = []string{"node", "nodes", "no"}

// drainFlags are the flags of drain.
type drainFlags struct {
	timeout time.Duration
	force   bool
	noWait  bool
}

func drainCommand(o *options) *cobra.Command {
	var f drainFlags
	cmd := &cobra.Command{
		Use: "drain NODE", Short: "Move addresses away from a node, and wait until no client's connection passes it",
		Long: "Move addresses away from a node, and wait until no client's connection passes it. Other nodes take over " +
			"its addresses, and new connections with them; open ones continue over the node until they end. The node " +
			"keeps the label " + lb.LabelDrain + " until landfallctl undrain. Pods stay: kubectl drain moves them.",
		Example: "  landfallctl drain n1 && kubectl drain n1 --ignore-daemonsets\n  landfallctl drain n1 --timeout 1h",
		Args:    arguments(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return runDrain(cmd.Context(), *o, f, nameOf(args[0], nodeKinds...), cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	cmd.Flags().DurationVar(&f.timeout, "timeout", 10*time.Minute, "how long to wait; 0 is for ever")
	cmd.Flags().BoolVar(&f.force, "force", false, "drain the node even if no other one can announce its addresses")
	cmd.Flags().BoolVar(&f.noWait, "no-wait", false, "set the label, and do not wait")
	cmd.ValidArgsFunction = o.completeNames(nodeNames)
	o.addOutput(cmd, "json", "yaml")
	return cmd
}

func undrainCommand(o *options) *cobra.Command {
	cmd := &cobra.Command{
		Use: "undrain NODE", Short: "Let a node announce addresses again after a drain",
		Example: "  landfallctl undrain n1",
		Args:    arguments(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return runUndrain(cmd.Context(), *o, nameOf(args[0], nodeKinds...), cmd.OutOrStdout())
		},
	}
	cmd.ValidArgsFunction = o.completeNames(nodeNames)
	o.addOutput(cmd, "json", "yaml")
	return cmd
}

// marked is what drain --no-wait and undrain have done.
type marked struct {
	Node string `json:"node"`
	// Drain says whether the Node has the label landfall.dev/drain.
	Drain bool `json:"drain"`
}

func runUndrain(ctx context.Context, o options, node string, stdout io.Writer) error {
	ctx, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	client, _, err := o.connect(ctx)
	if err != nil {
		return err
	}
	if err := client.LabelNode(ctx, node, lb.LabelDrain, nil); err != nil {
		return o.late(ctx, client, err)
	}
	return write(stdout, o.output, marked{Node: node},
		node+" may announce addresses again. Those that another node has taken over stay there.\n")
}

func runDrain(ctx context.Context, o options, f drainFlags, node string, stdout, stderr io.Writer) error {
	short, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	client, server, err := o.connect(short)
	if err != nil {
		return err
	}
	g := newGatherer(client, server, o)
	if err := g.read(short); err != nil {
		return o.late(short, client, err)
	}
	if err := drainable(g.cluster, node); err != nil && !f.force {
		return err
	}
	if err := readable(g.cluster); err != nil && !f.noWait {
		return err
	}
	if err := client.LabelNode(short, node, lb.LabelDrain, new("true")); err != nil {
		return o.late(short, client, err)
	}
	if f.noWait {
		return write(stdout, o.output, marked{Node: node, Drain: true},
			fmt.Sprintf("%[1]s gives its addresses away. landfallctl undrain %[1]s ends that.\n", node))
	}
	if f.timeout > 0 {
		ctx, cancel = context.WithTimeoutCause(ctx, f.timeout, errTimeout)
		defer cancel()
	}
	progress := newProgress(unfiltered(stderr))
	d := drainer{began: time.Now(), now: time.Now, show: progress.show,
		tell: func(p explain.Parting) { progress.say(partingText(node, p)) },
		ask:  func(ctx context.Context) drainState { return g.drainState(ctx, node) },
		wait: func(ctx context.Context) error {
			select {
			case <-ctx.Done():
				return context.Cause(ctx)
			case <-time.After(drainEvery):
				return nil
			}
		}}
	last, err := d.run(ctx)
	progress.end()
	last.Node = node
	if err := write(stdout, o.output, last, last.text(node)); err != nil {
		return err
	}
	if err != nil && !errors.Is(err, errTimeout) {
		return fmt.Errorf("%s stays drained, until landfallctl undrain %s: %w", node, node, err)
	}
	return last.outcome(node)
}

// readable returns what keeps landfallctl from asking the programs on a node.
func readable(c explain.Cluster) error {
	if c.NoPods != "" {
		return fmt.Errorf("%s, or use --force --no-wait", c.NoPods)
	}
	for _, u := range c.Unread {
		if u.What == "nodes" || u.What == "pods" {
			return fmt.Errorf("%s: %s, or use --force --no-wait", u.Why, u.Grant)
		}
	}
	return nil
}

// drainable returns why a node should not be drained: there is none, or no other one can announce.
func drainable(c explain.Cluster, node string) error {
	if err := readable(c); err != nil {
		return err
	}
	if _, ok := c.Nodes[node]; !ok {
		return fmt.Errorf("there is no Node %s", node)
	}
	if !c.Agents[node].Speaker.There {
		return nil // it announces nothing
	}
	for name := range c.Agents {
		if name != node && c.Announces(name) {
			return nil
		}
	}
	return fmt.Errorf("no other node can announce the addresses of %s: each is not ready, drained or excluded, or has "+
		"no speaker that runs; --force drains it all the same", node)
}

// errTimeout ends the wait for a node that drains.
var errTimeout = errors.New("not drained in time")

// drainState is what is left on a node that drains.
type drainState struct {
	Node string `json:"node"`
	// Done is set once nothing is left.
	Done bool `json:"done"`
	// Answering counts the VIPs that the node still answers for over ARP or NDP, Routes the routes that
	// its peers still hear.
	Answering int `json:"answering"`
	Routes    int `json:"routes"`
	// Leaving counts the VIPs whose planned end over BGP is not over. Routers that are away hear none of them, and hear
	// them again once they are back.
	Leaving int `json:"leaving"`
	// Parting are the VIPs that the node goes on announcing, as no other node does.
	Parting explain.Parting `json:"parting,omitzero"`
	// Connections counts the open TCP connections of clients outside the cluster to VIPs through the
	// node; Services has those with the most.
	Connections int                `json:"connections"`
	Services    []drainConnections `json:"services,omitempty"`
	// Unknown says why not all of that is known; Denied, that it will not be.
	Unknown string `json:"unknown,omitempty"`
	Denied  bool   `json:"denied,omitempty"`
}

// drainConnections are the connections of one Service, as landfall-proxy counts them.
type drainConnections struct {
	Service string `json:"service"`
	Count   int    `json:"count"`
	Clients []struct {
		Address string `json:"address"`
		Count   int    `json:"count"`
	} `json:"clients"`
}

// left reports whether anything is, as far as it is known.
func (s drainState) left() bool {
	return s.Unknown != "" || s.Answering+s.Routes+s.Leaving+s.Connections > 0
}

// drainer waits for a node that drains.
type drainer struct {
	began time.Time
	now   func() time.Time
	ask   func(context.Context) drainState
	show  func(bar, summary string, since time.Duration)
	tell  func(explain.Parting) // is called once
	wait  func(context.Context) error
}

// run waits until nothing is left, or it cannot be known, and returns what is left.
func (d drainer) run(ctx context.Context) (last drainState, err error) {
	most, quiet, told := 0, 0, false
	last.Unknown = "its programs have not answered yet"
	for {
		state := d.ask(ctx)
		if ctx.Err() != nil {
			return last, context.Cause(ctx) // a question that was cut short says nothing
		}
		last = state
		most = max(most, last.Connections)
		if last.Parting.Count > 0 && !told {
			d.tell(last.Parting)
			told = true
		}
		d.show(last.bar(most), last.summary(), d.now().Sub(d.began))
		if quiet++; last.left() {
			quiet = 0
		}
		if quiet == drainQuiet {
			last.Done = true
			return last, nil
		}
		if last.Denied {
			return last, nil
		}
		if err := d.wait(ctx); err != nil {
			return last, err
		}
	}
}

// bar is full once nothing is left of the most connections that there were.
func (s drainState) bar(most int) string {
	full := barWidth
	if most > 0 {
		full = barWidth * (most - s.Connections) / most
	}
	if s.left() {
		full = min(full, barWidth-1)
	}
	return "[" + strings.Repeat("#", full) + strings.Repeat(".", barWidth-full) + "]"
}

func (s drainState) summary() string {
	parts := []string{count(s.Connections, "connection")}
	if s.Answering > 0 {
		parts = append(parts, count(s.Answering, "address")+" announced")
	}
	if s.Routes > 0 {
		parts = append(parts, count(s.Routes, "route")+" announced")
	}
	if s.Routes == 0 && s.Leaving > 0 {
		parts = append(parts, count(s.Leaving, "address")+" waiting for another node")
	}
	if s.Unknown != "" {
		parts = append(parts, s.Unknown)
	}
	return strings.Join(parts, ", ")
}

// count is a number with its noun.
func count(n int, noun string) string {
	switch {
	case n == 1:
		return "1 " + noun
	case strings.HasSuffix(noun, "s"):
		return fmt.Sprint(n, " ", noun, "es")
	}
	return fmt.Sprint(n, " ", noun, "s")
}

// partingText says what a drain waits for that does not come by itself.
func partingText(node string, p explain.Parting) string {
	return fmt.Sprintf("no other node announces %s: %[2]s goes on until one does; kubectl drain %[2]s "+
		"--ignore-daemonsets moves their pods", p.Addresses(), node)
}

// text says what the end of a drain is.
func (s drainState) text(node string) string {
	if s.Done {
		return fmt.Sprintf("%[1]s is drained: it announces nothing, and no client's connection passes it.\n"+
			"landfallctl undrain %[1]s gives it back.\n", node)
	}
	var out strings.Builder
	fmt.Fprintf(&out, "%s is not drained yet: %s\n", node, s.summary())
	for _, service := range s.Services {
		var clients []string
		for _, c := range service.Clients {
			clients = append(clients, fmt.Sprintf("%s: %d", c.Address, c.Count))
		}
		fmt.Fprintf(&out, "  Service %s: %s (%s)\n", service.Service, count(service.Count, "connection"),
			strings.Join(clients, ", "))
	}
	if s.Parting.Count > 0 {
		fmt.Fprintf(&out, "  %s\n", partingText(node, s.Parting))
	}
	if s.Answering+s.Routes+s.Leaving > 0 {
		fmt.Fprintf(&out, "  Why it still announces: landfallctl explain node %s\n", node)
	}
	fmt.Fprintf(&out, "It keeps the label %s. Wait on: landfallctl drain %[2]s. Give up: landfallctl undrain %[2]s\n",
		lb.LabelDrain, node)
	return out.String()
}

// outcome is the error that gives the exit code.
func (s drainState) outcome(node string) error {
	switch {
	case s.Done:
		return nil
	case s.Unknown != "":
		return fmt.Errorf("%s: %s", node, s.Unknown)
	}
	return errWrong
}

// drainState asks the programs of a node what is left on it.
func (g *gatherer) drainState(ctx context.Context, node string) (s drainState) {
	if g.stale {
		if pods, err := landfallPods(ctx, g.client, g.opts.home()); err == nil {
			g.pods = pods // one that restarts is another one
		}
	}
	defer func() { g.stale = s.Unknown != "" }()
	unknown := func(program string, err error) {
		if err != nil {
			s.Unknown = fmt.Sprintf("the %s does not say what is left: %v", program, err)
			s.Denied = s.Denied || errors.As(err, new(*kube.Denied))
		}
	}
	for _, name := range []string{"speaker", "proxy"} {
		unknown(name, g.missing(ctx, node, name))
	}
	for _, p := range g.pods {
		for _, c := range p.Containers {
			if p.Node != node {
				continue
			}
			switch program(c) {
			case "landfall-speaker":
				var said struct {
					explain.SpeakerStatus
					Answering *int `json:"answering"`
				}
				err := g.status(ctx, p, c, nothing, &said)
				if err == nil && said.Answering == nil {
					err = errors.New("it is of an older version")
				}
				if err == nil {
					s.Answering, s.Leaving, s.Parting = *said.Answering, said.BGP.Leaving, said.Parting
				}
				for _, peer := range said.BGP.Peers {
					if peer.Session != nil {
						s.Routes += peer.Session.Prefixes
					}
				}
				unknown("speaker", err)
			case "landfall-proxy":
				var said struct {
					Total    *int               `json:"total"`
					Error    string             `json:"error"`
					Services []drainConnections `json:"services"`
				}
				err := g.status(ctx, p, c, connectionsOnly, &said)
				switch {
				case err != nil:
				case said.Error != "":
					err = errors.New(said.Error)
				case said.Total == nil:
					err = errors.New("it is of an older version")
				default:
					s.Connections, s.Services = *said.Total, said.Services
				}
				unknown("proxy", err)
			}
		}
	}
	return s
}

// missing returns an error if a node that drains lacks a program that it has had, or that it may be about to get:
// while its pod is replaced, what is left is not known.
func (g *gatherer) missing(ctx context.Context, node, name string) error {
	nodes, waiting := map[string]bool{}, 0 // those with the program, and how many pods wait for a node
	for _, p := range g.pods {
		for _, c := range p.Containers {
			switch {
			case program(c) != "landfall-"+name:
			case p.Node == "":
				waiting++
			default:
				nodes[p.Node] = true
			}
		}
	}
	switch {
	case nodes[node]:
		g.had[name] = true
		return nil
	case g.had[name]:
		return errors.New("it is not there")
	case len(nodes) == 0:
		return nil // Landfall runs without it
	}
	sets, err := g.client.Workloads(ctx, g.opts.home(), "app.kubernetes.io/component in (node,"+name+")")
	if err != nil {
		return fmt.Errorf("it is not there, and whether it is to come is not known: %w", err)
	}
	wanted := 0
	for _, w := range sets {
		if w.Kind == "DaemonSet" {
			wanted += w.Wanted
		}
	}
	if len(nodes)+waiting < wanted {
		return errors.New("it is not there")
	}
	return nil // it is not to run on this node
}

// connectionsOnly is the value of --status-only that asks a proxy for connections.
const connectionsOnly = "connections"

// progress shows how far a wait is: on a terminal one line that is written again and again, else a
// line for each change.
type progress struct {
	to       io.Writer
	terminal bool
	before   string
}

func newProgress(to io.Writer) *progress {
	file, ok := to.(*os.File)
	return &progress{to: to, terminal: ok && term.IsTerminal(int(file.Fd()))}
}

// show shows a summary, in which a program of the node may have its say.
func (p *progress) show(bar, summary string, since time.Duration) {
	summary = plain(oneLine(summary))
	switch {
	case p.terminal:
		fmt.Fprintf(p.to, "\r\x1b[K%s %s, %s", bar, summary, since.Truncate(time.Second))
	case summary != p.before:
		fmt.Fprintf(p.to, "%s, %s\n", summary, since.Truncate(time.Second))
	}
	p.before = summary
}

// say shows a line that stays.
func (p *progress) say(line string) {
	if p.terminal {
		fmt.Fprint(p.to, "\r\x1b[K")
	}
	fmt.Fprintln(p.to, plain(oneLine(line)))
}

// end ends the line on a terminal.
func (p *progress) end() {
	if p.terminal {
		fmt.Fprintln(p.to)
	}
}
