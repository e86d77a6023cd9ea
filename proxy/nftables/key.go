package nftables

import (
	"encoding/binary"
	"fmt"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/nft"
)

const macBytes = len(lb.MAC{})

// appendKey appends the key of an element as the kernel has it: each field padded to four bytes.
func (e element) appendKey(b []byte, family lb.Family) []byte {
	n := nft.AddressBytes(family)
	if e.set.ofGroup() {
		b = binary.NativeEndian.AppendUint32(b, e.group)
		switch {
		case e.set.isNumber():
			b = binary.NativeEndian.AppendUint32(b, e.number)
		case e.set.isBackend(), e.set == setSourceRanges:
			b = append(b, e.source[:n]...)
		}
		return b
	}
	if e.set == setNodes {
		return append(b, e.addr[:macBytes]...)
	}
	b = append(b, e.addr[:n]...)
	switch e.set {
	case setEcho, setClusterIPs, setVIPs:
		return b
	case setHairpin:
		return append(b, e.addr[:n]...)
	}
	b = append(b, byte(e.protocol), 0, 0, 0)
	return appendPort(b, e.port)
}

func appendPort(b []byte, port uint16) []byte {
	return append(binary.BigEndian.AppendUint16(b, port), 0, 0)
}

// appendValue appends what the element leads to as the kernel has it; nothing in a set that is no
// map.
func (e entry) appendValue(buf []byte, family lb.Family) []byte {
	switch {
	case e.set == setBackends, e.set == setHanded:
		return append(buf, e.to.addr[:nft.AddressBytes(family)]...)
	case e.set.isMixed():
		return appendPort(append(buf, e.to.addr[:nft.AddressBytes(family)]...), e.to.port)
	case e.set.leadsToPort():
		return binary.BigEndian.AppendUint16(buf, e.to.port)
	case e.set.isMap():
		return binary.NativeEndian.AppendUint32(buf, e.to.group)
	}
	return buf
}

// setOf returns what the elements of a set with this name are; what it returns has only the set and
// its number. ok is false for a set that is not one of ours with elements of ours.
func setOf(name string) (e element, ok bool) {
	for id, plain := range setNames {
		if name == plain && !setID(id).isNumbered() {
			e.set = setID(id)
			return e, true
		}
	}
	if e.number, ok = memoryNamed(name); ok {
		e.set = setRemember
		return e, true
	}
	e.set = setSourceRanges
	e.number, ok = lengthNamed(name)
	return e, ok
}

// sizes returns how many bytes the key and the value of an element have.
func (id setID) sizes(family lb.Family) (key, value int) {
	n := nft.AddressBytes(family)
	switch {
	case id == setNodes:
		return macBytes, 0
	case id == setBackends, id == setHanded:
		return 8, n
	case id.isMixed():
		return 8, n + 4
	case id == setAffinityPorts:
		return 4 + n, 2
	case id.isBackend(), id == setSourceRanges:
		return 4 + n, 0
	case id.ofGroup():
		return 4, 0
	case id.ofAddress():
		return n, 0
	case id == setHairpin:
		return 2 * n, 0
	case id == setPorts:
		return n + 8, 2
	case id.isMap():
		return n + 8, 4
	}
	return n + 8, 0
}

// decode reads an element of the set that of stands for.
func decode(of element, family lb.Family, from nft.Element) (entry, error) {
	e, key, value := entry{element: of}, from.Key, from.Value
	n := nft.AddressBytes(family)
	keyBytes, valueBytes := of.set.sizes(family)
	if len(key) != keyBytes || valueBytes > 0 && len(value) != valueBytes {
		return e, fmt.Errorf("an element of %s has %d bytes of key and %d of value", of.setName(), len(key), len(value))
	}
	if of.set.ofGroup() {
		e.group = binary.NativeEndian.Uint32(key)
		switch {
		case of.set.isBackend(), of.set == setSourceRanges:
			copy(e.source[:], key[4:])
		case of.set.isNumber():
			e.number = binary.NativeEndian.Uint32(key[4:])
			copy(e.to.addr[:], value[:n])
		}
		switch {
		case of.set.isMixed():
			e.to.port = binary.BigEndian.Uint16(value[n:])
		case of.set.leadsToPort():
			e.to.port = binary.BigEndian.Uint16(value)
		}
		return e, nil
	}
	if of.set == setNodes {
		copy(e.addr[:], key)
		return e, nil
	}
	copy(e.addr[:], key[:n])
	rest := key[n:]
	switch of.set {
	case setEcho, setClusterIPs, setVIPs:
		return e, nil
	case setHairpin:
		if string(key[:n]) != string(rest) {
			return e, fmt.Errorf("an element of %s is not a pair", of.setName())
		}
		return e, nil
	}
	e.protocol, e.port = protocol(rest[0]), binary.BigEndian.Uint16(rest[4:])
	switch {
	case of.set == setPorts:
		e.to.port = binary.BigEndian.Uint16(value)
	case of.set.leadsToGroup():
		e.to.group = binary.NativeEndian.Uint32(value)
	}
	return e, nil
}
