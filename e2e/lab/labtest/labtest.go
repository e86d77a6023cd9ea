// Package labtest starts labs for tests.
package labtest

import (
	"maps"
	"os"
	"slices"
	"testing"

	"github.com/landfall-lb/landfall/e2e/lab"
)

// logLines is how many of each log's last lines a failed test shows.
const logLines = 40

// Start starts a lab that ends with the test. A test that fails shows the end of each process's
// log. Without root the test is skipped.
func Start(t testing.TB, cluster lab.Cluster, options lab.Options) *lab.Lab {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("the lab makes network namespaces: needs root")
	}
	if options.Progress == nil {
		options.Progress = func(line string) { t.Log(line) }
	}
	l, err := lab.Start(t.Context(), cluster, options)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			logs := l.Logs(logLines)
			for _, name := range slices.Sorted(maps.Keys(logs)) {
				t.Logf("the last lines of %s:\n%s", name, logs[name])
			}
		}
		if err := l.Close(); err != nil {
			t.Errorf("close the lab: %v", err)
		}
	})
	return l
}
