package nfnetlink

import (
	"encoding/binary"
	"iter"

	"golang.org/x/sys/unix"
)

// Attributes are netlink attributes in the form in which they are sent (linux/netlink.h).
type Attributes []byte

// Bytes appends an attribute.
func (a *Attributes) Bytes(kind uint16, data []byte) {
	b := binary.NativeEndian.AppendUint16(*a, uint16(unix.SizeofNlAttr+len(data)))
	b = binary.NativeEndian.AppendUint16(b, kind)
	*a = append(b, data...)
	a.pad()
}

// Text appends a string, which ends with a zero byte.
func (a *Attributes) Text(kind uint16, s string) {
	start := a.Open(kind)
	*a = append(append(*a, s...), 0)
	a.finish(start, kind)
}

// Number appends a number of 32 bits in network byte order, which is what netfilter has.
func (a *Attributes) Number(kind uint16, n uint32) {
	start := a.Open(kind)
	*a = binary.BigEndian.AppendUint32(*a, n)
	a.finish(start, kind)
}

// Number64 appends a number of 64 bits in network byte order.
func (a *Attributes) Number64(kind uint16, n uint64) {
	start := a.Open(kind)
	*a = binary.BigEndian.AppendUint64(*a, n)
	a.finish(start, kind)
}

// Nested appends an attribute that holds those that body appends.
func (a *Attributes) Nested(kind uint16, body func()) {
	start := a.Open(kind)
	body()
	a.Close(start)
}

// Open begins an attribute that holds others, and returns where, for Close.
func (a *Attributes) Open(kind uint16) int {
	start := len(*a)
	b := binary.NativeEndian.AppendUint16(*a, 0)
	*a = binary.NativeEndian.AppendUint16(b, unix.NLA_F_NESTED|kind)
	return start
}

// Close ends an attribute that Open has begun.
func (a *Attributes) Close(start int) {
	binary.NativeEndian.PutUint16((*a)[start:], uint16(len(*a)-start))
	a.pad()
}

// finish ends an attribute that holds a value instead of others.
func (a *Attributes) finish(start int, kind uint16) {
	binary.NativeEndian.PutUint16((*a)[start+2:], kind)
	a.Close(start)
}

func (a *Attributes) pad() {
	for len(*a)%unix.NLA_ALIGNTO != 0 {
		*a = append(*a, 0)
	}
}

// All goes through attributes, without their flags. It stops at what is not an attribute.
func All(b []byte) iter.Seq2[uint16, []byte] {
	return func(yield func(uint16, []byte) bool) {
		for len(b) >= unix.SizeofNlAttr {
			size := int(binary.NativeEndian.Uint16(b))
			if size < unix.SizeofNlAttr || size > len(b) {
				return
			}
			kind := binary.NativeEndian.Uint16(b[2:]) &^ (unix.NLA_F_NESTED | unix.NLA_F_NET_BYTEORDER)
			if !yield(kind, b[unix.SizeofNlAttr:size]) {
				return
			}
			b = b[min(len(b), (size+3)&^3):]
		}
	}
}

// Get returns the value of the attribute at a path of kinds, the first at each step; nil if there
// is none.
func Get(b []byte, path ...uint16) []byte {
	for _, kind := range path {
		var found []byte
		for k, data := range All(b) {
			if k == kind {
				found = data
				break
			}
		}
		if found == nil {
			return nil
		}
		b = found
	}
	return b
}

// GetText returns a string; "" if there is none.
func GetText(b []byte, path ...uint16) string {
	if data := Get(b, path...); len(data) > 0 {
		return string(data[:len(data)-1])
	}
	return ""
}

// GetNumber returns a number of 32 bits in network byte order; ok is false if there is none.
func GetNumber(b []byte, path ...uint16) (n uint32, ok bool) {
	if data := Get(b, path...); len(data) == 4 {
		return binary.BigEndian.Uint32(data), true
	}
	return 0, false
}
