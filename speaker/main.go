// landfall-speaker announces external addresses of Services from this node while the node's kernel
// delivers them.
package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"os"
	"path"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"github.com/vishvananda/netns"
	"golang.org/x/sync/errgroup"

	"github.com/landfall-lb/landfall/internal/kube"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/links"
	"github.com/landfall-lb/landfall/internal/ops"
	"github.com/landfall-lb/landfall/speaker/bfd"
	"github.com/landfall-lb/landfall/speaker/bgp"
	"github.com/landfall-lb/landfall/speaker/gate"
	"github.com/landfall-lb/landfall/speaker/l2"
	"github.com/landfall-lb/landfall/speaker/liveness"
	"github.com/landfall-lb/landfall/speaker/members"
	"github.com/landfall-lb/landfall/speaker/plan"
	"github.com/landfall-lb/landfall/speaker/report"
	"github.com/landfall-lb/landfall/speaker/witness"
)

const name = "landfall-speaker"

// leaseName is the Lease by which the two sides of a partition hear of one another. The chart's
// roles name it.
const leaseName = "landfall-speaker"

// excluded are the interfaces that container networks make: nobody asks there for an external
// address.
const excluded = "docker*,cbr*,dummy*,virbr*,lxcbr*,veth*,cali*,tunl*,flannel*,cilium*,kube-ipvs*,cni*," +
	"nodelocaldns*,lxc*"

// handoverTimeout bounds how long a speaker that was told to end goes on for the sake of its heirs.
const handoverTimeout = 5 * time.Second

func main() {
	bfd.ProcessMain() // does not return where this is the process that keeps the BFD sessions
	var f flags
	os.Exit(ops.Main(ops.Program{
		Name:               name,
		Summary:            "announces external addresses of Services from this node while the node's kernel delivers them",
		MetricsBindAddress: ":7481",
		Flags:              f.add,
		Run:                f.run,
	}))
}

type flags struct {
	gate, feedSocket, bindAddress, gossipKeyFile string
	namespace, daemonSet, onConflict, bgpListen  string
	bindPort                                     uint16
	hold, restartHold, announceEvery             time.Duration
	options                                      options
}

func (f *flags) add(set *pflag.FlagSet) {
	addNamespace(set, &f.namespace)
	set.StringVar(&f.options.class, "load-balancer-class", "",
		"announce only Services with this spec.loadBalancerClass (default: only Services without one)")
	set.StringVar(
		&f.gate, "gate", "proxy",
		"what must confirm that this node delivers an address before the speaker announces it: proxy (Landfall's proxy, "+
			"from the kernel's own answer) or none (usable endpoints are enough; for clusters with another service proxy)")
	set.StringVar(&f.feedSocket, "feed-socket", lb.FeedSocket,
		"Unix socket on which the proxy reports what the kernel delivers; the proxy needs the same path")
	set.StringVar(&f.bindAddress, "bind-address", "",
		"IP address for gossip with the other speakers (default: the Node's InternalIP)")
	set.Uint16Var(&f.bindPort, "bind-port", 7947,
		"TCP and UDP port for gossip between speakers; must be open between all nodes and the same on each")
	set.DurationVar(&f.hold, "hold", 30*time.Second,
		"how long the speaker trusts the proxy's last report after the feed disconnects; set it longer than the "+
			"proxy takes to restart")
	set.DurationVar(&f.restartHold, "restart-hold", 5*time.Second,
		"how long addresses stay reserved for a node whose speaker crashed while the node itself still answers; 0 lets "+
			"another node take over at once")
	set.StringSliceVar(&f.options.exclude, "exclude-interfaces", strings.Split(excluded, ","),
		"shell patterns of interfaces that answer ARP and NDP only if an L2Advertisement names them")
	set.StringVar(&f.onConflict, "on-address-conflict", string(plan.RefuseOnConflict),
		"what to do when a device outside the cluster already uses the address: refuse (do not announce it) or announce; "+
			"the Service's annotation "+lb.AnnotationOnConflict+" overrides this")
	set.DurationVar(&f.announceEvery, "announce-every", 0,
		"how often the owner repeats its gratuitous ARP and NDP for an address, at least 1s; set it where switches forget "+
			"MAC addresses sooner than routers refresh them; 0 never repeats")
	set.BoolVar(&f.options.cordonDrains, "drain-on-cordon", false, "move addresses away from a node that is cordoned")
	set.DurationVar(&f.options.convergence, "bgp-convergence", 3*time.Second,
		"how long the speaker announces a route with the community GRACEFUL_SHUTDOWN before a planned withdrawal; set "+
			"it longer than routers take to choose another route")
	set.StringVar(&f.bgpListen, "bgp-listen", "",
		"address:port on which the speaker accepts connections of configured BGP peers, such as :179, 10.0.0.1:179 or "+
			"[::]:1179 (default: none; the speaker opens every session itself)")
	set.StringVar(&f.daemonSet, "daemonset", "",
		"DaemonSet in --namespace that runs the speaker; a speaker that stops after this DaemonSet was deleted withdraws "+
			"its BGP routes, instead of leaving them to a successor (default: always expect a successor)")
	set.StringVar(&f.gossipKeyFile, "gossip-key-file", "",
		"file with the key that encrypts gossip: 16, 24 or 32 bytes, raw or in base64; the same on all nodes (default: "+
			"gossip is not encrypted)")
}

