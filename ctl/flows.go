package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/landfall-lb/landfall/internal/kube"
	"github.com/landfall-lb/landfall/internal/lb"
)

const (
	// flowsShown is how many connections are shown by default, maxFlows how many at most.
	flowsShown = 50
	maxFlows   = 10_000
	// maxTargets bounds what one command asks for: it travels in the address of a request.
	maxTargets = 100
)

func flowsCommand(o *options) *cobra.Command {
	var nodes []string
	var limit int
	cmd := &cobra.Command{
		Use: "flows [NAMESPACE/]NAME|ADDRESS", Short: "Show the connections of a Service on all nodes",
		Long: "Show the connections of a Service, or to an address, that the nodes' conntrack has: clients, backends, " +
			"states, and those that reach their node by way of another one, as they are older than the last move of the " +
			"address.",
		Example: "  landfallctl flows web -n shop\n  landfallctl flows 192.0.2.10 -o wide --limit 500",
		Args:    arguments(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return runFlows(cmd.Context(), *o, args[0], nodes, limit, cmd.OutOrStdout())
		},
	}
	cmd.Flags().StringArrayVar(&nodes, "node", nil, "`name` of a node to ask, may be repeated (default: all)")
	cmd.Flags().IntVar(&limit, "limit", flowsShown, "how many connections to show; all are counted")
	cmd.ValidArgsFunction = o.completeNames(serviceNames)
	o.completeNodes(cmd)
	o.addOutput(cmd, "json", "yaml", "wide")
	return cmd
}

// flowing is what the command prints.
type flowing struct {
	// Of is what was asked for: a Service or an address.
	Of string `json:"of"`
	// Total counts all connections, Flows are the first of them.
	Total int        `json:"total"`
	Flows []nodeFlow `json:"flows"`
	// Counts are those of all, by backend and state.
	Counts     []flowCount `json:"counts,omitempty"`
	Unanswered []silent    `json:"unanswered,omitempty"`
	Notes      []string    `json:"notes,omitempty"`

	accounted bool
	answered  int
}

// nodeFlow is a connection that a node has.
type nodeFlow struct {
	Node string `json:"node"`
	lb.Flow
	Pod string `json:"pod,omitempty"`
	// RescuedBy are the nodes one of which passes the connection's packets on to this node, as they
	// announce the address now.
	RescuedBy []string `json:"rescuedBy,omitempty"`
}

// flowCount is how many connections to a backend are in a state.
type flowCount struct {
	Backend netip.AddrPort `json:"backend"`
	Pod     string         `json:"pod,omitempty"`
	State   string         `json:"state"`
	Count   int            `json:"count"`
	Nodes   map[string]int `json:"nodes"`
}

func runFlows(ctx context.Context, o options, name string, nodes []string, limit int, stdout io.Writer) error {
	if limit < 0 || limit > maxFlows {
		return fmt.Errorf("--limit: %d is not between 0 and %d", limit, maxFlows)
	}
	ctx, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	client, server, err := o.connect(ctx)
	if err != nil {
		return err
	}
	f, err := gatherFlows(ctx, newGatherer(client, server, o), name, nodes, limit)
	if err != nil {
		return o.late(ctx, client, err)
	}
	if err := write(stdout, o.output, f, f.text(o.output == "wide")); err != nil {
		return err
	}
	if len(f.Unanswered) > 0 {
		return errors.New(strings.TrimSuffix(unansweredText(f.Unanswered), "\n"))
	}
	return nil
}

