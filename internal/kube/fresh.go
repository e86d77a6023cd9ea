package kube

import (
	"context"
	"fmt"
	"maps"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/resourceversion"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/loop"
)

// Waits of CatchUp: between looks at the table, and between questions to the API server.
const (
	lookEvery = 20 * time.Millisecond
	listEvery = 2 * time.Second
)

// CatchUp returns nil once table, filled by Services, shows each Service at least as new as it was
// when CatchUp was called. A watch alone does not tell: it may lag behind by any time, or show what
// was there before etcd was restored, in versions newer than all of now. It asks again while the
// API server cannot be reached; an error means that ctx ended.
func (s *Status) CatchUp(ctx context.Context, table *Table[lb.Key, lb.Service]) error {
	now, err := s.listServices(ctx)
	if err != nil {
		return err
	}
	behind := maps.Clone(now)
	next := time.Now().Add(listEvery)
	for {
		// Before the list: one that changes all the time is newer in the table at any look after it.
		shown := shownOf(behind, table)
		if time.Now().After(next) {
			if now, err = s.listServices(ctx); err != nil {
				return err
			}
			for key, version := range behind {
				if current, ok := now[key]; !ok {
					delete(behind, key) // what was deleted meanwhile will never be shown
				} else if Older(current, version) {
					behind[key] = current
				}
			}
			next = time.Now().Add(listEvery)
		}
		for key, version := range shown {
			if !Older(now[key], version) { // else it may be from before a restore
				delete(behind, key)
			}
		}
		if len(behind) == 0 && table.Synced() {
			return nil
		}
		if err := wait(ctx, lookEvery); err != nil {
			return err
		}
	}
}

// shownOf returns in which version table shows those of behind that it shows at that version or a newer one.
func shownOf(behind map[lb.Key]string, table *Table[lb.Key, lb.Service]) map[lb.Key]string {
	versions := map[lb.Key]string{}
	for key, version := range behind {
		if shown, ok := table.Get(key); ok && !Older(shown.Version, version) {
			versions[key] = shown.Version
		}
	}
	return versions
}

// Older reports whether resource version a of an object comes before b. Resource versions are
// numbers that grow (KEP-5504).
func Older(a, b string) bool {
	order, err := resourceversion.CompareResourceVersion(a, b)
	if err != nil {
		return a != b
	}
	return order < 0
}

// listServices returns the version of each Service as the API server's storage has it now, not one
// of its caches.
func (s *Status) listServices(ctx context.Context) (map[lb.Key]string, error) {
	for {
		list, err := s.core.Services(metav1.NamespaceAll).List(ctx, metav1.ListOptions{})
		if err == nil {
			versions := make(map[lb.Key]string, len(list.Items))
			for i := range list.Items {
				versions[keyOf(&list.Items[i])] = list.Items[i].ResourceVersion
			}
			return versions, nil
		}
		if waitErr := wait(ctx, time.Second); waitErr != nil {
			return nil, fmt.Errorf("list Services: %w", err)
		}
	}
}

// wait waits, which is progress of the step that waits.
func wait(ctx context.Context, d time.Duration) error {
	loop.Progress(ctx)
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return nil
	}
}
