// Package leaktest counts what values remember, for tests that have it stay the same over a long time.
package leaktest

import (
	"maps"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"testing"
)

// Entries returns how many entries maps, slices and channels hold, all the way down from a pointer, by the names of the
// fields that lead there. Interfaces and functions are not followed, nor is a field whose path is among the skipped
// ones. What several pointers point to counts where it is found first, which need not be the same each time.
func Entries(from any, skipped ...string) map[string]int {
	c := counter{entries: map[string]int{}, seen: map[place]bool{}, skipped: skipped}
	c.count("", reflect.ValueOf(from))
	return c.entries
}

// Compare reports each path that holds another number of entries than it did before.
func Compare(t testing.TB, before, after map[string]int) {
	t.Helper()
	all := maps.Clone(before)
	maps.Copy(all, after)
	for _, path := range slices.Sorted(maps.Keys(all)) {
		if before[path] != after[path] {
			t.Errorf("%s holds %d entries, before %d", path, after[path], before[path])
		}
	}
}

// Goroutines returns how many goroutines there are: the least of several counts, as the runtime counts its own too
// while it runs a finalizer or a cleanup.
func Goroutines() int {
	least := runtime.NumGoroutine()
	for range 100 {
		runtime.Gosched()
		least = min(least, runtime.NumGoroutine())
	}
	return least
}

type place struct {
	at uintptr
	of reflect.Type
}

type counter struct {
	entries map[string]int
	seen    map[place]bool
	skipped []string
}

func (c *counter) count(path string, v reflect.Value) {
	if slices.Contains(c.skipped, strings.TrimPrefix(path, ".")) {
		return
	}
	switch v.Kind() {
	case reflect.Struct:
		for field, value := range v.Fields() {
			c.count(path+"."+field.Name, value)
		}
	case reflect.Map:
		c.entries[path] += v.Len()
		for each := v.MapRange(); each.Next(); {
			c.count(path+"[]", each.Value())
		}
	case reflect.Slice:
		c.entries[path] += v.Len()
		for i := range v.Len() {
			c.count(path+"[]", v.Index(i))
		}
	case reflect.Array:
		for i := range v.Len() {
			c.count(path+"[]", v.Index(i))
		}
	case reflect.Chan:
		c.entries[path] += v.Len()
	case reflect.Pointer:
		if at := (place{v.Pointer(), v.Type()}); !v.IsNil() && !c.seen[at] {
			c.seen[at] = true
			c.count(path, v.Elem())
		}
	}
}
