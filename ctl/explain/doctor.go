package explain

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/landfall-lb/landfall/internal/lb"
)

// DoctorFacts are what was read of a cluster as a whole.
type DoctorFacts struct {
	// Version is that of the API server, such as v1.35.4.
	Version string
	// KubeProxy is set if pods of kube-proxy run; Mode and StrictARP are in its configuration.
	KubeProxy, StrictARP bool
	Mode                 string
	// Others are other load balancers that run, such as MetalLB.
	Others []string
	// Another is set if a Landfall runs in another namespace, for Services of another class.
	Another bool
	// Namespace is that of Landfall; PodSecurity is its level that is enforced, "" if there is none.
	Namespace, PodSecurity string
	// Refused says why the API server refuses the pods of speaker and proxy while there are none; "" if it
	// does not, or if that is not known.
	Refused  string
	Services []lb.Service
}

// leastMinor is the oldest Kubernetes that Landfall runs on: 1.31.
const leastMinor = 31

// OtherPods is the name, among what is unread, of pods beside Landfall's: those of kube-proxy and of other load
// balancers.
const OtherPods = "pods of all namespaces"

// Doctor examines a cluster: before an install whether something is in Landfall's way, and after it
// whether something is wrong.
func Doctor(c Cluster, d DoctorFacts) Verdict {
	checks := append([]Check{version(d.Version)}, c.podSecurity(d))
	if c.Installed {
		checks = append(checks, c.controller())
		checks = append(checks, c.allPrograms(d)...)
		for _, node := range slices.Sorted(maps.Keys(c.Agents)) {
			a := c.Agents[node]
			for _, check := range append([]Check{c.hears(a)}, gate(a)...) {
				if check.Level.Worse(OK) {
					checks = append(checks, check)
				}
			}
		}
	}
	checks = append(checks, c.findings()...)
	checks = append(checks, c.mtus()...)
	checks = append(checks, c.allNodes()...)
	checks = append(checks, c.kubeProxy(d), c.others(d))
	if c.Installed {
		checks = append(checks, c.pools(d.Services)...)
		for _, p := range c.Peers {
			check, _ := c.peer(p)
			checks = append(checks, check)
		}
		checks = append(append(checks, c.otherClasses(d)...), c.services(d.Services)...)
	}
	checks = append(checks, c.unread()...)
	good := fmt.Sprintf("nothing is wrong: %s", plural(len(c.Nodes), "node"))
	if !c.Installed {
		good = "Landfall is not installed, and nothing is in its way"
	}
	return examined(judge("Cluster", good, slices.DeleteFunc(checks, func(c Check) bool { return c.What == "" })))
}

// examined is the verdict of an examination: what could not be looked at is not certainly well.
func examined(v Verdict) Verdict {
	if v.Level == OK && worst(v.Checks) == Unknown {
		v.Level = Unknown
	}
	return v
}

// DoctorNode examines one node of a cluster, and what concerns all nodes.
func DoctorNode(c Cluster, d DoctorFacts, name string) Verdict {
	subject := "Node " + name
	n, ok := c.Nodes[name]
	switch {
	case !ok && c.hasUnread("nodes"):
		return c.unreadable(subject, "nodes")
	case !ok:
		return missing(subject, "there is no such Node", "kubectl get nodes")
	}
	alone := c
	// Whether other nodes are excluded too does not matter here.
	alone.Nodes, alone.Agents, alone.IgnoreExclude = map[string]Node{name: n}, map[string]Agent{}, true
	a, there := c.Agents[name]
	if there {
		alone.Agents[name] = a
	}
	alone.Warnings = slices.DeleteFunc(slices.Clone(c.Warnings), func(w NodeWarning) bool { return w.Node != name })
	checks := []Check{version(d.Version), c.podSecurity(d)}
	if c.Installed {
		checks = append(checks, c.controller())
		checks = append(checks, c.programs(name)...)
		checks = append(append(checks, c.hears(a)), gate(a)...)
		if s := a.Said; s != nil {
			checks = append(checks, links(s))
			for _, p := range s.BGP.Peers {
				checks = append(checks, c.session(name, p))
			}
		}
	}
	checks = append(checks, alone.findings()...)
	checks = append(checks, alone.allNodes()...)
	if _, excluded := n.Labels[labelExclude]; excluded && !c.IgnoreExclude {
		checks = append(checks, Check{Level: Note, What: "exclude label", Reason: lb.ReasonNodeExcluded,
			Text: "it announces no address, as it has the label " + labelExclude})
	}
	checks = append(checks, c.kubeProxy(d), c.others(d))
	checks = append(checks, c.unread()...)
	good := "nothing is wrong"
	if !c.Installed {
		good = "Landfall is not installed, and nothing is in its way"
	}
	return examined(judge(subject, good, slices.DeleteFunc(checks, func(c Check) bool { return c.What == "" })))
}

