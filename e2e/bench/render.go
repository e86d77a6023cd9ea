package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"
)

// section is a part of the report: a table, what its figures are limited by, and plots of them.
type section struct {
	title, text string
	head        []string
	rows        [][]string
	plots       []string // names of files
}

// sections returns the report's parts.
func (r report) sections() []section {
	all := []section{r.changes(), r.connections(), r.outside()}
	for _, kind := range []struct{ folder, title, text string }{
		{labPackage, "Faults, new Services and loss",
			"In a lab of real programs over ARP and BGP. Beside each figure are its limit, and what bounds it."},
		{"", "Plans, renderers and actors",
			"Go benchmarks. What they measure is said where they are. They are compared with what they took before."},
	} {
		all = append(all, r.benchmarks(kind.folder, kind.title, kind.text))
	}
	return slices.DeleteFunc(all, func(s section) bool { return len(s.rows) == 0 })
}

// changes has how fast a proxy follows.
func (r report) changes() section {
	s := section{title: "Following changes",
		head: []string{"Services", "proxy", "start, ms", "change, ms", "first byte of a new Service, ms",
			"behind 200, ms", "peak, MiB", "CPU of the start, s", "CPU of the changes, s"},
		text: "From the call of the API server to a client's first right answer: p50 / max, and in parentheses the p50 " +
			"until the API server itself had answered, which bounds it. The row `" + floor + "` is a program that watches " +
			"the same objects with client-go and does nothing with them, which bounds the start, the memory and the " +
			"processor time of all that do. What takes " + overLimitCell + " is given up."}
	for _, row := range r.Churn {
		s.rows = append(s.rows, []string{number(float64(row.Services)), row.Proxy,
			row.cell(ofStart, fmt.Sprintf("%.0f", row.Start)), row.cell(ofChange, row.Change.String()),
			row.cell(ofNew, row.New.String()), row.cell(ofBehind, row.Behind.String()),
			row.cell("memory", fmt.Sprintf("%.0f", row.Memory)), row.cell(ofStartCPU, fmt.Sprintf("%.2f", row.StartCPU)),
			row.cell(ofCPU, fmt.Sprintf("%.2f", row.CPU))})
	}
	for _, p := range r.plots() {
		s.plots = append(s.plots, p.file())
	}
	return s
}

// cell is a figure as the report shows it: what was over the limit says so, what comes after it is missing.
func (r churnRow) cell(what, figure string) string {
	switch {
	case r.Over == what:
		return overLimitCell
	case r.Over != "" && strings.Trim(figure, "0.") == "":
		return ""
	}
	return figure
}

// overLimitCell stands where there is no figure.
var overLimitCell = fmt.Sprintf("over %.0f min", limit.Minutes())

// plots are those of how fast a proxy follows.
func (r report) plots() (all []plot) {
	for _, kind := range []struct {
		title, unit string
		of          func(churnRow) float64
	}{
		{"Start", "ms", func(r churnRow) float64 { return r.Start }},
		{"Change", "ms, p50", func(r churnRow) float64 { return r.Change.P50 }},
		{"New Service", "ms, p50", func(r churnRow) float64 { return r.New.P50 }},
		{"Change behind 200 others", "ms, p50", func(r churnRow) float64 { return r.Behind.P50 }},
		{"Memory", "MiB, peak", func(r churnRow) float64 { return r.Memory }},
		{"CPU of all changes", "s", func(r churnRow) float64 { return r.CPU }},
	} {
		p := plot{title: kind.title, unit: kind.unit}
		for _, row := range r.Churn {
			value := kind.of(row)
			if value <= 0 {
				continue
			}
			i := slices.IndexFunc(p.lines, func(l line) bool { return l.name == row.Proxy })
			if i < 0 {
				i, p.lines = len(p.lines), append(p.lines, line{name: row.Proxy})
			}
			p.lines[i].points = append(p.lines[i].points, point{float64(row.Services), value})
		}
		if len(p.lines) > 0 {
			all = append(all, p)
		}
	}
	return all
}

// file is the name of the plot's file.
func (p plot) file() string { return strings.ReplaceAll(strings.ToLower(p.title), " ", "-") + ".svg" }

// connections has the rates of new connections.
func (r report) connections() section {
	s := section{title: "New connections, between nodes",
		head: []string{"through", "a second", "least", "most", "share of no rules"},
		text: "The median of the rounds. What a node without rules does bounds it."}
	bare := 0.0
	for _, row := range r.Connections {
		if row.Path == noRules {
			bare = row.PerSecond
		}
	}
	for _, row := range r.Connections {
		if row.Over {
			s.rows = append(s.rows, []string{row.Path, overLimitCell, "", "", ""})
			continue
		}
		share := ""
		if bare > 0 {
			share = fmt.Sprintf("%.2f", row.PerSecond/bare)
		}
		s.rows = append(s.rows, []string{row.Path, fmt.Sprintf("%.0f", row.PerSecond), fmt.Sprintf("%.0f", row.Min),
			fmt.Sprintf("%.0f", row.Max), share})
	}
	return s
}

