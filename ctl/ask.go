package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sync/errgroup"

	"github.com/landfall-lb/landfall/ctl/explain"
	"github.com/landfall-lb/landfall/internal/kube"
	"github.com/landfall-lb/landfall/internal/lb"
)

// silent is a node of which there is no answer.
type silent struct {
	Node string `json:"node"`
	Why  string `json:"why"`
}

// askProxies runs landfall-proxy with these arguments on nodes, all that have one if nodes is nil, and
// returns the answers in the order of the nodes' names, and which nodes gave none. A missing permission is
// an error, as it is that of every node.
func askProxies[A any](ctx context.Context, g *gatherer, nodes []string, arguments ...string) (answers []A,
	unanswered []silent, err error) {
	var mu sync.Mutex
	found := map[string]A{}
	asked := map[string]bool{}
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(askAtOnce)
	for _, p := range g.pods {
		for _, c := range p.Containers {
			if program(c) != "landfall-proxy" || p.Node == "" || nodes != nil && !slices.Contains(nodes, p.Node) {
				continue
			}
			asked[p.Node] = true
			if !c.Running {
				mu.Lock()
				unanswered = append(unanswered, silent{p.Node, "its landfall-proxy does not run: " + c.Waiting})
				mu.Unlock()
				continue
			}
			group.Go(func() error {
				var answer A
				err := g.askOne(ctx, p.Key, c, arguments, &answer)
				if denied := (*kube.Denied)(nil); errors.As(err, &denied) {
					return err
				}
				mu.Lock()
				defer mu.Unlock()
				if err != nil {
					unanswered = append(unanswered, silent{p.Node, err.Error()})
				} else {
					found[p.Node] = answer
				}
				return nil
			})
		}
	}
	if err := group.Wait(); err != nil {
		return nil, nil, err
	}
	for _, node := range nodes {
		if !asked[node] {
			unanswered = append(unanswered, silent{node, "it has no landfall-proxy, or is no node"})
		}
	}
	// Of two proxies on a node, as during an upgrade, one has to answer.
	unanswered = slices.DeleteFunc(unanswered, func(s silent) bool { _, ok := found[s.Node]; return ok })
	slices.SortFunc(unanswered, func(a, b silent) int { return strings.Compare(a.Node, b.Node) })
	for _, node := range sortedKeys(found) {
		answers = append(answers, found[node])
	}
	return answers, unanswered, nil
}

func (g *gatherer) askOne(ctx context.Context, pod lb.Key, c kube.Container, arguments []string, answer any) error {
	ctx, cancel := context.WithTimeoutCause(ctx, askTime, errors.New(explain.NoAnswer+askTime.String()))
	defer cancel()
	out, err := g.exec(ctx, pod, c.Name, append([]string{c.Command[0]}, arguments...)...)
	switch {
	case err != nil && strings.Contains(err.Error(), "unknown flag"):
		return fmt.Errorf("its landfall-proxy is older than landfallctl: it has no %s", arguments[0])
	case err != nil:
		return err
	}
	if err := json.Unmarshal(out, answer); err != nil {
		return fmt.Errorf("its answer cannot be read: %w", err)
	}
	return nil
}

func sortedKeys[V any](m map[string]V) []string {
	keys := make([]string, 0, len(m))
	for key := range m {
		keys = append(keys, key)
	}
	slices.Sort(keys)
	return keys
}

// announcingNodes returns the nodes that announce an address of a Service, as its annotation names them; all is
// false if there are more than it names. What a tenant has broken names nobody.
func announcingNodes(s lb.Service, addr func(lb.Announcement) bool) (nodes []string, all bool) {
	announcements, err := lb.DecodeAnnouncements(s.Announcements)
	all = err == nil
	for _, a := range announcements {
		if !addr(a) {
			continue
		}
		if a.Owner != "" {
			nodes = append(nodes, a.Owner)
		}
		all = all && a.OtherNodes == 0
		for _, route := range a.Routes {
			nodes = append(nodes, route.Nodes...)
			all = all && route.OtherNodes == 0
		}
	}
	slices.Sort(nodes)
	return slices.Compact(nodes), all
}

// readPods reads where Landfall's programs run. Without them nobody can be asked.
func (g *gatherer) readPods(ctx context.Context) (err error) {
	if g.pods, err = landfallPods(ctx, g.client, g.opts.home()); err != nil {
		return reading("pods", err)
	}
	if !slices.ContainsFunc(g.pods, func(p kube.PodState) bool {
		return slices.ContainsFunc(p.Containers, func(c kube.Container) bool { return program(c) == "landfall-proxy" })
	}) {
		return errors.New("no pod runs landfall-proxy: the rules of another proxy are not read")
	}
	return nil
}
