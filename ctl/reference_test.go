package main

import (
	"fmt"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/landfall-lb/landfall/internal/reference"
)

// TestReference compares docs/reference/landfallctl.md with what the commands say of themselves.
func TestReference(t *testing.T) {
	root := newCommand("landfallctl")
	var b strings.Builder
	fmt.Fprintf(&b, `# landfallctl, command by command

`+"```"+`
landfallctl explain svc web -n shop
`+"```"+`

[landfallctl](../guide/landfallctl.md) shows its use. `+"`make build`"+` builds `+"`bin/landfallctl`"+`; under the name
`+"`kubectl-landfall`"+` in the `+"`PATH`"+` it is `+"`kubectl landfall`"+`.

## Exit codes

| code | meaning |
| --- | --- |
| %d | nothing is wrong |
| %d | something is wrong, or is about to be |
| %d | landfallctl cannot tell: wrong usage, no answer of the API server, no permission |

## Flags of all commands

%s`, exitWell, exitWrong, exitUnable, reference.Flags(t, root.PersistentFlags()))
	root.InitDefaultCompletionCmd()
	describe(t, &b, root)
	reference.Page(t, "landfallctl", b.String())
}

// describe writes a section for each command below a command, in alphabetical order.
func describe(t *testing.T, b *strings.Builder, parent *cobra.Command) {
	t.Helper()
	for _, c := range parent.Commands() {
		if c.Hidden || c.Name() == "completion" { // cobra's, with long texts about each shell
			continue
		}
		if c.Runnable() {
			text := c.Long
			if text == "" {
				text = c.Short + "."
			}
			if c.Short == "" {
				t.Errorf("%s has no description", c.CommandPath())
			}
			fmt.Fprintf(b, "\n## %s\n\n```\n%s\n```\n\n%s\n", c.CommandPath(), c.UseLine(), reference.Prose(text))
			if c.Example != "" {
				fmt.Fprintf(b, "\n```\n%s\n```\n", strings.ReplaceAll(c.Example[2:], "\n  ", "\n"))
			}
			if c.LocalNonPersistentFlags().HasFlags() {
				fmt.Fprintf(b, "\n%s", reference.Flags(t, c.LocalNonPersistentFlags()))
			}
		}
		describe(t, b, c)
	}
}
