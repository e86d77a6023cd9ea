package plan

import (
	"fmt"
	"maps"
	"net/netip"
	"path"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/labels"

	"github.com/landfall-lb/landfall/internal/lb"
)

// announceOn returns the interfaces on which the advertisements have this node announce the VIP,
// sorted, and how much they prefer it.
func announceOn(f Facts, in Input) (place, *lb.Refusal) {
	vip := in.VIP
	pools := poolsOf(f.Pools, vip)
	if len(pools) == 0 {
		return place{}, lb.Refuse(lb.ReasonNoAdvertisement, "no IPAddressPool contains %s", vip)
	}
	var matching, elsewhere, others []lb.L2Advertisement
	for _, name := range slices.Sorted(maps.Keys(f.Advertisements)) {
		switch ad := f.Advertisements[name]; {
		case !slices.ContainsFunc(pools, ad.Selects):
		case !selectsService(ad, in.Holders):
			others = append(others, ad)
		case !selectsNode(ad, *f.Node):
			elsewhere = append(elsewhere, ad)
		default:
			matching = append(matching, ad)
		}
	}
	switch {
	case len(matching) == 0 && len(elsewhere) > 0:
		return place{},
			lb.Refuse(lb.ReasonNoAdvertisement, "L2Advertisement %s does not select node %s", elsewhere[0].Name, f.Self)
	case len(matching) == 0 && len(others) > 0:
		return place{}, lb.Refuse(lb.ReasonNoAdvertisement, "L2Advertisement %s does not select the Service", others[0].Name)
	case len(matching) == 0:
		return place{}, lb.Refuse(lb.ReasonNoAdvertisement, "no L2Advertisement selects IPAddressPool %s", pools[0].Name)
	}
	f.CheckForwarding = f.CheckForwarding && !onNode(in.Holders)
	on, refusal := announcedOn(f, matching, vip)
	if refusal != nil {
		return place{}, refusal
	}
	return place{interfaces: on, weight: weightOf(matching, *f.Node)}, nil
}

// announcedOn returns the interfaces, sorted, on which some of the advertisements have this node
// announce the VIP, or why there are none.
func announcedOn(f Facts, ads []lb.L2Advertisement, vip netip.Addr) ([]string, *lb.Refusal) {
	found, silent, unforwarded := answering(f, ads, vip)
	switch {
	case len(found) > 0:
		return found, nil
	case unforwarded != "":
		return nil, lb.Refuse(lb.ReasonForwardingOff, "the kernel of %s forwards no %s packets that come in at %s",
			f.Self, lb.FamilyOf(vip), unforwarded)
	case silent != "":
		return nil, lb.Refuse(lb.ReasonNoCarrier, "interface %s of %s is down or has no carrier", silent, f.Self)
	}
	return nil, lb.Refuse(lb.ReasonNoInterface, "%s", noInterface(f, ads, vip))
}

// answering is announcedOn without the words: an interface that has no carrier, and one that forwards nothing, or "".
func answering(f Facts, ads []lb.L2Advertisement, vip netip.Addr) (found []string, silent, unforwarded string) {
	for _, ad := range ads {
		for _, i := range f.Interfaces {
			switch {
			case !suits(ad, i, vip) || len(ad.Interfaces) == 0 && matchesAny(f.Exclude, i.Name):
			case !i.Up:
				silent = i.Name
			case f.CheckForwarding && !i.Forwards(lb.FamilyOf(vip)):
				unforwarded = i.Name
			default:
				found = append(found, i.Name)
			}
		}
	}
	slices.Sort(found)
	return slices.Compact(found), silent, unforwarded
}

func poolsOf(pools map[string]lb.Pool, vip netip.Addr) []lb.Pool {
	var found []lb.Pool
	for _, name := range slices.Sorted(maps.Keys(pools)) {
		if slices.ContainsFunc(pools[name].Ranges, func(r lb.Range) bool { return r.Contains(vip) }) {
			found = append(found, pools[name])
		}
	}
	return found
}

// selectsService reports whether the advertisement is for a Service that holds the VIP; one of
// several that share it is enough, but not one of another namespace that joined.
func selectsService(ad lb.L2Advertisement, holders []Holder) bool {
	return len(ad.ServiceSelectors) == 0 || slices.ContainsFunc(tenants(holders), func(h Holder) bool {
		return slices.ContainsFunc(ad.ServiceSelectors, func(s labels.Selector) bool { return s.Matches(h.Labels) })
	})
}

