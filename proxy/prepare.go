package main

import (
	"context"
	"log/slog"
	"strings"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/iptables"
	"github.com/landfall-lb/landfall/proxy/nftables"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// prepare sets the kernel's parameters as the flags ask, and fits the settings to what it can do.
func (f *flags) prepare(ctx context.Context, set *settings, parameters kernelParameters, k kernel) {
	newLiberal(parameters).set(f.liberal)
	parameters.conntrack(cores(), f.liberal) // which is liberal too where nothing can be noted
	if f.setIPForward {
		parameters.switchOn(forwardingParameters[lb.IPv4])
	}
	set.prepareKernel(ctx, parameters, k)
	if f.direct && f.rescue && f.rescueRing {
		set.prepareDirect(k, parameters.log)
	}
	if f.flowOffload {
		set.prepareOffload(k.mode, k.families, func(family lb.Family) error {
			return try(parameters.log, "flow offloading", family, func() error {
				return nftables.ProbeOffload(k.netlink, family)
			})
		})
		if set.offloadUDP = !lb.KeepsOffloaded(release()); len(set.offload) > 0 && !set.offloadUDP {
			parameters.log.Warn("this node offloads flows of TCP alone: before Linux " + lb.OffloadUDPSince +
				", the kernel deletes no flow that is offloaded")
		}
	}
	if k.mode == modeIptables && set.scheduler != plan.Random {
		parameters.log.Warn("iptables mode spreads connections at random; other schedulers need --mode=nftables", "scheduler",
			set.scheduler)
	}
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
	var most int
	s.needs, most, s.unit = k.needs()
	s.limit *= most
	if s.relay && k.mode == modeIptables {
		s.prepareRelay(ctx, parameters.log, k)
	}
	s.relayUDP = s.relayUDP && s.relay && k.mode == modeNftables
	s.prepareRelayUDP(parameters.log, k.families, func(family lb.Family) error {
		return nftables.ProbeRelayRate(k.netlink, family)
	})
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
		err := try(log, "direct forwarding", family, func() error { return nftables.ProbeDirect(k.netlink, family) })
		if err != nil {
			log.Warn("this node does not forward directly", "family", family, "error", err)
			continue
		}
		s.direct[family] = true
	}
}

// prepareOffload finds out in which families the rules can offload established flows.
func (s *settings) prepareOffload(mode string, families []lb.Family, probe func(lb.Family) error) {
	s.offload, s.notOffloaded = map[lb.Family]bool{}, map[lb.Family]string{}
	for _, family := range families {
		if mode != modeNftables {
			s.notOffloaded[family] = mode + " mode has no rules for it"
		} else if err := probe(family); err != nil {
			s.notOffloaded[family] = err.Error()
		} else {
			s.offload[family] = true
		}
	}
}

// prepareRelay leaves the relay out where the kernel would refuse all rules for its sake, in iptables mode.
func (s *settings) prepareRelay(ctx context.Context, log *slog.Logger, k kernel) {
	for family, commands := range k.commands {
		if err := iptables.ProbeRelay(ctx, commands, family); err != nil {
			s.relay = false
			log.Error("this node relays nothing", "family", family, "error", err)
		}
	}
}

// prepareRelayUDP leaves UDP out of what is relayed where the kernel cannot limit it, as it would refuse all rules for
// the sake of those. Where it is left out no rule asks for a limit.
func (s *settings) prepareRelayUDP(log *slog.Logger, families []lb.Family, probe func(lb.Family) error) {
	for _, family := range families {
		if !s.relayUDP || s.relayUDPRate == 0 {
			break
		}
		if err := try(log, "the limits of the relay's UDP", family, func() error { return probe(family) }); err != nil {
			s.relayUDP = false
			log.Error("this node relays no UDP; --relay-udp-rate=0 relays it without a limit", "family", family, "error", err)
		}
	}
	if !s.relayUDP {
		s.relayUDPRate = 0
	}
}
