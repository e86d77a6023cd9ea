package plan

import "github.com/landfall-lb/landfall/internal/lb"

// CheckL2 finds what only a look across objects shows to be wrong with L2Advertisements, and returns
// the Ready condition of each. It looks at the cluster as a whole, so that all nodes come to the same
// words.
func CheckL2(ads map[string]lb.L2Advertisement, pools map[string]lb.Pool,
	nodes map[string]lb.Node) map[string]lb.Condition {
	conditions := make(map[string]lb.Condition, len(ads))
	for name, ad := range ads {
		ready := lb.Condition{Type: lb.ConditionReady, Status: true, Reason: lb.ReasonAdvertisementReady,
			Generation: ad.Generation, Message: "the advertisement selects pools and nodes"}
		if problems := l2Problems(ad, pools, nodes); len(problems) > 0 {
			ready.Status, ready.Reason, ready.Message = false, problems[0].Reason, join(problems)
		}
		conditions[name] = ready
	}
	return conditions
}

// l2Problems keep an advertisement from doing what it asks for.
func l2Problems(ad lb.L2Advertisement, pools map[string]lb.Pool, nodes map[string]lb.Node) []*lb.Refusal {
	var found []*lb.Refusal
	if ad.BadSelector != nil {
		found = append(found, ad.BadSelector)
	}
	for _, name := range ad.Pools {
		if _, ok := pools[name]; !ok {
			found = append(found, lb.Refuse(lb.ReasonUnknownPool, "there is no IPAddressPool %s", name))
		}
	}
	selected := false
	for _, pool := range pools {
		selected = selected || ad.Selects(pool)
	}
	switch {
	case selected || len(found) > 0:
	case len(pools) == 0:
		found = append(found, lb.Refuse(lb.ReasonSelectsNoPool, "there is no IPAddressPool yet"))
	default:
		found = append(found, lb.Refuse(lb.ReasonSelectsNoPool, "ipAddressPoolSelectors match no IPAddressPool"))
	}
	matches := len(ad.NodeSelectors) == 0
	for _, node := range nodes {
		if matches = matches || anyMatches(ad.NodeSelectors, node.Labels); matches {
			break
		}
	}
	if !matches {
		found = append(found, lb.Refuse(lb.ReasonSelectsNoNode, "nodeSelectors match none of the Nodes"))
	}
	return found
}
