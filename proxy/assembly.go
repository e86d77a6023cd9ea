package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/actor"
	"github.com/landfall-lb/landfall/internal/kube"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/links"
	"github.com/landfall-lb/landfall/internal/ops"
	"github.com/landfall-lb/landfall/internal/preflight"
	"github.com/landfall-lb/landfall/proxy/across"
	"github.com/landfall-lb/landfall/proxy/conntrack"
	"github.com/landfall-lb/landfall/proxy/dialect"
	"github.com/landfall-lb/landfall/proxy/feed"
	"github.com/landfall-lb/landfall/proxy/health"
	"github.com/landfall-lb/landfall/proxy/iptables"
	"github.com/landfall-lb/landfall/proxy/loads"
	"github.com/landfall-lb/landfall/proxy/nftables"
	"github.com/landfall-lb/landfall/proxy/offload"
	"github.com/landfall-lb/landfall/proxy/path"
	"github.com/landfall-lb/landfall/proxy/plan"
	"github.com/landfall-lb/landfall/proxy/probe"
	"github.com/landfall-lb/landfall/proxy/readiness"
	"github.com/landfall-lb/landfall/proxy/relayfeed"
	"github.com/landfall-lb/landfall/proxy/relayfeed/wire"
	"github.com/landfall-lb/landfall/proxy/requested"
	"github.com/landfall-lb/landfall/proxy/rescue"
	"github.com/landfall-lb/landfall/proxy/senders"
	"github.com/landfall-lb/landfall/proxy/vrf"
)

// assembly is a proxy that is being put together: the loop, what it reads, and the actors that it tells.
type assembly struct {
	*flags
	rt         *ops.Runtime
	client     *kube.Client
	set        settings
	kernel     kernel
	parameters kernelParameters

	proxy   *proxy
	metrics *metrics
	events  *kube.Events
	watcher *links.Watcher
	walker  *path.Actor    // nil if nothing looks at the way to endpoints
	through *vrf.Actor     // nil if VRFs are left alone
	devices *offload.Actor // nil if nothing is offloaded
	rules   *dialect.Actor
	cuts    *conntrack.Actor
	offer   *feed.Actor
	end     *departure
	actors  map[string]actor.Runner
	closers []func()

	outlast func(context.Context) // waits for a relay that ends too; nil without one
}

func newAssembly(f *flags, rt *ops.Runtime, client *kube.Client, set settings, k kernel,
	parameters kernelParameters) *assembly {
	p := newProxy(rt.NodeName, set, k.families, rt.Log, time.Now)
	p.mode = k.mode
	if k.mode == modeNftables && set.limit > 0 {
		p.affinity = plan.NewAffinityShares(plan.MaxManyPlaces, plan.MaxFewPlaces)
	}
	if rt.Traces.On() {
		p.spans.add = rt.Traces.Add
	}
	return &assembly{flags: f, rt: rt, client: client, set: set, kernel: k, parameters: parameters, proxy: p,
		metrics: newMetrics(rt.Metrics), events: client.Events(name, rt.NodeName),
		actors: map[string]actor.Runner{"plan": p.runner}}
}

// close closes what was opened, the last first.
func (a *assembly) close() {
	for _, c := range slices.Backward(a.closers) {
		c()
	}
}

// onClose has something closed in the end.
func (a *assembly) onClose(c func()) { a.closers = append(a.closers, c) }

// read has the loop follow what it reads.
func (a *assembly) read() {
	p, m := a.proxy, a.metrics
	addressesChanged := ifAddressesChange(p.markFacts)
	a.watcher = watchLinks(a.rt.Log, func(interfaces []lb.Interface) {
		addressesChanged(interfaces)
		if a.walker != nil {
			a.walker.Poke()
		}
		a.pokeVRFs()
		if a.devices != nil {
			a.devices.Poke()
		}
	})
	facts := func(string) { p.markFacts() }
	p.from = sources{
		services: kube.Services(a.client, a.serviceSelector(), m.counting(m.services, p.mark)),
		slices:   kube.Slices(a.client, m.counting(m.endpoints, p.markEndpoints)),
		nodes:    kube.Nodes(a.client, "", p.markNode), interfaces: a.watcher.All,
		networks: kube.ServiceNetworks(a.client, facts), pools: kube.PoolRanges(a.client, facts),
		routers: kube.Routers(a.client, func(string) {
			p.markFacts()
			a.pokeVRFs()
		}),
	}
	a.client.OnSync(p.markFacts)
	a.client.OnSync(a.pokeVRFs)
	a.actors["watches"], a.actors["interfaces"], a.actors["events"] = a.client, a.watcher, a.events
}