// check reads what the flags say.
func (f *flags) check() (bind netip.Addr, key []byte, err error) {
	if err := cmp.Or(
		ops.OneOf("gate", f.gate, "proxy", "none"), ops.NotNegative("hold", f.hold),
		ops.NotNegative("restart-hold", f.restartHold), ops.NotNegative("bgp-convergence", f.options.convergence),
	); err != nil {
		return bind, nil, err
	}
	if f.options.onConflict, err = plan.ParseOnConflict(f.onConflict); err != nil {
		return bind, nil, ops.Usagef("--on-address-conflict: %w", err)
	}
	if f.announceEvery != 0 && f.announceEvery < time.Second {
		return bind, nil, ops.Usagef("--announce-every: %s is neither 0 nor at least 1s", f.announceEvery)
	}
	if f.bgpListen != "" {
		if err := bgp.CheckListen(f.bgpListen); err != nil {
			return bind, nil, ops.Usagef("--bgp-listen: %w", err)
		}
	}
	for _, pattern := range f.options.exclude {
		if _, err := path.Match(pattern, ""); err != nil {
			return bind, nil, ops.Usagef("--exclude-interfaces: %q: %w", pattern, err)
		}
	}
	if f.bindPort == 0 {
		return bind, nil, ops.Usagef("--bind-port: 0 is not a port that other speakers can connect to")
	}
	if f.bindAddress != "" {
		if bind, err = lb.ParseAddr(f.bindAddress); err != nil {
			return bind, nil, ops.Usagef("--bind-address: %w", err)
		}
	}
	if f.gossipKeyFile != "" {
		content, err := os.ReadFile(f.gossipKeyFile)
		if err != nil {
			return bind, nil, fmt.Errorf("--gossip-key-file: %w", err)
		}
		if key, err = members.ParseKey(content); err != nil {
			return bind, nil, fmt.Errorf("--gossip-key-file %s: %w", f.gossipKeyFile, err)
		}
	}
	return bind, key, nil
}

