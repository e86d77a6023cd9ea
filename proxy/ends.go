package main

import (
	"net/netip"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/across"
	"github.com/landfall-lb/landfall/proxy/health"
	"github.com/landfall-lb/landfall/proxy/path"
	"github.com/landfall-lb/landfall/proxy/plan"
	"github.com/landfall-lb/landfall/proxy/readiness"
	"github.com/landfall-lb/landfall/proxy/relayfeed"
	"github.com/landfall-lb/landfall/proxy/rescue"
)

// table is what the API server has of one kind.
type table[K comparable, V any] interface {
	Get(K) (V, bool)
	All() map[K]V
	Keys() []K
	Synced() bool
}

// sources are where the proxy reads.
type sources struct {
	services   table[lb.Key, lb.Service]
	slices     table[lb.Key, []lb.Slice]
	nodes      table[string, lb.Node]
	interfaces func() ([]lb.Interface, bool)
	// update returns which nodes are dead and what else the speaker has said since the last call, if
	// there is one.
	update   func() (lb.FeedUpdate, bool)
	networks table[string, []netip.Prefix] // of cluster IPs
	pools    table[string, []lb.Range]     // the addresses of IPAddressPools
	routers  table[string, lb.Router]      // of BGPPeers
	// gated are this node's pods with a readiness gate; nil if none waits for the proxy.
	gated table[lb.Key, lb.GatedPod]
	// path returns what of the way to endpoints has changed, and whether it is known; nil if nothing
	// looks.
	path func() (news path.News, known bool)
	// vrfs returns why the kernel does not deliver what comes in through each VRF, or "", and whether that is known; nil
	// if nothing looks.
	vrfs func() (states map[string]string, known bool)
	// probes returns of which Services it has changed which endpoints do not answer this node's probes,
	// with all of these; nil if nothing probes.
	probes func() map[lb.Key]plan.LeftOut
	// relayPorts returns where the node's relay accepts connections; nil if the rules need not know.
	relayPorts func() map[lb.Family]uint16
}

// updates are how an actor of Services is told: see actor.Updater.
type updates[V any] interface {
	Begin(all map[lb.Key]V)
	Update(changes map[lb.Key]V)
}

// sinks are where the proxy acts.
type sinks struct {
	rules interface {
		updates[plan.Service]
		Configure(plan.Config)
		Outcomes() (outcomes map[lb.Key]plan.Outcome, all bool)
	}
	flows updates[plan.Service]
	// counters count what Services get; nil if nothing does.
	counters updates[plan.Service]
	// loads counts connections for schedulers that choose by them; nil in a mode that has none of these.
	loads  updates[plan.Service]
	health interface {
		updates[health.Service]
		SetNode(health.Node)
		SetAddresses(map[lb.Family][]netip.Addr)
	}
	feed updates[[]lb.Delivery]
	// targets are the endpoints whose way is looked at; nil if none is.
	targets updates[[]plan.Target]
	// probes asks endpoints whether they answer; nil if nothing does.
	probes updates[plan.Probing]
	// rescue hands over packets of connections that this node does not know.
	rescue interface {
		Begin(all map[netip.Addr]*rescue.Origins)
		Update(changes map[netip.Addr]*rescue.Origins)
		SetGone(nodes []netip.Addr, cutOff bool)
		SetNodes(self, others []netip.Addr)
		SetHanded(links []int)
		SetDirect(vips, far []netip.Addr)
		Confirm(number uint64)
	}
	// senders finds out the MAC addresses of nodes that hand packets over; nil if nothing does.
	senders interface {
		Set(nodes []netip.Addr)
		Known() []lb.MAC
	}
	// across finds out which nodes behind routers take what is handed over; nil if nothing does.
	across interface {
		Set(across.Nodes)
		States() map[netip.Addr]across.State
	}
	// relay tells the relay what is relayed; nil without one.
	relay interface {
		updates[*plan.Relayed]
		SetAddresses(relay map[lb.Family]netip.Addr, nodePorts []netip.Addr)
		SetBlocked(ways map[plan.RelayWay]bool)
		State() relayfeed.State
	}
	// gates opens readiness gates; nil if no pod waits for the proxy.
	gates interface {
		Set(open map[lb.Key]readiness.Gate)
	}
	// requests writes which requests of Services are not followed.
	requests interface {
		Set(writes map[lb.Key]plan.ConditionWrite)
	}
	// warn reports something wrong with a Service.
	warn func(s lb.Service, reason lb.Reason, message string)
	// probed reports what probes have found of a Service.
	probed func(s lb.Service, reason lb.Reason, message string)
	// latency is told how long it took from a change to its confirmation by the kernel.
	latency func(time.Duration)
	// programmed is told the same from the change's own time, if that is known.
	programmed func(time.Duration)
}
