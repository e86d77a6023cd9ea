package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/landfall-lb/landfall/internal/kube"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/preflight"
)

// world is the state of the cluster, as the API server has it.
type world struct {
	class          string
	services       map[lb.Key]lb.Service
	pools          map[string]lb.Pool
	advertisements map[string]lb.L2Advertisement
	routed         map[string]lb.BGPAdvertisement
	peers          map[string]lb.Peer
	// warnings are what the programs have found on Nodes.
	warnings []lb.Refusal
	// refused says what the user may not read.
	refused []string
}

// warningsLast is how long a program may take to repeat that something is wrong with a Node: see
// preflight.Repeat.
const warningsLast = preflight.Repeat + 5*time.Minute

// lookedAfter is how long after its start a program has told at the latest of what it finds on its node.
const lookedAfter = 30 * time.Second

// stillFound leaves out what was said by a program that has ended, if the one that followed it has had the
// time to find it again.
func stillFound(warnings []kube.NodeWarning, pods []kube.PodState, now time.Time) []kube.NodeWarning {
	type runs struct{ node, program string }
	started := map[runs]time.Time{}
	for _, p := range pods {
		for _, c := range p.Containers {
			started[runs{p.Node, program(c)}] = c.Started
		}
	}
	return slices.DeleteFunc(warnings, func(w kube.NodeWarning) bool {
		start := started[runs{w.Node, w.By}]
		return w.At.Before(start) && start.Add(lookedAfter).Before(now)
	})
}

// read lists the objects that the report needs.
func read(ctx context.Context, client *kube.Client, server kube.Server, o options) (world, error) {
	w := world{class: o.class}
	var group errgroup.Group
	group.Go(func() error {
		services, err := client.AllServices(ctx)
		w.services = byKey(services, func(s lb.Service) lb.Key { return s.Key })
		return reading("services", err)
	})
	group.Go(func() error {
		pools, installed, err := client.AllPools(ctx)
		w.pools = byKey(pools, func(p lb.Pool) string { return p.Name })
		if err == nil && !installed {
			err = errors.New("the API server does not know the kind: is Landfall installed?")
		}
		return reading("ipaddresspools", err)
	})
	group.Go(func() error {
		all, err := client.AllL2Advertisements(ctx)
		w.advertisements = byKey(all, func(a lb.L2Advertisement) string { return a.Name })
		return reading("l2advertisements", err)
	})
	group.Go(func() error {
		all, err := client.AllBGPAdvertisements(ctx)
		w.routed = byKey(all, func(a lb.BGPAdvertisement) string { return a.Name })
		return reading("bgpadvertisements", err)
	})
	group.Go(func() error {
		// The role view has no BGPPeers, as they may hold passwords.
		peers, err := client.AllBGPPeers(ctx)
		w.peers = byKey(peers, func(p lb.Peer) string { return p.Name })
		if denied := (*kube.Denied)(nil); errors.As(err, &denied) {
			w.refused = append(w.refused, fmt.Sprintf("BGPPeers and their sessions are not shown: %v; the ClusterRole "+
				"landfall-view-peers of the Helm chart has it", err))
			return nil
		}
		return reading("bgppeers", err)
	})
	var warnings []kube.NodeWarning
	unseen := ""
	group.Go(func() (err error) {
		warnings, err = client.NodeWarnings(ctx, server.Now.Add(-warningsLast))
		if errors.As(err, new(*kube.Denied)) {
			unseen = fmt.Sprintf("What programs find on Nodes is not shown: %v", err)
			return nil
		}
		return err
	})
	var pods []kube.PodState
	var unknown error
	group.Go(func() error {
		if pods, unknown = landfallPods(ctx, client, o.home()); !o.classSet {
			w.class = flagOf(pods, "landfall-controller", "load-balancer-class")
		}
		return nil
	})
	if err := group.Wait(); err != nil {
		return world{}, err
	}
	if unseen != "" {
		w.refused = append(w.refused, unseen)
	}
	if none := (*noPods)(nil); errors.As(unknown, &none) && !none.unseen && len(none.others) == 0 {
		unknown = nil // no controller runs, as the objects show
	}
	if unknown != nil && !o.classSet {
		w.refused = append(w.refused, fmt.Sprintf("Services with a class are not shown, as that of Landfall is in its "+
			"controller's pod: %v; --load-balancer-class names it", unknown))
	}
	for _, found := range stillFound(warnings, pods, server.Now) {
		w.warnings = append(w.warnings, lb.Refusal{Reason: found.Reason,
			Message: "Node " + found.Node + ": " + found.Message})
	}
	return w, nil
}

// reading names the kind that could not be read; an API server that does not answer needs no name, nor do pods that
// are not there.
func reading(kind string, err error) error {
	if err == nil || errors.As(err, new(*kube.Unreachable)) || errors.As(err, new(*noPods)) {
		return err
	}
	return fmt.Errorf("read %s: %w", kind, err)
}

func byKey[K comparable, V any](all []V, key func(V) K) map[K]V {
	found := make(map[K]V, len(all))
	for _, v := range all {
		found[key(v)] = v
	}
	return found
}

// podLister is what kube.Client offers.
type podLister interface {
	PodsWith(ctx context.Context, namespace, selector string) ([]kube.PodState, error)
}

// landfallPods returns the pods in Landfall's namespace that run its programs, in the order of their names. If there
// are none, the error is a *noPods.
func landfallPods(ctx context.Context, client podLister, namespace string) ([]kube.PodState, error) {
	pods, err := lookalikes(ctx, client, namespace)
	if err != nil || len(pods) > 0 {
		return pods, err
	}
	others, err := lookalikeNamespaces(ctx, client)
	return nil, &noPods{namespace: namespace, others: others, unseen: err != nil}
}

// lookalikes returns the pods in a namespace, or in all if it is empty, that look like Landfall's. Every tenant can
// create such pods in namespaces of his own.
func lookalikes(ctx context.Context, client podLister, namespace string) ([]kube.PodState, error) {
	pods, err := client.PodsWith(ctx, namespace, componentSelector)
	pods = slices.DeleteFunc(pods, func(p kube.PodState) bool {
		return !slices.ContainsFunc(p.Containers, func(c kube.Container) bool { return program(c) != "" })
	})
	slices.SortFunc(pods, func(a, b kube.PodState) int { return a.Compare(b.Key) })
	return pods, err
}

// lookalikeNamespaces returns the namespaces with pods that look like Landfall's.
func lookalikeNamespaces(ctx context.Context, client podLister) ([]string, error) {
	pods, err := lookalikes(ctx, client, "")
	return slices.Compact(names(pods, func(p kube.PodState) string { return p.Namespace })), err
}

// noPods is the error that Landfall's namespace has no pod of Landfall.
type noPods struct {
	namespace string
	// others are namespaces with pods that look like Landfall's, for the user to judge; unseen is set if the user may
	// not list them.
	others []string
	unseen bool
}

// Error says how to name the right namespace.
func (e *noPods) Error() string {
	text := "no pod of Landfall is in namespace " + e.namespace
	switch {
	case e.unseen:
		return text + "; if it is installed in another one, say --landfall-namespace"
	case len(e.others) == 0:
		return text + ", and none in another one looks like it"
	case len(e.others) == 1:
		return fmt.Sprintf("%s; pods in %[2]s look like it: if it is installed there, say --landfall-namespace %[2]s",
			text, e.others[0])
	}
	return fmt.Sprintf("%s; pods in %s look like it: say --landfall-namespace with the one where it is installed", text,
		some(e.others))
}
