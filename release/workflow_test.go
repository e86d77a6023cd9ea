package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

// workflow is what a file of .github/workflows says of when it runs and what it needs.
type workflow struct {
	On   map[string]any
	Jobs map[string]struct {
		Needs any    // a name or several
		Uses  string // another workflow
		Steps []step
	}
}

type step struct{ Run string }

func readWorkflow(t *testing.T, file string) (w workflow) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("../.github/workflows", file))
	if err == nil {
		// The key "on" is the value true in YAML 1.1.
		err = yaml.Unmarshal([]byte(strings.Replace(string(text), "\non:", "\n\"on\":", 1)), &w)
	}
	if err != nil {
		t.Fatal(err)
	}
	return w
}

// TestNothingIsReleasedUntested looks at what is published: only what has passed the test that each push and each pull
// request runs, and that contributors are told to run.
func TestNothingIsReleasedUntested(t *testing.T) {
	ci, release := readWorkflow(t, "ci.yaml"), readWorkflow(t, "release.yaml")
	for _, event := range []string{"push", "pull_request", "workflow_call"} {
		if _, ok := ci.On[event]; !ok {
			t.Errorf("ci.yaml does not run on %s", event)
		}
	}
	if !slices.Contains(ci.Jobs["test"].Steps, step{Run: ".ci/run"}) {
		t.Error("ci.yaml does not run .ci/run")
	}
	var tests []string // the jobs of the release that are ci.yaml
	for name, job := range release.Jobs {
		if job.Uses == "./.github/workflows/ci.yaml" {
			tests = append(tests, name)
		}
	}
	needs, _ := release.Jobs["publish"].Needs.([]any)
	if !slices.ContainsFunc(tests, func(name string) bool { return slices.Contains(needs, any(name)) }) {
		t.Errorf("publish needs %v, and none of the tests %v", needs, tests)
	}
	if text, err := os.ReadFile("../.ci/run"); err != nil || !slices.Contains(strings.Fields(string(text)), "test") {
		t.Errorf(".ci/run does not run make test: %v", err)
	}
}
