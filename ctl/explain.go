package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"net/netip"
	"slices"
	"strings"
	"sync"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/landfall-lb/landfall/ctl/explain"
	"github.com/landfall-lb/landfall/internal/kube"
	"github.com/landfall-lb/landfall/internal/lb"
)

const (
	// askFirst is how many nodes an explanation asks at first, askMore how many more that have another
	// reason than those. One speaker knows the reasons of all.
	askFirst = 2
	askMore  = 4
)

func explainCommand(o *options) *cobra.Command {
	parent := &cobra.Command{
		Use: "explain", DisableFlagsInUseLine: true, Short: "Say why something is not reachable, and what cures it",
		Long: "Say why something is not reachable, and what cures it. The first line is the verdict; a checklist of the " +
			"whole " +
			"path follows, then the most likely cause and its cure.",
		Example: "  landfallctl explain svc web -n shop\n  landfallctl explain svc/shop/web\n" +
			"  landfallctl explain ip 192.0.2.10\n  landfallctl explain reason NoInterface",
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return cmd.Help()
			}
			kind, name, _ := strings.Cut(args[0], "/")
			of, _, err := cmd.Find([]string{kind})
			if err != nil || of == cmd || len(args) > 1 || name == "" {
				return fmt.Errorf("%q is not KIND NAME or KIND/NAME, where KIND is svc, ip, node, pool, peer or reason",
					strings.Join(args, " "))
			}
			return of.RunE(cmd, []string{name})
		},
	}
	o.addOutput(parent, "json", "yaml", "wide")
	for _, kind := range []struct {
		use, short string
		aliases    []string
		run        func(ctx context.Context, g *gatherer, name string) (explain.Verdict, error)
		names      func(ctx context.Context, o options, client *kube.Client) []string
	}{
		{"svc [NAMESPACE/]NAME", "Explain a Service: from its pool to the node that announces it",
			[]string{"service", "services"}, explainService, serviceNames},
		{"ip ADDRESS", "Explain an address: of which Service, Node or pool it is, and whether clients reach it", nil,
			explainIP, nil},
		{"node NAME", "Explain a node: its programs, and what keeps it from announcing and delivering",
			nodeKinds, explainNode, nodeNames},
		{"pool NAME", "Explain an IPAddressPool: whether it assigns addresses",
			[]string{"pools", "ipaddresspool", "ipaddresspools"}, explainPool, poolNames},
		{"peer NAME", "Explain a BGPPeer: why its sessions are down",
			[]string{"peers", "bgppeer", "bgppeers"}, explainPeer, peerNames},
	} {
		cmd := &cobra.Command{Use: kind.use, Short: kind.short, Aliases: kind.aliases, Args: arguments(1),
			RunE: func(cmd *cobra.Command, args []string) error {
				return runExplain(cmd.Context(), *o, cmd.OutOrStdout(), func(ctx context.Context, g *gatherer) (explain.Verdict,
					error) {
					return kind.run(ctx, g, args[0])
				})
			}}
		cmd.ValidArgsFunction = o.completeNames(kind.names)
		o.addOutput(cmd, "json", "yaml", "wide")
		parent.AddCommand(cmd)
	}
	parent.AddCommand(reasonCommand(o))
	return parent
}

// namesNow reads names from the cluster; none if it does not answer.
func (o *options) namesNow(names func(context.Context, options, *kube.Client) []string) []string {
	ctx, cancel := context.WithTimeout(context.Background(), o.timeout)
	defer cancel()
	client, _, err := o.connect(ctx)
	if err != nil {
		return nil
	}
	return names(ctx, *o, client)
}

// completeNames completes the first argument with names from the cluster.
func (o *options) completeNames(names func(context.Context, options, *kube.Client) []string) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
		if names == nil || len(args) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		ctx, cancel := context.WithTimeout(cmd.Context(), o.timeout)
		defer cancel()
		client, _, err := o.connect(ctx)
		if err != nil {
			return nil, cobra.ShellCompDirectiveError
		}
		return names(ctx, *o, client), cobra.ShellCompDirectiveNoFileComp
	}
}

func reasonCommand(o *options) *cobra.Command {
	names := func() []string {
		var all []string
		for reason := range explain.Reasons {
			all = append(all, string(reason))
		}
		slices.Sort(all)
		return all
	}
	cmd := &cobra.Command{
		Use: "reason NAME", Short: "Explain a reason, as conditions, Events, metrics and logs show it",
		Args: arguments(1),
		ValidArgsFunction: func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
			return names(), cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			v, ok := explain.ReasonName(args[0])
			if !ok {
				return fmt.Errorf("%q is none of Landfall's reasons: %s", args[0], strings.Join(names(), ", "))
			}
			v = v.In(o.home())
			v.Cause = "" // the line has it
			return write(cmd.OutOrStdout(), o.output, v, verdictText(v, false))
		},
	}
	o.addOutput(cmd, "json", "yaml")
	return cmd
}

