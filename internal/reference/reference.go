// Package reference helps tests to keep the pages of docs/reference in step with the sources that
// they are made from.
package reference

import (
	"flag"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"
)

var update = flag.Bool("update", false, "write the pages of docs/reference anew")

// Page compares the page of that name in docs/reference with text, or writes it with -update. It works in every
// package of the repository.
func Page(t *testing.T, name, text string) {
	t.Helper()
	folder := "."
	for !exists(filepath.Join(folder, "go.mod")) {
		if folder = filepath.Join(folder, ".."); len(folder) > 100 {
			t.Fatal("no go.mod above this package")
		}
	}
	file := filepath.Join(folder, "docs", "reference", name+".md")
	if *update {
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	have, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(have), text); diff != "" {
		t.Errorf("docs/reference/%s.md is stale; run make generate (-have +want):\n%s", name, diff)
	}
}

func exists(file string) bool {
	_, err := os.Stat(file)
	return err == nil
}

// Table returns a Markdown table. Cells may hold any text.
func Table(head []string, rows [][]string) string {
	var b strings.Builder
	line := func(cells []string) {
		for _, cell := range cells {
			b.WriteString("| " + strings.ReplaceAll(cell, "|", `\|`) + " ")
		}
		b.WriteString("|\n")
	}
	line(head)
	line(slices.Repeat([]string{"---"}, len(head)))
	for _, row := range rows {
		line(row)
	}
	return b.String()
}

// Code returns text as code in Markdown, or nothing for nothing.
func Code(text string) string {
	if text == "" {
		return ""
	}
	return "`" + text + "`"
}

// Prose returns text as prose in Markdown: signs that would make HTML or a link of it are escaped.
func Prose(text string) string {
	line := strings.Join(strings.Fields(text), " ")
	return strings.NewReplacer("<", "&lt;", ">", "&gt;", "*", `\*`, "_", `\_`).Replace(line)
}

// Flags returns a table of flags. Each must say what it is for.
func Flags(t *testing.T, set *pflag.FlagSet) string {
	t.Helper()
	var rows [][]string
	set.VisitAll(func(f *pflag.Flag) {
		argument, usage := pflag.UnquoteUsage(f)
		if usage == "" {
			t.Errorf("flag --%s has no description", f.Name)
		}
		name := Code(strings.TrimSpace("--" + f.Name + " " + argument))
		if f.Shorthand != "" {
			name = Code("-"+f.Shorthand) + ", " + name
		}
		value := f.DefValue
		// What the usage says of the default is more than the value, which may be that of this machine.
		if strings.Contains(usage, "(default: ") || value == "[]" {
			value = ""
		}
		rows = append(rows, []string{name, Code(value), Prose(usage)})
	})
	return Table([]string{"flag", "default", "meaning"}, rows)
}

// description finds a metric's name, help and labels in what prometheus.Desc.String returns.
var description = regexp.MustCompile(
	`fqName: "([^"]*)", help: "((?:[^"\\]|\\.)*)".* variableLabels: \{([^}]*)\}`)

// Metrics returns a table of the metrics of collectors, by name. Each must have a help text.
func Metrics(t *testing.T, collectors ...prometheus.Collector) string {
	t.Helper()
	var rows [][]string
	for _, c := range collectors {
		descs := make(chan *prometheus.Desc)
		go func() {
			defer close(descs)
			c.Describe(descs)
		}()
		for d := range descs {
			found := description.FindStringSubmatch(d.String())
			if found == nil || found[2] == "" {
				t.Errorf("no name or no help: %s", d)
				continue
			}
			name := found[1]
			if found[3] != "" {
				name += "{" + found[3] + "}"
			}
			rows = append(rows, []string{Code(name), Prose(found[2])})
		}
	}
	bare := func(row []string) string { return strings.NewReplacer("{", " ", "`", " ").Replace(row[0]) }
	slices.SortFunc(rows, func(a, b []string) int { return strings.Compare(bare(a), bare(b)) })
	return Table([]string{"metric", "meaning"}, slices.CompactFunc(rows, slices.Equal))
}

// Program returns what all of Landfall's programs on nodes and the controller have in common, and the
// flags and metrics of one of them. The chart's values for it begin with value.
func Program(t *testing.T, value string, flags *pflag.FlagSet, metrics ...prometheus.Collector) string {
	t.Helper()
	return "Each flag is also an environment variable: `--log-level` is `LANDFALL_LOG_LEVEL`. The chart sets what its" +
		"\n[values](../../charts/landfall/README.md) say, and appends the flags in `" + value + ".extraArgs`.\n\n" +
		"## Flags\n\n" + Flags(t, flags) + `
## Exit codes

| code | meaning |
| --- | --- |
| 0 | the program was told to end, or has done what its argument asks for |
| 1 | it failed; the last line on standard error says why |
| 2 | wrong usage: a flag, a value, an environment variable or an argument |

## Metrics

[Metrics](../guide/metrics.md) says who may read them. Those that begin with ` + "`go_` and `process_`" + ` are of
Prometheus' client library.

` + Metrics(t, metrics...)
}

// Recorder is a prometheus.Registerer that remembers what is registered.
type Recorder []prometheus.Collector

// Register implements prometheus.Registerer.
func (r *Recorder) Register(c prometheus.Collector) error {
	*r = append(*r, c)
	return nil
}

// MustRegister implements prometheus.Registerer.
func (r *Recorder) MustRegister(all ...prometheus.Collector) { *r = append(*r, all...) }

// Unregister implements prometheus.Registerer.
func (r *Recorder) Unregister(prometheus.Collector) bool { return false }
