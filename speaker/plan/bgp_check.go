package plan

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/labels"

	"github.com/landfall-lb/landfall/internal/lb"
)

// BGPHeld is a VIP that a Service holds.
type BGPHeld struct {
	VIP     netip.Addr
	Service lb.Key
	Labels  labels.Set
	// Local is set for externalTrafficPolicy Local.
	Local bool
}

// CheckBGP finds what only a look across objects shows to be wrong with advertisements, and returns
// the Ready condition of each. It looks at the cluster as a whole, so that all nodes come to the
// same words.
func CheckBGP(b BGPFacts, pools map[string]lb.Pool, held []BGPHeld) map[string]lb.Condition {
	c := &check{BGPFacts: b, pools: pools, prefixes: map[netip.Prefix]*announcement{}}
	held = slices.SortedFunc(slices.Values(held), func(a, b BGPHeld) int {
		if d := a.VIP.Compare(b.VIP); d != 0 {
			return d
		}
		return a.Service.Compare(b.Service)
	})
	ads := advertisementsByAge(b.Advertisements)
	for _, ad := range ads {
		c.collect(ad, held)
	}
	conditions := make(map[string]lb.Condition, len(ads))
	for _, ad := range ads {
		conditions[ad.Name] = c.condition(ad)
	}
	return conditions
}

type check struct {
	BGPFacts
	pools    map[string]lb.Pool
	prefixes map[netip.Prefix]*announcement
}

// announcement is a prefix with the advertisements that announce it, oldest first, and what lies
// inside.
type announcement struct {
	ads      []lb.BGPAdvertisement
	vips     map[netip.Addr]bool
	local    *BGPHeld    // the first with policy Local
	outsides *lb.Refusal // of the prefix, if it reaches beyond the pool
}

func (c *check) collect(ad lb.BGPAdvertisement, held []BGPHeld) {
	for _, h := range held {
		if !anyMatches(ad.ServiceSelectors, h.Labels) {
			continue
		}
		for _, pool := range poolsOf(c.pools, h.VIP) {
			if !ad.SelectsPool(pool) {
				continue
			}
			prefix := ad.Aggregate(h.VIP)
			a := c.prefixes[prefix]
			if a == nil {
				a = &announcement{vips: map[netip.Addr]bool{}}
				c.prefixes[prefix] = a
			}
			if !slices.ContainsFunc(a.ads, func(o lb.BGPAdvertisement) bool { return o.Name == ad.Name }) {
				a.ads = append(a.ads, ad)
			}
			a.vips[h.VIP] = true
			if h.Local && a.local == nil {
				a.local = &h
			}
			if a.outsides == nil {
				a.outsides = outside(prefix, h.VIP, pool)
			}
		}
	}
}

func (c *check) condition(ad lb.BGPAdvertisement) lb.Condition {
	ready := lb.Condition{Type: lb.ConditionReady, Status: true, Reason: lb.ReasonAdvertisementReady,
		Generation: ad.Generation,
		Message:    "the speakers can do all that the advertisement asks for"}
	problems := c.problems(ad)
	notes := c.notes(ad)
	switch {
	case len(problems) > 0:
		ready.Status, ready.Reason, ready.Message = false, problems[0].Reason, join(problems)
	case len(notes) > 0:
		ready.Reason, ready.Message = notes[0].Reason, join(notes)
	}
	return ready
}

// join makes a message of at most three sentences.
func join(refusals []*lb.Refusal) string {
	var sentences []string
	for _, r := range refusals {
		if !slices.Contains(sentences, r.Message) {
			sentences = append(sentences, r.Message)
		}
	}
	if more := len(sentences) - 3; more > 0 {
		sentences = append(sentences[:3], fmt.Sprintf("and %d more", more))
	}
	return strings.Join(sentences, "; ")
}

