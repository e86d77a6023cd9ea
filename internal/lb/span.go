package lb

import (
	"crypto/sha256"
	"net/netip"
	"strconv"
	"strings"
	"time"
)

// SpanName names a part of a Service's way from its creation to its clients.
type SpanName string

// The spans of one address of a Service, in the order in which they begin.
const (
	SpanAssigned   SpanName = "assigned"   // the controller decides on the address, and the API server has it
	SpanProgrammed SpanName = "programmed" // a proxy has seen the address, and the kernel has confirmed its rules
	SpanClaimed    SpanName = "claimed"    // a speaker has seen the address, and its node delivers it
	SpanOwned      SpanName = "owner chosen"
	SpanAnnounced  SpanName = "announced" // the owner answers ARP or NDP, or a BGP peer hears of the address
	SpanConfirmed  SpanName = "confirmed" // the API server has it from a speaker that the address is announced
)

// Span is one part of the life of an address of a Service. Programs that know the Service's UID and
// the address agree on the trace without talking.
type Span struct {
	Service    Key
	UID        string // of the Service
	VIP        netip.Addr
	Name       SpanName
	Start, End time.Time
	Attributes []SpanAttribute
}

// SpanAttribute is something that a span says.
type SpanAttribute struct{ Key, Value string }

// Trace returns the trace ID: that of this Service with this address.
func (s Span) Trace() (id [16]byte) {
	sum := sha256.Sum256([]byte("landfall.dev/trace\x00" + s.UID + "\x00" + s.VIP.String()))
	copy(id[:], sum[:])
	return id
}

// ID returns the span ID. There is one span SpanAssigned in a trace, on which the others hang; what
// happens on nodes may happen more than once.
func (s Span) ID(node string) (id [8]byte) {
	trace := s.Trace()
	parts := []string{string(trace[:]) + string(s.Name)}
	if s.Name != SpanAssigned {
		parts = append(parts, node, strconv.FormatInt(s.Start.UnixNano(), 10))
		for _, a := range s.Attributes {
			parts = append(parts, a.Key, a.Value)
		}
	}
	sum := sha256.Sum256([]byte(strings.Join(parts, "\x00")))
	copy(id[:], sum[:])
	return id
}

// Parent returns the ID of the span on which this one hangs; ok is false for SpanAssigned.
func (s Span) Parent() (id [8]byte, ok bool) {
	if s.Name == SpanAssigned {
		return id, false
	}
	s.Name = SpanAssigned
	return s.ID(""), true
}