func version(of string) Check {
	check := Check{Level: OK, What: "Kubernetes", Text: of}
	parts := strings.Split(strings.TrimPrefix(of, "v"), ".")
	if len(parts) < 2 {
		check.Level, check.Text = Note, "the API server does not say its version"
		return check
	}
	minor, err := strconv.Atoi(strings.TrimRight(parts[1], "+"))
	if err == nil && parts[0] == "1" && minor < leastMinor {
		check.Level = Wrong
		check.Text = fmt.Sprintf("Kubernetes %s is too old: Landfall needs 1.%d or later", of, leastMinor)
		check.Cure = "upgrade the cluster"
	}
	return check
}

// podSecurity checks that the API server lets Landfall's pods use the network of their nodes.
func (c Cluster) podSecurity(d DoctorFacts) Check {
	if c.hasUnread("namespaces") {
		return Check{}
	}
	check := Check{Level: OK, What: "Pod Security", Text: "namespace " + d.Namespace + " sets no level"}
	switch {
	case d.PodSecurity == "" && !c.Installed:
		check.Text += "; if the API server enforces one by default, label the namespace privileged"
	case d.PodSecurity == "privileged":
		check.Text = "namespace " + d.Namespace + " enforces privileged"
	case d.PodSecurity != "":
		check.Level = Wrong
		check.Text = fmt.Sprintf("namespace %s enforces Pod Security %s, so the pods of speaker and proxy are refused",
			d.Namespace, d.PodSecurity)
	case strings.Contains(d.Refused, "violates PodSecurity"):
		check.Level = Wrong
		check.Text = fmt.Sprintf("the API server enforces Pod Security by default, and namespace %s sets no level, so the "+
			"pods of speaker and proxy are refused", d.Namespace)
	}
	if check.Level == Wrong {
		check.Cure = fmt.Sprintf("kubectl label namespace %s pod-security.kubernetes.io/enforce=privileged --overwrite",
			d.Namespace)
	}
	return check
}

// maxRefusal is how much is shown of why the API server refuses pods, in bytes.
const maxRefusal = 200

// allPrograms checks the pods of all nodes: which do not run, and whether all have one version.
func (c Cluster) allPrograms(d DoctorFacts) []Check {
	if c.hasUnread("pods") {
		return nil
	}
	var checks []Check
	images := map[string][]string{}
	var without []string
	for _, node := range slices.Sorted(maps.Keys(c.Nodes)) {
		a, there := c.Agents[node]
		if !there {
			without = append(without, node)
			continue
		}
		for _, check := range c.programs(node) {
			if check.Level.Worse(OK) {
				checks = append(checks, check)
			}
		}
		for _, p := range []Program{a.Speaker, a.Proxy} {
			if p.There && !slices.Contains(images[p.Image], node) {
				images[p.Image] = append(images[p.Image], node)
			}
		}
	}
	switch {
	case c.NoPods != "" && d.Refused == "": // said already
	case len(c.Agents) == 0:
		text := "speaker and proxy run on no node, so no address is announced"
		if d.Refused != "" {
			text += ": " + lb.Shortened(d.Refused, maxRefusal)
		}
		checks = append(checks, Check{Level: Wrong, What: "programs", Text: text,
			Cure: "kubectl -n landfall-system describe daemonset   # why it has no pods"})
	case len(without) > 0:
		checks = append(checks, Check{Level: Note, What: "programs",
			Text: "no pod of Landfall is on " + list(without, 4) + ": those nodes neither announce nor deliver"})
	}
	if len(images) > 1 {
		var parts []string
		for _, image := range slices.Sorted(maps.Keys(images)) {
			parts = append(parts, fmt.Sprintf("%s on %s", image, list(images[image], 2)))
		}
		checks = append(checks, Check{Level: Warning, What: "versions",
			Text: "the nodes run different versions: " + strings.Join(parts, "; "),
			Cure: "kubectl -n landfall-system rollout status daemonset"})
	}
	return checks
}

