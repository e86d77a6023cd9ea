// Package spans finds, in what the speaker decides of VIPs, the parts of a Service's way to its
// clients that pass on this node.
package spans

import (
	"cmp"
	"net/netip"
	"strings"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
)

// View is what a step has come to for one VIP.
type View struct {
	// Services hold the VIP, the one first whose trace it is.
	Services []lb.Key
	Gone     bool // no Service holds it any more
	// Claims is set while this node delivers the VIP, Owner is the node that shall answer.
	Claims bool
	Owner  string
	// Answering are the interfaces on which this node answers; Peers hear of the VIP from it over BGP.
	Answering, Peers []string
}

// quiet is how long after its start a speaker tells nothing of the VIPs that it found: it claims and
// announces again what was there before.
const quiet = time.Minute

// State is what is remembered of VIPs. The zero value remembers nothing.
type State struct {
	began time.Time
	vips  map[netip.Addr]*life
}

// life is how a VIP was last, and since when.
type life struct {
	last View
	// since is when the VIP came, or when this node ceased to claim it; claimed when it did; owned when it
	// became the owner.
	since, claimed, owned time.Time
	found                 bool // it was there when the speaker started
}

// Events are what a step has decided.
type Events struct {
	// Self is this node.
	Self string
	VIPs map[netip.Addr]View
	// First is set in the first step, which finds what is there.
	First bool
}

// Step returns the spans that end now. They lack the Services' UIDs.
func (s *State) Step(now time.Time, e Events) (ended []lb.Span) {
	if s.vips == nil {
		s.vips = map[netip.Addr]*life{}
	}
	if e.First {
		s.began = now
	}
	for vip, view := range e.VIPs {
		if view.Gone || len(view.Services) == 0 {
			delete(s.vips, vip)
			continue
		}
		l := s.vips[vip]
		if l == nil {
			l = &life{since: now, found: e.First}
			s.vips[vip] = l
		}
		for _, span := range l.step(now, e.Self, protocol(vip), view) {
			span.Service, span.VIP, span.End = view.Services[0], vip, now
			if !l.found || now.Sub(s.began) >= quiet {
				ended = append(ended, span)
			}
		}
	}
	return ended
}

// protocol returns by which an owner answers for a VIP.
func protocol(vip netip.Addr) string {
	if vip.Is4() {
		return "arp"
	}
	return "ndp"
}

// step takes over a view, and returns what has ended with it.
func (l *life) step(now time.Time, self, protocol string, v View) (ended []lb.Span) {
	last := l.last
	l.last = v
	switch {
	case v.Claims && !last.Claims:
		l.claimed = now
		ended = append(ended, lb.Span{Name: lb.SpanClaimed, Start: l.since})
	case !v.Claims && last.Claims:
		l.since = now
	}
	if v.Owner == self && last.Owner != self {
		l.owned = now
		span := lb.Span{Name: lb.SpanOwned, Start: cmp.Or(l.claimed, l.since)}
		if last.Owner != "" {
			span.Attributes = []lb.SpanAttribute{{Key: "landfall.owner.previous", Value: last.Owner}}
		}
		ended = append(ended, span)
	}
	if len(v.Answering) > 0 && len(last.Answering) == 0 {
		ended = append(ended, lb.Span{Name: lb.SpanAnnounced, Start: cmp.Or(l.owned, l.since), Attributes: []lb.SpanAttribute{
			{Key: "network.protocol.name", Value: protocol},
			{Key: "network.interface.name", Value: strings.Join(v.Answering, ",")}}})
	}
	if len(v.Peers) > 0 && len(last.Peers) == 0 {
		ended = append(ended, lb.Span{Name: lb.SpanAnnounced, Start: l.since, Attributes: []lb.SpanAttribute{
			{Key: "network.protocol.name", Value: "bgp"}, {Key: "landfall.peers", Value: strings.Join(v.Peers, ",")}}})
	}
	return ended
}
