package members

import (
	"bytes"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/speaker/plan"
)

// keysOf returns a key for each letter.
func keysOf(letters string) (keys [][]byte) {
	for _, letter := range []byte(letters) {
		keys = append(keys, bytes.Repeat([]byte{letter}, 32))
	}
	return keys
}

func lettersOf(keys [][]byte) string {
	var letters []byte
	for _, key := range keys {
		letters = append(letters, key[0])
	}
	return string(letters)
}

// TestRotation follows one speaker through changes of its file. Times are in holds.
func TestRotation(t *testing.T) {
	type moment struct {
		at   float64
		file string
		want string // the key that encrypts, and the others by name
	}
	for name, story := range map[string][]moment{
		"in three steps": {
			{0, "a", "a"}, {1, "ab", "ab"}, {4, "ba", "ab"}, {4.9, "ba", "ab"}, {5, "ba", "ba"}, {9, "b", "ba"},
			{10.9, "b", "ba"}, {11, "b", "b"}, {20, "b", "b"},
		},
		"in one step": {
			{0, "a", "a"}, {1, "b", "ab"}, {1.9, "b", "ab"}, {2, "b", "ba"}, {2.9, "b", "ba"}, {3, "b", "b"},
		},
		"the next change begins anew": {
			{0, "a", "a"}, {1, "b", "ab"}, {1.5, "c", "abc"}, {2.4, "c", "abc"}, {2.5, "c", "cab"}, {3.4, "c", "cab"},
			{3.5, "c", "c"},
		},
		"a change while the former key is accepted": {
			{0, "a", "a"}, {1, "b", "ab"}, {2, "b", "ba"}, {2.5, "c", "bac"}, {3.4, "c", "bac"}, {3.5, "c", "cab"},
			{4.5, "c", "c"},
		},
		"back before it encrypts": {
			{0, "a", "a"}, {1, "b", "ab"}, {1.5, "a", "ab"}, {2.5, "a", "ab"}, {3.5, "a", "a"},
		},
		"back after it encrypts": {
			{0, "a", "a"}, {1, "b", "ab"}, {2, "b", "ba"}, {2.5, "a", "ba"}, {3.4, "a", "ba"}, {3.5, "a", "ab"}, {4.5, "a", "a"},
		},
		"looked at late": {{0, "a", "a"}, {1, "b", "ab"}, {9, "b", "b"}},
	} {
		t.Run(name, func(t *testing.T) {
			var r Rotation
			for _, m := range story {
				r = r.Step(keysOf(m.file), time.Unix(1e9, 0).Add(time.Duration(m.at*float64(KeyHold))))
				got := []byte(lettersOf(r.Keys()))
				slices.Sort(got[1:])
				if string(got) != m.want {
					t.Errorf("at %v, with %q: %q, want %q", m.at, m.file, got, m.want)
				}
			}
		})
	}
}

// TestRotationIsBounded changes the file again and again: the key that encrypts stays.
func TestRotationIsBounded(t *testing.T) {
	now := time.Now()
	r := Rotation{}.Step(keysOf("a"), now)
	for letter := byte('b'); letter <= 'z'; letter++ {
		now = now.Add(KeyHold - 1)
		r = r.Step(keysOf(string(letter)), now)
	}
	if got, want := lettersOf(r.Keys()), "azyxwvuts"; got != want {
		t.Errorf("keys %q, want %q", got, want)
	}
}

// TestRotationHasNoGap has speakers read each change at another time: always, each understands all
// others.
func TestRotationHasNoGap(t *testing.T) {
	const speakers, changes, tick = 4, 6, KeyHold / 60
	for name, c := range map[string]struct{ apart, lag time.Duration }{
		"changes far apart, read within a hold":         {3 * KeyHold, KeyHold},
		"changes that follow one another, read in half": {KeyHold / 2, KeyHold / 2},
	} {
		t.Run(name, func(t *testing.T) {
			for seed := range uint64(40) {
				random := rand.New(rand.NewPCG(seed, 0))
				var at [changes]time.Duration              // when the file changes
				var reads [changes][speakers]time.Duration // and when each speaker has it
				files := [changes][][]byte{keysOf("a")}
				for i := 1; i < changes; i++ {
					at[i] = at[i-1] + c.apart + time.Duration(random.Int64N(int64(KeyHold)))
					files[i] = keysOf([]string{"a", "b", "c", "ab", "ba", "cb"}[random.IntN(6)])
					for s := range speakers {
						reads[i][s] = at[i] + time.Duration(random.Int64N(int64(c.lag-tick)))
					}
				}
				var rotations [speakers]Rotation
				for now := time.Duration(0); now < at[changes-1]+4*KeyHold; now += tick {
					for s := range speakers {
						read := 0
						for read+1 < changes && reads[read+1][s] <= now {
							read++
						}
						rotations[s] = rotations[s].Step(files[read], time.Unix(0, 0).Add(now))
					}
					for _, from := range rotations {
						for _, to := range rotations {
							if says, hears := lettersOf(from.Keys()), lettersOf(to.Keys()); !strings.Contains(hears, says[:1]) {
								t.Fatalf("seed %d at %v: one has %q, another %q, with changes at %v", seed, now, says, hears, at)
							}
						}
					}
				}
			}
		})
	}
}

// TestOneStepIsNoGap replaces the only key in one step. Members read that within a hold, one after
// the other, and gossip goes on.
func TestOneStepIsNoGap(t *testing.T) {
	r := newRig(t, "a", "b", "c")
	var unread atomic.Int64 // messages for which a member had no key
	log := slog.New(slog.NewTextHandler(writerFunc(func(b []byte) {
		if strings.Contains(strings.ToLower(string(b)), "decrypt") {
			unread.Add(1)
		}
	}), nil))
	r.cluster(func(o *setup) { o.Keys, o.Log = keysOf("x"), log })
	reads := map[string]time.Duration{"a": 0, "b": KeyHold / 2, "c": KeyHold - 1}
	rotations, claims := map[string]Rotation{}, byte(0)
	for _, now := range []time.Duration{
		-1, 0, KeyHold / 2, KeyHold - 1, KeyHold, 3 * KeyHold / 2, 2*KeyHold - 1, 2 * KeyHold, 3 * KeyHold,
	} {
		if n := unread.Load(); n > 0 && now <= 2*KeyHold { // later, one from before a key was dropped may still come
			t.Fatalf("%d messages could not be read before %v", n, now)
		}
		for _, name := range r.names() {
			file := keysOf("x")
			if now >= reads[name] {
				file = keysOf("y")
			}
			rotations[name] = rotations[name].Step(file, time.Unix(1e9, 0).Add(now))
			if err := r.members[name].SetKeys(rotations[name].Keys()); err != nil {
				t.Fatal(err)
			}
			claims++
			vip := netip.AddrFrom4([4]byte{192, 0, 2, claims})
			r.members[name].Update(map[netip.Addr]*plan.Claim{vip: {}})
			for other, m := range r.members {
				r.eventually(fmt.Sprintf("%s hears of %s from %s at %v", other, vip, name, now), func() bool {
					_, heard := m.Claims(vip, m.opts.Liveness.Sight())[name]
					return heard || other == name
				})
			}
		}
		for name, m := range r.members {
			r.eventually(fmt.Sprintf("%s sees all at %v", name, now), func() bool { return slices.Equal(m.Live(), r.names()) })
		}
	}
	for name, m := range r.members {
		if got := lettersOf(m.keys.GetKeys()); got != "y" {
			t.Errorf("%s has the keys %q", name, got)
		}
	}
}