// hears checks that the speaker of a node that was asked hears the others.
func (c Cluster) hears(a Agent) Check {
	if a.Said == nil {
		return Check{}
	}
	check := c.members(a.Said)
	check.What, check.Text = "node "+a.Node, a.Node+": "+check.Text
	return check
}

// allNodes checks what the Nodes show.
func (c Cluster) allNodes() []Check {
	if c.hasUnread("nodes") {
		return nil
	}
	check := Check{Level: OK, What: "nodes", Text: plural(len(c.Nodes), "node")}
	var excluded, drained, down, without []string
	var still []Check // of nodes that are drained, and announce all the same
	for _, name := range slices.Sorted(maps.Keys(c.Nodes)) {
		n := c.Nodes[name]
		if _, has := n.Labels[labelExclude]; has {
			excluded = append(excluded, name)
		}
		if what := c.Agents[name].stillAnnounces(); n.Leaving == lb.ReasonNodeDrained && what != "" {
			still = append(still, Check{Level: Note, What: "drained", Reason: lb.ReasonNodeDrained,
				Text: name + " is drained, and " + what})
		} else if n.Leaving == lb.ReasonNodeDrained {
			drained = append(drained, name)
		}
		if !n.Ready {
			down = append(down, name)
		}
		if len(n.PodCIDRs) == 0 {
			without = append(without, name)
		}
	}
	checks := []Check{check}
	switch {
	case len(c.Nodes) > 0 && len(excluded) == len(c.Nodes) && !c.IgnoreExclude:
		checks = append(checks, Check{Level: Wrong, What: "exclude label", Reason: lb.ReasonNodeExcluded,
			Text: "every node has the label " + labelExclude + ", so no node announces an address",
			Cure: cureOf(lb.ReasonNodeExcluded, "NODE", excluded[0])})
	case len(excluded) > 0 && !c.IgnoreExclude:
		checks = append(checks, Check{Level: Note, What: "exclude label",
			Text: "no address is announced from " + list(excluded, 4) + ": label " + labelExclude})
	}
	if len(drained) > 0 {
		checks = append(checks, Check{Level: Note, What: "drained", Reason: lb.ReasonNodeDrained,
			Text: "no address is announced from " + list(drained, 4) + " until landfallctl undrain NODE"})
	}
	checks = append(checks, still...)
	if len(down) > 0 {
		checks = append(checks, Check{Level: Warning, What: "nodes",
			Text: fmt.Sprintf("not ready: %s: %s", list(down, 4), c.Nodes[down[0]].NotReady),
			Cure: "kubectl describe node " + down[0]})
	}
	if len(without) > 0 {
		checks = append(checks, Check{Level: Note, What: "podCIDR",
			Text: list(without, 4) + " have no spec.podCIDR: set proxy.clusterCIDR to the network of the pods"})
	}
	return checks
}

// labelExclude keeps a node out of external load balancing, whatever its value (KEP-1143).
const labelExclude = "node.kubernetes.io/exclude-from-external-load-balancers"

