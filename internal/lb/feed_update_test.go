package lb

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"reflect"
	"testing"
)

// Each update can follow each other one, as they come from the socket: JSON leaves out maps that are
// empty, so those of an update may be nil.
func TestUpdatesOfAFeedAddUp(t *testing.T) {
	const vip, other = "192.0.2.1", "192.0.2.2"
	state := func(previous, ring bool) (said string) {
		said = "{"
		if previous || ring {
			said += `"former":{"` + vip + `":["10.0.0.1"]}`
		}
		if ring {
			said += `,"ring":{"` + vip + `":["10.0.0.2"]}`
		}
		return said + "}"
	}
	read := func(line string) (u FeedUpdate) {
		t.Helper()
		if err := json.Unmarshal([]byte(line), &u); err != nil {
			t.Fatal(err)
		}
		return u
	}
	const lacks = `{"former":{"` + vip + `":[]},"gates":true,"unannounced":{"` + vip + `":{"reason":"NoLocalBackends"}}}`
	const announced = `{"former":{"` + vip + `":[]},"gates":true}`
	for _, first := range []string{state(false, false), state(true, false), state(true, true), lacks, announced} {
		for change, want := range map[string]string{
			`{"changes":true,"former":{"` + vip + `":[]},"ring":{"` + vip + `":["10.0.0.3"]}}`: `{"former":{"` + vip +
				`":[]},"ring":{"` + vip + `":["10.0.0.3"]}}`,
			`{"changes":true,"former":{"` + vip + `":["10.0.0.1"]}}`:                 state(true, false),
			`{"changes":true,"ended":["` + vip + `"]}`:                               state(false, false),
			`{"changes":true,"former":{"` + other + `":[]},"ended":["` + vip + `"]}`: `{"former":{"` + other + `":[]}}`,
			state(true, true):                  state(true, true),
			lacks:                              lacks,
			announced:                          announced,
			`{"changes":true,` + lacks[1:]:     lacks,
			`{"changes":true,` + announced[1:]: announced,
			`{"changes":true,"former":{"` + vip + `":[]}}`: `{"former":{"` + vip + `":[]}}`,
		} {
			var u FeedUpdate
			u.Apply(read(first))
			u.Apply(read(change))
			said := func(u FeedUpdate) string { return fmt.Sprint(u.Previous, u.Ring, u.Unannounced, u.Gates) }
			if got, want := said(u), said(read(want)); got != want {
				t.Errorf("%s and then %s: %s, want %s", first, change, got, want)
			}
			since := u.Since(read(first))
			again := read(first)
			again.Apply(since)
			if !reflect.DeepEqual(again.vips(), u.vips()) {
				t.Errorf("%s, and what is new since %s: %v, want %v", first, change, again.vips(), u.vips())
			}
			if got, want := fmt.Sprint(again.Unannounced, again.Gates), fmt.Sprint(u.Unannounced, u.Gates); got != want {
				t.Errorf("%s, and what is new since %s: unannounced %s, want %s", first, change, got, want)
			}
			at := netip.MustParseAddr(vip)
			if _, named := since.Previous[at]; !named && u.vips()[at] && u.Gates != read(first).Gates {
				t.Errorf("%s, and what is new since %s: nothing of %s, although one says what is unannounced", first, change, vip)
			}
		}
	}
}