// weightOf is how much the advertisements prefer the node: as much as that which prefers it most.
func weightOf(ads []lb.L2Advertisement, node lb.Node) uint16 {
	var most uint16
	for _, ad := range ads {
		var sum uint16
		for _, p := range ad.Preferred {
			if p.Nodes.Matches(node.Labels) {
				sum += p.Weight
			}
		}
		most = max(most, sum)
	}
	return most
}

func selectsNode(ad lb.L2Advertisement, node lb.Node) bool {
	if len(ad.NodeSelectors) == 0 {
		return true
	}
	for _, selector := range ad.NodeSelectors {
		if selector.Matches(node.Labels) {
			return true
		}
	}
	return false
}

// suits reports whether the advertisement has the interface answer for the VIP while it is up. An interface that
// is named needs no subnet that contains the VIP: whoever names it knows who asks there.
func suits(ad lb.L2Advertisement, i lb.Interface, vip netip.Addr) bool {
	if i.Loopback || i.NoARP || len(i.MAC) == 0 {
		return false
	}
	if len(ad.Interfaces) > 0 {
		return slices.Contains(ad.Interfaces, i.Name)
	}
	_, ok := i.Subnet(vip)
	return ok && !i.Enslaved
}

// matchesAny reports whether one of the shell patterns matches the name. Patterns are checked where
// they come in.
func matchesAny(patterns []string, name string) bool {
	return slices.ContainsFunc(patterns, func(p string) bool {
		ok, err := path.Match(p, name)
		return ok && err == nil
	})
}

// MACs returns the link-layer addresses under which packets of this node may leave, by which the
// others tell it from conflicting hosts. Those of ports count, as a bond may send with
// them, and those of pods do not: each change is told to all nodes. There may be more than the others
// can be told of, as a network card may have a hundred virtual functions: those of interfaces that may
// answer come first, and each part is sorted.
func MACs(f Facts) []string {
	names := namedBy(f.Advertisements)
	first, rest := map[string]bool{}, map[string]bool{}
	for _, i := range f.Interfaces {
		own := len(i.MAC) > 0 && !i.Loopback && !i.Guest && !matchesAny(f.Exclude, i.Name)
		switch {
		case mayAnswer(f.Exclude, names, i):
			first[i.MAC.String()] = true
		case own || names[i.Name] && len(i.MAC) > 0:
			rest[i.MAC.String()] = true
		}
	}
	maps.DeleteFunc(rest, func(mac string, _ bool) bool { return first[mac] })
	return slices.Concat(slices.Sorted(maps.Keys(first)), slices.Sorted(maps.Keys(rest)))
}

// noInterface explains why none of this node's interfaces suits.
func noInterface(f Facts, matching []lb.L2Advertisement, vip netip.Addr) string {
	for _, ad := range matching {
		if len(ad.Interfaces) > 0 {
			return fmt.Sprintf("L2Advertisement %s names interface %s, and %s has no such interface that is up and speaks ARP",
				ad.Name, strings.Join(ad.Interfaces, " or "), f.Self)
		}
	}
	var subnets []string
	for _, i := range f.Interfaces {
		if i.Loopback || i.Enslaved || matchesAny(f.Exclude, i.Name) {
			continue
		}
		for _, p := range i.Addresses {
			if p.Addr().Is4() == vip.Is4() && !p.Addr().IsLinkLocalUnicast() && len(subnets) < 4 {
				state := ""
				if !i.Up {
					state = ", down"
				}
				subnets = append(subnets, fmt.Sprintf("%s%s: %s", i.Name, state, p.Masked()))
			}
		}
	}
	if len(subnets) == 0 {
		return fmt.Sprintf("%s has no interface with an address of the family of %s", f.Self, vip)
	}
	return fmt.Sprintf(
		"no interface of %s that is up has a subnet that contains %s (%s); to announce it all the same, name the "+
			"interfaces in an L2Advertisement",
		f.Self, vip, strings.Join(subnets, "; "))
}

// handingOver returns those of the interfaces on which this node answers that have a carrier, and forward what has to
// be forwarded. A node that answers only until the owner does ends that without one: when the carrier is back, it does
// not know who answers.
func (f Facts) handingOver(in Input) (on []string) {
	forwarded := f.CheckForwarding && !onNode(in.Holders)
	for _, i := range f.Interfaces {
		if i.Up && slices.Contains(in.Answering, i.Name) && (!forwarded || i.Forwards(lb.FamilyOf(in.VIP))) {
			on = append(on, i.Name)
		}
	}
	slices.Sort(on)
	return on
}
