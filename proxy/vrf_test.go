package main

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"

	"github.com/landfall-lb/landfall/internal/lb"
)

func TestVRFsOfRouters(t *testing.T) {
	got := vrfsOf(map[string]lb.Router{"tor": {}, "a": {VRF: "red"}, "b": {VRF: "red"}, "c": {VRF: "blue"}})
	if want := map[string]bool{"red": true, "blue": true}; !maps.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

func TestOnlyOneCheckOfThePathGivesVRFsTheDefaultRoute(t *testing.T) {
	for check, want := range map[string]bool{pathStrict: true, pathDefaultRoute: false, pathOff: true} {
		if f := (flags{pathCheck: check}); f.narrowVRFs() != want {
			t.Errorf("--path-check=%s: narrow is not %v", check, want)
		}
	}
}

func TestLeastEndpointsForVRFs(t *testing.T) {
	all := map[lb.Key][]lb.Slice{}
	for i := range 40 {
		endpoint := func(last int) lb.Endpoint {
			return lb.Endpoint{Addr: netip.AddrFrom4([4]byte{10, 0, 0, byte(last)})}
		}
		all[key(fmt.Sprint(i))] = []lb.Slice{{Endpoints: []lb.Endpoint{endpoint(90 - i), endpoint(i), endpoint(i / 2)}}}
	}
	var want []netip.Addr
	for i := range 8 {
		want = append(want, netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}))
	}
	for range 20 { // maps have no order
		if got := leastEndpoints(all, len(want)); !slices.Equal(got, want) {
			t.Fatalf("%v, want %v", got, want)
		}
	}
	if got := leastEndpoints(all, 200); len(got) != 80 || !slices.IsSortedFunc(got, netip.Addr.Compare) {
		t.Errorf("%d of 80: %v", len(got), got)
	}
}
