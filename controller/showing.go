package main

import (
	"context"
	"maps"
	"slices"

	"github.com/landfall-lb/landfall/controller/dashboard"
	"github.com/landfall-lb/landfall/controller/view"
	"github.com/landfall-lb/landfall/internal/kube"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/ops"
)

// guardedDashboard is the page, for those who may see it.
var guardedDashboard = ops.Guarded{Name: "the dashboard", URL: dashboard.Path, Role: "dashboard",
	Hint: "landfallctl dashboard shows it in a browser."}

// reviewDashboard returns who asks the API server.
func reviewDashboard(client *kube.Client) ops.Review {
	return func(ctx context.Context, token string) (user string, allowed bool, err error) {
		return client.Review(ctx, token, dashboard.Path)
	}
}

// showing is what the dashboard is made of: the controller's tables, and two that only it needs.
type showing struct {
	deps
	class string
	leads func() bool
	peers table[string, lb.PeerSessions]
	found table[string, kube.NodeFinding]
}

func (s showing) dashboard() *dashboard.Dashboard {
	return dashboard.New(dashboard.Sources{
		Services: s.services, Facts: s.facts, Class: s.class, Identity: s.identity, Leads: s.leads, Now: s.now,
		Synced: func() bool {
			return s.services.Synced() && s.pools.Synced() && s.nodes.Synced() && s.peers.Synced() && s.found.Synced()
		},
	})
}

func (s showing) facts() view.Facts {
	f := view.Facts{Pools: s.pools.All(), Nodes: s.nodes.All(), Peers: s.peers.All()}
	found := s.found.All()
	for _, event := range slices.Sorted(maps.Keys(found)) {
		one := found[event]
		f.Findings = append(f.Findings, view.Finding{Node: one.Node, Finding: one.Finding, Gone: one.Gone,
			Since: one.First, Last: one.Last})
	}
	return f
}

// peerNodes has the nodes in the status of each BGPPeer, as the tidier reads them.
type peerNodes struct {
	peers table[string, lb.PeerSessions]
}

func nodesOf(p lb.PeerSessions) []string {
	var nodes []string
	for _, s := range p.Sessions {
		nodes = append(nodes, s.Node)
	}
	return nodes
}

func (p peerNodes) Get(peer string) ([]string, bool) {
	sessions, ok := p.peers.Get(peer)
	return nodesOf(sessions), ok
}

func (p peerNodes) All() map[string][]string {
	all := map[string][]string{}
	for peer, sessions := range p.peers.All() {
		all[peer] = nodesOf(sessions)
	}
	return all
}

func (p peerNodes) Synced() bool { return p.peers.Synced() }
