package main

import (
	"context"
	"errors"
	"maps"
	"slices"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/loop"
)

// tidier removes what speakers wrote on nodes that are gone, because a speaker may write for its own
// node only. It does so beside the assignment of addresses, which never waits for it.
type tidier struct {
	deps
	runner   *loop.Runner
	failures loop.Failures
}

func newTidier(d deps) *tidier {
	t := &tidier{deps: d}
	t.runner = loop.New(t.step, loop.Options{Gap: gap, MaxBackoff: 5 * time.Second})
	return t
}

// step removes what is left of nodes that are gone. What fails is tried again.
func (t *tidier) step(ctx context.Context) (again time.Duration, err error) {
	if !t.nodes.Synced() || !t.around.Synced() || !t.sessions.Synced() {
		return 0, nil // called again when they are
	}
	around, sessions := t.left()
	if len(around)+len(sessions) == 0 {
		return 0, nil
	}
	err = t.forget(ctx, around, sessions)
	if ctx.Err() == nil {
		t.failures.Log(t.log, "cannot remove what speakers wrote on nodes that are gone; trying again",
			"removed what speakers wrote on nodes that are gone", err)
	}
	return 0, ignoreEnd(ctx, err)
}

// left returns the nodes that are gone: those of whose networks something is still told, and those
// in the status of BGPPeers, by peer.
func (t *tidier) left() (around []string, sessions map[string][]string) {
	isGone := func(node string) bool {
		_, ok := t.nodes.Get(node)
		return !ok
	}
	told, _ := t.around.Get(lb.SurroundingsConfigMap)
	for _, node := range slices.Sorted(maps.Keys(told)) {
		if isGone(node) {
			around = append(around, node)
		}
	}
	sessions = map[string][]string{}
	for peer, nodes := range t.sessions.All() {
		for _, node := range nodes {
			if isGone(node) {
				sessions[peer] = append(sessions[peer], node)
			}
		}
	}
	return around, sessions
}

func (t *tidier) forget(ctx context.Context, around []string, sessions map[string][]string) error {
	var failed []error
	if len(around) > 0 {
		failed = append(failed, within(ctx, func(ctx context.Context) error { return t.forgetAround(ctx, around) }))
	}
	for _, peer := range slices.Sorted(maps.Keys(sessions)) {
		failed = append(failed, within(ctx, func(ctx context.Context) error {
			return t.forgetSessions(ctx, peer, sessions[peer])
		}))
		loop.Progress(ctx)
	}
	return errors.Join(failed...)
}

// within gives a write the time that it may take.
func within(ctx context.Context, write func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	return write(ctx)
}

// nodesAndAround returns the nodes with what is told of their networks.
func (c *controller) nodesAndAround() map[string]lb.Node {
	nodes := c.nodes.All()
	around, _ := c.around.Get(lb.SurroundingsConfigMap)
	for name, text := range around {
		if node, ok := nodes[name]; ok {
			node.Unassignable = lb.ParseUnassignable(text)
			nodes[name] = node
		}
	}
	return nodes
}