// gatherFlows reads the Service and asks the nodes.
func gatherFlows(ctx context.Context, g *gatherer, name string, nodes []string, limit int) (f flowing, err error) {
	var service lb.Service
	var targets []lb.FlowTarget
	if addr, err := netip.ParseAddr(name); err == nil {
		addr = addr.Unmap()
		f.Of, targets = addr.String(), []lb.FlowTarget{{Addr: addr}}
		services, err := g.client.AllServices(ctx)
		if err != nil {
			f.Notes = append(f.Notes, "of which Service "+addr.String()+" is, is not known: "+err.Error())
		}
		if at, found, err := serviceAt(services, netip.AddrPortFrom(addr, 0), lb.TraceICMP); err == nil && found {
			service = at
			f.Of = fmt.Sprintf("%s (Service %s)", addr, service.Key)
		}
	} else {
		key, err := g.opts.serviceKey(strings.TrimPrefix(name, "svc/"))
		if err != nil {
			return f, err
		}
		found := false
		if service, found, err = g.client.OneService(ctx, key); err != nil {
			return f, err
		} else if !found {
			return f, fmt.Errorf("there is no Service %s", key)
		}
		f.Of, targets = "Service "+key.String(), targetsOf(service)
	}
	switch {
	case len(targets) == 0:
		return f, fmt.Errorf("%s has no address and no node port", f.Of)
	case len(targets) > maxTargets:
		f.Notes = append(f.Notes, fmt.Sprintf("only %d of %d destinations are asked for", maxTargets, len(targets)))
		targets = targets[:maxTargets]
	}
	if err := g.readPods(ctx); err != nil {
		return f, err
	}
	pods := map[netip.Addr]string{}
	if service.Key != (lb.Key{}) {
		if pods, err = g.client.EndpointPods(ctx, service.Key); err != nil {
			f.Notes = append(f.Notes, "pods have no names here: "+err.Error())
		}
	}
	cluster, err := g.client.AllNodes(ctx)
	if err != nil {
		f.Notes = append(f.Notes, "which connections were rescued is not known: "+err.Error())
	}
	arguments := []string{"flows", fmt.Sprintf("--limit=%d", limit)}
	for _, t := range targets {
		arguments = append(arguments, "--to="+t.String())
	}
	if len(nodes) == 0 {
		nodes = nil
	}
	answers, unanswered, err := askProxies[lb.Flows](ctx, g, nodes, arguments...)
	if err != nil {
		return f, err
	}
	if len(answers) == 0 {
		return f, fmt.Errorf("no node answered: %s: %s", unanswered[0].Node, unanswered[0].Why)
	}
	f.Unanswered = unanswered
	f.add(answers, pods, limit, func(node string, flow lb.Flow) []string { return rescuers(node, flow, service, cluster) })
	return f, nil
}

// targetsOf returns where clients of a Service connect to.
func targetsOf(s lb.Service) (all []lb.FlowTarget) {
	for _, addr := range slices.Concat(s.VIPs(), s.ExternalIPs, s.ClusterIPs) {
		for _, port := range s.Ports {
			all = append(all, lb.FlowTarget{Addr: addr, Port: port.Port, Protocol: port.Protocol})
		}
	}
	for _, port := range s.Ports {
		if port.NodePort != 0 {
			all = append(all, lb.FlowTarget{Port: port.NodePort, Protocol: port.Protocol})
		}
	}
	return all
}

// rescuers returns the nodes one of which passes on the packets of a connection, none if they come to its
// node themselves: the node does not announce the VIP, and the client is neither a node nor a pod, whose
// packets their own node takes.
func rescuers(node string, flow lb.Flow, s lb.Service, cluster []kube.NodeState) []string {
	if len(cluster) == 0 || nodeOf(cluster, flow.Client.Addr()) != "" || !slices.Contains(s.VIPs(), flow.To.Addr()) {
		return nil
	}
	names, all := announcingNodes(s, func(a lb.Announcement) bool { return a.VIP == flow.To.Addr() })
	if !all || slices.Contains(names, node) {
		return nil
	}
	return names
}

// add joins the answers of the nodes, with at most limit connections.
func (f *flowing) add(answers []lb.Flows, pods map[netip.Addr]string, limit int,
	rescued func(node string, flow lb.Flow) []string) {
	type at struct {
		backend netip.AddrPort
		state   string
	}
	counts := map[at]*flowCount{}
	f.Flows = []nodeFlow{}
	for _, answer := range answers {
		f.answered++
		f.Total += answer.Total
		f.accounted = f.accounted || answer.Accounted
		for _, flow := range answer.Flows {
			f.Flows = append(f.Flows, nodeFlow{Node: answer.Node, Flow: flow, Pod: pods[flow.Backend.Addr()],
				RescuedBy: rescued(answer.Node, flow)})
		}
		for _, c := range answer.Counts {
			key := at{c.Backend, c.State}
			if counts[key] == nil {
				counts[key] = &flowCount{Backend: c.Backend, Pod: pods[c.Backend.Addr()], State: c.State, Nodes: map[string]int{}}
			}
			counts[key].Count += c.Count
			counts[key].Nodes[answer.Node] += c.Count
		}
	}
	for _, c := range counts {
		f.Counts = append(f.Counts, *c)
	}
	slices.SortFunc(f.Counts, func(a, b flowCount) int {
		return cmp.Or(a.Backend.Compare(b.Backend), cmp.Compare(b.Count, a.Count), cmp.Compare(a.State, b.State))
	})
	slices.SortFunc(f.Flows, func(a, b nodeFlow) int {
		return cmp.Or(a.Client.Compare(b.Client), a.To.Compare(b.To), cmp.Compare(a.Node, b.Node),
			a.Backend.Compare(b.Backend))
	})
	f.Flows = f.Flows[:min(len(f.Flows), limit)]
}

