package bgp

import (
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/landfall-lb/landfall/e2e/router"
	"github.com/landfall-lb/landfall/e2e/router/routertest"
)

// guide returns the configuration of a router in docs/guide/bare-metal.md.
func guide(t *testing.T, kind string) string {
	t.Helper()
	page, err := os.ReadFile("../../docs/guide/bare-metal.md")
	if err != nil {
		t.Fatal(err)
	}
	found := regexp.MustCompile("(?ms)^```"+kind+"\n(.*?)^```$").FindAllSubmatch(page, -1)
	if len(found) != 1 {
		t.Fatalf("%d configurations of %s", len(found), kind)
	}
	return string(found[0][1])
}

// The guide's routers accept addresses of the pool from any node of the subnet, and nothing else.
func TestGuideFRR(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	config, bfd, ok := strings.Cut(guide(t, "frr"), "\nbfd\n")
	if !ok {
		t.Fatal("no section bfd")
	}
	r := routertest.FRR(t, l.router, router.Options{Config: config, BFD: "bfd\n" + bfd})
	a, _ := l.start(t)
	d := external(nil)
	d.Routes = routes("192.0.2.10/32", "192.0.2.0/28", "198.51.100.1/32")
	set(a, d)
	eventually(t, a, "the session is up", synced)
	wantPrefixes(t, r, "ipv4", "192.0.2.10/32")
	routertest.Eventually(t, "BFD is on", limit, func() error {
		peers, err := r.Ask(t.Context(), "show bfd peers")
		for _, want := range []string{"peer 10.0.0.1", "Transmission interval: 300ms"} {
			if err == nil && !strings.Contains(peers, want) {
				err = fmt.Errorf("no %q in\n%s", want, peers)
			}
		}
		return err
	})
}

func TestGuideBIRD(t *testing.T) {
	t.Parallel()
	l := newLAN(t)
	r := routertest.BIRD(t, l.router, guide(t, "bird"))
	a, _ := l.start(t)
	d := external(nil)
	d.Routes = routes("192.0.2.10/32", "192.0.2.0/28", "198.51.100.1/32")
	set(a, d)
	eventually(t, a, "the session is up", synced)
	wantBIRD(t, r, "192.0.2.10/32", "BGP.next_hop: 10.0.0.1", "BGP.as_path: 64500")
	wantNoBIRD(t, r, "192.0.2.0/28")
	wantNoBIRD(t, r, "198.51.100.1/32")
}
