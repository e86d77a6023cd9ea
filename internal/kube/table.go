package kube

import (
	"maps"
	"reflect"
	"slices"
	"sync"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/cache"
)

// Table is the picture of one kind of object as lb values, kept up to date by a watch. Values are
// shared: do not change them.
type Table[K comparable, V any] struct {
	changed func(K)
	same    func(a, b V) bool
	// noted, unless nil, is told of keys whose values are the same but not equal.
	noted func(K)

	mu     sync.RWMutex
	values map[K]V
	synced bool
}

func newTable[K comparable, V any](same func(a, b V) bool, changed func(K)) *Table[K, V] {
	if same == nil {
		same = func(a, b V) bool { return reflect.DeepEqual(a, b) }
	}
	return &Table[K, V]{changed: changed, same: same, values: map[K]V{}}
}

// newStatusTable returns a Table that tells status in place of changed where nothing but the status
// differs, which withoutStatus takes out of a value.
func newStatusTable[K comparable, V any](withoutStatus func(V) V, changed, status func(K)) *Table[K, V] {
	t := newTable(func(a, b V) bool { return reflect.DeepEqual(withoutStatus(a), withoutStatus(b)) }, changed)
	t.noted = status
	return t
}

// Get returns the value of k, and whether there is one. Before Synced, absent means unknown.
func (t *Table[K, V]) Get(k K) (V, bool) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	v, ok := t.values[k]
	return v, ok
}

// All returns a copy of the table.
func (t *Table[K, V]) All() map[K]V {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return maps.Clone(t.values)
}

// Synced reports whether the table has been complete once; it stays so when the API server goes
// away.
func (t *Table[K, V]) Synced() bool {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return t.synced
}

// count returns how many values the table has.
func (t *Table[K, V]) count() int {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return len(t.values)
}

// Keys returns the keys of the table in any order.
func (t *Table[K, V]) Keys() []K {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return slices.Collect(maps.Keys(t.values))
}

// put sets or, with ok false, deletes the value of k, and tells of it if it differs.
func (t *Table[K, V]) put(k K, v V, ok bool) {
	t.mu.Lock()
	old, had := t.values[k]
	if ok {
		t.values[k] = v
	} else {
		delete(t.values, k)
	}
	t.mu.Unlock()
	if had != ok {
		t.changed(k)
	} else if ok {
		t.compare(k, old, v)
	}
}

// compare tells of k if its values differ.
func (t *Table[K, V]) compare(k K, old, now V) {
	switch {
	case !t.same(old, now):
		t.changed(k)
	case t.noted != nil && !reflect.DeepEqual(old, now):
		t.noted(k)
	}
}

// replace sets the whole table and tells of each key that differs.
func (t *Table[K, V]) replace(values map[K]V) {
	t.mu.Lock()
	old := t.values
	t.values = values
	t.synced = true
	t.mu.Unlock()
	for k, v := range values {
		if before, ok := old[k]; ok {
			t.compare(k, before, v)
		} else {
			t.changed(k)
		}
	}
	for k := range old {
		if _, ok := values[k]; !ok {
			t.changed(k)
		}
	}
}

// objects is the store behind a table with one value per object.
type objects[K comparable, V any, O runtime.Object] struct {
	table   *Table[K, V]
	convert func(O) (K, V)
}

// entry is what a store keeps of an object.
type entry[K comparable, V any] struct {
	key   K
	value V
}

// Transformer has the first list held as entries until its last object has come: they take a
// fraction of the objects.
func (s objects[K, V, O]) Transformer() cache.TransformFunc {
	return func(obj any) (any, error) { return s.entry(obj), nil }
}

func (s objects[K, V, O]) entry(obj any) *entry[K, V] {
	if e, ok := obj.(*entry[K, V]); ok {
		return e
	}
	k, v := s.convert(obj.(O))
	return &entry[K, V]{k, v}
}

func (s objects[K, V, O]) Add(obj any) error {
	k, v := s.convert(obj.(O))
	s.table.put(k, v, true)
	return nil
}

func (s objects[K, V, O]) Update(obj any) error { return s.Add(obj) }

func (s objects[K, V, O]) Delete(obj any) error {
	k, v := s.convert(obj.(O))
	s.table.put(k, v, false)
	return nil
}

func (s objects[K, V, O]) Replace(list []any, _ string) error {
	values := make(map[K]V, len(list))
	for _, obj := range list {
		e := s.entry(obj)
		values[e.key] = e.value
	}
	s.table.replace(values)
	return nil
}

func (s objects[K, V, O]) Resync() error { return nil }
