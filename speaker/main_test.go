package main

import (
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
