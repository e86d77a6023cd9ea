// landfall-speaker announces external addresses of Services from this node while the node's kernel
// delivers them.
package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path"
	"runtime"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"github.com/vishvananda/netns"
	"golang.org/x/sync/errgroup"

	"github.com/landfall-lb/landfall/internal/actor"
	"github.com/landfall-lb/landfall/internal/kube"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/links"
	"github.com/landfall-lb/landfall/internal/ops"
	"github.com/landfall-lb/landfall/internal/preflight"
	"github.com/landfall-lb/landfall/speaker/bfd"
	"github.com/landfall-lb/landfall/speaker/bgp"
	"github.com/landfall-lb/landfall/speaker/gate"
	"github.com/landfall-lb/landfall/speaker/l2"
	"github.com/landfall-lb/landfall/speaker/liveness"
	"github.com/landfall-lb/landfall/speaker/members"
	"github.com/landfall-lb/landfall/speaker/neighbors"
	"github.com/landfall-lb/landfall/speaker/partition"
	"github.com/landfall-lb/landfall/speaker/plan"
	"github.com/landfall-lb/landfall/speaker/pulse"
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
		MetricsBindAddress: "localhost:7481",
		StatusSocket:       "/run/landfall/speaker.sock",
		ProbeSocket:        true,
		Flags:              f.add,
		Run:                f.run,
	}))
}

type flags struct {
	gate, feedSocket, bindAddress, gossipKeyFile string
	namespace, daemonSet, onConflict, bgpListen  string
	bindPort                                     uint16
	neighbors                                    int
	gossipProfile                                string
	probeInterval, probeTimeout                  time.Duration
	hold, restartHold, announceEvery             time.Duration
	probeAheadRate                               float64
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
	set.DurationVar(&f.options.returnHold, "return-hold", partition.ReturnHold,
		"how long a node that may have been cut off, or has just started, waits to hear another speaker before it announces "+
			"an address that it did not own; four times as long if it does not reach the API server either; 0 does not wait")
	set.StringSliceVar(&f.options.exclude, "exclude-interfaces", strings.Split(excluded, ","),
		"shell patterns of interfaces that answer ARP and NDP only if an L2Advertisement names them")
	set.StringVar(&f.onConflict, "on-address-conflict", string(plan.RefuseOnConflict),
		"what to do when a device outside the cluster already uses the address: refuse (do not announce it), announce, or "+
			"service (as the Service's annotation "+lb.AnnotationOnConflict+" says, refuse without one); an annotation refuse "+
			"always counts")
	set.DurationVar(&f.announceEvery, "announce-every", 0,
		"how often the owner repeats its gratuitous ARP and NDP for an address, at least 1s; set it where switches forget "+
			"MAC addresses sooner than routers refresh them; 0 never repeats")
	set.DurationVar(&f.options.flapInterval, "flap-interval", time.Second,
		"how often the speaker announces an address anew that it has announced and withdrawn 20 times in a row: over ARP "+
			"and NDP (100 times if another node served the address in between) and as a route; 0 never holds one "+
			"back")
	set.Float64Var(&f.probeAheadRate, "probe-ahead-rate", 5,
		"how many ARP probes and neighbor solicitations a second the node sends at most for the addresses that Services get "+
			"next (spec.probeAhead of IPAddressPools), so that a new Service answers at once, 0 to 100; 0 probes none ahead")
	set.BoolVar(&f.options.cordonDrains, "drain-on-cordon", false, "move addresses away from a node that is cordoned")
	set.BoolVar(&f.options.ignoreExclude, "ignore-exclude-lb", false,
		"announce addresses on nodes with the label "+plan.LabelExclude+
			" too, which kubeadm and Talos set on control planes; "+
			"needed where no node is without it")
	set.BoolVar(&f.options.ignoreNetwork, "ignore-network-unavailable", false,
		"announce addresses on nodes with the condition NetworkUnavailable too; needed where nothing takes that condition "+
			"away")
	set.BoolVar(&f.options.requireReady, "require-ready", false,
		"announce addresses only from nodes that are Ready, and so not from those whose kubelet has stopped")
	set.BoolVar(&f.options.checkForwarding, "check-forwarding", true,
		"with --gate=proxy, announce no address at an interface from which the kernel forwards no packets")
	set.DurationVar(&f.options.convergence, "bgp-convergence", 3*time.Second,
		"how long the speaker announces a route with the community GRACEFUL_SHUTDOWN before a planned withdrawal; set "+
			"it longer than routers take to choose another route")
	set.StringVar(&f.bgpListen, "bgp-listen", "",
		"address:port on which the speaker accepts connections of configured BGP peers, such as :179, 10.0.0.1:179 or "+
			"[::]:1179 (default: none; the speaker opens every session itself)")
	set.StringVar(&f.daemonSet, "daemonset", "",
		"DaemonSet in --namespace that runs the speaker; a speaker that stops after this DaemonSet was deleted withdraws "+
			"its BGP routes, instead of leaving them to a successor (default: always expect a successor)")
	set.StringVar(&f.gossipProfile, "gossip-profile", "lan",
		"how fast speakers find a node that has died, and how slow the network between them may be: lan or wan (up to "+
			"200 ms); the same on all nodes")
	set.DurationVar(&f.probeInterval, "probe-interval", 0,
		"time between two probes by one speaker, each of another; a crash is noticed after about five of them (default: "+
			"that of --gossip-profile, 100ms or 500ms)")
	set.DurationVar(&f.probeTimeout, "probe-timeout", 0,
		"how long a speaker waits for the answer to a probe (default: that of --gossip-profile, 50ms or 300ms)")
	set.IntVar(&f.neighbors, "bfd-neighbors", 2,
		"how many speakers this one watches with BFD in each direction of a ring of all speakers, so that a crashed node is "+
			"found within 0.2 s, 0 to 8; UDP port 4784 must be open between all nodes; 0 leaves that to gossip, which takes "+
			"0.5 s")
	set.StringVar(&f.gossipKeyFile, "gossip-key-file", "",
		"file with the keys of gossip, one a line: 16, 24 or 32 bytes, raw or in base64; the first one encrypts, and all of "+
			"them decrypt; read again when it changes (default: gossip is not encrypted)")
}

