package main

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/landfall-lb/landfall/internal/kube"
	"github.com/landfall-lb/landfall/internal/lb"
)

// change is one line of landfallctl watch.
type change struct {
	Time time.Time `json:"time"`
	// Kind, Namespace and Name are of the object that has changed.
	Kind      string `json:"kind"`
	Namespace string `json:"namespace,omitempty"`
	Name      string `json:"name"`
	// What has changed: address, assigned, owner, routes, announced, ready, session, drain or finding.
	What string `json:"what"`
	// About is the address, or for a session the node.
	About string `json:"about,omitempty"`
	// From and To are what it was and is; "" for nothing.
	From    string    `json:"from,omitempty"`
	To      string    `json:"to,omitempty"`
	Reason  lb.Reason `json:"reason,omitempty"`
	Message string    `json:"message,omitempty"`
}

// String is the line for people, without the time.
func (c change) String() string {
	name := c.Name
	if c.Namespace != "" {
		name = c.Namespace + "/" + name
	}
	var out strings.Builder
	fmt.Fprintf(&out, "%s %s: %s", c.Kind, name, c.What)
	if c.About != "" {
		fmt.Fprintf(&out, " %s", c.About)
	}
	fmt.Fprintf(&out, ": %s → %s", cmp.Or(c.From, "none"), cmp.Or(c.To, "none"))
	if c.Reason != "" {
		fmt.Fprintf(&out, " (%s)", c.Reason)
	}
	if c.Message != "" {
		fmt.Fprintf(&out, ": %s", oneLine(c.Message))
	}
	return out.String()
}

// serviceChanges says what has changed for a load balancer: its addresses, who announces them, and
// why not. A Service that is none is as one without addresses.
func serviceChanges(key lb.Key, before, now lb.Service) []change {
	var changes []change
	add := func(c change) {
		c.Kind, c.Namespace, c.Name = "Service", key.Namespace, key.Name
		changes = append(changes, c)
	}
	had, has := loadBalancer(before), loadBalancer(now)
	if from, to := addresses(had), addresses(has); from != to {
		add(change{What: "address", From: from, To: to})
	}
	if c, ok := conditionChange(had.Conditions, has.Conditions, lb.ConditionAssigned, "assigned"); ok {
		add(c)
	}
	announced := announcementChanges(had, has)
	for _, c := range announced {
		add(c)
	}
	if c, ok := conditionChange(had.Conditions, has.Conditions, lb.ConditionAnnounced, "announced"); ok &&
		len(announced) == 0 {
		add(c)
	}
	return changes
}

func loadBalancer(s lb.Service) lb.Service {
	if s.Type != lb.LoadBalancer {
		return lb.Service{}
	}
	return s
}

func addresses(s lb.Service) string {
	var all []string
	for _, vip := range s.VIPs() {
		all = append(all, vip.String())
	}
	return strings.Join(all, ", ")
}

// announcementChanges compares who announces each VIP, or why no node does.
func announcementChanges(before, now lb.Service) []change {
	had, has := announcementsOf(before), announcementsOf(now)
	all := maps.Clone(had)
	maps.Copy(all, has)
	var changes []change
	for _, vip := range slices.SortedFunc(maps.Keys(all), netip.Addr.Compare) {
		a, b := had[vip], has[vip]
		c := change{About: vip.String(), Reason: b.Reason}
		if cond, ok := lb.FindCondition(now.Conditions, lb.ConditionAnnounced); ok && !cond.Status {
			c.Message = cond.Message
		}
		began := len(changes)
		if a.Owner != b.Owner {
			c.What, c.From, c.To = "owner", a.Owner, b.Owner
			changes = append(changes, c)
		}
		if from, to := routesOf(a), routesOf(b); from != to {
			c.What, c.From, c.To = "routes", from, to
			changes = append(changes, c)
		}
		if len(changes) == began && a.Reason != b.Reason && b.Reason != "" {
			c.What, c.From, c.To, c.Reason = "announced", string(a.Reason), string(b.Reason), ""
			changes = append(changes, c)
		}
	}
	return changes
}

func announcementsOf(s lb.Service) map[netip.Addr]lb.Announcement {
	found := map[netip.Addr]lb.Announcement{}
	all, _ := lb.DecodeAnnouncements(s.Announcements) // the condition tells what a tenant has broken here
	for _, a := range all {
		found[a.VIP] = a
	}
	return found
}

// routesOf lists the nodes that announce routes, and to whom.
func routesOf(a lb.Announcement) string {
	var all []string
	for _, r := range a.Routes {
		nodes := slices.Clone(r.Nodes)
		if r.OtherNodes > 0 {
			nodes = append(nodes, fmt.Sprintf("%d more", r.OtherNodes))
		}
		all = append(all, fmt.Sprintf("%s to %s", strings.Join(nodes, ", "), strings.Join(r.Peers, ", ")))
	}
	if a.OtherNodes > 0 {
		all = append(all, fmt.Sprintf("%d more nodes", a.OtherNodes))
	}
	return strings.Join(all, "; ")
}

// conditionChange compares the status and the reason of a condition.
func conditionChange(before, now []lb.Condition, kind, what string) (change, bool) {
	a, _ := lb.FindCondition(before, kind)
	b, ok := lb.FindCondition(now, kind)
	if !ok || a.Status == b.Status && a.Reason == b.Reason {
		return change{}, false
	}
	return change{What: what, From: string(a.Reason), To: string(b.Reason), Message: b.Message}, true
}

// poolChanges says whether a pool can be used, and whether it has free addresses.
func poolChanges(name string, before, now lb.Pool) []change {
	var changes []change
	for _, c := range now.Status.Conditions {
		if one, ok := conditionChange(before.Status.Conditions, now.Status.Conditions, c.Type, strings.ToLower(c.Type)); ok {
			one.Kind, one.Name = "IPAddressPool", name
			changes = append(changes, one)
		}
	}
	return changes
}

// peerChanges says how the sessions of a peer have changed, by node.
func peerChanges(name string, before, now lb.Peer) []change {
	all := maps.Clone(before.Status)
	if all == nil {
		all = map[string]lb.PeerNode{}
	}
	maps.Copy(all, now.Status)
	var changes []change
	for _, node := range slices.Sorted(maps.Keys(all)) {
		a, b := before.Status[node], now.Status[node]
		if a.State != b.State || a.Reason != b.Reason {
			changes = append(changes, change{Kind: "BGPPeer", Name: name, What: "session from", About: node, From: a.State,
				To: b.State, Reason: b.Reason, Message: b.Message})
		}
	}
	return changes
}

// nodeChanges says whether a node leaves, or is drained.
func nodeChanges(name string, before, now lb.Node) []change {
	if before.Leaving == now.Leaving {
		return nil
	}
	return []change{{Kind: "Node", Name: name, What: "drain", From: string(before.Leaving), To: string(now.Leaving)}}
}

// findingChanges says what a program has found on a node, or that it is no longer found.
func findingChanges(_ string, before, now kube.NodeFinding) []change {
	before.First, before.Last = now.First, now.Last // a repetition is no news
	if now.Node == "" || now == before {
		return nil
	}
	c := change{Kind: "Node", Name: now.Node, What: "finding", To: string(now.Reason), Message: now.Message}
	if now.Gone {
		c.From, c.To = c.To, ""
	}
	return []change{c}
}
