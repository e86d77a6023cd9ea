package explain

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/landfall-lb/landfall/internal/lb"
)

// Cluster is what was read of a cluster beside the object that is asked about.
type Cluster struct {
	// Installed is set if the API server knows Landfall's kinds.
	Installed bool
	// Class is the spec.loadBalancerClass that Landfall serves, ProxyName the value of the label
	// service.kubernetes.io/service-proxy-name that its proxies serve.
	Class, ProxyName string
	// NoProxy is set if Landfall runs without its proxy.
	NoProxy bool
	// IgnoreExclude is set if nodes with the exclude label announce too.
	IgnoreExclude bool
	// GossipPort is the one of --bind-port of the speakers; "" for the default.
	GossipPort string
	Pools      []lb.Pool
	L2         []lb.L2Advertisement
	BGP        []lb.BGPAdvertisement
	Peers      []lb.Peer
	Nodes      map[string]Node
	Agents     map[string]Agent
	// Controllers are the pods of the controller by name; Leader is the one that leads, if any.
	Controllers map[string]Program
	Leader      string
	// Warnings are what Events say of Nodes.
	Warnings []NodeWarning
	// NoPods says that Landfall's namespace has none of its pods, and where to look; "" if it has some.
	NoPods string
	// Unread is what could not be read, and why.
	Unread []Unread
}

// Node is a Node with what its kubelet reports.
type Node struct {
	lb.Node
	Ready    bool
	NotReady string
}

// NodeWarning is what an Event says of a Node.
type NodeWarning struct {
	Node string
	lb.Refusal
}

// Unread says what could not be read.
type Unread struct {
	What, Why string
	// Grant is what an administrator does about it; "" if it is no matter of permissions.
	Grant string
}

// labelProxyName gives a Service to another service proxy.
const labelProxyName = "service.kubernetes.io/service-proxy-name"

// fill puts names in the places of a cure: pairs of a word, such as POOL, and what to write there.
func fill(cure string, pairs ...string) string { return strings.NewReplacer(pairs...).Replace(cure) }

// cureOf returns the cure of a reason.
func cureOf(reason lb.Reason, pairs ...string) string { return fill(Reasons[reason].Cure, pairs...) }

// cure returns the cure of a reason, with the port that speakers gossip on.
func (c Cluster) cure(reason lb.Reason, pairs ...string) string {
	if c.GossipPort != "" {
		pairs = append(pairs, defaultGossipPort, c.GossipPort)
	}
	return cureOf(reason, pairs...)
}

// defaultGossipPort stands in the cures of reasons.
const defaultGossipPort = "7947"

// unread returns a check for each thing that could not be read.
func (c Cluster) unread() []Check {
	var checks []Check
	for _, u := range c.Unread {
		checks = append(checks, Check{Level: Unknown, What: u.What, Text: u.Why, Cure: u.Grant})
	}
	return checks
}

func (c Cluster) hasUnread(what string) bool {
	return slices.ContainsFunc(c.Unread, func(u Unread) bool { return u.What == what })
}

// Announces reports whether a node announces addresses, as far as the API server tells.
func (c Cluster) Announces(node string) bool {
	n := c.Nodes[node]
	_, excluded := n.Labels[labelExclude]
	return c.Agents[node].Speaker.Running && n.Ready && n.Leaving == "" && (!excluded || c.IgnoreExclude)
}

// controller checks that one leads.
func (c Cluster) controller() Check {
	check := Check{Level: OK, What: "controller", Cure: "kubectl -n landfall-system get pods -l " +
		"app.kubernetes.io/component=controller"}
	var down []string
	for _, name := range slices.Sorted(maps.Keys(c.Controllers)) {
		if p := c.Controllers[name]; !p.Running {
			down = append(down, fmt.Sprintf("%s: %s", name, p.Why))
		}
	}
	switch {
	case c.hasUnread("pods"):
		check.Level, check.Text = Note, "its pods could not be read"
	case c.NoPods != "":
		check = c.noPods()
	case len(c.Controllers) == 0:
		check.Level, check.Text = Wrong, "the controller does not run: it has no pod, so no Service gets an address"
	case len(down) == len(c.Controllers):
		check.Level, check.Text = Wrong, "the controller does not run, so no Service gets an address: "+list(down, 2)
	case c.Leader == "" && !c.hasUnread("leases"):
		check.Level, check.Text = Wrong, "no controller leads, so no Service gets an address: its Lease is not renewed"
		check.Cure = "kubectl -n landfall-system logs -l app.kubernetes.io/component=controller"
	case c.Leader == "":
		check.Text = plural(len(c.Controllers)-len(down), "pod") + " running"
	default:
		check.Text = c.Leader + " leads"
	}
	return check
}

// noPods checks that Landfall's pods are where they are looked for.
func (c Cluster) noPods() Check {
	if c.NoPods == "" {
		return Check{}
	}
	return Check{Level: Wrong, What: "pods", Text: c.NoPods}
}

