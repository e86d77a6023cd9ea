package counters

import (
	"encoding/binary"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// Scope says which frontends are counted.
type Scope string

// The scopes.
const (
	Off      Scope = "off"
	External Scope = "external" // all but cluster IPs
	All      Scope = "all"
)

// MaxPlaces is how many frontends of one Service are counted at most, MaxTotal how many of all, and MaxOfNamespace how
// many of those of a namespace once half of MaxTotal are.
const (
	MaxPlaces      = 1024
	MaxOfNamespace = MaxTotal / 4
	MaxTotal       = 1 << 17
)

// place is where clients connect to; without an address it is a node port.
type place struct {
	family   lb.Family
	addr     netip.Addr
	protocol byte
	port     uint16
}

var protocols = map[lb.Protocol]byte{lb.TCP: unix.IPPROTO_TCP, lb.UDP: unix.IPPROTO_UDP, lb.SCTP: unix.IPPROTO_SCTP}

// appendKey appends the key of the place's elements as the kernel has it: each field padded to four
// bytes.
func (p place) appendKey(b []byte) []byte {
	if p.addr.IsValid() {
		b = append(b, p.addr.AsSlice()...)
	}
	b = append(b, p.protocol, 0, 0, 0)
	return append(binary.BigEndian.AppendUint16(b, p.port), 0, 0)
}

// placeOf reads a key back; ok is false for one that is not of the right length.
func placeOf(family lb.Family, key []byte, nodePort bool) (p place, ok bool) {
	p.family = family
	if !nodePort {
		n := len(key) - 8
		if n < 0 {
			return p, false
		}
		if p.addr, ok = netip.AddrFromSlice(key[:n]); !ok {
			return p, false
		}
		key = key[n:]
	}
	if len(key) != 8 {
		return p, false
	}
	p.protocol, p.port = key[0], binary.BigEndian.Uint16(key[4:])
	return p, true
}

// places returns the frontends of a Service that are counted, each with the reason why connections
// to it are refused if they are. over is how many are left out, as they are too many.
func places(s plan.Service, scope Scope) (at map[place]lb.Reason, over int) {
	at = map[place]lb.Reason{}
	for _, port := range s.Ports {
		number, ok := protocols[port.Protocol]
		if !ok {
			continue
		}
		for _, f := range port.Frontends {
			if f.Kind == plan.ClusterIP && scope != All {
				continue
			}
			p := place{port.Family, f.Addr, number, f.Port}
			if _, twice := at[p]; !twice && len(at) == MaxPlaces {
				over++
				continue
			}
			at[p] = refusal(f)
		}
	}
	return at, over
}

// refusal says why a connection to a frontend is not translated.
func refusal(f plan.Frontend) lb.Reason {
	switch {
	case f.Action == plan.Reject:
		return lb.ReasonNoBackends
	case f.Action == plan.Drop:
		return lb.ReasonNoLocalBackends
	case f.Sources != nil:
		return lb.ReasonSourceRefused
	}
	return lb.ReasonNotProgrammed
}