// pokeVRFs says that VRFs have changed, or which of them routers are in.
func (a *assembly) pokeVRFs() {
	if a.through != nil {
		a.through.Poke()
	}
}

// write gives the loop the actors that every proxy has.
func (a *assembly) write() error {
	p, rt := a.proxy, a.rt
	// A change waits once, and its confirmation for nothing.
	a.rules = a.kernel.writer(rt.Log, p.runner.PokeNow, a.metrics)
	var err error
	if a.cuts, err = a.cutter(); err != nil {
		return err
	}
	a.offer = feed.New(rt.Log, a.feedSocket, p.runner.PokeNow, a.busy)
	p.from.update = a.offer.Heard
	a.end, err = a.departure(a.client, rt.Log, func() { a.offer.Withdraw(); p.leave() }, a.offer.Readers)
	if err != nil {
		return err
	}
	a.onClose(a.end.close)
	checks := a.healthPorts()
	var strict, noTunnel note
	rescuer, err := a.rescuer(&strict, &noTunnel)
	if err != nil {
		return err
	}
	flight := a.newPreflight(p, a.set, a.parameters, strict.get, noTunnel.get,
		func(f lb.Finding, gone bool) { a.events.Finding(rt.NodeName, f, gone) })
	p.found, p.trouble, p.connections = flight.Found, a.client.Trouble, connections
	p.to = sinks{rules: a.rules, flows: a.cuts, health: checks, feed: a.offer, rescue: rescuer,
		latency: a.metrics.latency, programmed: a.metrics.programmed, warn: a.warn, probed: a.probed}
	conditions := a.newRequests()
	p.to.requests, a.actors["conditions"] = conditions, conditions
	maps.Copy(a.actors, map[string]actor.Runner{"rules": a.rules, "conntrack": a.cuts, "health ports": checks,
		"feed": a.offer, "rescue": rescuer, "preflight": flight})
	rt.Metrics.MustRegister(newCollector(p, a.offer.Readers), rescued(rescuer), rescueDropped(rescuer),
		rescueRefused(rescuer), rescueTargets(rescuer), preflight.Collector("landfall_proxy_node_findings", flight.Found))
	return nil
}

// busy returns for how long the loop, or the kernel's writer, has been at one thing.
func (a *assembly) busy() time.Duration { return max(a.proxy.runner.Busy(), a.rules.Busy()) }

// warn tells users of a Service what is wrong with it.
func (a *assembly) warn(s lb.Service, reason lb.Reason, message string) {
	a.events.Warning(kube.ServiceReference(s), reason, message)
}

// probed tells users of a Service what probes have found.
func (a *assembly) probed(s lb.Service, reason lb.Reason, message string) {
	if reason == lb.ReasonProbePassed {
		a.events.Normal(kube.ServiceReference(s), reason, message)
	} else {
		a.warn(s, reason, message)
	}
}

// cutter returns the actor that cuts stale flows.
func (a *assembly) cutter() (*conntrack.Actor, error) {
	flows, err := conntrack.Open()
	if err != nil {
		return nil, err
	}
	a.onClose(func() { flows.Close() })
	return conntrack.New(conntrack.Deps{Log: a.rt.Log, Table: flows, Deleted: a.metrics.cut,
		Local: func() ([]netip.Addr, error) {
			interfaces, ok := a.watcher.All()
			if !ok {
				return nil, errors.New("the network interfaces have not been listed yet")
			}
			return localAddresses(interfaces), nil
		}}), nil
}

// healthPorts returns the actor that answers on health ports.
func (a *assembly) healthPorts() *health.Actor {
	return health.New(health.Deps{
		Log: a.rt.Log, Now: time.Now, NodeAddress: a.healthzAddress(), Listen: net.Listen, Answered: a.metrics.answered,
		Failed: func(key lb.Key, port uint16, err error) {
			if svc, ok := a.proxy.from.services.Get(key); ok && err != nil {
				a.warn(svc, reasonHealthPort, fmt.Sprintf("node %s failed to start healthcheck on port %d: %v",
					a.rt.NodeName, port, err))
			}
		},
	})
}

