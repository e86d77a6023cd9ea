package chaos

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/landfall-lb/landfall/ctl/explain"
	"github.com/landfall-lb/landfall/e2e/chaos/contract"
	"github.com/landfall-lb/landfall/e2e/chaos/story"
	"github.com/landfall-lb/landfall/e2e/lab"
)

const (
	// patience is how long a change may take that the run itself needs, such as the API server's being back.
	patience = time.Minute
	// shown is for how long a new Service is asked.
	shown      = 2 * time.Second
	shownEvery = 100 * time.Millisecond
	// A writer of a burst makes so many pairs of changes, or for so long.
	bursts     = 25
	burstTime  = 5 * time.Second
	badPackets = 300
)

// during begins something, waits, and ends it; it is ended even if its beginning failed.
func (r *runner) during(e deed, begin, end func() error) error {
	err := begin()
	e.span.From = r.now()
	time.Sleep(e.For)
	e.span.Until = r.now()
	return errors.Join(err, end())
}

func (r *runner) frozen(e deed, signal func(syscall.Signal) error) error {
	return r.during(e, func() error { return signal(syscall.SIGSTOP) }, func() error { return signal(syscall.SIGCONT) })
}

// try does something until it works, as the API server may be away.
func try(ctx context.Context, what string, f func(ctx context.Context) error) error {
	return lab.WaitFor(ctx, func(string) {}, what, patience, f)
}

// patch returns what patches a node.
func (r *runner) patch(ctx context.Context, node, text string) func() error {
	return func() error {
		return try(ctx, "patch "+node, func(ctx context.Context) error {
			_, err := r.lab.Kube().CoreV1().Nodes().Patch(ctx, node, types.StrategicMergePatchType, []byte(text),
				metav1.PatchOptions{})
			return err
		})
	}
}

// restart ends a program, and starts it again. In a calm round it is ready when that is over. A controller that leads
// is away until another one does, unless it is killed in a calm round: then it leads on, as one that the kubelet
// restarts.
func (r *runner) restart(ctx context.Context, e deed, end func(*lab.Agent) error) error {
	a := r.agent(ctx, e.Event)
	ended := time.Now()
	if err := end(a); err != nil {
		return err
	}
	time.Sleep(e.For)
	var err error
	if e.Program == "controller" && e.Kind != story.Kill {
		err = r.succeeded(ctx, a)
	}
	if err = errors.Join(err, a.Start()); err != nil || !e.calm {
		return err
	}
	err = a.WaitReady(ctx)
	e.span.Back = time.Since(ended)
	return err
}

// crash takes a node away at once: its link, its programs, and what its kernel knew.
func (r *runner) crash(ctx context.Context, node string) error {
	err := errors.Join(r.lab.Unplug(ctx, node), r.each(node, (*lab.Agent).Kill))
	for _, argv := range [][]string{{"nft", "flush", "ruleset"}, {"conntrack", "-F"}} {
		_, failed := r.lab.Exec(ctx, node, argv...)
		err = errors.Join(err, failed)
	}
	return err
}

// rollPod plays one step of a rolling update: the new pod is ready and known before the old one terminates, which
// serves until it is known to terminate.
func (r *runner) rollPod(ctx context.Context, e deed) error {
	pods := r.lab.Pods(e.Service)
	old := slices.MinFunc(pods, func(a, b lab.Pod) int { return strings.Compare(a.Name, b.Name) })
	var pod lab.Pod
	r.mu.Lock()
	// Never beside the other one: with policy Local and all pods on one node, no other node could stand in for it.
	for pod.Name == "" || slices.ContainsFunc(pods, func(p lab.Pod) bool {
		return p.Name != old.Name && p.Node == pod.Node
	}) {
		r.rolled++
		number := 50 + r.rolled
		pod = podOf(r.lab.Cluster(), e.Service, fmt.Sprintf("%s-%d", e.Service, number), number)
	}
	r.mu.Unlock()
	if err := r.lab.AddPod(ctx, pod); err != nil {
		return err
	}
	if err := r.usedEverywhere(ctx, e.Service, pod.Addr, true); err != nil {
		return err
	}
	if err := r.lab.SetConditions(ctx, old.Name, lab.ServingTerminating); err != nil {
		return err
	}
	time.Sleep(e.For)
	if err := r.usedEverywhere(ctx, e.Service, old.Addr, false); err != nil {
		return err
	}
	e.span.Gone = []string{old.Name}
	r.mu.Lock() // before its connections break
	for i := range r.spans {
		if r.spans[i].ID == e.ID {
			r.spans[i].Gone = e.span.Gone
		}
	}
	r.mu.Unlock()
	return r.lab.RemovePod(ctx, old.Name)
}

