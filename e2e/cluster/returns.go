package cluster

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"syscall"
	"time"

	"github.com/landfall-lb/landfall/e2e/lab"
)

// absence is a way in which a node goes away for a while and comes back.
type absence struct {
	name        string
	leave, back func(ctx context.Context, n *Node) error
}

var absences = []absence{
	{"link",
		func(ctx context.Context, n *Node) error { return n.cluster.Unplug(ctx, n.Name) },
		func(ctx context.Context, n *Node) error { return n.cluster.Heal(ctx, n.Name) }},
	{"switch port",
		func(ctx context.Context, n *Node) error { return n.cluster.Cut(ctx, n.Name) },
		func(ctx context.Context, n *Node) error { return n.cluster.Heal(ctx, n.Name) }},
	{"frozen",
		func(_ context.Context, n *Node) error { return n.signalAgents(syscall.SIGSTOP) },
		func(_ context.Context, n *Node) error { return n.signalAgents(syscall.SIGCONT) }},
	{"rebooted",
		func(ctx context.Context, n *Node) error { return errors.Join(n.cluster.Unplug(ctx, n.Name), n.Kill()) },
		func(ctx context.Context, n *Node) error { return n.Reboot(ctx) }},
}

// signalAgents sends a signal to Landfall's programs on the node, with the process that keeps the
// speaker's BFD sessions: else routers notice a frozen speaker by BGP's hold time alone.
func (n *Node) signalAgents(sig syscall.Signal) error {
	return errors.Join(n.Signal("landfall-speaker", sig), n.Signal("landfall-bfd", sig), n.Signal("landfall-proxy", sig))
}

// Absences say how often, and for how long, a node goes away.
type Absences struct {
	Count  int // in each way, on the LAN and again over BGP
	Length time.Duration
	// Only is the one way to go away: link, switch port, frozen or rebooted. Empty for all.
	Only string
}

// Returns has a node go away and come back in several ways that owns no address and has no
// pod. Connections to addresses on the LAN are open while it goes and comes; those over BGP are
// opened while it is away, and routers move some of them to it when it is back. None may break.
func (c *Cluster) Returns(ctx context.Context, away Absences, say func(format string, args ...any)) (err error) {
	if err := c.prepareReturns(ctx); err != nil {
		return err
	}
	victim := c.nodes[len(c.nodes)-1]
	onLAN, err := c.ownedByOthers(ctx, victim)
	if err != nil {
		return err
	}
	say("%s goes away for %s and comes back; of the addresses on the LAN these are others': %s", victim.Name, away.Length,
		names(onLAN))
	var all Outcome
	returns := 0
	for _, a := range absences {
		if away.Only != "" && away.Only != a.name {
			continue
		}
		for _, kind := range []struct {
			where string
			once  func() (Outcome, error)
		}{
			{"on the LAN", func() (Outcome, error) { return c.returnOnLAN(ctx, a, victim, away.Length, onLAN) }},
			{"over BGP", func() (Outcome, error) { return c.returnRouted(ctx, a, victim, away.Length) }},
		} {
			of, times, err := repeat(away.Count, kind.once)
			say("%s, %d times, %s: %s", a.name, times, kind.where, of)
			for _, why := range of.Details() {
				say("  %s", why)
			}
			if err != nil {
				return fmt.Errorf("%s, %s: %w", a.name, kind.where, errors.Join(err, c.explain(ctx)))
			}
			all.Add(of)
			returns += times
		}
	}
	say("over %d returns: %s", returns, all)
	if all.Broken+all.Failed > 0 {
		return fmt.Errorf("over %d returns: %s", returns, all)
	}
	return nil
}

// repeat does something that often, or until it fails.
func repeat(count int, once func() (Outcome, error)) (all Outcome, times int, err error) {
	for range count {
		one, err := once()
		all.Add(one)
		if err != nil {
			return all, times, err
		}
		times++
	}
	return all, times, nil
}

// prepareReturns installs everything, with no pod on the node that goes away, and with more
// addresses on the LAN than one node owns.
func (c *Cluster) prepareReturns(ctx context.Context) error {
	victim := c.nodes[len(c.nodes)-1]
	if err := c.mergePatch(ctx, victim.Name, `{"spec":{"unschedulable":true}}`); err != nil {
		return err
	}
	if err := c.createWeb(ctx, len(c.nodes)-1, append(Webs[:len(Webs):len(Webs)], moreOnLAN()...)); err != nil {
		return err
	}
	if err := c.Install(ctx); err != nil {
		return err
	}
	if err := c.mergePatch(ctx, victim.Name, `{"spec":{"unschedulable":false}}`); err != nil {
		return err
	}
	return c.ApplyYAML(ctx, Pool)
}