// countsShown is how many lines the summary has.
const countsShown = 40

// text renders the answer; wide with counters and when conntrack forgets a connection.
func (f flowing) text(wide bool) string {
	var out strings.Builder
	fmt.Fprintf(&out, "%s: %s on %s\n", f.Of, count(f.Total, "connection"), count(f.answered, "node"))
	if len(f.Counts) > 0 {
		table := tabwriter.NewWriter(&out, 0, 0, 2, ' ', 0)
		fmt.Fprint(table, "\nBACKEND\tPOD\tSTATE\tCONNECTIONS\tNODES\n")
		for _, c := range f.Counts[:min(len(f.Counts), countsShown)] {
			fmt.Fprintf(table, "%s\t%s\t%s\t%d\t%s\n", c.Backend, cmp.Or(c.Pod, "-"), c.State, c.Count, onNodes(c.Nodes))
		}
		_ = table.Flush() // strings take everything
		if more := len(f.Counts) - countsShown; more > 0 {
			fmt.Fprintf(&out, "and %d more backends and states\n", more)
		}
	}
	if len(f.Flows) > 0 {
		f.table(&out, wide)
		if more := f.Total - len(f.Flows); more > 0 {
			fmt.Fprintf(&out, "and %d more connections; --limit shows more\n", more)
		}
	}
	if wide && len(f.Flows) > 0 && !f.accounted {
		fmt.Fprint(&out, "\nnote: packets are not counted: net.netfilter.nf_conntrack_acct is 0 on the nodes\n")
	}
	for _, note := range f.Notes {
		fmt.Fprintf(&out, "\nnote: %s\n", note)
	}
	if len(f.Unanswered) > 0 {
		fmt.Fprintf(&out, "\n%s", unansweredText(f.Unanswered))
	}
	return out.String()
}

func (f flowing) table(out *strings.Builder, wide bool) {
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprint(table, "\nCLIENT\tTO\tBACKEND\tPOD\tNODE\tSTATE\tRESCUED BY")
	if wide {
		fmt.Fprint(table, "\tMASQUERADED\tPACKETS\tBYTES\tEXPIRES")
	}
	fmt.Fprintln(table)
	for _, flow := range f.Flows {
		by := "-"
		if len(flow.RescuedBy) > 0 {
			by = some(flow.RescuedBy)
		}
		fmt.Fprintf(table, "%s\t%s/%s\t%s\t%s\t%s\t%s\t%s", flow.Client, flow.To, flow.Protocol.Lower(), flow.Backend,
			cmp.Or(flow.Pod, "-"), flow.Node, flow.State, by)
		if wide {
			packets, bytes := "-", "-"
			if f.accounted {
				packets, bytes = fmt.Sprint(flow.Packets), fmt.Sprint(flow.Bytes)
			}
			fmt.Fprintf(table, "\t%v\t%s\t%s\t%ds", flow.Masqueraded, packets, bytes, flow.Expires)
		}
		fmt.Fprintln(table)
	}
	_ = table.Flush() // strings take everything
}

// onNodes lists nodes with their counts, the most first.
func onNodes(counts map[string]int) string {
	names := sortedKeys(counts)
	slices.SortStableFunc(names, func(a, b string) int { return cmp.Compare(counts[b], counts[a]) })
	for i, name := range names {
		names[i] = fmt.Sprintf("%s (%d)", name, counts[name])
	}
	return some(names)
}
