package main

import (
	"os"
	"strings"
	"testing"

	"github.com/landfall-lb/landfall/e2e/lab"
)

// The demos are what a newcomer sees first: they must end well, and show what the worked example is
// known by.
func TestDemo(t *testing.T) {
	wants := map[string][]string{
		"demo": {
			"172.26.236.180", "10.106.189.218", "31428",
			"LF-SVC-BEPXDJBUHFCSYIC3", "LF-EXT-BEPXDJBUHFCSYIC3", "LF-SEP-IQE2HBJHR23S7HKO", "LF-SEP-KXZ7A5GCKOVBKJL6",
			"503 Service Unavailable", "200 OK", "LONGEST GAP", "All as promised",
		},
		"demo-bgp": {
			"203.0.113.180", "10.106.189.218", "31428", "show bgp summary", "show bfd peers", "nexthop via 172.26.236.178",
			"graceful-shutdown",
			"503 Service Unavailable", "200 OK", "LONGEST GAP", "All as promised",
		},
	}
	if os.Geteuid() != 0 {
		t.Skip("the lab makes network namespaces: needs root")
	}
	for name, tale := range tales {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var out strings.Builder
			err := demo(t.Context(), &out, tale(), lab.Options{}, false)
			if err != nil {
				t.Fatalf("%v\n%s", err, out.String())
			}
			for _, want := range wants[name] {
				if !strings.Contains(out.String(), want) {
					t.Errorf("it does not show %q", want)
				}
			}
			if t.Failed() {
				t.Log(out.String())
			}
		})
	}
}
