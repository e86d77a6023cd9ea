package nftables

import (
	"time"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
)

// set is the definition of a set or map.
type set struct {
	name  string
	flags uint32
	key   []field
	value []field // of a map
	// size is the greatest number of elements; 0 for no limit.
	size uint32
	// typeOf names, for nft, the protocol whose header the key's port is of; 0 for keys of plain types.
	typeOf protocol
}

// stickyLimit is how many clients of a protocol are remembered at most. Others are served without affinity.
const stickyLimit = 1 << 20

func newSets(timeouts []uint32) []set {
	frontend := []field{fieldDestination, fieldProtocol, fieldPort}
	target := []field{fieldDestination, fieldPort}
	var sets []set
	for id, name := range plainSets {
		s := set{name: name, key: frontend}
		switch setID(id) {
		case setClusterIPs:
			s.key = frontend[:1]
		case setHairpin:
			s.key = []field{fieldSource, fieldDestination}
		case setSourceRanges:
			s.key, s.flags = []field{fieldDestination, fieldProtocol, fieldPort, fieldSource}, unix.NFT_SET_INTERVAL|setConcat
		}
		sets = append(sets, s)
	}
	for _, p := range protocols {
		sets = append(sets,
			set{name: p.String() + "-backends", flags: unix.NFT_SET_MAP, key: []field{fieldDestination, fieldPort, fieldNumber}, value: target, typeOf: p},
			set{name: stickyMap(p), flags: unix.NFT_SET_MAP | unix.NFT_SET_TIMEOUT | unix.NFT_SET_EVAL, key: []field{fieldSource, fieldDestination, fieldPort}, value: target, size: stickyLimit})
		for _, seconds := range timeouts {
			sets = append(sets, set{name: affinitySet(p, seconds), key: target})
		}
	}
	return sets
}

// setConcat is NFT_SET_CONCAT of linux/netfilter/nf_tables.h: each field of a key has a range of its own.
const setConcat = 0x80

// Numbers by which nft knows types (enum datatypes of nft's datatype.h).
const (
	typeInteger = 4
	typeIPv4    = 7
	typeIPv6    = 8
	typeProto   = 12
	typePort    = 13
	typeBits    = 6 // per type in a key of several
)

// typeNumber returns what nft calls a key or value of the given fields.
func typeNumber(family lb.Family, fields []field) uint32 {
	var n uint32
	for _, f := range fields {
		n <<= typeBits
		switch f {
		case fieldProtocol:
			n |= typeProto
		case fieldPort:
			n |= typePort
		case fieldNumber:
			n |= typeInteger
		default:
			if family == lb.IPv6 {
				n |= typeIPv6
			} else {
				n |= typeIPv4
			}
		}
	}
	return n
}

// length returns how many bytes the fields take in a set: each is padded to four.
func length(family lb.Family, fields []field) uint32 {
	var words uint32
	for _, f := range fields {
		words += builder{family}.words(f)
	}
	return 4 * words
}

// userdata is what nft keeps with a set to print it: for a key that holds a drawn number, the expressions that the key is made
// of, as no plain type fits a drawn number. nft reads it in libnftnl's form: type, length, value.
func (s set) userdata(family lb.Family) []byte {
	if s.typeOf == 0 {
		return nil
	}
	const byteOrder, dataByteOrder, keyTypeOf, dataTypeOf, dataInterval = 0, 1, 3, 4, 6
	zero := host32(0)
	return concat(tlv(byteOrder, zero), tlv(dataByteOrder, zero), tlv(keyTypeOf, s.typeOfFields(family, s.key)), tlv(dataTypeOf, s.typeOfFields(family, s.value)), tlv(dataInterval, zero))
}

// typeOfFields describes fields as a concatenation of expressions (expression numbers, header and field numbers of nft 1.0).
func (s set) typeOfFields(family lb.Family, fields []field) []byte {
	const (
		expression, data                = 0, 1
		isPayload, isConcat, isNumgen   = 7, 13, 23
		headerIPv4, headerIPv6          = 12, 13
		destinationIPv4                 = 12
		destinationIPv6                 = 9
		destinationPort                 = 2
		numgenType, numgenMod, numgenOf = 0, 1, 2
	)
	payload := func(header, field uint32) []byte {
		return concat(tlv(expression, host32(isPayload)), tlv(data, concat(tlv(0, host32(header)), tlv(1, host32(field)))))
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
		case fieldNumber:
			part = concat(tlv(expression, host32(isNumgen)), tlv(data, concat(
				tlv(numgenType, host32(unix.NFT_NG_RANDOM)), tlv(numgenMod, host32(2)), tlv(numgenOf, host32(0)))))
		}
		parts = append(parts, tlv(byte(i), part)...)
	}
	return concat(tlv(expression, host32(isConcat)), tlv(data, parts))
}

func tlv(kind byte, value []byte) []byte {
	return append([]byte{kind, byte(len(value))}, value...)
}

func concat(parts ...[]byte) []byte {
	var all []byte
	for _, p := range parts {
		all = append(all, p...)
	}
	return all
}

func seconds2duration(seconds uint32) time.Duration { return time.Duration(seconds) * time.Second }
