package main

import (
	"context"
	"errors"
	"maps"
	"slices"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/loop"
)

// left is what speakers wrote on nodes that are gone. The controller removes it, because a speaker
// may write for its own node only.
type left struct {
	around   []string            // nodes of whose networks something is still told
	sessions map[string][]string // nodes in the status of BGPPeers, by peer
	failures loop.Failures       // of removing them
}

// sessionsChange says that other nodes are in the status of a BGPPeer.
func (c *controller) sessionsChange(string) {
	c.mu.Lock()
	c.sessionsChanged = true
	c.mu.Unlock()
	c.runner.Poke()
}

// nodesAndAround returns the nodes with what is told of their networks.
func (c *controller) nodesAndAround() map[string]lb.Node {
	nodes := c.nodes.All()
	around, _ := c.around.Get(lb.SurroundingsConfigMap)
	c.left.around = nil
	for name, text := range around {
		node, ok := nodes[name]
		if !ok {
			c.left.around = append(c.left.around, name)
			continue
		}
		node.Unassignable = lb.ParseUnassignable(text)
		nodes[name] = node
	}
	return nodes
}

// findSessions finds the nodes in the status of BGPPeers that are gone.
func (c *controller) findSessions() {
	c.left.sessions = map[string][]string{}
	for peer, nodes := range c.sessions.All() {
		gone := slices.DeleteFunc(slices.Clone(nodes), func(node string) bool {
			_, ok := c.nodes.Get(node)
			return ok
		})
		if len(gone) > 0 {
			c.left.sessions[peer] = gone
		}
	}
}

// tidy removes what is left of nodes that are gone. What fails is tried again.
func (c *controller) tidy(ctx context.Context) error {
	if len(c.left.around)+len(c.left.sessions) == 0 {
		return nil
	}
	err := c.forget(ctx)
	if ctx.Err() == nil {
		c.left.failures.Log(c.log, "cannot remove what speakers wrote on nodes that are gone; trying again",
			"removed what speakers wrote on nodes that are gone", err)
	}
	return err
}

func (c *controller) forget(ctx context.Context) error {
	writeCtx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	var failed []error
	if len(c.left.around) > 0 {
		if err := c.forgetAround(writeCtx, c.left.around); err != nil {
			failed = append(failed, err)
		} else {
			c.left.around = nil
		}
	}
	for _, peer := range slices.Sorted(maps.Keys(c.left.sessions)) {
		if err := c.forgetSessions(writeCtx, peer, c.left.sessions[peer]); err != nil {
			failed = append(failed, err)
		} else {
			delete(c.left.sessions, peer)
		}
		loop.Progress(ctx)
	}
	return errors.Join(failed...)
}
