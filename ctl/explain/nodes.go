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

// nodes checks each node: those that were asked in detail, the others by what a speaker knows of
// them.
func (e explanation) nodes(vips []netip.Addr) []Check {
	var checks []Check
	for _, vip := range vips {
		view, _ := e.view(vip)
		announced := slices.ContainsFunc(view.Nodes, func(n NodeVIP) bool { return n.Answering })
		seen := map[string]NodeVIP{}
		for _, n := range view.Nodes {
			seen[n.Node] = n
		}
		// A node knows best why it does not announce.
		for node, a := range e.Agents {
			if own, ok := a.vip(vip); ok {
				for _, n := range own.Nodes {
					if n.Node == node {
						seen[node] = n
					}
				}
			}
		}
		for node, a := range e.Agents {
			if _, ok := seen[node]; !ok && (a.asked() || !a.Speaker.Running) {
				seen[node] = NodeVIP{Node: node}
			}
		}
		telling := outOnPurpose
		for _, n := range seen {
			if n.Reason != "" {
				telling = min(telling, e.outByItself(n))
			}
		}
		for _, node := range slices.Sorted(maps.Keys(seen)) {
			n := seen[node]
			check := e.node(vip, n, len(vips) > 1)
			if announced && !n.Answering || e.outByItself(n) > telling {
				soften(&check) // another node can announce, or could but for what is wrong there
			}
			checks = append(checks, check)
		}
	}
	return checks
}

// A node is out when it announces nothing, whatever the VIP: by a fault, or because it is meant to be.
// The less on purpose, the more it tells.
const (
	notOut = iota
	outByFault
	outOnPurpose
)

// outByItself returns whether the reason of a node keeps it out.
func (e explanation) outByItself(n NodeVIP) int {
	switch n.Reason {
	case lb.ReasonNetworkUnavailable, lb.ReasonNodeNotReady:
		return outByFault
	case lb.ReasonMissing:
		if e.Agents[n.Node].Speaker.Running { // it hangs, or is cut off
			return outByFault
		}
		return outOnPurpose
	case lb.ReasonNodeExcluded, lb.ReasonNodeLeaving, lb.ReasonNodeDrained, lb.ReasonStopping:
		return outOnPurpose
	}
	return notOut
}

// node checks what one node does for a VIP.
func (e explanation) node(vip netip.Addr, n NodeVIP, several bool) Check {
	a := e.Agents[n.Node]
	check := Check{Level: OK, What: "node " + n.Node, Reason: n.Reason, Text: n.Message}
	if several {
		check.Text = vip.String() + ": " + check.Text
	}
	switch n.Reason {
	case lb.ReasonAnnounced, lb.ReasonNotOwner:
		check.Reason = ""
	case "":
		check.Level, check.Text = Note, "has not said anything of "+vip.String()
	case lb.ReasonProbing, lb.ReasonProbedAhead:
		check.Level = Note
	default:
		check.Level, check.Cure = Wrong, e.cure(n.Reason, append(e.names(""), "NODE", n.Node)...)
		check.Text = fmt.Sprintf("%s does not announce %s: %s", n.Node, vip, n.Message)
		if n.Answering { // until another one takes over, as the check of the announcement says
			check.Level, check.Text = Note, fmt.Sprintf("%s still announces %s: %s", n.Node, vip, n.Message)
		}
	}
	check.Parts = append(check.Parts, e.programs(n.Node)...)
	check.Parts = append(check.Parts, gate(a)...)
	check.Parts = append(check.Parts, e.rules(a, vip)...)
	if said := a.Said; said != nil && n.Answering {
		for _, i := range said.Interfaces {
			if i.Problem != "" {
				check.Parts = append(check.Parts, Check{Level: Warning, What: "interface " + i.Name,
					Text: fmt.Sprintf("interface %s of %s: %s", i.Name, n.Node, i.Problem)})
			}
		}
	}
	return check
}

// soften makes a note of what is wrong on a node that need not announce.
func soften(c *Check) {
	if c.Level.Worse(Note) {
		c.Level = Note
	}
	for i := range c.Parts {
		soften(&c.Parts[i])
	}
}