func (c Cluster) kubeProxy(d DoctorFacts) Check {
	check := Check{Level: OK, What: "kube-proxy", Text: "does not run"}
	switch {
	case !d.KubeProxy && c.hasUnread(OtherPods):
		return Check{}
	case !d.KubeProxy && c.Installed && c.NoProxy:
		check.Level, check.Text = Note, "neither kube-proxy nor Landfall's proxy runs: does another service proxy deliver?"
	case !d.KubeProxy:
	case d.Mode == "ipvs" && !d.StrictARP:
		check.Level, check.Reason = Wrong, lb.ReasonARPNotStrict
		check.Text = "kube-proxy runs in mode ipvs without strictARP, so every node answers ARP for every address"
		check.Cure = cureOf(lb.ReasonARPNotStrict)
	default:
		check.Text = "runs"
		if d.Mode != "" {
			check.Text += " in mode " + d.Mode
		}
		without := c.withoutProxy()
		switch {
		case !c.Installed:
		case c.NoProxy:
			check.Level, check.Cure = Note, cleanup
			check.Text += ", and Landfall's proxy on no node: if it ever ran, its rules may still come first " +
				"(docs/guide/migrate-kube-proxy.md, Give back)"
		case len(without) > 0:
			check.Level, check.Cure = Warning, cleanup
			check.Text = fmt.Sprintf("kube-proxy %s on %s without Landfall's proxy: rules of an earlier one may still "+
				"come first there, and follow no change of Services", check.Text, list(without, 4))
		default:
			check.Level, check.Text = Note, check.Text+" beside Landfall's proxy, which comes first: it can go"
		}
	}
	return check
}

// cleanup removes the rules that a proxy has left.
const cleanup = "landfall-proxy cleanup on each node   # docs/guide/migrate-kube-proxy.md, Give back, step 3"

// withoutProxy returns the nodes on which Landfall's proxy could run, and does not.
func (c Cluster) withoutProxy() (names []string) {
	if c.hasUnread("pods") || c.NoPods != "" {
		return nil
	}
	for _, name := range slices.Sorted(maps.Keys(c.Nodes)) {
		system := c.Nodes[name].Labels["kubernetes.io/os"]
		if !c.Agents[name].Proxy.There && (system == "" || system == "linux") {
			names = append(names, name)
		}
	}
	return names
}

func (c Cluster) others(d DoctorFacts) Check {
	switch {
	case len(d.Others) == 0 && c.hasUnread(OtherPods):
		return Check{}
	case len(d.Others) == 0:
		return Check{Level: OK, What: "other load balancers", Text: "none"}
	case c.Class != "":
		return Check{Level: Note, What: "other load balancers",
			Text: fmt.Sprintf("%s; Landfall serves class %s only", list(d.Others, 4), c.Class)}
	}
	check := Check{Level: Warning, What: "other load balancers",
		Text: fmt.Sprintf("%s also gives addresses to Services without spec.loadBalancerClass", list(d.Others, 4)),
		Cure: "helm upgrade … --set loadBalancerClass=landfall.dev/landfall   # or remove the other one"}
	served := func(s lb.Service) bool {
		_, known := lb.FindCondition(s.Conditions, lb.ConditionAssigned)
		return known && s.Class == c.Class
	}
	if c.hasUnread("services") || slices.ContainsFunc(d.Services, served) {
		check.Cure = "remove the other one   # with another loadBalancerClass, Landfall withdraws its Services' addresses"
	}
	return check
}

// otherClasses finds Services that Landfall has announced, and announces no more as it serves another class now.
// Without another Landfall nobody does, and their class cannot be changed.
func (c Cluster) otherClasses(d DoctorFacts) (checks []Check) {
	if len(c.Controllers) == 0 || d.Another || c.hasUnread(OtherPods) {
		return nil // then the class that Landfall serves is not known, or another one serves theirs
	}
	byClass := map[string][]string{}
	for _, s := range d.Services {
		announced, known := lb.FindCondition(s.Conditions, lb.ConditionAnnounced)
		if known && announced.Status && s.Type == lb.LoadBalancer && s.Class != c.Class && !s.Deleting {
			byClass[s.Class] = append(byClass[s.Class], s.Key.String())
		}
	}
	serves := "Services without a class"
	if c.Class != "" {
		serves = "class " + c.Class
	}
	for _, class := range slices.Sorted(maps.Keys(byClass)) {
		keys := byClass[class]
		slices.Sort(keys)
		says := "say that Landfall announces them"
		if len(keys) == 1 {
			says = "says that Landfall announces it"
		}
		of := "of class " + class
		if class == "" {
			of = "without a class"
		}
		checks = append(checks, Check{Level: Wrong, What: "Services",
			Text: fmt.Sprintf("%s %s still %s, which serves %s: %s", plural(len(keys), "Service"), of, says, serves,
				list(keys, 4)),
			Cure: "helm upgrade … --set loadBalancerClass=" + class + "   # that of a Service cannot be changed"})
	}
	return checks
}

