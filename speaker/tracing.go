package main

import (
	"context"
	"net/netip"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/speaker/ownership"
	"github.com/landfall-lb/landfall/speaker/spans"
)

// traceDecided tells of the parts of Services' lives that end with these decisions.
func (s *speaker) traceDecided(now time.Time, decided map[netip.Addr]ownership.Decided, first bool) {
	if s.trace == nil {
		return
	}
	answering := s.rooms.ownership.Answering
	e := spans.Events{Self: s.self, VIPs: make(map[netip.Addr]spans.View, len(decided)), First: first}
	for vip, d := range decided {
		e.VIPs[vip] = spans.View{Services: d.After.Services, Gone: d.Gone, Claims: d.After.Refusal == nil,
			Owner: d.After.Owner, Answering: answering(vip), Peers: d.After.Routed.Peers}
	}
	for _, span := range s.rooms.spans.Step(now, e) {
		if service, ok := s.from.services.Get(span.Service); ok {
			span.UID = service.UID
			s.trace(span)
		}
	}
}

// writeAnnounced writes to a Service whether its addresses are announced.
type writeAnnounced func(context.Context, lb.Service, lb.AnnouncedStatus) (wrote bool, err error)

// traced tells of the writes that say that the addresses are announced.
func (write writeAnnounced) traced(trace func(lb.Span), now func() time.Time) writeAnnounced {
	if trace == nil {
		return write
	}
	return func(ctx context.Context, service lb.Service, a lb.AnnouncedStatus) (bool, error) {
		start := now()
		wrote, err := write(ctx, service, a)
		if wrote && err == nil && a.Condition.Status {
			for _, vip := range service.VIPs() {
				trace(lb.Span{Service: service.Key, UID: service.UID, VIP: vip, Name: lb.SpanConfirmed, Start: start, End: now(),
					Attributes: []lb.SpanAttribute{{Key: "landfall.reason", Value: string(a.Condition.Reason)}}})
			}
		}
		return wrote, err
	}
}
