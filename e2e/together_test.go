package e2e

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/landfall-lb/landfall/e2e/lab"
	"github.com/landfall-lb/landfall/e2e/lab/labtest"
	"github.com/landfall-lb/landfall/internal/lb"
)

// TestContract8TwoControllersAtOnce has all controllers lead at the same time, which the Lease is
// there to prevent. They are held and killed at random moments while Services of two families come and go, want to
// share an address or may not, and show what somebody else has assigned: no address has two holders that may not share
// it, and none changes without need.
func TestContract8TwoControllersAtOnce(t *testing.T) {
	t.Parallel()
	cluster := lab.SeedCluster()
	cluster.DualStack = true
	l := labtest.Start(t, cluster,
		lab.Options{Values: map[string]any{"controller": map[string]any{"replicas": 2, "whenDuplicate": "move"}}})
	ctx := t.Context()
	agents := l.Agents("controller")
	if len(agents) < 2 {
		t.Fatalf("%d controllers", len(agents))
	}
	for _, a := range agents {
		a.SetFlag("leader-elect", "false")
		if err := a.Restart(ctx); err != nil {
			t.Fatal(err)
		}
	}
	if err := l.ApplyYAML(ctx, pool("large", `10.64.0.0/22, "fd00:10:64::/118"`)); err != nil {
		t.Fatal(err)
	}
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	t.Run("Services come and go", func(t *testing.T) { comeAndGo(t, l, agents, r) })
	t.Run("16 with one key and one port", func(t *testing.T) {
		for round := range 4 {
			history := watchHoldings(t, l)
			names := createAtOnce(t, l, fmt.Sprintf("same%d", round), func(int, *corev1.Service) {})
			history.wantMoves(t, wantApart(t, l, names), 0)
		}
	})
	t.Run("16 with one key share, and take one port", func(t *testing.T) { takeOnePort(t, l) })
	t.Run("16 with a foreign status", func(t *testing.T) { foreignStatus(t, l, agents) })
	caughtUp := 0
	for _, a := range agents {
		caughtUp += strings.Count(a.Log(), "another controller may have assigned addresses: catching up")
	}
	t.Logf("the controllers caught up with one another %d times", caughtUp)
	if caughtUp == 0 {
		t.Error("the controllers never met")
	}
}

// comeAndGo creates and deletes Services while one of the controllers at a time is killed or held.
func comeAndGo(t *testing.T, l *lab.Lab, agents []*lab.Agent, r *rand.Rand) {
	ctx := t.Context()
	const rounds, each = 25, 16
	seen := map[string]string{}
	for round := range rounds {
		var group errgroup.Group
		for i := range each {
			group.Go(func() error {
				return createDual(ctx, l, fmt.Sprintf("round%d-%d", round, i), nil)
			})
		}
		a := agents[r.IntN(len(agents))]
		time.Sleep(time.Duration(r.IntN(40)) * time.Millisecond)
		switch r.IntN(3) {
		case 0:
			if err := cmp.Or(a.Kill(), a.Start()); err != nil {
				t.Fatal(err)
			}
		default: // what it was about to do, it does later
			if err := a.Signal(syscall.SIGSTOP); err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Duration(r.IntN(500)) * time.Millisecond)
			if err := a.Signal(syscall.SIGCONT); err != nil {
				t.Fatal(err)
			}
		}
		if err := group.Wait(); err != nil {
			t.Fatal(err)
		}
		if round > 0 {
			gone := fmt.Sprintf("round%d-0", round-1)
			if err := l.Kube().CoreV1().Services("default").Delete(ctx, gone, metav1.DeleteOptions{}); err != nil {
				t.Fatal(err)
			}
			delete(seen, gone)
		}
		now, err := holdings(ctx, l)
		if err != nil {
			t.Fatal(err)
		}
		holder := map[string]string{}
		for name, addrs := range now {
			if addrs == "" {
				continue
			}
			for addr := range strings.SplitSeq(addrs, ",") {
				if other := holder[addr]; other != "" {
					t.Fatalf("round %d: %s is held by %s and %s", round, addr, name, other)
				}
				holder[addr] = name
			}
			if was := seen[name]; was != "" && was != addrs {
				t.Fatalf("round %d: %s held %s and now %s", round, name, was, addrs)
			}
			seen[name] = addrs
		}
	}
	wantAllHeld(t, l, "round", rounds*each-(rounds-1))
}

