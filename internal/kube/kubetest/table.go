// Package kubetest has a fake of kube.Table for the tests of those who read tables.
package kubetest

import (
	"maps"
	"slices"
	"sync"
)

// Table is a kube.Table that a test fills. It is safe for concurrent use.
type Table[K comparable, V any] struct {
	mu      sync.Mutex
	values  map[K]V
	synced  bool
	changed []func(K)
}

// NewTable returns an empty table that is synced: there are no objects.
func NewTable[K comparable, V any]() *Table[K, V] {
	return &Table[K, V]{values: map[K]V{}, synced: true}
}

// OnChange has f called with the key of each later Set and Delete.
func (t *Table[K, V]) OnChange(f func(K)) { t.changed = append(t.changed, f) }

// Get returns the value of k, and whether there is one.
func (t *Table[K, V]) Get(k K) (V, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	v, ok := t.values[k]
	return v, ok
}

// All returns a copy of the table.
func (t *Table[K, V]) All() map[K]V {
	t.mu.Lock()
	defer t.mu.Unlock()
	return maps.Clone(t.values)
}

// Keys returns the keys of the table in any order.
func (t *Table[K, V]) Keys() []K {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Collect(maps.Keys(t.values))
}

// Synced reports whether the table has been complete once.
func (t *Table[K, V]) Synced() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.synced
}

// SetSynced says whether the table has been complete once. It calls nobody.
func (t *Table[K, V]) SetSynced(synced bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.synced = synced
}

// Set puts the value of k into the table.
func (t *Table[K, V]) Set(k K, v V) {
	t.mu.Lock()
	t.values[k] = v
	t.mu.Unlock()
	t.tell(k)
}

// Delete takes k out of the table.
func (t *Table[K, V]) Delete(k K) {
	t.mu.Lock()
	delete(t.values, k)
	t.mu.Unlock()
	t.tell(k)
}

// Replace has the table hold a copy of values and nothing else, and be synced, as after a list. It
// calls nobody.
func (t *Table[K, V]) Replace(values map[K]V) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.values = make(map[K]V, len(values))
	maps.Copy(t.values, values)
	t.synced = true
}

func (t *Table[K, V]) tell(k K) {
	for _, f := range t.changed {
		f(k)
	}
}
