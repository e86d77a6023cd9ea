package docs

import (
	"io/fs"
	"regexp"
	"strings"
	"testing"
)

// opening is a title, one paragraph at most, and an example.
var opening = regexp.MustCompile("(?s)\\A# [^\n]+\n\n(?:[^`#|\n-][^\n]*\n(?:[^\n]+\n)*\n)?```")

// TestPagesOpenWithAnExample: who opens a page of the guide or the reference sees first what to type. Other
// tests give the manifests to an API server, the commands of helm to helm, and those of landfallctl to it.
func TestPagesOpenWithAnExample(t *testing.T) {
	pages := 0
	for _, pattern := range []string{"docs/guide/*.md", "docs/reference/*.md"} {
		files, err := fs.Glob(repository, pattern)
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			text, err := fs.ReadFile(repository, file)
			if err != nil {
				t.Fatal(err)
			}
			if pages++; !opening.Match(text) {
				begin, _, _ := strings.Cut(string(text), "\n## ")
				t.Errorf("%s does not open with an example:\n%.300s", file, begin)
			}
		}
	}
	if pages < 35 {
		t.Errorf("found %d pages: the test does not see them", pages)
	}
}
