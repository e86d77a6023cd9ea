package explain

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/landfall-lb/landfall/internal/lb"
)

// Pool explains an IPAddressPool. waiting are the Services that have no address because of it, as
// far as was read.
func Pool(c Cluster, name string, waiting []lb.Key) Verdict {
	subject := "IPAddressPool " + name
	i := slices.IndexFunc(c.Pools, func(p lb.Pool) bool { return p.Name == name })
	switch {
	case i < 0 && c.hasUnread("ipaddresspools"):
		return c.unreadable(subject, "ipaddresspools")
	case i < 0:
		return missing(subject, "there is no such IPAddressPool", "kubectl get ipaddresspools")
	}
	p := c.Pools[i]
	checks := []Check{poolReady(p), poolRoom(p, waiting)}
	if by := c.selecting(p); len(by) > 0 {
		checks = append(checks, Check{Level: OK, What: "advertisements", Text: strings.Join(by, ", ")})
	} else if !c.unreadAdvertisements() {
		checks = append(checks, Check{Level: Wrong, What: "advertisements", Reason: lb.ReasonNoAdvertisement,
			Text: "no L2Advertisement or BGPAdvertisement selects it, so its addresses are not announced"})
	}
	if !p.AutoAssign {
		checks = append(checks, Check{Level: Note, What: "autoAssign",
			Text: "it serves only Services that request it or one of its addresses"})
	}
	if p.PerNamespace > 0 {
		checks = append(checks, Check{Level: Note, What: "quota",
			Text: fmt.Sprintf("a namespace holds at most %d addresses of a family", p.PerNamespace)})
	}
	for _, f := range []struct{ family, kept string }{
		{"IPv4", p.Status.QuarantinedIPv4}, {"IPv6", p.Status.QuarantinedIPv6},
	} {
		if f.kept != "" && f.kept != "0" {
			checks = append(checks, Check{Level: Note, What: "quarantine",
				Text: fmt.Sprintf("freed %s addresses reserved for their last holders: %s", f.family, f.kept)})
		}
	}
	if checks[0].Level == Wrong {
		if _, known := lb.FindCondition(p.Status.Conditions, lb.ConditionReady); !known {
			checks = append([]Check{c.controller()}, checks...)
		}
	}
	return judge(subject, "assigns addresses; "+poolRoom(p, nil).Text, append(checks, c.unread()...))
}

func poolReady(p lb.Pool) Check {
	ready, known := lb.FindCondition(p.Status.Conditions, lb.ConditionReady)
	edit := "kubectl edit ipaddresspool " + p.Name
	switch {
	case p.Problem != nil:
		return Check{Level: Wrong, What: "specification", Reason: p.Problem.Reason, Text: p.Problem.Message, Cure: edit}
	case !known:
		return Check{Level: Wrong, What: "specification", Text: "the controller has not processed it yet",
			Cure: "kubectl -n landfall-system logs -l app.kubernetes.io/component=controller"}
	case !ready.Status:
		return Check{Level: Wrong, What: "specification", Reason: ready.Reason, Text: ready.Message,
			Cure: cureOf(ready.Reason, "POOL", p.Name)}
	}
	return Check{Level: OK, What: "specification", Text: ready.Message}
}

// poolRoom checks whether there are free addresses. A full pool is a warning, unless a Service
// waits for one.
func poolRoom(p lb.Pool, waiting []lb.Key) Check {
	check := Check{Level: OK, What: "addresses"}
	var text []string
	full := false
	for _, f := range []struct {
		family         lb.Family
		assigned, free string
	}{
		{lb.IPv4, p.Status.AssignedIPv4, p.Status.AvailableIPv4}, {lb.IPv6, p.Status.AssignedIPv6, p.Status.AvailableIPv6},
	} {
		if f.free == "" || !slices.ContainsFunc(p.Ranges, func(r lb.Range) bool { return r.Family() == f.family }) {
			continue
		}
		text = append(text, fmt.Sprintf("%s %s assigned, %s free", f.family, f.assigned, f.free))
		full = full || f.free == "0"
	}
	check.Text = strings.Join(text, "; ")
	if len(waiting) > 0 {
		check.Level, check.Reason = Wrong, lb.ReasonPoolExhausted
		check.Text = fmt.Sprintf("it is full, and %s waits for an address (%s)", waiting[0], check.Text)
		if len(waiting) > 1 {
			check.Text = fmt.Sprintf("it is full, and %d Services wait for an address, such as %s", len(waiting), waiting[0])
		}
	} else if full {
		check.Level, check.Reason = Warning, lb.ReasonPoolExhausted
		check.Text = "it is full, so the next Service gets no address: " + check.Text
	}
	check.Cure = cureOf(check.Reason, "POOL", p.Name)
	return check
}

