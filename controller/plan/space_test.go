package plan

import (
	"encoding/binary"
	"math/big"
	"net/netip"
	"slices"
	"testing"

	"github.com/landfall-lb/landfall/internal/lb"
)

// FuzzSpaces compares ranges, index, counts and search of several pools with one bit per address.
// Addresses are the low byte of 10.0.0.x or of fd00::x, with the highest ones moved to the end of
// the address space, where counting up overflows.
func FuzzSpaces(f *testing.F) {
	f.Add([]byte{0, 3, 9, 1, 7, 12, 2, 200, 255}, []byte{3, 4, 8, 255}, true)
	f.Add([]byte{0, 0, 255, 1, 0, 255}, []byte{}, false)
	f.Add([]byte{0, 5, 5, 0, 6, 6, 0, 5, 6, 1, 6, 9}, []byte{5, 6, 7}, false)
	f.Fuzz(func(t *testing.T, spec, taken []byte, six bool) {
		if len(spec) > 90 {
			return
		}
		address := func(x byte) netip.Addr { return fuzzAddress(x, six) }
		naive := map[string]map[byte]bool{}
		all := map[string]lb.Pool{}
		for ; len(spec) >= 3; spec = spec[3:] {
			name, from, to := string('a'+rune(spec[0]%3)), spec[1], spec[2]
			if to < from || !sameEnd(from, to) {
				continue
			}
			p := all[name]
			p.Name, p.AutoAssign, p.Created = name, true, at(int(name[0]))
			p.Ranges = append(p.Ranges, lb.Range{From: address(from), To: address(to)})
			all[name] = p
			if naive[name] == nil {
				naive[name] = map[byte]bool{}
			}
			for x := int(from); x <= int(to); x++ {
				naive[name][byte(x)] = true
			}
		}
		ps := newPools(all, never{})
		isTaken := map[byte]bool{}
		for _, x := range taken {
			if !isTaken[x] {
				isTaken[x] = true
				ps.assigned(address(x), 1)
				ps.occupied(address(x), true)
			}
		}
		for x := range 256 {
			checkContaining(t, ps, naive, byte(x), address(byte(x)))
		}
		for name, has := range naive {
			checkPool(t, ps.byName[name], has, isTaken, six)
		}
		checkOverlaps(t, ps, naive)
	})
}

const fuzzEnd = 240 // from here on, addresses are the last ones there are

func sameEnd(from, to byte) bool { return (from < fuzzEnd) == (to < fuzzEnd) }

func fuzzAddress(x byte, six bool) netip.Addr {
	if six {
		b := netip.MustParseAddr("fd00::").As16()
		if x >= fuzzEnd {
			b = netip.MustParseAddr("ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff").As16()
		}
		b[15] = x
		return netip.AddrFrom16(b)
	}
	base := uint32(10 << 24)
	if x >= fuzzEnd {
		base = 0xffffff00
	}
	var b [4]byte
	binary.BigEndian.PutUint32(b[:], base|uint32(x))
	return netip.AddrFrom4(b)
}

func checkContaining(t *testing.T, ps *pools, naive map[string]map[byte]bool, x byte, addr netip.Addr) {
	t.Helper()
	want, oldest := 0, ""
	for _, name := range []string{"c", "b", "a"} {
		if naive[name][x] {
			want++
			oldest = name
		}
	}
	got := 0
	ps.containing(addr, func(p *pool) bool {
		got++
		if !naive[p.Name][x] {
			t.Errorf("pool %s does not contain %s", p.Name, addr)
		}
		return true
	})
	if got != want {
		t.Errorf("%s is in %d pools, want %d", addr, got, want)
	}
	if p := ps.of(addr); (p == nil) != (oldest == "") || p != nil && p.Name != oldest {
		t.Errorf("%s is of pool %v, want %q", addr, p, oldest)
	}
}

func checkPool(t *testing.T, p *pool, has, taken map[byte]bool, six bool) {
	t.Helper()
	s := p.spaces[lb.FamilyOf(fuzzAddress(0, six))]
	assigned := 0
	for x := range has {
		if taken[x] {
			assigned++
		}
	}
	if s.usage.Total.Cmp(big.NewInt(int64(len(has)))) != 0 || s.usage.Assigned != assigned {
		t.Errorf("pool %s: %d of %d, want %d of %d", p.Name, s.usage.Assigned, s.usage.Total, assigned, len(has))
	}
	held := map[netip.Addr]bool{}
	for x := range taken {
		held[fuzzAddress(x, six)] = true
	}
	left := 0
	for x := range has {
		if !taken[x] {
			left++
		}
	}
	for x := range 256 {
		if !has[byte(x)] || taken[byte(x)] {
			continue
		}
		checkFollowing(t, s, p.Name, held, min(left, 3))
		left--
		got, ok := s.free(func(addr netip.Addr) bool { return held[addr] })
		if want := fuzzAddress(byte(x), six); !ok || got != want {
			t.Fatalf("pool %s: free address %v (%v), want %v", p.Name, got, ok, want)
		}
		held[got] = true
	}
	if got, ok := s.free(func(addr netip.Addr) bool { return held[addr] }); ok {
		t.Errorf("pool %s: free address %v, want none", p.Name, got)
	}
}