// createDual creates a Service of two families without node ports.
func createDual(ctx context.Context, l *lab.Lab, name string, change func(*corev1.Service)) error {
	s := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeLoadBalancer, Ports: []corev1.ServicePort{{Port: 80}},
			IPFamilyPolicy: new(corev1.IPFamilyPolicyRequireDualStack)},
	}
	withoutNodePorts(s)
	if change != nil {
		change(s)
	}
	_, err := l.Kube().CoreV1().Services("default").Create(ctx, s, metav1.CreateOptions{})
	return err
}

// TestNothingIsWrittenWhenIdle looks at all objects that Landfall writes, but for the Lease: none
// changes and no Event comes while nothing happens, when all watches begin anew, and when the
// controllers are restarted.
func TestNothingIsWrittenWhenIdle(t *testing.T) {
	t.Parallel()
	l := labtest.Start(t, lab.SeedCluster(), lab.Options{})
	ctx := t.Context()
	if err := l.AddService(ctx, lab.SeedService()); err != nil {
		t.Fatal(err)
	}
	if err := l.ApplyYAML(ctx, `apiVersion: landfall.dev/v1beta1
kind: IPAddressPool
metadata: {name: lan}
spec: {addresses: [172.26.236.180-172.26.236.182]}
---
apiVersion: landfall.dev/v1beta1
kind: L2Advertisement
metadata: {name: lan}
spec: {}
`); err != nil {
		t.Fatal(err)
	}
	wantCondition(t, l, "my-nginx", "landfall.dev/Announced", "True", "Announced", "is announced from")
	for i := range 4 { // one of them in vain
		createService(t, l, fmt.Sprintf("idle-%d", i), nil)
	}
	versions := func() map[string]string {
		t.Helper()
		all := map[string]string{}
		for _, kind := range []schema.GroupVersionResource{
			{Version: "v1", Resource: "services"}, {Version: "v1", Resource: "events"}, {Version: "v1", Resource: "configmaps"},
			{Version: "v1", Resource: "nodes"},
			{Group: "landfall.dev", Version: "v1beta1", Resource: "ipaddresspools"},
			{Group: "landfall.dev", Version: "v1beta1", Resource: "l2advertisements"},
		} {
			list, err := l.Dynamic().Resource(kind).List(ctx, metav1.ListOptions{})
			if err != nil {
				t.Fatal(err)
			}
			for _, o := range list.Items {
				// Each node looks every 10 s, and tells of an API server that it does not reach just then.
				if reason, _, _ := unstructured.NestedString(o.Object, "reason"); reason == string(lb.ReasonAPIServerUnreachable) {
					continue
				}
				all[kind.Resource+" "+o.GetNamespace()+"/"+o.GetName()] = o.GetResourceVersion()
			}
		}
		return all
	}
	var before map[string]string
	quiet := 0
	eventually(t, "all is said", func() error {
		now := versions()
		if quiet++; len(differ(before, now)) > 0 {
			before, quiet = now, 0
		}
		if quiet < 60 { // 3 s and more
			return fmt.Errorf("still changing")
		}
		return nil
	})
	same := func(when string) {
		t.Helper()
		if changed := differ(before, versions()); len(changed) > 0 {
			t.Errorf("%s: %v", when, changed)
		}
	}
	time.Sleep(20 * time.Second)
	same("while nothing happens")
	if err := cmp.Or(l.StopAPI(), l.StartAPI(ctx)); err != nil {
		t.Fatal(err)
	}
	time.Sleep(10 * time.Second)
	same("after all watches began anew")
	for _, a := range l.Agents("controller") {
		if err := a.Restart(ctx); err != nil {
			t.Fatal(err)
		}
	}
	time.Sleep(10 * time.Second)
	same("after the controllers were restarted")
}

// differ names what is not the same in both.
func differ(a, b map[string]string) []string {
	var names []string
	for name, version := range b {
		if a[name] != version {
			names = append(names, name)
		}
	}
	for name := range a {
		if _, ok := b[name]; !ok {
			names = append(names, name+" is gone")
		}
	}
	return names
}
