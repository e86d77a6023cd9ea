package plan

import (
	"cmp"
	"fmt"

	"github.com/landfall-lb/landfall/internal/lb"
)

// Scheduler is a way of choosing a backend for a new connection. Those but Random need nftables.
type Scheduler string

// The schedulers. Those that IPVS has too go by its names as well, see [ParseScheduler].
const (
	// Random gives each backend the same chance.
	Random Scheduler = "random"
	// RoundRobin goes through the backends in turn.
	RoundRobin Scheduler = "round-robin"
	// WeightedRoundRobin goes through the backends in turn, by their weights.
	WeightedRoundRobin Scheduler = "weighted-round-robin"
	// SourceHash sends the same client address to the same backend, on every node. A change of one
	// backend moves few clients.
	SourceHash Scheduler = "source-hash"
	// DestinationHash sends what is for the same address of the Service to the same backend, on every
	// node.
	DestinationHash Scheduler = "destination-hash"
	// Maglev sends a connection, told by its client address and port, to the same backend on every
	// node. A change of one backend moves few connections ("Maglev: A Fast and Reliable Software
	// Network Load Balancer", NSDI 2016, section 3.4).
	Maglev Scheduler = "maglev"

	// The following choose by how many open connections each backend has through this node: see
	// [Scheduler.Lighter].

	// LeastConnections takes the backend with the fewest.
	LeastConnections Scheduler = "least-connections"
	// WeightedLeastConnections takes the one with the fewest for its weight.
	WeightedLeastConnections Scheduler = "weighted-least-connections"
	// ShortestExpectedDelay does so with the new connection counted in.
	ShortestExpectedDelay Scheduler = "shortest-expected-delay"
	// NeverQueue takes a backend without connections, or else does as ShortestExpectedDelay.
	NeverQueue Scheduler = "never-queue"
)

// Schedulers lists them for messages, with IPVS' names.
const Schedulers = "random, round-robin (rr), weighted-round-robin (wrr), source-hash (sh, mh), " +
	"destination-hash (dh), maglev, least-connections (lc), weighted-least-connections (wlc), " +
	"shortest-expected-delay (sed), never-queue (nq)"

// ParseScheduler reads the name of a scheduler, Landfall's or IPVS'; "" stays as it is. mh of IPVS
// hashes the client's address alone unless it is told to add the port, and has Maglev's tables, as
// [SourceHash] here.
func ParseScheduler(name string) (Scheduler, bool) {
	switch name {
	case "rr":
		return RoundRobin, true
	case "wrr":
		return WeightedRoundRobin, true
	case "sh", "mh":
		return SourceHash, true
	case "dh":
		return DestinationHash, true
	case "lc":
		return LeastConnections, true
	case "wlc":
		return WeightedLeastConnections, true
	case "sed":
		return ShortestExpectedDelay, true
	case "nq":
		return NeverQueue, true
	}
	switch s := Scheduler(name); s {
	case "", Random, RoundRobin, WeightedRoundRobin, SourceHash, DestinationHash, Maglev,
		LeastConnections, WeightedLeastConnections, ShortestExpectedDelay, NeverQueue:
		return s, true
	}
	return "", false
}

// schedulerFor returns the scheduler of a Service on a node: Random for one that asks for what no mode has.
func schedulerFor(svc lb.Service, node Node) Scheduler {
	asked, ok := ParseScheduler(svc.Scheduler)
	if !ok {
		return Random
	}
	return cmp.Or(asked, node.Scheduler)
}

// Weighted reports whether the scheduler heeds weights: those that IPVS gives them too, and Maglev.
func (s Scheduler) Weighted() bool {
	return s == WeightedRoundRobin || s == SourceHash || s == DestinationHash || s == Maglev ||
		s.Counts() && s != LeastConnections
}

// Counts reports whether the scheduler chooses by the number of open connections.
func (s Scheduler) Counts() bool {
	return s == LeastConnections || s == WeightedLeastConnections || s == ShortestExpectedDelay || s == NeverQueue
}

// Turns reports whether the scheduler goes through the backends in turn.
func (s Scheduler) Turns() bool { return s == RoundRobin || s == WeightedRoundRobin }

// SchedulerIgnored says why a proxy in one of its modes does not choose backends as a Service and its
// EndpointSlices ask for, "" if it does.
func SchedulerIgnored(svc lb.Service, endpoints []lb.Slice, planned Service, onlyRandom bool) string {
	asked, ok := ParseScheduler(svc.Scheduler)
	scheduler, but := planned.Scheduler, ""
	if planned.Relay {
		but = ", but for those that the relay ends"
	}
	switch {
	case !ok:
		return fmt.Sprintf("annotation %s: %.80q is none of %s; connections are spread at random",
			lb.AnnotationScheduler, svc.Scheduler, Schedulers)
	case onlyRandom && asked != "" && asked != Random:
		return fmt.Sprintf(
			"annotation %s: %.80q needs a proxy in nftables mode; in iptables mode connections are spread at random%s",
			lb.AnnotationScheduler, svc.Scheduler, but)
	}
	weights := weightsAsked(svc, endpoints)
	switch {
	case svc.InvalidWeights != "":
		return fmt.Sprintf("annotation %s: %s; it gives no backend a weight", lb.AnnotationWeights, svc.InvalidWeights)
	case weights != "" && onlyRandom:
		return fmt.Sprintf("%s: only proxies in nftables mode have weights%s", weights, but)
	case weights != "" && !scheduler.Weighted():
		return fmt.Sprintf("%s: the scheduler %s has no weights; ask for one that does with annotation %s: wrr",
			weights, scheduler, lb.AnnotationScheduler)
	}
	for _, slice := range endpoints {
		if slice.InvalidWeight != "" {
			return fmt.Sprintf("%s: %s; its endpoints have the weight 1", annotationOf(slice), slice.InvalidWeight)
		}
	}
	return ""
}

// weightsAsked returns the annotation that asks for weights, "" if there is none.
func weightsAsked(svc lb.Service, endpoints []lb.Slice) string {
	if len(svc.Weights) > 0 {
		return "annotation " + lb.AnnotationWeights
	}
	for _, slice := range endpoints {
		if slice.Weight > 0 {
			return annotationOf(slice)
		}
	}
	return ""
}

func annotationOf(slice lb.Slice) string {
	return fmt.Sprintf("annotation %s of EndpointSlice %s", lb.AnnotationWeight, slice.Key)
}
