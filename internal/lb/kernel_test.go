package lb

import "testing"

func TestKeepsOffloaded(t *testing.T) {
	for release, want := range map[string]bool{"6.1.0-50-amd64": true, "6.3.9": true, "6.4.0": false,
		"6.12.117+deb13-amd64": false, "5.15": true, "7.0.1": false} {
		if got := KeepsOffloaded(release); got != want {
			t.Errorf("%q keeps what is offloaded: %v", release, got)
		}
	}
}

func TestBeforeNftables(t *testing.T) {
	for release, want := range map[string]bool{"5.12.19": true, "5.13.0": false, "4.19.0-amd64": true,
		"6.1.0-28-amd64": false, "5.4": true, "": false, "unknown": false, "5": false} {
		if got := BeforeNftables(release); got != want {
			t.Errorf("%q is before %s: %v", release, NftablesSince, got)
		}
	}
}
