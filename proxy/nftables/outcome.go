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
	lost := map[frontend]bool{}
	var errs []error
	more := 0
	for _, p := range s.parts {
		owner := t.owners[p.frontend]
		if owner == nil || owner.key == key {
			continue
		}
		lost[p.frontend] = true
		switch {
		case p.lingering:
		case len(errs) == maxLost:
			more++
		default:
			errs = append(errs, fmt.Errorf("%s/%s is in use by another Service",
				netip.AddrPortFrom(p.addr.ip(t.family), p.port), p.protocol))
		}
	}
	if len(lost) == 0 {
		return s.input, nil
	}
	if more > 0 {
		errs = append(errs, fmt.Errorf("and %d more", more))
	}
	return t.without(s.input, lost), errors.Join(errs...)
}

// maxLost is how many frontends an error names that other Services have.
const maxLost = 5

// without returns the plan without some frontends; a node port goes as a whole.
func (t *table) without(s plan.Service, lost map[frontend]bool) plan.Service {
	s.Ports = slices.Clone(s.Ports)
	for i, p := range s.Ports {
		protocol, ok := protocolOf(p.Protocol)
		if !ok {
			continue
		}
		isLost := func(addr netip.Addr, port uint16) bool {
			return lost[frontend{addr: addressOf(addr), port: port, protocol: protocol}]
		}
		s.Ports[i].Frontends = slices.DeleteFunc(slices.Clone(p.Frontends), func(f plan.Frontend) bool {
			if f.Kind != plan.NodePort {
				return isLost(f.Addr, f.Port)
			}
			return slices.ContainsFunc(t.nodeAddresses, func(addr netip.Addr) bool { return isLost(addr, f.Port) })
		})
	}
	return s
}
