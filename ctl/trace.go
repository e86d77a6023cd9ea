package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/landfall-lb/landfall/internal/kube"
	"github.com/landfall-lb/landfall/internal/lb"
)

// traceFlags are the flags of the command trace.
type traceFlags struct {
	nodes    []string
	allNodes bool
	in       string
}

func traceCommand(o *options) *cobra.Command {
	var f traceFlags
	cmd := &cobra.Command{
		Use:   "trace FROM[:PORT] TO[:PORT[/PROTOCOL]]",
		Short: "Walk a packet through the rules that are in the kernel of each node",
		Long: "Walk a packet through the rules that are in the kernel of each node, and say where it ends and by which " +
			"rules. No packet is sent. FROM is an IP address. TO is an address of a Service or a node, or " +
			"svc/[NAMESPACE/]NAME, which stands for the first address of the Service in FROM's family; without a port it is " +
			"the Service's first one. PROTOCOL is tcp, udp, sctp or icmp, which is a ping.\n\n" +
			"A packet from a node or a pod is walked on that node. Others are walked on the nodes that " +
			"announce the address, and on all nodes where none does.",
		Example: "  landfallctl trace 203.0.113.7 svc/shop/web\n" +
			"  landfallctl trace 203.0.113.7 192.0.2.10:443/tcp -o wide\n" +
			"  landfallctl trace 10.0.0.5 10.96.0.10:53/udp --node n1",
		Args: arguments(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			return runTrace(cmd.Context(), *o, f, args[0], args[1], cmd.OutOrStdout())
		},
	}
	cmd.Flags().StringArrayVar(&f.nodes, "node", nil, "`name` of a node to walk on, may be repeated")
	cmd.Flags().BoolVar(&f.allNodes, "all-nodes", false, "walk on all nodes")
	cmd.Flags().StringVar(&f.in, "in-interface", "",
		"`name` of the interface where the packet comes in (default: the one that leads to FROM)")
	cmd.MarkFlagsMutuallyExclusive("node", "all-nodes")
	cmd.ValidArgsFunction = o.completeService(1, "svc/")
	o.completeNodes(cmd)
	o.addOutput(cmd, "json", "yaml", "wide")
	return cmd
}

// completeNodes completes the flag --node.
func (o *options) completeNodes(cmd *cobra.Command) {
	err := cmd.RegisterFlagCompletionFunc("node", func(cmd *cobra.Command, _ []string, begun string) ([]string,
		cobra.ShellCompDirective) {
		return o.completeNames(nodeNames)(cmd, nil, begun)
	})
	if err != nil {
		panic(err) // the flag is not there
	}
}

// completeService completes the argument at a place with Services, each behind a prefix.
func (o *options) completeService(place int, prefix string) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, begun string) ([]string, cobra.ShellCompDirective) {
		if len(args) != place {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		found, directive := o.completeNames(serviceNames)(cmd, nil, begun)
		for i := range found {
			found[i] = prefix + found[i]
		}
		return found, directive
	}
}

// destination is TO as it was written.
type destination struct {
	end      netip.AddrPort // not valid for a Service
	service  string         // [NAMESPACE/]NAME
	port     string         // of a Service: its name or number; "" for the first one
	protocol lb.Protocol    // "" for what the Service has, or TCP
}

// parseDestination reads TO.
func parseDestination(s string) (d destination, err error) {
	name, isService := strings.CutPrefix(s, "svc/")
	if !isService {
		rest, protocol, err := lb.CutProtocol(s)
		if err != nil {
			return d, err
		}
		if d.end, err = lb.ParseEnd(rest); err != nil {
			return destination{}, fmt.Errorf("%w, nor svc/[NAMESPACE/]NAME", err)
		}
		d.protocol = protocol
		return d, nil
	}
	var rest string
	name, rest, _ = strings.Cut(name, ":")
	if rest != "" {
		if d.port, d.protocol, err = lb.CutProtocol(rest); err != nil {
			return destination{}, err
		}
	}
	namespace, only, both := strings.Cut(name, "/")
	if name == "" || both && (namespace == "" || only == "" || strings.Contains(only, "/")) {
		return destination{}, fmt.Errorf("%q is not svc/[NAMESPACE/]NAME[:PORT[/PROTOCOL]]", s)
	}
	d.service = name
	return d, nil
}

