package lb

import (
	"fmt"
	"math/big"
	"net/netip"
	"strings"
)

// Range is an inclusive range of addresses of one family.
type Range struct {
	From, To netip.Addr
}

// ParseRange parses a CIDR (10.0.0.0/24, 2001:db8::/120) or a range (10.0.0.1-10.0.0.9, with or
// without blanks around the dash). A CIDR contains all of its addresses, even if it is not written
// with the first one.
func ParseRange(s string) (Range, error) {
	s = strings.TrimSpace(s)
	if from, to, ok := strings.Cut(s, "-"); ok {
		return parseFromTo(s, from, to)
	}
	prefix, err := netip.ParsePrefix(s)
	if err != nil {
		return Range{}, fmt.Errorf("%q is neither a CIDR nor a range like 192.0.2.10-192.0.2.20", s)
	}
	if prefix.Addr().Is4In6() {
		return Range{}, fmt.Errorf("%q is an IPv4-mapped IPv6 prefix; write it as IPv4", s)
	}
	prefix = prefix.Masked()
	return Range{From: prefix.Addr(), To: lastAddr(prefix)}, nil
}

func parseFromTo(s, first, last string) (Range, error) {
	from, err := ParseAddr(first)
	if err != nil {
		return Range{}, fmt.Errorf("start of range %q: %w", s, err)
	}
	to, err := ParseAddr(last)
	if err != nil {
		return Range{}, fmt.Errorf("end of range %q: %w", s, err)
	}
	if from.Is4() != to.Is4() {
		return Range{}, fmt.Errorf("range %q mixes IPv4 and IPv6", s)
	}
	if to.Less(from) {
		return Range{}, fmt.Errorf("range %q ends before it starts", s)
	}
	return Range{From: from, To: to}, nil
}

// ParseAddr parses one address without a zone. It trims blanks and unmaps IPv4-mapped IPv6.
func ParseAddr(s string) (netip.Addr, error) {
	addr, err := netip.ParseAddr(strings.TrimSpace(s))
	if err != nil || addr.Zone() != "" {
		return netip.Addr{}, fmt.Errorf("%q is not an IP address", s)
	}
	return addr.Unmap(), nil
}

func lastAddr(prefix netip.Prefix) netip.Addr {
	b := prefix.Addr().AsSlice()
	for bit := prefix.Bits(); bit < len(b)*8; bit++ {
		b[bit/8] |= 1 << (7 - bit%8)
	}
	addr, _ := netip.AddrFromSlice(b)
	return addr
}

// Contains reports whether addr lies in the range.
func (r Range) Contains(addr netip.Addr) bool {
	return addr.BitLen() == r.From.BitLen() && !addr.Less(r.From) && !r.To.Less(addr)
}

// Overlaps reports whether the ranges share an address.
func (r Range) Overlaps(other Range) bool {
	return r.From.BitLen() == other.From.BitLen() && !r.To.Less(other.From) && !other.To.Less(r.From)
}

// Family returns the family of the range's addresses.
func (r Range) Family() Family { return FamilyOf(r.From) }

// Size returns the exact number of addresses in the range, which may exceed 64 bits.
func (r Range) Size() *big.Int {
	from, to := new(big.Int).SetBytes(r.From.AsSlice()), new(big.Int).SetBytes(r.To.AsSlice())
	size := to.Sub(to, from)
	return size.Add(size, big.NewInt(1))
}

// String returns from-to, or the single address.
func (r Range) String() string {
	if r.From == r.To {
		return r.From.String()
	}
	return r.From.String() + "-" + r.To.String()
}

// Subtract returns the ranges without the addresses of cut.
func Subtract(ranges, cut []Range) []Range {
	for _, c := range cut {
		var left []Range
		for _, r := range ranges {
			if !r.Overlaps(c) {
				left = append(left, r)
				continue
			}
			if r.From.Less(c.From) {
				left = append(left, Range{From: r.From, To: c.From.Prev()})
			}
			if c.To.Less(r.To) {
				left = append(left, Range{From: c.To.Next(), To: r.To})
			}
		}
		ranges = left
	}
	return ranges
}
