package explain

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/labels"

	"github.com/landfall-lb/landfall/internal/lb"
)

// ServiceFacts are what was read of one Service.
type ServiceFacts struct {
	Key lb.Key
	// Found is false if there is none; then Service has no more than its name.
	Found   bool
	Service lb.Service
	// Namesakes are Services of the same name in other namespaces, if there is none in this one.
	Namesakes []lb.Key
	Slices    []lb.Slice
}

// Service explains whether and how clients reach a Service, and why not.
func Service(c Cluster, f ServiceFacts) Verdict {
	subject := "Service " + f.Key.String()
	if !f.Found && len(f.Namesakes) > 0 {
		var there []string
		for _, key := range f.Namesakes {
			there = append(there, key.String())
		}
		return missing(subject, "there is no such Service; there is "+list(there, 4),
			"landfallctl explain svc "+there[0])
	}
	if !f.Found {
		return missing(subject, "there is no such Service", "kubectl get services -A")
	}
	if !c.Installed {
		return missing(subject, "Landfall is not installed: the API server does not know its kinds",
			"helm install landfall …; see docs/guide/install.md")
	}
	e := explanation{Cluster: c, ServiceFacts: f}
	return judge(subject, e.good(), e.checks())
}

// explanation is one Service in its cluster.
type explanation struct {
	Cluster
	ServiceFacts
}

// names are the names that take the places in cures.
func (e explanation) names(pool string) []string {
	pairs := []string{"NAME", e.Key.Name + " -n " + e.Key.Namespace}
	if pool != "" {
		pairs = append(pairs, "POOL", pool)
	}
	return pairs
}

// checks lists the checks in the order of causes. One that makes the others meaningless is the
// last.
func (e explanation) checks() []Check {
	var checks []Check
	if e.NoPods != "" {
		checks = append(checks, e.noPods()) // so the class that Landfall serves is not known either
	}
	kind := e.kind()
	checks = append(checks, kind)
	if kind.Level == Wrong {
		return checks
	}
	assigned := e.assigned()
	checks = append(checks, assigned)
	vips := e.Service.VIPs()
	if len(vips) == 0 {
		if _, known := lb.FindCondition(e.Service.Conditions, lb.ConditionAssigned); !known && e.NoPods == "" {
			checks = append([]Check{e.controller()}, checks...)
		}
		return append(checks, e.unread()...)
	}
	for _, vip := range vips {
		checks = append(checks, e.pool(vip), e.advertised(vip))
	}
	checks = append(checks, e.backends())
	sessions := append(e.sessions(vips), e.taken(vips)...)
	announced := e.announced(vips)
	nodes := e.nodes(vips)
	if announced.Level == Wrong && e.fromElsewhere(announced.Reason) {
		// What the nodes and the sessions say is the cause, and this only the effect.
		checks = append(append(checks, sessions...), nodes...)
		checks = append(checks, announced)
	} else {
		checks = append(append(append(checks, announced), sessions...), nodes...)
	}
	checks = append(checks, slices.DeleteFunc(e.findings(), func(c Check) bool {
		if ofRelay(c.Reason) && (e.Service.Relay == "" || c.Reason == lb.ReasonRelayWithoutPort && !e.hasFamilyOf(c.Text)) {
			return true
		}
		// What concerns the Service's own addresses, its nodes have said, but for what only the node with it sees.
		return c.Reason == lb.ReasonAddressConflict || c.Reason == lb.ReasonAddressOnNode && !names(c.Text, vips)
	})...)
	checks = append(checks, e.mtus()...)
	checks = append(checks, e.reach()...)
	checks = append(checks, e.asRequested(), e.relay(), e.sources(), e.healthPort(), e.traffic())
	checks = append(checks, e.unread()...)
	return slices.DeleteFunc(checks, func(c Check) bool { return c.What == "" })
}

