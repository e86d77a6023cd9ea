// landfall-proxy programs this node's kernel to forward the connections to Services, and says what the kernel is known to deliver.
package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/kube"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/links"
	"github.com/landfall-lb/landfall/internal/ops"
	"github.com/landfall-lb/landfall/proxy/conntrack"
	"github.com/landfall-lb/landfall/proxy/feed"
	"github.com/landfall-lb/landfall/proxy/health"
)

const name = "landfall-proxy"

// reasonHealthPort is the Event that kube-proxy has for a health port that cannot be opened.
const reasonHealthPort lb.Reason = "FailedToStartServiceHealthcheck"

func main() {
	var f flags
	metrics := ":7482"
	if slices.Contains(os.Args, "cleanup") || slices.Contains(os.Args, "--cleanup") {
		metrics = "" // where a proxy may still be running
	}
	os.Exit(ops.Main(ops.Program{
		Name:               name,
		Summary:            "programs this node's kernel to forward the connections to Services, and says what the kernel is known to deliver",
		MetricsBindAddress: metrics,
		Flags:              f.add,
		Run:                f.run,
	}))
}

func (f *flags) run(ctx context.Context, rt *ops.Runtime) error {
	if f.cleanup || slices.Equal(rt.Args, []string{"cleanup"}) {
		if err := cleanup(ctx); err != nil {
			return fmt.Errorf("clean up: %w", err)
		}
		rt.Log.Info("removed all rules of Landfall from this node")
		return nil
	}
	set, err := f.settings()
	if err != nil {
		return err
	}
	client, err := kube.Connect(kube.Options{Kubeconfig: rt.Kubeconfig, UserAgent: name, Log: rt.Log})
	if err != nil {
		return err
	}
	kernel, err := open(ctx, f.mode, rt.Log)
	if err != nil {
		return err
	}
	defer kernel.close()
	setConntrack(conntrackFolder, conntrackHashFile, cores(), f.liberal, rt.Log)
	set.prepareKernel(rt.Log, kernel.mode)
	flows, err := netlink.NewHandle(unix.NETLINK_NETFILTER)
	if err != nil {
		return fmt.Errorf("open a netlink socket for conntrack: %w", err)
	}
	defer flows.Close()

	p := newProxy(rt.NodeName, set, kernel.families, rt.Log, time.Now)
	p.mode = kernel.mode
	metrics := newMetrics(rt.Metrics)
	events := client.Events(name, rt.NodeName)
	watcher := links.New(links.Options{Namespace: netns.None(), Log: rt.Log, Changed: p.runner.Poke})
	services := kube.Services(client, f.serviceSelector(), p.mark)
	p.from = sources{
		services: services, slices: kube.Slices(client, p.mark), nodes: kube.Nodes(client, rt.NodeName, func(string) { p.runner.Poke() }),
		interfaces: watcher.All,
	}
	client.OnSync(p.runner.Poke)
	rules := kernel.dialect(rt.Log, p.runner.Poke, metrics, set.scheduler)
	cutter := conntrack.New(conntrack.Deps{Log: rt.Log, Table: conntrack.Netlink{Handle: flows}, Deleted: metrics.cut, Local: func() ([]netip.Addr, error) {
		interfaces, ok := watcher.All()
		if !ok {
			return nil, errors.New("the network interfaces have not been listed yet")
		}
		return localAddresses(interfaces), nil
	}})
	checks := health.New(health.Deps{
		Log: rt.Log, Now: time.Now, NodeAddress: f.healthzAddress(), Listen: net.Listen,
		Failed: func(key lb.Key, port uint16, err error) {
			if svc, ok := services.Get(key); ok && err != nil {
				events.Warning(kube.ServiceReference(svc), reasonHealthPort, fmt.Sprintf("node %s failed to start healthcheck on port %d: %v", rt.NodeName, port, err))
			}
		},
	})
	offer := feed.New(rt.Log, f.feedSocket)
	p.to = sinks{
		rules: rules, flows: cutter, health: checks, feed: offer, latency: metrics.latency, programmed: metrics.programmed,
		warn: func(s lb.Service, reason lb.Reason, message string) {
			events.Warning(kube.ServiceReference(s), reason, message)
		},
	}
	rt.Metrics.MustRegister(newCollector(p, offer.Readers))
	rt.Handle("GET /v1/status", http.HandlerFunc(p.serveStatus))
	rt.Ready("proxy", p.ready)

	rt.Log.Info("starting", "version", ops.BuildVersion(), "node", rt.NodeName, "api", client.Host(), "mode", kernel.mode, "families", p.families)
	group, ctx := errgroup.WithContext(ctx)
	for _, run := range []func(context.Context) error{
		client.Run, watcher.Run, events.Run, rules.Run, cutter.Run, checks.Run, offer.Run, p.runner.Run,
		func(ctx context.Context) error {
			select {
			case <-ctx.Done():
			case <-p.settled:
				kernel.leaveOther(ctx, rt.Log)
			}
			return nil
		},
	} {
		group.Go(func() error { return run(ctx) })
	}
	return group.Wait()
}

// Files of the kernel.
const (
	routeLocalnet = "/proc/sys/net/ipv4/conf/all/route_localnet"
	beLiberal     = "/proc/sys/net/netfilter/nf_conntrack_tcp_be_liberal"
)

// prepareKernel switches on what node ports at 127.0.0.1 need, and looks whether conntrack finds packets invalid.
func (s *settings) prepareKernel(log *slog.Logger, mode string) {
	if mode == modeNftables {
		// As with kube-proxy: what keeps packets from outside away from 127.0.0.0/8 would need rules ahead of everybody's.
		s.loopbackNodePorts, s.allAddresses = false, true
	}
	if s.loopbackNodePorts {
		if err := switchOn(routeLocalnet); err != nil {
			s.loopbackNodePorts = false
			log.Warn("node ports are not reached at 127.0.0.1", "error", err)
		}
	}
	liberal, err := os.ReadFile(beLiberal)
	s.dropInvalid = err != nil || strings.TrimSpace(string(liberal)) != "1"
}

// switchOn writes 1 to a kernel parameter, unless it is there already: it may be read-only for us, and right.
func switchOn(file string) error {
	if now, err := os.ReadFile(file); err == nil && strings.TrimSpace(string(now)) == "1" {
		return nil
	}
	return os.WriteFile(file, []byte("1\n"), 0o644)
}

// ready tells why the proxy does not do its work yet, or nil when it does.
func (p *proxy) ready() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.waiting != "":
		return fmt.Errorf("waiting for %s", p.waiting)
	case !p.complete:
		return errors.New("the kernel has not confirmed the rules yet")
	}
	return nil
}
