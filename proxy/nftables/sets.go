package nftables

import (
	"slices"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/nft"
	"github.com/landfall-lb/landfall/proxy/nft/expr"
)

// set is the definition of a set or map.
type set struct {
	name  string
	flags uint32
	key   []field
	value []field // of a map
	// size is the greatest number of elements; 0 for no limit.
	size uint32
	// typeOf names, for nft, the protocol whose header the key's port is of; 0 for keys of plain
	// types.
	typeOf protocol
}

func newSets(needs needs, relay bool) []set {
	frontend := []field{fieldDestination, fieldProtocol, fieldPort}
	var sets []set
	for id, name := range setNames {
		s := set{name: name, key: frontend}
		switch id := setID(id); {
		case id.isNumbered():
			continue // see below
		case (id == setRelayed || id == setRelayOwners) && !relay:
			continue
		case id == setBackends, id == setHanded:
			s.key, s.value, s.typeOf = []field{fieldGroup, fieldNumber}, []field{fieldDestination}, tcp
		case id.isMixed():
			s.key, s.value = []field{fieldGroup, fieldNumber}, []field{fieldDestination, fieldPort}
			s.typeOf = protocols[id-setMixedTCP]
		case id.isBackend():
			s.key = []field{fieldGroup, fieldDestination}
			if id.leadsToPort() {
				s.value = []field{fieldPort}
			}
		case id.ofGroup():
			s.key = []field{fieldGroup}
		case id == setPorts:
			s.value = []field{fieldPort}
		case id.isMap():
			s.value = []field{fieldGroup}
		case id.ofAddress():
			s.key = frontend[:1]
		case id == setHairpin:
			s.key = []field{fieldSource, fieldDestination}
		case id == setNodes:
			s.key = []field{fieldSender}
		}
		if len(s.value) > 0 {
			s.flags |= unix.NFT_SET_MAP
		}
		sets = append(sets, s)
	}
	for _, n := range needs {
		if !n.set.isNumbered() {
			continue
		}
		s := set{name: n.setName(), key: []field{fieldGroup}}
		if n.set == setSourceRanges {
			s.key = []field{fieldGroup, fieldSource}
		}
		sets = append(sets, s)
	}
	if relay {
		sets = append(sets, set{name: relayMap, flags: unix.NFT_SET_MAP | unix.NFT_SET_TIMEOUT,
			key: []field{fieldProtocol}, value: []field{fieldDestination, fieldPort}},
			set{name: relayLeased, flags: unix.NFT_SET_TIMEOUT, key: []field{fieldProtocol}},
			set{name: relayPorts, flags: unix.NFT_SET_TIMEOUT, key: []field{fieldProtocol, fieldPort}},
			set{name: relayRates, flags: unix.NFT_SET_TIMEOUT | unix.NFT_SET_EVAL, size: maxRelayRates,
				key: []field{fieldGroup}})
	}
	return append(sets, set{
		name: stickyMap, flags: unix.NFT_SET_MAP | unix.NFT_SET_TIMEOUT | unix.NFT_SET_EVAL, size: stickyLimit,
		key: []field{fieldGroup, fieldNumber}, value: []field{fieldDestination}, typeOf: tcp,
	})
}

// typeNumber returns what nft calls a key or value of the given fields.
func typeNumber(family lb.Family, fields []field) uint32 {
	types := make([]uint32, len(fields))
	for i, f := range fields {
		switch f {
		case fieldProtocol:
			types[i] = nft.TypeProto
		case fieldPort:
			types[i] = nft.TypePort
		case fieldNumber:
			types[i] = nft.TypeInteger
		case fieldGroup:
			types[i] = nft.TypeClass
		case fieldSender:
			types[i] = nft.TypeEther
		case fieldDevice:
			types[i] = nft.TypeIfname
		default:
			types[i] = nft.TypeAddress(family)
		}
	}
	return nft.TypeOf(types...)
}

// definition returns the set as the kernel takes it.
func (s set) definition(family lb.Family) nft.Set {
	d := nft.Set{
		Name: s.name, Flags: s.flags, KeyType: typeNumber(family, s.key), KeyLength: length(family, s.key), Size: s.size,
		UserData: s.userdata(family),
	}
	if len(s.value) > 0 {
		d.ValueType, d.ValueLength = typeNumber(family, s.value), length(family, s.value)
	}
	return d
}

