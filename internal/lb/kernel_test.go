package lb

import "testing"

func TestBeforeNftables(t *testing.T) {
	for release, want := range map[string]bool{"5.12.19": true, "5.13.0": false, "4.19.0-amd64": true,
		"6.1.0-28-amd64": false, "5.4": true, "": false, "unknown": false, "5": false} {
		if got := BeforeNftables(release); got != want {
			t.Errorf("%q is before %s: %v", release, NftablesSince, got)
		}
	}
}
