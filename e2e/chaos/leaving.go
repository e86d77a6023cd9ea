package chaos

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"time"

	"github.com/landfall-lb/landfall/e2e/chaos/contract"
	"github.com/landfall-lb/landfall/e2e/lab"
)

// atOnce is how long a health port may take to follow what the API server says of its node: much more than it needs on
// a quiet machine.
const atOnce = 5 * time.Second

// leaving has a node be about to be deleted for a while, and sees that its health ports say so.
func (r *runner) leaving(ctx context.Context, e deed) error {
	const taint = `{"spec":{"taints":[{"key":"ToBeDeletedByClusterAutoscaler","effect":"NoSchedule"}]}}`
	return r.during(e, r.patch(ctx, e.Node, taint), func() (err error) {
		e.span.Attractive, err = r.attractive(ctx, e.Node)
		return errors.Join(err, r.patch(ctx, e.Node, `{"spec":{"taints":null}}`)())
	})
}

// saysNo waits for [atOnce] until a health port says 503. One that is silent does not say so.
func saysNo(ctx context.Context, what string, health func(context.Context) int) error {
	return lab.WaitFor(ctx, func(string) {}, what, atOnce, func(ctx context.Context) error {
		if code := health(ctx); code != http.StatusServiceUnavailable {
			return fmt.Errorf("it says %d", code)
		}
		return nil
	})
}

// attractive returns the Services whose health port does not come to say 503 on a node.
func (r *runner) attractive(ctx context.Context, node string) (names []string, err error) {
	var all []contract.Service
	if err := try(ctx, "read the Services", func(ctx context.Context) (err error) {
		all, err = r.listServices(ctx)
		return err
	}); err != nil {
		return nil, err
	}
	nodes := workers(r.lab.Cluster())
	n := nodes[slices.IndexFunc(nodes, func(n lab.Node) bool { return n.Name == node })]
	for _, svc := range all {
		if svc.HealthPort == 0 {
			continue
		}
		if err := saysNo(ctx, "503 of "+svc.Name+" on "+node, func(ctx context.Context) int {
			return r.health(ctx, n, svc)
		}); err != nil {
			r.journal.add("%v", err)
			names = append(names, svc.Name)
		}
	}
	return names, nil
}