// rescuer returns the actor that hands over packets of connections that this node does not know. It notes what
// keeps it from that.
func (a *assembly) rescuer(strict, noTunnel *note) (*rescue.Actor, error) {
	neighbors, err := rescue.Open(uint16(a.rescueTunnelPort))
	if err != nil {
		return nil, err
	}
	a.onClose(func() { neighbors.Close() })
	return rescue.New(rescue.Deps{Log: a.rt.Log, Kernel: neighbors,
		Families: a.rescueFamilies(a.kernel.families, a.rt.Log), Ring: a.rescueRing, Limit: a.rescueLimit,
		Direct: len(a.set.direct) > 0, Confirmed: a.offer.Rescued, Parameters: a.procSysNet, Warn: strict.set,
		NoTunnel: noTunnel.set}), nil
}

// addOptional gives the loop the actors that flags or the mode leave out.
func (a *assembly) addOptional() error {
	p := a.proxy
	for _, add := range []func() error{a.addCounters, a.addSenders, a.addAcross, a.addRelay, a.addWalker, a.addVRFs,
		a.addOffload} {
		if err := add(); err != nil {
			return err
		}
	}
	if a.kernel.mode == modeNftables {
		counting := loads.New(loads.Deps{Log: a.rt.Log, Now: time.Now, Tell: a.rules.Weigh,
			Open: func() (loads.Source, error) { return conntrack.OpenWatch() }})
		p.to.loads, a.actors["loads"] = counting, counting
		a.rt.Metrics.MustRegister(newLoadsCollector(counting.Counts))
	}
	if a.gateTimeout > 0 {
		opener := a.newOpener(a.client, a.rt.Log, a.metrics)
		p.from.gated = kube.GatedPods(a.client, a.rt.NodeName, p.markGated)
		p.to.gates, a.actors["readiness gates"] = opener, opener
		a.offer.AskUnannounced()
	}
	if a.probeInterval > 0 {
		prober := a.newProber(p, a.metrics)
		p.to.probes, p.from.probes = prober, prober.Take
		a.actors["probes"] = prober
	}
	return nil
}

// addCounters has what Services get counted, with --service-counters.
func (a *assembly) addCounters() error {
	counted, err := a.counters(a.kernel.families, a.rt.Log)
	if err != nil || counted == nil {
		return err
	}
	a.onClose(func() { counted.Close() })
	a.proxy.to.counters, a.proxy.counted = counted, counted.Of
	a.rt.Metrics.MustRegister(newCountersCollector(counted.All))
	a.actors["counters"] = counted
	return nil
}

// addSenders finds out the MAC addresses of nodes that hand packets over.
func (a *assembly) addSenders() error {
	if len(a.set.direct) == 0 {
		return nil
	}
	near, err := links.OpenNeighbors()
	if err != nil {
		return err
	}
	a.onClose(func() { near.Close() })
	handing := senders.New(senders.Deps{Log: a.rt.Log, Changed: a.proxy.markFacts, Look: macsOf(near)})
	a.proxy.to.senders, a.actors["senders"] = handing, handing
	return nil
}

// addAcross finds out which nodes behind routers take what is handed over.
func (a *assembly) addAcross() error {
	if len(a.set.direct) == 0 || a.rescueTunnelPort == 0 {
		return nil
	}
	line, err := across.Open(a.kernel.families)
	if err != nil {
		return err
	}
	a.onClose(line.Close)
	asking := across.New(across.Deps{Log: a.rt.Log, Line: line, Now: time.Now, Changed: a.proxy.markFacts})
	a.proxy.to.across, a.actors["nodes behind routers"] = asking, asking
	return nil
}