// watch has the speaker follow what it reads from the API server.
func (f *flags) watch(client *kube.Client, s *speaker) {
	s.from = sources{
		services:       kube.LabelledServices(client, s.changes.markService),
		nodes:          kube.Nodes(client, "", func(node string) { s.changes.markNode(node == s.self) }),
		pools:          kube.Pools(client, func(string) { s.changes.markAll() }),
		advertisements: kube.L2Advertisements(client, func(string) { s.changes.markAll() }),
	}
	s.from.routes = routeSources{
		peers:          kube.BGPPeers(client, s.changes.markRoutes),
		advertisements: kube.BGPAdvertisements(client, s.changes.markRoutes),
		communities:    kube.Communities(client, s.changes.markRoutes),
		profiles:       kube.BFDProfiles(client, s.changes.markRoutes),
		passwords:      kube.Passwords(client, f.namespace, s.changes.markRoutes), namespace: f.namespace,
	}
	if f.daemonSet != "" {
		s.from.daemonSet = kube.DaemonSet(client, f.namespace, f.daemonSet, func(string) { s.runner.Poke() })
	}
	client.OnSync(s.changes.markSynced)
}

func (f *flags) run(ctx context.Context, rt *ops.Runtime) error {
	bind, key, err := f.check()
	if err != nil {
		return err
	}
	if err := prefer(); err != nil {
		rt.Log.Info("the speaker runs at normal priority; without CPU time it looks dead to the other speakers", "error", err)
	}
	client, err := kube.Connect(kube.Options{Kubeconfig: rt.Kubeconfig, UserAgent: name, Log: rt.Log})
	if err != nil {
		return err
	}
	s := newSpeaker(rt.NodeName, f.options.class, rt.Log)
	s.opts = f.options
	f.watch(client, s)

	around := newSurroundings(client, rt, f.namespace, s.from.nodes)
	var watcher *links.Watcher
	watcher = links.New(links.Options{Namespace: netns.None(), Log: rt.Log, Changed: func() {
		if interfaces, known := watcher.All(); known {
			around.Set(interfaces)
		}
		s.changes.markAll()
	}})
	s.from.interfaces = watcher.All
	alive := liveness.New(liveness.Options{Self: rt.NodeName, Hold: f.restartHold, Log: rt.Log,
		Changed: s.changes.markAll})
	talk := members.New(members.Options{
		Self: rt.NodeName, Bind: bindAddress(bind, rt.NodeName, s.from.nodes), Port: int(f.bindPort), Key: key,
		Born: time.Now(), Liveness: alive, Log: rt.Log, Changed: s.changes.markVIPs,
	})
	s.from.members, s.from.liveness = talk, alive
	responder := l2.New(l2.Options{Log: rt.Log, Repeat: f.announceEvery, Stats: newPackets(rt.Metrics),
		Changed: s.runner.Poke})
	events := client.Events(name, rt.NodeName)
	reporter := newReporter(client, s, events)
	reporter.Begin(nil) // nothing is reported before the first update
	sessions := bgp.New(bgp.Options{Log: rt.Log, Hostname: rt.NodeName, Listen: f.bgpListen, Changed: s.runner.Poke})
	rt.Metrics.MustRegister(sessions)
	watches := bfd.New(bfd.Options{Log: rt.Log, Changed: s.runner.Poke})
	objects := report.NewObjects(rt.Log)
	s.to = sinks{
		l2: responder, report: reporter, routes: routeSinks{bgp: sessions, bfd: watches}, objects: objects,
		writers: newWriters(client, events),
	}
	seen := witness.New(witness.Options{Lease: client.Witnesses(f.namespace, leaseName), Log: rt.Log,
		Changed: s.runner.Poke})
	s.to.witness = seen
	actors := []func(context.Context) error{
		around.Run, client.Run, watcher.Run, talk.Run, alive.Run, responder.Run, events.Run, reporter.Run, s.runner.Run,
		seen.Run,
		outlived(sessions.Run, watches.Run), objects.Run,
	}
	if f.gate == "proxy" {
		fed := gate.NewFeed(gate.Options{Dial: gate.DialUnix(f.feedSocket), Hold: f.hold, Log: rt.Log,
			Changed: s.changes.markVIPs})
		s.from.feed = fed
		actors = append(actors, fed.Run)
	} else {
		s.from.slices = kube.Slices(client, s.changes.markService)
		rt.Log.Warn("the speaker trusts endpoints alone and does not check that this node's rules deliver an address", "gate",
			f.gate)
	}
	rt.Metrics.MustRegister(newCollector(s), newPathCollector(s))
	rt.Handle("GET /v1/status", http.HandlerFunc(s.serveStatus))
	rt.Ready("speaker", s.ready)

	rt.Log.Info("starting", "version", ops.BuildVersion(), "node", rt.NodeName, "api", client.Host(), "gate", f.gate,
		"encrypted", key != nil)
	return live(ctx, s, actors)
}

