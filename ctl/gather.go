package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"path"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/landfall-lb/landfall/ctl/explain"
	"github.com/landfall-lb/landfall/internal/kube"
	"github.com/landfall-lb/landfall/internal/lb"
)

const (
	// componentSelector selects the pods of Landfall whatever the release is called, and maybe others. In another
	// namespace than Landfall's the labels prove nothing.
	componentSelector = "app.kubernetes.io/component in (node,speaker,proxy,relay,controller)"
	defaultNamespace  = "landfall-system"
	// askAtOnce is how many programs are asked at a time, and askTime how long each may take.
	askAtOnce = 32
	askTime   = 5 * time.Second
)

// program returns which of Landfall's programs a container runs; "" for others.
func program(c kube.Container) string {
	if len(c.Command) == 0 {
		return ""
	}
	name := path.Base(c.Command[0])
	if name == "landfall-proxy" && len(c.Command) > 1 && c.Command[1] == "relay" {
		return "landfall-relay"
	}
	if slices.Contains([]string{"landfall-controller", "landfall-speaker", "landfall-proxy"}, name) {
		return name
	}
	return ""
}

// flagOf returns the value of a flag in the arguments of a program; "" if it is not set.
func flagOf(pods []kube.PodState, name, flag string) string {
	for _, p := range pods {
		for _, c := range p.Containers {
			if program(c) != name {
				continue
			}
			for _, arg := range c.Command {
				if value, ok := strings.CutPrefix(arg, "--"+flag+"="); ok {
					return value
				}
			}
		}
	}
	return ""
}

// gatherer reads what explanations need.
type gatherer struct {
	client *kube.Client
	server kube.Server
	opts   options
	// exec runs a command in a container.
	exec func(ctx context.Context, pod lb.Key, container string, command ...string) ([]byte, error)

	// begun is set once read has read the objects that every explanation needs; pods are Landfall's.
	begun    bool
	pods     []kube.PodState
	warnings []kube.NodeWarning
	// stale is set while pods may be others by now.
	stale bool
	// had are the programs that the node that drains has had at one look.
	had map[string]bool

	mu      sync.Mutex
	cluster explain.Cluster
}

func newGatherer(client *kube.Client, server kube.Server, o options) *gatherer {
	return &gatherer{client: client, server: server, opts: o, exec: client.Exec, had: map[string]bool{},
		cluster: explain.Cluster{Installed: true, Class: o.class}}
}

