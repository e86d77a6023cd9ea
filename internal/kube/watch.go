package kube

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"os"
	"sync"
	"syscall"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	apiwatch "k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	"github.com/landfall-lb/landfall/internal/loop"
)

// resource says what to watch.
type resource struct {
	client        rest.Interface
	name          string // plural, as in the URL
	namespace     string // "" for all, and for objects without
	example       runtime.Object
	labelSelector string
	fieldSelector string
	// optional is set for what not every API server has: its absence counts as an empty list.
	optional bool
}

// register adds a watch on r that fills store once Run is called.
func (c *Client) register(r resource, store cache.TransformingStore) {
	watch := c.watch(r, store)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.watches = append(c.watches, watch)
}

// watch returns a watch on r that fills store.
func (c *Client) watch(r resource, store cache.TransformingStore) *watch {
	watch := &watch{log: c.log, host: c.host, resource: r.name, told: c.answered, size: c.Size,
		backoff:  loop.Backoff{Min: minRetry, Max: maxRetry},
		failures: loop.Failures{Repeat: repeatAfter},
	}
	if r.optional {
		watch.absent = func(why error) {
			if watch.given() {
				return
			}
			c.log.Info("the API server does not show this kind of object; going on without it", "watch", r.name, "reason", why)
			_ = store.Replace(nil, "")
			c.synced()
		}
	}
	watch.reflector = cache.NewReflectorWithOptions(pacedListWatch{r, watch.pause}, r.example,
		reportingStore{TransformingStore: store, watch: watch, client: c}, cache.ReflectorOptions{Name: r.name})
	return watch
}

// pacedListWatch sends each request once, so that every failure comes back at once to watch.run, or
// to the reflector if it has a better question. Without that, a client that knows a version newer
// than all of the API server, as etcd was restored, asks for it ten times more before it asks for
// what there is; and the reflector would retry a refused connection at a pace of its own, up to a
// minute apart.
//
// Where only the way to the API server was gone, a watch goes on from where it was. To list anew would have all nodes
// ask for everything at once, when a switch between them and the API server is back.
type pacedListWatch struct {
	resource
	pause func() time.Duration // between two attempts to go on
}

// resumeFor is for how long a watch tries to go on. After that the API server may not remember its version, and most
// likely more has happened than that the way was gone.
const resumeFor = 2 * time.Minute

func (p pacedListWatch) request(o metav1.ListOptions) *rest.Request {
	o.LabelSelector, o.FieldSelector = p.labelSelector, p.fieldSelector
	return p.client.Get().Namespace(p.namespace).Resource(p.name).VersionedParams(&o, metav1.ParameterCodec).MaxRetries(0)
}

func (p pacedListWatch) ListWithContext(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
	return p.request(o).Do(ctx).Get()
}

func (p pacedListWatch) WatchWithContext(ctx context.Context, o metav1.ListOptions) (apiwatch.Interface, error) {
	o.Watch = true
	w, err := p.request(o).Watch(ctx)
	for began := time.Now(); isWayGone(err) && o.SendInitialEvents == nil && time.Since(began) < resumeFor; {
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(p.pause()):
		}
		w, err = p.request(o).Watch(ctx)
	}
	var status interface{ Status() metav1.Status }
	if err != nil && !errors.As(err, &status) {
		err = errors.New(err.Error())
	}
	return w, err
}

// isWayGone reports whether an error says that no answer came from the API server's machine. One that refuses
// connections says that its API server restarts.
func isWayGone(err error) bool {
	if errors.Is(err, syscall.ECONNREFUSED) { // at one of several addresses
		return false
	}
	return errors.Is(err, syscall.EHOSTUNREACH) || errors.Is(err, syscall.ENETUNREACH) ||
		errors.Is(err, syscall.ETIMEDOUT) || errors.Is(err, os.ErrDeadlineExceeded) ||
		errors.Is(err, context.DeadlineExceeded)
}

// List and Watch are of the interface, but the reflector has a context.
func (p pacedListWatch) List(o metav1.ListOptions) (runtime.Object, error) {
	return p.ListWithContext(context.Background(), o)
}

func (p pacedListWatch) Watch(o metav1.ListOptions) (apiwatch.Interface, error) {
	return p.WatchWithContext(context.Background(), o)
}

// reportingStore tells for how long the store takes something, and tells the watch and the client's
// user when a full list has arrived.
type reportingStore struct {
	cache.TransformingStore
	watch  *watch
	client *Client
}

