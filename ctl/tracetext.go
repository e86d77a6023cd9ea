package main

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/landfall-lb/landfall/internal/lb"
)

// endsShown is how many backends of a way the text shows, unless it is wide.
const endsShown = 10

// alike are nodes on which a packet fares alike.
type alike struct {
	nodes []string
	trace lb.Trace // of the first
}

// alikes groups nodes, in the order of the first of each group.
func (r traced) alikes() (groups []alike) {
	for _, node := range r.Nodes {
		i := slices.IndexFunc(groups, func(a alike) bool { return fare(a.trace) == fare(node) })
		if i < 0 {
			groups = append(groups, alike{trace: node})
			i = len(groups) - 1
		}
		groups[i].nodes = append(groups[i].nodes, node.Node)
	}
	return groups
}

// fare is all that makes a difference between two nodes: not the handles of rules.
func fare(t lb.Trace) string {
	var s strings.Builder
	for _, way := range t.Ways {
		fmt.Fprintln(&s, way.Verdict, way.Share, way.Ends, way.MoreEnds, way.Masqueraded, way.Why)
		for _, step := range way.Steps {
			fmt.Fprintln(&s, step.Hook, step.Table, step.Chain, step.Rule, step.Text)
		}
	}
	fmt.Fprintln(&s, t.Packet.Interface == "", t.Notes)
	return s.String()
}

// line is the verdict in one line.
func (r traced) line() string {
	to := fmt.Sprintf("%s/%s", lb.EndText(r.Packet.Destination), r.Packet.Protocol)
	if r.Packet.Protocol == lb.TraceICMP {
		to = r.Packet.Destination.Addr().String() + " (ping)"
	}
	if r.Service != "" {
		to += " (Service " + r.Service + ")"
	}
	by := map[string][]string{}
	var order []string
	for _, node := range r.Nodes {
		said := verdictOf(node)
		if by[said] == nil {
			order = append(order, said)
		}
		by[said] = append(by[said], node.Node)
	}
	var parts []string
	for _, said := range order {
		parts = append(parts, said+" on "+some(by[said]))
	}
	return fmt.Sprintf("%s to %s: %s", r.Packet.Source.Addr(), to, strings.Join(parts, "; "))
}

// some names a few of many nodes.
func some(nodes []string) string {
	const most = 5
	if len(nodes) <= most {
		return strings.Join(nodes, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(nodes[:most], ", "), len(nodes)-most)
}

// verdictOf says what one node does with the packet. The worst comes first.
func verdictOf(t lb.Trace) string {
	order := []lb.TraceVerdict{lb.TraceUnknown, lb.TraceUnroutable, lb.TraceDropped, lb.TraceRefused, lb.TraceUntouched,
		lb.TraceDelivered, lb.TraceRelayed, lb.TraceAnswered}
	ways := slices.Clone(t.Ways)
	slices.SortStableFunc(ways, func(a, b lb.TraceWay) int {
		return cmp.Compare(slices.Index(order, a.Verdict), slices.Index(order, b.Verdict))
	})
	var parts []string
	for _, way := range ways {
		text := wayText(way)
		if len(ways) > 1 {
			text = share(way.Share) + " " + text
		}
		parts = append(parts, text)
	}
	return strings.Join(parts, ", ")
}

func share(of float64) string { return fmt.Sprintf("%.3g %%", 100*of) }

// wayText says how one way ends.
func wayText(w lb.TraceWay) string {
	text := string(w.Verdict)
	switch w.Verdict {
	case lb.TraceDelivered:
		n := len(w.Ends) + w.MoreEnds
		text = fmt.Sprintf("delivered to %s", count(n, "backend"))
		if w.Masqueraded {
			text += ", masqueraded"
		}
	case lb.TraceRelayed:
		text = "ended by the node's relay, which connects to a backend"
	case lb.TraceAnswered:
		text = "answered by the node"
	case lb.TraceUntouched:
		text = "touched by no rule of Landfall"
	case lb.TraceUnroutable:
		text = "lost, as the node has no route"
		if len(w.Ends) > 0 {
			text = fmt.Sprintf("lost, as the node has no route to %s", w.Ends[0].Address.Addr())
		}
	}
	if w.Why != "" {
		text += ": " + w.Why
	}
	return text
}

// text renders the answer: the verdict, and for each group of nodes the backends and the rules.
func (r traced) text(wide bool) string {
	var out strings.Builder
	fmt.Fprintln(&out, r.Verdict)
	for _, group := range r.alikes() {
		in := "sent by the node itself"
		if name := group.trace.Packet.Interface; name != "" {
			in = "in at " + name
		}
		rules := strings.Join(group.trace.Rules, ", ")
		if rules == "" {
			rules = "none"
		}
		fmt.Fprintf(&out, "\n%s (%s; rules: %s)\n", strings.Join(group.nodes, ", "), in, rules)
		for _, way := range group.trace.Ways {
			fmt.Fprintf(&out, "  %s %s\n", share(way.Share), wayText(way))
			r.ends(&out, way, wide)
			steps(&out, way.Steps, wide)
		}
		for _, note := range group.trace.Notes {
			fmt.Fprintf(&out, "  note: %s\n", note)
		}
	}
	for _, note := range r.Notes {
		fmt.Fprintf(&out, "\nnote: %s\n", note)
	}
	if len(r.Unanswered) > 0 {
		fmt.Fprintf(&out, "\n%s", unansweredText(r.Unanswered))
	}
	return out.String()
}

func unansweredText(all []silent) string {
	var out strings.Builder
	const most = 5
	for _, s := range all[:min(len(all), most)] {
		fmt.Fprintf(&out, "no answer from %s: %s\n", s.Node, s.Why)
	}
	if more := len(all) - most; more > 0 {
		fmt.Fprintf(&out, "no answer from %d more nodes\n", more)
	}
	return out.String()
}

func (r traced) ends(out *strings.Builder, way lb.TraceWay, wide bool) {
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	shown := way.Ends
	if !wide {
		shown = shown[:min(len(shown), endsShown)]
	}
	for _, end := range shown {
		fmt.Fprintf(table, "    %s\t%s\t%s\n", share(end.Share), end.Address, podName(r.Pods, end.Address.Addr()))
	}
	_ = table.Flush() // strings take everything
	if more := len(way.Ends) - len(shown) + way.MoreEnds; more > 0 {
		fmt.Fprintf(out, "    and %d more\n", more)
	}
}

// podName returns the name of a pod, "-" if it is not known.
func podName(pods map[netip.Addr]string, addr netip.Addr) string { return cmp.Or(pods[addr], "-") }

// steps renders the rules that did something; wide also their handles.
func steps(out *strings.Builder, all []lb.TraceStep, wide bool) {
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	for _, s := range all {
		rule := "-"
		if s.Rule > 0 {
			rule = fmt.Sprint(s.Rule)
		}
		if wide && s.Handle > 0 {
			rule += fmt.Sprintf(" (handle %d)", s.Handle)
		}
		text := s.Text
		if s.Comment != "" {
			text += fmt.Sprintf("  # %s", s.Comment)
		}
		fmt.Fprintf(table, "    %s\t%s\t%s\t%s\t%s\n", s.Hook, s.Table, s.Chain, rule, text)
	}
	_ = table.Flush() // strings take everything
}
