// Package nft writes and reads tables of nftables over netlink: the one such codec of the proxy,
// for the nftables dialect and for the rescue of connections.
//
// docs/design/nftables.md says what was measured against the library github.com/google/nftables.
package nft

import (
	"hash/fnv"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/nft/expr"
)

// Table names a table of one family.
type Table struct {
	Family lb.Family
	Name   string
	// Inet is set for a table of both families, of which Family says which packets matter.
	Inet bool
}

// number returns netfilter's number of the table's family.
func (t Table) number() byte {
	if t.Inet {
		return unix.NFPROTO_INET
	}
	return Family(t.Family)
}

// Family returns netfilter's number of a family.
func Family(family lb.Family) byte {
	if family == lb.IPv6 {
		return unix.NFPROTO_IPV6
	}
	return unix.NFPROTO_IPV4
}

// Set defines a set, or, with a value, a map.
type Set struct {
	Name  string
	Flags uint32 // such as unix.NFT_SET_MAP
	// KeyType and ValueType are what nft calls the types, the lengths are in bytes. ValueType is 0 in
	// a set.
	KeyType, KeyLength, ValueType, ValueLength uint32
	// Size is the greatest number of elements; 0 for no limit.
	Size uint32
	// Timeout is how long elements stay, in milliseconds; 0 for the time that each brings.
	Timeout uint64
	// UserData is what nft keeps with a set to print it.
	UserData []byte
	// Counted has each element count the packets that a rule finds in the set (Linux 5.7 or later).
	Counted bool
}

// Shape is the part of a set's definition that cannot be changed and is read back.
type Shape struct{ Flags, KeyType, KeyLength, ValueType, ValueLength uint32 }

// Shape returns the shape that the kernel has of the set.
func (s Set) Shape() Shape { return Shape{s.Flags, s.KeyType, s.KeyLength, s.ValueType, s.ValueLength} }

// Numbers by which nft knows types (enum datatypes of nft's datatype.h).
const (
	TypeInteger = 4
	typeIPv4    = 7
	typeIPv6    = 8
	TypeEther   = 9
	TypeProto   = 12
	TypePort    = 13
	TypeClass   = 23 // of queueing disciplines
	TypeIfname  = 41
	typeBits    = 6 // per type in a key of several
)

// TypeOf returns the number of a type that is made of several.
func TypeOf(types ...uint32) (n uint32) {
	for _, t := range types {
		n = n<<typeBits | t
	}
	return n
}

// TypeAddress returns the type of a family's addresses, AddressBytes their length.
func TypeAddress(family lb.Family) uint32 {
	if family == lb.IPv6 {
		return typeIPv6
	}
	return typeIPv4
}

// AddressBytes returns the length of a family's addresses.
func AddressBytes(family lb.Family) int {
	if family == lb.IPv6 {
		return 16
	}
	return 4
}

// ErrorTypes returns the types of ICMP errors: unreachable, too big, time exceeded, and parameter problem (RFC
// 792, RFC 4443).
func ErrorTypes(family lb.Family) []byte {
	if family == lb.IPv6 {
		return []byte{1, 2, 3, 4}
	}
	return []byte{3, 11, 12}
}

// IsError matches ICMP errors of one type.
func IsError(family lb.Family, number byte) expr.List {
	protocol := byte(unix.IPPROTO_ICMP)
	if family == lb.IPv6 {
		protocol = unix.IPPROTO_ICMPV6
	}
	return append(expr.IsProtocol(expr.CmpOpEq, protocol),
		expr.Load(expr.Reg, expr.PayloadBaseTransportHeader, 0, 1), expr.Compare(expr.CmpOpEq, number))
}

// Hook is where the kernel enters a chain. The zero value is that of a chain that is only jumped
// to.
type Hook struct {
	Kind     string // nat or filter
	Number   uint32 // such as unix.NF_INET_PRE_ROUTING
	Priority int32
}

// Rule is what nft shows on one line.
type Rule struct {
	Comment string
	Exprs   expr.List
}

// UserData is what the kernel keeps with the rule for us and for nft: the comment that nft prints,
// and, under a type that nft passes over, a hash of the rule, by which it is recognised when read
// back.
func (r Rule) UserData() string { return string(r.userData(expr.Encode(r.Exprs))) }

// UserData is what the kernel keeps with each of some rules.
func UserData(rules []Rule) []string {
	all := make([]string, len(rules))
	for i, r := range rules {
		all[i] = r.UserData()
	}
	return all
}

func (r Rule) userData(body []byte) []byte {
	const commentType, hashType = 0, 0x4c
	h := fnv.New64a()
	h.Write(body)
	data := TLV(hashType, h.Sum(nil))
	if r.Comment != "" {
		data = append(TLV(commentType, append([]byte(r.Comment), 0)), data...)
	}
	return data
}

// TLV returns a value in the form of libnftnl's user data: type, length, value.
func TLV(kind byte, value []byte) []byte {
	return append([]byte{kind, byte(len(value))}, value...)
}
