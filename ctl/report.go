package main

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/landfall-lb/landfall/internal/lb"
)

// report is the output of landfallctl status: tables and a list of problems.
type report struct {
	pools, vips, peers [][]string
	refused            []string
	problems           []string
	// wide has the VIPs with two more columns: the pool, and why or why not it is announced.
	wide [][]string
}

func newReport(w world) report {
	r := report{refused: w.refused}
	if len(w.pools) == 0 {
		r.problem("there is no IPAddressPool, so no Service gets an address: create one")
	}
	for _, name := range slices.Sorted(maps.Keys(w.pools)) {
		r.addPool(w.pools[name], w)
	}
	for _, key := range slices.SortedFunc(maps.Keys(w.services), lb.Key.Compare) {
		if s := w.services[key]; s.Type == lb.LoadBalancer && s.Class == w.class {
			r.addService(s, w)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(w.peers)) {
		r.addPeer(w.peers[name])
	}
	for _, name := range slices.Sorted(maps.Keys(w.routed)) {
		if c, ok := lb.FindCondition(w.routed[name].Conditions, lb.ConditionReady); ok && !c.Status {
			r.problem("BGPAdvertisement %s: %s (%s)", name, c.Message, c.Reason)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(w.advertisements)) {
		if c, ok := lb.FindCondition(w.advertisements[name].Conditions, lb.ConditionReady); ok && !c.Status {
			r.problem("L2Advertisement %s: %s (%s)", name, c.Message, c.Reason)
		}
	}
	for _, warning := range w.warnings {
		r.problem("%s (%s)", warning.Message, warning.Reason)
	}
	for _, rows := range [][][]string{r.vips, r.wide} {
		slices.SortStableFunc(rows, func(a, b []string) int { return compareAddresses(a[0], b[0]) })
	}
	return r
}

func (r *report) problem(format string, args ...any) {
	r.problems = append(r.problems, oneLine(fmt.Sprintf(format, args...)))
}

func (r *report) addPool(p lb.Pool, w world) {
	ranges := make([]string, len(p.Ranges))
	for i, one := range p.Ranges {
		ranges[i] = one.String()
	}
	ready, ok := lb.FindCondition(p.Status.Conditions, lb.ConditionReady)
	state := "yes"
	switch {
	case !ok:
		state = "unknown"
		r.problem("pool %s: the controller has not processed it yet; is the controller running?", p.Name)
	case !ready.Status:
		state = "no: " + string(ready.Reason)
		r.problem("pool %s: %s (%s)", p.Name, ready.Message, ready.Reason)
	}
	var by []string
	for _, name := range slices.Sorted(maps.Keys(w.advertisements)) {
		if w.advertisements[name].Selects(p) {
			by = append(by, name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(w.routed)) {
		if w.routed[name].SelectsPool(p) {
			by = append(by, name+" (BGP)")
		}
	}
	if len(by) == 0 {
		r.problem("pool %s: no L2Advertisement or BGPAdvertisement selects it, so its addresses are not announced (%s)",
			p.Name, lb.ReasonNoAdvertisement)
	}
	r.pools = append(r.pools, []string{
		p.Name, strings.Join(ranges, ", "),
		counts(p, p.Status.AssignedIPv4, p.Status.AssignedIPv6), counts(p, p.Status.AvailableIPv4, p.Status.AvailableIPv6),
		state, cmp.Or(strings.Join(by, ", "), "-"),
	})
}

// counts joins the figures of both families. It leaves out a family that the pool does not have.
func counts(p lb.Pool, v4, v6 string) string {
	var figures []string
	for _, of := range []struct {
		family lb.Family
		figure string
	}{{lb.IPv4, v4}, {lb.IPv6, v6}} {
		if of.figure != "" && slices.ContainsFunc(p.Ranges, func(r lb.Range) bool { return r.Family() == of.family }) {
			figures = append(figures, of.figure)
		}
	}
	return cmp.Or(strings.Join(figures, " + "), "-")
}

func (r *report) addService(s lb.Service, w world) {
	assigned, known := lb.FindCondition(s.Conditions, lb.ConditionAssigned)
	switch {
	case !known:
		r.problem("service %s: the controller has not processed it yet; is the controller running?", s.Key)
	case !assigned.Status:
		r.problem("service %s: %s (%s)", s.Key, assigned.Message, assigned.Reason)
	}
	vips := s.VIPs()
	if len(vips) == 0 {
		r.addVIP("-", string(assigned.Reason), "pending", s.Key.String(), string(s.ExternalPolicy), "-")
		return
	}
	announced, known := lb.FindCondition(s.Conditions, lb.ConditionAnnounced)
	announcements, err := lb.DecodeAnnouncements(s.Announcements)
	switch {
	case err != nil:
		r.problem("service %s: %v; the speaker that reports on the Service writes it anew, is it running?", s.Key, err)
	case known && announced.Status && len(announcements) == 0:
		r.problem(
			"service %s: its annotation %s is missing; the speaker that reports on the Service writes it, is it running, "+
				"and of this version?", s.Key, lb.AnnotationAnnouncements)
	}
	owner := map[netip.Addr]string{}
	switch {
	case !known:
		r.problem("service %s: no speaker has reported on it yet; are the speakers running?", s.Key)
	case !announced.Status, announced.Reason == lb.ReasonContested, announced.Reason == lb.ReasonParting:
		r.problem("service %s: %s (%s)", s.Key, announced.Message, announced.Reason)
	}
	// A tenant who may edit the annotation may not edit the status: it says whether all are announced.
	silent := func(a lb.Announcement) bool { return announcers(a) == "" }
	if known && (announced.Status || slices.ContainsFunc(announcements, silent)) {
		for _, a := range announcements {
			owner[a.VIP] = announcers(a)
		}
	}
	for _, vip := range vips {
		r.addVIP(w.poolOf(vip), string(announced.Reason), vip.String(), s.Key.String(), string(s.ExternalPolicy),
			cmp.Or(owner[vip], "none"))
	}
}

func (r *report) addVIP(pool, reason string, row ...string) {
	r.vips = append(r.vips, row)
	r.wide = append(r.wide, append(slices.Clone(row), pool, cmp.Or(reason, "-")))
}

// poolOf names the pool that contains an address.
func (w world) poolOf(vip netip.Addr) string {
	for _, name := range slices.Sorted(maps.Keys(w.pools)) {
		if slices.ContainsFunc(w.pools[name].Ranges, func(r lb.Range) bool { return r.Contains(vip) }) {
			return name
		}
	}
	return "-"
}

// announcers says which nodes announce a VIP, and how; "" when none does.
func announcers(a lb.Announcement) string {
	var all []string
	if a.Owner != "" {
		how := a.Protocol
		if len(a.Interfaces) > 0 {
			how += " on " + strings.Join(a.Interfaces, ", ")
		}
		all = append(all, fmt.Sprintf("%s (%s)", a.Owner, how))
	}
	others := a.OtherNodes
	for _, route := range a.Routes {
		if len(route.Nodes) == 0 {
			others += route.OtherNodes
			continue
		}
		nodes := strings.Join(route.Nodes, ", ")
		if route.OtherNodes > 0 {
			nodes += fmt.Sprintf(" and %d more", route.OtherNodes)
		}
		all = append(all, fmt.Sprintf("%s (BGP to %s)", nodes, strings.Join(route.Peers, ", ")))
	}
	if others > 0 {
		all = append(all, fmt.Sprintf("%d more nodes (BGP)", others))
	}
	return strings.Join(all, "; ")
}

// addPeer adds a row with the number of sessions that are up, and a problem for each that is not.
func (r *report) addPeer(p lb.Peer) {
	up := 0
	nodes := slices.Sorted(maps.Keys(p.Status))
	for _, node := range nodes {
		status := p.Status[node]
		if status.State == "Established" {
			up++
		}
		if status.Reason != "" {
			r.problem("BGPPeer %s on %s is %s: %s (%s)", p.Name, node, status.State, cmp.Or(status.Message, "not up yet"),
				status.Reason)
		}
	}
	if len(nodes) == 0 {
		r.problem(
			"BGPPeer %s: no speaker has reported on it yet; do its nodeSelectors select a node, and are the speakers "+
				"running?", p.Name)
	}
	at, asn := "on "+p.Interface, string(p.Dynamic)
	if p.Addr.IsValid() {
		at = netip.AddrPortFrom(p.Addr, p.Port).String()
	}
	if p.PeerASN != 0 {
		asn = fmt.Sprint(p.PeerASN)
	}
	r.peers = append(r.peers, []string{p.Name, at, asn, fmt.Sprintf("%d of %d", up, len(nodes))})
}

// compareAddresses orders addresses by number, and texts that are not addresses after them.
func compareAddresses(a, b string) int {
	x, errX := netip.ParseAddr(a)
	y, errY := netip.ParseAddr(b)
	if errX != nil || errY != nil {
		return cmp.Compare(a, b)
	}
	return x.Compare(y)
}

// The columns of the tables.
var (
	poolColumns = []string{"POOL", "ADDRESSES", "ASSIGNED", "FREE", "READY", "ADVERTISED BY"}
	vipColumns  = []string{"VIP", "SERVICE", "POLICY", "OWNER"}
	wideColumns = []string{"VIP", "SERVICE", "POLICY", "OWNER", "POOL", "REASON"}
	peerColumns = []string{"BGP PEER", "ADDRESS", "ASN", "SESSIONS UP"}
)

// write writes the report in a format of --output.
func (r report) write(w io.Writer, format string) error {
	return write(w, format, struct {
		Pools    []map[string]string `json:"pools"`
		VIPs     []map[string]string `json:"vips"`
		Peers    []map[string]string `json:"peers"`
		Problems []string            `json:"problems"`
		NotRead  []string            `json:"notRead,omitempty"`
	}{
		named(r.pools, "name", "addresses", "assigned", "free", "ready", "advertisedBy"),
		named(r.wide, "vip", "service", "policy", "owner", "pool", "reason"),
		named(r.peers, "name", "address", "asn", "sessionsUp"), append([]string{}, r.problems...), r.refused,
	}, r.text(format == "wide"))
}

// named gives the fields of rows names.
func named(rows [][]string, names ...string) []map[string]string {
	all := make([]map[string]string, 0, len(rows))
	for _, row := range rows {
		one := map[string]string{}
		for i, name := range names {
			one[name] = row[i]
		}
		all = append(all, one)
	}
	return all
}

func (r report) text(wide bool) string {
	var out strings.Builder
	writeTable(&out, r.pools, "(none)", poolColumns...)
	if wide {
		writeTable(&out, r.wide, "(no Service of type LoadBalancer)", wideColumns...)
	} else {
		writeTable(&out, r.vips, "(no Service of type LoadBalancer)", vipColumns...)
	}
	if len(r.peers) > 0 {
		writeTable(&out, r.peers, "", peerColumns...)
	}
	for _, what := range r.refused {
		fmt.Fprintf(&out, "%s\n\n", what)
	}
	switch {
	case len(r.problems) > 0:
		fmt.Fprintln(&out, "PROBLEMS")
	case len(r.refused) > 0:
		fmt.Fprintln(&out, "Nothing is wrong in what could be read.")
	default:
		fmt.Fprintln(&out, "Nothing is wrong.")
	}
	for _, p := range r.problems {
		fmt.Fprintf(&out, "- %s\n", p)
	}
	return out.String()
}

func writeTable(out *strings.Builder, rows [][]string, none string, columns ...string) {
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	for _, row := range append([][]string{columns}, rows...) {
		fmt.Fprintln(table, strings.Join(row, "\t"))
	}
	if len(rows) == 0 {
		fmt.Fprintln(table, none)
	}
	_ = table.Flush() // writing to a strings.Builder never fails
	fmt.Fprintln(out)
}
