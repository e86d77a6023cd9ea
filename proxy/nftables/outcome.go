package nftables

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// outcome returns what is applied of a Service, nil for nothing, and why not more.
func (t *table) outcome(key lb.Key) (*plan.Service, failure) {
	f := t.failed[key]
	s := t.applied[key]
	if s == nil {
		return nil, f
	}
	applied := s.input.Service
	var lost []error
	for _, p := range s.parts {
		owner := t.owners[p.frontend]
		if owner == nil || owner.key == key {
			continue
		}
		applied = t.without(applied, p.frontend)
		if !p.lingering {
			lost = append(lost, fmt.Errorf("%s/%s is served for %s", netip.AddrPortFrom(p.addr.ip(t.family), p.port), p.protocol,
				owner.key))
		}
	}
	if f.err == nil && len(lost) > 0 {
		f = failure{err: errors.Join(lost...), alone: true}
	}
	return &applied, f
}

// without returns the plan without one frontend; a node port goes as a whole.
func (t *table) without(s plan.Service, f frontend) plan.Service {
	addr := f.addr.ip(t.family)
	s.Ports = slices.Clone(s.Ports)
	for i, p := range s.Ports {
		if protocol, ok := protocolOf(p.Protocol); !ok || protocol != f.protocol {
			continue
		}
		s.Ports[i].Frontends = slices.DeleteFunc(slices.Clone(p.Frontends), func(other plan.Frontend) bool {
			return other.Port == f.port &&
				(other.Addr == addr || other.Kind == plan.NodePort && slices.Contains(t.nodeAddresses, addr))
		})
	}
	return s
}
