package e2e

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/landfall-lb/landfall/e2e/lab"
)

// createAtOnce creates 16 Services of two families with one sharing key, all at once, and returns their names.
func createAtOnce(t *testing.T, l *lab.Lab, prefix string, change func(i int, s *corev1.Service)) (names []string) {
	t.Helper()
	var group errgroup.Group
	for i := range 16 {
		name := fmt.Sprintf("%s-%d", prefix, i)
		names = append(names, name)
		group.Go(func() error {
			return createDual(t.Context(), l, name, func(s *corev1.Service) {
				s.Annotations = map[string]string{"landfall.dev/allow-shared-ip": prefix}
				change(i, s)
			})
		})
	}
	if err := group.Wait(); err != nil {
		t.Fatal(err)
	}
	return names
}

// wantApart waits until each of the Services holds an address of each family of the pool that no other one holds, and
// goes on holding it: what one controller has decided, the other keeps.
func wantApart(t *testing.T, l *lab.Lab, names []string) (held map[string]string) {
	t.Helper()
	look := func() (map[string]string, error) {
		now, err := holdings(t.Context(), l)
		if err != nil {
			return nil, err
		}
		holder, held := map[string]string{}, map[string]string{}
		for _, name := range names {
			addrs := strings.Split(now[name], ",")
			if len(addrs) != 2 || !strings.HasPrefix(addrs[0], "10.64.") || !strings.HasPrefix(addrs[1], "fd00:10:64:") {
				return nil, fmt.Errorf("%s holds %q", name, now[name])
			}
			for _, addr := range addrs {
				if other := holder[addr]; other != "" {
					return nil, fmt.Errorf("%s is held by %s and %s", addr, name, other)
				}
				holder[addr] = name
			}
			held[name] = now[name]
		}
		return held, nil
	}
	eventually(t, "each has addresses of its own", func() (err error) { held, err = look(); return err })
	time.Sleep(2 * time.Second)
	if now, err := look(); err != nil || !maps.Equal(now, held) {
		t.Errorf("they held %v and now %v: %v", held, now, err)
	}
	return held
}

// takeOnePort has Services share two addresses, and then take one and the same port, all at once: one of them stays,
// and the others move.
func takeOnePort(t *testing.T, l *lab.Lab) {
	names := createAtOnce(t, l, "moves", func(i int, s *corev1.Service) { s.Spec.Ports[0].Port = int32(8000 + i) })
	var shared string
	eventually(t, "all share an address of each family", func() error {
		now, err := holdings(t.Context(), l)
		if err != nil {
			return err
		}
		shared = now[names[0]]
		for _, name := range names {
			if now[name] != shared || !strings.Contains(shared, ",") {
				return fmt.Errorf("%s holds %q, and %s %q", names[0], shared, name, now[name])
			}
		}
		return nil
	})
	history := watchHoldings(t, l)
	var group errgroup.Group
	for _, name := range names {
		group.Go(func() error {
			_, err := l.Kube().CoreV1().Services("default").Patch(t.Context(), name, types.JSONPatchType,
				[]byte(`[{"op": "replace", "path": "/spec/ports/0/port", "value": 80}]`), metav1.PatchOptions{})
			return err
		})
	}
	if err := group.Wait(); err != nil {
		t.Fatal(err)
	}
	held := wantApart(t, l, names)
	if stayed := slices.Collect(maps.Values(held)); !slices.Contains(stayed, shared) {
		t.Errorf("all have left %s: %v", shared, held)
	}
	history.wantMoves(t, held, 1)
}

// history is what Services have held, one after the other.
type history struct {
	mu   sync.Mutex
	held map[string][]string
}

// watchHoldings notes what Services hold from now on.
func watchHoldings(t *testing.T, l *lab.Lab) *history {
	t.Helper()
	services := l.Kube().CoreV1().Services("default")
	now, err := services.List(t.Context(), metav1.ListOptions{Limit: 1})
	if err != nil {
		t.Fatal(err)
	}
	watch, err := services.Watch(t.Context(), metav1.ListOptions{ResourceVersion: now.ResourceVersion})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(watch.Stop)
	h := &history{held: map[string][]string{}}
	go func() {
		for event := range watch.ResultChan() {
			s, ok := event.Object.(*corev1.Service)
			if !ok || len(s.Status.LoadBalancer.Ingress) == 0 {
				continue
			}
			var addrs []string
			for _, in := range s.Status.LoadBalancer.Ingress {
				addrs = append(addrs, in.IP)
			}
			h.mu.Lock()
			h.held[s.Name] = slices.Compact(append(h.held[s.Name], strings.Join(addrs, ",")))
			h.mu.Unlock()
		}
	}()
	return h
}

// wantMoves waits until the history shows what the Services hold now, and fails the test if one of them has moved more
// often than so.
func (h *history) wantMoves(t *testing.T, now map[string]string, most int) {
	t.Helper()
	eventually(t, "the watch shows what the Services hold", func() error {
		h.mu.Lock()
		defer h.mu.Unlock()
		for name, addrs := range now {
			if all := h.held[name]; len(all) == 0 && most == 0 || len(all) > 0 && all[len(all)-1] != addrs {
				return fmt.Errorf("%s held %v", name, all)
			}
		}
		return nil
	})
	h.mu.Lock()
	defer h.mu.Unlock()
	for name := range now {
		if all := h.held[name]; len(all) > most+1 {
			t.Errorf("%s held %v, and may move %d times", name, all, most)
		}
	}
}

// foreignStatus holds the controllers while Services come with addresses in their status that nobody of Landfall has
// assigned, and that no pool contains, and lets them go on at once: each Service gets addresses of the pool.
func foreignStatus(t *testing.T, l *lab.Lab, agents []*lab.Agent) {
	signal := func(sig syscall.Signal) {
		t.Helper()
		for _, a := range agents {
			if err := a.Signal(sig); err != nil {
				t.Fatal(err)
			}
		}
	}
	signal(syscall.SIGSTOP)
	names := createAtOnce(t, l, "foreign", func(_ int, s *corev1.Service) { s.Annotations = nil })
	for i, name := range names {
		patch := fmt.Sprintf(`{"status": {"loadBalancer": {"ingress": [{"ip": "172.18.0.%[1]d"}, {"ip": "fd18::%[1]d"}]}}}`,
			i/2+1) // each of two Services
		if _, err := l.Kube().CoreV1().Services("default").Patch(t.Context(), name, types.MergePatchType, []byte(patch),
			metav1.PatchOptions{}, "status"); err != nil {
			t.Fatal(err)
		}
	}
	history := watchHoldings(t, l)
	signal(syscall.SIGCONT)
	history.wantMoves(t, wantApart(t, l, names), 1)
	for _, name := range []string{names[0], names[15]} {
		wantEvent(t, l, name, "ForeignAddress", "Landfall did not assign it")
	}
}
