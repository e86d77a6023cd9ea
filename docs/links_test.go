package docs

import (
	"io/fs"
	"os"
	"path"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode"
)

// repository is the folder above this package's.
var repository = os.DirFS("..")

var (
	codeBlock = regexp.MustCompile("(?ms)^ *```.*?^ *```$")
	codeSpan  = regexp.MustCompile("`[^`\n]*`")
	// link is [text](target), or a line with a target for [text][name].
	link    = regexp.MustCompile(`(?m)(?:\]\(|^\[[^]\n]+\]: )([^)\s]+)\)?`)
	heading = regexp.MustCompile(`(?m)^#+ +(.*)$`)
	// mention is a page named in a comment or a message.
	mention = regexp.MustCompile(`(?:^|[^\w./-])(docs/[\w./-]+\.(?:md|json))`)
)

// TestLinks follows each link between the pages of the repository, with its fragment.
func TestLinks(t *testing.T) {
	pages := map[string]string{}
	walk(t, func(file, text string) {
		// The introduction is a part of docs/design/conformance.md, and its links are for there.
		if strings.HasSuffix(file, ".md") && file != "e2e/conformance/introduction.md" {
			pages[file] = codeBlock.ReplaceAllString(text, "")
		}
	})
	links := 0
	for file, text := range pages {
		for _, found := range link.FindAllStringSubmatch(codeSpan.ReplaceAllString(text, ""), -1) {
			if problem := follow(pages, file, found[1]); problem != "" {
				t.Errorf("%s: %s: %s", file, found[1], problem)
			}
			links++
		}
	}
	if links < 120 {
		t.Errorf("found %d links: the test does not see them", links)
	}
}

// follow returns what is wrong with a link in a file, or "".
func follow(pages map[string]string, file, to string) string {
	if strings.Contains(to, "://") || strings.HasPrefix(to, "mailto:") {
		return ""
	}
	to, fragment, _ := strings.Cut(to, "#")
	if to == "" {
		to = file
	} else {
		to = path.Join(path.Dir(file), to)
	}
	if _, err := fs.Stat(repository, to); err != nil {
		return "there is no such file"
	}
	if fragment != "" && !slices.Contains(anchors(pages[to]), fragment) {
		return "the page has no such heading"
	}
	return ""
}

// anchors returns the fragments of a page's headings, as GitHub makes them.
func anchors(text string) (all []string) {
	for _, found := range heading.FindAllStringSubmatch(text, -1) {
		name := link.ReplaceAllString(found[1], "")
		all = append(all, strings.Map(func(r rune) rune {
			switch {
			case r == ' ':
				return '-'
			case r == '-' || r == '_' || unicode.IsLetter(r) || unicode.IsDigit(r):
				return unicode.ToLower(r)
			}
			return -1
		}, name))
	}
	return all
}

// TestMentions looks for each page that a source, a message or a value names.
func TestMentions(t *testing.T) {
	mentions := 0
	walk(t, func(file, text string) {
		if strings.HasPrefix(file, "charts/testdata/") { // values of an older chart
			return
		}
		for _, found := range mention.FindAllStringSubmatch(text, -1) {
			mentions++
			if _, err := fs.Stat(repository, found[1]); err != nil {
				t.Errorf("%s names %s, which does not exist", file, found[1])
			}
		}
	})
	if mentions < 50 {
		t.Errorf("found %d mentions: the test does not see them", mentions)
	}
}

// walk calls visit for each text file of the repository.
func walk(t *testing.T, visit func(file, text string)) {
	t.Helper()
	kinds := []string{".md", ".go", ".yaml", ".txt", ".json", ".tpl"}
	err := fs.WalkDir(repository, ".", func(file string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && slices.Contains([]string{".git", "bin", "dist", "node_modules"}, d.Name()):
			return fs.SkipDir
		case d.IsDir() || !slices.Contains(kinds, path.Ext(file)):
			return nil
		}
		text, err := fs.ReadFile(repository, file)
		if err == nil {
			visit(file, string(text))
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}
