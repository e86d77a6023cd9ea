package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/landfall-lb/landfall/internal/kube"
	"github.com/landfall-lb/landfall/internal/kube/kubetest"
	"github.com/landfall-lb/landfall/internal/lb"
)

// cluster is an API server as the controller sees it: objects with versions, writes that conflict
// when they were decided on an older one, and failures of the next calls.
type cluster struct {
	mu       sync.Mutex
	version  int
	services map[lb.Key]lb.Service
	pools    map[string]lb.Pool
	// failures are used up by the next writes, in order; nil lets one pass.
	failures []failure
	// invalid are the Services that the API server would not take with what the controller writes, as with
	// annotations that leave no room.
	invalid map[lb.Key]bool
	// webhook has an admission webhook refuse those.
	webhook bool
	// refused counts the writes to those.
	refused int
	// writes lists what took effect.
	writes []string
	// history has all addresses that each Service ever held.
	history map[lb.Key][]netip.Addr
	// log is what a watch of Services tells, in order.
	log []event
	// stalled are writes that have timed out for those who sent them, and that arrive yet.
	stalled []func()
	// before is called before each write that a controller sends, one after the other by turn, and listing before each
	// of a listing; nil for nothing.
	before  func()
	turn    sync.Mutex
	listing func(ctx context.Context, key lb.Key) error
	// holding is called before that for each write to a Service, and may keep it; nil for nothing.
	holding func(ctx context.Context, key lb.Key) error
}

// event is a new state of a Service.
type event struct {
	service lb.Service
	deleted bool
}

// failure makes a write fail before it takes effect, or, if late, after.
type failure func(key lb.Key) (err error, late bool)

func conflict(key lb.Key) (error, bool) {
	return apierrors.NewConflict(schema.GroupResource{Resource: "services"}, key.Name,
		errors.New("the object has been modified")), false
}

func forbidden(key lb.Key) (error, bool) {
	return apierrors.NewForbidden(schema.GroupResource{Resource: "services"}, key.Name, errors.New("no")), false
}

func refused(lb.Key) (error, bool) { return errors.New("dial: connection refused"), false }

// lost is an answer that never arrives: the write took place and nobody was told.
func lost(lb.Key) (error, bool) { return errors.New("read: connection reset by peer"), true }

var errStalled = errors.New("context deadline exceeded")

// stall is a write that is under way for longer than anybody waits.
func stall(lb.Key) (error, bool) { return errStalled, false }

// arrive lets the stalled write i take effect, if what it was decided on still holds.
func (c *cluster) arrive(i int) {
	c.mu.Lock()
	write := c.stalled[i]
	c.stalled = slices.Delete(c.stalled, i, i+1)
	c.mu.Unlock()
	write()
}

func newCluster() *cluster {
	return &cluster{services: map[lb.Key]lb.Service{}, pools: map[string]lb.Pool{}, history: map[lb.Key][]netip.Addr{}}
}

func (c *cluster) put(s lb.Service) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.store(s)
}

// store needs the lock.
func (c *cluster) store(s lb.Service) {
	c.version++
	s.Version = strconv.Itoa(c.version)
	if s.UID == "" {
		s.UID, s.Created = s.Version, time.Unix(int64(c.version), 0)
	}
	c.services[s.Key] = s
	c.log = append(c.log, event{service: s})
	for _, in := range s.Ingress {
		if !slices.Contains(c.history[s.Key], in.Addr) {
			c.history[s.Key] = append(c.history[s.Key], in.Addr)
		}
	}
}

// touch changes nothing but the version of a Service.
func (c *cluster) touch(name string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.store(c.services[key(name)])
}

func (c *cluster) remove(name string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.log = append(c.log, event{service: c.services[key(name)], deleted: true})
	delete(c.services, key(name))
	delete(c.history, key(name))
}

func (c *cluster) addPool(name, written string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	r, err := lb.ParseRange(written)
	if err != nil {
		panic(err)
	}
	c.version++
	c.pools[name] = lb.Pool{Name: name, Version: strconv.Itoa(c.version), Created: time.Unix(int64(c.version), 0),
		Generation: 1, Ranges: []lb.Range{r}, AutoAssign: true}
}

func (c *cluster) fail(next ...failure) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.failures = next
}

// snapshot returns what brings the cluster back to the present state, versions included.
func (c *cluster) snapshot() (restore func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	version, services, pools := c.version, maps.Clone(c.services), maps.Clone(c.pools)
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		for key, s := range c.services {
			if _, ok := services[key]; !ok {
				c.log = append(c.log, event{service: s, deleted: true})
				delete(c.history, key)
			}
		}
		for _, s := range services {
			c.log = append(c.log, event{service: s})
		}
		c.version, c.services, c.pools = version, services, pools
	}
}