// rules checks what the kernel of a node holds of the Service.
func (e explanation) rules(a Agent, vip netip.Addr) []Check {
	if a.Delivers == nil || a.Delivers.Waiting != "" {
		return nil
	}
	s, known := e.Agents[a.Node].service(e.Key)
	if !known {
		return []Check{{Level: Wrong, What: "kernel rules", Reason: lb.ReasonNotProgrammed,
			Text: fmt.Sprintf("the proxy on %s does not serve this Service", a.Node)}}
	}
	var checks []Check
	for _, v := range s.VIPs {
		if v.VIP != vip {
			continue
		}
		rules := Check{Level: OK, What: "kernel rules", Text: "held, " + a.Delivers.Mode}
		if v.Programmed && lb.OfPath(v.Reason) {
			checks = append(checks, Check{Level: Wrong, What: "path", Reason: v.Reason,
				Text: fmt.Sprintf("%s does not deliver %s: %s", a.Node, vip, v.Message),
				Cure: cureOf(v.Reason, "NODE", a.Node)})
		}
		if !v.Programmed {
			rules.Level, rules.Reason = Wrong, v.Reason
			rules.Text = fmt.Sprintf("%s does not deliver %s: %s", a.Node, vip, v.Message)
		}
		if s.Error != "" {
			rules.Level, rules.Text = Wrong, fmt.Sprintf("the kernel of %s does not take the rules: %s", a.Node, s.Error)
		}
		checks = append(checks, rules)
		to := Check{Level: OK, What: "backends",
			Text: fmt.Sprintf("%d ready, %d of them on the node", v.Ready, v.LocalReady)}
		if v.Serving > 0 {
			to.Text += fmt.Sprintf(", %d terminating", v.Serving)
		}
		checks = append(checks, to)
	}
	checks = append(checks, s.Probe.checks(a.Node)...)
	if s.Advice != "" {
		checks = append(checks, Check{Level: Note, What: "advice", Text: s.Advice})
	}
	return checks
}

// maxFailing is how many endpoints are named that do not answer the probes of one node.
const maxFailing = 5

// checks says which endpoints do not answer a node's probes.
func (p *ProxyProbe) checks(node string) (checks []Check) {
	if p == nil {
		return nil
	}
	for i, f := range p.Failing {
		if i == maxFailing {
			return append(checks, Check{Level: Warning, What: "probe", Reason: lb.ReasonProbeFailed,
				Text: fmt.Sprintf("%d more endpoints do not answer the probes of %s", len(p.Failing)-maxFailing, node)})
		}
		check := Check{Level: Warning, What: "probe", Reason: lb.ReasonProbeFailed,
			Text: fmt.Sprintf("%s sends no new connections to %s, which does not answer its probe %.80q: %s", node, f.Address,
				p.Probe, f.Error)}
		if f.Used {
			check.Reason = lb.ReasonProbeIgnored
			check.Text = fmt.Sprintf("%s does not answer the probe %.80q of %s, which uses it, as fewer than half of the "+
				"endpoints would be left: %s", f.Address, p.Probe, node, f.Error)
		}
		check.Cure = cureOf(check.Reason, "NODE", node)
		checks = append(checks, check)
	}
	if len(checks) == 0 {
		checks = append(checks, Check{Level: OK, What: "probe", Text: fmt.Sprintf("%d endpoints answer %.80q", p.Asked,
			p.Probe)})
	}
	return checks
}

// NodeName explains a node.
func NodeName(c Cluster, name string) Verdict {
	subject := "Node " + name
	n, ok := c.Nodes[name]
	switch {
	case !ok && c.hasUnread("nodes"):
		return c.unreadable(subject, "nodes")
	case !ok:
		return missing(subject, "there is no such Node", "kubectl get nodes")
	}
	if !c.Installed {
		return missing(subject, "Landfall is not installed: the API server does not know its kinds",
			"see docs/guide/install.md")
	}
	a := c.Agents[name]
	a.Node = name
	checks := []Check{{Level: OK, What: "node", Text: "its kubelet reports that it is ready"}}
	if !n.Ready {
		checks[0] = Check{Level: Wrong, What: "node", Text: "it is not ready: " + n.NotReady,
			Cure: "kubectl describe node " + name}
		if withholds(a, lb.ReasonNodeNotReady) { // speakers announce from ready nodes only
			checks[0].Reason = lb.ReasonNodeNotReady
		}
	}
	checks = append(append(checks, c.noPods()), c.programs(name)...)
	if a.Said != nil {
		checks = append(checks, c.members(a.Said)) // ahead of what waits for the others
	}
	checks = append(checks, gate(a)...)
	alone := Cluster{Agents: map[string]Agent{name: a}, Nodes: c.Nodes, GossipPort: c.GossipPort}
	for _, w := range c.Warnings {
		if w.Node == name {
			alone.Warnings = append(alone.Warnings, w)
		}
	}
	checks = append(checks, alone.findings()...)
	checks = append(checks, withheld(a)...)
	switch {
	case n.Leaving != "":
		checks = append(checks, leaving(n, a))
	case n.Cordoned:
		checks = append(checks, Check{Level: Note, What: "announcements", Text: "it is cordoned: it takes no new pods"})
	}
	if s := a.Said; s != nil {
		checks = append(checks, links(s))
		for _, p := range s.BGP.Peers {
			checks = append(checks, c.session(name, p))
		}
	}
	checks = append(checks, c.unread()...)
	return examined(judge(subject, "announces and delivers",
		slices.DeleteFunc(checks, func(c Check) bool { return c.What == "" })))
}