// at returns what a packet to d goes to: an address and a port of a Service of a family.
func (d destination) at(s lb.Service, family lb.Family) (end netip.AddrPort, p lb.Protocol, err error) {
	addr := d.end.Addr()
	if !addr.IsValid() {
		all := slices.Concat(s.VIPs(), s.ExternalIPs, s.ClusterIPs)
		i := slices.IndexFunc(all, func(a netip.Addr) bool { return lb.FamilyOf(a) == family })
		if i < 0 {
			return end, "", fmt.Errorf("the Service %s has no address of %s", s.Key, family)
		}
		addr = all[i]
	}
	if d.protocol == lb.TraceICMP {
		return netip.AddrPortFrom(addr, 0), d.protocol, nil
	}
	for _, port := range s.Ports {
		if (d.port == "" || d.port == port.Name || d.port == strconv.Itoa(int(port.Port))) &&
			(d.protocol == "" || d.protocol == port.Protocol) {
			return netip.AddrPortFrom(addr, port.Port), port.Protocol, nil
		}
	}
	if number, err := strconv.ParseUint(d.port, 10, 16); err == nil && number > 0 { // one that it does not have
		protocol := d.protocol
		if protocol == "" {
			protocol = lb.TCP
		}
		return netip.AddrPortFrom(addr, uint16(number)), protocol, nil
	}
	return end, "", fmt.Errorf("the Service %s has no port %s", s.Key,
		strings.TrimSpace(d.port+" "+string(d.protocol)))
}

// traced is what the command prints.
type traced struct {
	Packet  lb.TracePacket `json:"packet"`
	Service string         `json:"service,omitempty"`
	// Verdict is one line for people.
	Verdict string     `json:"verdict"`
	Nodes   []lb.Trace `json:"nodes"`
	// Unanswered are the nodes of which nothing is known.
	Unanswered []silent `json:"unanswered,omitempty"`
	// Pods are the names of the pods behind addresses of backends.
	Pods map[netip.Addr]string `json:"pods,omitempty"`
	// Notes say what could not be read.
	Notes []string `json:"notes,omitempty"`
}

