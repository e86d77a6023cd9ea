package kube

import (
	"context"
	"fmt"
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
	behind, latest, err := s.listServices(ctx)
	if err != nil {
		return err
	}
	next := time.Now().Add(listEvery)
	for {
		dropShown(behind, latest, table)
		if len(behind) == 0 && table.Synced() {
			return nil
		}
		if time.Now().After(next) {
			// What was deleted meanwhile will never be shown.
			now, version, err := s.listServices(ctx)
			if err != nil {
				return err
			}
			for key := range behind {
				if _, ok := now[key]; !ok {
					delete(behind, key)
				} else if Older(now[key], behind[key]) {
					behind[key] = now[key]
				}
			}
			latest, next = version, time.Now().Add(listEvery)
		}
		if err := wait(ctx, lookEvery); err != nil {
			return err
		}
	}
}

// dropShown removes from behind what table shows at that version or a newer one, up to the latest
// that the API server is known to have made.
func dropShown(behind map[lb.Key]string, latest string, table *Table[lb.Key, lb.Service]) {
	for key, version := range behind {
		shown, ok := table.Get(key)
		if ok && (shown.Version == version || !Older(shown.Version, version) && !Older(latest, shown.Version)) {
			delete(behind, key)
		}
	}
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
// of its caches, and that of the whole.
func (s *Status) listServices(ctx context.Context) (versions map[lb.Key]string, latest string, err error) {
	for {
		list, err := s.core.Services(metav1.NamespaceAll).List(ctx, metav1.ListOptions{})
		if err == nil {
			versions := make(map[lb.Key]string, len(list.Items))
			for i := range list.Items {
				versions[keyOf(&list.Items[i])] = list.Items[i].ResourceVersion
			}
			return versions, list.ResourceVersion, nil
		}
		if waitErr := wait(ctx, time.Second); waitErr != nil {
			return nil, "", fmt.Errorf("list Services: %w", err)
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