// leaving says what a node that drains, or leaves the cluster, announces: nothing, once other nodes have taken over.
func leaving(n Node, a Agent) Check {
	check := Check{Level: Warning, What: "announcements", Reason: n.Leaving}
	is := "it is about to leave the cluster"
	if n.Leaving == lb.ReasonNodeDrained {
		is, check.Cure = "it is drained", cureOf(n.Leaving, "NODE", n.Name)
	}
	check.Text = "it announces no address, as " + is
	if still := a.stillAnnounces(); still != "" {
		check.Text = is + ", and " + still
	}
	if a.Said != nil && a.Said.Parting.Count > 0 {
		check.Cure = "kubectl drain " + n.Name + " --ignore-daemonsets   # moves their pods"
	}
	return check
}

// withheld names the addresses that a node does not announce for a cause in the node itself: the Node's
// conditions, an interface without carrier, or the way to endpoints.
func withheld(a Agent) (checks []Check) {
	if a.Said == nil {
		return nil
	}
	for _, w := range a.Said.Withheld {
		what := w.VIP.String()
		if w.Count > 1 {
			what += fmt.Sprintf(" and %d more", w.Count-1)
		}
		checks = append(checks, Check{Level: Wrong, What: "announcements", Reason: w.Reason,
			Text: fmt.Sprintf("it does not announce %s: %s", what, w.Message), Cure: cureOf(w.Reason, "NODE", a.Node)})
	}
	return checks
}

// withholds reports whether a node does not announce an address for this reason.
func withholds(a Agent, reason lb.Reason) bool {
	return a.Said != nil && slices.ContainsFunc(a.Said.Withheld, func(w Withheld) bool { return w.Reason == reason })
}

// mtus finds interfaces in one subnet of Nodes that send packets of different sizes, of the nodes that
// were asked: what the larger one sends is lost. Bridges of pods and of Docker may have one subnet on
// all nodes, and are in none of Nodes.
func (c Cluster) mtus() []Check {
	type at struct {
		subnet netip.Prefix
		mtu    int
	}
	nodes := map[at][]string{}
	sizes := map[netip.Prefix][]int{}
	names := map[at]string{}
	for _, node := range slices.Sorted(maps.Keys(c.Agents)) {
		said := c.Agents[node].Said
		if said == nil {
			continue
		}
		for _, i := range said.Interfaces {
			for _, p := range i.Addresses {
				place := at{p.Masked(), i.MTU}
				if !i.Up || i.MTU == 0 || !c.among(p) || slices.Contains(nodes[place], node) {
					continue
				}
				if !slices.Contains(sizes[place.subnet], i.MTU) {
					sizes[place.subnet] = append(sizes[place.subnet], i.MTU)
				}
				nodes[place] = append(nodes[place], node)
				names[place] = i.Name
			}
		}
	}
	var checks []Check
	for _, subnet := range slices.SortedFunc(maps.Keys(sizes), func(a, b netip.Prefix) int { return a.Compare(b) }) {
		if len(sizes[subnet]) < 2 {
			continue
		}
		slices.SortFunc(sizes[subnet], func(a, b int) int { // that of the fewest nodes first
			return cmp.Or(len(nodes[at{subnet, a}])-len(nodes[at{subnet, b}]), cmp.Compare(a, b))
		})
		odd, most := at{subnet, sizes[subnet][0]}, at{subnet, sizes[subnet][len(sizes[subnet])-1]}
		checks = append(checks, Check{Level: Warning, What: "MTU", Reason: lb.ReasonMTUMismatch, Text: fmt.Sprintf(
			"interface %s of %s has MTU %d, and that of %s in the same subnet %s has %d: packets of the larger size are lost",
			names[odd], list(nodes[odd], 3), odd.mtu, list(nodes[most], 3), subnet, most.mtu)})
	}
	return checks
}