// outside has what a client outside the node gets.
func (r report) outside() section {
	s := section{title: "From outside the node",
		head: []string{"path", "policy", "Services", "first packets", "new connections", "by wall time", "round trips",
			"bulk"},
		text: "Shares of what a bare node does in the same processor time, which bounds them: the median, the quartiles " +
			"and microseconds. The rows without a policy are connection tracking alone, and those `by hand` one rule for " +
			"each Service: what any proxy with rules pays. A first packet is a SYN that is dropped in front of the pod, so " +
			"that it is only what the rules do for a connection they do not know."}
	for _, row := range r.Outside {
		services := ""
		if row.Services > 0 {
			services = number(float64(row.Services))
		}
		if row.Over {
			s.rows = append(s.rows, []string{row.Path, row.Policy, services, overLimitCell, "", "", "", ""})
			continue
		}
		s.rows = append(s.rows, []string{row.Path, row.Policy, services, row.First.String(), row.Connection.String(),
			fmt.Sprintf("%.2f", row.Connection.Wall), row.RoundTrip.String(),
			fmt.Sprintf("%.2f (%.2f to %.2f)", row.Bulk.Share, row.Bulk.Low, row.Bulk.High)})
	}
	return s
}

// benchmarks has those below a folder; those elsewhere for "".
func (r report) benchmarks(folder, title, text string) section {
	s := section{title: title, text: text, head: []string{"benchmark", "runs", "figures", "limit", "bounded by"}}
	for _, b := range r.Benchmarks {
		inLab := b.Package == labPackage
		if inLab != (folder == labPackage) {
			continue
		}
		name, bound := b.Name, b.bound()
		if !inLab {
			name = b.Package + " " + b.Name
		}
		var figures []string
		for _, f := range b.Figures {
			if !inLab || f.Unit != "ns/op" { // what a whole run takes says nothing
				figures = append(figures, fmt.Sprintf("%g %s", f.Value, f.Unit))
			}
		}
		s.rows = append(s.rows, []string{name, fmt.Sprint(b.Runs), strings.Join(figures, ", "), bound.limit, bound.by})
	}
	return s
}

// print writes the tables for a terminal.
func (r report) print(w io.Writer) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, line := range r.LeftOut {
		fmt.Fprintf(t, "%s\n\n", line)
	}
	for _, s := range r.sections() {
		fmt.Fprintf(t, "%s\n\n%s\n", s.title, strings.Join(s.head, "\t"))
		for _, row := range s.rows {
			fmt.Fprintln(t, strings.Join(row, "\t"))
		}
		fmt.Fprintln(t)
	}
	_ = t.Flush()
}

// write writes the report to a Markdown file, and its plots and figures to a folder of the same name.
func (r report) write(file string) error {
	folder := strings.TrimSuffix(file, filepath.Ext(file))
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return err
	}
	figures, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	files := map[string]string{file: r.markdown(filepath.Base(folder)),
		filepath.Join(folder, "figures.json"): string(figures) + "\n"}
	for _, p := range r.plots() {
		files[filepath.Join(folder, p.file())] = p.svg()
	}
	for name, text := range files {
		if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// markdown returns the report as a page whose plots are in a folder beside it.
func (r report) markdown(folder string) string {
	var out strings.Builder
	m := r.Machine
	out.WriteString("# Performance\n\nA report of `make bench`. How it measures is in docs/design/bench.md.\n\n")
	out.WriteString("| | |\n| --- | --- |\n")
	for _, row := range [][2]string{{"begun", m.Began.Format("2006-01-02 15:04 UTC")}, {"Landfall", m.Commit},
		{"kube-proxy", m.KubeProxy}, {"machine", fmt.Sprintf("%d × %s, %d GiB", m.Processors, m.Model, m.MemoryGiB)},
		{"kernel", m.Kernel}, {"Go", m.Go}, {"load at the beginning", m.Load},
		{"not measured", strings.Join(r.LeftOut, "; ")}, {"all figures", "[as JSON](" + folder + "/figures.json)"}} {
		if row[1] != "" {
			fmt.Fprintf(&out, "| %s | %s |\n", row[0], row[1])
		}
	}
	for _, s := range r.sections() {
		fmt.Fprintf(&out, "\n## %s\n\n%s\n\n", s.title, s.text)
		for _, name := range s.plots {
			fmt.Fprintf(&out, "![%s](%s/%s)\n", strings.TrimSuffix(name, ".svg"), folder, name)
		}
		if len(s.plots) > 0 {
			out.WriteString("\n")
		}
		fmt.Fprintf(&out, "| %s |\n|%s\n", strings.Join(s.head, " | "), strings.Repeat(" --- |", len(s.head)))
		for _, row := range s.rows {
			fmt.Fprintf(&out, "| %s |\n", strings.Join(row, " | "))
		}
	}
	return out.String()
}
