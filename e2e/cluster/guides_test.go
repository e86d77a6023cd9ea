package cluster

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/landfall-lb/landfall/e2e/lab"
)

// TestGuide accounts for each command of the guides: the story has it, or leaves it out for a reason.
func TestGuide(t *testing.T) {
	repository, err := lab.FindRepository(".")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := documentedRole(repository); err != nil {
		t.Error(err)
	}
	pages := map[string]string{}
	for _, file := range []string{readme, install} {
		content, err := os.ReadFile(filepath.Join(repository, file))
		if err != nil {
			t.Fatal(err)
		}
		pages[file] = string(content)
	}
	known := map[string][]string{}
	for _, s := range guide {
		if _, err := s.find(pages[s.file]); err != nil {
			t.Error(err)
		}
		known[s.file] = append(known[s.file], s.begins)
	}
	for s, why := range notRun {
		if _, err := s.find(pages[s.file]); err != nil {
			t.Errorf("%v (%s)", err, why)
		}
		known[s.file] = append(known[s.file], s.begins)
	}
	for file, page := range pages {
		for _, command := range commands(page) {
			accounted := false
			for _, begins := range known[file] {
				accounted = accounted || strings.HasPrefix(command, begins)
			}
			if !accounted {
				t.Errorf("%s: the story neither runs nor leaves out %q", file, command)
			}
		}
	}
}
