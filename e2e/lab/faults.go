package lab

import (
	"context"
	"fmt"
)

// Cut cuts a node off the LAN without its noticing, as when its hypervisor or its switch dies: its
// interface stays up, nothing arrives any more in either direction.
func (l *Lab) Cut(ctx context.Context, node string) error {
	return l.port(ctx, node, "link set %s nomaster")
}

// Unplug takes the carrier off a node's LAN interface, as when somebody pulls the cable.
func (l *Lab) Unplug(ctx context.Context, node string) error {
	return l.port(ctx, node, "link set %s down")
}

// Heal undoes [Lab.Cut] and [Lab.Unplug].
func (l *Lab) Heal(ctx context.Context, node string) error {
	_, bridge := l.cluster.nodeNetwork(l.nodes[node])
	return l.port(ctx, node, "link set %[1]s master "+bridge, "link set %[1]s up")
}

// port runs iproute2 commands on the switch's port of a node.
func (l *Lab) port(ctx context.Context, node string, commands ...string) error {
	if _, ok := l.nodes[node]; !ok {
		return fmt.Errorf("no node %q", node)
	}
	for i := range commands {
		commands[i] = fmt.Sprintf(commands[i], portName(node, "eth0"))
	}
	return batch(ctx, l.state.namespace(switchName), commands)
}

// StopCNI takes away what a network plugin makes on a node: the routes to the pods of other nodes, and
// the bridge of its own. The pods run on without a cable. A node that has just booted is so.
func (l *Lab) StopCNI(ctx context.Context, node string) error {
	commands := []string{"link delete " + PodBridge}
	for _, route := range l.podRoutes(node) {
		commands = append(commands, "route delete "+route)
	}
	return l.onNode(ctx, node, commands)
}

// StartCNI undoes [Lab.StopCNI].
func (l *Lab) StartCNI(ctx context.Context, node string) error {
	n := l.nodes[node]
	commands := append([]string{
		fmt.Sprintf("link add %s address %s type bridge forward_delay 0 stp_state 0", PodBridge, bridgeAddress),
		"link set " + PodBridge + " up",
	}, l.cluster.addrAdd(n.Gateway(), n.PodNetwork, PodBridge)...)
	l.mu.Lock()
	for _, p := range l.pods {
		if p.Node == node {
			port := portName(p.Name, "eth0")
			commands = append(commands, fmt.Sprintf("link set %s master %s", port, PodBridge),
				fmt.Sprintf("link set %s type bridge_slave hairpin on", port))
		}
	}
	l.mu.Unlock()
	for _, route := range l.podRoutes(node) {
		commands = append(commands, "route add "+route)
	}
	return l.onNode(ctx, node, commands)
}

// podRoutes returns the routes of a node to the pods of all others.
func (l *Lab) podRoutes(node string) []string {
	var routes []string
	for _, other := range l.cluster.Nodes {
		via := l.cluster.addresses(other.Addr)
		for i, to := range l.cluster.prefixes(other.PodNetwork) {
			if other.Name != node {
				routes = append(routes, fmt.Sprintf("%s via %s", to, via[i]))
			}
		}
	}
	return routes
}

// onNode runs iproute2 commands on a node.
func (l *Lab) onNode(ctx context.Context, node string, commands []string) error {
	if _, ok := l.nodes[node]; !ok {
		return fmt.Errorf("no node %q", node)
	}
	return batch(ctx, l.state.namespace(node), commands)
}
