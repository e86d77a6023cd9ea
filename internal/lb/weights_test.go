package lb

import (
	"net/netip"
	"strings"
	"testing"
)

func TestParseWeights(t *testing.T) {
	for _, tt := range []struct{ text, wrong string }{
		{"", ""},
		{"worker-1=3", ""},
		{" worker-1=3,\n192.0.2.0/28=2 2001:db8::1=100 ", ""},
		{"worker-1", `"worker-1": want the name of a node`},
		{"worker-1=0", `"worker-1=0": want`},
		{"worker-1=101", `"worker-1=101": want`},
		{"worker-1=300", `"worker-1=300": want`},
		{"worker-1=-1", `"worker-1=-1": want`},
		{"=3", `"=3": want`},
		{"192.0.2.0/33=2", `"192.0.2.0/33" is no network`},
		{"a=b=3", `"a=b=3": want`},
		{strings.Repeat("n", 253) + "=3", ""},
		{strings.Repeat("n", 254) + "=3", "want the name of a node"},
		{strings.Repeat("a=1,", maxWeights+1), "257 entries: at most 256"},
	} {
		_, err := ParseWeights(tt.text)
		if tt.wrong == "" && err != nil || tt.wrong != "" && (err == nil || !strings.Contains(err.Error(), tt.wrong)) {
			t.Errorf("%.40q: %v, want %q", tt.text, err, tt.wrong)
		}
	}
}

// FuzzParseWeights checks that every share is in its range, and that what is wrong is said shortly.
func FuzzParseWeights(f *testing.F) {
	f.Add("worker-1=3, 192.0.2.0/28=2")
	f.Add(strings.Repeat("n/", 100) + "=3")
	f.Fuzz(func(t *testing.T, text string) {
		all, err := ParseWeights(text)
		if err != nil && (all != nil || len(err.Error()) > 600) {
			t.Errorf("%v, %d bytes", all, len(err.Error()))
		}
		for _, one := range all {
			if one.Share < 1 || one.Share > maxWeight || (one.Node == "") != one.Network.IsValid() {
				t.Errorf("%+v", one)
			}
		}
	})
}

func TestParseWeight(t *testing.T) {
	for text, want := range map[string]uint8{"1": 1, "100": 100, "": 0, "0": 0, "101": 0, "300": 0, "-1": 0, "3 ": 0,
		"worker-1=3": 0, strings.Repeat("9", 1000): 0} {
		got, err := ParseWeight(text)
		if got != want || (err != nil) != (want == 0) {
			t.Errorf("%.40q: %d, %v, want %d", text, got, err, want)
		}
		if err != nil && (len(err.Error()) > 400 || !strings.Contains(err.Error(), "want a weight from 1 to 100")) {
			t.Errorf("%.40q: %v", text, err)
		}
	}
}

// The weight of a slice is that of the endpoints that the Service's weights do not name.
func TestWeighSlices(t *testing.T) {
	slice := func(weight uint8, addrs ...string) Slice {
		s := Slice{Family: IPv4, Ports: []SlicePort{{Protocol: TCP, Port: 80}}, Weight: weight}
		for _, addr := range addrs {
			s.Endpoints = append(s.Endpoints, Endpoint{Addr: netip.MustParseAddr(addr), Node: "big", Ready: true})
		}
		return s
	}
	all := []Slice{slice(0, "192.0.2.4"), slice(5, "192.0.2.1", "192.0.2.2"),
		slice(9, "192.0.2.2", "192.0.2.3", "192.0.2.4")}
	for _, tt := range []struct {
		weights Weights
		want    []uint8
	}{
		{nil, []uint8{5, 5, 9, 9}},
		{Weights{{Network: netip.MustParsePrefix("192.0.2.2/31"), Share: 1}}, []uint8{5, 1, 1, 9}},
		{Weights{{Node: "big", Share: 2}}, []uint8{2, 2, 2, 2}},
	} {
		usable := Choose(all, "", TCP, IPv4, Place{})
		NewWeigher(tt.weights).Weigh(all, usable)
		for i, b := range usable.Cluster {
			if b.Weight != tt.want[i] {
				t.Errorf("%v: %s has %d, want %d", tt.weights, b.Addr, b.Weight, tt.want[i])
			}
		}
		if len(usable.Cluster) != 4 {
			t.Fatalf("%d backends", len(usable.Cluster))
		}
	}
}

func TestWeigh(t *testing.T) {
	weights, err := ParseWeights("192.0.2.2=7 big=3 192.0.2.0/24=2")
	if err != nil {
		t.Fatal(err)
	}
	slice := Slice{Family: IPv4, Ports: []SlicePort{{Protocol: TCP, Port: 80}}}
	for addr, node := range map[string]string{"192.0.2.1": "big", "192.0.2.2": "big", "192.0.2.3": "", "10.0.0.1": "small"} {
		slice.Endpoints = append(slice.Endpoints, Endpoint{Addr: netip.MustParseAddr(addr), Node: node, Ready: true})
	}
	usable := Choose([]Slice{slice}, "", TCP, IPv4, Place{Node: "big"})
	NewWeigher(weights).Weigh([]Slice{slice}, usable)
	want := map[string]uint8{"192.0.2.1": 3, "192.0.2.2": 7, "192.0.2.3": 2, "10.0.0.1": 1}
	for _, b := range append(usable.Cluster, usable.Local...) {
		if addr := b.Addr.Addr().String(); b.Weight != want[addr] {
			t.Errorf("%s has %d, want %d", addr, b.Weight, want[addr])
		}
	}
	if len(usable.Local) != 2 {
		t.Errorf("%d here", len(usable.Local))
	}
}
