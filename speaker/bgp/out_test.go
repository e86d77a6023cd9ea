package bgp

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/osrg/gobgp/v3/pkg/packet/bgp"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/speaker/plan"
)

// The attributes of a route as a peer of each kind hears them, byte by byte after the ORIGIN.
func TestAttributes(t *testing.T) {
	full := plan.Route{
		LocalPref: 200, MED: 7, HasMED: true, Prepend: 1,
		Communities: []lb.Community{{A: 64500, B: 1}, {Large: true, A: 4200000000, B: 2, C: 3}},
	}
	for _, test := range []struct {
		name  string
		e     encoding
		route plan.Route
		want  string
	}{
		{"plain, external", encoding{localASN: 64500, fourOctets: true}, plan.Route{}, "400206 02010000fbf4"},
		{"plain, internal", encoding{localASN: 64500, fourOctets: true, internal: true}, plan.Route{},
			"400200 40050400000000"},
		{"full, external", encoding{localASN: 64500, fourOctets: true}, full,
			"40020a 02020000fbf40000fbf4 80040400000007 c00804fbf40001 c0200cfa56ea000000000200000003"},
		{"full, internal: no prepending, and LOCAL_PREF", encoding{localASN: 64500, fourOctets: true, internal: true}, full,
			"400200 80040400000007 400504000000c8 c00804fbf40001 c0200cfa56ea000000000200000003"},
		{"old peer, short number", encoding{localASN: 64500}, plan.Route{Prepend: 2}, "400208 0203fbf4fbf4fbf4"},
		{"old peer, long number", encoding{localASN: 4200000000}, plan.Route{Prepend: 1},
			"400206 02025ba05ba0 c0110a 0202fa56ea00fa56ea00"},
	} {
		var got []byte
		for _, a := range test.e.attributes(test.route)[1:] {
			got = append(got, serialized(a)...)
		}
		if want := bytes.ReplaceAll([]byte(test.want), []byte(" "), nil); fmt.Sprintf("%x", got) != string(want) {
			t.Errorf("%s: %x, want %s", test.name, got, test.want)
		}
	}
}

func TestRoutesWithoutANextHopAreHeldAndWithdrawn(t *testing.T) {
	e := encoding{localASN: 64500, fourOctets: true,
		nextHops: map[lb.Family]netip.Addr{lb.IPv4: netip.MustParseAddr("10.0.0.1")}}
	want := routes("192.0.2.1/32", "fd01::1/128", "fd01::2/128")
	out := e.outgoing(nil, want)
	if len(out.messages) != 1 || len(out.set) != 1 || out.held[lb.IPv6] != 2 {
		t.Errorf("%+v", out)
	}
	heard := map[netip.Prefix]announced{netip.MustParsePrefix("fd01::1/128"): {nextHop: netip.MustParseAddr("fd00::1")}}
	if out := e.outgoing(heard, want); len(out.gone) != 1 || len(out.messages) != 2 {
		t.Errorf("next hop lost: %+v", out)
	}
}

// Routes with other attributes never share an UPDATE, and what is sent does not depend on the order
// of maps.
func TestGroupsAreStable(t *testing.T) {
	e := encoding{localASN: 64500, fourOctets: true,
		nextHops: map[lb.Family]netip.Addr{lb.IPv4: netip.MustParseAddr("10.0.0.1")}}
	want := vips(300, false)
	for p := range want {
		want[p] = plan.Route{MED: uint32(p.Addr().As4()[3] % 3), HasMED: p.Addr().As4()[3]%2 == 0}
	}
	first := e.outgoing(nil, want)
	if len(first.messages) != 6 { // by value, and by whether it is there
		t.Errorf("%d UPDATEs", len(first.messages))
	}
	for range 5 {
		again := e.outgoing(nil, want)
		for i, m := range again.messages {
			if !bytes.Equal(m, first.messages[i]) {
				t.Fatalf("UPDATE %d differs", i)
			}
		}
	}
}