// check reads what the flags say.
func (f *flags) check() (bind netip.Addr, keys [][]byte, err error) {
	if err := cmp.Or(
		ops.OneOf("gate", f.gate, "proxy", "none"), ops.NotNegative("hold", f.hold),
		ops.NotNegative("restart-hold", f.restartHold), ops.NotNegative("bgp-convergence", f.options.convergence),
		ops.NotNegative("flap-interval", f.options.flapInterval),
	); err != nil {
		return bind, nil, err
	}
	if f.options.returnHold < 0 {
		return bind, nil, ops.Usagef("--return-hold: %s is negative", f.options.returnHold)
	}
	if f.options.onConflict, err = plan.ParseConflictPolicy(f.onConflict); err != nil {
		return bind, nil, ops.Usagef("--on-address-conflict: %w", err)
	}
	if f.announceEvery != 0 && f.announceEvery < time.Second {
		return bind, nil, ops.Usagef("--announce-every: %s is neither 0 nor at least 1s", f.announceEvery)
	}
	if !(f.probeAheadRate >= 0 && f.probeAheadRate <= 100) {
		return bind, nil, ops.Usagef("--probe-ahead-rate: %v is not between 0 and 100", f.probeAheadRate)
	}
	if f.options.bgpListens = f.bgpListen != ""; f.options.bgpListens {
		if err := bgp.CheckListen(f.bgpListen); err != nil {
			return bind, nil, ops.Usagef("--bgp-listen: %w", err)
		}
	}
	for _, pattern := range f.options.exclude {
		if _, err := path.Match(pattern, ""); err != nil {
			return bind, nil, ops.Usagef("--exclude-interfaces: %q: %w", pattern, err)
		}
	}
	if f.neighbors < 0 || f.neighbors > 8 {
		return bind, nil, ops.Usagef("--bfd-neighbors: %d is not between 0 and 8", f.neighbors)
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
		keys, err = readKeys(f.gossipKeyFile)
	}
	return bind, keys, err
}