// failing takes the next failure. It needs the lock.
func (c *cluster) failing(key lb.Key) (err error, late bool) {
	if len(c.failures) == 0 {
		return nil, false
	}
	next := c.failures[0]
	c.failures = c.failures[1:]
	if next == nil {
		return nil, false
	}
	return next(key)
}

// Hold implements statusWriter.
func (c *cluster) Hold(ctx context.Context, given lb.Service, h kube.Holding) error {
	if c.holding != nil {
		if err := c.holding(ctx, given.Key); err != nil {
			return err
		}
	}
	if c.before != nil {
		c.turn.Lock() // those of Services go beside those of pools
		defer c.turn.Unlock()
		c.before()
	}
	return c.hold(ctx, given, h)
}

func (c *cluster) hold(ctx context.Context, given lb.Service, h kube.Holding) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	err, late := c.failing(given.Key)
	if errors.Is(err, errStalled) {
		c.stalled = append(c.stalled, func() { _ = c.hold(ctx, given, h) })
	}
	if err != nil && !late {
		return err
	}
	s, ok := c.services[given.Key]
	switch {
	case !ok:
		return apierrors.NewNotFound(schema.GroupResource{Resource: "services"}, given.Key.Name)
	case s.Version != given.Version || s.UID != given.UID:
		err, _ := conflict(given.Key)
		return err
	}
	if c.invalid[given.Key] {
		return c.refuse(given.Key)
	}
	show(&s, h)
	c.writes = append(c.writes, "service "+s.Key.Name)
	if s.Deleting && !s.Finalizer {
		c.log = append(c.log, event{service: s, deleted: true})
		delete(c.services, s.Key)
		delete(c.history, s.Key)
		return err
	}
	c.store(s)
	return err
}

// refuse returns what the API server says of a Service whose annotations leave no room. It needs the lock.
func (c *cluster) refuse(key lb.Key) error {
	c.refused++
	if c.webhook {
		return fmt.Errorf("write status: %w", &apierrors.StatusError{ErrStatus: metav1.Status{Code: 403,
			Status: metav1.StatusFailure, Message: `admission webhook "w" denied the request: no`}})
	}
	return fmt.Errorf("write status: %w", apierrors.NewInvalid(schema.GroupKind{Kind: "Service"}, key.Name,
		field.ErrorList{field.TooLong(field.NewPath("metadata", "annotations"), "", 262144)}))
}

// show has s show h.
func show(s *lb.Service, h kube.Holding) {
	s.Ingress, s.Unread, s.Hostnames = nil, 0, 0
	for _, addr := range h.Addresses {
		s.Ingress = append(s.Ingress, lb.Ingress{Addr: addr, Mode: lb.IPModeVIP})
	}
	if h.Condition == nil {
		s.Conditions = nil
	} else {
		s.Conditions = slices.DeleteFunc(slices.Clone(s.Conditions),
			func(have lb.Condition) bool { return have.Type == h.Condition.Type })
		s.Conditions = append(s.Conditions, *h.Condition)
	}
	if h.Finalizer != kube.FinalizerStays {
		s.Finalizer = h.Finalizer == kube.FinalizerSet
	}
	switch {
	case len(h.Addresses) == 0:
		s.Announcements, s.AllocatedFrom = "", nil
	case h.Pool != "":
		s.AllocatedFrom = map[string]string{lb.AnnotationAllocatedFrom: h.Pool}
	}
}

// del deletes a Service as an API server does: one with a finalizer stays until that is removed.
func (c *cluster) del(name string) {
	s := c.services[key(name)]
	if !s.Finalizer {
		c.remove(name)
		return
	}
	s.Deleting = true
	c.put(s)
}

// announce has the speakers report on a Service.
func (c *cluster) announce(name string, announced bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.services[key(name)]
	s.Conditions = slices.DeleteFunc(slices.Clone(s.Conditions),
		func(have lb.Condition) bool { return have.Type == lb.ConditionAnnounced })
	s.Conditions = append(s.Conditions, lb.Condition{Type: lb.ConditionAnnounced, Status: announced, Reason: "Said"})
	if s.Announcements = ""; announced {
		s.Announcements = "n1"
	}
	c.store(s)
}

// Pool implements statusWriter.
func (c *cluster) Pool(ctx context.Context, given lb.Pool, status lb.PoolStatus) (string, error) {
	if c.before != nil {
		c.turn.Lock() // those of Services go beside those of pools
		defer c.turn.Unlock()
		c.before()
	}
	return c.pool(ctx, given, status)
}