// usedEverywhere waits until all proxies send new connections to an endpoint, or do not.
func (r *runner) usedEverywhere(ctx context.Context, service string, addr netip.Addr, want bool) error {
	return try(ctx, fmt.Sprintf("endpoint %s of %s", addr, service), func(ctx context.Context) error {
		for _, a := range r.lab.Agents("proxy") {
			text, err := a.Get(ctx, "/v1/status?only="+namespace+"/"+service)
			if err != nil {
				return err
			}
			if uses(text, addr) != want {
				return fmt.Errorf("%s has not followed", a.Node)
			}
		}
		return nil
	})
}

// addService creates a Service of churn. In a calm round it is asked once its status says that it is announced, from
// when on no request may fail.
func (r *runner) addService(ctx context.Context, name string, calm bool) error {
	s := churnService(name)
	if err := r.create(ctx, s); err != nil || !calm {
		return err
	}
	var found contract.Service
	if err := try(ctx, name+" is announced", func(ctx context.Context) error {
		all, err := r.listServices(ctx)
		if err != nil {
			return err
		}
		for _, svc := range all {
			if svc.Name == name && svc.Announced && len(svc.Addresses) > 0 {
				found = svc
				return nil
			}
		}
		return errors.New("it is not")
	}); err != nil {
		r.journal.add("%v", err)
		return nil // whether it is in the end is judged when all has settled
	}
	if found.BGP {
		if err := r.routed(ctx, found); err != nil {
			r.journal.add("%v", err)
			return nil // as above
		}
	}
	ctx, cancel := context.WithTimeout(ctx, shown)
	defer cancel()
	for _, t := range targetsOf(r.lab.Cluster(), s, found.Addresses) {
		r.traffic.sample(ctx, t, shownEvery)
	}
	<-ctx.Done()
	return nil
}

// routed waits until the router knows the way to a Service: a speaker does not hear when it does.
func (r *runner) routed(ctx context.Context, svc contract.Service) error {
	return try(ctx, svc.Name+" is routed", func(ctx context.Context) error {
		routes, err := r.routes(ctx)
		for _, a := range svc.Addresses {
			if err == nil && len(routes[a]) == 0 {
				err = fmt.Errorf("the router has no way to %s", a)
			}
		}
		return err
	})
}

// create creates a Service, however often it takes.
func (r *runner) create(ctx context.Context, s lab.Service) error {
	return try(ctx, "create "+s.Name, func(ctx context.Context) error {
		err := r.lab.AddService(ctx, s)
		if err != nil && strings.Contains(err.Error(), "already exists") { // of a try whose answer was lost
			return errors.Join(err, r.lab.RemoveService(ctx, namespace, s.Name))
		}
		return err
	})
}

func (r *runner) removeService(ctx context.Context, name string) error {
	return try(ctx, "delete "+name, func(ctx context.Context) error {
		err := r.lab.RemoveService(ctx, namespace, name)
		if apierrors.IsNotFound(err) {
			return nil
		}
		return err
	})
}

// withdrawService deletes a Service of churn. In a calm round its endpoints stay until the rules have gone, as those of
// a cluster stay until the Service has: nodes withdraw its addresses before that.
func (r *runner) withdrawService(ctx context.Context, e deed) error {
	all, err := r.listServices(ctx)
	i := slices.IndexFunc(all, func(svc contract.Service) bool { return svc.Name == e.Service })
	if !e.calm || err != nil || i < 0 {
		return r.removeService(ctx, e.Service)
	}
	rules := programmed{}
	if err := try(ctx, "rules of "+e.Service, func(ctx context.Context) error {
		return r.noteRules(ctx, all[i], rules)
	}); err != nil {
		r.journal.add("%v", err) // a node counts once it is seen with them
	}
	if err := try(ctx, "delete "+e.Service, func(ctx context.Context) error {
		err := r.lab.Kube().CoreV1().Services(namespace).Delete(ctx, e.Service, metav1.DeleteOptions{})
		if apierrors.IsNotFound(err) { // by a try whose answer was lost
			return nil
		}
		return err
	}); err != nil {
		return err
	}
	if e.span.Bare, err = r.bare(ctx, all[i], rules); err != nil {
		r.journal.add("%v", err) // what is left in the end is judged when all has settled
	}
	return r.removeService(ctx, e.Service)
}

