package cluster

import (
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/landfall-lb/landfall/e2e/lab"
)

// TestGuide accounts for each command of the pages that the stories follow: one runs it, or leaves it
// out for a reason.
func TestGuide(t *testing.T) {
	repository, err := lab.FindRepository(".")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := documentedRoles(repository); err != nil {
		t.Error(err)
	}
	pages, known := map[string]string{}, map[string][]string{}
	for _, s := range slices.Concat(guide, takeover, giveBack, byCommand, gated, slices.Collect(maps.Keys(notRun))) {
		if pages[s.file] == "" {
			content, err := os.ReadFile(filepath.Join(repository, s.file))
			if err != nil {
				t.Fatal(err)
			}
			pages[s.file] = string(content)
		}
		if _, err := s.find(pages[s.file]); err != nil {
			t.Error(err)
		}
		known[s.file] = append(known[s.file], s.begins)
	}
	for file, page := range pages {
		for _, command := range commands(page) {
			begins := func(with string) bool { return strings.HasPrefix(command, with) }
			if !slices.ContainsFunc(known[file], begins) {
				t.Errorf("%s: no story runs or leaves out %q", file, command)
			}
		}
	}
}

func TestShellCommands(t *testing.T) {
	got := shellCommands("kubectl get nodes\n# a comment, and what a command prints:\nNAME   READY\n" +
		"helm install x \\\n  --set a=b\nkubectl patch x -p '{\"a\":{\n  \"b\":1}}'\n" +
		"kubectl apply -f - <<EOF\nkind: 'x\nEOF\nbin/landfallctl a &&\n  landfallctl b\n")
	want := []string{"kubectl get nodes", "helm install x \\\n  --set a=b", "kubectl patch x -p '{\"a\":{\n  \"b\":1}}'",
		"kubectl apply -f - <<EOF\nkind: 'x\nEOF", "bin/landfallctl a &&\n  landfallctl b"}
	if !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}