// runExplain gathers, judges and prints.
func runExplain(ctx context.Context, o options, stdout io.Writer,
	judge func(context.Context, *gatherer) (explain.Verdict, error)) error {
	ctx, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	client, server, err := o.connect(ctx)
	if err != nil {
		return err
	}
	v, err := judge(ctx, newGatherer(client, server, o))
	if err != nil {
		return o.late(ctx, client, err)
	}
	v = v.In(o.home())
	if err := write(stdout, o.output, v, verdictText(v, o.output == "wide")); err != nil {
		return err
	}
	return outcome(v)
}

// serviceKey reads the name of a Service, with its namespace or without.
func (o options) serviceKey(written string) (lb.Key, error) {
	namespace, name, both := strings.Cut(written, "/")
	if !both {
		name = written
	}
	for _, part := range strings.SplitN(written, "/", 2) {
		if wrong := validation.IsDNS1123Label(part); len(wrong) > 0 {
			return lb.Key{}, fmt.Errorf("%q is not [NAMESPACE/]NAME of a Service: %s", written, wrong[0])
		}
	}
	if both {
		return lb.Key{Namespace: namespace, Name: name}, nil
	}
	namespace, err := o.user.DefaultNamespace()
	return lb.Key{Namespace: namespace, Name: name}, err
}

func explainService(ctx context.Context, g *gatherer, name string) (explain.Verdict, error) {
	key, err := g.opts.serviceKey(name)
	if err != nil {
		return explain.Verdict{}, err
	}
	f := explain.ServiceFacts{Key: key}
	return g.service(ctx, &f)
}

// service reads and explains a Service of which the key is known.
func (g *gatherer) service(ctx context.Context, f *explain.ServiceFacts) (explain.Verdict, error) {
	var denied error
	err := g.read(ctx, func(ctx context.Context) (err error) {
		f.Service, f.Found, err = g.client.OneService(ctx, f.Key)
		if errors.As(err, new(*kube.Denied)) {
			denied = err
			return nil
		}
		return err
	}, func(ctx context.Context) (err error) {
		f.Slices, err = g.client.SlicesOf(ctx, f.Key)
		return g.unread("endpointslices", err)
	})
	if err == nil {
		err = denied
	}
	if err != nil {
		return explain.Verdict{}, err
	}
	if !f.Found {
		named, _ := g.client.ServicesNamed(ctx, f.Key.Name) // a hint: who may not list them does without
		f.Namesakes = slices.DeleteFunc(named, func(key lb.Key) bool { return key == f.Key })
	}
	if vips := f.Service.VIPs(); len(vips) > 0 {
		g.askAbout(ctx, *f, vips)
	}
	return explain.Service(g.cluster, *f), nil
}

// askAbout asks the nodes that announce a Service, or some; and then others that have another
// reason not to, unless those were all. Those that announce it also try what its clients meet.
func (g *gatherer) askAbout(ctx context.Context, f explain.ServiceFacts, vips []netip.Addr) {
	s := f.Service
	var nodes []string
	announcements, _ := lb.DecodeAnnouncements(s.Announcements) // what a tenant has broken names nobody
	for _, a := range announcements {
		nodes = append(nodes, a.Owner)
		for _, route := range a.Routes {
			// A router announces the route of one node back to the others only.
			nodes = append(nodes, route.Nodes[:min(2, len(route.Nodes))]...)
		}
	}
	nodes = slices.DeleteFunc(nodes, func(node string) bool { return !g.cluster.Agents[node].Speaker.Running })
	slices.Sort(nodes)
	nodes = slices.Compact(nodes)
	announcing := nodes[:min(len(nodes), askFirst)]
	tried := make([]*lb.Reach, len(announcing))
	var trying sync.WaitGroup
	for i, node := range announcing {
		trying.Go(func() { tried[i] = g.reach(ctx, node, f.Reach(node, g.cluster)) })
	}
	defer func() {
		trying.Wait()
		for i, node := range announcing {
			a := g.cluster.Agents[node]
			a.Reach = tried[i]
			g.cluster.Agents[node] = a
		}
	}()
	if g.opts.output == "wide" {
		g.ask(ctx, slices.Collect(maps.Keys(g.cluster.Agents)), vips, s.Key.String())
		return
	}
	if len(nodes) == 0 {
		nodes = g.speakers(askFirst)
	}
	g.ask(ctx, nodes, vips, s.Key.String())
	reasons := map[lb.Reason]bool{}
	var more []string
	for _, node := range slices.Sorted(maps.Keys(g.cluster.Agents)) {
		a := g.cluster.Agents[node]
		if a.Said == nil {
			continue
		}
		for _, vip := range a.Said.VIPs {
			for _, n := range vip.Nodes {
				if n.Node == node {
					reasons[n.Reason] = true
				}
			}
			for _, n := range vip.Nodes {
				if !reasons[n.Reason] && g.cluster.Agents[n.Node].Said == nil && len(more) < askMore {
					reasons[n.Reason] = true
					more = append(more, n.Node)
				}
			}
		}
	}
	g.ask(ctx, more, vips, s.Key.String())
}

