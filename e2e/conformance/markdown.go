package conformance

import (
	_ "embed"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// introduction is the part of docs/design/conformance.md that no run changes.
//
//go:embed introduction.md
var introduction string

// Markdown returns docs/design/conformance.md.
func (r Report) Markdown() string {
	var b strings.Builder
	b.WriteString(introduction)
	fmt.Fprintf(&b, "\n## Results\n\nOf Kubernetes %s. [conformance.json](conformance.json) has the result of each spec, "+
		"with its date\nand the version of Landfall.\n", r.Kubernetes)
	for _, mode := range slices.Sorted(maps.Keys(r.Modes)) {
		if mode != KubeProxy {
			writeMode(&b, mode, r.Modes[mode])
		}
	}
	if specs := r.Modes[KubeProxy]; len(specs) > 0 {
		writeComparison(&b, specs)
	}
	return b.String()
}

// writeComparison writes the results of the specs that ran with kube-proxy.
func writeComparison(b *strings.Builder, specs []Spec) {
	b.WriteString("\n### kube-proxy\n\nFor comparison: kube-proxy in mode iptables in place of Landfall's proxy, and " +
		"Landfall's controller and speaker.\n")
	for _, part := range []struct {
		result Result
		title  string
	}{{Failed, "Failed"}, {Passed, "Passed"}} {
		if chosen := in(specs, func(s Spec) bool { return s.Result == part.result }); len(chosen) > 0 {
			fmt.Fprintf(b, "\n%s:\n\n", part.title)
			writeByReason(b, chosen)
		}
	}
}

// writeMode writes the results of a mode of the proxy.
func writeMode(b *strings.Builder, mode string, specs []Spec) {
	fmt.Fprintf(b, "\n### %s mode\n\n", mode)
	if from, to, versions := span(specs); from != "" {
		fmt.Fprintf(b, "Run from %s to %s, with Landfall %s.\n\n", from, to, strings.Join(versions, ", "))
	}
	b.WriteString("| group | passed | failed | skipped | not run |\n| --- | ---: | ---: | ---: | ---: |\n")
	row := func(name string, specs []Spec) {
		n := counts(specs)
		fmt.Fprintf(b, "| %s | %d | %d | %d | %d |\n", name, n[Passed], n[Failed], n[Skipped], n[NotRun])
	}
	for _, g := range groups {
		row(g, in(specs, func(s Spec) bool { return group(s.Name) == g }))
	}
	row("**all**", specs)
	for _, part := range []struct {
		result       Result
		title, empty string
	}{
		{Failed, "Failed", "No spec fails."},
		{Skipped, "Skipped", "No spec is skipped."},
		{NotRun, "Not run yet", ""},
	} {
		chosen := in(specs, func(s Spec) bool { return s.Result == part.result })
		if len(chosen) == 0 {
			if part.empty != "" {
				fmt.Fprintf(b, "\n%s\n", part.empty)
			}
			continue
		}
		fmt.Fprintf(b, "\n%s:\n\n", part.title)
		writeByReason(b, chosen)
	}
}

// writeByReason lists specs under the reason that they share.
func writeByReason(b *strings.Builder, specs []Spec) {
	byReason := map[string][]string{}
	for _, s := range specs {
		why := escape(s.Reason)
		if s.Result == Failed {
			why = strings.TrimSpace("`" + strings.ReplaceAll(s.Reason, "`", "'") + "` " + escape(reason(causes, s.Name)))
		}
		byReason[why] = append(byReason[why], strings.TrimPrefix(s.Name, prefix))
	}
	for _, why := range slices.Sorted(maps.Keys(byReason)) {
		indent := ""
		if why != "" {
			fmt.Fprintf(b, "- %s\n", why)
			indent = "  "
		}
		for _, name := range byReason[why] {
			fmt.Fprintf(b, "%s- %s\n", indent, escape(name))
		}
	}
}

// escape keeps what Markdown takes for its own.
func escape(text string) string {
	return strings.NewReplacer("[", `\[`, "]", `\]`, "<", `\<`, "*", `\*`, "_", `\_`).Replace(text)
}

// in returns the specs that fit.
func in(specs []Spec, fits func(Spec) bool) []Spec {
	return slices.DeleteFunc(slices.Clone(specs), func(s Spec) bool { return !fits(s) })
}

// span returns the first and the last date of results, and the versions of Landfall.
func span(specs []Spec) (from, to string, versions []string) {
	seen := map[string]bool{}
	for _, s := range specs {
		if s.Date == "" {
			continue
		}
		if from == "" || s.Date < from {
			from = s.Date
		}
		to = max(to, s.Date)
		seen[s.Landfall] = true
	}
	return from, to, slices.Sorted(maps.Keys(seen))
}