// hasFamilyOf reports whether the Service has a family that a text names.
func (e explanation) hasFamilyOf(text string) bool {
	return slices.ContainsFunc(e.Service.Families, func(f lb.Family) bool { return strings.Contains(text, string(f)) })
}

// names reports whether a text names one of some addresses, or may: it counts those that it leaves out.
func names(text string, addrs []netip.Addr) bool {
	words := strings.FieldsFunc(text, func(r rune) bool { return r == ' ' || r == ',' })
	return slices.ContainsFunc(words, func(word string) bool {
		return word == "more" || slices.ContainsFunc(addrs, func(a netip.Addr) bool { return a.String() == word })
	})
}

// fromElsewhere reports whether other checks know the cause of a reason better than the condition.
func (e explanation) fromElsewhere(reason lb.Reason) bool {
	switch reason {
	case lb.ReasonNotEstablished, lb.ReasonNotProgrammed, lb.ReasonFeedUnknown, lb.ReasonFeedLost, lb.ReasonAnnounceFailed,
		lb.ReasonNoOwner, lb.ReasonUnheard:
		return true
	}
	return false
}

// kind checks that Landfall serves the Service at all.
func (e explanation) kind() Check {
	s, check := e.Service, Check{Level: OK, What: "service"}
	wrong := func(cure, format string, args ...any) Check {
		return Check{Level: Wrong, What: "service", Text: fmt.Sprintf(format, args...), Cure: fill(cure, e.names("")...)}
	}
	proxy := s.Labels.Get(labelProxyName)
	switch {
	case s.Type != lb.LoadBalancer:
		return wrong(`kubectl patch service NAME -p '{"spec":{"type":"LoadBalancer"}}'`,
			"it is of type %s, and only Services of type LoadBalancer get an address", s.Type)
	case s.Class != e.Class && s.Class != "":
		return wrong("landfallctl explain svc NAME --load-balancer-class "+s.Class+"   # if that is a second Landfall",
			"spec.loadBalancerClass %s gives it to another load balancer, not to Landfall%s", s.Class, ofClass(e.Class))
	case s.Class != e.Class:
		return wrong("create it anew with spec.loadBalancerClass: "+e.Class,
			"it has no spec.loadBalancerClass, and Landfall serves only Services%s", ofClass(e.Class))
	case s.Deleting:
		return wrong("kubectl get service NAME -o jsonpath='{.metadata.finalizers}'",
			"it is being deleted: its addresses are withdrawn and it gets no new ones")
	case s.Headless:
		check := wrong(cureOf(lb.ReasonHeadless), "the label %s takes it down on all nodes", lb.LabelHeadless)
		check.Reason = lb.ReasonHeadless
		return check
	case proxy != e.ProxyName && !e.NoProxy && e.ProxyName != "":
		has, overwrite := "none", ""
		if proxy != "" {
			has, overwrite = strconv.Quote(proxy), " --overwrite"
		}
		return wrong("helm upgrade … --set proxy.serviceProxyName=   # or kubectl label service NAME "+
			labelProxyName+"="+e.ProxyName+overwrite, "Landfall's proxies serve only Services with the label %s=%s "+
			"(proxy.serviceProxyName), and it has %s", labelProxyName, e.ProxyName, has)
	case proxy != e.ProxyName && !e.NoProxy:
		return wrong("kubectl label service NAME "+labelProxyName+"-",
			"the label %s=%s gives it to another service proxy, so Landfall's proxies write no rules for it", labelProxyName,
			proxy)
	}
	check.Text = "type LoadBalancer" + ofClass(s.Class) + ", externalTrafficPolicy " + string(s.ExternalPolicy)
	return check
}

func ofClass(class string) string {
	if class == "" {
		return ""
	}
	return " of class " + class
}

