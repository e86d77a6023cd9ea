package main

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/landfall-lb/landfall/internal/lb"
)

// TestAnAssignedAddressIsTracedOnce has a write that conflicts, one that takes place, and then changes of other things.
func TestAnAssignedAddressIsTracedOnce(t *testing.T) {
	c := newCluster()
	p := newProcess(c)
	var spans []string
	p.trace = func(s lb.Span) {
		spans = append(spans, s.Service.Name+" "+s.VIP.String()+" "+string(s.Name)+" "+s.Attributes[0].Value)
		if s.UID == "" || s.End.Before(s.Start) || s.Start.IsZero() {
			t.Errorf("%+v", s)
		}
	}
	c.addPool("p", "10.0.0.0/31")
	c.put(service("a"))
	c.fail(conflict)
	p.settle(t)
	p.settle(t)
	c.put(service("b"))
	c.touch("a")
	p.settle(t)
	c.put(service("c")) // gets none until b is gone
	p.settle(t)
	c.remove("b")
	p.settle(t)
	if diff := cmp.Diff([]string{"a 10.0.0.0 assigned p", "b 10.0.0.1 assigned p", "c 10.0.0.1 assigned p"}, spans); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	restarted := newProcess(c)
	restarted.trace = func(s lb.Span) { t.Errorf("after a restart: %+v", s) }
	restarted.settle(t)
}
