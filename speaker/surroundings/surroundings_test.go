package surroundings

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/links"
)

func gateway(addr string, link int) links.Gateway {
	return links.Gateway{Addr: netip.MustParseAddr(addr), Interface: link}
}

func link(index int, subnets ...string) lb.Interface {
	i := lb.Interface{Index: index}
	for _, s := range subnets {
		i.Addresses = append(i.Addresses, netip.MustParsePrefix(s))
	}
	return i
}

func TestUnassignable(t *testing.T) {
	lan := []lb.Interface{link(2, "172.26.236.178/24", "2001:db8::2/64"), link(3, "10.0.0.1/24")}
	for name, test := range map[string]struct {
		gateways   []links.Gateway
		interfaces []lb.Interface
		want       string
	}{
		"no route": {nil, lan, ""},
		"one": {[]links.Gateway{gateway("172.26.236.1", 2)}, lan,
			"172.26.236.0 the network address\n172.26.236.1 the gateway\n172.26.236.255 the broadcast address\n"},
		"twice": {[]links.Gateway{gateway("10.0.0.9", 3), gateway("10.0.0.9", 3)}, lan,
			"10.0.0.0 the network address\n10.0.0.9 the gateway\n10.0.0.255 the broadcast address\n"},
		"IPv6": {[]links.Gateway{gateway("2001:db8::1", 2), gateway("fe80::1", 2)}, lan,
			"2001:db8::1 the gateway\n"},
		"off the subnet": {[]links.Gateway{gateway("192.0.2.1", 2)}, lan, "192.0.2.1 the gateway\n"},
		"point to point": {[]links.Gateway{gateway("192.0.2.0", 2)}, []lb.Interface{link(2, "192.0.2.1/31")},
			"192.0.2.0 the gateway\n"},
		"odd prefix": {[]links.Gateway{gateway("192.0.2.65", 2)}, []lb.Interface{link(2, "192.0.2.70/27")},
			"192.0.2.64 the network address\n192.0.2.65 the gateway\n192.0.2.95 the broadcast address\n"},
		"other interface": {[]links.Gateway{gateway("172.26.236.1", 9)}, lan, "172.26.236.1 the gateway\n"},
	} {
		if diff := cmp.Diff(test.want, lb.FormatUnassignable(Unassignable(test.gateways, test.interfaces))); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

// TestApply tells once, and tells again what somebody has taken away.
func TestApply(t *testing.T) {
	shown, known := map[string]string{"other": "192.0.2.1 the gateway\n"}, false
	var fail, failGateways error
	writes := 0
	s := New(Options{
		Node: "here", Log: slog.New(slog.DiscardHandler),
		Gateways: func() ([]links.Gateway, error) { return []links.Gateway{gateway("192.0.2.1", 2)}, failGateways },
		Shown:    func() (map[string]string, bool) { return shown, known },
		Write: func(_ context.Context, text string) error {
			if fail != nil {
				return fail
			}
			writes++
			shown["here"] = text
			return nil
		},
	})
	step := func(wantErr bool, wantWrites int) {
		t.Helper()
		again, err := s.apply(t.Context())
		if (err != nil) != wantErr || err == nil && again <= 0 || writes != wantWrites {
			t.Fatalf("again in %v, %v; %d writes, want %d", again, err, writes, wantWrites)
		}
	}
	step(false, 0) // neither is known
	known = true
	step(false, 0) // the interfaces are not known
	s.Set([]lb.Interface{link(2, "192.0.2.5/30")})
	known = false
	step(false, 0) // what is shown is not known
	known = true
	failGateways = errors.New("interrupted")
	step(true, 0)
	failGateways, fail = nil, errors.New("forbidden")
	step(true, 0)
	fail = nil
	step(false, 1)
	step(false, 1)
	want := map[string]string{"other": "192.0.2.1 the gateway\n", "here": "192.0.2.1 the gateway\n"}
	if diff := cmp.Diff(want, shown); diff != "" {
		t.Errorf("shown (-want +got):\n%s", diff)
	}
	maps.DeleteFunc(shown, func(node string, _ string) bool { return node == "here" })
	step(false, 2)
}
