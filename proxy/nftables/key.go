package nftables

import (
	"encoding/binary"
	"fmt"
	"math/bits"
	"strconv"
	"strings"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/nft"
)

// appendKey appends the key of an element as the kernel has it: each field padded to four bytes.
// source is the address in the key of setSourceRanges.
func (e element) appendKey(b []byte, family lb.Family, source address) []byte {
	n := nft.AddressBytes(family)
	b = append(b, e.addr[:n]...)
	switch e.set {
	case setClusterIPs, setEcho:
		return b
	case setHairpin:
		return append(b, e.addr[:n]...)
	case setBackends:
		b = appendPort(b, e.port)
		return binary.NativeEndian.AppendUint32(b, e.number)
	case setAffinity, setPorts:
		return appendPort(b, e.port)
	}
	b = append(b, byte(e.protocol), 0, 0, 0)
	b = appendPort(b, e.port)
	if e.set == setSourceRanges {
		b = append(b, source[:n]...)
	}
	return b
}

func appendPort(b []byte, port uint16) []byte {
	return append(binary.BigEndian.AppendUint16(b, port), 0, 0)
}

// lastSource returns the last address of a source range.
func (e element) lastSource(family lb.Family) address {
	last := e.source
	for i := int(e.bits); i < 8*nft.AddressBytes(family); i++ {
		last[i/8] |= 0x80 >> (i % 8)
	}
	return last
}

func (b target) append(buf []byte, family lb.Family) []byte {
	return appendPort(append(buf, b.addr[:nft.AddressBytes(family)]...), b.port)
}

// appendValue appends what the element leads to as the kernel has it; nothing in a set that is no
// map.
func (e entry) appendValue(buf []byte, family lb.Family) []byte {
	switch e.set {
	case setBackends:
		return e.to.append(buf, family)
	case setPorts:
		return binary.BigEndian.AppendUint16(buf, e.to.port)
	}
	return buf
}

// setOf returns what the elements of a set with this name are; what it returns has only the set,
// protocol and timeout. ok is false for a set that is not one of ours with elements of ours.
func setOf(name string) (e element, ok bool) {
	for id, plain := range plainSets {
		if name == plain {
			e.set = setID(id)
			return e, true
		}
	}
	prefix, rest, _ := strings.Cut(name, "-")
	for _, p := range protocols {
		if prefix == p.String() {
			e.protocol = p
		}
	}
	if e.protocol == 0 {
		return e, false
	}
	switch rest {
	case "backends":
		e.set = setBackends
		return e, true
	case "ports":
		e.set = setPorts
		return e, true
	}
	seconds, found := strings.CutPrefix(rest, "affinity-")
	n, err := strconv.ParseUint(seconds, 10, 32)
	e.set, e.number = setAffinity, uint32(n)
	return e, found && err == nil
}

// decode reads an element of the set that of stands for.
func decode(of element, family lb.Family, from nft.Element) (entry, error) {
	e, key, value := entry{element: of}, from.Key, from.Value
	n := nft.AddressBytes(family)
	want := map[setID]int{setClusterIPs: n, setEcho: n, setHairpin: 2 * n, setBackends: n + 8, setAffinity: n + 4,
		setPorts: n + 4, setSourceRanges: 2*n + 8}[of.set]
	if want == 0 {
		want = n + 8
	}
	valued := map[setID]int{setBackends: n + 4, setPorts: 2}[of.set]
	if len(key) != want || valued > 0 && len(value) != valued {
		return e, fmt.Errorf("an element of %s has %d bytes of key and %d of value", of.setName(), len(key), len(value))
	}
	copy(e.addr[:], key[:n])
	rest := key[n:]
	switch of.set {
	case setClusterIPs, setEcho:
	case setHairpin:
		if string(key[:n]) != string(rest) {
			return e, fmt.Errorf("an element of %s is not a pair", of.setName())
		}
	case setBackends:
		e.port, e.number = binary.BigEndian.Uint16(rest), binary.NativeEndian.Uint32(rest[4:])
		copy(e.to.addr[:], value[:n])
		e.to.port = binary.BigEndian.Uint16(value[n:])
	case setPorts:
		e.port, e.to.port = binary.BigEndian.Uint16(rest), binary.BigEndian.Uint16(value)
	case setAffinity:
		e.port = binary.BigEndian.Uint16(rest)
	default:
		e.protocol, e.port = protocol(rest[0]), binary.BigEndian.Uint16(rest[4:])
		if of.set == setSourceRanges {
			return e, e.decodeRange(rest[8:], from.Last, n)
		}
	}
	return e, nil
}

// decodeRange reads the prefix of a source range from its first address and the key at its end.
func (e *entry) decodeRange(first, last []byte, n int) error {
	if last == nil {
		last = append(make([]byte, n+8), first...)
	}
	if len(last) != 2*n+8 {
		return fmt.Errorf("the end of a source range has %d bytes", len(last))
	}
	copy(e.source[:], first)
	last = last[n+8:]
	e.bits = uint8(8 * n)
	for i := range n {
		if different := first[i] ^ last[i]; different != 0 {
			e.bits = uint8(8*i + bits.LeadingZeros8(different))
			break
		}
	}
	family := lb.IPv4
	if n > 4 {
		family = lb.IPv6
	}
	if end := e.lastSource(family); string(end[:n]) != string(last) {
		return fmt.Errorf("a source range is not a prefix")
	}
	return nil
}

// decodeClient reads an element of the map that remembers clients of a protocol, see newSticky; ok
// is false for what is none.
func decodeClient(family lb.Family, p protocol, key, value []byte) (c client, ok bool) {
	n := nft.AddressBytes(family)
	want, at, port := 2*n+4, n, 2*n
	if family == lb.IPv6 {
		want, at, port = n+8, 8, 4
	}
	if len(key) != want || len(value) < n || family == lb.IPv4 && len(value) != n+4 {
		return c, false
	}
	c = client{key: string(key), frontend: frontend{protocol: p, port: binary.BigEndian.Uint16(key[port:])}}
	copy(c.frontend.addr[:], key[at:at+n])
	copy(c.to.addr[:], value[:n])
	if family == lb.IPv4 {
		copy(c.addr[:], key[:n])
		c.to.port = binary.BigEndian.Uint16(value[n:])
	}
	return c, true
}
