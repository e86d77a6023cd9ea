package main

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/landfall-lb/landfall/ctl/migrate"
	"github.com/landfall-lb/landfall/internal/lb"
)

// This file swaps speakers one node after another, where BGP alone announces.

// swapNodes swaps the speaker of one node after another, so that routers always have a route.
//
// Routers move connections between all nodes each time that a route goes or comes. So the proxies get
// to know first that all nodes may hold connections, also those from which MetalLB announces.
func (m *metallbMove) swapNodes(ctx context.Context) error {
	if err := m.labelAll(ctx, lb.LabelAnnouncedBy); err != nil {
		return err
	}
	for _, w := range m.plan.Speakers {
		if err := m.change(ctx, workloadPath(w), migrate.StopWhere(w, migrate.FromMetalLB)); err != nil {
			return err
		}
	}
	if err := m.create(ctx, m.plan.Interim(), false); err != nil {
		return err
	}
	if err := m.sleep(ctx); err != nil {
		return err
	}
	for _, node := range m.plan.Nodes {
		if err := m.label(ctx, nodesPath+"/"+node, migrate.LabelNode, migrate.FromMetalLB); err != nil {
			return err
		}
		if err := m.speakersEnded(ctx, node); err != nil {
			return err
		}
		if err := m.until(ctx, "the BGP sessions of "+node+" are up", func() (string, error) {
			return m.sessionsDown(ctx, node)
		}); err != nil {
			return err
		}
		m.say("%s is swapped", node)
		if err := m.sleep(ctx); err != nil {
			return err
		}
	}
	return m.announced(ctx)
}

// sessionsDown says which session of a node is not up.
func (m *metallbMove) sessionsDown(ctx context.Context, node string) (string, error) {
	live, err := m.get(ctx, nodesPath+"/"+node)
	if err != nil {
		return "", err
	}
	for _, peer := range m.plan.Interim() {
		if peer.Kind != "BGPPeer" || !migrate.Selects(peer.Spec["nodeSelectors"], live) {
			continue
		}
		o, err := m.get(ctx, landfallPath("BGPPeer")+"/"+peer.Metadata.Name)
		if err != nil {
			return "", err
		}
		status, _ := o["status"].(map[string]any)
		sessions, _ := status["nodes"].([]any)
		up := slices.ContainsFunc(sessions, func(s any) bool {
			return text(s, "name") == node && text(s, "state") == string(lb.ReasonEstablished)
		})
		if !up {
			return "that with " + peer.Metadata.Name, nil
		}
	}
	return "", nil
}

// labelAll sets a label on all nodes.
func (m *metallbMove) labelAll(ctx context.Context, label string) error {
	for _, node := range m.plan.Nodes {
		if err := m.label(ctx, nodesPath+"/"+node, label, migrate.FromMetalLB); err != nil {
			return err
		}
	}
	return nil
}

// returnNodes is swapNodes backwards, from wherever that has come to.
func (m *metallbMove) returnNodes(ctx context.Context) error {
	peers, err := m.list(ctx, landfallPath("BGPPeer"), migrate.LabelFrom+"="+migrate.FromMetalLB)
	if len(peers) == 0 || err != nil {
		return err // Landfall announces nothing
	}
	if err := m.labelAll(ctx, lb.LabelAnnouncedBy); err != nil {
		return err
	}
	stopped, err := m.speakersStopped(ctx)
	if err != nil {
		return err
	}
	if stopped { // on all nodes, of which some are marked no more
		if err := m.labelAll(ctx, migrate.LabelNode); err != nil {
			return err
		}
	}
	if err := m.create(ctx, m.plan.Interim(), false); err != nil { // sessions on nodes that are marked
		return err
	}
	if stopped {
		for _, w := range m.plan.Speakers {
			if err := m.change(ctx, workloadPath(w), migrate.StartElsewhere(w, migrate.FromMetalLB)); err != nil {
				return err
			}
		}
	}
	if err := m.sleep(ctx); err != nil {
		return err
	}
	nodes, err := m.list(ctx, nodesPath, migrate.LabelNode+"="+migrate.FromMetalLB)
	if err != nil {
		return err
	}
	for _, o := range nodes {
		if err := m.returnNode(ctx, name(o)); err != nil {
			return fmt.Errorf("node %s: %w", name(o), err)
		}
	}
	return nil
}

// returnNode has Landfall end its sessions on a node, and MetalLB start its own.
func (m *metallbMove) returnNode(ctx context.Context, node string) error {
	if err := m.label(ctx, nodesPath+"/"+node, migrate.LabelNode, ""); err != nil {
		return err
	}
	began := time.Now()
	if err := m.until(ctx, "MetalLB's speaker is ready", func() (string, error) {
		return m.speakerMissing(ctx, node, time.Since(began) > planTime)
	}); err != nil {
		return err
	}
	m.say("%s is swapped back", node)
	return m.sleep(ctx)
}

// planTime is within which a DaemonSet gets its pod on a node, if it is to have one there.
const planTime = 10 * time.Second

// speakerMissing says which pod of MetalLB's is not ready on a node; planned is set once each is there
// that is to come.
func (m *metallbMove) speakerMissing(ctx context.Context, node string, planned bool) (string, error) {
	for _, w := range m.plan.Speakers {
		pods, err := m.list(ctx, "/api/v1/namespaces/"+w.Namespace+"/pods", selector(w.Pods))
		if err != nil {
			return "", err
		}
		i := slices.IndexFunc(pods, func(p map[string]any) bool { return text(p, "spec", "nodeName") == node })
		switch {
		case i < 0 && !planned:
			return fmt.Sprintf("%s has no pod there", w), nil
		case i < 0:
			continue
		}
		if status, _ := condition(pods[i], "Ready"); status != "True" {
			return fmt.Sprintf("pod %s is not ready", name(pods[i])), nil
		}
	}
	return "", nil
}
