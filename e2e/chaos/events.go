package chaos

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
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
	bursts     = 50
	badPackets = 300
)

// do does an event, waits for as long as it lasts, and undoes it.
func (r *runner) do(ctx context.Context, e story.Event, span *contract.Span, calm bool) error {
	switch e.Kind {
	case story.DrainLabel:
		return r.patched(ctx, e, `{"metadata":{"labels":{"node.kubernetes.io/exclude-from-external-load-balancers":""}}}`,
			`{"metadata":{"labels":{"node.kubernetes.io/exclude-from-external-load-balancers":null}}}`)
	case story.DrainTaint:
		return r.leaving(ctx, e, span)
	case story.Stop, story.StormStop:
		return r.restart(ctx, e, span, (*lab.Agent).Stop)
	case story.Kill, story.StormKill:
		return r.restart(ctx, e, span, (*lab.Agent).Kill)
	case story.RollPod:
		return r.rollPod(ctx, e, span)
	case story.StopAPI, story.StormAPI:
		return r.during(e, r.lab.StopAPI, func() error { return r.lab.StartAPI(ctx) })
	case story.FreezeAPI:
		return r.frozen(e, r.lab.SignalAPI)
	case story.FreezeEtcd, story.StormEtcd:
		return r.frozen(e, r.lab.SignalEtcd)
	case story.SlowAPI, story.StormSlowAPI:
		return r.slow(e, r.lab.SignalAPI)
	case story.RestoreEtcd:
		return r.restoreEtcd(ctx, e)
	case story.ShiftClock, story.StormClock:
		return r.shiftClock(e)
	case story.MalformedARP:
		return r.wire.malformed(r.seed+uint64(e.ID), badPackets)
	case story.HungProxy:
		return r.hungProxy(ctx, e)
	case story.EditPool:
		return r.during(e, func() error { return r.lab.ApplyYAML(ctx, pools(true)) },
			func() error { return r.lab.ApplyYAML(ctx, pools(false)) })
	case story.AddService:
		return r.addService(ctx, e.Service, calm)
	case story.RemoveService:
		return r.withdrawService(ctx, e.Service, span, calm)
	case story.Unready, story.Ready, story.Burst:
		return r.idlePods(ctx, e.Kind)
	case story.Flood:
		return r.flood(ctx, e)
	case story.AddPeer:
		return r.during(e, func() error { return r.lab.ApplyYAML(ctx, deadPeer(r.lab.Cluster())) },
			func() error { return r.removePeers(ctx, deadPeerName) })
	case story.RemovePeer:
		return r.during(e, func() error { return r.removePeers(ctx, peerNames...) }, func() error {
			return try(ctx, "apply the peers", func(ctx context.Context) error {
				return r.lab.ApplyYAML(ctx, peers(r.lab.Cluster()))
			})
		})
	case story.KillRouter:
		router := r.lab.Routers()[0]
		return r.during(e, func() error { router.Kill("bgpd"); return nil }, func() error { return router.Launch(ctx) })
	case story.FreezeRouter:
		return r.lab.Routers()[0].Freeze(ctx, e.For)
	case story.Spoof:
		return r.wire.spoof(r.expected[e.Service][:1])
	case story.SpoofOn:
		return again(e.For, spoofEvery, func() error { return r.wire.spoof(r.expected[e.Service]) })
	default:
		return r.doNode(ctx, e)
	}
}

