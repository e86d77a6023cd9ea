package main

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/e2e/vm"
)

func TestSuitesAreChosen(t *testing.T) {
	for _, c := range []struct {
		names, pattern, want string
	}{
		{"", "", "iptables nftables iptables-ipip nftables-ipip auto l2 rescue direct offload ipvs vrf"}, {"l2", "", "l2"}, {"ipvs,iptables", "TestX", "ipvs iptables"},
	} {
		chosen, err := choose(c.names, c.pattern)
		if err != nil {
			t.Error(err)
		}
		var got []string
		for _, s := range chosen {
			got = append(got, s.name)
			if c.pattern != "" && s.pattern != c.pattern || s.pattern == "" {
				t.Errorf("%s runs %q", s.name, s.pattern)
			}
		}
		if strings.Join(got, " ") != c.want {
			t.Errorf("%q: %v, want %s", c.names, got, c.want)
		}
	}
	for _, names := range []string{"none", "l2,none", "l2,"} {
		if _, err := choose(names, ""); err == nil {
			t.Errorf("%q was taken for suites", names)
		}
	}
}

// The machine gets a program once, however many suites start it.
func TestProgramsOfSeveralSuites(t *testing.T) {
	got := strings.Join(started(suites), " ")
	if want := "kube-proxy landfall-proxy landfall-speaker landfallctl"; got != want {
		t.Errorf("the suites start %s, want %s", got, want)
	}
}

// A suite whose folder or test is gone would run nothing, and pass.
func TestSuitesHaveTests(t *testing.T) {
	for _, s := range suites {
		found := false
		prefix := strings.Trim(s.pattern, "^$")
		files, err := filepath.Glob(filepath.Join("../../..", s.folder, "*_test.go"))
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			tagged := strings.HasPrefix(string(text), "//go:build vm\n")
			found = found || strings.Contains(string(text), "\nfunc "+prefix) && tagged == (s.tags == "vm")
		}
		if !found {
			t.Errorf("%s has no test %s for the tags %q", s.folder, s.pattern, s.tags)
		}
	}
}

func TestResultsAreTold(t *testing.T) {
	var out strings.Builder
	err := tell(&out, "bin/vm", vm.Results{Kernel: "6.1.0-1-amd64", Programs: []vm.Result{
		{Program: "l2", Output: "--- PASS: TestA\n    --- PASS: TestA/one\n--- FAIL: TestB\n--- SKIP: TestC\n",
			Err: errors.New("exit status 1"), Elapsed: time.Minute},
		{Program: "ipvs", Output: "PASS\n", Elapsed: time.Second},
	}}, 5*time.Minute)
	if err == nil || !strings.Contains(err.Error(), "l2: exit status 1: see bin/vm/l2.log") {
		t.Errorf("error %v", err)
	}
	const want = `
Linux 6.1.0-1-amd64
suite         passed failed skipped  time
l2                 2      1       1  1m0s
ipvs               0      0       0  1s
total              2      1       1  5m0s
`
	if out.String() != want {
		t.Errorf("told\n%s, want\n%s", out.String(), want)
	}
	// What ran nothing shows nothing.
	if !strings.Contains(err.Error(), "ipvs: no test ran") {
		t.Errorf("error %v", err)
	}
}