// findings returns what is wrong with the nodes beside Landfall, the same reason once: from the
// programs that were asked, and for other nodes from Events.
func (c Cluster) findings() []Check {
	type about struct {
		nodes []string
		first lb.Refusal
		note  bool
	}
	byReason := map[lb.Reason]*about{}
	add := func(node string, what lb.Refusal, note bool) {
		one := byReason[what.Reason]
		if one == nil {
			one = &about{first: what, note: note}
			byReason[what.Reason] = one
		}
		if !slices.Contains(one.nodes, node) {
			one.nodes = append(one.nodes, node)
		}
		if one.note && !note {
			one.first, one.note = what, false
		}
	}
	for _, node := range slices.Sorted(maps.Keys(c.Agents)) {
		for _, f := range c.Agents[node].findings() {
			add(node, f.Refusal, f.Note)
		}
	}
	for _, w := range c.Warnings {
		if !c.Agents[w.Node].asked() { // it says itself what there is now
			add(w.Node, w.Refusal, false)
		}
	}
	var checks []Check
	for _, reason := range slices.Sorted(maps.Keys(byReason)) {
		one := byReason[reason]
		level := Wrong
		switch {
		case one.note:
			level = Note
		case reason == lb.ReasonPodNetworkUnmatched:
			level = Warning // pods see another source address, and that is all
		case reason == lb.ReasonServiceNetworkShared:
			level = Warning // unused cluster IPs are not refused, and that is all
		case ofRelay(reason):
			level = Warning // the rules serve
		case reason == lb.ReasonAddressConflict:
			level = Warning // the node works, for all but some addresses
		}
		text := one.first.Message
		if len(one.nodes) > 1 {
			text += "; so on " + list(one.nodes, 4)
		}
		checks = append(checks, Check{Level: level, What: "node " + list(one.nodes, 1), Reason: reason, Text: text,
			Cure: c.cure(reason, "NODE", one.nodes[0])})
	}
	return checks
}

// programs checks that speaker and proxy run on a node.
func (c Cluster) programs(node string) []Check {
	if c.hasUnread("pods") || c.NoPods != "" {
		return nil
	}
	a := c.Agents[node]
	logs := "kubectl -n landfall-system get pods --field-selector spec.nodeName=" + node
	var checks []Check
	for _, p := range []struct {
		name string
		Program
		optional bool
	}{{"speaker", a.Speaker, false}, {"proxy", a.Proxy, c.NoProxy}} {
		check := Check{Level: OK, What: p.name, Text: "runs and is ready"}
		switch {
		case !p.There && p.optional:
			continue
		case !p.There:
			check.Level, check.Text, check.Cure = Wrong, fmt.Sprintf("the %s on %s does not run: it has no pod", p.name, node),
				logs
		case !p.Running:
			check.Level, check.Text, check.Cure = Wrong, fmt.Sprintf("the %s on %s does not run: %s", p.name, node, p.Why), logs
		case !p.Ready:
			check.Level, check.Text = Warning, fmt.Sprintf("the %s on %s is not ready", p.name, node)
			check.Cure = "kubectl -n landfall-system logs --prefix -l app.kubernetes.io/name=landfall -c " + p.name
		}
		if check.Level == OK && p.Unanswered != "" {
			check.Level, check.Text = Unknown, fmt.Sprintf("the %s on %s did not answer: %s", p.name, node, p.Unanswered)
		}
		checks = append(checks, check)
	}
	return checks
}

// gate checks what the programs of a node wait for.
func gate(a Agent) []Check {
	var checks []Check
	if d := a.Delivers; d != nil && d.Waiting != "" {
		checks = append(checks, Check{Level: Wrong, What: "proxy", Text: fmt.Sprintf(
			"the proxy on %s writes no rules yet: it waits for %s", a.Node, d.Waiting),
			Cure: waitingCure(d.Waiting, "proxy")})
	}
	if s := a.Said; s != nil {
		if waiting := cmp.Or(s.Waiting, s.BGP.Waiting); waiting != "" {
			checks = append(checks, Check{Level: Wrong, What: "speaker", Text: fmt.Sprintf(
				"the speaker on %s announces nothing yet: it waits for %s", a.Node, waiting),
				Cure: waitingCure(waiting, "speaker")})
		}
		gate := Check{Level: OK, What: "gate", Text: s.Gate.Kind}
		hangs := !s.Gate.Connected && a.Proxy.Running && a.Proxy.silent()
		switch {
		case hangs:
			gate.Level, gate.Reason, gate.Cure = Wrong, lb.ReasonProxyHangs, cureOf(lb.ReasonProxyHangs, "NODE", a.Node)
			gate.Text = fmt.Sprintf("the proxy on %s hangs: it runs, and answers neither the speaker nor landfallctl, so ",
				a.Node)
			if s.Gate.Reason != "" {
				gate.Text += "the speaker announces nothing"
			} else {
				gate.Text += "changes of Services do not reach the kernel, and the speaker announces nothing soon"
			}
		case s.Gate.Reason != "":
			gate.Level, gate.Reason = Wrong, s.Gate.Reason
			gate.Text = fmt.Sprintf("the speaker on %s announces nothing, as it does not hear the node's proxy", a.Node)
			gate.Cure = cureOf(s.Gate.Reason, "NODE", a.Node)
		}
		checks = append(checks, gate)
	}
	return checks
}

// waitingCure ends what a program waits for.
func waitingCure(waiting, program string) string {
	if strings.Contains(waiting, "is forbidden") {
		return "helm upgrade landfall …   # the chart's ClusterRole …-" + program + " and its binding are not as they were"
	}
	return "kubectl -n landfall-system logs -l 'app.kubernetes.io/component in (node," + program + ")' -c " + program +
		" --prefix --tail=100"
}

// poolsWith returns the pools that contain an address.
func (c Cluster) poolsWith(addr netip.Addr) []lb.Pool {
	var found []lb.Pool
	for _, p := range c.Pools {
		if slices.ContainsFunc(p.Ranges, func(r lb.Range) bool { return r.Contains(addr) }) {
			found = append(found, p)
		}
	}
	return found
}