// doNode does what happens to one node.
func (r *runner) doNode(ctx context.Context, e story.Event) error {
	exec := func(argv ...string) func() error {
		return func() error {
			_, err := r.lab.Exec(ctx, e.Node, argv...)
			return err
		}
	}
	onNode := func(f func(context.Context, string) error) func() error {
		return func() error { return f(ctx, e.Node) }
	}
	heal := onNode(r.lab.Heal)
	filter := func(rules ...string) error {
		text := []string{"add table inet chaos", "add chain inet chaos in { type filter hook prerouting priority -400; }",
			"add chain inet chaos out { type filter hook output priority -400; }"}
		for _, rule := range rules {
			text = append(text, "add rule inet chaos "+rule)
		}
		return r.during(e, exec("nft", strings.Join(text, "; ")), exec("nft", "delete table inet chaos"))
	}
	gossip := func(chains ...string) (rules []string) {
		for _, chain := range chains {
			for _, port := range []string{"sport", "dport"} {
				rules = append(rules, chain+" meta l4proto { tcp, udp } th "+port+" 7947 drop")
			}
		}
		return rules
	}
	switch e.Kind {
	case story.Cut:
		return r.during(e, onNode(r.lab.Cut), heal)
	case story.Unplug:
		return r.during(e, onNode(r.lab.Unplug), heal)
	case story.Crash:
		return r.during(e, func() error { return r.crash(ctx, e.Node) }, func() error {
			return errors.Join(heal(), r.each(e.Node, (*lab.Agent).Start))
		})
	case story.FreezeNode:
		return r.frozen(e, func(sig syscall.Signal) error {
			return errors.Join(r.lab.Agent("speaker", e.Node).Signal(sig), r.lab.Agent("proxy", e.Node).Signal(sig))
		})
	case story.LeaveNode:
		return r.during(e, func() error { return r.leave(ctx, e.Node) }, func() error { return r.join(ctx, e.Node) })
	case story.NoDescriptors:
		return r.noDescriptors(e)
	case story.FullDisk:
		return r.fullDisk(e)
	case story.ForeignRules:
		return exec("sh", "-c", foreignRules, "sh", foreignTable())()
	case story.ForeignElements:
		return exec("sh", "-c", foreignFlush)()
	case story.NetlinkErrors:
		failed, err := r.agent(e).FailNetlink(ctx, e.For)
		r.journal.add("netlink-errors: %d calls of %s failed", failed, e.Node)
		return err
	case story.ConntrackFull:
		// After conntrack, at -200, has looked a packet up: what the kernel drops then if it can make no entry.
		return r.during(e, exec("nft", "add table inet chaos; add chain inet chaos in { type filter hook prerouting "+
			"priority -190; }; add chain inet chaos out { type filter hook output priority -190; }; "+
			"add rule inet chaos in ct state new drop; add rule inet chaos out ct state new drop"),
			exec("nft", "delete table inet chaos"))
	case story.FreezeSpeaker:
		return r.frozen(e, r.lab.Agent("speaker", e.Node).Signal)
	case story.Lossy:
		return filter(`in iifname "eth0" numgen random mod 100 < 15 drop`)
	case story.DropGossipIn:
		return filter(gossip("in")...)
	case story.DropGossipOut:
		return filter(gossip("out")...)
	case story.DropGossip:
		return filter(gossip("in", "out")...)
	case story.Deaf:
		return filter(r.deaf(e.Node)...)
	case story.DeleteRules:
		return exec("nft", "flush", "ruleset")()
	case story.FlushConntrack:
		return exec("conntrack", "-F")()
	default:
		return fmt.Errorf("no way to do %q", e.Kind)
	}
}

// deaf returns rules that drop what the other nodes send to a node.
func (r *runner) deaf(node string) []string {
	var v4, v6 []string
	for _, n := range r.lab.Cluster().Nodes {
		if n.Name != node {
			v4, v6 = append(v4, n.Addr.String()), append(v6, lab.Twin(n.Addr).String())
		}
	}
	return []string{"in ip saddr { " + strings.Join(v4, ", ") + " } drop",
		"in ip6 saddr { " + strings.Join(v6, ", ") + " } drop"}
}

// during begins something, waits, and ends it; it is ended even if its beginning failed.
func (r *runner) during(e story.Event, begin, end func() error) error {
	err := begin()
	time.Sleep(e.For)
	return errors.Join(err, end())
}

func (r *runner) frozen(e story.Event, signal func(syscall.Signal) error) error {
	return r.during(e, func() error { return signal(syscall.SIGSTOP) }, func() error { return signal(syscall.SIGCONT) })
}

// try does something until it works, as the API server may be away.
func try(ctx context.Context, what string, f func(ctx context.Context) error) error {
	return lab.WaitFor(ctx, func(string) {}, what, patience, f)
}

