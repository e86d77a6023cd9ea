package lab

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// SnapshotEtcd keeps what etcd holds now, for [Lab.RestoreEtcd]. The API server is away for a
// moment.
func (l *Lab) SnapshotEtcd(ctx context.Context) error {
	return l.withoutEtcd(ctx, func() error {
		return errors.Join(os.RemoveAll(l.state.path("snapshot")),
			os.CopyFS(l.state.path("snapshot"), os.DirFS(l.state.path("etcd"))))
	})
}

// RestoreEtcd makes etcd hold what it held at [Lab.SnapshotEtcd], revisions included, as an
// administrator may do after a disaster.
func (l *Lab) RestoreEtcd(ctx context.Context) error {
	return l.withoutEtcd(ctx, func() error {
		return errors.Join(os.RemoveAll(l.state.path("etcd")),
			os.CopyFS(l.state.path("etcd"), os.DirFS(l.state.path("snapshot"))),
			os.Chmod(l.state.path("etcd"), 0o700))
	})
}

// Resync does what the endpoint controller does after [Lab.RestoreEtcd]: it writes the endpoints of all Services anew,
// and forgets those that are no longer there.
func (l *Lab) Resync(ctx context.Context) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	list, err := l.kube.CoreV1().Services("").List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	there := map[string]bool{}
	for _, s := range list.Items {
		there[s.Namespace+"/"+s.Name] = true
	}
	maps.DeleteFunc(l.services, func(key string, _ Service) bool { return !there[key] })
	var errs []error
	for _, key := range slices.Sorted(maps.Keys(l.services)) {
		errs = append(errs, l.writeSlice(ctx, l.services[key]))
	}
	return errors.Join(errs...)
}

// KillEtcd ends etcd at once. The API server stays, and has nothing to ask.
func (l *Lab) KillEtcd() error { return l.control.etcd.kill() }

// StartEtcd starts it again, after [Lab.KillEtcd], with the data that it had.
func (l *Lab) StartEtcd() error { return l.control.startEtcd() }

// withoutEtcd stops the API server and etcd, calls f, and starts them again.
func (l *Lab) withoutEtcd(ctx context.Context, f func() error) error {
	if err := errors.Join(l.control.server.kill(), l.control.etcd.kill()); err != nil {
		return err
	}
	if err := f(); err != nil {
		return fmt.Errorf("etcd's data: %w", err)
	}
	if err := l.control.startEtcd(); err != nil {
		return err
	}
	return l.control.start(ctx, l.progress)
}
