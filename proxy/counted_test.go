package main

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/landfall-lb/landfall/e2e/cases"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/counters"
	"github.com/landfall-lb/landfall/proxy/nftables"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// counting is a node whose rules are written in one mode, and on which Services are counted.
type counting struct {
	t    *testing.T
	site *cases.Site
	mode string
	*counters.Actor
	stop func()
}

func (c *counting) start(ctx context.Context) {
	c.t.Helper()
	var k counters.Kernel
	c.site.Node.Do(c.t, func() (err error) {
		k, err = counters.Open()
		return err
	})
	c.Actor = counters.New(counters.Deps{Log: slog.New(slog.NewTextHandler(c.t.Output(), nil)), Kernel: k,
		Families: []lb.Family{c.site.World.Family}, Scope: counters.All, Now: time.Now})
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = c.Run(ctx)
	}()
	c.stop = func() {
		cancel()
		<-done
		c.Close()
	}
}

// write writes the rules of a case in the node's mode.
func (c *counting) write(s plan.Service, config plan.Config) {
	c.t.Helper()
	w := c.site.World
	c.site.Node.Do(c.t, func() error {
		k, err := open(c.t.Context(), c.mode, slog.New(slog.DiscardHandler))
		if err != nil {
			return err
		}
		defer k.close()
		if c.mode == modeNftables {
			config = nftables.WithAddresses(config, []netip.Addr{w.Node, w.Node2})
		}
		rules := k.writer(slog.New(slog.DiscardHandler), func() {}, newMetrics(prometheus.NewRegistry()))
		rules.Configure(config)
		rules.Begin(map[lb.Key]plan.Service{s.Key: s})
		_, err = rules.Apply(c.t.Context(), false)
		return err
	})
}

// settled returns what was counted once ok is content, or fails.
func (c *counting) settled(key lb.Key, ok func(counters.Counts) bool) counters.Counts {
	c.t.Helper()
	var got counters.Counts
	for deadline := time.Now().Add(20 * time.Second); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		if got, _ = c.Of(key); ok(got) {
			return got
		}
	}
	c.t.Fatalf("counted %+v", got)
	return got
}

// A Service's connections, packets and refusals are counted by the kernel, wherever they come from, in
// both modes and families, over changes of the rules, restarts, and the loss of the tables.
func TestServicesAreCounted(t *testing.T) {
	for _, mode := range []string{modeNftables, modeIptables} {
		for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
			t.Run(fmt.Sprint(mode, " ", family), func(t *testing.T) {
				c := &counting{t: t, site: cases.NewSite(t, cases.WorldOf(family)), mode: mode}
				c.start(t.Context())
				defer func() { c.stop() }()
				c.story()
			})
		}
	}
}

func (c *counting) story() {
	t, w := c.t, c.site.World
	key := lb.Key{Namespace: "test", Name: "web"}
	apply := func(of cases.Case, first bool) {
		t.Helper()
		s, config := of.Plan(w)
		c.write(s, config)
		if all := map[lb.Key]plan.Service{key: s}; first {
			c.Begin(all)
		} else {
			c.Update(all)
		}
		c.site.Forget(t)
	}
	ask := func(from, to string, protocol lb.Protocol) {
		t.Helper()
		if _, _, err := c.site.Ask(cases.Case{From: from, To: to, Protocol: protocol}, cases.Long); err != nil {
			t.Fatalf("from %s to %s: %v", from, to, err)
		}
	}
	apply(cases.Case{}, true)
	c.ready(key)
	before := counters.Counts{}
	for _, from := range []string{"outside", "pod", "node", "local"} {
		for _, to := range []string{"vip", "cluster", "external", "nodeport"} {
			for _, protocol := range []lb.Protocol{lb.TCP, lb.UDP} {
				ask(from, to, protocol)
				// An answer is there before its last packets: those come, more connections do not.
				got := c.settled(key, func(n counters.Counts) bool {
					return n.Connections >= before.Connections+1 && n.PacketsSent > before.PacketsSent
				})
				if got.Connections != before.Connections+1 || got.PacketsReceived <= before.PacketsReceived ||
					got.BytesReceived <= before.BytesReceived || got.BytesSent <= before.BytesSent || len(got.Refused) > 0 {
					t.Errorf("%s from %s to %s: %+v after %+v", protocol, from, to, got, before)
				}
				before = got
			}
		}
	}
	// As with other endpoints, and after a restart.
	apply(cases.Case{Backends: []cases.Backend{{At: "local2", Ready: true, Serving: true}}}, false)
	ask("outside", "vip", lb.TCP)
	n := before.Connections + 1
	c.settled(key, func(got counters.Counts) bool { return got.Connections == n })
	c.stop()
	c.start(t.Context())
	apply(cases.Case{}, true)
	c.settled(key, func(got counters.Counts) bool { return got.Connections == n })
	// The tables are lost, and come back: what was counted stays.
	for _, table := range []string{"ip", "ip6"} {
		if (table == "ip") == (w.Family == lb.IPv4) {
			c.site.Node.Run(t, "nft", "delete", "table", table, counters.TableName)
		}
	}
	c.settled(key, func(got counters.Counts) bool {
		ask("outside", "vip", lb.TCP)
		return got.Connections > n
	})

	refused := func(reason lb.Reason, from string, of cases.Case) {
		t.Helper()
		apply(of, false)
		before, _ := c.Of(key)
		c.settled(key, func(got counters.Counts) bool {
			_, _, err := c.site.Ask(cases.Case{From: from, To: "vip"}, cases.Short)
			return err != nil && got.Refused[reason] > before.Refused[reason]
		})
	}
	refused(lb.ReasonNoBackends, "outside", cases.Case{Backends: []cases.Backend{}})
	refused(lb.ReasonNoLocalBackends, "outside", cases.Case{
		Service:  func(_ cases.World, s *lb.Service) { s.ExternalPolicy = lb.Local },
		Backends: []cases.Backend{{At: "remote", Ready: true, Serving: true}}})
	refused(lb.ReasonSourceRefused, "stranger", cases.Case{
		Service: func(w cases.World, s *lb.Service) { s.SourceRanges = []netip.Prefix{cases.Host(w.Outside)} }})
	c.Update(map[lb.Key]plan.Service{key: {Key: key}})
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		if _, ok := c.Of(key); !ok {
			break
		} else if time.Now().After(deadline) {
			t.Fatal("a Service that is gone is still counted")
		}
	}
}

// ready waits until the tables are written, as a connection before that is not counted, and checks that
// nft can read back what it prints.
func (c *counting) ready(key lb.Key) {
	c.t.Helper()
	table := map[lb.Family]string{lb.IPv4: "ip", lb.IPv6: "ip6"}[c.site.World.Family]
	for deadline := time.Now().Add(20 * time.Second); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		if _, ok := c.Of(key); ok {
			c.site.Node.Run(c.t, "sh", "-c", fmt.Sprintf("nft list table %s %s | nft -c -f -", table, counters.TableName))
			return
		}
	}
	c.t.Fatal("the Service is not counted")
}