// leaving has a node be about to be deleted for a while, and sees that its health ports say so.
func (r *runner) leaving(ctx context.Context, e story.Event, span *contract.Span) error {
	return r.during(e, r.patch(ctx, e.Node, `{"spec":{"taints":[{"key":"ToBeDeletedByClusterAutoscaler","effect":"NoSchedule"}]}}`),
		func() error {
			var err error
			span.Attractive, err = r.attractive(ctx, e.Node)
			return errors.Join(err, r.patch(ctx, e.Node, `{"spec":{"taints":null}}`)())
		})
}

// attractive returns the Services whose health port goes on to say 200 on a node.
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
		if try(ctx, svc.Name+" is not healthy on "+node, func(ctx context.Context) error {
			if code := r.health(ctx, n, svc); code == http.StatusOK {
				return errors.New("it is")
			}
			return nil
		}) != nil {
			names = append(names, svc.Name)
		}
	}
	return names, nil
}

// patched patches a node, waits, and patches it back.
func (r *runner) patched(ctx context.Context, e story.Event, begin, end string) error {
	return r.during(e, r.patch(ctx, e.Node, begin), r.patch(ctx, e.Node, end))
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

// agent returns the program of an event; the controller, which does not run everywhere, is the first there is.
func (r *runner) agent(e story.Event) *lab.Agent {
	if a := r.lab.Agent(e.Program, e.Node); a != nil {
		return a
	}
	return r.lab.Agents(e.Program)[0]
}

// restart ends a program, and starts it again. In a calm round it is ready when that is over.
func (r *runner) restart(ctx context.Context, e story.Event, span *contract.Span, end func(*lab.Agent) error) error {
	a := r.agent(e)
	ended := time.Now()
	if err := end(a); err != nil {
		return err
	}
	time.Sleep(e.For)
	if err := a.Start(); err != nil {
		return err
	}
	if e.Kind == story.StormKill || e.Kind == story.StormStop {
		return nil
	}
	err := a.WaitReady(ctx)
	span.Back = time.Since(ended)
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
func (r *runner) rollPod(ctx context.Context, e story.Event, span *contract.Span) error {
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
	span.Gone = []string{old.Name}
	r.mu.Lock() // before its connections break
	for i := range r.spans {
		if r.spans[i].ID == e.ID {
			r.spans[i].Gone = span.Gone
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

// withdrawService deletes a Service of churn. In a calm round, nodes withdraw its addresses before its rules go.
func (r *runner) withdrawService(ctx context.Context, name string, span *contract.Span, calm bool) error {
	all, err := r.listServices(ctx)
	if !calm || err != nil {
		return r.removeService(ctx, name)
	}
	if err := r.removeService(ctx, name); err != nil {
		return err
	}
	for _, svc := range all {
		if svc.Name == name {
			if span.Bare, err = r.bare(ctx, svc); err != nil {
				r.journal.add("%v", err) // what is left in the end is judged when all has settled
			}
		}
	}
	return nil
}

// hungProxy freezes proxies while a Service comes and is asked.
func (r *runner) hungProxy(ctx context.Context, e story.Event) error {
	signal := func(sig syscall.Signal) (err error) {
		for _, node := range e.Nodes {
			err = errors.Join(err, r.lab.Agent("proxy", node).Signal(sig))
		}
		return err
	}
	err := signal(syscall.SIGSTOP)
	return errors.Join(err, r.addService(ctx, e.Service, true), signal(syscall.SIGCONT))
}

// idlePods changes the readiness of the pods of the idle Service.
func (r *runner) idlePods(ctx context.Context, kind story.Kind) error {
	set := func(pod lab.Pod, c lab.Conditions) error {
		return try(ctx, "conditions of "+pod.Name,
			func(ctx context.Context) error { return r.lab.SetConditions(ctx, pod.Name, c) })
	}
	pods := r.lab.Pods(idleService)
	r.mu.Lock()
	if kind != story.Burst {
		r.idle = kind == story.Unready
	}
	now := lab.Ready
	if r.idle {
		now = lab.NotReady
	}
	r.mu.Unlock()
	if kind == story.Burst {
		for i := range bursts {
			if err := set(pods[0], []lab.Conditions{lab.NotReady, lab.Ready}[i%2]); err != nil {
				return err
			}
		}
		pods = pods[:1]
	}
	for _, p := range pods {
		if err := set(p, now); err != nil {
			return err
		}
	}
	return nil
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
