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

// sessions checks the sessions that carry routes of some VIPs.
func (e explanation) sessions(vips []netip.Addr) []Check {
	wanted := map[string]bool{}
	overL2, overBGP := false, false
	for _, vip := range vips {
		l2, routed := e.advertisements(vip)
		overL2 = overL2 || len(l2) > 0
		for _, a := range routed {
			overBGP = true
			for _, p := range e.Peers {
				if len(a.Peers) == 0 || slices.Contains(a.Peers, p.Name) {
					wanted[p.Name] = true
				}
			}
		}
	}
	if !overBGP || e.hasUnread("bgppeers") {
		return nil
	}
	if len(wanted) == 0 {
		return []Check{{Level: Wrong, What: "peers", Reason: lb.ReasonUnknownPeer,
			Text: "no BGPPeer exists for its BGPAdvertisement to announce to", Cure: cureOf(lb.ReasonUnknownPeer)}}
	}
	var checks []Check
	up := 0
	for _, p := range e.Peers {
		if wanted[p.Name] {
			check, established := e.peer(p)
			up += established
			checks = append(checks, check)
		}
	}
	if up > 0 || overL2 {
		for i := range checks { // some routers know the way
			if checks[i].Level == Wrong {
				checks[i].Level = Warning
			}
		}
	}
	return checks
}

// taken checks whether routers have taken the routes to the VIPs. BGP does not say so, but a router
// with sessions to several nodes announces the route of one of them to the others, unless that is
// against its policy. One that announces other VIPs and not this one has a filter.
func (e explanation) taken(vips []netip.Addr) []Check {
	var all []Check
	for _, vip := range vips {
		var checks []Check
		l2, _ := e.advertisements(vip)
		reached := len(l2) > 0
		for _, p := range e.Peers {
			if check, taken := e.takenBy(p, vip); check.What != "" {
				checks, reached = append(checks, check), reached || taken
			}
		}
		for i := range checks { // another router knows the way
			if reached && checks[i].Level == Wrong {
				checks[i].Level = Warning
			}
		}
		all = append(all, checks...)
	}
	return all
}

// takenBy checks one router and VIP, and reports whether it has certainly taken the route.
func (e explanation) takenBy(p lb.Peer, vip netip.Addr) (c Check, taken bool) {
	announcing, returned := 0, 0
	var prefixes []string
	for _, node := range slices.Sorted(maps.Keys(e.Agents)) {
		v, heard := e.Agents[node].vip(vip)
		if !heard || v.Routes == nil || !slices.Contains(v.Routes.Peers, p.Name) {
			continue
		}
		if slices.Contains(v.Routes.Confirming, p.Name) {
			return Check{Level: OK, What: "route",
				Text: fmt.Sprintf("%s announces %s back, so it has taken it", p.Name, vip)}, true
		}
		announcing++
		prefixes = nil
		for _, prefix := range v.Routes.Prefixes {
			prefixes = append(prefixes, prefix.String())
		}
		for _, s := range e.Agents[node].Said.BGP.Peers {
			if s.Name == p.Name && s.Session != nil {
				returned = max(returned, s.Session.Returned)
			}
		}
	}
	route := strings.Join(prefixes, ", ")
	show := fmt.Sprintf("on the router, in FRR's words: show bgp %s unicast %s",
		strings.ToLower(string(lb.FamilyOf(vip))), route)
	switch {
	case announcing == 0:
		return Check{}, false
	case announcing == 1 || returned == 0:
		// Of a single node a router has nothing to announce back.
		return Check{Level: OK, What: "route",
			Text: fmt.Sprintf("%s does not tell whether it has taken %s; %s", p.Name, route, show)}, false
	}
	_, routed := e.advertisements(vip)
	if slices.ContainsFunc(routed, func(a lb.BGPAdvertisement) bool { return len(a.Communities) > 0 }) {
		// Such as no-export.
		return Check{Level: Note, What: "route", Text: fmt.Sprintf(
			"%s announces %s of Landfall's back to the nodes, but not %s: it has a filter, or communities forbid it; %s",
			p.Name, plural(returned, "other route"), route, show)}, false
	}
	return Check{Level: Wrong, What: "route", Reason: lb.ReasonRouteFiltered, Text: fmt.Sprintf(
		"%s (%s) has not taken the route to %s: it announces %s of Landfall's back to the nodes, but not this one", p.Name,
		p.Addr, route, plural(returned, "other route")), Cure: show + "; then add it to the filter for the nodes"}, false
}

