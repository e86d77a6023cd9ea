package lb

import (
	"net/netip"
	"testing"
)

func TestWithout(t *testing.T) {
	ep := func(last byte, node string, ready bool) Endpoint {
		return Endpoint{Addr: netip.AddrFrom4([4]byte{10, 0, 0, last}), Node: node, Ready: ready}
	}
	for _, c := range []struct {
		name string
		all  []Slice
		dead map[string]bool
		want int
	}{
		{"nobody is dead", []Slice{{Endpoints: []Endpoint{ep(1, "a", true), ep(2, "b", true)}}}, nil, 2},
		{"another node is dead", []Slice{{Endpoints: []Endpoint{ep(1, "a", true), ep(2, "b", true)}}},
			map[string]bool{"c": true}, 2},
		{"one of two", []Slice{{Endpoints: []Endpoint{ep(1, "a", true)}}, {Endpoints: []Endpoint{ep(2, "b", true)}}},
			map[string]bool{"a": true}, 1},
		{"all of them: fail open", []Slice{{Endpoints: []Endpoint{ep(1, "a", true), ep(2, "a", true)}}},
			map[string]bool{"a": true}, 2},
		{"the others are not ready: fail open", []Slice{{Endpoints: []Endpoint{ep(1, "a", true), ep(2, "b", false)}}},
			map[string]bool{"a": true}, 2},
		{"one family has none left: it keeps all", []Slice{
			{Family: IPv4, Endpoints: []Endpoint{ep(1, "a", true), ep(2, "b", true)}},
			{Family: IPv6, Endpoints: []Endpoint{ep(1, "a", true)}},
		}, map[string]bool{"a": true}, 2},
		{"unknown nodes live", []Slice{{Endpoints: []Endpoint{ep(1, "", true), ep(2, "a", true)}}},
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
