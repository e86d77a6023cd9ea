package links

import (
	"errors"
	"fmt"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
)

// MarkRule is a routing rule that has packets of a mark look up their way in a table first.
type MarkRule struct {
	// Mark is what the mark's bits in Mask are.
	Mark, Mask uint32
	Table      int
	// Narrow passes over the default route of the table.
	Narrow bool
}

// MainTable is the number of the main routing table.
const MainTable = unix.RT_TABLE_MAIN

// MarkRules are the rules of one priority that carry the number of Landfall. It is not safe for concurrent use.
type MarkRules struct {
	handle   *netlink.Handle
	priority int
}

// landfallRules says who has made a rule (FRA_PROTOCOL). The kernel leaves the numbers above 4 to programs; this one
// is not among those that iproute2 knows.
const landfallRules = 76

// OpenMarkRules opens the way to the rules in the network namespace of the calling thread.
func OpenMarkRules(priority int) (MarkRules, error) {
	handle, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return MarkRules{}, fmt.Errorf("open netlink for rules: %w", err)
	}
	return MarkRules{handle, priority}, nil
}

// Close closes it. The rules stay.
func (r MarkRules) Close() { r.handle.Close() }

// List returns the rules of a family; none if the kernel lacks the family.
func (r MarkRules) List(family lb.Family) (rules []MarkRule, err error) {
	all, err := complete(func() ([]netlink.Rule, error) { return r.handle.RuleList(familyNumber(family)) })
	if errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list routing rules: %w", err)
	}
	for _, rule := range all {
		if rule.Priority == r.priority && rule.Protocol == landfallRules && rule.Mask != nil {
			rules = append(rules, MarkRule{rule.Mark, *rule.Mask, rule.Table, rule.SuppressPrefixlen == 0})
		}
	}
	return rules, nil
}

// Add adds a rule.
func (r MarkRules) Add(family lb.Family, rule MarkRule) error {
	if err := r.handle.RuleAdd(r.rule(family, rule)); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("add a routing rule for mark %#x: %w", rule.Mark, err)
	}
	return nil
}

// Remove removes a rule.
func (r MarkRules) Remove(family lb.Family, rule MarkRule) error {
	if err := r.handle.RuleDel(r.rule(family, rule)); err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("remove a routing rule for mark %#x: %w", rule.Mark, err)
	}
	return nil
}

func (r MarkRules) rule(family lb.Family, of MarkRule) *netlink.Rule {
	rule := netlink.NewRule()
	rule.Family, rule.Priority, rule.Protocol = familyNumber(family), r.priority, landfallRules
	rule.Table, rule.Mark, rule.Mask = of.Table, of.Mark, &of.Mask
	if of.Narrow {
		rule.SuppressPrefixlen = 0
	}
	return rule
}
