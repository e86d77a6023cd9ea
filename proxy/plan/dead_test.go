package plan

import (
	"net/netip"
	"testing"

	"github.com/landfall-lb/landfall/internal/lb"
)

func TestWithout(t *testing.T) {
	ep := func(last byte, node string, ready bool) lb.Endpoint {
		return lb.Endpoint{Addr: netip.AddrFrom4([4]byte{10, 0, 0, last}), Node: node, Ready: ready}
	}
	for _, c := range []struct {
		name string
		all  []lb.Slice
		dead map[string]bool
		want int
	}{
		{"nobody is dead", []lb.Slice{{Endpoints: []lb.Endpoint{ep(1, "a", true), ep(2, "b", true)}}}, nil, 2},
		{"another node is dead", []lb.Slice{{Endpoints: []lb.Endpoint{ep(1, "a", true), ep(2, "b", true)}}},
			map[string]bool{"c": true}, 2},
		{"one of two", []lb.Slice{{Endpoints: []lb.Endpoint{ep(1, "a", true)}}, {Endpoints: []lb.Endpoint{ep(2, "b", true)}}},
			map[string]bool{"a": true}, 1},
		{"all of them: fail open", []lb.Slice{{Endpoints: []lb.Endpoint{ep(1, "a", true), ep(2, "a", true)}}},
			map[string]bool{"a": true}, 2},
		{"the others are not ready: fail open", []lb.Slice{{Endpoints: []lb.Endpoint{ep(1, "a", true), ep(2, "b", false)}}},
			map[string]bool{"a": true}, 2},
		{"one family has none left: it keeps all", []lb.Slice{
			{Family: lb.IPv4, Endpoints: []lb.Endpoint{ep(1, "a", true), ep(2, "b", true)}},
			{Family: lb.IPv6, Endpoints: []lb.Endpoint{ep(1, "a", true)}},
		}, map[string]bool{"a": true}, 2},
		{"unknown nodes live", []lb.Slice{{Endpoints: []lb.Endpoint{ep(1, "", true), ep(2, "a", true)}}},
			map[string]bool{"a": true}, 1},
	} {
		got := 0
		for _, slice := range Without(c.all, c.dead) {
			got += len(slice.Endpoints)
		}
		if got != c.want {
			t.Errorf("%s: %d endpoints left, want %d", c.name, got, c.want)
		}
	}
}
