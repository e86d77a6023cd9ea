package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestVersionOfATree asks the Makefile for the version that it stamps into programs, image and release:
// that of git describe, or on the way to the chart's where no tag is.
func TestVersionOfATree(t *testing.T) {
	tree := t.TempDir()
	for _, file := range []string{"Makefile", "charts/landfall/Chart.yaml"} {
		text, err := os.ReadFile(filepath.Join("..", file))
		if err == nil {
			err = os.MkdirAll(filepath.Dir(filepath.Join(tree, file)), 0o755)
		}
		if err == nil {
			err = os.WriteFile(filepath.Join(tree, file), text, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	run := func(name string, args ...string) string {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), name, args...)
		cmd.Dir = tree
		cmd.Env = append(os.Environ(), "GIT_CONFIG_GLOBAL=/dev/null", "GIT_CONFIG_SYSTEM=/dev/null", "VERSION=", "MAKEFLAGS=")
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%s %s: %v: %s", name, strings.Join(args, " "), err, out)
		}
		return strings.TrimSpace(string(out))
	}
	git := func(args ...string) string {
		t.Helper()
		return run("git", append([]string{"-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"}, args...)...)
	}
	want := func(version string) {
		t.Helper()
		for target, stamp := range map[string]string{
			"bin/landfall-proxy": "internal/ops.Version=" + version + "'",
			"image":              "--version " + version + " ",
			"release":            "'" + version + "'",
		} {
			if got := run("make", "--dry-run", "--no-print-directory", target); !strings.Contains(got, stamp) {
				t.Errorf("make %s does not say %s:\n%s", target, stamp, got)
			}
		}
	}
	chart := strings.TrimSpace(run("sed", "-n", "s/^version: //p", "charts/landfall/Chart.yaml"))
	want(chart + "-dev")

	git("init", "--quiet")
	git("add", ".")
	git("commit", "--quiet", "--message", "first")
	commit := func() string { return "g" + git("rev-parse", "--short", "HEAD") }
	want(chart + "-dev." + commit())
	git("tag", "v1.2.3-rc.4")
	git("tag", "another")
	want("1.2.3-rc.4")
	git("commit", "--quiet", "--allow-empty", "--message", "second")
	want("1.2.3-rc.4-1-" + commit())
	run("sed", "-i", "1i # changed", "Makefile")
	want("1.2.3-rc.4-1-" + commit() + "-dirty")
}