// moreOnLAN are Services, some of which the node that goes away does not own.
func moreOnLAN() []Web {
	var more []Web
	for i := range byte(6) {
		more = append(more, Web{Name: fmt.Sprintf("l2-more-%d", i), Policy: "Cluster",
			Addr: netip.AddrFrom4([4]byte{172, 30, 0, 210 + i})})
	}
	return more
}

// ownedByOthers returns two Services on the LAN that a node does not own: one of each policy.
func (c *Cluster) ownedByOthers(ctx context.Context, victim *Node) ([]Web, error) {
	var chosen []Web
	policies := map[string]bool{}
	for _, w := range append(moreOnLAN(), Webs...) {
		if w.Routed() || policies[w.Policy] {
			continue
		}
		if err := c.WaitAnswer(ctx, lab.ClientName, w.Target()); err != nil {
			return nil, errors.Join(err, c.explain(ctx))
		}
		owner, err := c.owner(ctx, w.Addr)
		if err != nil {
			return nil, err
		}
		if owner != victim.Name {
			chosen, policies[w.Policy] = append(chosen, w), true
		}
	}
	if len(chosen) < 2 {
		return nil, fmt.Errorf("%s owns too many addresses", victim.Name)
	}
	return chosen, nil
}

// returnOnLAN has connections open while the node goes and comes.
func (c *Cluster) returnOnLAN(ctx context.Context, a absence, n *Node, away time.Duration, to []Web) (Outcome, error) {
	all, err := c.startLoads(ctx, longLived, []string{lab.ClientName, lab.FarClientName}, to...)
	if err != nil {
		return Outcome{}, err
	}
	err = pause(ctx, time.Second)
	if err == nil {
		err = a.leave(ctx, n)
	}
	if err == nil {
		err = pause(ctx, away)
	}
	if err == nil {
		err = a.back(ctx, n)
	}
	if err == nil {
		err = n.waitBack(ctx)
	}
	if err == nil {
		err = pause(ctx, 3*time.Second) // for what goes wrong late
	}
	return all.stop(), err
}

// returnRouted has connections opened while the node is away, and open while it comes back.
func (c *Cluster) returnRouted(ctx context.Context, a absence, n *Node, away time.Duration) (o Outcome, err error) {
	to := Webs[2] // a node without a pod announces no address of policy Local
	others := []string{}
	for _, other := range c.nodes {
		if other != n {
			others = append(others, other.Name)
		}
	}
	if err := c.routed(ctx, to.Addr, append(others, n.Name)...); err != nil {
		return o, err
	}
	if err := a.leave(ctx, n); err != nil {
		return o, err
	}
	if err := c.routed(ctx, to.Addr, others...); err != nil {
		return o, err
	}
	if err := pause(ctx, away); err != nil {
		return o, err
	}
	// As many as on the LAN, so that the router moves about a third of them.
	far := []string{lab.FarClientName, lab.FarClientName, lab.FarClientName, lab.FarClientName}
	all, err := c.startLoads(ctx, longLived, far, to)
	if err != nil {
		return o, err
	}
	err = a.back(ctx, n)
	if err == nil {
		err = c.routed(ctx, to.Addr, append(others, n.Name)...)
	}
	if err == nil {
		err = pause(ctx, 2*time.Second)
	}
	return all.stop(), errors.Join(err)
}

// waitBack waits until the node's speaker and proxy are ready.
func (n *Node) waitBack(ctx context.Context) error {
	for _, port := range []int{7481, 7482} {
		url := fmt.Sprintf("https://%s:%d/readyz", n.Addr, port)
		err := lab.WaitFor(ctx, n.cluster.options.Progress, url, 3*time.Minute, func(ctx context.Context) error {
			code, body, err := n.cluster.Get(ctx, n.Name, url)
			if err == nil && code != 200 {
				err = fmt.Errorf("%d: %s", code, strings.TrimSpace(body))
			}
			return err
		})
		if err != nil {
			return err
		}
	}
	return nil
}

func names(webs []Web) string {
	var all []string
	for _, w := range webs {
		all = append(all, w.Name)
	}
	return strings.Join(all, ", ")
}

func pause(ctx context.Context, length time.Duration) error {
	select {
	case <-time.After(length):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