// assigned checks that the Service holds an address.
func (e explanation) assigned() Check {
	cond, known := lb.FindCondition(e.Service.Conditions, lb.ConditionAssigned)
	var held []string
	for _, in := range e.Service.Ingress {
		held = append(held, in.Addr.String())
	}
	check := Check{Level: OK, What: "address", Text: strings.Join(held, ", ")}
	switch {
	case !known:
		check.Level, check.Text = Wrong, "the controller has not processed it yet, so it has no address"
		check.Cure = "kubectl -n landfall-system logs -l app.kubernetes.io/component=controller"
		if len(held) > 0 {
			check.Level, check.Text = Warning, "the controller has not processed it yet; something else wrote "+list(held, 4)
		}
	case !cond.Status:
		check.Level, check.Reason, check.Text = Wrong, cond.Reason, cond.Message
		if len(held) > 0 {
			check.Level = Warning // it works at the address that it keeps
		}
		check.Cure = cureOf(cond.Reason, e.names(e.poolIn(cond.Message))...)
	case len(held) == 0:
		check.Level, check.Text = Wrong, "its status has lost the address that the controller assigned; it is written "+
			"again soon"
	}
	return check
}

// poolIn returns the only pool, or the one that a message names.
func (e explanation) poolIn(message string) string {
	if len(e.Pools) == 1 {
		return e.Pools[0].Name
	}
	for _, p := range e.Pools {
		if strings.Contains(message, p.Name) {
			return p.Name
		}
	}
	return ""
}

// pool checks the pool of a VIP.
func (e explanation) pool(vip netip.Addr) Check {
	pools := e.poolsWith(vip)
	check := Check{Level: OK, What: "pool"}
	if len(pools) == 0 && e.hasUnread("ipaddresspools") {
		check.Level, check.Text = Note, "could not be read"
		return check
	}
	if len(pools) == 0 {
		check.Level, check.Reason = Warning, lb.ReasonHeldOutside
		check.Text = fmt.Sprintf("no pool contains %s any more; the Service keeps it, and no node announces it", vip)
		check.Cure = cureOf(lb.ReasonHeldOutside, e.names("")...)
		return check
	}
	p := pools[0]
	check.Text = fmt.Sprintf("%s contains %s", p.Name, vip)
	if ready, known := lb.FindCondition(p.Status.Conditions, lb.ConditionReady); known && !ready.Status {
		check.Level, check.Reason, check.Text = Note, ready.Reason, fmt.Sprintf("%s: %s", p.Name, ready.Message)
	}
	return check
}

// advertised checks that an advertisement selects a VIP.
func (e explanation) advertised(vip netip.Addr) Check {
	l2, routed := e.advertisements(vip)
	var names []string
	for _, a := range l2 {
		names = append(names, "L2Advertisement "+a.Name)
	}
	for _, a := range routed {
		names = append(names, "BGPAdvertisement "+a.Name)
	}
	check := Check{Level: OK, What: "advertisement", Text: strings.Join(names, ", ")}
	if len(names) == 0 && e.unreadAdvertisements() {
		check.Level, check.Text = Note, "could not be read"
		return check
	}
	if len(names) == 0 && len(e.poolsWith(vip)) > 0 {
		check.Level, check.Reason = Wrong, lb.ReasonNoAdvertisement
		check.Text = fmt.Sprintf("no L2Advertisement or BGPAdvertisement selects pool %s and this Service, so no node "+
			"announces %s",
			e.poolsWith(vip)[0].Name, vip)
		check.Cure = cureOf(lb.ReasonNoAdvertisement)
	}
	for _, a := range l2 {
		if ready, known := lb.FindCondition(a.Conditions, lb.ConditionReady); known && !ready.Status && check.Level == OK {
			check.Level, check.Reason = Warning, ready.Reason
			check.Text = fmt.Sprintf("L2Advertisement %s: %s", a.Name, ready.Message)
		}
	}
	for _, a := range routed {
		if ready, known := lb.FindCondition(a.Conditions, lb.ConditionReady); known && !ready.Status && check.Level == OK {
			check.Level, check.Reason = Warning, ready.Reason
			check.Text = fmt.Sprintf("BGPAdvertisement %s: %s", a.Name, ready.Message)
		}
	}
	return check
}

