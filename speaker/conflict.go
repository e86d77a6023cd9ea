package main

import (
	"maps"
	"net/netip"
	"slices"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/speaker/l2"
	"github.com/landfall-lb/landfall/speaker/plan"
)

// conflicts is what the loop remembers of VIPs and their holders.
type conflicts struct {
	served    map[netip.Addr]bool // VIPs that a node of ours has answered for
	probed    map[netip.Addr]bool // as the L2 actor last said
	strangers map[netip.Addr][]lb.Stranger
}

// gather takes in what the L2 actor has found out, and marks the VIPs of which it is news.
func (c *conflicts) gather(o l2.Outcome, vips map[netip.Addr]bool) {
	for _, one := range []map[netip.Addr]bool{c.probed, o.Probed} {
		for vip := range one {
			if c.probed[vip] != o.Probed[vip] {
				vips[vip] = true
			}
		}
	}
	for _, one := range []map[netip.Addr][]lb.Stranger{c.strangers, o.Strangers} {
		for vip := range one {
			if !slices.Equal(c.strangers[vip], o.Strangers[vip]) {
				vips[vip] = true
			}
		}
	}
	c.probed, c.strangers = o.Probed, o.Strangers
}

// fill tells a plan what is known of other holders of its VIP.
func (c *conflicts) fill(in *plan.Input) {
	answers := func(claim lb.Claim) bool { return claim.Answering }
	if len(in.Answering) > 0 || in.Former || slices.ContainsFunc(slices.Collect(maps.Values(in.Claims)), answers) {
		c.served[in.VIP] = true
	}
	in.Served, in.Probed, in.Strangers = c.served[in.VIP], c.probed[in.VIP], c.strangers[in.VIP]
}

// record notes what follows from a decision: a VIP that is about to be answered for is not probed
// again if that takes a while.
func (c *conflicts) record(d plan.Decision) {
	if len(d.Answer) > 0 {
		c.served[d.VIP] = true
	}
}

func (c *conflicts) forget(vip netip.Addr) { delete(c.served, vip) }

// logConflict logs that somebody else uses a VIP, or does so no longer.
func (s *speaker) logConflict(before, now plan.Decision) {
	if slices.Equal(before.Strangers, now.Strangers) {
		return
	}
	if len(now.Strangers) == 0 {
		s.log.Info("nobody else uses the address any more", "vip", now.VIP)
		return
	}
	s.log.Warn("somebody else uses the address", "vip", now.VIP, "strangers", now.Strangers, "announced",
		len(now.Answer) > 0)
}
