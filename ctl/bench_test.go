package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/landfall-lb/landfall/ctl/explain"
	"github.com/landfall-lb/landfall/internal/lb"
)

// Size of the cluster of the benchmarks, whose API server and programs answer at once.
const (
	manyServices = 10_000
	manyNodes    = 100
)

// fakeLarge is fakeWell with many Services.
func fakeLarge(b *testing.B) fakeCluster {
	b.Helper()
	f := fakeWell(manyNodes)
	one := strings.TrimSuffix(strings.TrimPrefix(f.objects["/api/v1/services"], `{"items":[`), `]}`)
	var all strings.Builder
	all.WriteString(`{"items":[` + one)
	for i := range manyServices - 1 {
		other := strings.ReplaceAll(strings.ReplaceAll(one, "192.0.2.10",
			netip.AddrFrom4([4]byte{10, 9, byte(i >> 8), byte(i)}).String()), `"web"`, fmt.Sprintf(`"web-%d"`, i))
		all.WriteString("," + other)
	}
	f.objects["/api/v1/services"] = all.String() + "]}"
	f.encoded = map[string][]byte{"/api/v1/services": protobuf(b, f.objects["/api/v1/services"])}
	return f
}

// again returns a gatherer that has read nothing yet.
func again(ready *gatherer) *gatherer {
	g := newGatherer(ready.client, ready.server, ready.opts)
	g.exec = ready.exec
	return g
}

// BenchmarkExplain measures an explanation: of a Service, of its address, and of a free one.
func BenchmarkExplain(b *testing.B) {
	f := fakeLarge(b)
	for name, explanation := range map[string]func(*gatherer) (explain.Verdict, error){
		"svc":  func(g *gatherer) (explain.Verdict, error) { return explainService(b.Context(), g, "shop/web") },
		"ip":   func(g *gatherer) (explain.Verdict, error) { return explainIP(b.Context(), g, "192.0.2.10") },
		"free": func(g *gatherer) (explain.Verdict, error) { return explainIP(b.Context(), g, "192.0.2.99") },
	} {
		b.Run(name, func(b *testing.B) {
			ready := f.connected(b, &agents{nodes: manyNodes})
			for b.Loop() {
				if v, err := explanation(again(ready)); err != nil || v.Level != explain.OK {
					b.Fatalf("%v %v", v, err)
				}
			}
		})
	}
}

// BenchmarkTrace measures a walk on the node that announces an address, named as a Service or not, and
// on all nodes.
func BenchmarkTrace(b *testing.B) {
	f := fakeLarge(b)
	p := &proxies{answer: func(node string) (any, error) { return delivered(node, false, "10.0.0.2:8080"), nil }}
	for _, test := range []struct {
		name, to string
		flags    traceFlags
		nodes    int
	}{
		{"svc", "svc/shop/web:80", traceFlags{}, 1}, {"ip", "192.0.2.10:80", traceFlags{}, 1},
		{"all nodes", "svc/shop/web:80", traceFlags{allNodes: true}, manyNodes},
	} {
		b.Run(test.name, func(b *testing.B) {
			d, err := parseDestination(test.to)
			if err != nil {
				b.Fatal(err)
			}
			ready := f.connected(b, &agents{nodes: manyNodes})
			speakers := ready.exec
			ready.exec = func(ctx context.Context, pod lb.Key, container string, command ...string) ([]byte, error) {
				if container == "speaker" {
					return speakers(ctx, pod, container, command...)
				}
				return p.exec(ctx, pod, container, command...)
			}
			for b.Loop() {
				r, err := tracePacket(b.Context(), again(ready), test.flags, end("203.0.113.7:0"), d)
				if err != nil || len(r.Nodes) != test.nodes {
					b.Fatalf("%v %v", r, err)
				}
			}
		})
	}
}

// BenchmarkFlows measures the connections of a Service, 10,000 of them on 100 nodes.
func BenchmarkFlows(b *testing.B) {
	f := fakeLarge(b)
	f.objects[servicePath] = fakeWeb
	p := &proxies{answer: func(node string) (any, error) {
		flows := lb.Flows{Node: node, Total: 100}
		for i := range 100 {
			flows.Flows = append(flows.Flows, lb.Flow{Protocol: lb.TCP, Client: netip.AddrPortFrom(netip.AddrFrom4(
				[4]byte{203, 0, 113, byte(i)}), 4000), To: end("192.0.2.10:80"), Backend: end("10.0.0.2:8080"),
				State: "ESTABLISHED"})
		}
		return flows, nil
	}}
	ready := f.connected(b, &agents{nodes: manyNodes})
	ready.exec = p.exec
	for b.Loop() {
		if flows, err := gatherFlows(b.Context(), again(ready), "shop/web", nil, flowsShown); err != nil ||
			flows.Total != 100*manyNodes {
			b.Fatalf("%v %v", flows.Total, err)
		}
	}
}

// BenchmarkDrain measures what comes before the wait, and one question of the wait.
func BenchmarkDrain(b *testing.B) {
	f := fakeLarge(b)
	ready := f.connected(b, &agents{nodes: manyNodes})
	ready.exec = func(_ context.Context, _ lb.Key, container string, _ ...string) ([]byte, error) {
		if container == "speaker" {
			return []byte(`{"answering":2}`), nil
		}
		services := []drainConnections{}
		for i := range 500 {
			services = append(services, drainConnections{Service: fmt.Sprintf("shop/web-%d", i), Count: 10})
		}
		return json.Marshal(map[string]any{"total": 5000, "services": services})
	}
	b.Run("before", func(b *testing.B) {
		for b.Loop() {
			g := again(ready)
			if err := g.read(b.Context()); err != nil {
				b.Fatal(err)
			}
			if err := drainable(g.cluster, "n1"); err != nil {
				b.Fatal(err)
			}
		}
	})
	g := again(ready)
	if err := g.read(b.Context()); err != nil {
		b.Fatal(err)
	}
	b.Run("question", func(b *testing.B) {
		for b.Loop() {
			if s := g.drainState(b.Context(), "n1"); s.Connections != 5000 || s.Unknown != "" {
				b.Fatalf("%+v", s)
			}
		}
	})
}