// checkFollowing compares what a space hands out next with the lowest n addresses that are not held.
func checkFollowing(t *testing.T, s *space, pool string, held map[netip.Addr]bool, n int) {
	t.Helper()
	var got, want []netip.Addr
	for _, r := range s.following(3, func(addr netip.Addr) bool { return held[addr] }) {
		for addr := r.From; r.Contains(addr); addr = addr.Next() {
			got = append(got, addr)
		}
	}
	for _, r := range s.open {
		for addr := r.From; r.Contains(addr) && len(want) < n; addr = addr.Next() {
			if !held[addr] {
				want = append(want, addr)
			}
		}
	}
	if !slices.Equal(got, want) {
		t.Fatalf("pool %s: next are %v, want %v", pool, got, want)
	}
}

func checkOverlaps(t *testing.T, ps *pools, naive map[string]map[byte]bool) {
	t.Helper()
	share := func(a, b string) bool {
		for x := range naive[a] {
			if naive[b][x] {
				return true
			}
		}
		return false
	}
	for name, want := range map[string]bool{"a": false, "b": share("b", "a"), "c": share("c", "a") || share("c", "b")} {
		if p := ps.byName[name]; p != nil && (p.refusal != nil) != want {
			t.Errorf("pool %s overlaps an older one: %v, want %v", name, p.refusal != nil, want)
		}
	}
}

func TestMergeLeavesItsArgumentAlone(t *testing.T) {
	r := func(s string) lb.Range {
		parsed, err := lb.ParseRange(s)
		if err != nil {
			t.Fatal(err)
		}
		return parsed
	}
	given := []lb.Range{r("10.0.0.5-10.0.0.9"), r("10.0.0.1-10.0.0.6")}
	if got := merge(given); len(got) != 1 || got[0] != r("10.0.0.1-10.0.0.9") {
		t.Errorf("merged: %v", got)
	}
	if given[0] != r("10.0.0.5-10.0.0.9") || given[1] != r("10.0.0.1-10.0.0.6") {
		t.Errorf("the argument has become %v", given)
	}
}

// FuzzOpen compares what is left of ranges after exclusions, and how many of that are buggy, with
// one bit per address.
func FuzzOpen(f *testing.F) {
	f.Add([]byte{0, 255}, []byte{5, 9, 7, 12, 255, 255}, true)
	f.Add([]byte{240, 250, 3, 3}, []byte{0, 255}, false)
	f.Add([]byte{10, 20, 15, 30}, []byte{10, 10, 30, 30, 20, 21}, true)
	f.Fuzz(func(t *testing.T, given, cut []byte, avoidBuggy bool) {
		read := func(spec []byte) (ranges []lb.Range, naive map[byte]bool) {
			naive = map[byte]bool{}
			for ; len(spec) >= 2; spec = spec[2:] {
				if spec[1] < spec[0] || !sameEnd(spec[0], spec[1]) {
					continue
				}
				ranges = append(ranges, lb.Range{From: fuzzAddress(spec[0], false), To: fuzzAddress(spec[1], false)})
				for x := int(spec[0]); x <= int(spec[1]); x++ {
					naive[byte(x)] = true
				}
			}
			return ranges, naive
		}
		ranges, has := read(given)
		excluded, without := read(cut)
		if len(ranges) == 0 || len(ranges) > 40 || len(excluded) > 40 {
			return
		}
		s := newSpace(ranges, excluded, avoidBuggy)
		total := int64(0)
		for x := range 256 {
			addr := fuzzAddress(byte(x), false)
			want := has[byte(x)] && !without[byte(x)] && (!avoidBuggy || x != 0 && x != 255)
			if want {
				total++
			}
			if s.offers(addr) != want {
				t.Errorf("%s is offered: %v, want %v", addr, !want, want)
			}
		}
		if s.usage.Total.Int64() != total {
			t.Errorf("%s addresses, want %d", s.usage.Total, total)
		}
	})
}
