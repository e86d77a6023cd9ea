package e2e

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/e2e/lab"
	"github.com/landfall-lb/landfall/e2e/lab/labtest"
)

// TestNewServiceAnswersAtOnce has the speakers probe the next addresses of a pool ahead, and a machine take one of them
// meanwhile without a word: the Service that gets it says with whom it collides, and no node goes on to answer for it.
// The others answer.
func TestNewServiceAnswersAtOnce(t *testing.T) {
	t.Parallel()
	l := labWith(t, lab.Options{})
	waitAhead(t, l, 16)
	wantOnSpeakers(t, l, "/metrics", `landfall_speaker_arp_probes_total{ahead="true",interface="eth0"}`)
	mac := strings.TrimSpace(mustExec(t, l, lab.ClientName, "cat", "/sys/class/net/eth0/address"))
	second := seedVIP.Addr().Next()
	mustExec(t, l, lab.ClientName, "ip", "addr", "add", second.String()+"/32", "dev", "eth0")
	for i, want := range []struct{ announced, reason, message string }{
		{"True", "Announced", ""}, {"False", "AddressConflict", fmt.Sprintf("%s is in use by %s on eth0", second, mac)},
		{"True", "Announced", ""},
	} {
		s := newService(i)
		if err := l.AddService(t.Context(), s); err != nil {
			t.Fatal(err)
		}
		wantCondition(t, l, s.Name, "landfall.dev/Announced", want.announced, want.reason, want.message)
	}
	if nodes := answerers(t, l, second); len(nodes) > 0 {
		t.Errorf("%v answer for an address that somebody else uses", nodes)
	}
	wantEvent(t, l, newService(1).Name, "AddressConflict", mac)
	mustExec(t, l, lab.ClientName, "ip", "addr", "del", second.String()+"/32", "dev", "eth0")
	waitAnnounced(t, l, newService(1).Name, second.String())
}

// newService is a Service that takes the next address.
func newService(i int) lab.Service {
	s := lab.SeedService()
	s.Name, s.ClusterIP, s.Ports = fmt.Sprintf("new-%d", i), netip.Addr{}, slices.Clone(s.Ports)
	s.Ports[0].NodePort = 0
	return s
}

// waitAhead waits until each speaker knows that nobody uses the next addresses of the pools.
func waitAhead(t testing.TB, l *lab.Lab, n float64) {
	t.Helper()
	err := lab.WaitFor(t.Context(), func(string) {}, "the next addresses are probed", 5*time.Minute,
		func(ctx context.Context) error {
			for _, a := range l.Agents("speaker") {
				if !slices.Contains(workers(l), a.Node) {
					continue
				}
				if got := metric(t, a, "landfall_speaker_addresses_ahead_clear"); got < n {
					return fmt.Errorf("%s knows %v, want %v", a.Node, got, n)
				}
			}
			return nil
		})
	if err != nil {
		t.Fatal(err)
	}
}

// BenchmarkNewService creates Services one after the other, and reports the time from the call that
// creates one until a client on the LAN has its first byte: with the next addresses probed ahead, and
// without. go test -run '^$' -bench NewService -benchtime 30x -timeout 30m ./e2e
func BenchmarkNewService(b *testing.B) {
	for _, ahead := range []int{16, 0} {
		b.Run(fmt.Sprintf("ahead=%d", ahead), func(b *testing.B) {
			l := labtest.Start(b, lab.SeedCluster(), lab.Options{Progress: func(string) {}})
			pool := fmt.Sprintf("spec: {probeAhead: %d, addresses: [172.26.236.180-172.26.236.250]}", ahead)
			spec := "spec: {addresses: [172.26.236.180-172.26.236.199]}"
			if err := l.ApplyYAML(b.Context(), strings.Replace(poolAndAdvertisement, spec, pool, 1)); err != nil {
				b.Fatal(err)
			}
			spreadPods(b, l)
			var took []time.Duration
			for i, vip := 0, seedVIP.Addr(); b.Loop(); i, vip = i+1, vip.Next() {
				waitAhead(b, l, float64(ahead))
				took = append(took, createTimed(b, l, newService(i), netip.AddrPortFrom(vip, 80)))
			}
			reportGaps(b, took)
		})
	}
}

// createTimed creates a Service, and returns after which time a client that asks all the time got its
// first answer.
func createTimed(b *testing.B, l *lab.Lab, s lab.Service, target netip.AddrPort) time.Duration {
	b.Helper()
	ctx, cancel := context.WithCancel(b.Context())
	var once sync.Once
	var asking sync.WaitGroup
	defer asking.Wait()
	defer cancel()
	answered := make(chan time.Time, 1)
	began := time.Now()
	asking.Go(func() {
		tick := time.NewTicker(4 * time.Millisecond)
		defer tick.Stop()
		for ctx.Err() == nil {
			asking.Go(func() {
				if _, err := l.Ask(ctx, lab.ClientName, "tcp", target); err == nil {
					once.Do(func() { answered <- time.Now() })
				}
			})
			<-tick.C
		}
	})
	if err := l.AddService(ctx, s); err != nil {
		b.Fatal(err)
	}
	select {
	case at := <-answered:
		return at.Sub(began)
	case <-time.After(20 * time.Second):
		b.Fatalf("%s does not answer", target)
		return 0
	}
}