// watch has the speaker follow what it reads from the API server. The actor that it returns reads
// the passwords of BGP sessions.
func (f *flags) watch(client *kube.Client, s *speaker) actor.Runner {
	s.from = sources{
		services:       kube.LabelledServices(client, s.changes.markService),
		nodes:          kube.Nodes(client, "", func(node string) { s.changes.markNode(node == s.self) }),
		pools:          kube.AnnouncedPools(client, func(string) { s.changes.markAll() }, s.changes.markAhead),
		advertisements: kube.L2Advertisements(client, func(string) { s.changes.markAll() }, s.changes.markStatus),
	}
	var peers *kube.Table[string, lb.Peer]
	passwords := client.Passwords(f.namespace, func() map[string]bool { return secretsOf(peers.All(), f.namespace) },
		s.changes.markRoutes)
	peers = kube.BGPPeers(client, func(name string) {
		passwords.Poke()
		s.changes.markRoutes(name)
	}, s.changes.markStatus)
	s.from.routes = routeSources{
		peers:          peers,
		advertisements: kube.BGPAdvertisements(client, s.changes.markRoutes, s.changes.markStatus),
		communities:    kube.Communities(client, s.changes.markRoutes),
		profiles:       kube.BFDProfiles(client, s.changes.markRoutes),
		passwords:      passwords, namespace: f.namespace,
	}
	if f.daemonSet != "" {
		s.from.daemonSet = kube.DaemonSet(client, f.namespace, f.daemonSet, func(string) { s.runner.Poke() })
	}
	client.OnSync(s.changes.markSynced)
	return passwords
}

// secretsOf returns the names of the Secrets in a namespace in which peers have passwords.
func secretsOf(peers map[string]lb.Peer, namespace string) map[string]bool {
	names := map[string]bool{}
	for _, p := range peers {
		if ref := p.PasswordSecret; ref != nil && (ref.Namespace == "" || ref.Namespace == namespace) {
			names[ref.Name] = true
		}
	}
	return names
}

// spare is how much more garbage than usual there may be before it is collected: with as little
// memory as a speaker needs, that would be several times a second while Services come. Nothing
// touches the memory, so the kernel gives none for it.
const spare = 12 << 20

func (f *flags) run(ctx context.Context, rt *ops.Runtime) error {
	defer runtime.KeepAlive(make([]byte, spare))
	bind, keys, err := f.check()
	if err != nil {
		return err
	}
	profile, err := members.ParseProfile(f.gossipProfile, f.probeInterval, f.probeTimeout)
	if err != nil {
		return ops.Usagef("%w", err)
	}
	if err := prefer(); err != nil {
		rt.Log.Info("the speaker runs at normal priority; without CPU time it looks dead to the other speakers", "error", err)
	}
	client, err := kube.Connect(kube.Options{Kubeconfig: rt.Kubeconfig, Servers: rt.APIServers, UserAgent: name,
		Log: rt.Log, Fold: kube.Fold{Every: often().Every, Burst: often().Burst}})
	if err != nil {
		return err
	}
	s, actors := f.assemble(rt, client, bind, keys, profile)
	rt.Status(s.writeStatus)
	rt.ReviewMetrics(client.ReviewMetrics, client.Size)
	rt.Ready("speaker", s.ready)

	rt.Log.Info("starting", "version", ops.BuildVersion(), "node", rt.NodeName, "api", client.Host(), "gate", f.gate,
		"encrypted", keys != nil)
	return live(ctx, s, watch(actors, rt.Live))
}

// watch has the liveness of each actor watched, and returns what runs.
func watch(actors map[string]actor.Runner,
	live func(loop string, busy func() time.Duration)) (runs []func(context.Context) error) {
	for name, a := range actors {
		live(name, a.Busy)
		runs = append(runs, a.Run)
	}
	return runs
}

