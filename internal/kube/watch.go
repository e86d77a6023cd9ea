package kube

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	apiwatch "k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
)

// resource says what to watch.
type resource struct {
	client        rest.Interface
	name          string // plural, as in the URL
	namespace     string // "" for all, and for objects without
	example       runtime.Object
	labelSelector string
	fieldSelector string
}

// register adds a watch on r that fills store once Run is called.
func (c *Client) register(r resource, store cache.ReflectorStore) {
	lw := cache.NewFilteredListWatchFromClient(r.client, r.name, r.namespace, func(o *metav1.ListOptions) {
		o.LabelSelector, o.FieldSelector = r.labelSelector, r.fieldSelector
	})
	watch := &watch{log: c.log, host: c.host, resource: r.name}
	watch.reflector = cache.NewReflectorWithOptions(pacedListWatch{lw}, r.example,
		reportingStore{ReflectorStore: store, watch: watch, client: c}, cache.ReflectorOptions{Name: r.name})
	c.mu.Lock()
	defer c.mu.Unlock()
	c.watches = append(c.watches, watch)
}

// pacedListWatch hides from the reflector that a connection was refused, as it would then retry at a pace of its own, up to
// a minute apart; so every failure comes back to watch.run.
type pacedListWatch struct{ *cache.ListWatch }

func (p pacedListWatch) WatchWithContext(ctx context.Context, o metav1.ListOptions) (apiwatch.Interface, error) {
	w, err := p.ListWatch.WatchWithContext(ctx, o)
	var status interface{ Status() metav1.Status }
	if err != nil && !errors.As(err, &status) {
		err = errors.New(err.Error())
	}
	return w, err
}

// reportingStore tells the watch and the client's user when a full list has arrived.
type reportingStore struct {
	cache.ReflectorStore
	watch  *watch
	client *Client
}

func (s reportingStore) Replace(list []any, version string) error {
	err := s.ReflectorStore.Replace(list, version)
	s.watch.reached()
	s.client.synced()
	return err
}

// watch keeps one reflector going.
type watch struct {
	log       *slog.Logger
	host      string
	resource  string
	reflector *cache.Reflector

	mu       sync.Mutex
	failures int
	said     time.Time
}

// Retries of a watch that failed: quick at first, as an API server restart takes seconds, and never all clients at once.
const (
	minRetry    = 200 * time.Millisecond
	maxRetry    = 5 * time.Second
	repeatAfter = 30 * time.Second
)

func (w *watch) run(ctx context.Context) {
	for ctx.Err() == nil {
		err := w.reflector.ListAndWatchWithContext(ctx)
		if ctx.Err() != nil {
			return
		}
		select {
		case <-ctx.Done():
		case <-time.After(w.failed(err)):
		}
	}
}

// failed says that there was a failure, at most once in a while, and returns how long to wait.
func (w *watch) failed(err error) time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	if err == nil {
		return minRetry // the API server ended the watch, as it does now and then
	}
	if now := time.Now(); now.Sub(w.said) >= repeatAfter {
		w.said = now
		w.log.Warn("waiting for the API server", "server", w.host, "watch", w.resource, "error", err)
	}
	wait := min(minRetry<<min(w.failures, 10), maxRetry)
	w.failures++
	return wait/2 + rand.N(wait)/2
}

func (w *watch) reached() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.failures > 0 {
		w.log.Info("the API server answers", "server", w.host, "watch", w.resource)
	}
	w.failures, w.said = 0, time.Time{}
}