// newReporter returns the actor that writes to Services whether their addresses are announced.
func newReporter(client *kube.Client, s *speaker, events *kube.Events) *report.Reporter {
	return report.New(report.Options{
		Log: s.log, Service: s.from.services.Get, Write: client.Status(time.Now).Announced,
		Event: func(s lb.Service, good bool, reason lb.Reason, message string) {
			if good {
				events.Normal(kube.ServiceReference(s), reason, message)
			} else {
				events.Warning(kube.ServiceReference(s), reason, message)
			}
		},
	})
}

// newWriters returns what writes into the status of the objects for BGP.
func newWriters(client *kube.Client, events *kube.Events) writers {
	status := client.Status(time.Now)
	return writers{
		peerNode: status.PeerNode, drop: status.DropPeerNodes, advertisement: status.BGPAdvertisement,
		event: func(p lb.Peer, good bool, reason lb.Reason, message string) {
			if good {
				events.Normal(kube.PeerReference(p), reason, message)
			} else {
				events.Warning(kube.PeerReference(p), reason, message)
			}
		},
	}
}

// live runs the actors until one fails or ctx ends; then it first hands over what this node answers
// for.
func live(ctx context.Context, s *speaker, actors []func(context.Context) error) error {
	life, end := context.WithCancel(context.WithoutCancel(ctx))
	defer end()
	group, life := errgroup.WithContext(life)
	for _, run := range actors {
		group.Go(func() error { return run(life) })
	}
	group.Go(func() error {
		select {
		case <-ctx.Done():
			s.handOver(life, handoverTimeout)
		case <-life.Done():
		}
		end()
		return nil
	})
	return group.Wait()
}

// outlived runs an actor, and another that goes on until the first has ended: BFD, as a router that
// hears of the end by it before BGP sessions are closed drops the routes that it would keep over a
// graceful restart.
func outlived(first, last func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error {
		ctx, end := context.WithCancel(ctx)
		after, endLast := context.WithCancel(context.WithoutCancel(ctx))
		var group errgroup.Group
		group.Go(func() error { defer endLast(); return first(ctx) })
		group.Go(func() error { defer end(); return last(after) })
		return group.Wait()
	}
}

// bindAddress returns the address given or waits for this node's own.
func bindAddress(given netip.Addr, self string,
	nodes table[string, lb.Node]) func(context.Context) (netip.Addr, error) {
	return func(ctx context.Context) (netip.Addr, error) {
		for ticker := time.NewTicker(100 * time.Millisecond); ; {
			if given.IsValid() {
				return given, nil
			}
			if node, ok := nodes.Get(self); ok && len(node.Addresses) > 0 {
				return node.Addresses[0], nil
			}
			select {
			case <-ctx.Done():
				ticker.Stop()
				return netip.Addr{}, ctx.Err()
			case <-ticker.C:
			}
		}
	}
}

// ready returns nil once the speaker announces addresses, and until then what it waits for.
func (s *speaker) ready() error {
	s.mu.Lock()
	waiting := cmp.Or(s.phase.waiting, s.rooms.routes.Waiting())
	s.mu.Unlock()
	switch {
	case waiting != "":
		return fmt.Errorf("waiting for %s", waiting)
	case !s.from.members.Joined():
		return errors.New("has not met the other speakers yet")
	case s.from.feed != nil && s.from.feed.Reason() != "":
		return fmt.Errorf("waiting for the proxy: %s", s.from.feed.Reason())
	}
	return nil
}