// advertisements returns those that select a VIP of the Service.
func (e explanation) advertisements(vip netip.Addr) (l2 []lb.L2Advertisement, routed []lb.BGPAdvertisement) {
	for _, pool := range e.poolsWith(vip) {
		for _, a := range e.L2 {
			if a.Selects(pool) && matches(a.ServiceSelectors, e.Service.Labels) {
				l2 = append(l2, a)
			}
		}
		for _, a := range e.BGP {
			if a.SelectsPool(pool) && matches(a.ServiceSelectors, e.Service.Labels) {
				routed = append(routed, a)
			}
		}
	}
	return l2, routed
}

// matches reports whether one of the selectors matches, or there are none.
func matches(selectors []labels.Selector, set labels.Set) bool {
	return len(selectors) == 0 || slices.ContainsFunc(selectors, func(s labels.Selector) bool { return s.Matches(set) })
}

// endpoints counts the endpoints of the Service by address.
func (e explanation) endpoints() (ready, serving, all int, nodes []string) {
	seen := map[netip.Addr]bool{}
	for _, slice := range e.Slices {
		for _, ep := range slice.Endpoints {
			if seen[ep.Addr] {
				continue
			}
			seen[ep.Addr] = true
			switch {
			case ep.Ready:
				ready++
			case ep.Serving && ep.Terminating:
				serving++
			default:
				continue
			}
			if ep.Node != "" && !slices.Contains(nodes, ep.Node) {
				nodes = append(nodes, ep.Node)
			}
		}
	}
	slices.Sort(nodes)
	return ready, serving, len(seen), nodes
}

// unservedPorts names the ports of the Service that no EndpointSlice with endpoints has.
func (e explanation) unservedPorts() (names []string) {
	for _, port := range e.Service.Ports {
		serves := func(s lb.Slice) bool {
			return len(s.Endpoints) > 0 && slices.ContainsFunc(s.Ports, func(p lb.SlicePort) bool {
				return p.Name == port.Name && p.Protocol == port.Protocol
			})
		}
		if !slices.ContainsFunc(e.Slices, serves) {
			names = append(names, strings.TrimPrefix(port.Name+" ", " ")+fmt.Sprintf("%d/%s", port.Port, port.Protocol))
		}
	}
	return names
}

// backends checks that there is something to deliver to.
func (e explanation) backends() Check {
	ready, serving, all, nodes := e.endpoints()
	check := Check{Level: OK, What: "backends", Text: plural(ready, "ready endpoint")}
	if len(nodes) > 0 {
		check.Text += " on " + list(nodes, 4)
	}
	describe := fill("kubectl get endpointslices -n NAMESPACE -l kubernetes.io/service-name=SERVICE",
		"NAMESPACE", e.Key.Namespace, "SERVICE", e.Key.Name)
	missing := e.unservedPorts()
	switch {
	case ready > 0 && len(missing) > 0:
		check.Level, check.Reason, check.Cure = Warning, lb.ReasonNoBackends, describe
		if len(missing) == len(e.Service.Ports) {
			check.Level = Wrong
		}
		check.Text = fmt.Sprintf("its endpoints have no port for %s, so clients are refused there: targetPort names a port "+
			"that no container of the pods has", list(missing, 4))
	case ready > 0 && e.Service.ExternalPolicy == lb.Local && len(nodes) == 0:
		check.Level, check.Reason, check.Cure = Wrong, lb.ReasonNoLocalBackends, describe
		check.Text = fmt.Sprintf("none of its %s has a nodeName in its EndpointSlice, so with externalTrafficPolicy Local "+
			"no node delivers to them", plural(ready, "ready endpoint"))
	case ready > 0:
	case e.hasUnread("endpointslices"):
		check.Level, check.Text = Note, "could not be read"
	case serving > 0:
		check.Level, check.Text = Warning, plural(serving, "endpoint")+", all of them terminating"
	case all > 0:
		check.Level, check.Reason, check.Cure = Wrong, lb.ReasonNoBackends, describe
		check.Text = fmt.Sprintf("none of its %s is ready, so clients are refused", plural(all, "endpoint"))
	default:
		check.Level, check.Reason, check.Cure = Wrong, lb.ReasonNoBackends, describe
		check.Text = "it has no endpoints, so clients are refused: its selector matches no pod with an address"
	}
	return check
}

