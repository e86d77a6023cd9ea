package members

import (
	"testing"
	"time"
)

func TestParseProfile(t *testing.T) {
	const ms = time.Millisecond
	for _, c := range []struct {
		name              string
		interval, timeout time.Duration
		want              Profile
		err               string
	}{
		{"lan", 0, 0, LAN, ""},
		{"wan", 0, 0, WAN, ""},
		{"lan", 200 * ms, 0, Profile{200 * ms, 50 * ms, 50 * ms, 50 * ms}, ""},
		{"wan", 2 * time.Second, time.Second, Profile{2 * time.Second, time.Second, 200 * ms, 200 * ms}, ""},
		{"man", 0, 0, Profile{}, `--gossip-profile: "man" is neither lan nor wan`},
		{"lan", 0, 100 * ms, Profile{}, "--probe-interval: 100ms is not longer than the timeout of a probe, 100ms"},
		{"lan", -1, 0, Profile{}, "--probe-interval: -1ns is not longer than the timeout of a probe, 50ms"},
		{"lan", 0, -1, Profile{}, "--probe-timeout: -1ns is less than 10ms"},
		{"wan", time.Hour, 0, Profile{}, "--probe-interval: 1h0m0s is more than 1m0s"},
	} {
		got, err := ParseProfile(c.name, c.interval, c.timeout)
		if err != nil && err.Error() != c.err || err == nil && (c.err != "" || got != c.want) {
			t.Errorf("%s, %s, %s: %+v, %v; want %+v, %s", c.name, c.interval, c.timeout, got, err, c.want, c.err)
		}
	}
	if LAN.Unnoticed() != 400*ms {
		t.Error(LAN.Unnoticed())
	}
}
