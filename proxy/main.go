// landfall-proxy programs this node's kernel to forward connections to Services, and reports what
// the kernel delivers.
package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"github.com/vishvananda/netns"

	"github.com/landfall-lb/landfall/internal/actor"
	"github.com/landfall-lb/landfall/internal/kube"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/links"
	"github.com/landfall-lb/landfall/internal/ops"
	"github.com/landfall-lb/landfall/internal/preflight"
	"github.com/landfall-lb/landfall/proxy/conntrack"
	"github.com/landfall-lb/landfall/proxy/feed"
	"github.com/landfall-lb/landfall/proxy/health"
	"github.com/landfall-lb/landfall/proxy/iptables"
	"github.com/landfall-lb/landfall/proxy/loads"
	"github.com/landfall-lb/landfall/proxy/nftables"
	"github.com/landfall-lb/landfall/proxy/path"
	"github.com/landfall-lb/landfall/proxy/plan"
	"github.com/landfall-lb/landfall/proxy/probe"
	"github.com/landfall-lb/landfall/proxy/readiness"
	"github.com/landfall-lb/landfall/proxy/relayfeed"
	"github.com/landfall-lb/landfall/proxy/rescue"
	"github.com/landfall-lb/landfall/proxy/senders"
	"github.com/landfall-lb/landfall/proxy/vrf"
)

const name = "landfall-proxy"

// reasonHealthPort is the Event that kube-proxy has for a health port that cannot be opened.
const reasonHealthPort lb.Reason = "FailedToStartServiceHealthcheck"

func main() {
	if args, ok := isRelay(os.Args); ok {
		os.Args = args
		os.Exit(ops.Main(relayProgram(&relayFlags{})))
	}
	if known, err := look(os.Args[1:], os.Stdout); known {
		if err != nil {
			fmt.Fprintf(os.Stderr, "%s: %v\n", name, err)
			os.Exit(1)
		}
		return
	}
	var f flags
	metrics, statusSocket := "localhost:7482", "/run/landfall/proxy.sock"
	if slices.Contains(os.Args, "cleanup") || slices.Contains(os.Args, "--cleanup") {
		metrics, statusSocket = "", "" // where a proxy may still be running
	}
	os.Exit(ops.Main(ops.Program{
		Name: name,
		Summary: "programs this node's kernel to forward connections to Services, and reports what the kernel " +
			"delivers",
		MetricsBindAddress: metrics,
		StatusSocket:       statusSocket,
		Flags:              f.add,
		Usage:              lookUsage,
		Run:                f.run,
	}))
}

// gcPercent has garbage collected earlier than usual: most of the memory is held for good, and a
// proxy runs on every node.
const gcPercent = 25

// spare is memory that counts for the collector, and nothing touches, so that the kernel gives none
// for it. Without it a proxy that holds little collects garbage after each 2 MiB, many times a second
// while Services come.
const spare = 16 << 20

// fold is how events are read that keep coming. Some hundred changes at once wait for nothing.
var fold = kube.Fold{Every: 100 * time.Millisecond, Burst: 250}

func (f *flags) run(ctx context.Context, rt *ops.Runtime) error {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(gcPercent)
		defer runtime.KeepAlive(make([]byte, spare))
	}
	if f.cleanup || slices.Equal(rt.Args, []string{"cleanup"}) {
		if err := cleanup(ctx, kernelParameters{f.procSysNet, rt.Log}); err != nil {
			return fmt.Errorf("clean up: %w", err)
		}
		rt.Log.Info("removed all of Landfall's rules from this node")
		return nil
	}
	left, err := f.serve(ctx, rt)
	if err != nil || !left {
		return err
	}
	if err := removeAll(context.WithoutCancel(ctx), rt.Log, func(ctx context.Context) error {
		return cleanup(ctx, kernelParameters{f.procSysNet, rt.Log})
	}); err != nil {
		return fmt.Errorf("remove the rules: %w", err)
	}
	return nil
}

