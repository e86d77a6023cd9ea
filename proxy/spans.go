package main

import (
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
)

// confirmations notes since when VIPs wait for the kernel, and tells of those that it has confirmed.
type confirmations struct {
	add   func(lb.Span) // nil without --otlp-endpoint
	since map[lb.DeliveryKey]time.Time
}

// told takes what was told of the VIPs of a Service before, and what is told now. Those that a proxy
// finds at its start are not traced: notes is false until it has programmed them.
func (t *confirmations) told(now time.Time, notes bool, uid string, before, after []lb.Delivery) {
	if t.add == nil {
		return
	}
	had := make(map[lb.DeliveryKey]bool, len(before)) // whether they were programmed
	for _, d := range before {
		had[d.Key()] = d.Refusal == nil
	}
	for _, d := range after {
		key := d.Key()
		since, waits := t.since[key]
		switch programmed := d.Refusal == nil; {
		case programmed && waits:
			t.add(lb.Span{Service: d.Service, UID: uid, VIP: d.VIP, Name: lb.SpanProgrammed, Start: since, End: now})
			delete(t.since, key)
		case !programmed && !waits && notes:
			if t.since == nil {
				t.since = map[lb.DeliveryKey]time.Time{}
			}
			t.since[key] = now
		}
		delete(had, key)
	}
	for key := range had {
		delete(t.since, key)
	}
}
