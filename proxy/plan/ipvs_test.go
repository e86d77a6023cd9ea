package plan

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
)

// What IPVS' schedulers that hash do, as facts of its sources (net/netfilter/ipvs/ip_vs_sh.c, ip_vs_dh.c and
// ip_vs_mh.c of Linux), and small walkers that follow them:
//
//   - sh and dh have a table of 256 buckets. The destinations take them in the order in which they were added, over and
//     over: with sh as many in a row as their weight, with dh one each. The bucket of an address is hash_32 of
//     linux/hash.h, the highest eight bits of its product with 0x61c88647; the words of an IPv6 address are combined by
//     xor first. sh takes the client's address, and adds its port if sh-port is set; dh takes the one that the client
//     sends to.
//   - mh has a table of 4,093 slots, which Maglev's algorithm fills: in turn each destination takes the next free slots
//     of a permutation of its own, that begins at an offset and goes on by a skip, so many in a row as its weight over
//     the greatest common divisor of all. The client's address chooses the slot, with its port if mh-port is set.

// ipvsBuckets returns the table of sh; of dh if all weights are 1.
func ipvsBuckets(weights []int) []int {
	table := make([]int, 0, 256)
	for {
		for dest, weight := range weights {
			for range weight {
				if table = append(table, dest); len(table) == 256 {
					return table
				}
			}
		}
	}
}

// ipvsBucket returns where the table of sh or dh has an address.
func ipvsBucket(addr netip.Addr) uint32 {
	fold, b := uint32(0), addr.AsSlice()
	for ; len(b) > 0; b = b[4:] {
		fold ^= binary.BigEndian.Uint32(b)
	}
	return fold * 0x61c88647 >> 24
}

// ipvsMaglev returns the table of mh with so many slots, for destinations with these permutations and weights.
func ipvsMaglev(offsets, skips []uint32, weights []int, size uint32) []int {
	table, next := slices.Repeat([]int{-1}, int(size)), slices.Clone(offsets)
	for taken := uint32(0); ; {
		for dest, weight := range weights {
			for range weight {
				for table[next[dest]] >= 0 {
					next[dest] = (next[dest] + skips[dest]) % size
				}
				table[next[dest]] = dest
				if taken++; taken == size {
					return table
				}
			}
		}
	}
}

// hashesOf returns the hashes of so many backends.
func hashesOf(n int) (all []uint64) {
	for i := range n {
		all = append(all, HashBackend([16]byte{10, 244, byte(i), 7}, 8080))
	}
	return all
}

func ints[V uint8 | uint16](from []V) (to []int) {
	for _, v := range from {
		to = append(to, int(v))
	}
	return to
}

// With the same permutations, and without weights, the table is that of IPVS' mh slot by slot, at each size.
func TestTableIsIPVSMaglev(t *testing.T) {
	for _, s := range []Scheduler{SourceHash, DestinationHash, Maglev} {
		for _, size := range append([]uint32{4093}, SlotSizes...) {
			for _, n := range []int{1, 2, 3, 10, 60} {
				hashes := hashesOf(n)
				offsets, skips := make([]uint32, n), make([]uint32, n)
				for i, h := range hashes {
					offsets[i], skips[i] = uint32(h%uint64(size)), uint32(h>>32%uint64(size-1))+1
				}
				want := ipvsMaglev(offsets, skips, slices.Repeat([]int{1}, n), size)
				if got := ints(Slots(s, hashes, nil, size)); !slices.Equal(got, want) {
					t.Errorf("%s, %d backends, %d slots: the table is not that of mh", s, n, size)
				}
			}
		}
	}
}

// choice returns which backend a client has.
type choice func(client netip.Addr) int

// ours returns how source-hash chooses among backends with these weights, of which one may be gone.
func ours(weights []int, gone int) choice {
	hashes, shares, left := hashesOf(len(weights)), []uint8{}, []int{}
	all := 0
	for i, w := range weights {
		if i != gone {
			left, shares, all = append(left, i), append(shares, uint8(w)), all+w
		}
	}
	kept := make([]uint64, len(left))
	for i, at := range left {
		kept[i] = hashes[at]
	}
	size := SlotSize(all)
	table := Slots(SourceHash, kept, shares, size)
	return func(client netip.Addr) int {
		return left[table[SourceHash.Slot(netip.AddrPortFrom(client, 0), netip.AddrPort{}, size)]]
	}
}

// without returns weights of which one is 0; gone is -1 for none.
func without(weights []int, gone int) []int {
	weights = slices.Clone(weights)
	if gone >= 0 {
		weights[gone] = 0
	}
	return weights
}

// ipvsSH returns how sh chooses.
func ipvsSH(weights []int, gone int) choice {
	table := ipvsBuckets(without(weights, gone))
	return func(client netip.Addr) int { return table[ipvsBucket(client)] }
}

