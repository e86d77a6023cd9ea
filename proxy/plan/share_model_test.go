package plan

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/landfall-lb/landfall/internal/lb"
)

// plainShares are Shares of one namespace as they are described, without a thought of what they cost.
type plainShares struct {
	limit, growth, used int
	whole               bool
	held                map[lb.Key]int
	waiting             map[lb.Key]wish
}

func (s *plainShares) set(key lb.Key, age Age, needs int) (fits bool, next *lb.Key) {
	held, used := s.held[key], s.used
	_, waited := s.waiting[key]
	delete(s.waiting, key)
	if needs > held {
		if s.whole && needs > s.limit {
			s.hold(key, 0)
		}
		wanted, idle := wish{age, needs}, s.idle()
		if s.lacks(key, wanted, idle) > 0 {
			s.waiting[key] = wanted
			return false, s.next()
		}
		for n := s.lacks(key, wanted, nil); n > 0; idle = idle[1:] {
			taken := min(n, s.held[idle[0].key])
			s.hold(idle[0].key, s.held[idle[0].key]-taken)
			n -= taken
		}
	}
	s.hold(key, needs)
	if waited || s.used < used {
		next = s.next()
	}
	return true, next
}

func (s *plainShares) next() *lb.Key {
	var fit []waiter
	for key, w := range s.waiting {
		if s.lacks(key, w, s.idle()) <= 0 {
			fit = append(fit, waiter{w.Age, key})
		}
	}
	if len(fit) == 0 {
		return nil
	}
	oldest := slices.MinFunc(fit, waiter.compare)
	return &oldest.key
}

func (s *plainShares) lacks(key lb.Key, w wish, idle []waiter) int {
	lacking := w.needs - s.held[key] - (s.limit - s.used)
	if s.held[key] > 0 {
		lacking -= s.growth
	}
	for _, other := range idle {
		if (waiter{w.Age, key}).compare(other) < 0 {
			lacking -= s.held[other.key]
		}
	}
	return lacking
}

func (s *plainShares) idle() (idle []waiter) {
	for key, w := range s.waiting {
		if s.whole && s.held[key] > 0 {
			idle = append(idle, waiter{w.Age, key})
		}
	}
	slices.SortFunc(idle, func(a, b waiter) int { return b.compare(a) })
	return idle
}

func (s *plainShares) hold(key lb.Key, n int) {
	s.used += n - s.held[key]
	if s.held[key] = n; n == 0 {
		delete(s.held, key)
	}
}

// Shares decide as they are described, whatever comes in which order, and whether or not those who are next are set
// again.
func TestSharesDecideAsDescribed(t *testing.T) {
	const limit = 100
	for seed := range uint64(200) {
		random := rand.New(rand.NewPCG(seed, 1))
		whole := seed%2 == 0
		plain := &plainShares{limit: limit, whole: whole, held: map[lb.Key]int{}, waiting: map[lb.Key]wish{}}
		shares := NewShares(limit)
		if whole {
			shares, plain.growth = NewWholeShares(limit, 0), limit/4
		}
		asked := map[lb.Key]int{}
		for range 300 {
			n := random.IntN(20)
			key, age := of("shop", fmt.Sprint(n)), Age{Created: int64(n % 7)}
			switch random.IntN(4) {
			case 0:
				asked[key] = 0
			case 1: // as before
			default:
				asked[key] = random.IntN([]int{15, 40, 130}[random.IntN(3)])
			}
			fits, next := plain.set(key, age, asked[key])
			got := shares.Set(key, age, asked[key])
			gotNext := shares.Next()
			if (got == Room) != fits || (gotNext == nil) != (next == nil) || next != nil && *gotNext != *next {
				t.Fatalf("seed %d, whole: %v: %s needs %d: %q, next %v; want %v, %v", seed, whole, key, asked[key], got, gotNext,
					fits, next)
			}
		}
	}
}
