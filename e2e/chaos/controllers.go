package chaos

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/landfall-lb/landfall/e2e/chaos/story"
	"github.com/landfall-lb/landfall/e2e/lab"
)

const (
	// One controller leads. The first runs beside the API server, the second on a node that faults are about.
	controllers = 2
	// leaderLease says which controller leads; it is waited for so long.
	leaderLease  = "landfall-controller"
	leaseTimeout = 2 * time.Second
)

// agent returns the program of an event, which is one of the controllers if no node is named.
func (r *runner) agent(ctx context.Context, e story.Event) *lab.Agent {
	if a := r.lab.Agent(e.Program, e.Node); a != nil {
		return a
	}
	all := r.lab.Agents(e.Program)
	leader := r.leader(ctx, all)
	a := all[controllerOf(e, leader, len(all))]
	r.journal.add("#%d is about %s; %s led before", e.ID, a.Name(), all[leader].Name())
	return a
}

// controllerOf returns which of the controllers an event is about: the leader, or for each third event the next one.
func controllerOf(e story.Event, leader, controllers int) int {
	if e.ID%3 == 0 {
		return (leader + 1) % controllers
	}
	return leader
}

// leader returns which controller leads. While the API server does not say, it is the one that led before.
func (r *runner) leader(ctx context.Context, controllers []*lab.Agent) int {
	ctx, cancel := context.WithTimeout(ctx, leaseTimeout)
	defer cancel()
	holder, err := r.leaseHolder(ctx)
	r.mu.Lock()
	defer r.mu.Unlock()
	i := slices.IndexFunc(controllers, func(a *lab.Agent) bool { return leads(a.Log(), holder) })
	if err == nil && i >= 0 {
		r.led = i
	}
	return r.led
}

// leaseHolder returns the identity of the controller that leads, "" if none does.
func (r *runner) leaseHolder(ctx context.Context) (string, error) {
	lease, err := r.lab.Kube().CoordinationV1().Leases(lab.Namespace).Get(ctx, leaderLease, metav1.GetOptions{})
	if err != nil || lease.Spec.HolderIdentity == nil {
		return "", err
	}
	return *lease.Spec.HolderIdentity, nil
}

// leads reports whether the controller that has written a log has that identity, or had it before it was started again.
// It logs its own identity when it starts, and that of another one as the leader.
func leads(log, holder string) bool {
	return slices.ContainsFunc(strings.Fields(log), func(field string) bool {
		return holder != "" && field == "identity="+holder
	})
}

// succeeded waits until another controller leads than one that has ended. It never does so if no other takes over.
func (r *runner) succeeded(ctx context.Context, ended *lab.Agent) error {
	return try(ctx, "another controller than "+ended.Name()+" leads", func(ctx context.Context) error {
		holder, err := r.leaseHolder(ctx)
		if err == nil && (holder == "" || leads(ended.Log(), holder)) {
			err = fmt.Errorf("%q holds the Lease", holder)
		}
		return err
	})
}