// announced checks whether a node announces each VIP: by what a speaker says now, else by what one
// has written to the Service.
func (e explanation) announced(vips []netip.Addr) Check {
	cond, known := lb.FindCondition(e.Service.Conditions, lb.ConditionAnnounced)
	check := Check{Level: OK, What: "announced", Text: cond.Message}
	down, total := 0, 0
	for _, node := range slices.Sorted(maps.Keys(e.Agents)) {
		total++
		if !e.Agents[node].Speaker.Running {
			down++
		}
	}
	switch {
	case total > 0 && down == total && !e.hasUnread("pods"):
		check.Level, check.Text = Wrong, "no speaker runs, so no node announces its address"
		check.Cure = "kubectl -n landfall-system get pods"
	case !known:
		check.Level, check.Reason = Wrong, lb.ReasonUnheard
		check.Text = "no speaker has reported on it yet, so its address is not announced"
		check.Cure = "kubectl -n landfall-system logs -l app.kubernetes.io/component=node -c speaker"
	case !cond.Status:
		check.Level, check.Reason = Wrong, cond.Reason
		check.Cure = e.cure(cond.Reason, append(e.names(""), "NODE", e.anyNode())...)
		if cond.Reason == lb.ReasonProbing {
			check.Level = Warning
		}
	case cond.Reason == lb.ReasonContested || cond.Reason == lb.ReasonParting:
		check.Level, check.Reason = Warning, cond.Reason
		check.Cure = cureOf(cond.Reason, e.names("")...)
		for _, node := range slices.Sorted(maps.Keys(e.Cluster.Nodes)) {
			if e.Cluster.Nodes[node].Leaving == lb.ReasonNodeDrained {
				check.Cure = cureOf(lb.ReasonNodeDrained, "NODE", node)
				break
			}
		}
	default:
		for _, vip := range vips {
			if view, heard := e.view(vip); heard && !slices.ContainsFunc(view.Nodes,
				func(n NodeVIP) bool { return n.Answering }) {
				check.Level, check.Reason = Wrong, lb.ReasonUnheard
				check.Text = fmt.Sprintf("no node announces %s now, although the Service's condition says so", vip)
			}
		}
	}
	return check
}

// anyNode is a node for a command that is for each of them.
func (e explanation) anyNode() string {
	nodes := slices.Sorted(maps.Keys(e.Cluster.Nodes))
	if len(nodes) == 0 {
		return "NODE"
	}
	return nodes[0]
}

// view returns what a speaker says of a VIP: the owner's, if that was asked.
func (e explanation) view(vip netip.Addr) (SpeakerVIP, bool) {
	var best SpeakerVIP
	found := false
	for _, node := range slices.Sorted(maps.Keys(e.Agents)) {
		if v, ok := e.Agents[node].vip(vip); ok && (!found || v.Owner == node) {
			best, found = v, true
		}
	}
	return best, found
}

// ofRelay reports whether a finding concerns only Services that ask for the relay.
func ofRelay(reason lb.Reason) bool {
	return slices.Contains([]lb.Reason{lb.ReasonRelayAway, lb.ReasonRelayFull, lb.ReasonRelayDropped,
		lb.ReasonRelayWithoutPort, lb.ReasonRelayWithoutUDP, lb.ReasonRelayLeaseFailed}, reason)
}

