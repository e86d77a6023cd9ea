package counters

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/nft"
	"github.com/landfall-lb/landfall/proxy/plan"
)

var errRefused = errors.New("as the test wants")

// fake is a kernel in memory.
type fake struct {
	elements map[place]*counts
	// fail makes the next call of this name fail.
	fail  string
	calls int
}

// counts are what the elements of a place have counted.
type counts [kinds]nft.Count

func (f *fake) failing(call string) error {
	f.calls++
	if f.fail != call {
		return nil
	}
	f.fail = ""
	return errRefused
}

func (f *fake) prepare(_ lb.Family, want map[place]bool) (added [kinds][]place, err error) {
	if err := f.failing("prepare"); err != nil {
		return added, err
	}
	maps.DeleteFunc(f.elements, func(p place, _ *counts) bool { return !want[p] })
	for p := range want {
		if f.elements[p] == nil {
			f.elements[p] = &counts{}
			for k := range kinds {
				added[k] = append(added[k], p)
			}
		}
	}
	return added, nil
}

func (f *fake) edit(_ lb.Family, e *edit) error {
	if err := f.failing("edit"); err != nil {
		return err
	}
	for _, p := range e.remove[attempts] {
		if f.elements[p] == nil {
			return unix.ENOENT
		}
		delete(f.elements, p)
	}
	for _, p := range e.add[attempts] {
		if f.elements[p] != nil {
			return unix.EEXIST
		}
		f.elements[p] = &counts{}
	}
	return nil
}

func (f *fake) read(_ lb.Family, places []place, each func(place, kind, nft.Count)) error {
	if err := f.failing("read"); err != nil {
		return err
	}
	for k := range kinds {
		for _, p := range places {
			if f.elements[p] == nil {
				return unix.ENOENT
			}
			each(p, k, f.elements[p][k])
		}
	}
	return nil
}

func (f *fake) readAll(family lb.Family, places []place, each func(place, kind, nft.Count)) error {
	return f.read(family, places, each)
}

// connect is a connection to the VIP of the i-th Service; one that is refused has no packets behind.
func (f *fake) connect(i int, refused bool) {
	c := f.elements[vip(i)]
	if c == nil {
		return
	}
	c[attempts].Packets++
	if !refused {
		c[connections].Packets++
		c[received].Packets, c[received].Bytes = c[received].Packets+2, c[received].Bytes+200
		c[sent].Packets, c[sent].Bytes = c[sent].Packets+3, c[sent].Bytes+3000
	}
}

func vip(i int) place {
	s := exampleService(i, plan.ToCluster)
	return place{lb.IPv4, s.Ports[0].Frontends[0].Addr, unix.IPPROTO_UDP, 80}
}

func fakeActor(f *fake, scope Scope) *Actor {
	return newActor(Deps{Log: slog.New(slog.DiscardHandler), Families: []lb.Family{lb.IPv4}, Scope: scope,
		Now: func() time.Time { return time.Unix(0, 0) }}, f)
}

func (a *Actor) settle(t *testing.T) {
	t.Helper()
	for range 5 {
		if _, err := a.step(t.Context()); err == nil {
			return
		}
	}
	t.Fatal("it never comes to rest")
}

// What is counted only grows, whatever happens to a Service's rules, and whichever call fails.
func TestCountersOnlyGrow(t *testing.T) {
	for _, call := range []string{"", "prepare", "edit", "read"} {
		for when := range 5 {
			t.Run(fmt.Sprint(call, " ", when), func(t *testing.T) {
				f := &fake{elements: map[place]*counts{}}
				a := fakeActor(f, External)
				key := exampleService(1, plan.ToCluster).Key
				var last Counts
				for i, action := range []plan.Action{plan.ToCluster, plan.Reject, plan.Drop, plan.ToLocal, plan.ToCluster} {
					all := map[lb.Key]plan.Service{key: exampleService(1, action)}
					if i == 0 {
						a.Begin(all)
					} else {
						a.Update(all)
					}
					if i == when {
						f.fail = call
					}
					a.settle(t)
					f.connect(1, action == plan.Reject || action == plan.Drop)
					if i == 3 {
						f.elements = map[place]*counts{} // lost
					}
					got, ok := a.Of(key)
					if !ok || got.Connections < last.Connections || got.BytesSent < last.BytesSent {
						t.Fatalf("%s: counted %+v after %+v", action, got, last)
					}
					for reason, n := range last.Refused {
						if got.Refused[reason] < n {
							t.Fatalf("%s: counted %+v after %+v", action, got, last)
						}
					}
					last = got
				}
				a.settle(t)
				want := Counts{Connections: 2, PacketsReceived: 4, BytesReceived: 400, PacketsSent: 6, BytesSent: 6000,
					Refused: map[lb.Reason]uint64{lb.ReasonNoBackends: 1, lb.ReasonNoLocalBackends: 1}}
				if got, _ := a.Of(key); got.Connections != 2 || got.BytesSent != want.BytesSent ||
					got.BytesReceived != want.BytesReceived || !maps.Equal(got.Refused, want.Refused) {
					t.Errorf("counted %+v, want %+v", got, want)
				}
			})
		}
	}
}

