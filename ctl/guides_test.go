package main

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/landfall-lb/landfall/ctl/explain"
)

var (
	// commandLine is a command at the beginning of a line of a block, or in backquotes.
	commandLine = regexp.MustCompile("(?m)(?:^|`|&& )(?:landfallctl|kubectl landfall) ([^`\n]*)")
	// prose goes on like this behind the name at the beginning of a line; __complete is cobra's own.
	prose = regexp.MustCompile(`^(shows|needs|__complete) `)
	// joined are lines that a backslash joins.
	joined = regexp.MustCompile(`\\\n\s*`)
)

// Each command of landfallctl in the documentation, in the chart and in the cures that it prints itself
// is one that it has, with flags that it has: readers copy them.
func TestCommandsInTheDocumentation(t *testing.T) {
	texts := map[string]string{}
	for _, pattern := range []string{"../docs/*/*.md", "../*.md", "../charts/*/*.md", "../charts/landfall/templates/NOTES.txt"} {
		files, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			content, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			texts[file] = joined.ReplaceAllString(string(content), " ")
		}
	}
	for reason, entry := range explain.Reasons {
		texts["cure of "+string(reason)] = entry.Cure
	}
	found := 0
	for where, text := range texts {
		for _, match := range commandLine.FindAllStringSubmatch(text, -1) {
			if prose.MatchString(match[1]) {
				continue
			}
			found++
			if problem := problemOf(match[1]); problem != "" {
				t.Errorf("%s: landfallctl %s: %s", where, match[1], problem)
			}
		}
	}
	if found < 60 {
		t.Errorf("found %d commands, fewer than there were", found)
	}
	for line, want := range map[string]bool{"explain svc web -n shop": true, "explain svc --no-such": false, "bungle": false,
		"migrate metallb --apply --chart x | tee log": true, "drain n1 && kubectl drain n1 --ignore-daemonsets": true,
		"explain thing": false, "explain svc/web": true, "explain thing/web": false} {
		if got := problemOf(line) == ""; got != want {
			t.Errorf("%q is taken: %v, want %v", line, got, want)
		}
	}
}

// problemOf says what is wrong with a command line; "" for nothing.
func problemOf(line string) string {
	for _, end := range []string{"|", "&&", ">", "#", ";", "…"} { // what follows is another's
		line, _, _ = strings.Cut(line, end)
	}
	root := newCommand("landfallctl")
	cmd, rest, err := root.Find(strings.Fields(line))
	if err != nil {
		return err.Error()
	}
	var positional []string
	for i := 0; i < len(rest); i++ {
		name, _, hasValue := strings.Cut(strings.Trim(rest[i], "[]'\""), "=")
		flag := cmd.Flag(strings.TrimLeft(name, "-"))
		switch {
		case !strings.HasPrefix(name, "-") || name == "-":
			positional = append(positional, rest[i])
			continue
		case len(name) == 2:
			flag = cmd.Flags().ShorthandLookup(name[1:])
			if inherited := cmd.InheritedFlags().ShorthandLookup(name[1:]); flag == nil {
				flag = inherited
			}
		}
		if flag == nil && name != "--help" && name != "-h" && name != "--version" {
			return "no flag " + name
		}
		if flag != nil && flag.NoOptDefVal == "" && !hasValue {
			i++ // its value
		}
	}
	if cmd.HasSubCommands() && len(positional) > 0 && cmd != root {
		kind, _, _ := strings.Cut(positional[0], "/")
		if of, _, err := cmd.Find([]string{kind}); err != nil || of == cmd || kind == positional[0] {
			return "no command " + positional[0]
		}
	}
	return ""
}