// serve serves until ctx ends, and reports whether the rules have to go then.
func (f *flags) serve(ctx context.Context, rt *ops.Runtime) (left bool, err error) {
	set, err := f.settings()
	if err != nil {
		return false, err
	}
	client, err := kube.Connect(kube.Options{Kubeconfig: rt.Kubeconfig, Servers: rt.APIServers, UserAgent: name,
		Log: rt.Log, Fold: fold})
	if err != nil {
		return false, err
	}
	set.apiServers = client.Servers()
	kernel, err := open(ctx, f.mode, rt.Log)
	if err != nil {
		return false, err
	}
	defer kernel.close()
	parameters := kernelParameters{f.procSysNet, rt.Log}
	parameters.conntrack(cores(), f.liberal)
	if f.setIPForward {
		parameters.switchOn(forwardingParameters[lb.IPv4])
	}
	set.prepareKernel(ctx, parameters, kernel)
	if f.direct && f.rescue && f.rescueRing {
		set.prepareDirect(kernel, rt.Log)
	}
	if kernel.mode == modeIptables && set.scheduler != plan.Random {
		rt.Log.Warn("iptables mode spreads connections at random; other schedulers need --mode=nftables", "scheduler",
			set.scheduler)
	}
	flows, err := conntrack.Open()
	if err != nil {
		return false, err
	}
	defer flows.Close()
	neighbors, err := rescue.Open(uint16(f.rescueTunnelPort))
	if err != nil {
		return false, err
	}
	defer neighbors.Close()

	p := newProxy(rt.NodeName, set, kernel.families, rt.Log, time.Now)
	p.mode = kernel.mode
	if rt.Traces.On() {
		p.spans.add = rt.Traces.Add
	}
	metrics := newMetrics(rt.Metrics)
	events := client.Events(name, rt.NodeName)
	var walker *path.Actor
	var through *vrf.Actor
	addressesChanged := ifAddressesChange(p.markFacts)
	watcher := watchLinks(rt.Log, func(interfaces []lb.Interface) {
		addressesChanged(interfaces)
		if walker != nil {
			walker.Poke()
		}
		if through != nil {
			through.Poke()
		}
	})
	services := kube.Services(client, f.serviceSelector(), metrics.counting(metrics.services, p.mark))
	p.from = sources{
		services: services, slices: kube.Slices(client, metrics.counting(metrics.endpoints, p.markEndpoints)),
		nodes:      kube.Nodes(client, "", p.markNode),
		interfaces: watcher.All, networks: kube.ServiceNetworks(client, func(string) { p.markFacts() }),
		pools:   kube.PoolRanges(client, func(string) { p.markFacts() }),
		routers: kube.RouterAddresses(client, func(string) { p.markFacts() }),
	}
	client.OnSync(p.markFacts)
	rules := kernel.writer(rt.Log, p.runner.PokeNow, metrics) // a change waits once, and its confirmation for nothing
	cutter := conntrack.New(conntrack.Deps{Log: rt.Log, Table: flows, Deleted: metrics.cut,
		Local: func() ([]netip.Addr, error) {
			interfaces, ok := watcher.All()
			if !ok {
				return nil, errors.New("the network interfaces have not been listed yet")
			}
			return localAddresses(interfaces), nil
		}})
	checks := health.New(health.Deps{
		Log: rt.Log, Now: time.Now, NodeAddress: f.healthzAddress(), Listen: net.Listen, Answered: metrics.answered,
		Failed: func(key lb.Key, port uint16, err error) {
			if svc, ok := services.Get(key); ok && err != nil {
				events.Warning(kube.ServiceReference(svc), reasonHealthPort,
					fmt.Sprintf("node %s failed to start healthcheck on port %d: %v", rt.NodeName, port, err))
			}
		},
	})
	offer := feed.New(rt.Log, f.feedSocket, p.runner.PokeNow,
		func() time.Duration { return max(p.runner.Busy(), rules.Busy()) })
	p.from.update = offer.Heard
	end, err := f.departure(client, rt.Log, func() { offer.Withdraw(); p.leave() }, offer.Readers)
	if err != nil {
		return false, err
	}
	defer end.close()
	var strict, noTunnel note
	rescuer := rescue.New(rescue.Deps{Log: rt.Log, Kernel: neighbors,
		Families: f.rescueFamilies(kernel.families, rt.Log), Ring: f.rescueRing, Limit: f.rescueLimit,
		Confirmed: offer.Rescued, Parameters: f.procSysNet,
		Warn: strict.set, NoTunnel: noTunnel.set})
	counted, err := f.counters(kernel.families, rt.Log)
	if err != nil {
		return false, err
	}
	flight := newPreflight(p, set, parameters, strict.get, noTunnel.get,
		func(f lb.Finding, gone bool) { events.Finding(rt.NodeName, f, gone) })
	p.found, p.trouble, p.connections = flight.Found, client.Trouble, connections
	p.to = sinks{
		rules: rules, flows: cutter, health: checks, feed: offer, rescue: rescuer, latency: metrics.latency,
		programmed: metrics.programmed,
		warn: func(s lb.Service, reason lb.Reason, message string) {
			events.Warning(kube.ServiceReference(s), reason, message)
		},
		probed: func(s lb.Service, reason lb.Reason, message string) {
			if reason == lb.ReasonProbePassed {
				events.Normal(kube.ServiceReference(s), reason, message)
			} else {
				events.Warning(kube.ServiceReference(s), reason, message)
			}
		},
	}
	rt.Metrics.MustRegister(newCollector(p, offer.Readers), rescued(rescuer), rescueDropped(rescuer),
		rescueRefused(rescuer), rescueTargets(rescuer), preflight.Collector("landfall_proxy_node_findings", flight.Found))
	rt.Status(p.writeStatus)
	rt.ReviewMetrics(client.ReviewMetrics)
	rt.Ready("proxy", p.ready)

	rt.Log.Info("starting", "version", ops.BuildVersion(), "node", rt.NodeName, "api", client.Host(), "mode", kernel.mode,
		"families", p.families)
	var runs []func(context.Context) error
	actors := map[string]actor.Runner{
		"watches": client, "interfaces": watcher, "events": events, "rules": rules, "conntrack": cutter,
		"health ports": checks, "feed": offer, "rescue": rescuer, "plan": p.runner, "preflight": flight,
	}
	if counted != nil {
		defer counted.Close()
		p.to.counters, p.counted = counted, counted.Of
		rt.Metrics.MustRegister(newCountersCollector(counted.All))
		actors["counters"] = counted
	}
	if kernel.mode == modeNftables {
		counting := loads.New(loads.Deps{Log: rt.Log, Now: time.Now, Tell: rules.Weigh,
			Open: func() (loads.Source, error) { return conntrack.OpenWatch() }})
		p.to.loads, actors["loads"] = counting, counting
		rt.Metrics.MustRegister(newLoadsCollector(counting.Counts))
	}
	if len(set.direct) > 0 {
		near, err := links.OpenNeighbors()
		if err != nil {
			return false, err
		}
		defer near.Close()
		handing := senders.New(senders.Deps{Log: rt.Log, Changed: p.markFacts, Look: macsOf(near)})
		p.to.senders, actors["senders"] = handing, handing
	}
	if set.relay {
		lease, err := nftables.OpenLease()
		if err != nil {
			return false, err
		}
		defer lease.Close()
		relays := relayfeed.New(relayfeed.Deps{Log: rt.Log, Path: f.relaySocket, Renew: lease.Renew, End: lease.End,
			Busy: func() time.Duration { return max(p.runner.Busy(), rules.Busy()) }})
		p.to.relay, actors["relay"] = relays, relays
	}
	if f.gateTimeout > 0 {
		opener := f.newOpener(client, rt.Log, metrics)
		p.from.gated = kube.GatedPods(client, rt.NodeName, p.markGated)
		p.to.gates, actors["readiness gates"] = opener, opener
	}
	if f.pathCheck != pathOff {
		fib, err := links.OpenFIB(netns.None())
		if err != nil {
			return false, err
		}
		defer fib.Close()
		walker = f.newWalker(p, fib, parameters)
		p.to.targets, p.from.path = walker, walker.Take
		actors["path"] = walker
	}
	if f.vrfMark == 0 {
		if err := vrf.Cleanup(); err != nil {
			rt.Log.Debug("cannot remove the rules for VRFs", "error", err)
		}
	} else {
		marks, fib, err := openVRFs(vrf.Marks(f.vrfMark))
		if err != nil {
			return false, err
		}
		defer marks.Close()
		defer fib.Close()
		through = f.newVRFs(p, marks, fib, kernel.families, offer.SetVRFs)
		p.from.vrfs = through.States
		actors["VRFs"] = through
	}
	if f.probeInterval > 0 {
		prober := f.newProber(p, metrics)
		p.to.probes, p.from.probes = prober, prober.Take
		actors["probes"] = prober
	}
	for name, a := range actors {
		rt.Live(name, a.Busy)
		runs = append(runs, a.Run)
	}
	runs = append(runs, func(ctx context.Context) error {
		select {
		case <-ctx.Done():
		case <-p.settled:
			kernel.leaveOther(ctx, rt.Log, parameters)
		}
		return nil
	})
	return live(ctx, end.leaves, runs)
}

