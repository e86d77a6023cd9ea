package main

import (
	"cmp"
	"io"
	"maps"
	"net/netip"
	"slices"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/ops"
	"github.com/landfall-lb/landfall/proxy/conntrack"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// onlyConnections is the value of --status-only that asks for the connections in place of the
// Services. It is no Service's name.
const onlyConnections = "connections"

const (
	// maxClients is how many clients of a Service are named.
	maxClients = 5
	// maxConnected is how many Services with connections are named.
	maxConnected = 500
)

// connectionsHead is shown ahead of the list "services".
type connectionsHead struct {
	Node string `json:"node"`
	// Total counts the open TCP connections of clients outside the cluster to VIPs; absent if Error says
	// why they are not known.
	Total *int   `json:"total,omitempty"`
	Error string `json:"error,omitempty"`
}

// serviceConnections are those of one Service; the clients with the most come first.
type serviceConnections struct {
	Service string              `json:"service"`
	Count   int                 `json:"count"`
	Clients []clientConnections `json:"clients"`
}

type clientConnections struct {
	Address netip.Addr `json:"address"`
	Count   int        `json:"count"`
}

// writeConnections writes the connections that end if the node does: those of clients outside the
// cluster to VIPs. Connections of pods and nodes pass their own node, whoever announces the VIP.
func (p *proxy) writeConnections(w io.Writer) error {
	frontends := p.vipFrontends()
	inside := p.inside()
	counted := map[lb.Key]map[netip.Addr]int{}
	err := p.connections(func(c conntrack.Connection) {
		key, ok := frontends[c.To]
		if !ok || inside(c.Client) {
			return
		}
		if counted[key] == nil {
			counted[key] = map[netip.Addr]int{}
		}
		counted[key][c.Client]++
	})
	head := connectionsHead{Node: p.self}
	if err != nil {
		head.Error = err.Error()
		return ops.WriteStatus(w, head, "services", slices.Values([]serviceConnections{}))
	}
	total, services := sumConnections(counted)
	head.Total = &total
	return ops.WriteStatus(w, head, "services", slices.Values(services))
}

// sumConnections names the Services with the most connections, and their clients.
func sumConnections(counted map[lb.Key]map[netip.Addr]int) (total int, services []serviceConnections) {
	for key, clients := range counted {
		one := serviceConnections{Service: key.String()}
		for client, n := range clients {
			one.Count += n
			one.Clients = append(one.Clients, clientConnections{client, n})
		}
		slices.SortFunc(one.Clients, func(a, b clientConnections) int {
			return cmp.Or(cmp.Compare(b.Count, a.Count), a.Address.Compare(b.Address))
		})
		one.Clients = one.Clients[:min(len(one.Clients), maxClients)]
		total += one.Count
		services = append(services, one)
	}
	slices.SortFunc(services, func(a, b serviceConnections) int {
		return cmp.Or(cmp.Compare(b.Count, a.Count), cmp.Compare(a.Service, b.Service))
	})
	return total, services[:min(len(services), maxConnected)]
}

// vipFrontends returns the Service of each TCP port of a VIP, also of VIPs that were just taken
// away.
func (p *proxy) vipFrontends() map[netip.AddrPort]lb.Key {
	p.mu.Lock()
	keys := slices.Collect(maps.Keys(p.records))
	p.mu.Unlock()
	frontends := map[netip.AddrPort]lb.Key{}
	for piece := range slices.Chunk(keys, statusPiece) {
		records, _ := p.copies(piece)
		for _, r := range records {
			for _, port := range r.planned.Ports {
				for _, f := range port.Frontends {
					if port.Protocol == lb.TCP && f.Kind == plan.LoadBalancer {
						frontends[netip.AddrPortFrom(f.Addr, f.Port)] = r.planned.Key
					}
				}
			}
		}
	}
	return frontends
}

// inside returns a test for addresses of Nodes and of pods.
func (p *proxy) inside() func(netip.Addr) bool {
	addrs := map[netip.Addr]bool{}
	var networks []netip.Prefix
	for _, n := range p.from.nodes.All() {
		for _, addr := range n.Addresses {
			addrs[addr] = true
		}
		networks = append(networks, n.PodCIDRs...)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, addr := range p.facts.own {
		addrs[addr] = true
	}
	networks = append(networks, p.facts.config.Pods.Prefixes...)
	return func(a netip.Addr) bool {
		return addrs[a] || slices.ContainsFunc(networks, func(n netip.Prefix) bool { return n.Contains(a) })
	}
}

// connections calls each for every open TCP connection in the kernel's table.
func connections(each func(conntrack.Connection)) error {
	table, err := conntrack.Open()
	if err != nil {
		return err
	}
	defer table.Close()
	return table.Connections(each)
}