func TestNotificationsAreNamed(t *testing.T) {
	for want, n := range map[string]notification{
		"Hold Timer Expired": {code: 4},
		`Cease/Administrative Shutdown "` + strings.Repeat("x", 255) + `"`: {6, 2,
			append([]byte{255}, strings.Repeat("x", 300)...)},
		"Cease/Administrative Reset":                 {6, 4, []byte{255, 'x'}},
		"Cease/Administrative Shutdown":              {code: 6, subcode: 2},
		`Cease/Administrative Reset "a ? b"`:         {6, 4, append([]byte{5}, "a \xff b"...)},
		"code 99 subcode 1":                          {code: 99, subcode: 1},
		"UPDATE Message Error/Attribute Flags Error": {code: 3, subcode: 4},
	} {
		if got := n.String(); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

// FuzzMessages plays bytes from a peer: they are read, or refused by an error that has a
// NOTIFICATION.
func FuzzMessages(f *testing.F) {
	f.Add(routerOpen().serialize())
	f.Add(keepalive())
	f.Add(notification{6, 2, shutdownText("x")}.serialize())
	f.Add(notification{6, 4, append([]byte{255}, strings.Repeat("x", 255)...)}.serialize())
	f.Add(routeRefresh(bgp.AFI_IP))
	e := encoding{localASN: 4200000000, nextHops: map[lb.Family]netip.Addr{lb.IPv4: netip.MustParseAddr("fd00::1"),
		lb.IPv6: netip.MustParseAddr("fd00::1")}}
	for _, m := range e.outgoing(nil, map[netip.Prefix]plan.Route{
		netip.MustParsePrefix("192.0.2.0/24"): {Communities: []lb.Community{{A: 1, B: 2}, {Large: true, A: 1}}, Prepend: 3,
			HasMED: true},
		netip.MustParsePrefix("fd01::/64"): {LocalPref: 1},
	}).messages {
		f.Add(m)
	}
	f.Add(endOfRIB(lb.IPv6))
	d := external(func(d *plan.BGPSession) { d.Families = []lb.Family{lb.IPv4, lb.IPv6} })
	n := Negotiated{Families: d.Families, HoldTime: time.Second}
	f.Fuzz(func(t *testing.T, data []byte) {
		// Both as it is, and as the body of a well-formed message of each type.
		check(t, data, d, n)
		for kind := range uint8(6) {
			if len(data) < maxMessage-headerLength {
				check(t, frame(kind, data), d, n)
			}
		}
	})
}

func check(t *testing.T, data []byte, d plan.BGPSession, n Negotiated) {
	r := reader{from: bytes.NewReader(data)}
	for {
		m, err := r.next()
		var f *protocolError
		if errors.As(err, &f) {
			if f.code != bgp.BGP_ERROR_MESSAGE_HEADER_ERROR {
				t.Errorf("%x: %v", data, err)
			}
			return
		}
		if err != nil {
			if !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
				t.Errorf("%x: %v", data, err)
			}
			return
		}
		switch m.kind {
		case bgp.BGP_MSG_OPEN:
			if _, refusal := negotiate(d, m.body, true); refusal != nil && refusal.code != bgp.BGP_ERROR_OPEN_MESSAGE_ERROR {
				t.Errorf("%x: %v", data, refusal)
			}
		case bgp.BGP_MSG_UPDATE:
			changes, err := parseUpdate(m.body, n, true)
			if err != nil && (!errors.As(err, &f) || f.code != bgp.BGP_ERROR_UPDATE_MESSAGE_ERROR) {
				t.Errorf("%x: %v", data, err)
			}
			for p, r := range changes {
				if !p.IsValid() || r.Prefix != p {
					t.Errorf("%x: %v is %+v", data, p, r)
				}
			}
		case bgp.BGP_MSG_ROUTE_REFRESH:
			c := connection{refresh: newWishes()}
			if err := c.heardRefresh(m.body); (err == nil) != (len(m.body) == 4) {
				t.Errorf("%x: %v", data, err)
			}
		case bgp.BGP_MSG_NOTIFICATION:
			if got := received(m.body); got.Error() == "" || int(got.code) != int(m.body[0]) {
				t.Errorf("%x: %v", data, got)
			}
		}
	}
}

func TestCountMessages(t *testing.T) {
	b := append(append(keepalive(), endOfRIB(lb.IPv4)...), endOfRIB(lb.IPv6)...)
	if messages, updates := countMessages(b); messages != 3 || updates != 2 {
		t.Errorf("%d messages, %d UPDATEs", messages, updates)
	}
}