// addRelay tells the relay what is relayed.
func (a *assembly) addRelay() error {
	if !a.set.relay {
		return nil
	}
	flows, err := conntrack.Open()
	if err != nil {
		return err
	}
	a.onClose(func() { flows.Close() })
	deps := relayfeed.Deps{Log: a.rt.Log, Path: a.relaySocket, Busy: a.busy, Answering: a.cuts.SetRelays,
		Original: func(f wire.Flow) (from, to netip.AddrPort, ok bool, err error) {
			return flows.Original(unix.IPPROTO_UDP, f.Client, f.At)
		}}
	lease := iptables.NewLease()
	deps.Renew, deps.End, deps.TCPOnly, deps.Moved = lease.Renew, lease.End, true, a.proxy.markFacts
	if a.kernel.mode == modeNftables {
		lease, err := nftables.OpenLease()
		if err != nil {
			return err
		}
		a.onClose(func() { lease.Close() })
		deps.Renew, deps.End, deps.TCPOnly, deps.Moved = lease.Renew, lease.End, false, nil
	}
	relays := relayfeed.New(deps)
	a.proxy.to.relay, a.actors["relay"] = relays, relays
	a.outlast = relays.Outlast
	if a.kernel.mode == modeIptables {
		a.proxy.from.relayPorts = relays.Ports
		return nil
	}
	counts, err := nftables.OpenLease() // not the one of the feed, which is not safe for concurrent use
	if err != nil {
		return err
	}
	a.onClose(func() { counts.Close() })
	a.rt.Metrics.MustRegister(&relayRules{log: a.rt.Log,
		counts: func() (nftables.RelayCounts, error) { return counts.Counts(a.kernel.families) }})
	return nil
}

// leaves reports whether the rules have to go. A relay that ends with the proxy has ended before it returns, and
// its flows are cut: they would go to a closed port for as long as their clients send.
func (a *assembly) leaves(ctx context.Context) bool {
	leaves := a.end.leaves(ctx)
	if a.outlast != nil {
		a.outlast(ctx)
		cutting, end := context.WithTimeout(ctx, cutTimeout)
		defer end()
		for !a.cuts.Settled() && pause(cutting, askEvery) {
		}
	}
	return leaves
}

// addWalker finds out to which endpoints the kernel has a way.
func (a *assembly) addWalker() error {
	if a.pathCheck == pathOff {
		return nil
	}
	fib, err := links.OpenFIB(netns.None())
	if err != nil {
		return err
	}
	a.onClose(func() { fib.Close() })
	a.walker = a.newWalker(a.proxy, fib, a.parameters)
	a.proxy.to.targets, a.proxy.from.path = a.walker, a.walker.Take
	a.actors["path"] = a.walker
	return nil
}

// addVRFs delivers what comes in through VRFs.
func (a *assembly) addVRFs() error {
	if a.vrfMark == 0 {
		return nil
	}
	marks, fib, err := openVRFs(vrf.Marks(a.vrfMark))
	if err != nil {
		return err
	}
	a.onClose(func() { marks.Close() })
	a.onClose(func() { fib.Close() })
	a.through = a.newVRFs(a.proxy, marks, fib, a.kernel.families, a.offer.SetVRFs)
	a.proxy.from.vrfs, a.actors["VRFs"] = a.through.States, a.through
	return nil
}

// addOffload has the flowtables of the rules take packets from the node's interfaces.
func (a *assembly) addOffload() error {
	if len(a.set.offload) == 0 {
		return nil
	}
	tables, err := nftables.OpenFlowtables()
	if err != nil {
		return err
	}
	a.onClose(tables.Close)
	a.devices = offload.New(offload.Deps{Log: a.rt.Log, Kernel: tables, Interfaces: a.watcher.All,
		Families: slices.Sorted(maps.Keys(a.set.offload))})
	a.actors["flow offloading"] = a.devices
	return nil
}

// leaveVRFs removes what an earlier proxy has written for VRFs, with --vrf-mark=0.
func (a *assembly) leaveVRFs() {
	if a.vrfMark != 0 {
		return
	}
	if err := vrf.Cleanup(); err != nil {
		a.rt.Log.Debug("cannot remove the rules for VRFs", "error", err)
	}
}

// show has the program say what it does.
func (a *assembly) show() {
	a.rt.Status(a.proxy.writeStatus)
	a.rt.ReviewMetrics(a.client.ReviewMetrics, a.client.Size)
	a.rt.Ready("proxy", a.proxy.ready)
	a.rt.Log.Info("starting", "version", ops.BuildVersion(), "node", a.rt.NodeName, "api", a.client.Host(),
		"mode", a.kernel.mode, "families", a.proxy.families)
}

