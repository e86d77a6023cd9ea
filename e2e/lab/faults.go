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

// onNode runs iproute2 commands on a node.
func (l *Lab) onNode(ctx context.Context, node string, commands []string) error {
	if _, ok := l.nodes[node]; !ok {
		return fmt.Errorf("no node %q", node)
	}
	return batch(ctx, l.state.namespace(node), commands)
}
