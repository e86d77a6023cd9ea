package kube

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"testing"

	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/landfall-lb/landfall/internal/lb"
)

// sliceModel is what the table of slices is compared with: the objects, and of each Service those that have to be
// shown.
type sliceModel struct {
	objects map[string]*discoveryv1.EndpointSlice
	shown   map[string]map[string]bool
}

func (m *sliceModel) put(o *discoveryv1.EndpointSlice) {
	if before := m.objects[o.Name]; before != nil && serviceOf(before) != serviceOf(o) {
		m.remove(o.Name)
	}
	m.objects[o.Name] = o
}

func (m *sliceModel) remove(name string) {
	delete(m.objects, name)
	for _, shown := range m.shown {
		delete(shown, name)
	}
}

func serviceOf(o *discoveryv1.EndpointSlice) string { return o.Labels[discoveryv1.LabelServiceName] }

func (m *sliceModel) of(service string) map[string]*discoveryv1.EndpointSlice {
	of := map[string]*discoveryv1.EndpointSlice{}
	for name, o := range m.objects {
		if serviceOf(o) == service {
			of[name] = o
		}
	}
	return of
}

// check compares what the table shows: all slices while they are not too many, and else so many, with those that it has
// shown before as long as they are there.
func (m *sliceModel) check(table *SliceTable, service string, most int) error {
	got, ok := table.Get(lb.Key{Namespace: "default", Name: service})
	all := m.of(service)
	if ok != (len(all) > 0) {
		return fmt.Errorf("%s: there are %d slices, the table has some: %v", service, len(all), ok)
	}
	if more := len(got) > 0 && got[len(got)-1].More; more != (len(all) > most) {
		return fmt.Errorf("%s: %d slices, more is %v", service, len(all), more)
	} else if more {
		got = got[:len(got)-1]
	}
	byKey := func(a, b lb.Slice) int { return a.Key.Compare(b.Key) }
	if len(got) != min(most, len(all)) || !slices.IsSortedFunc(got, byKey) {
		return fmt.Errorf("%s: of %d slices these are shown: %+v", service, len(all), got)
	}
	now := map[string]bool{}
	for _, s := range got {
		o := all[s.Key.Name]
		if now[s.Key.Name] = true; o == nil {
			return fmt.Errorf("%s: %s is gone and shown", service, s.Key.Name)
		}
		if want := convertSlice(o); !reflect.DeepEqual(want, s) {
			return fmt.Errorf("%s: %+v, want %+v", service, s, want)
		}
	}
	for name := range m.shown[service] {
		if all[name] != nil && !now[name] {
			return fmt.Errorf("%s: %s was shown, is there, and is shown no more", service, name)
		}
	}
	m.shown[service] = now
	return nil
}

// Stories of slices that come, change, move between Services and go, told in order, twice, or as one list, show what a
// simple model does, and each change is told.
func TestContract11StoriesOfSlices(t *testing.T) {
	const most, names = 4, 12
	services := []string{"a", "b"}
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 1))
		told := map[string]bool{}
		store := newSliceStore(most, func(k lb.Key) { told[k.Name] = true })
		m := sliceModel{map[string]*discoveryv1.EndpointSlice{}, map[string]map[string]bool{}}
		before := map[string]string{"a": "[]", "b": "[]"}
		var story []string
		for range 80 {
			name := fmt.Sprintf("s-%02d", r.IntN(names))
			o := slice(name, services[r.IntN(4)/3], fmt.Sprintf("10.0.0.%d", 1+r.IntN(2)))
			twice := r.IntN(3) == 0
			switch what := r.IntN(10); {
			case what < 5:
				story = append(story, "put "+name+" of "+serviceOf(o))
				m.put(o)
				_ = store.Update(o)
				if twice {
					_ = store.Add(o)
				}
			case what < 8:
				story = append(story, "delete "+name)
				m.remove(name)
				_ = store.Delete(o)
				if twice {
					_ = store.Delete(o)
				}
			default: // what happened meanwhile comes as one list
				story = append(story, "list")
				for _, other := range []string{"s-00", "s-03", "s-07"} {
					m.remove(other)
				}
				m.put(o)
				var list []any
				for _, o := range m.objects {
					list = append(list, o)
				}
				if twice {
					list = append(list, list...)
				}
				_ = store.Replace(list, "")
			}
			_ = store.Resync()
			if r.IntN(3) == 0 { // nobody looks in between
				continue
			}
			for _, service := range services {
				if err := m.check(store.table, service, most); err != nil {
					t.Fatalf("seed %d, %s: %v", seed, strings.Join(story, ", "), err)
				}
				shown, _ := store.table.Get(lb.Key{Namespace: "default", Name: service})
				if now := fmt.Sprintf("%+v", shown); now != before[service] {
					if !told[service] {
						t.Fatalf("seed %d, %s: %s changed and nobody is told", seed, strings.Join(story, ", "), service)
					}
					before[service] = now
				}
			}
			clear(told)
		}
		keys := slices.SortedFunc(slices.Values(store.table.Keys()), lb.Key.Compare)
		if all := slices.SortedFunc(maps.Keys(store.table.All()), lb.Key.Compare); !slices.Equal(keys, all) {
			t.Errorf("keys %v, all %v", keys, all)
		}
	}
}

// What is read stays as it was.
func TestSlicesThatWereReadDoNotChange(t *testing.T) {
	store := newSliceStore(2, func(lb.Key) {})
	_ = store.Replace([]any{slice("a-2", "a", "10.0.0.2"), slice("a-4", "a", "10.0.0.4")}, "")
	key := lb.Key{Namespace: "default", Name: "a"}
	read, _ := store.table.Get(key)
	before := fmt.Sprintf("%+v", read)
	reader := make(chan struct{})
	go func() {
		defer close(reader)
		for range 100 {
			_ = fmt.Sprint(store.table.Get(key))
		}
	}()
	for range 20 {
		for _, name := range []string{"a-1", "a-2", "a-3", "a-5"} {
			_ = store.Update(slice(name, "a", "10.0.0.9"))
			store.table.Get(key)
		}
		_ = store.Delete(slice("a-2", "a"))
		_ = store.Replace([]any{slice("a-4", "a", "10.0.0.7")}, "")
	}
	<-reader
	if after := fmt.Sprintf("%+v", read[:2:2]); after != before {
		t.Errorf("%s\nis %s", before, after)
	}
}

// Contract clause 11: a tenant's event costs the others no more than one slice, however many the tenant has. What is
// compared or put in order would be copied first, as readers hold lists.
func TestContract11AnEventCostsOneSlice(t *testing.T) {
	const events = 300
	allocated := func(n int) uint64 {
		store := newSliceStore(lb.MaxSlices, func(lb.Key) {})
		_ = store.Replace(numberedList(n), "1")
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		for i := range events {
			_ = store.Update(numbered(i*97%n, 1))
			_ = store.Delete(numbered(i*89%n, 1))
		}
		runtime.ReadMemStats(&after)
		return after.TotalAlloc - before.TotalAlloc
	}
	few, many := allocated(events), allocated(30_000)
	if many > 2*few {
		t.Errorf("%d bytes for each event beside 30,000 slices, %d beside %d", many/events, few/events, events)
	}
}