// unreadAdvertisements reports whether there may be advertisements that could not be read.
func (c Cluster) unreadAdvertisements() bool {
	return c.hasUnread("l2advertisements") || c.hasUnread("bgpadvertisements")
}

// selecting names the advertisements of a pool.
func (c Cluster) selecting(p lb.Pool) []string {
	var by []string
	for _, a := range c.L2 {
		if a.Selects(p) {
			by = append(by, "L2Advertisement "+a.Name)
		}
	}
	for _, a := range c.BGP {
		if a.SelectsPool(p) {
			by = append(by, "BGPAdvertisement "+a.Name)
		}
	}
	return by
}

// IP explains an address that no Service holds; that of a Service is explained with it.
func IP(c Cluster, addr netip.Addr) Verdict {
	subject := "IP " + addr.String()
	for name, n := range c.Nodes {
		if slices.Contains(n.Addresses, addr) || slices.Contains(n.ExternalAddresses, addr) {
			return judge(subject, "it is an address of Node "+name+", and of no Service",
				[]Check{{Level: OK, What: "address", Text: "of Node " + name}})
		}
	}
	pools := c.poolsWith(addr)
	switch {
	case len(pools) == 0 && c.hasUnread("ipaddresspools"):
		return c.unreadable(subject, "ipaddresspools")
	case len(pools) == 0:
		return judge(subject, "", []Check{{Level: Wrong, What: "pool", Reason: lb.ReasonAddressOutside,
			Text: "no pool contains it, and no Service holds it", Cure: "kubectl get ipaddresspools"}})
	}
	p := pools[0]
	inside := func(ranges []lb.Range) bool {
		return slices.ContainsFunc(ranges, func(r lb.Range) bool { return r.Contains(addr) })
	}
	check := Check{Level: Note, What: "pool " + p.Name}
	for _, r := range p.Status.Released {
		if r.Addr == addr {
			check.Reason, check.Text = lb.ReasonAddressKept, fmt.Sprintf("in quarantine for %s, which freed it at %s", r.Service,
				r.At.Format("2006-01-02T15:04:05Z"))
		}
	}
	for _, r := range p.Status.Pending {
		if slices.Contains(r.Addresses, addr) {
			check.Text = fmt.Sprintf("the controller is about to assign it to %s", r.Service)
		}
	}
	for _, r := range p.Reservations {
		if r.Range.Contains(addr) {
			check.Reason, check.Text = lb.ReasonAddressReserved, fmt.Sprintf("spec.reservations keeps it for %s/%s",
				r.Namespace, r.Name)
		}
	}
	if inside(p.Excluded) {
		check.Reason, check.Text = lb.ReasonAddressExcluded, "spec.excludedAddresses keeps it from being assigned"
	}
	if check.Text == "" {
		check.Level, check.Text = OK, "free"
	}
	checks := append([]Check{check, poolReady(p)}, c.unread()...)
	return judge(subject, fmt.Sprintf("no Service holds it; in pool %s: %s", p.Name, check.Text), checks)
}

// ReasonName explains a reason.
func ReasonName(name string) (Verdict, bool) {
	for reason, entry := range Reasons {
		if strings.EqualFold(string(reason), name) {
			return Verdict{Subject: "Reason " + string(reason), Level: OK, Reason: reason,
				Line: string(reason) + ": " + entry.Meaning, Cause: entry.Meaning, Cure: entry.Cure}, true
		}
	}
	return Verdict{}, false
}
