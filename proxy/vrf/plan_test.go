package vrf

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/links"
)

func device(name string, table int) lb.Interface {
	return lb.Interface{Name: name, VRF: name, Table: table}
}

func TestMasks(t *testing.T) {
	for mask, want := range map[Marks]bool{0: true, 0x3c00: true, 3: true, 0xc0000000: true, 1: false, 0x8000: false, 0x3400: false} {
		if err := mask.Check(); (err == nil) != want {
			t.Errorf("%#x: %v", uint32(mask), err)
		}
	}
	if room := DefaultMarks.room(); room != 6 || DefaultMarks.mark(0) != 0x10 || DefaultMarks.mark(room-1) != 0x60 {
		t.Errorf("room for %d VRFs: %#x to %#x", room, DefaultMarks.mark(0), DefaultMarks.mark(room-1))
	}
}

// The default bits are none that common programs use.
func TestDefaultMarksAreFree(t *testing.T) {
	for program, bits := range map[string]Marks{"Cilium": 0xf00, "the portmap plugin": 0x2000, "kube-proxy": 0xc000,
		"Calico, Tailscale, Weave": 0xffff0000, "the AWS plugin": 0x80} {
		if DefaultMarks&bits != 0 {
			t.Errorf("%s uses %#x", program, uint32(DefaultMarks&bits))
		}
	}
}

// A VRF keeps the mark that the kernel's rules have for its table: live connections carry it.
func TestMarksStay(t *testing.T) {
	red, blue, green := device("red", 100), device("blue", 200), device("green", 300)
	const small Marks = 0x3000 // room for two
	for name, test := range map[string]struct {
		vrfs []lb.Interface
		have []links.MarkRule
		want []marked
		left []string
	}{
		"the first":       {[]lb.Interface{red}, nil, []marked{{"red", 100, 0x1000}}, nil},
		"one before it":   {[]lb.Interface{blue, red}, []links.MarkRule{{Mark: 0x1000, Mask: 0x3000, Table: 100}}, []marked{{"blue", 200, 0x2000}, {"red", 100, 0x1000}}, nil},
		"one is gone":     {[]lb.Interface{blue}, []links.MarkRule{{Mark: 0x1000, Mask: 0x3000, Table: 100}, {Mark: 0x2000, Mask: 0x3000, Table: 200}}, []marked{{"blue", 200, 0x2000}}, nil},
		"the main table":  {[]lb.Interface{red}, []links.MarkRule{{Mark: 0x3000, Mask: 0x3000, Table: links.MainTable, Narrow: true}}, []marked{{"red", 100, 0x1000}}, nil},
		"one mark of two": {[]lb.Interface{blue, red}, []links.MarkRule{{Mark: 0x2000, Mask: 0x3000, Table: 100}, {Mark: 0x2000, Mask: 0x3000, Table: 200}}, []marked{{"blue", 200, 0x1000}, {"red", 100, 0x2000}}, nil},
		"the mark of all": {[]lb.Interface{red}, []links.MarkRule{{Mark: 0x3000, Mask: 0x3000, Table: 100}}, []marked{{"red", 100, 0x1000}}, nil},
		"of another mask": {[]lb.Interface{red}, []links.MarkRule{{Mark: 0x2000, Mask: 0xf000, Table: 100}}, []marked{{"red", 100, 0x1000}}, nil},
		"too many":        {[]lb.Interface{blue, green, red}, []links.MarkRule{{Mark: 0x2000, Mask: 0x3000, Table: 100}}, []marked{{"blue", 200, 0x1000}, {"red", 100, 0x2000}}, []string{"green"}},
	} {
		all, left := small.assign(test.vrfs, test.have)
		if !slices.Equal(all, test.want) || !slices.Equal(left, test.left) {
			t.Errorf("%s: %v, left %v; want %v, %v", name, all, left, test.want, test.left)
		}
	}
}

func TestRoutingRules(t *testing.T) {
	if rules := DefaultMarks.rules(nil, true); len(rules) > 0 {
		t.Errorf("without a VRF: %v", rules)
	}
	got := DefaultMarks.rules([]marked{{"red", 100, 0x10}}, true)
	want := []links.MarkRule{{Mark: 0x70, Mask: 0x70, Table: links.MainTable, Narrow: true}, {Mark: 0x10, Mask: 0x70, Table: 100}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}
