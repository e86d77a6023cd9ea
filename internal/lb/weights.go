package lb

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
)

const (
	// maxWeights is how many entries an annotation has.
	maxWeights = 256
	// maxWeight is more than IPVS' users need, and what the largest tables can tell apart.
	maxWeight = 100
	// maxNodeName is the length of the longest name of a Node, as the API server takes it.
	maxNodeName = 253
)

// Weights are the shares of new connections that a Service gives to backends. The first that
// concerns a backend counts; without one its share is the weight of its EndpointSlice, or 1.
type Weights []Weight

// Weight is the share of the backends of a node or a network.
type Weight struct {
	Node    string       // "" if it is a network's
	Network netip.Prefix // of the backends' addresses
	Share   uint8        // 1 to 100
}

// ParseWeights reads the annotation [AnnotationWeights]: nodes, addresses or networks, each with a
// weight, as in "worker-1=3, 192.0.2.0/28=2". An error names the entry that is wrong.
func ParseWeights(text string) (Weights, error) {
	entries := strings.FieldsFunc(text, func(r rune) bool { return r == ',' || r == ' ' || r == '\n' })
	if len(entries) > maxWeights {
		return nil, fmt.Errorf("%d entries: at most %d", len(entries), maxWeights)
	}
	var all Weights
	for _, entry := range entries {
		name, value, _ := strings.Cut(entry, "=")
		share, err := strconv.ParseUint(value, 10, 8)
		if err != nil || share < 1 || share > maxWeight || name == "" || len(name) > maxNodeName {
			return nil, fmt.Errorf("%.80q: want the name of a node, an address or a network, = and a weight from 1 to %d, "+
				"as in worker-1=3", entry, maxWeight)
		}
		one := Weight{Share: uint8(share)}
		if addr, err := ParseAddr(name); err == nil {
			one.Network = netip.PrefixFrom(addr, addr.BitLen())
		} else if !strings.Contains(name, "/") {
			one.Node = strings.Clone(name) // the rest of the text may be long
		} else if one.Network, err = netip.ParsePrefix(name); err != nil {
			return nil, fmt.Errorf("%.80q: %.80q is no network", entry, name)
		}
		all = append(all, one)
	}
	return all, nil
}

// ParseWeight reads the annotation [AnnotationWeight]: a weight for all endpoints of an EndpointSlice.
func ParseWeight(text string) (uint8, error) {
	weight, err := strconv.ParseUint(text, 10, 8)
	if err != nil || weight < 1 || weight > maxWeight {
		return 0, fmt.Errorf("%.80q: want a weight from 1 to %d", text, maxWeight)
	}
	return uint8(weight), nil
}

// of returns the share of a backend; without one of the Service it is its slice's.
func (w Weights) of(e weighed) uint8 {
	for _, one := range w {
		if one.Node != "" && one.Node == e.node || one.Network.Contains(e.addr) {
			return one.Share
		}
	}
	return max(e.slice, 1)
}

// A Weigher weighs the backends of one Service. It looks up each endpoint once, whatever the number of the
// Service's ports. It is not safe for concurrent use.
type Weigher struct {
	weights Weights
	shares  map[weighed]uint8
}

// weighed is an endpoint, as weights tell it apart.
type weighed struct {
	addr  netip.Addr
	node  string // "" for unknown
	slice uint8  // weight of its EndpointSlice, 0 if it has none
}

// NewWeigher returns a Weigher for the weights of a Service and those of its slices.
func NewWeigher(weights Weights) *Weigher {
	return &Weigher{weights: weights, shares: map[weighed]uint8{}}
}

// Weigh writes the weights into what [Choose] returned for some slices. Of an endpoint in two slices,
// the first that has a weight counts.
func (w *Weigher) Weigh(all []Slice, usable Usable) {
	if len(w.weights) == 0 && !slices.ContainsFunc(all, func(s Slice) bool { return s.Weight > 0 }) {
		return
	}
	endpoints := map[netip.Addr]weighed{}
	for _, slice := range all {
		for _, e := range slice.Endpoints {
			endpoints[e.Addr] = weighed{e.Addr, e.Node, cmp.Or(endpoints[e.Addr].slice, slice.Weight)}
		}
	}
	for _, list := range [][]Backend{usable.Cluster, usable.Local} {
		for i := range list {
			list[i].Weight = w.share(endpoints[list[i].Addr.Addr()])
		}
	}
}

func (w *Weigher) share(of weighed) uint8 {
	share, known := w.shares[of]
	if !known {
		share = w.weights.of(of)
		w.shares[of] = share
	}
	return share
}
