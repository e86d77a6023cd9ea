package main

import (
	"log/slog"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/pflag"
)

// TestListenAddress must be said to be wrong by the name of the flag, with the value and one that
// would be right.
func TestListenAddress(t *testing.T) {
	check := func(args ...string) error {
		var f flags
		set := pflag.NewFlagSet("speaker", pflag.ContinueOnError)
		f.add(set)
		if err := set.Parse(args); err != nil {
			t.Fatal(err)
		}
		_, _, err := f.check()
		return err
	}
	for _, args := range [][]string{nil, {"--bgp-listen="}, {"--bgp-listen=:179"}, {"--bgp-listen=[::]:1179"}} {
		if err := check(args...); err != nil {
			t.Errorf("%v: %v", args, err)
		}
	}
	err := check("--bgp-listen=node-1:179")
	if err == nil ||
		!strings.HasPrefix(err.Error(), `--bgp-listen: "node-1:179" is not an address and a port such as :179`) {
		t.Errorf("%v", err)
	}
}

// A boot that cannot be read is logged, with the reason.
func TestBootID(t *testing.T) {
	for file, says := range map[string]bool{bootIDFile: false, filepath.Join(t.TempDir(), "none"): true} {
		var log strings.Builder
		id := bootID(file, slog.New(slog.NewTextHandler(&log, nil)))
		if (id == "") != says || strings.Contains(log.String(), "no such file") != says {
			t.Errorf("%s: %q, logged %q", file, id, log.String())
		}
	}
}