// among reports whether a subnet has addresses of Nodes.
func (c Cluster) among(subnet netip.Prefix) bool {
	for _, n := range c.Nodes {
		if slices.ContainsFunc(n.Addresses, subnet.Contains) {
			return true
		}
	}
	return false
}

// otherKey is in what a speaker says of others that it connects to and does not understand.
const otherKey = "no exchange of states"

// members checks that the speaker has met the others.
func (c Cluster) members(s *SpeakerStatus) Check {
	check := Check{Level: OK, What: "speakers", Text: "it sees " + plural(len(s.Members.Live), "live speaker")}
	var unseen []string
	for node, a := range c.Agents {
		if a.Speaker.Ready && node != s.Node && !slices.Contains(s.Members.Live, node) {
			unseen = append(unseen, node)
		}
	}
	slices.Sort(unseen)
	var hang, unasked []string
	for _, node := range unseen {
		switch p := c.Agents[node].Speaker; {
		case p.silent():
			hang = append(hang, node)
		case p.Unanswered != "":
			unasked = append(unasked, node)
		}
	}
	switch {
	case len(hang) > 0:
		check.Level, check.Reason = Wrong, lb.ReasonMissing
		check.Text = fmt.Sprintf("the speakers on %s hang, or their nodes are cut off: they answer neither %s nor "+
			"landfallctl", list(hang, 4), s.Node)
		check.Cure = "kubectl -n landfall-system get pods -o wide --field-selector spec.nodeName=" + hang[0] +
			"   # delete the pod there"
	case len(unasked) > 0:
		check.Level, check.Reason = Wrong, lb.ReasonMissing
		check.Text = fmt.Sprintf("its speaker does not hear those on %s, and landfallctl cannot ask them why; %s: %s",
			list(unasked, 4), unasked[0], c.Agents[unasked[0]].Speaker.Unanswered)
		check.Cure = "kubectl describe node " + unasked[0] + "   # the API server has to reach its kubelet"
	case len(unseen) > 0 && strings.Contains(s.Members.Trouble, otherKey):
		check.Level, check.Reason = Wrong, lb.ReasonGossipBlocked
		check.Text = fmt.Sprintf("its speaker reaches that of %s, but they do not understand each other: most likely their "+
			"gossip keys differ", list(unseen, 4))
		check.Cure = "kubectl -n landfall-system rollout restart daemonset   # all speakers then read the same key; if a " +
			"roll-out waits for the first node: kubectl -n landfall-system delete pod -l 'app.kubernetes.io/component in " +
			"(node,speaker)', which replaces all at once: ARP and NDP get no answer for some seconds"
	case len(unseen) > 0 && !s.Members.Joined:
		check.Level, check.Reason = Wrong, lb.ReasonNotJoined
		check.Text = fmt.Sprintf("its speaker has not met that of %s: gossip is blocked, or the keys differ", list(unseen, 4))
		check.Cure = c.cure(check.Reason)
	case len(unseen) > 0:
		check.Level, check.Reason = Wrong, lb.ReasonGossipBlocked
		check.Text = fmt.Sprintf("its speaker does not hear the ready speakers on %s", list(unseen, 4))
		check.Cure = c.cure(check.Reason)
	case len(s.Members.Missing) > 0:
		check.Level, check.Text = Note, check.Text+"; missing: "+list(s.Members.Missing, 4)
	}
	return check
}

// links lists the interfaces.
func links(s *SpeakerStatus) Check {
	check := Check{Level: OK, What: "interfaces"}
	var names []string
	for _, i := range s.Interfaces {
		names = append(names, i.Name)
		if i.Problem != "" {
			check.Level, check.Text = Warning, fmt.Sprintf("interface %s: %s", i.Name, i.Problem)
			return check
		}
	}
	check.Text = strings.Join(names, ", ")
	return check
}