// leads returns where connections to a Service with these ports end, or flows if it has UDP alone.
func (r *ProxyRelay) leads(ports []lb.ServicePort) map[lb.Family]netip.AddrPort {
	has := func(protocol lb.Protocol) bool {
		return slices.ContainsFunc(ports, func(p lb.ServicePort) bool { return p.Protocol == protocol })
	}
	if has(lb.UDP) && !has(lb.TCP) {
		return r.LeadsUDP
	}
	return r.Leads
}

// relaysPartly returns the finding by which a node relays one of some families alone.
func (a Agent) relaysPartly(families []lb.Family, leads map[lb.Family]netip.AddrPort) (lb.Finding, bool) {
	for _, family := range families {
		if _, leads := leads[family]; leads {
			continue
		}
		for _, f := range a.findings() {
			if f.Reason != lb.ReasonRelayAway && ofRelay(f.Reason) && strings.Contains(f.Message, string(family)) {
				return f, true
			}
		}
	}
	return lb.Finding{}, false
}

// asRequested says what of the Service's requests a node does not follow, as the first such node wrote it.
func (e explanation) asRequested() Check {
	c := e.Service.AsRequested
	if c.Type == "" || c.Status {
		return Check{}
	}
	if relay := e.relay(); relay.Reason == c.Reason && strings.Contains(c.Message, relay.Text) {
		return Check{} // which says as much
	}
	return Check{Level: Warning, What: "requests", Reason: c.Reason, Text: c.Message,
		Cure: e.cure(c.Reason, e.names("")...)}
}

// relay says where connections end at the relay, if the Service asks for that, and why they do not
// elsewhere.
func (e explanation) relay() Check {
	if e.Service.Relay == "" || e.Service.Relay == "false" {
		return Check{}
	}
	var relayed, straight []string
	connections := 0
	check := Check{Level: OK, What: "relay"}
	because := func(reason lb.Reason, why string) {
		if check.Level == OK {
			check.Level, check.Reason, check.Text, check.Cure = Warning, reason, why, e.cure(reason, e.names("")...)
		}
	}
	for _, node := range slices.Sorted(maps.Keys(e.Agents)) {
		agent := e.Agents[node]
		s, ok := agent.service(e.Key)
		if !ok {
			continue
		}
		r := agent.Delivers.Relay
		if s.Relayed && r != nil && len(r.leads(e.Service.Ports)) > 0 {
			if f, partly := agent.relaysPartly(e.Service.Families, r.leads(e.Service.Ports)); partly {
				straight = append(straight, node)
				because(f.Reason, f.Message)
				continue
			}
			relayed, connections = append(relayed, node), connections+r.Connections
			continue
		}
		straight = append(straight, node)
		switch {
		case !s.Relayed && s.Advice != "":
			because(lb.ReasonRelayRefused, s.Advice)
		case !s.Relayed || r == nil: // no port has an endpoint, or the proxy is about to write it
		case r.Full:
			because(lb.ReasonRelayFull, r.Message)
		case agent.Relay.There && !agent.Relay.Running:
			because(lb.ReasonRelayAway, "the container relay does not run: "+agent.Relay.Why)
		default:
			reason, why := lb.ReasonRelayAway, r.Message
			for _, f := range agent.findings() {
				if f.Reason != lb.ReasonRelayAway && ofRelay(f.Reason) {
					reason, why = f.Reason, f.Message
				}
			}
			because(reason, why)
		}
	}
	switch {
	case len(relayed)+len(straight) == 0:
		return Check{}
	case check.Level == Warning:
		check.Text = "connections go straight to endpoints on " + list(straight, 4) + ": " + check.Text
		return check
	case len(straight) > 0:
		check.Level, check.Text = Note, "nothing is relayed on "+list(straight, 4)
	}
	if len(relayed) > 0 {
		check.Text = strings.TrimPrefix(check.Text+"; ", "; ") + fmt.Sprintf(
			"connections end at the relays of %s, which have %s of all Services", list(relayed, 4),
			plural(connections, "connection"))
	}
	return check
}