// A frontend that another Service takes over counts for that one from then on, whichever of the two is
// told first, and both at once.
func TestAPlaceMoves(t *testing.T) {
	one, two := exampleService(1, plan.ToCluster), exampleService(2, plan.ToCluster)
	left, took := one, two
	left.Ports = nil
	took.Ports = append(append([]plan.Port{}, two.Ports...), one.Ports...)
	for name, updates := range map[string][]map[lb.Key]plan.Service{
		"left first": {{one.Key: left}, {two.Key: took}},
		"took first": {{two.Key: took}, {one.Key: left}},
		"both":       {{one.Key: left, two.Key: took}},
	} {
		t.Run(name, func(t *testing.T) {
			f := &fake{elements: map[place]*counts{}}
			a := fakeActor(f, All)
			a.Begin(map[lb.Key]plan.Service{one.Key: one, two.Key: two})
			a.settle(t)
			f.connect(1, false)
			for _, u := range updates {
				a.Update(u)
				a.settle(t)
			}
			f.connect(1, false)
			if _, ok := a.Of(one.Key); ok {
				t.Error("a Service that is gone is counted")
			}
			if got, _ := a.Of(two.Key); got.Connections != 1 {
				t.Errorf("%d connections, want 1", got.Connections)
			}
			if len(f.elements) != 6 || len(a.places) != 6 {
				t.Errorf("%d elements, %d places", len(f.elements), len(a.places))
			}
		})
	}
}

// One Service with many ports costs no more than its share, and says so.
func TestPlacesAreBounded(t *testing.T) {
	s := exampleService(1, plan.ToCluster)
	port := s.Ports[0]
	s.Ports = nil
	for i := range 3000 {
		p := port
		p.Frontends = []plan.Frontend{{Kind: plan.LoadBalancer, Addr: vip(1).addr, Port: uint16(i + 1)},
			{Kind: plan.ClusterIP, Addr: vip(1).addr, Port: uint16(i + 1)}}
		s.Ports = append(s.Ports, p)
	}
	f := &fake{elements: map[place]*counts{}}
	a := fakeActor(f, External)
	a.Begin(map[lb.Key]plan.Service{s.Key: s})
	a.settle(t)
	got, _ := a.Of(s.Key)
	if len(f.elements) != MaxPlaces || got.Uncounted != 3000-MaxPlaces {
		t.Errorf("%d elements, %d frontends left out", len(f.elements), got.Uncounted)
	}
}

// Contract clause 11: one namespace with many Services leaves others room, and gives it back.
func TestContract11ANamespaceLeavesOthersCounters(t *testing.T) {
	all := map[lb.Key]plan.Service{}
	for i := range MaxTotal/MaxPlaces + 1 {
		s := exampleService(1, plan.ToCluster)
		s.Key = lb.Key{Namespace: "one", Name: fmt.Sprint(i)}
		port := s.Ports[0]
		s.Ports = nil
		for j := range MaxPlaces {
			p := port
			p.Frontends = []plan.Frontend{{Kind: plan.LoadBalancer, Addr: vip(i).addr, Port: uint16(j + 1)}}
			s.Ports = append(s.Ports, p)
		}
		all[s.Key] = s
	}
	f := &fake{elements: map[place]*counts{}}
	a := fakeActor(f, External)
	a.Begin(all)
	a.settle(t)
	if len(a.places) != MaxTotal/2 {
		t.Errorf("%d places of one namespace", len(a.places))
	}
	other := exampleService(200, plan.ToCluster)
	other.Key.Namespace = "other"
	a.Update(map[lb.Key]plan.Service{other.Key: other})
	a.settle(t)
	if got, _ := a.Of(other.Key); got.Uncounted > 0 {
		t.Errorf("%d frontends of another namespace are left out", got.Uncounted)
	}
	for key := range all {
		all[key] = plan.Service{Key: key}
	}
	all[other.Key] = plan.Service{Key: other.Key}
	a.Update(all)
	a.settle(t)
	if len(a.places) > 0 || len(a.held) > 0 {
		t.Errorf("%d places stay, and %v are held", len(a.places), a.held)
	}
}

// A second scrape within the rest asks the kernel for nothing.
func TestScrapesShareWhatWasRead(t *testing.T) {
	f := &fake{elements: map[place]*counts{}}
	now := time.Unix(0, 0)
	a := fakeActor(f, External)
	a.deps.Now = func() time.Time { return now }
	s := exampleService(1, plan.ToCluster)
	a.Begin(map[lb.Key]plan.Service{s.Key: s})
	a.settle(t)
	for i, step := range []struct {
		wait time.Duration
		want uint64
	}{{0, 1}, {rest - 1, 1}, {1, 3}} {
		f.connect(1, false)
		now = now.Add(step.wait)
		if all, err := a.All(); err != nil || all[s.Key].Connections != step.want {
			t.Errorf("%d: counted %+v, %v, want %d connections", i, all, err, step.want)
		}
	}
}

// FuzzKeys has keys read back: what is taken for a place's is what that place's would be.
func FuzzKeys(f *testing.F) {
	for _, p := range []place{vip(1), {family: lb.IPv4, protocol: unix.IPPROTO_TCP, port: 30000}} {
		f.Add(p.appendKey(nil), !p.addr.IsValid())
	}
	f.Fuzz(func(t *testing.T, key []byte, nodePort bool) {
		p, ok := placeOf(lb.IPv4, key, nodePort)
		if !ok {
			return
		}
		if again, ok := placeOf(lb.IPv4, p.appendKey(nil), nodePort); !ok || again != p {
			t.Errorf("%x is read as %+v, and that as %+v", key, p, again)
		}
	})
}
