package main

import (
	"errors"
	"log/slog"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/rescue"
)

// rescueFamilies returns the families in which the proxy moves packets of unknown connections.
// Without --rescue it removes the rules that a predecessor has left.
func (f *flags) rescueFamilies(families []lb.Family, log *slog.Logger) []lb.Family {
	if f.rescue {
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

func rescueTargets(a *rescue.Actor) prometheus.Collector {
	return prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "landfall_proxy_rescue_targets",
		Help: "Nodes, counted for each family, to which packets of unknown connections would be moved.",
	}, func() float64 { return float64(a.Targets()) })
}
