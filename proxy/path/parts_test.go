package path

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/links"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// crowd returns so many targets of one tenant's Services, from one on.
func crowd(from, n int) map[lb.Key][]plan.Target {
	all := map[lb.Key][]plan.Target{}
	for i := from; i < from+n; i++ {
		of := lb.Key{Namespace: "crowd", Name: fmt.Sprint(from, " ", i/4096)}
		addr := netip.AddrFrom4([4]byte{10, 128 | byte(i>>16), byte(i >> 8), byte(i)})
		all[of] = append(all[of], plan.Target{Addr: addr, Pod: true})
	}
	return all
}

// Contract clause 11: whatever has everything of a tenant looked up, a lost route of another one's endpoint that the
// kernel tells of in the meantime is noticed after a part of that.
func TestContract11NewsComesBetweenThePartsOfALook(t *testing.T) {
	const many = 20_000
	for name, test := range map[string]struct {
		begin func(*rig)
		looks int // at each target
	}{
		"each minute":             {func(*rig) { time.Sleep(resync) }, 1},
		"after lost messages":     {func(r *rig) { r.messages <- []links.RouteChange{{All: true}} }, 2},
		"a link that most are at": {func(r *rig) { r.messages <- []links.RouteChange{{Link: 2}} }, 7},
		"new endpoints":           {func(r *rig) { r.Update(crowd(many, many)) }, 1},
	} {
		t.Run(name, func(t *testing.T) {
			run(t, func(r *rig) {
				all := crowd(0, many)
				r.set(func() {
					r.otherwise = links.Way{Kind: lb.RouteOwn, Link: 2}
					r.ways["10.1.0.2"] = own
				})
				all[key] = targets("10.1.0.2")
				lostAt, toldAt := 0, 0
				r.deps.Changed = func() {
					r.set(func() {
						if lostAt == 0 || toldAt != 0 {
							return
						}
						if news, _ := r.Take(); news.Lost[targets("10.1.0.2")[0]] != nil {
							toldAt = len(r.looks)
						}
					})
				}
				r.Begin(all)
				r.wait()
				time.Sleep(every)
				r.expect("at first")
				r.set(func() {
					r.looks = nil
					r.looking = func() {
						if len(r.looks) == many/4 {
							lostAt, r.ways["10.1.0.2"] = len(r.looks), none
							r.messages <- []links.RouteChange{{Prefix: netip.MustParsePrefix("10.1.0.0/24")}}
						}
					}
				})
				test.begin(r)
				r.wait()
				time.Sleep(every)
				r.guard.Lock()
				defer r.guard.Unlock()
				if between := toldAt - lostAt; lostAt == 0 || between <= 0 || between > 5*part {
					t.Errorf("lost after %d looks, and told after %d", lostAt, toldAt)
				}
				seen := map[string]int{}
				for _, addr := range r.looks {
					seen[addr]++
				}
				if len(seen) < many || len(r.looks) > (test.looks+1)*many {
					t.Errorf("%d looks at %d targets", len(r.looks), len(seen))
				}
			})
		})
	}
}

// Contract clause 11: endpoints that keep coming at the start do not put off the first news of those that there are.
func TestContract11NewEndpointsDoNotPutOffTheStart(t *testing.T) {
	run(t, func(r *rig) {
		const many, batches = 10 * part, 50
		batch, first := 0, 0
		r.otherwise = own
		r.looking = func() {
			if len(r.looks)%part == 0 && batch < batches {
				batch++
				r.Update(crowd(many+batch*2*part, 2*part))
			}
		}
		r.deps.Changed = func() {
			if first == 0 {
				first = len(r.looks)
			}
		}
		r.Begin(crowd(0, many))
		r.wait()
		if r.expect("all are reached"); first == 0 || first > 3*many {
			t.Errorf("the first news of %d endpoints came after %d looks", many, first)
		}
		if len(r.entries) != many+batches*2*part {
			t.Errorf("%d targets are known", len(r.entries))
		}
	})
}

// Messages that are lost during a look at all have everything be looked up once more, which costs less than a look at
// all each.
func TestALookAtAllBeginsAnew(t *testing.T) {
	run(t, func(r *rig) {
		const many = 10 * part
		all := crowd(0, many)
		r.otherwise = own
		r.Begin(all)
		r.wait()
		time.Sleep(every)
		lost := 0
		r.set(func() {
			r.looks = nil
			r.looking = func() {
				if n := len(r.looks); n >= many/2 && n%part == 0 && lost < 20 {
					if lost++; lost == 20 {
						r.otherwise = none
					}
					r.messages <- []links.RouteChange{{All: true}}
				}
			}
		})
		time.Sleep(resync)
		time.Sleep(every)
		r.wait()
		n := 0
		for _, why := range r.lost {
			if why != nil {
				n++
			}
		}
		if n != many {
			t.Errorf("%d of %d are lost", n, many)
		}
		if left := len(r.round) + len(r.waiting) + len(r.settling); left > 0 || len(r.looks) > 12*many {
			t.Errorf("%d are left after %d looks", left, len(r.looks))
		}
	})
}
