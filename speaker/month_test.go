package main

import (
	"fmt"
	"net/netip"
	"reflect"
	"testing"
	"testing/synctest"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/leaktest"
)

// entries counts what maps and slices hold, all the way down.
func entries(v reflect.Value) (n int) {
	switch {
	case whole[v.Type()]:
	case v.Kind() == reflect.Struct:
		for _, field := range v.Fields() {
			n += entries(field)
		}
	case v.Kind() == reflect.Map:
		n = v.Len()
		for each := v.MapRange(); each.Next(); {
			n += entries(each.Value())
		}
	case v.Kind() == reflect.Slice:
		n = v.Len()
		for i := range v.Len() {
			n += entries(v.Index(i))
		}
	case v.Kind() == reflect.Pointer && !v.IsNil():
		n = entries(v.Elem())
	}
	return n
}

// TestMonth has speakers run for a simulated month in which, each hour, a Service comes and another one
// goes, and twice a day a speaker crashes and comes back. What they remember, their goroutines, and how
// often they write follow what changes, not the time that passes.
func TestMonth(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		defer r.end()
		r.api.pools.Set("lan", lb.Pool{Name: "lan",
			Ranges: []lb.Range{{From: netip.MustParseAddr("172.26.0.0"), To: netip.MustParseAddr("172.26.100.0")}}})
		for _, n := range r.nodes {
			n.interfaces[0].Addresses[0] = netip.PrefixFrom(n.interfaces[0].Addresses[0].Addr(), 16)
		}
		r.start(w177, w178, w179)
		crashed := sortedNames(w177, w178, w179)
		key := func(i int) lb.Key { return lb.Key{Namespace: "default", Name: fmt.Sprint("month-", i)} }
		vip := func(i int) netip.Addr { return netip.AddrFrom4([4]byte{172, 26, byte(i >> 8), byte(i)}) }
		size := func() (total int) {
			for _, n := range r.nodes {
				n.speaker.mu.Lock()
				total += entries(reflect.ValueOf(&n.rooms).Elem()) + entries(reflect.ValueOf(&n.changes.dirty).Elem())
				n.speaker.mu.Unlock()
				n.mu.Lock()
				total += len(n.claims) + len(n.reports)
				n.mu.Unlock()
			}
			return total
		}
		decided := func() (total int) {
			for _, n := range r.nodes {
				n.mu.Lock()
				total += n.decided
				n.mu.Unlock()
			}
			return total
		}
		var sizes, goroutines, decisions []int
		for hour := range 30 * 24 {
			r.service(key(hour), vip(hour))
			if hour >= 10 {
				r.gone(key(hour-10), vip(hour-10))
			}
			if hour%12 == 5 {
				name := crashed[hour/12%3]
				r.crash(name)
				time.Sleep(time.Minute)
				r.start(name)
			}
			time.Sleep(time.Hour)
			synctest.Wait()
			if hour%24 == 23 {
				sizes, goroutines, decisions = append(sizes, size()), append(goroutines, leaktest.Goroutines()),
					append(decisions, decided())
			}
		}
		last := len(sizes) - 1
		for i := 2; i <= last; i++ {
			if sizes[i] > sizes[1]+sizes[1]/10 {
				t.Errorf("after %d days the speakers remember %d entries, after two %d", i+1, sizes[i], sizes[1])
			}
			if goroutines[i] > goroutines[1] {
				t.Errorf("after %d days there are %d goroutines, after two %d", i+1, goroutines[i], goroutines[1])
			}
			if day, first := decisions[i]-decisions[i-1], decisions[1]-decisions[0]; day > first+first/2 {
				t.Errorf("%d decisions on day %d, and %d on the second", day, i+1, first)
			}
		}
		t.Logf("entries %d, %d … %d; goroutines %d … %d; decisions a day %d … %d", sizes[0], sizes[1], sizes[last],
			goroutines[1], goroutines[last], decisions[1]-decisions[0], decisions[last]-decisions[last-1])

		before := decided()
		time.Sleep(30 * 24 * time.Hour) // in which nothing changes
		synctest.Wait()
		if idle := decided() - before; idle > 0 {
			t.Errorf("%d decisions in a month without any change", idle)
		}
	})
}

// gone deletes a Service that every node could deliver.
func (r *rig) gone(key lb.Key, vip netip.Addr) {
	for _, n := range r.nodes {
		n.set(func(n *fakeNode) { delete(n.deliveries, lb.DeliveryKey{Service: key, VIP: vip}) })
	}
	r.api.services.Delete(key)
	synctest.Wait()
}
