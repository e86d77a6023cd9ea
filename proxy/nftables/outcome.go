package nftables

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// Held implements dialect.Rules.
func (t *table) Held(key lb.Key) (plan.Service, error) {
	s := t.applied[key]
	if s == nil {
		return plan.Service{}, nil
	}
	applied := s.input
	var lost []error
	for _, p := range s.parts {
		owner := t.owners[p.frontend]
		if owner == nil || owner.key == key {
			continue
		}
		applied = t.without(applied, p.frontend)
		if !p.lingering {
			lost = append(lost, fmt.Errorf("%s/%s is in use by another Service",
				netip.AddrPortFrom(p.addr.ip(t.family), p.port), p.protocol))
		}
	}
	return applied, errors.Join(lost...)
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
