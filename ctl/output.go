package main

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"sigs.k8s.io/yaml"

	"github.com/landfall-lb/landfall/ctl/explain"
)

// write writes a value as JSON or YAML, or its text in every other format.
func write(w io.Writer, format string, value any, text string) error {
	switch format {
	case "json":
		out, err := json.MarshalIndent(value, "", "  ")
		if err != nil {
			return err
		}
		text = string(out) + "\n"
	case "yaml":
		out, err := json.Marshal(value)
		if err == nil {
			out, err = yaml.JSONToYAML([]byte(plain(string(out)))) // which refuses control characters
		}
		if err != nil {
			return err
		}
		text = string(out)
	}
	_, err := io.WriteString(w, text)
	return err
}

func (v versions) text() string {
	var out strings.Builder
	fmt.Fprintf(&out, "landfallctl: %s\n", v.Client)
	if v.APIServer != "" {
		fmt.Fprintf(&out, "API server: %s\n", v.APIServer)
	}
	for _, image := range slices.Sorted(maps.Keys(v.Images)) {
		fmt.Fprintf(&out, "%d containers: %s\n", v.Images[image], image)
	}
	if v.NotRead != "" {
		fmt.Fprintf(&out, "Landfall's pods: %s\n", v.NotRead)
	}
	return out.String()
}

// verdictText renders a verdict: the verdict itself, the checklist, the most likely cause and what
// cures it. Unless wide, it leaves out the parts of checks that are well.
func verdictText(v explain.Verdict, wide bool) string {
	var out strings.Builder
	fmt.Fprintf(&out, "%s\n", oneLine(v.Line))
	if len(v.Checks) > 0 {
		fmt.Fprintln(&out)
	}
	checksText(&out, v.Checks, "  ", wide)
	if v.Cause != "" || v.Cure != "" {
		fmt.Fprintln(&out)
	}
	if v.Cause != "" {
		fmt.Fprintf(&out, "Most likely: %s\n", oneLine(v.Cause))
	}
	if v.Cure != "" {
		fmt.Fprintf(&out, "Cure: %s\n", oneLine(v.Cure))
	}
	return out.String()
}

func checksText(out *strings.Builder, checks []explain.Check, indent string, wide bool) {
	for _, c := range checks {
		text := c.Text
		if c.Reason != "" && c.Level != explain.OK {
			text += fmt.Sprintf(" (%s)", c.Reason)
		}
		if c.Level == explain.Unknown && c.Cure != "" {
			text += "; " + c.Cure // each lacks another rule
		}
		fmt.Fprintf(out, "%s%-7s  %s: %s\n", indent, c.Level, c.What, oneLine(text))
		var parts []explain.Check
		for _, p := range c.Parts {
			if wide || p.Level.Worse(explain.OK) {
				parts = append(parts, p)
			}
		}
		checksText(out, parts, indent+"  ", wide)
	}
}

// outcome is the error that gives the exit code of a verdict.
func outcome(v explain.Verdict) error {
	switch v.Level {
	case explain.Wrong, explain.Warning:
		return errWrong
	case explain.Unknown:
		return fmt.Errorf("%s", v.Line)
	}
	return nil
}
