//go:build vm

package main

import (
	"log/slog"
	"testing"
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
	if older(release(), oldest) {
		want = modeIptables
	}
	if k.mode != want || len(k.families) != len(allFamilies) {
		t.Errorf("Linux %s: mode %s for %v, want %s for %v", release(), k.mode, k.families, want, allFamilies)
	}
}
