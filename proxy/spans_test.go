package main

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
)

func TestSpansOfConfirmations(t *testing.T) {
	began := time.Unix(1e9, 0)
	addr := netip.MustParseAddr("192.0.2.1")
	waiting := []lb.Delivery{{Service: key("web"), VIP: addr, Refusal: lb.Refuse(lb.ReasonNotProgrammed, "not yet")}}
	programmed := []lb.Delivery{{Service: key("web"), VIP: addr}}
	for name, test := range map[string]struct {
		notes bool
		told  [][]lb.Delivery // second by second
		want  string
	}{
		"new":                  {true, [][]lb.Delivery{waiting, waiting, programmed, programmed}, "web 0s+2s"},
		"at once":              {true, [][]lb.Delivery{programmed}, ""},
		"there at the start":   {false, [][]lb.Delivery{waiting, programmed}, ""},
		"gone before":          {true, [][]lb.Delivery{waiting, nil, programmed}, ""},
		"another time":         {true, [][]lb.Delivery{waiting, programmed, waiting, programmed}, "web 0s+1s, web 2s+1s"},
		"refused for ever":     {true, [][]lb.Delivery{waiting, waiting}, ""},
		"nothing at all ever":  {true, [][]lb.Delivery{nil, nil}, ""},
		"gone, and come again": {true, [][]lb.Delivery{waiting, programmed, nil, waiting, programmed}, "web 0s+1s, web 3s+1s"},
	} {
		var got []string
		c := confirmations{add: func(s lb.Span) {
			got = append(got, fmt.Sprintf("%s %s+%s", s.UID, s.Start.Sub(began), s.End.Sub(s.Start)))
			if s.Name != lb.SpanProgrammed || s.VIP != addr || s.Service != key("web") {
				t.Errorf("%s: %+v", name, s)
			}
		}}
		var before []lb.Delivery
		for i, after := range test.told {
			c.told(began.Add(time.Duration(i)*time.Second), test.notes, "web", before, after)
			before = after
		}
		if strings.Join(got, ", ") != test.want {
			t.Errorf("%s: %v, want %s", name, got, test.want)
		}
		if c.told(began, true, "web", before, nil); len(c.since) != 0 {
			t.Errorf("%s: %d VIPs that are gone still wait", name, len(c.since))
		}
	}
	var off confirmations
	off.told(began, true, "web", nil, waiting)
	if off.since != nil {
		t.Error("it notes what nobody wants to know")
	}
}
