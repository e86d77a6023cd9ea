package kube

import (
	"reflect"
	"slices"
	"sync"

	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/landfall-lb/landfall/internal/lb"
)

// Slices watches the EndpointSlices of all Services that are not headless, by Service. changed gets
// the Service's key.
func Slices(c *Client, changed func(service lb.Key)) *SliceTable {
	store := newSliceStore(lb.MaxSlices, changed)
	c.register(resource{
		client: c.rest.discovery, name: "endpointslices", example: &discoveryv1.EndpointSlice{},
		labelSelector: notHeadless + "," + discoveryv1.LabelServiceName,
	}, store)
	return store.table
}

// SliceTable is the picture of all EndpointSlices, by Service. Where a Table would compare and copy a whole list for
// each event, it finds and compares one slice: a tenant may write any number of them, and all tenants' slices come in
// one stream. Who reads a list pays for it, once for all events since the last reader. Lists are shared: do not change
// them.
type SliceTable struct {
	changed func(service lb.Key)
	most    int // slices of one Service that are shown

	mu       sync.Mutex
	services map[lb.Key]*group
	synced   bool
}

// Get returns the slices of a Service in the order of their keys, and whether there are any: lb.MaxSlices at most, and
// then the one that stands for those beyond. Before Synced, absent means unknown.
func (t *SliceTable) Get(service lb.Key) ([]lb.Slice, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	g, ok := t.services[service]
	if !ok {
		return nil, false
	}
	return g.list(service), true
}

// All returns the slices of all Services.
func (t *SliceTable) All() map[lb.Key][]lb.Slice {
	t.mu.Lock()
	defer t.mu.Unlock()
	all := make(map[lb.Key][]lb.Slice, len(t.services))
	for service, g := range t.services {
		all[service] = g.list(service)
	}
	return all
}

// Keys returns the Services in any order.
func (t *SliceTable) Keys() []lb.Key {
	t.mu.Lock()
	defer t.mu.Unlock()
	keys := make([]lb.Key, 0, len(t.services))
	for service := range t.services {
		keys = append(keys, service)
	}
	return keys
}

// Synced reports whether the table has been complete once; it stays so when the API server goes
// away.
func (t *SliceTable) Synced() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.synced
}

// put takes in a slice, new or changed, and tells of its Service if that makes a difference.
func (t *SliceTable) put(slice *lb.Slice) {
	t.mu.Lock()
	g := t.services[slice.Service]
	if g == nil {
		g = &group{}
		t.services[slice.Service] = g
	}
	changed := g.put(slice, t.most)
	t.mu.Unlock()
	if changed {
		t.changed(slice.Service)
	}
}

// remove takes a slice from those of a Service, and tells of the Service if that makes a difference.
func (t *SliceTable) remove(service, key lb.Key) {
	t.mu.Lock()
	g := t.services[service]
	changed := g.remove(key)
	if len(g.in) == 0 {
		delete(t.services, service)
	}
	t.mu.Unlock()
	if changed {
		t.changed(service)
	}
}

// replace sets the whole table and tells of each Service that differs. Readers do not wait while it puts slices in
// order and compares them.
func (t *SliceTable) replace(all map[lb.Key][]*lb.Slice) {
	services, changed := make(map[lb.Key]*group, len(all)), []lb.Key{}
	for service, of := range all {
		g, before := t.before(service)
		now := newGroup(of, before.in, t.most)
		if g == nil || !now.same(before) {
			services[service], changed = now, append(changed, service)
			continue
		}
		t.mu.Lock()
		g.beyond = now.beyond
		t.mu.Unlock()
		services[service] = g
	}
	t.mu.Lock()
	for service := range t.services {
		if services[service] == nil {
			changed = append(changed, service)
		}
	}
	t.services, t.synced = services, true
	t.mu.Unlock()
	for _, service := range changed {
		t.changed(service)
	}
}

// before returns the group of a Service, nil if there is none, and a copy that no reader touches.
func (t *SliceTable) before(service lb.Key) (g *group, before group) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if g = t.services[service]; g != nil {
		before.in, before.beyond = slices.Clone(g.in), g.beyond
	}
	return g, before
}

// group are the slices of one Service.
type group struct {
	// in are those that are shown, in order.
	in []*lb.Slice
	// beyond are those for which there is no room, nil unless in is full. When a slice leaves in, any one of them
	// takes its place, so that all are there again once they are not too many. None takes the place of one that stays:
	// what nodes serve by that one they go on serving.
	beyond map[lb.Key]*lb.Slice
	// shown is what is shown; nil until somebody looks.
	shown []lb.Slice
}

// list returns the slices as they are shown.
func (g *group) list(service lb.Key) []lb.Slice {
	if g.shown != nil {
		return g.shown
	}
	g.shown = make([]lb.Slice, len(g.in), len(g.in)+1)
	for i, slice := range g.in {
		g.shown[i] = *slice
		g.in[i] = &g.shown[i] // nothing is kept twice
	}
	if len(g.beyond) > 0 {
		g.shown = append(g.shown, lb.Slice{Service: service, More: true})
	}
	return g.shown
}