func (s reportingStore) Add(object any) error {
	defer s.watch.pulse.Begin()()
	return s.TransformingStore.Add(object)
}

func (s reportingStore) Update(object any) error {
	defer s.watch.pulse.Begin()()
	return s.TransformingStore.Update(object)
}

func (s reportingStore) Delete(object any) error {
	defer s.watch.pulse.Begin()()
	return s.TransformingStore.Delete(object)
}

func (s reportingStore) Replace(list []any, version string) error {
	defer s.watch.pulse.Begin()()
	err := s.TransformingStore.Replace(list, version)
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
	told      func(err error) // is called after a failure
	size      func() int      // how many nodes there are; 0 if that is not known

	pulse loop.Pulse // while the store takes something

	// absent makes the list empty, unless there is one; nil if the resource must be there.
	absent func(why error)

	mu       sync.Mutex
	backoff  loop.Backoff
	failures loop.Failures
	complete bool  // there is a list, be it that of what is absent
	refused  error // why this user may not read it
	ended    time.Time
}

// Retries of a watch that failed: quick at first, as an API server restart takes seconds, and never
// all clients at once. Each node has some 17 watches, so the more nodes there are, the longer the time
// over which they spread.
const (
	minRetry = 200 * time.Millisecond
	maxRetry = 5 * time.Second
	// The longest time between two attempts is smallRetry in a cluster of a few nodes, and retryOfEach for each
	// node in a larger one.
	smallRetry, retryOfEach = time.Second, 300 * time.Millisecond
	// spreadOfEach has all nodes ask for about 1,700 lists a second, up to 500 nodes.
	spreadOfEach = 10 * time.Millisecond
	repeatAfter  = 30 * time.Second
	absentRetry  = time.Minute // of what the API server does not have
)

// spreadOf returns over which time the nodes of a cluster ask for their lists when the API server has
// ended the watches of all at one moment; retryOf returns the longest time between two attempts.
func spreadOf(nodes int) time.Duration { return ofEach(nodes, spreadOfEach, time.Millisecond) }
func retryOf(nodes int) time.Duration  { return ofEach(nodes, retryOfEach, smallRetry) }

// ofEach returns so much for each of the nodes, between least and maxRetry; nodes is 0 if it is not known.
func ofEach(nodes int, each, least time.Duration) time.Duration {
	if nodes == 0 || nodes > int(maxRetry/each) {
		return maxRetry
	}
	return max(least, time.Duration(nodes)*each)
}

func (w *watch) run(ctx context.Context) {
	for ctx.Err() == nil {
		err := w.reflector.ListAndWatchWithContext(ctx)
		if ctx.Err() != nil {
			return
		}
		retry := absentRetry
		if w.absent != nil && (apierrors.IsNotFound(err) || apierrors.IsForbidden(err)) {
			w.absent(err)
		} else {
			retry = w.failed(err)
			w.told(err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(retry):
		}
	}
}

// failed reports a failure and returns how long to wait.
func (w *watch) failed(err error) time.Duration {
	nodes := w.size() // before the lock: the client locks itself first, and then its watches
	w.mu.Lock()
	defer w.mu.Unlock()
	if err == nil {
		// The API server has ended the watch, and wants the list to be read again, as after a restart: so
		// it is for all nodes at that moment.
		wait := rand.N(spreadOf(nodes))
		if time.Since(w.ended) < maxRetry { // it does so again and again
			wait += minRetry
		}
		w.ended = time.Now()
		return wait
	}
	w.backoff.Max = retryOf(nodes)
	w.report(err)
	if apierrors.IsForbidden(err) {
		w.refused = err
	}
	wait := w.backoff.Next()
	return wait/2 + rand.N(wait)/2
}

// pause returns how long to wait before the next attempt to go on.
func (w *watch) pause() time.Duration {
	most := retryOf(w.size())
	return most/2 + rand.N(most)/2
}

func (w *watch) reached() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.report(nil)
	w.backoff.Reset()
	w.complete, w.refused = true, nil
}

func (w *watch) report(err error) {
	w.failures.Log(w.log, "waiting for the API server", "the API server answers", err, "server", w.host,
		"watch", w.resource)
}

// given reports whether there is a list already, and notes that from now on there is one.
func (w *watch) given() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	before := w.complete
	w.complete = true
	return before
}

func (w *watch) refusal() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.refused
}
