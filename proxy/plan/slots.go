package plan

import (
	"encoding/binary"
	"hash/fnv"
	"math/bits"
	"net/netip"
	"slices"
)

// Schedulers other than Random choose by a table of slots, each of which has a backend: the rules of nftables mode
// go through it in turn, or take the slot that a hash says. The relay has the same tables for hashes, so that a client
// has the same backend through it and without it.

// SlotSizes are the sizes of tables. They are primes, as Maglev's permutations need, and so that frontends
// that take turns at one round-robin counter do not always meet the same slots.
var SlotSizes = []uint32{127, 1021, 8191}

// SlotSize returns the size of the table for n shares, 2 or more: large enough to keep them within some
// 5 % of each other, as long as there are at most 400.
func SlotSize(n int) uint32 {
	for _, size := range SlotSizes {
		if uint32(20*n) <= size {
			return size
		}
	}
	return SlotSizes[len(SlotSizes)-1]
}

// CountedSize returns the size of the table for n backends whose shares follow their connections. As the next
// table makes good what this one gets wrong, one slot for each backend is enough.
func CountedSize(n int) uint32 {
	for _, size := range SlotSizes {
		if uint32(n) <= size {
			return size
		}
	}
	return SlotSizes[len(SlotSizes)-1]
}

// MaxSlots is how many slots the tables of a Service have together. A Service with many lists of backends
// gets smaller tables, and draws at random where even the smallest are too many.
const MaxSlots = 1 << 16

// LargestSlots returns the size that no table of a Service may exceed; 0 if it can have none. total
// returns how many slots its tables have together if each has at most largest.
func LargestSlots(total func(largest uint32) int) uint32 {
	for _, size := range slices.Backward(SlotSizes) {
		if total(size) <= MaxSlots {
			return size
		}
	}
	return 0
}

// Hashes reports whether the scheduler chooses by a hash of what it knows of a connection.
func (s Scheduler) Hashes() bool { return s == SourceHash || s == DestinationHash || s == Maglev }

// Slots fills a table of one of SlotSizes with indexes of backends, of which hashes has the hash of each. How,
// depends on nothing but the backends and their weights, nil if all are the same.
func Slots(s Scheduler, hashes []uint64, weights []uint8, size uint32) []uint16 {
	turns := NewTurns(len(hashes), weights)
	if !s.Hashes() {
		return turns.Fill(size)
	}
	table := make([]uint16, size)
	const free = ^uint16(0)
	for i := range table {
		table[i] = free
	}
	// A backend whose turn it is takes the next free slot of a permutation of its own, which starts at
	// offset and goes on by skip.
	type walk struct{ next, skip uint32 }
	walks := make([]walk, len(hashes))
	for i, h := range hashes {
		walks[i] = walk{next: uint32(h % uint64(size)), skip: uint32(h>>32%uint64(size-1)) + 1}
	}
	for range table {
		w := &walks[turns.Next()]
		for table[w.next] != free {
			w.next = (w.next + w.skip) % size
		}
		table[w.next] = uint16(turns.last)
	}
	return table
}

// HashBackend is the same on every node and in every release: it decides where connections go. An address of
// IPv4 has the first bytes.
func HashBackend(addr [16]byte, port uint16) uint64 {
	h := fnv.New64a()
	h.Write(binary.BigEndian.AppendUint16(append([]byte(nil), addr[:]...), port))
	return Mix(h.Sum64())
}

// Mix is the finalizer of MurmurHash3, as FNV alone hardly moves the high bits when only the last bytes
// differ.
func Mix(x uint64) uint64 {
	x ^= x >> 33
	x *= 0xff51afd7ed558ccd
	x ^= x >> 33
	x *= 0xc4ceb9fe1a85ec53
	return x ^ x>>33
}

// HashSeed is the same on all nodes, so that they agree.
const HashSeed = 0x4c46

// Slot returns the slot of a connection, in a table of this size, by the scheduler, which must be one that
// hashes: as the rules of nftables mode have it.
func (s Scheduler) Slot(client, frontend netip.AddrPort, size uint32) uint32 {
	key := client.Addr().AsSlice()
	switch s {
	case DestinationHash:
		key = frontend.Addr().AsSlice()
	case Maglev: // the kernel pads what it hashes to four bytes
		key = append(binary.BigEndian.AppendUint16(key, client.Port()), 0, 0)
	}
	return uint32(uint64(JenkinsHash(key, HashSeed)) * uint64(size) >> 32)
}

// JenkinsHash is the hash of the kernel's rules (include/linux/jhash.h).
func JenkinsHash(k []byte, seed uint32) uint32 {
	word := func(i int) uint32 { return binary.NativeEndian.Uint32(k[i:]) }
	a := uint32(0xdeadbeef) + uint32(len(k)) + seed
	b, c := a, a
	for len(k) > 12 {
		a, b, c = a+word(0), b+word(4), c+word(8)
		a = (a - c) ^ bits.RotateLeft32(c, 4)
		c += b
		b = (b - a) ^ bits.RotateLeft32(a, 6)
		a += c
		c = (c - b) ^ bits.RotateLeft32(b, 8)
		b += a
		a = (a - c) ^ bits.RotateLeft32(c, 16)
		c += b
		b = (b - a) ^ bits.RotateLeft32(a, 19)
		a += c
		c = (c - b) ^ bits.RotateLeft32(b, 4)
		b += a
		k = k[12:]
	}
	rest := make([]byte, 12)
	if copy(rest, k) == 0 {
		return c
	}
	a, b, c = a+binary.LittleEndian.Uint32(rest), b+binary.LittleEndian.Uint32(rest[4:]),
		c+binary.LittleEndian.Uint32(rest[8:])
	c = (c ^ b) - bits.RotateLeft32(b, 14)
	a = (a ^ c) - bits.RotateLeft32(c, 11)
	b = (b ^ a) - bits.RotateLeft32(a, 25)
	c = (c ^ b) - bits.RotateLeft32(b, 16)
	a = (a ^ c) - bits.RotateLeft32(c, 4)
	b = (b ^ a) - bits.RotateLeft32(a, 14)
	c = (c ^ b) - bits.RotateLeft32(b, 24)
	return c
}