func explainIP(ctx context.Context, g *gatherer, name string) (explain.Verdict, error) {
	addr, err := netip.ParseAddr(name)
	if err != nil {
		return explain.Verdict{}, fmt.Errorf("%q is not an IP address", name)
	}
	addr = addr.Unmap()
	if err := g.read(ctx); err != nil {
		return explain.Verdict{}, err
	}
	holders, err := g.holders(ctx, addr)
	if err != nil {
		return explain.Verdict{}, reading("services", err)
	}
	if len(holders) == 0 {
		return explain.IP(g.cluster, addr), nil
	}
	v, err := g.service(ctx, &explain.ServiceFacts{Key: holders[0]})
	v.Subject = "IP " + addr.String()
	v.Line = fmt.Sprintf("IP %s is of %s", addr, v.Line)
	if len(holders) > 1 {
		v.Line += fmt.Sprintf("; %d more Services share it", len(holders)-1)
	}
	return v, err
}

func explainNode(ctx context.Context, g *gatherer, name string) (explain.Verdict, error) {
	if err := g.read(ctx); err != nil {
		return explain.Verdict{}, err
	}
	g.ask(ctx, []string{name}, nil, nothing)
	// Speakers that it does not hear hang if they do not answer landfallctl either; else gossip is
	// blocked.
	if said := g.cluster.Agents[name].Said; said != nil {
		unheard := slices.DeleteFunc(g.speakers(math.MaxInt), func(node string) bool {
			return node == name || slices.Contains(said.Members.Live, node)
		})
		g.ask(ctx, unheard[:min(len(unheard), askFirst)], nil, nothing)
	}
	return explain.NodeName(g.cluster, name), nil
}

func explainPool(ctx context.Context, g *gatherer, name string) (explain.Verdict, error) {
	var services []lb.Service
	err := g.read(ctx, func(ctx context.Context) (err error) {
		services, err = g.client.AllServices(ctx)
		return g.unread("services", err)
	})
	if err != nil {
		return explain.Verdict{}, err
	}
	return explain.Pool(g.cluster, name, explain.Waiting(services, g.cluster.Class, name)), nil
}

func explainPeer(ctx context.Context, g *gatherer, name string) (explain.Verdict, error) {
	if err := g.read(ctx); err != nil {
		return explain.Verdict{}, err
	}
	var nodes []string
	for _, p := range g.cluster.Peers {
		for _, node := range slices.Sorted(maps.Keys(p.Status)) {
			if p.Name == name && (len(nodes) < askFirst || g.opts.output == "wide") {
				nodes = append(nodes, node)
			}
		}
	}
	g.ask(ctx, nodes, nil, nothing)
	return explain.Peer(g.cluster, name), nil
}

func serviceNames(ctx context.Context, o options, client *kube.Client) []string {
	namespace, err := o.user.DefaultNamespace()
	if err != nil {
		return nil
	}
	services, _ := client.AllServices(ctx) // what cannot be read is not offered
	var names []string
	for _, s := range services {
		if s.Type == lb.LoadBalancer && s.Key.Namespace == namespace {
			names = append(names, s.Key.Name)
		}
	}
	return names
}

func nodeNames(ctx context.Context, _ options, client *kube.Client) []string {
	nodes, _ := client.AllNodes(ctx)
	return names(nodes, func(n kube.NodeState) string { return n.Name })
}

func poolNames(ctx context.Context, _ options, client *kube.Client) []string {
	pools, _, _ := client.AllPools(ctx)
	return names(pools, func(p lb.Pool) string { return p.Name })
}

func peerNames(ctx context.Context, _ options, client *kube.Client) []string {
	peers, _ := client.AllBGPPeers(ctx)
	return names(peers, func(p lb.Peer) string { return p.Name })
}

func names[V any](all []V, name func(V) string) []string {
	var found []string
	for _, v := range all {
		found = append(found, name(v))
	}
	return found
}
