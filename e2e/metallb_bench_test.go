package e2e

import (
	"fmt"
	"net/netip"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/e2e/lab"
	"github.com/landfall-lb/landfall/e2e/lab/labtest"
)

const metallbRouted = `---
apiVersion: metallb.io/v1beta1
kind: IPAddressPool
metadata: {name: many, namespace: metallb-system}
spec: {addresses: [198.18.0.0/21]}
---
apiVersion: metallb.io/v1beta1
kind: BGPAdvertisement
metadata: {name: many, namespace: metallb-system}
spec: {ipAddressPools: [many]}
---
apiVersion: metallb.io/v1beta2
kind: BGPPeer
metadata: {name: tor, namespace: metallb-system}
spec: {myASN: 64500, peerASN: 64501, peerAddress: 172.26.236.1}
`

const metallbManyPool = `---
apiVersion: metallb.io/v1beta1
kind: IPAddressPool
metadata: {name: many, namespace: metallb-system}
spec: {addresses: [172.26.236.180-172.26.236.199, 172.26.240.0/22]}
---
apiVersion: metallb.io/v1beta1
kind: L2Advertisement
metadata: {name: many, namespace: metallb-system}
spec: {interfaces: [eth0]}
`

// BenchmarkMetalLB measures MetalLB, with kube-proxy, as other benchmarks here measure Landfall: crash as
// BenchmarkCrash does, new as BenchmarkNewService, 500 as BenchmarkFiveHundredServices measures addresses, drain as
// BenchmarkDrain, and bgp as BenchmarkBGPServices. MetalLB is built from its module, outside of this repository, so it
// wants to be asked for:
//
//	LANDFALL_BENCH_METALLB=1 go test -run '^$' -bench MetalLB -benchtime 10x -timeout 60m ./e2e
func BenchmarkMetalLB(b *testing.B) {
	if os.Getenv("LANDFALL_BENCH_METALLB") == "" {
		b.Skip("LANDFALL_BENCH_METALLB is not set")
	}
	b.Run("crash", func(b *testing.B) {
		l := metallbAlone(b, clusterOf(3), metallbManyPool)
		if err := l.AddService(b.Context(), lab.SeedService()); err != nil {
			b.Fatal(err)
		}
		var gaps []time.Duration
		for b.Loop() {
			was := seen(b, l)
			time.Sleep(time.Second)
			probe := l.StartProbe(b.Context(), lab.ClientName, "tcp", seedVIP, newEvery)
			time.Sleep(200 * time.Millisecond)
			if err := l.Cut(b.Context(), was); err != nil {
				b.Fatal(err)
			}
			time.Sleep(15 * time.Second)
			gaps = append(gaps, probe.Stop().Gap)
			if err := l.Heal(b.Context(), was); err != nil {
				b.Fatal(err)
			}
			time.Sleep(15 * time.Second) // until its speaker is a member again
		}
		reportGaps(b, gaps)
	})
	b.Run("new", func(b *testing.B) {
		l := metallbAlone(b, clusterOf(3), metallbManyPool)
		var took []time.Duration
		for i := 0; b.Loop(); i++ {
			took = append(took, createTimed(b, l, newService(i), seedVIP))
			removeAndForget(b, l, newService(i), seedVIP)
		}
		reportGaps(b, took)
	})
	b.Run("500", func(b *testing.B) {
		services := inFull(500)
		l := metallbAlone(b, clusterOf(3), metallbManyPool)
		figures := series{}
		for b.Loop() {
			addTimed(b, l, services, figures)
			removeMany(b, l, services)
		}
		figures.add(load(b), "load")
		figures.report(b)
	})
	b.Run("drain", func(b *testing.B) { drains(b, metallbAlone(b, clusterOf(3), metallbManyPool)) })
	b.Run("bgp", func(b *testing.B) { routesMany(b, metallbAlone(b, oneRouter(), metallbRouted)) })
}

// removeAndForget deletes a Service, and waits until the client finds nothing behind its address and has forgotten the way:
// the next Service that gets the address begins as the first did.
func removeAndForget(b *testing.B, l *lab.Lab, s lab.Service, target netip.AddrPort) {
	b.Helper()
	if err := l.RemoveService(b.Context(), s.Namespace, s.Name); err != nil {
		b.Fatal(err)
	}
	eventually(b, "nothing answers at "+target.String(), func() error {
		if _, err := l.Ask(b.Context(), lab.ClientName, "tcp", target); err == nil {
			return fmt.Errorf("%s is still there", s.Name)
		}
		_, err := l.Exec(b.Context(), lab.ClientName, "ip", "neigh", "flush", "to", target.Addr().String())
		return err
	})
}

// seen waits until the client finds a node behind the address, and returns it.
func seen(b *testing.B, l *lab.Lab) (node string) {
	b.Helper()
	eventually(b, "a node answers for "+seedVIP.Addr().String(), func() error {
		mac := macOf(b, l)
		for _, node = range workers(l) {
			if nodeMAC(b, l, node).String() == mac {
				return nil
			}
		}
		return fmt.Errorf("%q answers", mac)
	})
	return node
}

// metallbAlone starts a lab in which MetalLB, with these objects, and kube-proxy serve, and Landfall is not.
func metallbAlone(b *testing.B, cluster lab.Cluster, objects string) *lab.Lab {
	b.Helper()
	programs, definitions, err := lab.MetalLB(b.Context(), func(string) {})
	if err != nil {
		b.Fatal(err)
	}
	l := labtest.Start(b, cluster, lab.Options{NoAgents: true, Progress: func(string) {}})
	for _, apply := range []func() error{
		func() error { return l.ApplyFolder(b.Context(), definitions) },
		func() error {
			return l.ApplyYAML(b.Context(), "apiVersion: v1\nkind: Namespace\nmetadata: {name: "+metallbNamespace+"}\n")
		},
		func() error {
			return within(patience, func() error { return l.ApplyYAML(b.Context(), objects) })
		},
		func() error { return l.ApplyYAML(b.Context(), metallbController+metallbSpeaker) },
	} {
		if err := apply(); err != nil {
			b.Fatal(err)
		}
	}
	for _, node := range workers(l) {
		p, err := l.StartKubeProxy(b.Context(), node, "nftables")
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { _ = p.Stop() })
	}
	k := startKubelets(b, l, programs, "")
	eventually(b, "MetalLB runs", func() error {
		for _, node := range append(slices.Clone(workers(l)), "") {
			name := map[bool]string{true: "controller", false: "speaker-" + node}[node == ""]
			if !k.metallbRuns(name) {
				return fmt.Errorf("%s does not", name)
			}
		}
		return nil
	})
	spreadPods(b, l)
	return l
}