// fieldBytes is the length of a field without padding.
func fieldBytes(family lb.Family, f field) uint32 {
	switch f {
	case fieldProtocol:
		return 1
	case fieldPort, fieldSourcePort:
		return 2
	case fieldSender:
		return uint32(macBytes)
	case fieldDevice:
		return unix.IFNAMSIZ
	}
	return 4 * builder{family}.words(f)
}

// length returns how many bytes the fields take in a set: each of several is padded to four.
func length(family lb.Family, fields []field) uint32 {
	if len(fields) == 1 {
		return fieldBytes(family, fields[0])
	}
	var words uint32
	for _, f := range fields {
		words += builder{family}.words(f)
	}
	return 4 * words
}

// userdata is what nft keeps with a set to print it, in libnftnl's form: type, length, value. For a
// key that holds a drawn number these are the expressions that the key is made of, as no plain type
// fits a drawn number; and where a key or a value is a group or a name alone, its byte order.
func (s set) userdata(family lb.Family) []byte {
	const byteOrder, dataByteOrder, keyTypeOf, dataTypeOf, dataInterval = 0, 1, 3, 4, 6
	order := func(fields []field) []byte {
		const unknown, host = 0, 1
		if slices.Equal(fields, []field{fieldGroup}) || slices.Equal(fields, []field{fieldDevice}) {
			return expr.Host32(host)
		}
		return expr.Host32(unknown)
	}
	orders := concat(nft.TLV(byteOrder, order(s.key)), nft.TLV(dataByteOrder, order(s.value)))
	switch {
	case s.typeOf != 0:
		return concat(orders, nft.TLV(keyTypeOf, s.typeOfFields(family, s.key)),
			nft.TLV(dataTypeOf, s.typeOfFields(family, s.value)), nft.TLV(dataInterval, expr.Host32(0)))
	case slices.Contains(s.key, fieldGroup), slices.Contains(s.value, fieldGroup), s.key[0] == fieldDevice:
		return orders
	}
	return nil
}

// typeOfFields describes fields as a concatenation of expressions (expression numbers, header and
// field numbers of nft 1.0).
func (s set) typeOfFields(family lb.Family, fields []field) []byte {
	const (
		expression, data                = 0, 1
		isPayload, isMeta               = 7, 9
		isConcat, isNumgen              = 13, 23
		headerIPv4, headerIPv6          = 12, 13
		destinationIPv4                 = 12
		destinationIPv6                 = 9
		destinationPort                 = 2
		numgenType, numgenMod, numgenOf = 0, 1, 2
	)
	payload := func(header, field uint32) []byte {
		return concat(nft.TLV(expression, expr.Host32(isPayload)),
			nft.TLV(data, concat(nft.TLV(0, expr.Host32(header)), nft.TLV(1, expr.Host32(field)))))
	}
	var parts []byte
	for i, f := range fields {
		var part []byte
		switch f {
		case fieldDestination:
			part = payload(headerIPv4, destinationIPv4)
			if family == lb.IPv6 {
				part = payload(headerIPv6, destinationIPv6)
			}
		case fieldPort:
			part = payload(map[protocol]uint32{tcp: 8, udp: 6, sctp: 10}[s.typeOf], destinationPort)
		case fieldGroup:
			part = concat(nft.TLV(expression, expr.Host32(isMeta)),
				nft.TLV(data, nft.TLV(0, expr.Host32(unix.NFT_META_PRIORITY))))
		case fieldNumber: // nft 1.0.6 crashes on a hash here, and takes it for a number of any kind
			part = concat(nft.TLV(expression, expr.Host32(isNumgen)), nft.TLV(data, concat(
				nft.TLV(numgenType, expr.Host32(unix.NFT_NG_RANDOM)), nft.TLV(numgenMod, expr.Host32(2)),
				nft.TLV(numgenOf, expr.Host32(0)))))
		}
		if len(fields) == 1 {
			return part
		}
		parts = append(parts, nft.TLV(byte(i), part)...)
	}
	return concat(nft.TLV(expression, expr.Host32(isConcat)), nft.TLV(data, parts))
}

func concat(parts ...[]byte) []byte {
	var all []byte
	for _, p := range parts {
		all = append(all, p...)
	}
	return all
}