func (c *cluster) pool(ctx context.Context, given lb.Pool, status lb.PoolStatus) (string, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	name := given.Name
	err, late := c.failing(lb.Key{Name: name})
	if errors.Is(err, errStalled) {
		c.stalled = append(c.stalled, func() { _, _ = c.pool(ctx, given, status) })
	}
	if err != nil && !late {
		return "", err
	}
	p, ok := c.pools[name]
	switch {
	case !ok:
		return "", apierrors.NewNotFound(schema.GroupResource{Resource: "ipaddresspools"}, name)
	case p.Version != given.Version:
		err, _ := conflict(lb.Key{Name: name})
		if kube.Older(p.Version, given.Version) {
			err = fmt.Errorf("%w: %w", kube.ErrWentBack, err)
		}
		return "", err
	}
	c.version++
	p.Status, p.Version = status, strconv.Itoa(c.version)
	c.pools[name] = p
	c.writes = append(c.writes, "pool "+name)
	return p.Version, err
}

func (c *cluster) written() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	written := c.writes
	c.writes = nil
	return written
}

func (c *cluster) holds(name string) string {
	c.mu.Lock()
	defer c.mu.Unlock()
	var words []string
	for _, in := range c.services[key(name)].Ingress {
		words = append(words, in.Addr.String())
	}
	for _, condition := range c.services[key(name)].Conditions {
		words = append(words, string(condition.Reason))
	}
	return strings.Join(words, " ")
}

// check fails if an address has two holders now, or a Service ever had another address than its
// first.
func (c *cluster) check(t *testing.T) {
	t.Helper()
	c.mu.Lock()
	defer c.mu.Unlock()
	holders := map[netip.Addr]lb.Key{}
	for k, s := range c.services {
		for _, in := range s.Ingress {
			if other, ok := holders[in.Addr]; ok {
				t.Errorf("%s is held by both %s and %s", in.Addr, k, other)
			}
			holders[in.Addr] = k
		}
		if len(c.history[k]) > 1 {
			t.Errorf("%s held %v, one after the other", k, c.history[k])
		}
	}
}

// process is one controller with its own watches.
type process struct {
	*controller
	cluster  *cluster
	services *kubetest.Table[lb.Key, lb.Service]
	pools    *kubetest.Table[string, lb.Pool]
	nodes    *kubetest.Table[string, lb.Node]
	spaces   *kubetest.Table[string, lb.Namespace]
	around   *kubetest.Table[string, map[string]string]
	sessions *kubetest.Table[string, []string]
	seen     int // events of the cluster's log that services shows
	events   []string
	clock    time.Time
	ticks    time.Duration // by which the clock goes forward at each look
	clockMu  sync.Mutex    // loops look at the clock side by side
}

// processes gives each its own identity.
var processes atomic.Int64

func newProcess(c *cluster) *process {
	p := &process{
		cluster: c, clock: time.Unix(1_000_000, 0), ticks: time.Second,
		services: kubetest.NewTable[lb.Key, lb.Service](), pools: kubetest.NewTable[string, lb.Pool](),
		nodes: kubetest.NewTable[string, lb.Node](), spaces: kubetest.NewTable[string, lb.Namespace](),
		around: kubetest.NewTable[string, map[string]string](), sessions: kubetest.NewTable[string, []string](),
	}
	p.services.SetSynced(false)
	p.pools.SetSynced(false)
	p.controller = newController(deps{
		services: p.services, pools: p.pools, nodes: p.nodes, namespaces: p.spaces, around: p.around, status: c,
		events:  (*eventLog)(&p.events),
		catchUp: func(context.Context) error { p.deliverServices(math.MaxInt); return nil },
		forgetAround: func(_ context.Context, nodes []string) error {
			told, _ := p.around.Get(lb.SurroundingsConfigMap)
			told = maps.Clone(told)
			maps.DeleteFunc(told, func(node, _ string) bool { return slices.Contains(nodes, node) })
			p.around.Replace(map[string]map[string]string{lb.SurroundingsConfigMap: told})
			return nil
		},
		sessions: p.sessions,
		forgetSessions: func(_ context.Context, peer string, nodes []string) error {
			have, _ := p.sessions.Get(peer)
			p.sessions.Set(peer, slices.DeleteFunc(slices.Clone(have),
				func(node string) bool { return slices.Contains(nodes, node) }))
			return nil
		},
		parallel: 1, identity: fmt.Sprintf("process-%d", processes.Add(1)),
		metrics: newMetrics(prometheus.NewRegistry()), log: slog.New(slog.DiscardHandler),
		now: func() time.Time {
			p.clockMu.Lock()
			defer p.clockMu.Unlock()
			p.clock = p.clock.Add(p.ticks)
			return p.clock
		},
	})
	p.begin()
	return p
}

