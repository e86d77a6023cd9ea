//go:build vm

package main

import (
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/nstest"
)

// The mode auto takes nftables for both families on a kernel that is new enough, and iptables for
// both on an older one.
func TestVMModeOfAuto(t *testing.T) {
	k, err := open(t.Context(), modeAuto, slog.New(slog.NewTextHandler(t.Output(), nil)))
	if err != nil {
		t.Fatal(err)
	}
	defer k.close()
	want := modeNftables
	if lb.BeforeNftables(release()) {
		want = modeIptables
	}
	if k.mode != want || len(k.families) != len(allFamilies) {
		t.Errorf("Linux %s: mode %s for %v, want %s for %v", release(), k.mode, k.families, want, allFamilies)
	}
}

// The trial transaction has the kernel load the modules of nftables that a node does not have yet, in a network
// namespace too.
func TestVMTrialLoadsModules(t *testing.T) {
	// A module goes after those that use it, and when the kernel has removed the tables of other tests.
	for deadline := time.Now().Add(5 * time.Minute); len(nftModules(t)) > 0; time.Sleep(100 * time.Millisecond) {
		out, err := exec.Command("modprobe", append([]string{"-r", "-a"}, nftModules(t)...)...).CombinedOutput()
		if time.Now().After(deadline) {
			t.Fatalf("modprobe -r: %v: %s", err, out)
		}
	}
	slow := time.AfterFunc(2*time.Minute, func() { t.Logf("after two minutes:\n%s", blocked()) })
	defer slow.Stop()
	started := time.Now()
	nstest.New(t).Do(t, func() error {
		k, err := openNftables(modeNftables, slog.New(slog.NewTextHandler(t.Output(), nil)))
		if err == nil {
			defer k.close()
			t.Logf("the kernel has tried the rules for %v after %s: %v", k.families, time.Since(started), nftModules(t))
		}
		if len(k.families) != len(allFamilies) {
			t.Errorf("without %v", k.unusable[lb.IPv4])
		}
		return err
	})
}

// nftModules returns the modules that are loaded of those that are called nft and something.
func nftModules(t *testing.T) (names []string) {
	t.Helper()
	text, err := os.ReadFile("/proc/modules")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if name, _, _ := strings.Cut(line, " "); strings.HasPrefix(name, "nft_") {
			names = append(names, name)
		}
	}
	return names
}

// blocked returns what this process and each modprobe are doing in the kernel.
func blocked() string {
	var text strings.Builder
	stacks, _ := filepath.Glob("/proc/[0-9]*/task/*/stack")
	for _, stack := range stacks {
		process := strings.TrimSuffix(stack, "stack")
		name, _ := os.ReadFile(process + "comm")
		if strings.HasPrefix(string(name), "modprobe") || strings.HasPrefix(process, fmt.Sprintf("/proc/%d/", os.Getpid())) {
			what, _ := os.ReadFile(stack)
			fmt.Fprintf(&text, "%s %s%s\n", process, name, what)
		}
	}
	return text.String()
}
