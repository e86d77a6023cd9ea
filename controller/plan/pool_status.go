package plan

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/labels"

	"github.com/landfall-lb/landfall/internal/lb"
)

// The condition types on pools beside lb.ConditionReady.
const (
	// conditionOverlapping on a pool: it shares addresses with another pool.
	conditionOverlapping = "Overlapping"
	// ConditionExhausted on a pool: no address of some family is free.
	ConditionExhausted = "Exhausted"
)

// plan returns what the pool shall show.
func (p *pool) plan(kept keptList, busy func(netip.Addr) bool) PoolPlan {
	plan := PoolPlan{Families: make(map[lb.Family]Usage, len(p.spaces)), Status: lb.PoolStatus{Released: kept.newest}}
	for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		if s := p.spaces[family]; s != nil && p.refusal == nil {
			plan.Status.Next = append(plan.Status.Next, s.following(p.Ahead(family), busy)...)
		}
	}
	for family, s := range p.spaces {
		plan.Families[family] = s.usage
	}
	figures := func(family lb.Family) (assigned, available string) {
		u, ok := plan.Families[family]
		if !ok {
			return "0", "0"
		}
		return strconv.Itoa(u.Assigned), u.Available().String()
	}
	plan.Status.AssignedIPv4, plan.Status.AvailableIPv4 = figures(lb.IPv4)
	plan.Status.AssignedIPv6, plan.Status.AvailableIPv6 = figures(lb.IPv6)
	plan.Status.QuarantinedIPv4 = strconv.Itoa(kept.counts[lb.IPv4])
	plan.Status.QuarantinedIPv6 = strconv.Itoa(kept.counts[lb.IPv6])
	plan.Status.Conditions = []lb.Condition{p.ready(), p.overlapping(), p.exhausted()}
	return plan
}

func (p *pool) ready() lb.Condition {
	c := lb.Condition{Type: lb.ConditionReady, Generation: p.Generation}
	switch {
	case p.refusal != nil:
		c.Reason, c.Message = p.refusal.Reason, p.refusal.Message
		return c
	case p.BadSelector != nil && selectsNobody(p.Allocation):
		c.Reason, c.Message = p.BadSelector.Reason, p.BadSelector.Message
		return c
	case p.AutoAssign && p.Allocation != nil:
		c.Message = "hands out addresses to the Services that spec.serviceAllocation selects"
	case p.AutoAssign:
		c.Message = "hands out addresses"
	default:
		c.Message = "hands out addresses to Services that ask for them"
	}
	c.Status, c.Reason = true, lb.ReasonPoolReady
	if p.without != "" {
		c.Message += ", but not " + p.without
	}
	if p.outside != "" {
		c.Message += "; " + p.outside
	}
	if p.BadSelector != nil {
		c.Message += "; " + p.BadSelector.Message
	}
	return c
}

// selectsNobody reports whether no selector selects anything that could be served: none of them can be read.
func selectsNobody(a *lb.Allocation) bool {
	unread := func(selectors []labels.Selector) bool {
		return len(selectors) > 0 && !slices.ContainsFunc(selectors, func(s labels.Selector) bool {
			_, selects := s.Requirements()
			return selects
		})
	}
	return unread(a.ServiceSelectors) || len(a.Namespaces) == 0 && unread(a.NamespaceSelectors)
}

func (p *pool) overlapping() lb.Condition {
	if p.overlap == "" {
		return lb.Condition{Type: conditionOverlapping, Reason: lb.ReasonPoolApart,
			Message: "no other pool has any of its addresses", Generation: p.Generation}
	}
	return lb.Condition{Type: conditionOverlapping, Status: true, Reason: lb.ReasonPoolOverlaps, Message: p.overlap,
		Generation: p.Generation}
}

func (p *pool) exhausted() lb.Condition {
	var figures []string
	none := false
	for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		s := p.spaces[family]
		switch {
		case s == nil:
		case s.exhausted():
			none = true
			figures = append(figures, fmt.Sprintf("none of %s %s addresses is left (Services hold %d)", s.usage.Total, family,
				s.usage.Assigned))
		default:
			figures = append(figures, fmt.Sprintf("%s of %s %s addresses are left (Services hold %d)", s.usage.Available(),
				s.usage.Total, family, s.usage.Assigned))
		}
	}
	c := lb.Condition{Type: ConditionExhausted, Reason: lb.ReasonPoolAvailable, Message: strings.Join(figures, "; "),
		Generation: p.Generation}
	if none {
		c.Status, c.Reason = true, lb.ReasonPoolExhausted
	}
	return c
}