// deliver brings the watches up to date.
func (p *process) deliver() {
	p.deliverPools()
	p.deliverServices(math.MaxInt)
}

func (p *process) deliverPools() {
	p.cluster.mu.Lock()
	defer p.cluster.mu.Unlock()
	p.pools.Replace(p.cluster.pools)
	p.factChanged("")
}

// deliverServices has the watch of Services tell up to n more events.
func (p *process) deliverServices(n int) {
	p.cluster.mu.Lock()
	defer p.cluster.mu.Unlock()
	services := p.services.All()
	var changed []lb.Key
	for ; n > 0 && p.seen < len(p.cluster.log); n-- {
		e := p.cluster.log[p.seen]
		p.seen++
		changed = append(changed, e.service.Key)
		if e.deleted {
			delete(services, e.service.Key)
		} else {
			services[e.service.Key] = e.service
		}
	}
	p.services.Replace(services)
	for _, key := range changed { // after the table has them, as a watch does: a step may run at once
		p.serviceChanged(key)
	}
}

// takeOver brings the watches up to date and catches up, as at the beginning of a time of leading.
func (p *process) takeOver(t *testing.T) {
	t.Helper()
	p.deliver()
	if err := p.catchUpWithOthers(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// step steps and waits for the writes that it has begun, as if the next step came once they have ended.
func (p *process) step(ctx context.Context) (again time.Duration, err error) {
	again, err = p.controller.step(ctx)
	p.lanes.Wait()
	p.heed(ctx)
	if len(p.again) > 0 {
		again = soonest(again, time.Millisecond)
	}
	for _, failing := range p.failing {
		if failing.waiting {
			again = soonest(again, max(failing.until.Sub(p.now()), time.Millisecond))
		}
	}
	return again, err
}

// settle steps until nothing is left to do.
func (p *process) settle(t *testing.T) {
	t.Helper()
	for range 10 {
		p.deliver()
		again, err := p.step(t.Context())
		if _, tidyErr := p.tidier.step(t.Context()); err == nil {
			err = tidyErr
		}
		p.list(t)
		p.cluster.check(t)
		if err == nil && again == 0 && len(p.cluster.written()) == 0 && len(p.lister.failing) == 0 {
			return
		}
	}
	t.Fatal("there is no end to the writes")
}

// list writes listings until it has heard of how all writes went.
func (p *process) list(t *testing.T) {
	t.Helper()
	for range 100 {
		if _, err := p.lister.step(t.Context()); err != nil {
			t.Error(err)
		}
		p.lister.lanes.Wait()
		p.lister.mu.Lock()
		open := len(p.lister.ended)
		p.lister.mu.Unlock()
		if open == 0 {
			return
		}
	}
	t.Fatal("there is no end to the writes of listings")
}

// eventLog keeps Events as "Normal name Reason".
type eventLog []string

func (l *eventLog) Normal(about kube.Reference, reason lb.Reason, _ string) {
	*l = append(*l, "Normal "+about.Name+" "+string(reason))
}

func (l *eventLog) Warning(about kube.Reference, reason lb.Reason, _ string) {
	*l = append(*l, "Warning "+about.Name+" "+string(reason))
}

func key(name string) lb.Key { return lb.Key{Namespace: "default", Name: name} }

func service(name string) lb.Service {
	return lb.Service{Key: key(name), Type: lb.LoadBalancer, Families: []lb.Family{lb.IPv4}, FamilyPolicy: lb.SingleStack}
}

// patched returns the Service that a patch without a version, but with its UID, changes, or what an API server says
// if it is gone or another one. It needs the lock.
func (c *cluster) patched(given lb.Service) (lb.Service, error) {
	s, ok := c.services[given.Key]
	switch {
	case !ok:
		err, _ := conflict(given.Key)
		return s, err
	case s.UID != given.UID:
		return s, apierrors.NewInvalid(schema.GroupKind{Kind: "Service"}, given.Key.Name, field.ErrorList{
			field.Invalid(field.NewPath("metadata", "uid"), given.UID, validation.FieldImmutableErrorMsg)})
	}
	return s, nil
}

// List implements statusWriter.
func (c *cluster) List(ctx context.Context, given lb.Service, listed lb.Listing) error {
	if c.listing != nil {
		if err := c.listing(ctx, given.Key); err != nil {
			return err
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	err, late := c.failing(given.Key)
	if err != nil && !late {
		return err
	}
	s, failed := c.patched(given)
	if failed != nil {
		return failed
	}
	if c.invalid[given.Key] {
		return c.refuse(given.Key)
	}
	if s.Listed = nil; listed != nil {
		s.Listed = lb.ParseListing(listed.String())
	}
	c.writes = append(c.writes, "listing "+s.Key.Name)
	c.store(s)
	return err
}