// unread notes what could not be read for lack of permission, and returns every other error.
func (g *gatherer) unread(what string, err error) error {
	denied := (*kube.Denied)(nil)
	if err == nil || !errors.As(err, &denied) {
		return reading(what, err)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, u := range g.cluster.Unread {
		if u.What == what {
			return nil
		}
	}
	g.cluster.Unread = append(g.cluster.Unread, explain.Unread{What: what,
		Why:   fmt.Sprintf("you may not %s %s", denied.Verb, denied.Resource),
		Grant: "grant yourself the RBAC rule " + denied.Rule()})
	return nil
}

// read reads the objects that every explanation needs, once, and with it whatever also does.
func (g *gatherer) read(ctx context.Context, also ...func(context.Context) error) error {
	group, ctx := errgroup.WithContext(ctx)
	for _, f := range also {
		group.Go(func() error { return f(ctx) })
	}
	if !g.begun {
		g.readCluster(ctx, group)
	}
	if err := group.Wait(); err != nil {
		return err
	}
	slices.SortFunc(g.cluster.Unread, func(a, b explain.Unread) int { return strings.Compare(a.What, b.What) })
	if !g.begun {
		g.place()
	}
	g.begun = true
	return nil
}

// readCluster reads the objects that every explanation needs.
func (g *gatherer) readCluster(ctx context.Context, group *errgroup.Group) {
	c := &g.cluster
	group.Go(func() (err error) {
		c.Pools, c.Installed, err = g.client.AllPools(ctx)
		c.Installed = c.Installed || err != nil
		return g.unread("ipaddresspools", err)
	})
	group.Go(func() (err error) {
		c.L2, err = g.client.AllL2Advertisements(ctx)
		return g.unread("l2advertisements", absent(err))
	})
	group.Go(func() (err error) {
		c.BGP, err = g.client.AllBGPAdvertisements(ctx)
		return g.unread("bgpadvertisements", absent(err))
	})
	group.Go(func() (err error) {
		c.Peers, err = g.client.AllBGPPeers(ctx)
		return g.unread("bgppeers", absent(err))
	})
	group.Go(func() error {
		nodes, err := g.client.AllNodes(ctx)
		c.Nodes = map[string]explain.Node{}
		for _, n := range nodes {
			c.Nodes[n.Name] = explain.Node{Node: n.Node, Ready: n.Ready, NotReady: n.NotReady}
		}
		return g.unread("nodes", err)
	})
	group.Go(func() error {
		warnings, err := g.client.NodeWarnings(ctx, g.server.Now.Add(-warningsLast))
		g.warnings = warnings
		return g.unread("events", err)
	})
	group.Go(func() error {
		pods, err := landfallPods(ctx, g.client, g.opts.home())
		g.pods = pods
		if none := (*noPods)(nil); errors.As(err, &none) {
			c.NoPods, err = none.Error(), nil
		}
		if err := g.unread("pods", err); err != nil {
			return err
		}
		return g.leader(ctx)
	})
}

// absent makes an empty list of a kind that the API server does not know: IPAddressPools say that
// Landfall is not installed.
func absent(err error) error {
	if kube.IsAbsent(err) {
		return nil
	}
	return err
}

// leader reads which controller leads.
func (g *gatherer) leader(ctx context.Context) error {
	lease, found, err := g.client.OneLease(ctx, lb.Key{Namespace: g.opts.home(), Name: "landfall-controller"})
	if found && lease.Holder != "" && g.server.Now.Before(lease.Renewed.Add(lease.Duration)) {
		g.cluster.Leader, _, _ = strings.Cut(lease.Holder, "_")
	}
	return g.unread("leases", err)
}

// place sorts the pods into programs on nodes.
func (g *gatherer) place() {
	c := &g.cluster
	c.Agents, c.Controllers = map[string]explain.Agent{}, map[string]explain.Program{}
	c.NoProxy = len(g.pods) > 0
	for _, w := range stillFound(g.warnings, g.pods, g.server.Now) {
		c.Warnings = append(c.Warnings, explain.NodeWarning{Node: w.Node, Refusal: w.Refusal})
	}
	for _, p := range g.pods {
		for _, container := range p.Containers {
			is := explain.Program{There: true, Running: container.Running, Ready: container.Ready, Why: container.Waiting,
				Image: container.Image}
			agent := c.Agents[p.Node]
			agent.Node = p.Node
			switch program(container) {
			case "landfall-controller":
				c.Controllers[p.Name] = is
				continue
			case "landfall-speaker":
				agent.Speaker = is
			case "landfall-proxy":
				agent.Proxy, c.NoProxy = is, false
			case "landfall-relay":
				if agent.Relay.Running {
					continue // an upgrade has two of them side by side
				}
				agent.Relay = is
			default:
				continue
			}
			if p.Node != "" {
				c.Agents[p.Node] = agent
			}
		}
	}
	if !g.opts.classSet {
		c.Class = flagOf(g.pods, "landfall-controller", "load-balancer-class")
	}
	c.IgnoreExclude = flagOf(g.pods, "landfall-speaker", "ignore-exclude-lb") == "true"
	c.ProxyName = flagOf(g.pods, "landfall-proxy", "service-proxy-name")
	c.GossipPort = flagOf(g.pods, "landfall-speaker", "bind-port")
}

// nothing is the value of --status-only for a list without elements.
const nothing = "-"

// ask asks the programs of some nodes for their status, with these VIPs and this Service alone.
func (g *gatherer) ask(ctx context.Context, nodes []string, vips []netip.Addr, service string) {
	var group errgroup.Group
	group.SetLimit(askAtOnce)
	only := nothing
	if len(vips) > 0 {
		only = ""
		for _, vip := range vips {
			only += "," + vip.String()
		}
		only = only[1:]
	}
	for _, p := range g.pods {
		if !slices.Contains(nodes, p.Node) {
			continue
		}
		for _, container := range p.Containers {
			if !container.Running {
				continue
			}
			switch program(container) {
			case "landfall-speaker":
				group.Go(func() error {
					said := &explain.SpeakerStatus{}
					err := g.status(ctx, p, container, only, said)
					g.answered(p.Node, err, func(a *explain.Agent, why string) {
						if a.Speaker.Unanswered = why; why == "" {
							a.Said = said
						}
					})
					return nil
				})
			case "landfall-proxy":
				group.Go(func() error {
					delivers := &explain.ProxyStatus{}
					err := g.status(ctx, p, container, service, delivers)
					g.answered(p.Node, err, func(a *explain.Agent, why string) {
						if a.Proxy.Unanswered = why; why == "" {
							a.Delivers = delivers
						}
					})
					return nil
				})
			}
		}
	}
	_ = group.Wait() // what fails is noted with its node
}

// answered notes the answer of a program, or why there is none.
func (g *gatherer) answered(node string, err error, note func(a *explain.Agent, why string)) {
	why := ""
	if err != nil {
		why = err.Error()
		if g.unread("nodes' programs", err) == nil {
			why = "" // said once for all nodes
			note = func(*explain.Agent, string) {}
		}
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	a := g.cluster.Agents[node]
	note(&a, why)
	g.cluster.Agents[node] = a
}

// reach has a node try what clients of a Service meet. A program that is older, or that does not answer, is
// named by other checks.
func (g *gatherer) reach(ctx context.Context, node string, what explain.Reach) *lb.Reach {
	arguments := []string{"reach"}
	for _, to := range what.Connect {
		arguments = append(arguments, "--connect="+to.String())
	}
	for _, from := range what.From {
		arguments = append(arguments, "--from="+from.String())
	}
	for _, to := range what.To {
		arguments = append(arguments, "--to="+to.String())
	}
	if len(arguments) == 1 {
		return nil
	}
	answers, _, err := askProxies[lb.Reach](ctx, g, []string{node}, arguments...)
	if err != nil || len(answers) == 0 {
		return nil
	}
	return &answers[0]
}

// status asks one program.
func (g *gatherer) status(ctx context.Context, pod kube.PodState, c kube.Container, only string, into any) error {
	ctx, cancel := context.WithTimeoutCause(ctx, askTime, errors.New(explain.NoAnswer+askTime.String()))
	defer cancel()
	command := []string{c.Command[0], "status", "--status-only=" + only}
	out, err := g.exec(ctx, pod.Key, c.Name, command...)
	if err != nil && strings.Contains(err.Error(), "unknown flag") {
		out, err = g.exec(ctx, pod.Key, c.Name, command[:2]...) // an older version says all
	}
	if err != nil {
		return err
	}
	if err := json.Unmarshal(out, into); err != nil {
		return fmt.Errorf("its status cannot be read: %w", err)
	}
	return nil
}

// holders returns the Services that hold an address. It asks speakers first, which know the Services
// of each VIP: a list of all Services is long.
func (g *gatherer) holders(ctx context.Context, addr netip.Addr) ([]lb.Key, error) {
	first := g.speakers(askFirst)
	var group errgroup.Group
	var mu sync.Mutex
	var said []explain.SpeakerVIP
	for _, p := range g.pods {
		for _, container := range p.Containers {
			if program(container) != "landfall-speaker" || !container.Running || !slices.Contains(first, p.Node) {
				continue
			}
			group.Go(func() error {
				one := explain.SpeakerStatus{}
				err := g.status(ctx, p, container, addr.String(), &one)
				mu.Lock()
				defer mu.Unlock()
				said = append(said, one.VIPs...)
				return err
			})
		}
	}
	_ = group.Wait() // the list of all Services tells what speakers do not
	if held := g.confirmed(ctx, addr, said); len(held) > 0 {
		return held, nil
	}
	return g.client.ServicesAt(ctx, addr)
}

// confirmed returns the Services of a VIP that a speaker names and whose status has it: a speaker
// without an API server may know an old one.
func (g *gatherer) confirmed(ctx context.Context, addr netip.Addr, vips []explain.SpeakerVIP) []lb.Key {
	var held []lb.Key
	for _, vip := range vips {
		if vip.VIP != addr {
			continue
		}
		for _, name := range vip.Services {
			key := lb.Key{}
			key.Namespace, key.Name, _ = strings.Cut(name, "/")
			if slices.Contains(held, key) {
				continue
			}
			// Of many Services that share an address only the first is explained, and so confirmed.
			if len(held) == 0 {
				s, found, err := g.client.OneService(ctx, key)
				if err != nil || !found || !slices.Contains(s.VIPs(), addr) {
					continue
				}
			}
			held = append(held, key)
		}
	}
	return held
}

// speakers returns up to n nodes whose speaker runs, those that were not asked yet.
func (g *gatherer) speakers(n int) []string {
	var nodes []string
	for _, node := range slices.Sorted(maps.Keys(g.cluster.Agents)) {
		if a := g.cluster.Agents[node]; a.Speaker.Running && a.Said == nil && len(nodes) < n {
			nodes = append(nodes, node)
		}
	}
	return nodes
}