// problems keep the advertisement from doing what it asks for.
func (c *check) problems(ad lb.BGPAdvertisement) []*lb.Refusal {
	var found []*lb.Refusal
	if ad.BadSelector != nil {
		found = append(found, ad.BadSelector)
	}
	if _, refusal := resolve(ad, c.Communities); refusal != nil {
		found = append(found, refusal)
	}
	for _, name := range ad.Pools {
		if _, ok := c.pools[name]; !ok {
			found = append(found, lb.Refuse(lb.ReasonUnknownPool, "there is no IPAddressPool %s", name))
		}
	}
	for _, name := range ad.Peers {
		if _, ok := c.Peers[name]; !ok {
			found = append(found, lb.Refuse(lb.ReasonUnknownPeer, "there is no BGPPeer %s", name))
		}
	}
	for _, prefix := range slices.SortedFunc(maps.Keys(c.prefixes), netip.Prefix.Compare) {
		a := c.prefixes[prefix]
		if !slices.ContainsFunc(a.ads, func(o lb.BGPAdvertisement) bool { return o.Name == ad.Name }) {
			continue
		}
		if a.outsides != nil {
			found = append(found, a.outsides)
		}
		if a.local != nil && len(a.vips) > 1 {
			found = append(found, lb.Refuse(lb.ReasonAggregateLocal,
				"%s attracts traffic for %s to nodes that cannot deliver it, as Service %s has externalTrafficPolicy Local and "+
					"other addresses are announced by the same prefix; "+
					"give Services with policy Local a pool and an advertisement without aggregation", prefix, a.local.VIP,
				a.local.Service))
		}
		found = append(found, conflicts(ad, prefix, a.ads)...)
	}
	return found
}

// conflicts are attributes of ad that an older advertisement of the same prefix sets otherwise. The
// older one's hold.
func conflicts(ad lb.BGPAdvertisement, prefix netip.Prefix, ads []lb.BGPAdvertisement) []*lb.Refusal {
	var found []*lb.Refusal
	communities := 0
	for _, older := range ads {
		communities += len(older.Communities)
		if older.Name == ad.Name {
			break
		}
		if !meet(older, ad) {
			continue
		}
		for _, field := range []struct {
			name   string
			a, b   uint32
			a1, b1 bool
		}{
			{"localPref", value(older.LocalPref), value(ad.LocalPref), older.LocalPref != nil, ad.LocalPref != nil},
			{"med", value(older.MED), value(ad.MED), older.MED != nil, ad.MED != nil},
			{"asPathPrepend", uint32(older.Prepend), uint32(ad.Prepend), older.Prepend != 0, ad.Prepend != 0},
		} {
			if field.a1 && field.b1 && field.a != field.b {
				found = append(found, lb.Refuse(lb.ReasonAttributeConflict,
					"%s of %s is %d by the older BGPAdvertisement %s, which holds, and %d by this one; make them equal, or give "+
						"them other peers or nodes",
					field.name, prefix, field.a, older.Name, field.b))
			}
		}
	}
	if communities > maxCommunities {
		found = append(found, lb.Refuse(lb.ReasonAttributeConflict,
			"the advertisements of %s have %d communities together, of which %d are sent", prefix, communities, maxCommunities))
	}
	return found
}

func value(v *uint32) uint32 {
	if v == nil {
		return 0
	}
	return *v
}

// meet reports whether some node may announce by both advertisements to the same peer. Whether
// different selectors select the same node is not looked at: who writes two means different nodes.
func meet(a, b lb.BGPAdvertisement) bool {
	samePeer := len(a.Peers) == 0 || len(b.Peers) == 0 ||
		slices.ContainsFunc(a.Peers, func(p string) bool { return slices.Contains(b.Peers, p) })
	sameNode := len(a.NodeSelectors) == 0 || len(b.NodeSelectors) == 0 ||
		slices.ContainsFunc(a.NodeSelectors, func(s labels.Selector) bool {
			return slices.ContainsFunc(b.NodeSelectors, func(o labels.Selector) bool { return s.String() == o.String() })
		})
	return samePeer && sameNode
}

// notes say what has no effect, and harms nobody.
func (c *check) notes(ad lb.BGPAdvertisement) []*lb.Refusal {
	internal, external := false, false
	for name, p := range c.Peers {
		if len(ad.Peers) > 0 && !slices.Contains(ad.Peers, name) {
			continue
		}
		if p.Dynamic == lb.InternalASN || p.Dynamic == "" && p.PeerASN == p.LocalASN {
			internal = true
		} else {
			external = true
		}
	}
	var found []*lb.Refusal
	if ad.LocalPref != nil && external && !internal {
		found = append(found, lb.Refuse(lb.ReasonAttributeUnsent,
			"speakers send localPref to internal peers only, and all peers of the advertisement are external (RFC 4271 "+
				"5.1.5); use "+
				"communities, med or asPathPrepend"))
	}
	if ad.Prepend > 0 && internal && !external {
		found = append(found, lb.Refuse(lb.ReasonAttributeUnsent,
			"speakers apply asPathPrepend towards external peers only, and all peers of the advertisement are internal; use "+
				"localPref"))
	}
	return found
}