// put adds a slice, or has it replace the one of its key. It reports whether something else is shown now.
func (g *group) put(slice *lb.Slice, most int) (changed bool) {
	at, had := find(g.in, slice.Key)
	switch {
	case had && reflect.DeepEqual(g.in[at], slice):
		return false
	case had:
		g.in[at] = slice
	case len(g.in) < most:
		g.in = slices.Insert(g.in, at, slice)
	case g.beyond == nil:
		g.beyond = map[lb.Key]*lb.Slice{slice.Key: slice}
	default:
		g.beyond[slice.Key] = slice
		return false
	}
	g.shown = nil
	return true
}

// remove removes a slice. It reports whether something else is shown now.
func (g *group) remove(key lb.Key) (changed bool) {
	at, had := find(g.in, key)
	if had {
		g.in = slices.Delete(g.in, at, at+1)
		for other, slice := range g.beyond {
			at, _ = find(g.in, other)
			g.in, key = slices.Insert(g.in, at, slice), other
			break
		}
	}
	full := g.beyond != nil
	if delete(g.beyond, key); len(g.beyond) == 0 {
		g.beyond = nil
	}
	if !had && full == (g.beyond != nil) {
		return false
	}
	g.shown = nil
	return true
}

// newGroup returns the group of slices that come in any order. If there is no room for all, those have it first that
// are shown before.
func newGroup(of, before []*lb.Slice, most int) *group {
	inOrder(of)
	if len(of) <= most {
		return &group{in: of}
	}
	g := &group{in: make([]*lb.Slice, 0, most), beyond: make(map[lb.Key]*lb.Slice, len(of)-most)}
	for _, slice := range of {
		if _, shown := find(before, slice.Key); shown {
			g.in = append(g.in, slice)
		} else {
			g.beyond[slice.Key] = slice
		}
	}
	for _, slice := range of {
		if len(g.in) == most {
			break
		}
		if g.beyond[slice.Key] != nil {
			delete(g.beyond, slice.Key)
			g.in = append(g.in, slice)
		}
	}
	inOrder(g.in)
	return g
}

// same reports whether two groups show the same.
func (g *group) same(other group) bool {
	return (g.beyond == nil) == (other.beyond == nil) &&
		slices.EqualFunc(g.in, other.in, func(a, b *lb.Slice) bool { return reflect.DeepEqual(a, b) })
}

// find returns where among slices in order the one of a key is, or would be.
func find(of []*lb.Slice, key lb.Key) (at int, found bool) {
	return slices.BinarySearchFunc(of, key, func(slice *lb.Slice, key lb.Key) int { return slice.Key.Compare(key) })
}

func inOrder(of []*lb.Slice) {
	slices.SortFunc(of, func(a, b *lb.Slice) int { return a.Key.Compare(b.Key) })
}

// sliceStore is the store behind the table of EndpointSlices. The reflector calls it from one goroutine.
type sliceStore struct {
	table *SliceTable
	owner map[lb.Key]lb.Key // from the slice to its Service, as its label can change
}

func newSliceStore(most int, changed func(service lb.Key)) *sliceStore {
	return &sliceStore{table: &SliceTable{changed: changed, most: most, services: map[lb.Key]*group{}},
		owner: map[lb.Key]lb.Key{}}
}

// Transformer has the first list held as lb values, as that of objects does.
func (s *sliceStore) Transformer() cache.TransformFunc {
	return func(obj any) (any, error) { return s.slice(obj), nil }
}

func (s *sliceStore) slice(obj any) *lb.Slice {
	if slice, ok := obj.(*lb.Slice); ok {
		return slice
	}
	slice := convertSlice(obj.(*discoveryv1.EndpointSlice))
	return &slice
}

func (s *sliceStore) Add(obj any) error {
	slice := s.slice(obj)
	if before, had := s.owner[slice.Key]; had && before != slice.Service {
		s.table.remove(before, slice.Key)
	}
	s.owner[slice.Key] = slice.Service
	s.table.put(slice)
	return nil
}

func (s *sliceStore) Update(obj any) error { return s.Add(obj) }

func (s *sliceStore) Delete(obj any) error {
	key := keyOf(obj.(*discoveryv1.EndpointSlice))
	if service, ok := s.owner[key]; ok {
		delete(s.owner, key)
		s.table.remove(service, key)
	}
	return nil
}

func (s *sliceStore) Replace(list []any, _ string) error {
	latest := make(map[lb.Key]*lb.Slice, len(list))
	for _, obj := range list {
		slice := s.slice(obj)
		latest[slice.Key] = slice
	}
	s.owner = make(map[lb.Key]lb.Key, len(latest))
	all := map[lb.Key][]*lb.Slice{}
	for key, slice := range latest {
		s.owner[key] = slice.Service
		all[slice.Service] = append(all[slice.Service], slice)
	}
	s.table.replace(all)
	return nil
}

func (s *sliceStore) Resync() error { return nil }
