package lb

import (
	"fmt"
	"maps"
	"net/netip"
	"strings"
	"testing"
)

func TestListing(t *testing.T) {
	first, second := netip.MustParseAddr("198.51.100.1"), netip.MustParseAddr("2001:db8::1")
	s := Service{ClusterIPs: []netip.Addr{netip.MustParseAddr("10.96.0.1")}, ExternalIPs: []netip.Addr{first},
		Ports: []ServicePort{{Protocol: TCP, Port: 80}}}
	var l Listing
	change := func(now int64, want string) {
		t.Helper()
		if l = l.Next(&s, now); l.String() != want {
			t.Errorf("at %d: %q, want %q", now, l, want)
		}
		if again := ParseListing(l.String()); len(l) > 0 && !maps.Equal(again, l) {
			t.Errorf("%v reads back as %v", l, again)
		}
	}
	since := func(addr netip.Addr, protocol Protocol, port uint16, want int64) {
		t.Helper()
		if got := l.Since(addr, protocol, port); got != want {
			t.Errorf("%s %d/%s: since %d, want %d", addr, port, protocol, got, want)
		}
	}
	since(first, TCP, 80, 0)
	change(1000, "since 1970-01-01T00:00:01.000Z: 198.51.100.1, 80/TCP")
	s.ExternalIPs = []netip.Addr{second, first}
	change(2000, "since 1970-01-01T00:00:01.000Z: 198.51.100.1, 80/TCP; since 1970-01-01T00:00:02.000Z: 2001:db8::1")
	s.Ports = append(s.Ports, ServicePort{Protocol: UDP, Port: 53})
	change(3000, "since 1970-01-01T00:00:01.000Z: 198.51.100.1, 80/TCP; since 1970-01-01T00:00:02.000Z: 2001:db8::1; "+
		"since 1970-01-01T00:00:03.000Z: 53/UDP")
	since(first, TCP, 80, 1000)
	since(second, TCP, 80, 2000)
	since(first, UDP, 53, 3000)
	since(first, TCP, 53, 0)
	if got := l.Latest(); got != 3000 {
		t.Errorf("the latest is %d", got)
	}
	s.ExternalIPs = []netip.Addr{second}
	change(4000, "since 1970-01-01T00:00:01.000Z: 80/TCP; since 1970-01-01T00:00:02.000Z: 2001:db8::1; "+
		"since 1970-01-01T00:00:03.000Z: 53/UDP")
	s.ExternalIPs = []netip.Addr{first, second} // it was gone in between
	l = l.Next(&s, 5000)
	since(first, TCP, 80, 5000)
	s.ClusterIPs = nil
	if l = l.Next(&s, 6000); l != nil {
		t.Errorf("a Service without a cluster IP serves no external IP, and lists %v", l)
	}
}

// A Service with very many external IPs does not get a condition without bound: the earliest are told.
func TestListingIsBounded(t *testing.T) {
	l := Listing{}
	for i := range 5000 {
		l[fmt.Sprintf("2001:db8::%x", i)] = int64(i + 1)
	}
	l["80/TCP"] = 1
	message := l.String()
	if len(message) > maxListing {
		t.Errorf("%d bytes", len(message))
	}
	read := ParseListing(message)
	if got := read.Since(netip.MustParseAddr("2001:db8::5"), TCP, 80); got != 6 {
		t.Errorf("since %d", got)
	}
	if got := read.Since(netip.MustParseAddr("2001:db8::1380"), TCP, 80); got != 0 {
		t.Errorf("since %d", got)
	}
	if read.String() != message {
		t.Error("what was read is told in other words")
	}
	if l := ParseListing(message + strings.Repeat(", x", maxListing)); len(l) != 0 {
		t.Errorf("read %d items", len(l))
	}
}

func FuzzParseListing(f *testing.F) {
	f.Add("since 2026-11-24T13:40:00.123Z: 198.51.100.1, 80/TCP; since 2026-11-24T13:41:00.000Z: 443/TCP")
	f.Add("since 9999-12-31T23:59:59.999Z: ; since 0000-01-01T00:00:00.000Z: x")
	f.Fuzz(func(t *testing.T, message string) {
		read := ParseListing(message)
		if again := ParseListing(read.String()); len(read.String()) < maxListing-64 && !maps.Equal(read, again) {
			t.Errorf("%q: %v, then %v", message, read, again)
		}
	})
}

// What a tenant writes into one Service costs no more than what can be told of it. Even the shortest addresses do not
// all fit.
func TestListingOfManyAddressesIsBounded(t *testing.T) {
	s := Service{ClusterIPs: []netip.Addr{netip.MustParseAddr("10.96.0.1")}}
	for i := range 80_000 {
		s.ExternalIPs = append(s.ExternalIPs, netip.AddrFrom4([4]byte{byte(i >> 16), byte(i >> 8), byte(i), 1}))
	}
	for i := range 16_000 {
		s.Ports = append(s.Ports, ServicePort{Protocol: TCP, Port: uint16(i + 1)})
	}
	l := Listing(nil).Next(&s, 1)
	if len(l) != 2*maxListed {
		t.Errorf("%d items", len(l))
	}
	s.Ports = s.Ports[:1]
	if told := ParseListing(Listing(nil).Next(&s, 1).String()); len(told) >= maxListed {
		t.Errorf("all of %d items are told, and more would be", len(told))
	}
}