// departure returns what finds out whether this proxy is the last one on its node; without
// --daemonsets it never is.
func (f *flags) departure(client *kube.Client, log *slog.Logger, withdraw func(),
	readers func() int) (*departure, error) {
	own, err := newMark()
	if err != nil {
		return nil, err
	}
	d := &departure{log: log, ask: asker(client, f.namespace, f.daemonSets), others: own.others, withdraw: withdraw,
		readers: readers, close: func() { _ = own.Close() }}
	if len(f.daemonSets) > 0 {
		var watched *kube.Table[string, lb.DaemonSet]
		watched = kube.DaemonSet(client, f.namespace, f.daemonSets[0], func(name string) { d.show(watched.Get(name)) })
	}
	return d, nil
}

// newPreflight returns the actor that looks for what keeps this node from delivering.
func newPreflight(p *proxy, set settings, parameters kernelParameters, strict, noTunnel func() string,
	tell func(f lb.Finding, gone bool)) *preflight.Preflight {
	var accepter iptables.Accepter
	h := host{proxy: p, parameters: parameters, podNetworks: set.pods.Prefixes, nodeCIDR: set.nodeCIDR,
		acceptForwarded: set.acceptForwarded, log: p.log, chains: forwardChains, inputs: inputChains, accept: accepter.Set,
		strict: strict, noTunnel: noTunnel, routes: func(pods []netip.Addr) (map[netip.Addr]lb.RouteKind, error) {
			return links.RoutesTo(netns.None(), pods)
		}}
	return preflight.New(preflight.Options{Log: p.log, Now: time.Now, Look: h.look, Tell: tell})
}

