package kubetest

import (
	"maps"
	"slices"
	"testing"

	"github.com/landfall-lb/landfall/internal/kube"
)

// table is what both tables offer.
type table interface {
	Get(string) (int, bool)
	All() map[string]int
	Keys() []string
	Synced() bool
}

var (
	_ table = (*kube.Table[string, int])(nil)
	_ table = (*Table[string, int])(nil)
)

func TestTable(t *testing.T) {
	fake := NewTable[string, int]()
	var changed []string
	fake.OnChange(func(k string) { changed = append(changed, k) })
	fake.Set("a", 1)
	fake.Set("b", 2)
	fake.Delete("a")
	copied := fake.All()
	copied["c"] = 3
	if _, ok := fake.Get("a"); ok || !maps.Equal(fake.All(), map[string]int{"b": 2}) {
		t.Errorf("the table holds %v", fake.All())
	}
	if want := []string{"a", "b", "a"}; !slices.Equal(changed, want) {
		t.Errorf("changed %v, want %v", changed, want)
	}
	fake.Replace(copied)
	if keys := slices.Sorted(slices.Values(fake.Keys())); !slices.Equal(keys, []string{"b", "c"}) {
		t.Errorf("keys %v", keys)
	}
	if fake.SetSynced(false); fake.Synced() {
		t.Error("the table is still synced")
	}
}