func runTrace(ctx context.Context, o options, f traceFlags, from, to string, stdout io.Writer) error {
	source, err := lb.ParseEnd(from)
	if err != nil {
		return fmt.Errorf("FROM: %w", err)
	}
	d, err := parseDestination(to)
	if err != nil {
		return fmt.Errorf("TO: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	client, server, err := o.connect(ctx)
	if err != nil {
		return err
	}
	result, err := tracePacket(ctx, newGatherer(client, server, o), f, source, d)
	if err != nil {
		return o.late(ctx, client, err)
	}
	if err := write(stdout, o.output, result, result.text(o.output == "wide")); err != nil {
		return err
	}
	return result.outcome()
}

// tracePacket finds out which packet is meant, and asks the nodes that meet it.
func tracePacket(ctx context.Context, g *gatherer, f traceFlags, source netip.AddrPort, d destination) (r traced,
	err error) {
	service, found, err := g.serviceOf(ctx, d)
	if err != nil && (d.service != "" || d.end.Port() == 0 && d.protocol != lb.TraceICMP) {
		return r, err
	} else if err != nil {
		r.Notes = append(r.Notes, err.Error())
	}
	r.Packet = lb.TracePacket{Source: source, Destination: d.end, Protocol: d.protocol, Interface: f.in}
	switch {
	case !found && d.service != "":
		return r, fmt.Errorf("there is no Service %s", service.Key)
	case found && d.end.Port() == 0:
		r.Packet.Destination, r.Packet.Protocol, err = d.at(service, lb.FamilyOf(source.Addr()))
		if err != nil {
			return r, err
		}
	case d.protocol == "":
		r.Packet.Protocol = lb.TCP
	}
	if err := r.Packet.Check(); err != nil {
		return r, err
	}
	if err := g.readPods(ctx); err != nil {
		return r, err
	}
	if found {
		r.Service = service.Key.String()
		if r.Pods, err = g.client.EndpointPods(ctx, service.Key); err != nil {
			r.Notes = append(r.Notes, "pods have no names here: "+err.Error())
		}
	}
	nodes := f.nodes
	if len(nodes) == 0 && !f.allNodes {
		if nodes, err = g.meeting(ctx, source.Addr(), service, r.Packet.Destination.Addr()); err != nil {
			r.Notes = append(r.Notes, err.Error())
		}
	}
	arguments := []string{"trace", "--from=" + lb.EndText(source), "--to=" + lb.EndText(r.Packet.Destination),
		"--protocol=" + string(r.Packet.Protocol)}
	if f.in != "" {
		arguments = append(arguments, "--in-interface="+f.in)
	}
	r.Nodes, r.Unanswered, err = askProxies[lb.Trace](ctx, g, nodes, arguments...)
	if err != nil {
		return r, err
	}
	if len(r.Nodes) == 0 {
		return r, fmt.Errorf("no node answered: %s: %s", r.Unanswered[0].Node, r.Unanswered[0].Why)
	}
	r.Verdict = r.line()
	return r, nil
}

// serviceOf reads the Service that TO names, or the one that has its address; found is false if there is
// none.
func (g *gatherer) serviceOf(ctx context.Context, d destination) (s lb.Service, found bool, err error) {
	if d.service != "" {
		if s.Key, err = g.opts.serviceKey(d.service); err != nil {
			return s, false, err
		}
		key := s.Key
		s, found, err = g.client.OneService(ctx, key)
		s.Key = key
		return s, found, err
	}
	services, err := g.client.AllServices(ctx)
	if err != nil {
		return s, false, reading("services", err)
	}
	return serviceAt(services, d.end, d.protocol)
}

// serviceAt returns the Service that has an address, and, where several share it, the port.
func serviceAt(services []lb.Service, end netip.AddrPort, p lb.Protocol) (s lb.Service, found bool, err error) {
	for _, one := range services {
		if !slices.Contains(slices.Concat(one.VIPs(), one.ExternalIPs, one.ClusterIPs), end.Addr()) {
			continue
		}
		if !found {
			s, found = one, true
		}
		if slices.ContainsFunc(one.Ports, func(port lb.ServicePort) bool {
			return port.Port == end.Port() && (p == "" || p == port.Protocol)
		}) {
			return one, true, nil
		}
	}
	if !found && end.Port() == 0 && p != lb.TraceICMP {
		return s, false, fmt.Errorf("TO: %s is of no Service: it needs a port", end.Addr())
	}
	return s, found, nil
}

// meeting returns the nodes that meet a packet first: the one that sends it, or those that announce its
// destination; nil for all.
func (g *gatherer) meeting(ctx context.Context, source netip.Addr, s lb.Service, to netip.Addr) ([]string, error) {
	nodes, err := g.client.AllNodes(ctx)
	if err != nil {
		err = fmt.Errorf("which node sends packets from %s is not known: %w", source, err)
	}
	node, failed := g.sender(ctx, nodes, source)
	if node != "" {
		return []string{node}, failed
	}
	if node = nodeOf(nodes, to); node != "" { // a node port
		return []string{node}, nil
	}
	names, all := announcingNodes(s, func(a lb.Announcement) bool { return a.VIP == to })
	if len(names) == 0 || !all {
		names = nil
	}
	return names, err
}

// sender returns the node that sends packets from an address; "" if none is known to. The pod that has the
// address says more than spec.podCIDRs: some network plugins give pods other addresses.
func (g *gatherer) sender(ctx context.Context, nodes []kube.NodeState, source netip.Addr) (node string, err error) {
	for _, n := range nodes {
		if slices.Contains(n.Addresses, source) {
			return n.Name, nil
		}
	}
	if node, err = g.client.NodeOfPod(ctx, source); node != "" {
		return node, nil
	}
	if node = nodeOf(nodes, source); node == "" || err == nil {
		return node, nil
	}
	return node, fmt.Errorf("which pod has the address %s is not known; %s has it in its spec.podCIDRs: %w", source, node,
		err)
}

// nodeOf returns the node that has an address, or to whose pods it belongs; "" if there is none.
func nodeOf(nodes []kube.NodeState, addr netip.Addr) string {
	for _, n := range nodes {
		if slices.Contains(n.Addresses, addr) || slices.Contains(n.ExternalAddresses, addr) ||
			slices.ContainsFunc(n.PodCIDRs, func(p netip.Prefix) bool { return p.Contains(addr) }) {
			return n.Name
		}
	}
	return ""
}

// outcome is the error that gives the exit code.
func (r traced) outcome() error {
	unknown := error(nil)
	for _, node := range r.Nodes {
		for _, way := range node.Ways {
			switch way.Verdict {
			case lb.TraceDelivered, lb.TraceRelayed, lb.TraceAnswered:
			case lb.TraceUnknown:
				unknown = fmt.Errorf("%s: a rule cannot be evaluated: %s", node.Node, way.Why)
			default:
				return errWrong
			}
		}
	}
	if unknown == nil && len(r.Unanswered) > 0 {
		return errors.New(strings.TrimSuffix(unansweredText(r.Unanswered), "\n"))
	}
	return unknown
}