// assemble puts a speaker together, and returns what runs for as long as it does, by the names under which the
// liveness of each is watched.
func (f *flags) assemble(rt *ops.Runtime, client *kube.Client, bind netip.Addr, keys [][]byte,
	profile members.Profile) (*speaker, map[string]actor.Runner) {
	s := newSpeaker(rt.NodeName, f.options, rt.Log)
	if rt.Traces.On() {
		s.trace = rt.Traces.Add
	}
	passwords := f.watch(client, s)

	around := newSurroundings(client, rt, f.namespace)
	var watcher *links.Watcher
	watcher = links.New(links.Options{Namespace: netns.None(), Log: rt.Log, Changed: func() {
		if interfaces, known := watcher.All(); known {
			around.Set(interfaces)
		}
		s.changes.markLinks()
	}})
	s.from.interfaces = watcher.All
	beat := pulse.New(profile.Unnoticed(), s.changes.markAll)
	s.from.wakes = beat.Wakes
	var talk *members.Members
	alive := liveness.New(liveness.Options{Self: rt.NodeName, Hold: f.restartHold, Log: rt.Log, Ring: f.neighbors,
		Report:  func(node string, born uint64) { talk.Alarm(node, born) },
		Back:    func(node string) { talk.Greet(node) },
		Ping:    func(node string, addr netip.AddrPort) bool { return talk.Ping(node, addr) },
		Changed: s.changes.markAll, Probe: liveness.AnswersWithin(profile.ProbeTimeout),
		ProbeInterval: profile.ProbeInterval})
	talk = members.New(members.Options{
		Self: rt.NodeName, Bind: bindAddress(bind, rt.NodeName, s.from.nodes), Port: int(f.bindPort), Keys: keys,
		Born: time.Now(), Boot: bootID(bootIDFile, rt.Log), Profile: profile, Alone: f.options.returnHold,
		Liveness: alive, Log: rt.Log, Changed: s.changes.markVIPs, Ended: s.runner.PokeNow,
	})
	s.from.members, s.from.liveness = talk, alive
	responder := l2.New(l2.Options{Self: rt.NodeName, Log: rt.Log, AheadRate: f.probeAheadRate,
		Repeat: f.announceEvery, Stats: newPackets(rt.Metrics),
		Changed: s.runner.Poke, Wakes: func() uint64 { wakes, _ := beat.Wakes(); return wakes }})
	events := client.Events(name, rt.NodeName)
	reporter := newReporter(client, s, events)
	reporter.Begin(nil) // nothing is reported before the first update
	nearby := neighbors.New(neighbors.Options{Log: rt.Log})
	sessions := bgp.New(bgp.Options{Log: rt.Log, Hostname: rt.NodeName, Listen: f.bgpListen, Prepare: nearby.Resolve,
		Changed: s.runner.Poke})
	rt.Metrics.MustRegister(sessions, newEmptyConnections(talk.Empty))
	s.beats = newBeats(profile.BeatInterval, func() (netip.Addr, map[netip.Addr]string) {
		return talk.Address(), alive.Ring()
	})
	var watches *bfd.Actor
	watches = bfd.New(bfd.Options{Log: rt.Log, Changed: func() {
		for _, node := range s.beats.lost(watches.Outcomes()) {
			alive.PathLost(node) // at once: a step may be under way
		}
		s.runner.PokeNow()
	}})
	objects := report.NewObjects(rt.Log)
	s.to = sinks{
		l2: responder, report: reporter, routes: routeSinks{bgp: sessions, bfd: watches}, objects: objects,
		neighbors: nearby, writers: newWriters(client, events),
	}
	flight := newPreflight(s, f.bindPort, client, events)
	s.found, s.trouble = flight.Found, client.Trouble
	seen := witness.New(witness.Options{Lease: client.Witnesses(f.namespace, leaseName), Log: rt.Log,
		Changed: s.runner.PokeNow})
	s.to.witness = seen
	actors := map[string]actor.Runner{
		"gateways": around, "watches": client, "interfaces": watcher, "gossip": talk, "probes of speakers": alive,
		"ARP and NDP": responder, "events": events, "status of Services": reporter, "plan": s.runner, "partitions": seen,
		"neighbors": nearby,
		"pulse":     beat, "passwords": passwords, "preflight": flight, "memory": newCalm(),
		"BGP and BFD": outlived{sessions, watches}, "status of BGP objects": objects,
	}
	if !bind.IsValid() {
		actors["address"] = moved{self: rt.NodeName, nodes: s.from.nodes, address: talk.Address, log: rt.Log}
	}
	if keys != nil {
		file := newKeyFile(f.gossipKeyFile, keys, talk.SetKeys, rt.Log)
		actors["gossip keys"] = file
		rt.Metrics.MustRegister(file)
	}
	if f.gate == "proxy" {
		fed := gate.NewFeed(gate.Options{Dial: gate.DialUnix(f.feedSocket), Hold: f.hold, Log: rt.Log,
			Changed: s.changes.markVIPs, Ended: s.runner.PokeNow})
		s.from.feed = fed
		actors["feed"] = fed
	} else {
		s.from.slices = kube.Slices(client, s.changes.markService)
		rt.Log.Warn("the speaker trusts endpoints alone and does not check that this node's rules deliver an address", "gate",
			f.gate)
	}
	rt.Metrics.MustRegister(newCollector(s), newPathCollector(s),
		preflight.Collector("landfall_speaker_node_findings", flight.Found))
	return s, actors
}