// peer checks the sessions of all nodes with a peer, and counts those that are up.
func (c Cluster) peer(p lb.Peer) (Check, int) {
	up := 0
	var down []string
	for _, node := range slices.Sorted(maps.Keys(p.Status)) {
		if p.Status[node].State == "Established" {
			up++
		} else {
			down = append(down, node)
		}
	}
	check := Check{Level: OK, What: "peer " + p.Name, Text: fmt.Sprintf("%d of %d sessions are up", up, len(p.Status))}
	switch {
	case p.Problem != nil:
		check.Level, check.Reason, check.Text = Wrong, p.Problem.Reason, p.Problem.Message
	case len(p.Status) == 0:
		check.Level, check.Text = Wrong, fmt.Sprintf("no speaker has reported on BGPPeer %s: its nodeSelectors select no "+
			"node, "+
			"or no speaker runs", p.Name)
		check.Cure = fmt.Sprintf("kubectl get bgppeer %s -o yaml", p.Name)
	case len(down) > 0:
		said := p.Status[down[0]]
		cause, cure := c.sessionCause(p, down[0], said.Message)
		check.Level, check.Reason, check.Cure = Wrong, said.Reason, cmp.Or(cure, cureOf(said.Reason, "PEER", p.Name))
		check.Text = fmt.Sprintf("BGP session with %s (%s) from %s is down: %s", p.Name, p.Addr, list(down, 3), cause)
		if up > 0 {
			check.Level = Warning
		}
	}
	for _, node := range slices.Sorted(maps.Keys(p.Status)) {
		if s := p.Status[node]; s.State == "Established" && s.Reason != "" {
			check.Parts = append(check.Parts, Check{Level: Warning, What: "node " + node, Reason: s.Reason, Text: s.Message,
				Cure: cureOf(s.Reason, "PEER", p.Name)})
		}
	}
	return check, up
}

// sessionCause says in a router's administrator's words why a session is down, and what to do.
func (c Cluster) sessionCause(p lb.Peer, node, said string) (cause, cure string) {
	router := cmp.Or(p.Interface, p.Addr.String())
	edit := "kubectl edit bgppeer " + p.Name
	switch has := func(part string) bool { return strings.Contains(said, part) }; {
	case has("Bad Peer AS"):
		return fmt.Sprintf("the AS numbers differ: this side has %d and expects %s of the router (%s)", p.LocalASN, asn(p),
				said),
			edit + "   # myASN and peerASN, or the neighbor's remote-as on the router"
	case has("Unacceptable Hold Time"):
		return fmt.Sprintf("the router does not accept the hold time of %s (%s)", p.HoldTime, said),
			edit + "   # holdTime"
	case has("connection refused"):
		return fmt.Sprintf("%s refuses the connection: no BGP daemon listens on port %d there, or it does not know this node",
			router, p.Port), "add the node as a neighbor on the router, or kubectl edit bgppeer " + p.Name + "   # peerPort"
	case has("no route to host"):
		return fmt.Sprintf("the node has no route to %s, or nothing answers at that address (%s)", router, said),
			"ping " + router + "   # from the node " + node
	case has("timeout"), has("deadline exceeded"):
		return c.silent(p, node, router)
	case has("Authentication Failure"):
		return fmt.Sprintf("the router does not accept the authentication (%s)", said), edit
	case has("closed the connection"), has("connection reset"), has("Connection Rejected"):
		return fmt.Sprintf("%s closes the connection at once: it does not know this node as a neighbor (%s)", router, said),
			"add the node as a neighbor on the router"
	}
	return cmp.Or(said, "it has not come up yet"), ""
}

