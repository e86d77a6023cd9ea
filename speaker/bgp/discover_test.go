package bgp

import (
	"context"
	"errors"
	"io"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"github.com/mdlayher/ndp"
	"golang.org/x/net/ipv6"
)

// A flood of router solicitations does not become one of router advertisements, each of which goes to all on the link.
func TestSolicitationsAreAnsweredSeldom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		asked, sent := make(chan struct{}, 1), 0
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() {
			done <- advertise(ctx, asked, func() error { sent++; return nil }, func() error { return nil })
		}()
		const lasts = time.Minute
		for range lasts / (10 * time.Millisecond) {
			poke(asked)
			time.Sleep(10 * time.Millisecond)
		}
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
		const least = int(lasts / askedInterval)
		if most := least + firstAdvertisements; sent < least || sent > most {
			t.Errorf("%d advertisements in %v, want %d to %d", sent, lasts, least, most)
		}
	})
}

// one is a link with one message on it.
type one struct {
	message  []byte
	hopLimit int
	from     netip.Addr
	read     bool
}

func (o *one) ReadRaw(b []byte) (int, *ipv6.ControlMessage, netip.Addr, error) {
	if o.read {
		return 0, nil, netip.Addr{}, io.EOF
	}
	o.read = true
	return copy(b, o.message), &ipv6.ControlMessage{HopLimit: o.hopLimit}, o.from, nil
}

// FuzzListen has anybody on the link send anything: only a whole advertisement of a neighbor makes a router, under the
// name of the interface where it came in, and only a whole solicitation is answered.
func FuzzListen(f *testing.F) {
	ra := []byte{134, 0, 0, 0, 64, 0, 7, 8, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 2, 0, 0, 0, 0, 1}
	rs := []byte{133, 0, 0, 0, 0, 0, 0, 0}
	router, own := netip.MustParseAddr("fe80::1%eth0"), netip.MustParseAddr("fe80::9%eth0")
	for _, from := range []string{"fe80::1", "fe80::9", "2001:db8::1", "::", "ff02::1"} {
		f.Add(ra, ndp.HopLimit, netip.MustParseAddr(from).AsSlice())
	}
	for _, message := range [][]byte{ra[:16], ra[:15], rs, rs[:7], {}, {134}} {
		f.Add(message, ndp.HopLimit, router.AsSlice())
	}
	f.Add(ra, ndp.HopLimit-1, router.AsSlice())
	f.Fuzz(func(t *testing.T, message []byte, hopLimit int, source []byte) {
		from, _ := netip.AddrFromSlice(source)
		asked := make(chan struct{}, 1)
		var routers []netip.Addr
		err := listen(&one{message: message, hopLimit: hopLimit, from: from.WithZone("eth1")}, own, "eth0", asked,
			func(router netip.Addr) { routers = append(routers, router) })
		if !errors.Is(err, io.EOF) {
			t.Error(err)
		}
		near := hopLimit == 255 && len(source) == 16 && source[0] == 0xfe && source[1]&0xc0 == 0x80 &&
			from != own.WithZone("")
		if want := near && len(message) >= 16 && message[0] == 134; (len(routers) == 1) != want || len(routers) > 1 ||
			want && routers[0] != from.WithZone("eth0") {
			t.Errorf("%x from %s with hop limit %d: routers %v", message, from, hopLimit, routers)
		}
		if want := near && len(message) >= 8 && message[0] == 133; (len(asked) == 1) != want {
			t.Errorf("%x from %s with hop limit %d: answered %v", message, from, hopLimit, !want)
		}
	})
}
