package main

import (
	"errors"
	"testing"

	"github.com/landfall-lb/landfall/internal/lb"
)

// What --mode=auto takes, by the families that each mode can serve.
func TestChoose(t *testing.T) {
	errNone := errors.New("not on this node")
	open := func(mode string, families int) func() (kernel, error) {
		return func() (kernel, error) {
			k := kernel{mode: mode, families: allFamilies[:families], unusable: map[lb.Family]error{}}
			for _, family := range allFamilies[families:] {
				k.unusable[family] = errNone
			}
			if families == 0 {
				return k, errNone
			}
			return k, nil
		}
	}
	for _, test := range []struct {
		name               string
		nftables, iptables int
		want               string
	}{
		{"both can", 2, 2, modeNftables},
		{"no iptables", 2, 0, modeNftables},
		{"no nftables", 0, 2, modeIptables},
		{"no nftables, and one family", 0, 1, modeIptables},
		{"nftables for one family only", 1, 2, modeIptables},
		{"a node with one family", 1, 1, modeNftables},
		{"one family and no iptables", 1, 0, modeNftables},
		{"neither", 0, 0, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			k, why, err := choose(open(modeNftables, test.nftables), open(modeIptables, test.iptables))
			if test.want == "" {
				if !errors.Is(err, errNone) {
					t.Errorf("%v instead of what is missing", err)
				}
				return
			}
			if err != nil || k.mode != test.want || why == "" {
				t.Errorf("%s because %q, %v; want %s", k.mode, why, err, test.want)
			}
		})
	}
}

func TestOlder(t *testing.T) {
	for release, want := range map[string]bool{"5.12.19": true, "5.13.0": false, "4.19.0-amd64": true,
		"6.1.0-28-amd64": false, "5.4": true, "": false, "unknown": false} {
		if got := older(release, oldest); got != want {
			t.Errorf("%q is older than %s: %v", release, oldest, got)
		}
	}
}