// hungProxy freezes proxies while a Service comes and is asked.
func (r *runner) hungProxy(ctx context.Context, e deed) error {
	signal := func(sig syscall.Signal) (err error) {
		for _, node := range e.Nodes {
			err = errors.Join(err, r.lab.Agent("proxy", node).Signal(sig))
		}
		return err
	}
	err := signal(syscall.SIGSTOP)
	return errors.Join(err, r.addService(ctx, e.Service, true), signal(syscall.SIGCONT))
}

// setIdle makes all pods of the idle Service ready, or none.
func (r *runner) setIdle(ctx context.Context, d deed) error {
	r.mu.Lock()
	r.idle = d.Kind == story.Unready
	now := r.idleConditions()
	r.mu.Unlock()
	for _, p := range r.lab.Pods(idleService) {
		if err := r.setConditions(ctx, p.Name, now); err != nil {
			return err
		}
	}
	return nil
}

// idleConditions are what pods of the idle Service have now.
func (r *runner) idleConditions() lab.Conditions {
	if r.idle {
		return lab.NotReady
	}
	return lab.Ready
}

func (r *runner) setConditions(ctx context.Context, pod string, c lab.Conditions) error {
	return try(ctx, "conditions of "+pod, func(ctx context.Context) error { return r.lab.SetConditions(ctx, pod, c) })
}

// turns are what changes of the idle Service, over and over: a value, and another one, in which all ends. An etcd that
// is restored may bring either back, which changes nothing for those who ask.
var turns = [][2]string{
	{`{"spec":{"sessionAffinity":"ClientIP"}}`, `{"spec":{"sessionAffinity":"None","sessionAffinityConfig":null}}`},
	{`{"spec":{"internalTrafficPolicy":"Local"}}`, `{"spec":{"internalTrafficPolicy":"Cluster"}}`},
	{`{"metadata":{"annotations":{"chaos":"on"}}}`, `{"metadata":{"annotations":{"chaos":null}}}`},
}

// burst changes the idle Service and the readiness of one of its pods as fast as the API server takes it, several
// writers at once. A machine that is too busy gets through fewer turns.
func (r *runner) burst(ctx context.Context, _ deed) error {
	pod := r.lab.Pods(idleService)[0].Name
	var g lab.Group
	write := func(first, second func() error) {
		g.Run(func() (err error) {
			began := time.Now()
			for n := 0; n < bursts && time.Since(began) < burstTime && err == nil; n++ {
				err = errors.Join(first(), second())
			}
			return err
		})
	}
	ready := func(c lab.Conditions) func() error {
		return func() error { return r.setConditions(ctx, pod, c) }
	}
	write(ready(lab.NotReady), ready(lab.Ready))
	for _, turn := range turns {
		write(r.patchIdle(ctx, turn[0]), r.patchIdle(ctx, turn[1]))
	}
	err := g.Wait()
	r.mu.Lock()
	now := r.idleConditions()
	r.mu.Unlock()
	return errors.Join(err, r.setConditions(ctx, pod, now))
}

// patchIdle returns what patches the idle Service.
func (r *runner) patchIdle(ctx context.Context, text string) func() error {
	return func() error {
		return try(ctx, "patch "+idleService, func(ctx context.Context) error {
			_, err := r.lab.Kube().CoreV1().Services(namespace).Patch(ctx, idleService, types.StrategicMergePatchType,
				[]byte(text), metav1.PatchOptions{})
			return err
		})
	}
}

// uses reports whether a proxy's status shows an endpoint as one that is ready.
func uses(text string, addr netip.Addr) bool {
	var status explain.ProxyStatus
	if json.Unmarshal([]byte(text), &status) != nil {
		return false
	}
	for _, s := range status.Services {
		for _, p := range s.Ports {
			for _, b := range p.Backends {
				if b.Address.Addr() == addr && b.Ready {
					return true
				}
			}
		}
	}
	return false
}
