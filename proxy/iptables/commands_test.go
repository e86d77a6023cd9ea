package iptables

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/landfall-lb/landfall/internal/lb"
)

// Tools whose rules the kernel would refuse are refused by name, before any rule is written.
func TestDetectRefusesTools(t *testing.T) {
	for _, tt := range []struct {
		version, variant string
		want             string // a part of the error; "" for none
	}{
		{"1.6.1", "", "1.6.1 is too old: 1.6.2 is the oldest"},
		{"1.8.5", "nf_tables", ""},
		{"1.8.6", "nf_tables", "iptables-nft 1.8.6 loses masks"},
		{"1.8.7", "nf_tables", "iptables-nft 1.8.7 loses masks"},
		{"1.8.7", "legacy", ""},
		{"1.8.8", "nf_tables", ""},
	} {
		folder, name := t.TempDir(), "iptables-nft"
		if tt.variant == "legacy" {
			name = "iptables-legacy"
		}
		script := fmt.Sprintf("#!/bin/sh\ncase \"$*\" in *version*) echo 'iptables v%s (%s)' ;; *) echo ':LF-SERVICES - [0:0]' ;; esac\n",
			tt.version, tt.variant)
		for _, program := range []string{"iptables", name + "-save", name + "-restore", "iptables-save", "iptables-restore"} {
			if err := os.WriteFile(filepath.Join(folder, program), []byte(script), 0o755); err != nil {
				t.Fatal(err)
			}
		}
		t.Setenv("PATH", folder+":/bin:/usr/bin")
		_, err := Detect(t.Context(), lb.IPv4)
		if tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) {
			t.Errorf("%s (%s): %v, want %q", tt.version, tt.variant, err, tt.want)
		}
	}
}