func (c Cluster) pools(services []lb.Service) []Check {
	if len(c.Pools) == 0 && !c.hasUnread("ipaddresspools") {
		return []Check{{Level: Wrong, What: "pools", Reason: lb.ReasonNoPool,
			Text: "there is no IPAddressPool, so no Service gets an address", Cure: "create one: README.md shows it"}}
	}
	var checks []Check
	for _, p := range c.Pools {
		v := Pool(Cluster{Pools: []lb.Pool{p}, L2: c.L2, BGP: c.BGP, Controllers: c.Controllers, Leader: c.Leader,
			NoPods: c.NoPods, Unread: c.Unread}, p.Name,
			Waiting(services, c.Class, p.Name))
		line, _, _ := strings.Cut(strings.TrimPrefix(v.Line, "IPAddressPool "+p.Name+": "), notChecked)
		check := Check{Level: v.Level, What: "pool " + p.Name, Reason: v.Reason, Cure: v.Cure,
			Text: strings.TrimSuffix(line, fmt.Sprintf(" (%s)", v.Reason))}
		if v.Level.Worse(OK) {
			check.Text = check.What + ": " + check.Text // it may become the verdict
		}
		checks = append(checks, check)
	}
	return checks
}

// Waiting returns the Services that a pool has no address for. The message names the pools that are
// full.
func Waiting(services []lb.Service, class, pool string) []lb.Key {
	var waiting []lb.Key
	apart := func(r rune) bool { return strings.ContainsRune(" ,;:()\"", r) }
	for _, s := range services {
		c, known := lb.FindCondition(s.Conditions, lb.ConditionAssigned)
		if known && !c.Status && c.Reason == lb.ReasonPoolExhausted && s.Class == class && s.Type == lb.LoadBalancer &&
			slices.Contains(strings.FieldsFunc(c.Message, apart), pool) {
			waiting = append(waiting, s.Key)
		}
	}
	slices.SortFunc(waiting, lb.Key.Compare)
	return waiting
}

// services checks that each Service has its address, and that it is announced: one check for each
// reason.
func (c Cluster) services(services []lb.Service) []Check {
	type about struct {
		keys  []string
		first string
	}
	byReason := map[lb.Reason]*about{}
	total := 0
	for _, s := range services {
		if s.Type != lb.LoadBalancer || s.Class != c.Class || s.Deleting {
			continue
		}
		total++
		worst, known := lb.FindCondition(s.Conditions, lb.ConditionAssigned)
		if known && worst.Status {
			if announced, ok := lb.FindCondition(s.Conditions, lb.ConditionAnnounced); ok {
				worst = announced
			}
		}
		switch {
		case !known:
			worst.Reason, worst.Message = "", "the controller has not processed it yet"
		case worst.Status && worst.Reason != lb.ReasonContested && worst.Reason != lb.ReasonParting:
			continue
		}
		one := byReason[worst.Reason]
		if one == nil {
			one = &about{first: worst.Message}
			byReason[worst.Reason] = one
		}
		one.keys = append(one.keys, s.Key.String())
	}
	if c.hasUnread("services") {
		return nil
	}
	checks := []Check{{Level: OK, What: "Services", Text: plural(total, "Service") + " of type LoadBalancer"}}
	for _, reason := range slices.Sorted(maps.Keys(byReason)) {
		one := byReason[reason]
		slices.Sort(one.keys)
		text := fmt.Sprintf("Service %s: %s", one.keys[0], one.first)
		if len(one.keys) > 1 {
			text += fmt.Sprintf("; the same reason for %s", list(one.keys[1:], 3))
		}
		namespace, name, _ := strings.Cut(one.keys[0], "/")
		checks = append(checks, Check{Level: Wrong, What: "Services", Reason: reason, Text: text,
			Cure: fmt.Sprintf("landfallctl explain svc %s -n %s", name, namespace)})
	}
	return checks
}
