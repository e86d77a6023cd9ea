package main

import (
	"errors"
	"log/slog"
	"net/netip"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/rescue"
	"github.com/landfall-lb/landfall/proxy/tunnel"
)

// rescueFamilies returns the families in which the proxy moves packets of unknown connections.
// Without --rescue it removes the rules that a predecessor has left.
func (f *flags) rescueFamilies(families []lb.Family, log *slog.Logger) []lb.Family {
	if f.rescue && f.rescueTunnelPort != 0 {
		return families
	}
	if f.rescue {
		if err := tunnel.Cleanup(); err != nil {
			log.Debug("cannot remove the tunnels", "error", err)
		}
		return families
	}
	if err := cleanupRescue(kernelParameters{f.procSysNet, log}); err != nil {
		log.Debug("cannot remove the rules of the rescue", "error", err)
	}
	return nil
}

// cleanupRescue removes the rules, and sets back the kernel parameters that were set for it.
func cleanupRescue(parameters kernelParameters) error {
	reset, err := rescue.ResetFilters(parameters.folder)
	for _, name := range reset {
		parameters.log.Info("set a kernel parameter back", "parameter", "net/ipv4/conf/"+name+"/rp_filter")
	}
	return errors.Join(rescue.Cleanup(), err)
}

// note holds what is the matter, "" while nothing is. It is safe for concurrent use.
type note struct{ text atomic.Pointer[string] }

func (n *note) set(text string) { n.text.Store(&text) }

func (n *note) get() string {
	if text := n.text.Load(); text != nil {
		return *text
	}
	return ""
}

func rescued(a *rescue.Actor) prometheus.Collector {
	return prometheus.NewCounterFunc(prometheus.CounterOpts{
		Name: "landfall_proxy_rescued_packets_total",
		Help: "Packets of unknown connections that were moved to the node that may know them.",
	}, func() float64 { return float64(a.Packets()) })
}

func rescueDropped(a *rescue.Actor) prometheus.Collector {
	return prometheus.NewCounterFunc(prometheus.CounterOpts{
		Name: "landfall_proxy_rescue_dropped_packets_total",
		Help: "Packets of unknown connections that were dropped because they were above --rescue-limit.",
	}, func() float64 { return float64(a.Dropped()) })
}

func rescueRefused(a *rescue.Actor) prometheus.Collector {
	return prometheus.NewCounterFunc(prometheus.CounterOpts{
		Name: "landfall_proxy_rescue_refused_packets_total",
		Help: "Packets that were dropped at the tunnels between nodes, as they came from elsewhere than a node, or are of " +
			"a kind that nodes do not move.",
	}, func() float64 { return float64(a.Refused()) })
}

// otherNodes returns the internal addresses of all Nodes but one.
func otherNodes(nodes map[string]lb.Node, but string) (addrs []netip.Addr) {
	for name, n := range nodes {
		if name != but {
			addrs = append(addrs, n.Addresses...)
		}
	}
	return addrs
}

func rescueTargets(a *rescue.Actor) prometheus.Collector {
	return prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "landfall_proxy_rescue_targets",
		Help: "Nodes, counted for each family, to which packets of unknown connections would be moved.",
	}, func() float64 { return float64(a.Targets()) })
}
