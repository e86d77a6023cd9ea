package e2e

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/e2e/lab"
	"github.com/landfall-lb/landfall/e2e/lab/labtest"
)

// bgpMany is how many Services are announced to a router.
const bgpMany = 1000

const bgpManyPool = `
apiVersion: landfall.dev/v1beta1
kind: IPAddressPool
metadata: {name: many}
spec: {addresses: [198.18.0.0/21]}
---
apiVersion: landfall.dev/v1beta1
kind: BGPAdvertisement
metadata: {name: many}
spec: {ipAddressPools: [many]}
`

// oneRouter is a cluster of three workers behind a router with FRR.
func oneRouter() lab.Cluster {
	cluster := clusterOf(3)
	cluster.ToR = lab.ToR{Kind: lab.FRR, Count: 1, ASN: 64501, NodeASN: 64500}
	return cluster
}

// BenchmarkBGPServices creates 1,000 Services behind a router, and reports after which time the last has an address,
// and the router's kernel a route to each, by one node and by all: from the first request, and from the API server's
// answer to the last. go test -run '^$' -bench BGPServices -benchtime 1x -timeout 30m ./e2e
func BenchmarkBGPServices(b *testing.B) {
	cluster := oneRouter()
	l := labtest.Start(b, cluster, lab.Options{Progress: func(string) {}})
	if err := l.ApplyYAML(b.Context(), bgpManyPool+bgpPeers(cluster, "")); err != nil {
		b.Fatal(err)
	}
	routesMany(b, l)
}

// routesMany measures whoever serves in a lab.
func routesMany(b *testing.B, l *lab.Lab) {
	services := inFull(bgpMany)
	figures := series{}
	for b.Loop() {
		began := time.Now()
		taken := addTimed(b, l, services, figures)
		for _, want := range []struct {
			nodes int
			name  string
		}{{1, ""}, {len(workers(l)), "-by-all"}} {
			waitRoutes(b, l, services, want.nodes)
			figures.add(time.Since(began).Seconds(), "s-until-routed"+want.name)
			figures.add(time.Since(taken).Seconds(), "s-last-routed"+want.name)
		}
		removeMany(b, l, services)
		waitRoutes(b, l, 0, 0)
	}
	figures.add(load(b), "load")
	figures.report(b)
}

// waitRoutes waits until the router's kernel has so many routes to Services, by so many nodes each.
func waitRoutes(b *testing.B, l *lab.Lab, services, nodes int) {
	b.Helper()
	err := within(10*time.Minute, func() error {
		out, err := l.Exec(b.Context(), l.Routers()[0].Name, "ip", "-oneline", "route", "show", "root", "198.18.0.0/21")
		if err != nil {
			return err
		}
		routes := 0
		for line := range strings.Lines(out) {
			if strings.Count(line, " via ") >= nodes {
				routes++
			}
		}
		if routes != services {
			return fmt.Errorf("%d routes, want %d", routes, services)
		}
		return nil
	})
	if err != nil {
		b.Fatal(err)
	}
}