// newWalker returns the actor that knows to which endpoints the kernel has a way.
func (f *flags) newWalker(p *proxy, fib *links.FIB, parameters kernelParameters) *path.Actor {
	return path.New(path.Deps{
		Log: p.log, Now: p.now, Node: p.self, DefaultRoute: f.pathCheck == pathDefaultRoute, Changed: p.runner.Poke,
		Look: fib.Way, Interfaces: p.from.interfaces,
		Addresses: func() []netip.Addr {
			node, _ := p.from.nodes.Get(p.self)
			return node.Addresses
		},
		Watch: func(ctx context.Context, changed func([]links.RouteChange)) error {
			return links.WatchRoutes(ctx, netns.None(), changed)
		},
		Conntrack: func() (count, most int) {
			return parameters.number(parameterCount), parameters.number(parameterMax)
		},
	})
}

// openVRFs opens the way to the kernel for VRFs.
func openVRFs(marks vrf.Marks) (*vrf.Kernel, *links.FIB, error) {
	kernel, err := vrf.Open(marks)
	if err != nil {
		return nil, nil, err
	}
	fib, err := links.OpenFIB(netns.None())
	if err != nil {
		kernel.Close()
		return nil, nil, err
	}
	return kernel, fib, nil
}

// newVRFs returns the actor that delivers what comes in through VRFs; tell is told of which this is so.
func (f *flags) newVRFs(p *proxy, kernel *vrf.Kernel, fib *links.FIB, families []lb.Family,
	tell func(map[string]string)) (a *vrf.Actor) {
	a = vrf.New(vrf.Deps{
		Log: p.log, Kernel: kernel, Marks: vrf.Marks(f.vrfMark), Families: families, Narrow: f.pathCheck == pathStrict,
		Interfaces: p.from.interfaces, Way: fib.WayIn,
		Backends: func() []netip.Addr { return someEndpoints(p.from.slices.All(), vrfBackends) },
		Changed: func() {
			states, _ := a.States()
			tell(states)
			p.markFacts()
		},
	})
	return a
}

