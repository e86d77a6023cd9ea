package spans

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
)

var (
	began = time.Unix(1e9, 0)
	vip   = netip.MustParseAddr("192.0.2.1")
	vip6  = netip.MustParseAddr("2001:db8::1")
	web   = []lb.Key{{Namespace: "shop", Name: "web"}, {Namespace: "shop", Name: "sharer"}}
)

// moment is a step at a time after the begin, and the spans that it ends.
type moment struct {
	at   time.Duration
	view View
	want string
}

func text(spans []lb.Span) string {
	var all []string
	for _, s := range spans {
		line := fmt.Sprintf("%s %s %s+%s", s.Service, s.Name, s.Start.Sub(began), s.End.Sub(s.Start))
		for _, a := range s.Attributes {
			line += " " + a.Key + "=" + a.Value
		}
		all = append(all, line)
	}
	return strings.Join(all, "; ")
}

func TestSpans(t *testing.T) {
	view := func(claims bool, owner string, on ...string) View {
		return View{Services: web, Claims: claims, Owner: owner, Answering: on}
	}
	for name, test := range map[string]struct {
		vip     netip.Addr
		first   bool
		moments []moment
	}{
		"a new VIP that this node owns": {vip, false, []moment{
			{0, view(false, ""), ""},
			{time.Second, view(true, ""), "shop/web claimed 0s+1s"},
			{2 * time.Second, view(true, "n1"), "shop/web owner chosen 1s+1s"},
			{3 * time.Second, view(true, "n1", "eth0", "eth1"),
				"shop/web announced 2s+1s network.protocol.name=arp network.interface.name=eth0,eth1"},
			{4 * time.Second, view(true, "n1", "eth0"), ""},
		}},
		"all at once, over NDP": {vip6, false, []moment{
			{time.Second, view(true, "n1", "eth0"), "shop/web claimed 1s+0s; shop/web owner chosen 1s+0s; " +
				"shop/web announced 1s+0s network.protocol.name=ndp network.interface.name=eth0"}}},
		"another node owns it, and hands it over": {vip, false, []moment{
			{0, view(true, "n2"), "shop/web claimed 0s+0s"},
			{time.Hour, view(true, "n1"), "shop/web owner chosen 0s+1h0m0s landfall.owner.previous=n2"},
		}},
		"it delivers no more for a while": {vip, false, []moment{
			{0, view(true, ""), "shop/web claimed 0s+0s"},
			{time.Second, view(false, ""), ""},
			{time.Minute, view(true, ""), "shop/web claimed 1s+59s"},
		}},
		"over BGP": {vip, false, []moment{
			{0, View{Services: web}, ""},
			{time.Second, View{Services: web, Peers: []string{"tor-1", "tor-2"}},
				"shop/web announced 0s+1s network.protocol.name=bgp landfall.peers=tor-1,tor-2"},
			{2 * time.Second, View{Services: web, Peers: []string{"tor-1"}}, ""},
		}},
		"it goes, and comes again": {vip, false, []moment{
			{0, view(true, ""), "shop/web claimed 0s+0s"},
			{time.Second, View{Gone: true}, ""},
			{2 * time.Second, view(true, ""), "shop/web claimed 2s+0s"},
		}},
		"what was there when the speaker started": {vip, true, []moment{
			{0, view(false, ""), ""},
			{time.Second, view(true, "n1", "eth0"), ""},
			{2 * time.Second, view(true, "n2"), ""},
			{quiet, view(true, "n1"), "shop/web owner chosen 1s+59s landfall.owner.previous=n2"},
		}},
	} {
		var s State
		for i, m := range test.moments {
			got := text(s.Step(began.Add(m.at), Events{Self: "n1", First: test.first && i == 0,
				VIPs: map[netip.Addr]View{test.vip: m.view}}))
			if got != m.want {
				t.Errorf("%s, after %s: %q, want %q", name, m.at, got, m.want)
			}
		}
	}
}

// TestWhatIsGoneIsForgotten holds that memory does not grow with VIPs that were.
func TestWhatIsGoneIsForgotten(t *testing.T) {
	var s State
	s.Step(began, Events{VIPs: map[netip.Addr]View{vip: {Services: web}, vip6: {Services: web}}})
	s.Step(began, Events{VIPs: map[netip.Addr]View{vip: {Gone: true}, vip6: {}}})
	if len(s.vips) != 0 {
		t.Errorf("%d VIPs are remembered", len(s.vips))
	}
}