// ipvsMH returns how mh chooses, but for the hash, which is as even. The weights have no common divisor.
func ipvsMH(weights []int, gone int) choice {
	const size = 4093
	var offsets, skips []uint32
	for _, h := range hashesOf(len(weights)) {
		offsets, skips = append(offsets, uint32(h%size)), append(skips, uint32(h>>32%(size-1))+1)
	}
	table := ipvsMaglev(offsets, skips, without(weights, gone), size)
	return func(client netip.Addr) int {
		return table[SourceHash.Slot(netip.AddrPortFrom(client, 0), netip.AddrPort{}, size)]
	}
}

// One client has one backend, as with IPVS' sh and mh. The hash is another one, and for sh the table too: shares follow
// weights where those of sh do not, and without a backend few clients of others move, as with mh, where sh moves most.
// docs/guide/proxy.md has the figures.
func TestSourceHashBesideIPVS(t *testing.T) {
	const clients = 20_000 // of each kind
	r := rand.New(rand.NewPCG(1, 2))
	var addrs []netip.Addr
	for i := range clients { // one after the other, and scattered ones
		addrs = append(addrs, netip.AddrFrom4([4]byte{10, 7, byte(i >> 8), byte(i)}),
			netip.AddrFrom4([4]byte{byte(1 + r.IntN(200)), byte(r.Uint32()), byte(r.Uint32()), byte(r.Uint32())}))
	}
	for _, weights := range [][]int{{1, 1, 1}, {3, 1}, {5, 3, 2}, slices.Repeat([]int{1}, 10), {100, 99, 98}} {
		all := 0
		for _, w := range weights {
			all += w
		}
		figures := fmt.Sprint(weights)
		for name, choose := range map[string]func([]int, int) choice{"source-hash": ours, "sh": ipvsSH, "mh": ipvsMH} {
			before, after := choose(weights, -1), choose(weights, 1)
			counts, moved, others := make([]int, len(weights)), 0, 0
			for _, a := range addrs {
				has := before(a)
				counts[has]++
				if has != 1 {
					others++
					if after(a) != has {
						moved++
					}
				}
			}
			off := 0.0
			for i, w := range weights {
				want := float64(len(addrs)) * float64(w) / float64(all)
				off = max(off, (float64(counts[i])-want)/want, (want-float64(counts[i]))/want)
			}
			figures += fmt.Sprintf("; %s: a share is off by %.1f %%, %.1f %% of others' clients move", name, 100*off,
				100*float64(moved)/float64(others))
			if name == "source-hash" && (off > 0.1 || moved*10 > others) {
				t.Errorf("%v: a share is off by %.1f %%, %d of %d clients of others move", weights, 100*off, moved, others)
			}
		}
		t.Log(figures)
	}
}

// One address of a Service has one backend, as with IPVS' dh. dh heeds no weights, and without a backend it moves most
// addresses; destination-hash heeds them, and moves few.
func TestDestinationHashBesideIPVS(t *testing.T) {
	const addresses = 20_000
	weights := []uint8{6, 2, 4, 4}
	hashes := hashesOf(len(weights))
	size := SlotSize(16)
	table, left := Slots(DestinationHash, hashes, weights, size),
		Slots(DestinationHash, slices.Delete(slices.Clone(hashes), 1, 2), []uint8{6, 4, 4}, size)
	ipvs, ipvsLeft := ipvsBuckets([]int{1, 1, 1, 1}), ipvsBuckets([]int{1, 0, 1, 1})
	var counts, ipvsCounts [4]int
	moved, ipvsMoved := 0, 0
	for i := range addresses {
		to := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)}), 80)
		slot := DestinationHash.Slot(netip.MustParseAddrPort("192.0.2.1:5000"), to, size)
		for _, client := range []string{"192.0.2.2:5000", "198.51.100.7:1"} {
			if DestinationHash.Slot(netip.MustParseAddrPort(client), to, size) != slot {
				t.Fatalf("%s: another client has another slot", to)
			}
		}
		has, bucket := table[slot], ipvsBucket(to.Addr())
		counts[has]++
		ipvsCounts[ipvs[bucket]]++
		if now := []int{0, 2, 3}[left[slot]]; has != 1 && now != int(has) {
			moved++
		}
		if ipvs[bucket] != 1 && ipvsLeft[bucket] != ipvs[bucket] {
			ipvsMoved++
		}
	}
	for i, n := range counts {
		if want := addresses * int(weights[i]) / 16; n < want*9/10 || n > want*11/10 {
			t.Errorf("backend %d has %d addresses of %d, want about %d", i, n, addresses, want)
		}
	}
	if moved > addresses/20 {
		t.Errorf("without one backend, %d addresses of others move", moved)
	}
	t.Logf("destination-hash: %v, %d of others move; dh: %v, %d", counts, moved, ipvsCounts, ipvsMoved)
}