// runs returns what runs for as long as the proxy does. live has the liveness of a loop watched.
func (a *assembly) runs(live func(loop string, busy func() time.Duration)) []func(context.Context) error {
	var runs []func(context.Context) error
	for name, one := range a.actors {
		live(name, one.Busy)
		runs = append(runs, one.Run)
	}
	return append(runs, func(ctx context.Context) error {
		select {
		case <-ctx.Done():
		case <-a.proxy.settled:
			a.kernel.leaveOther(ctx, a.rt.Log, a.parameters)
			a.leaveVRFs()
		}
		return nil
	})
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
func (f *flags) newPreflight(p *proxy, set settings, parameters kernelParameters, strict, noTunnel func() string,
	tell func(f lb.Finding, gone bool)) *preflight.Preflight {
	var accepter iptables.Accepter
	ports, tracking := newPortReuse(parameters), newLiberal(parameters)
	h := host{proxy: p, parameters: parameters, podNetworks: set.pods.Prefixes, nodeCIDR: set.nodeCIDR,
		acceptForwarded: set.acceptForwarded, log: p.log, chains: forwardChains, inputs: inputChains, accept: accepter.Set,
		reusePorts: ports.set, strict: strict, noTunnel: noTunnel,
		routes: func(pods []netip.Addr) (map[netip.Addr]lb.RouteKind, error) {
			return links.RoutesTo(netns.None(), pods)
		}}
	look := func(ctx context.Context) ([]lb.Finding, bool) {
		tracking.set(f.liberal) // others may have flushed the note
		return h.look(ctx)
	}
	return preflight.New(preflight.Options{Log: p.log, Now: time.Now, Look: look, Tell: tell})
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
	tell func(map[string]string)) *vrf.Actor {
	return vrf.New(vrf.Deps{
		Log: p.log, Now: p.now, Kernel: kernel, Marks: vrf.Marks(f.vrfMark), Families: families,
		Narrow:     f.narrowVRFs(),
		Interfaces: p.from.interfaces, Way: fib.WayIn,
		Wanted:   func() (map[string]bool, bool) { return vrfsOf(p.from.routers.All()), p.from.routers.Synced() },
		Backends: func() []netip.Addr { return leastEndpoints(p.from.slices.All(), vrfBackends) },
		Tell:     tell, Changed: p.markFacts,
	})
}

// narrowVRFs reports whether packets from VRFs to endpoints take no default route: not even where nothing looks at the
// way to endpoints.
func (f *flags) narrowVRFs() bool { return f.pathCheck != pathDefaultRoute }

// vrfsOf returns the VRFs that routers are in.
func vrfsOf(routers map[string]lb.Router) map[string]bool {
	vrfs := map[string]bool{}
	for _, r := range routers {
		if r.VRF != "" {
			vrfs[r.VRF] = true
		}
	}
	return vrfs
}

// vrfBackends is how many endpoints are looked at for some to which the node has a way.
const vrfBackends = 64

// leastEndpoints returns the least addresses of endpoints, in order.
func leastEndpoints(all map[lb.Key][]lb.Slice, most int) (addrs []netip.Addr) {
	for _, of := range all {
		for _, s := range of {
			for _, e := range s.Endpoints {
				if len(addrs) == most && e.Addr.Compare(addrs[most-1]) >= 0 {
					continue
				}
				if at, found := slices.BinarySearchFunc(addrs, e.Addr, netip.Addr.Compare); !found {
					addrs = slices.Insert(addrs[:min(len(addrs), most-1)], at, e.Addr)
				}
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

// newRequests returns the actor that writes which requests of Services nodes do not follow.
func (a *assembly) newRequests() *requested.Actor {
	status := a.client.Status(time.Now)
	return requested.New(requested.Deps{Log: a.rt.Log, Now: time.Now, Gone: kube.IsNotFound,
		Write: func(ctx context.Context, key lb.Key, w plan.ConditionWrite) error {
			return status.AsRequested(ctx, lb.Service{Key: key, UID: w.UID, AsRequested: w.Shown}, w.Want)
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