// vrfBackends is for how many endpoints the kernel is asked where packets from a VRF go.
const vrfBackends = 16

// someEndpoints returns the addresses of some endpoints.
func someEndpoints(all map[lb.Key][]lb.Slice, most int) (addrs []netip.Addr) {
	for _, slices := range all {
		for _, s := range slices {
			for _, e := range s.Endpoints {
				if len(addrs) == most {
					return addrs
				}
				addrs = append(addrs, e.Addr)
			}
		}
	}
	return addrs
}

// newProber returns the actor that asks backends whether they answer.
func (f *flags) newProber(p *proxy, metrics *metrics) *probe.Actor {
	var dialer net.Dialer
	dialer.SetMultipathTCP(false)
	return probe.New(probe.Deps{Now: p.now, Interval: f.probeInterval, Phase: rand.N[time.Duration],
		Agent: name + "/" + ops.BuildVersion(), Counted: metrics.asked, Changed: p.runner.PokeNow,
		Dial: func(ctx context.Context, to netip.AddrPort) (net.Conn, error) {
			return dialer.DialContext(ctx, "tcp", to.String())
		}})
}

// newOpener returns the actor that opens readiness gates.
func (f *flags) newOpener(client *kube.Client, log *slog.Logger, metrics *metrics) *readiness.Actor {
	return readiness.New(readiness.Deps{Log: log, Opened: metrics.opened,
		Gone: kube.IsNotFound, // not a conflict: many writes to the pod at one moment end so, too
		Write: func(ctx context.Context, pod lb.Key, gate readiness.Gate) error {
			return client.OpenGate(ctx, pod, gate.UID, gate.Reason, gate.Message, time.Now())
		}})
}

// watchLinks watches the node's interfaces.
func watchLinks(log *slog.Logger, changed func([]lb.Interface)) (watcher *links.Watcher) {
	watcher = links.New(links.Options{Namespace: netns.None(), Log: log, Changed: func() {
		interfaces, _ := watcher.All()
		changed(interfaces)
	}})
	return watcher
}

// prepareKernel switches on what node ports at 127.0.0.1 need, and looks whether conntrack finds
// packets invalid.
func (s *settings) prepareKernel(ctx context.Context, parameters kernelParameters, k kernel) {
	if commands, ok := k.commands[lb.IPv4]; ok && k.mode == modeIptables {
		s.prepareLocalnet(ctx, parameters, iptables.Localnet{Kernel: commands})
	} else {
		// As with kube-proxy: what keeps packets from outside away from 127.0.0.0/8 would need rules
		// ahead of everybody's.
		s.loopbackNodePorts = false
	}
	s.allAddresses = k.mode == modeNftables
	s.relay = s.relay && k.mode == modeNftables
	s.dropInvalid = !parameters.on(parameterLiberal)
	if names := parameters.redirecting(); len(names) > 0 {
		parameters.log.Warn(
			"clients on the subnet of a Service's address get ICMP redirects and may miss the first refusals of UDP; set "+
				"net.ipv4.conf.*.send_redirects=0 for all and for these interfaces", "interfaces", strings.Join(names, " "))
	}
}

// prepareDirect finds out in which families the kernel can hand packets over to other nodes.
func (s *settings) prepareDirect(k kernel, log *slog.Logger) {
	s.direct = map[lb.Family]bool{}
	for _, family := range k.families {
		if k.mode != modeNftables {
			continue
		}
		if err := nftables.ProbeDirect(k.netlink, family); err != nil {
			log.Warn("this node does not forward directly", "family", family, "error", err)
			continue
		}
		s.direct[family] = true
	}
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