// newReporter returns the actor that writes to Services whether their addresses are announced.
func newReporter(client *kube.Client, s *speaker, events *kube.Events) *report.Reporter {
	return report.New(report.Options{
		Log: s.log, Service: s.from.services.Get,
		Write: writeAnnounced(client.Status(time.Now).Announced).traced(s.trace, time.Now),
		Refused: func(err error) bool {
			return kube.IsUnwritable(err) || kube.IsNotFound(err) || kube.IsConflict(err)
		},
		Event: func(s lb.Service, good bool, reason lb.Reason, message string) {
			if good {
				events.Normal(kube.ServiceReference(s), reason, message)
			} else {
				events.Warning(kube.ServiceReference(s), reason, message)
			}
		},
	})
}

// newWriters returns what writes into the status of BGPPeers and advertisements.
func newWriters(client *kube.Client, events *kube.Events) writers {
	status := client.Status(time.Now)
	return writers{
		peerNode: status.PeerNode, advertisement: status.BGPAdvertisement, l2Advertisement: status.L2Advertisement,
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

// outlived is an actor, and another that goes on until the first has ended: BFD, as a router that
// hears of the end by it before BGP sessions are closed drops the routes that it would keep over a
// graceful restart.
type outlived struct{ first, last actor.Runner }

// Run runs both until ctx ends.
func (o outlived) Run(ctx context.Context) error {
	ctx, end := context.WithCancel(ctx)
	after, endLast := context.WithCancel(context.WithoutCancel(ctx))
	var group errgroup.Group
	group.Go(func() error { defer endLast(); return o.first.Run(ctx) })
	group.Go(func() error { defer end(); return o.last.Run(after) })
	return group.Wait()
}

// Busy returns for how long one of them has been at one thing.
func (o outlived) Busy() time.Duration { return max(o.first.Busy(), o.last.Busy()) }

// bootIDFile has what tells the boot that the kernel is in from others.
const bootIDFile = "/proc/sys/kernel/random/boot_id"

// bootID reads it, and logs that and why it cannot: other nodes do not see then that this one has
// booted.
func bootID(file string, log *slog.Logger) string {
	id, err := os.ReadFile(file)
	if err != nil {
		log.Warn("cannot read which boot the kernel is in; after the next one, other nodes may move connections here that "+
			"this node no longer knows", "error", err)
	}
	return strings.TrimSpace(string(id))
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
		err := errors.New("has not met the other speakers yet")
		if trouble := s.from.members.Trouble(); trouble != "" {
			return ops.Detailed{Err: err, Detail: trouble}
		}
		return err
	case s.from.feed != nil && s.from.feed.Reason() != "":
		return fmt.Errorf("waiting for the proxy: %s", s.from.feed.Reason())
	}
	return nil
}