// sources notes who may connect.
func (e explanation) sources() Check {
	if len(e.Service.SourceRanges) == 0 {
		return Check{}
	}
	if invalid := e.Service.InvalidRange; invalid != "" {
		return Check{Level: Warning, What: "source ranges", Reason: lb.ReasonSourceRangeInvalid,
			Text: fmt.Sprintf("the entry %s of loadBalancerSourceRanges cannot be read, and admits nobody", invalid),
			Cure: cureOf(lb.ReasonSourceRangeInvalid, e.names("")...)}
	}
	return Check{Level: Note, What: "source ranges",
		Text: "loadBalancerSourceRanges admits only clients in " + e.ranges() + "; others are dropped"}
}

func (e explanation) ranges() string {
	var ranges []string
	for _, r := range e.Service.SourceRanges {
		ranges = append(ranges, r.String())
	}
	return list(ranges, 3)
}

// healthPort says what the health ports of the nodes that were asked answer.
func (e explanation) healthPort() Check {
	port := e.Service.HealthCheckNodePort
	if port == 0 {
		return Check{}
	}
	var good, bad []string
	for _, node := range slices.Sorted(maps.Keys(e.Agents)) {
		s, ok := e.Agents[node].service(e.Key)
		if !ok || s.HealthPort == 0 {
			continue
		}
		ready := 0
		for _, n := range s.LocalReady {
			ready += n
		}
		if ready > 0 {
			good = append(good, node)
		} else {
			bad = append(bad, node)
		}
	}
	check := Check{Level: OK, What: "health port", Text: fmt.Sprintf("%d", port)}
	if len(good) > 0 {
		check.Text += " answers 200 on " + list(good, 4)
	}
	if len(bad) > 0 {
		check.Text += ", 503 on " + list(bad, 4)
	}
	return check
}

// traffic says what the nodes that were asked have counted; nothing without --service-counters.
func (e explanation) traffic() Check {
	sum, nodes := Counters{Refused: map[lb.Reason]uint64{}}, []string{}
	for _, node := range slices.Sorted(maps.Keys(e.Agents)) {
		s, ok := e.Agents[node].service(e.Key)
		if !ok || s.Counters == nil {
			continue
		}
		nodes = append(nodes, node)
		sum.Connections += s.Counters.Connections
		sum.BytesReceived += s.Counters.BytesReceived
		sum.BytesSent += s.Counters.BytesSent
		for reason, n := range s.Counters.Refused {
			sum.Refused[reason] += n
		}
	}
	if len(nodes) == 0 {
		return Check{}
	}
	parts := []string{fmt.Sprintf("%d connections, %d bytes received, %d sent on %s", sum.Connections, sum.BytesReceived,
		sum.BytesSent, list(nodes, 4))}
	for _, reason := range slices.Sorted(maps.Keys(sum.Refused)) {
		parts = append(parts, fmt.Sprintf("%d refused: %s", sum.Refused[reason], reason))
	}
	return Check{Level: Note, What: "traffic", Text: strings.Join(parts, "; ")}
}

// good is the line when nothing is wrong.
func (e explanation) good() string {
	cond, _ := lb.FindCondition(e.Service.Conditions, lb.ConditionAnnounced)
	ready, serving, _, _ := e.endpoints()
	line := fmt.Sprintf("%s; %s", strings.TrimSuffix(cond.Message, "."), plural(ready+serving, "endpoint"))
	if len(e.Service.SourceRanges) > 0 {
		line += "; only for clients in " + e.ranges() + " (loadBalancerSourceRanges)"
	}
	return line
}