// silent says why a router that drops the packets of a session may do so.
func (c Cluster) silent(p lb.Peer, node, router string) (cause, cure string) {
	edit := "kubectl edit bgppeer " + p.Name
	external := p.Dynamic == lb.ExternalASN || p.Dynamic == "" && p.PeerASN != p.LocalASN
	switch {
	case p.Password != "" || p.PasswordSecret != nil:
		return fmt.Sprintf("%s does not answer: most likely the MD5 passwords differ", router),
			edit + "   # password, or that of the neighbor on the router"
	case external && !p.MultiHop && p.Addr.IsValid() && c.beyond(p.Addr, node):
		return fmt.Sprintf("%s is in no subnet of the node, and packets of external sessions have a TTL of 1", router),
			edit + "   # ebgpMultiHop: true"
	}
	return fmt.Sprintf("%s drops the packets: it expects an MD5 password or another TTL (GTSM), or a firewall blocks "+
		"port %d",
		router, p.Port), edit + "   # password, ebgpMultiHop"
}

// beyond reports whether an address is certainly in none of a node's subnets.
func (c Cluster) beyond(addr netip.Addr, node string) bool {
	said := c.Agents[node].Said
	return said != nil && len(said.Interfaces) > 0 && !slices.ContainsFunc(said.Interfaces, func(i Interface) bool {
		return slices.ContainsFunc(i.Addresses, func(p netip.Prefix) bool { return p.Contains(addr) })
	})
}

func asn(p lb.Peer) string {
	if p.PeerASN == 0 {
		return string(p.Dynamic)
	}
	return fmt.Sprint(p.PeerASN)
}

// session checks one session as its speaker shows it.
func (c Cluster) session(node string, s PeerStatus) Check {
	check := Check{Level: OK, What: "peer " + s.Name}
	switch {
	case s.Refusal != nil:
		check.Level, check.Reason, check.Text = Wrong, s.Refusal.Reason, s.Refusal.Message
	case s.Session == nil:
		check.Level, check.Text = Note, "has no session yet"
	case s.Session.State != "Established":
		check.Level, check.Reason = Wrong, s.Session.Reason
		check.Text = fmt.Sprintf("the BGP session with %s is %s: %s", s.Name, s.Session.State, s.Session.LastError)
		for _, p := range c.Peers {
			if p.Name == s.Name {
				cause, cure := c.sessionCause(p, node, s.Session.LastError)
				check.Text = fmt.Sprintf("the BGP session with %s is down: %s", s.Name, cause)
				check.Cure = cure
			}
		}
		if check.Cure == "" {
			check.Cure = "landfallctl explain peer " + s.Name
		}
	default:
		check.Text = fmt.Sprintf("Established for %s, %s announced", s.Uptime, plural(s.Session.Prefixes, "route"))
	}
	return check
}

// Peer explains a BGPPeer.
func Peer(c Cluster, name string) Verdict {
	subject := "BGPPeer " + name
	i := slices.IndexFunc(c.Peers, func(p lb.Peer) bool { return p.Name == name })
	switch {
	case i < 0 && c.hasUnread("bgppeers"):
		return c.unreadable(subject, "bgppeers")
	case i < 0:
		return missing(subject, "there is no such BGPPeer", "kubectl get bgppeers")
	}
	p := c.Peers[i]
	check, _ := c.peer(p)
	checks := []Check{check}
	for _, node := range slices.Sorted(maps.Keys(p.Status)) {
		if a := c.Agents[node]; a.Said != nil {
			for _, s := range a.Said.BGP.Peers {
				if s.Name == name {
					one := c.session(node, s)
					one.What = "node " + node
					checks = append(checks, one)
				}
			}
		}
	}
	used := Check{Level: OK, What: "advertisements"}
	var by []string
	for _, a := range c.BGP {
		if len(a.Peers) == 0 || slices.Contains(a.Peers, name) {
			by = append(by, a.Name)
		}
	}
	if used.Text = list(by, 8); len(by) == 0 {
		used.Level, used.Text = Warning, "no BGPAdvertisement announces anything to it"
		used.Cure = "kubectl get bgpadvertisements -o yaml"
	}
	checks = append(append(checks, used, c.noPods()), c.unread()...)
	return judge(subject, check.Text, slices.DeleteFunc(checks, func(c Check) bool { return c.What == "" }))
}
