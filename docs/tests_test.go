package docs

import (
	"regexp"
	"slices"
	"strings"
	"testing"
)

var (
	declaredTest = regexp.MustCompile(`(?m)^func ((?:Test|Benchmark|Fuzz)\w+)\(`)
	// namedTest is a test that a page names. An ellipsis stands for the rest of several names.
	namedTest = regexp.MustCompile(`\b((?:Test|Benchmark|Fuzz)[A-Z]\w*)(…?)`)
)

// TestNamedTests looks for each test, benchmark and fuzz target that a page names. In a block of commands the beginning
// of a name will do, as for go test -run.
func TestNamedTests(t *testing.T) {
	var declared []string
	pages := map[string]string{}
	walk(t, func(file, text string) {
		switch {
		case strings.HasSuffix(file, "_test.go"):
			for _, found := range declaredTest.FindAllStringSubmatch(text, -1) {
				declared = append(declared, found[1])
			}
		case strings.HasSuffix(file, ".md"):
			pages[file] = text
		}
	})
	names := 0
	look := func(file, text string, beginnings bool) {
		for _, found := range namedTest.FindAllStringSubmatch(text, -1) {
			names++
			if !slices.ContainsFunc(declared, func(name string) bool {
				return name == found[1] || (beginnings || found[2] != "") && strings.HasPrefix(name, found[1])
			}) {
				t.Errorf("%s names %s, which does not exist", file, found[0])
			}
		}
	}
	for file, text := range pages {
		look(file, codeBlock.ReplaceAllString(text, ""), false)
		look(file, strings.Join(codeBlock.FindAllString(text, -1), "\n"), true)
	}
	if names < 120 {
		t.Errorf("found %d names: the test does not see them", names)
	}
}
