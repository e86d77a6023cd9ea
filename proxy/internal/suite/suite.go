// Package suite is what every dialect has to pass: which Services are written together, which are
// to blame, and what is said of them, over a kernel that refuses, hides and loses what the test
// wants.
package suite

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/dialect"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// Kernel is the kernel of one family, in memory.
type Kernel interface {
	// Rules returns the rules of a new process over this kernel.
	Rules(lb.Family, *dialect.Ledger) dialect.Rules
	// Refuse makes so many writes fail with ErrRefused, and change nothing: those that add something
	// at the node port, or any when it is 0.
	Refuse(port uint16, times int)
	// Hide makes reading fail with ErrRefused, or ends that.
	Hide(bool)
	// Lose empties the kernel behind everybody's back.
	Lose()
	// Writes returns how many writes were attempted.
	Writes() int
	// Holds reports whether there is something at the node port.
	Holds(port uint16) bool
}

// ErrRefused is what kernels fail with.
var ErrRefused = errors.New("as the test wants")

// ever is how often a write is refused that is never taken.
const ever = 1 << 30

// bench is a pair of kernels with one process over them.
type bench struct {
	t *testing.T
	*dialect.Actor
	mu       sync.Mutex // of what is in the kernels
	kernels  map[lb.Family]Kernel
	outcomes map[lb.Key]plan.Outcome
	all      bool
	rounds   []dialect.Sync
}

// Actor is the actor of a dialect, for tests that run its rounds themselves.
type Actor struct {
	*dialect.Actor
	Begun bool
	Tried bool // every Service has been, as the last Outcomes said
}

// Set says what is wanted: all that there is the first time, changes after it.
func (a *Actor) Set(services map[lb.Key]plan.Service) {
	if a.Begun {
		a.Update(services)
		return
	}
	a.Begun = true
	a.Begin(services)
}

// Outcomes returns what the actor has found out since the last call.
func (a *Actor) Outcomes() (outcomes map[lb.Key]plan.Outcome) {
	outcomes, a.Tried = a.Actor.Outcomes()
	return outcomes
}

const many = 12

// config serves node ports at one address of each family.
var config = plan.Config{MasqueradeBit: 14, NodePortAddresses: map[lb.Family][]netip.Addr{
	lb.IPv4: {netip.MustParseAddr("172.31.0.1")}, lb.IPv6: {netip.MustParseAddr("fd31::1")},
}}

func key(i int) lb.Key { return lb.Key{Namespace: "test", Name: fmt.Sprintf("service-%02d", i)} }

func port(i int) uint16 { return uint16(30000 + i) }

// service returns a Service of both families, with a node port.
func service(i, backends int) plan.Service {
	svc := lb.Service{
		Key: key(i), Type: lb.NodePort, ExternalPolicy: lb.Cluster, InternalPolicy: lb.Cluster,
		ClusterIPs: []netip.Addr{netip.AddrFrom4([4]byte{10, 96, 1, byte(i)}),
			netip.MustParseAddr(fmt.Sprintf("fd00:96::%x", i+1))},
		Ports: []lb.ServicePort{{Protocol: lb.TCP, Port: 80, NodePort: port(i)}},
	}
	var endpoints []lb.Slice
	for n, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		at := []netip.Addr{netip.AddrFrom4([4]byte{192, 168, byte(i), 0}),
			netip.MustParseAddr(fmt.Sprintf("fd00:10::%x:0", i+1))}[n]
		s := lb.Slice{Service: svc.Key, Family: family, Ports: []lb.SlicePort{{Protocol: lb.TCP, Port: 8080}}}
		for range backends {
			at = at.Next()
			s.Endpoints = append(s.Endpoints, lb.Endpoint{Addr: at, Ready: true, Serving: true})
		}
		endpoints = append(endpoints, s)
	}
	p := plan.New(svc, endpoints, plan.Node{Name: "here"})
	p.Sole = []netip.Addr{netip.AddrFrom4([4]byte{203, 0, 113, byte(i / 2)}), // shared by two Services
		netip.MustParseAddr(fmt.Sprintf("2001:db8::%x", i/2))}
	return p
}

func services() map[lb.Key]plan.Service {
	all := map[lb.Key]plan.Service{}
	for i := range many {
		all[key(i)] = service(i, 2)
	}
	return all
}

// process starts a process over the kernels; without is a family that it cannot serve.
func (b *bench) process(without lb.Family, verify time.Duration) {
	b.outcomes, b.all, b.rounds = map[lb.Key]plan.Outcome{}, false, nil
	b.Actor = dialect.New(dialect.Deps{
		Log: slog.New(slog.DiscardHandler), Changed: func() {}, Verify: verify,
		Rules: func(family lb.Family, ledger *dialect.Ledger) dialect.Rules {
			if family == without {
				return nil
			}
			return lockedRules{b.kernels[family].Rules(family, ledger), &b.mu}
		},
		Observe: func(s dialect.Sync) { b.rounds = append(b.rounds, s) },
	})
	b.Configure(config)
}

// round does one round, and takes over what became known.
func (b *bench) round(verify bool) error {
	_, err := b.Apply(b.t.Context(), verify)
	b.collect()
	return err
}

func (b *bench) collect() {
	outcomes, all := b.Outcomes()
	maps.Copy(b.outcomes, outcomes)
	b.all = all
}

// settle does rounds until nothing is left to do.
func (b *bench) settle() {
	b.t.Helper()
	var err error
	for range 5 {
		if err = b.round(false); err == nil {
			return
		}
	}
	b.t.Fatalf("never comes to rest: %v", err)
}

// started returns a bench that has applied all Services but some.
func started(t *testing.T, newKernel func(lb.Family) Kernel, but ...int) *bench {
	t.Helper()
	b := empty(t, newKernel)
	all := services()
	for _, i := range but {
		delete(all, key(i))
	}
	b.Begin(all)
	if err := b.round(false); err != nil || len(b.outcomes) != len(all) {
		t.Fatalf("%d outcomes, error %v", len(b.outcomes), err)
	}
	return b
}

func empty(t *testing.T, newKernel func(lb.Family) Kernel) *bench {
	b := &bench{t: t}
	b.kernels = map[lb.Family]Kernel{
		lb.IPv4: lockedKernel{newKernel(lb.IPv4), &b.mu}, lb.IPv6: lockedKernel{newKernel(lb.IPv6), &b.mu},
	}
	b.process("", 0)
	return b
}

// check fails the test unless each Service is applied in both families, but for the named ones in
// the families where they fail, and all is said to have been tried.
func (b *bench) check(failing map[int][]lb.Family) {
	b.t.Helper()
	if !b.all {
		b.t.Error("not all Services have been tried")
	}
	for i := range many {
		o := b.outcomes[key(i)]
		want := failing[i]
		if (o.Err != nil) != (len(want) > 0) || !slices.Equal(o.Alone, want) {
			b.t.Errorf("%s: fails alone in %v, want %v; error %v", key(i), o.Alone, want, o.Err)
		}
		for family, k := range b.kernels {
			bad := slices.Contains(want, family)
			if held := len(o.Applied.Only(family).Ports) > 0; held == bad || k.Holds(port(i)) == bad {
				b.t.Errorf("%s in %s: said to be applied: %v; the kernel has it: %v; want %v", key(i), family, held,
					k.Holds(port(i)), !bad)
			}
		}
	}
}

func (b *bench) writes() int { return b.kernels[lb.IPv4].Writes() + b.kernels[lb.IPv6].Writes() }

// lockedKernel and lockedRules let the test look at a kernel while an actor is at work.
type lockedKernel struct {
	Kernel
	mu *sync.Mutex
}

func (k lockedKernel) Refuse(port uint16, times int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.Kernel.Refuse(port, times)
}

func (k lockedKernel) Lose() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.Kernel.Lose()
}

func (k lockedKernel) Writes() int {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.Kernel.Writes()
}

func (k lockedKernel) Holds(port uint16) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.Kernel.Holds(port)
}

type lockedRules struct {
	dialect.Rules
	mu *sync.Mutex
}

func (r lockedRules) Prepare(ctx context.Context, verify bool) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.Rules.Prepare(ctx, verify)
}

func (r lockedRules) Commit(ctx context.Context, keys []lb.Key) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.Rules.Commit(ctx, keys)
}

func (r lockedRules) Recover(ctx context.Context) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.Rules.Recover(ctx)
}

func (r lockedRules) Prune(ctx context.Context) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.Rules.Prune(ctx)
}

// Run runs the suite. newKernel returns an empty kernel.
func Run(t *testing.T, newKernel func(lb.Family) Kernel) {
	for _, test := range []struct {
		name string
		run  func(*testing.T, func(lb.Family) Kernel)
	}{
		{"nothing is written before all is known", nothingBeforeBegin},
		{"one Service that is refused", oneIsRefused},
		{"one Service that is refused, and a family that takes nothing", oneIsRefusedAndAFamily},
		{"no Service is to blame", allAreRefused},
		{"a failure that passes", aFailureThatPasses},
		{"a kernel that hides what it holds", hidden},
		{"rules that are lost for good", lost},
		{"a family that the node lacks", unusable},
		{"a restart", restart},
		{"retries", retries},
		{"a Service that goes on failing", goesOnFailing},
		{"verification", verification},
	} {
		t.Run(test.name, func(t *testing.T) { test.run(t, newKernel) })
	}
}

// Contract clause 7: unknown is not absent.
func nothingBeforeBegin(t *testing.T, newKernel func(lb.Family) Kernel) {
	b := started(t, newKernel)
	b.process("", 0)
	before := b.writes()
	b.Update(map[lb.Key]plan.Service{key(1): {}})
	if err := b.round(true); err != nil || b.writes() != before || b.all {
		t.Errorf("%d writes, all tried: %v, error %v", b.writes()-before, b.all, err)
	}
	b.Begin(nil)
	if err := b.round(false); err != nil || !b.all || b.writes() == before {
		t.Errorf("after Begin: %d writes, all tried: %v, error %v", b.writes()-before, b.all, err)
	}
	for i := range many {
		if b.kernels[lb.IPv4].Holds(port(i)) {
			t.Errorf("the rules that a predecessor left for %s, which is gone, are still there", key(i))
		}
	}
}

// Contract clause 11: a Service that the kernel refuses does not hold up the others, and is written
// as soon as the kernel takes it.
func oneIsRefused(t *testing.T, newKernel func(lb.Family) Kernel) {
	b := empty(t, newKernel)
	four := b.kernels[lb.IPv4]
	four.Refuse(port(7), ever)
	b.Begin(services())
	if err := b.round(false); !errors.Is(err, ErrRefused) || !strings.Contains(err.Error(), key(7).String()) {
		t.Errorf("error %v does not name %s", err, key(7))
	}
	b.check(map[int][]lb.Family{7: {lb.IPv4}})
	// From now on it is tried by itself.
	before := four.Writes()
	b.Update(map[lb.Key]plan.Service{key(3): service(3, 1)})
	_ = b.round(false)
	b.check(map[int][]lb.Family{7: {lb.IPv4}})
	if n := len(b.outcomes[key(3)].Applied.Ports[0].Backends.Cluster); n != 1 {
		t.Errorf("another Service's change is held back: %d backends", n)
	}
	if n := four.Writes() - before; n > 4 {
		t.Errorf("%d writes for one change beside a Service that is refused", n)
	}
	four.Refuse(0, 0)
	b.settle()
	b.check(nil)
}

// What /healthz goes by: in IPv4 the Service fails by itself; in IPv6 it does not, as nothing is
// taken there.
func oneIsRefusedAndAFamily(t *testing.T, newKernel func(lb.Family) Kernel) {
	b := started(t, newKernel, 7, 8)
	b.kernels[lb.IPv4].Refuse(port(7), ever)
	b.kernels[lb.IPv6].Refuse(0, ever)
	b.Update(map[lb.Key]plan.Service{key(7): service(7, 2), key(8): service(8, 2)})
	for range 2 {
		_ = b.round(false)
		if o := b.outcomes[key(7)]; o.Err == nil || !slices.Equal(o.Alone, []lb.Family{lb.IPv4}) {
			t.Errorf("it fails alone in %v, error %v; want in IPv4 only", o.Alone, o.Err)
		}
		if o := b.outcomes[key(8)]; o.Err == nil || len(o.Alone) > 0 {
			t.Errorf("another fails alone in %v, error %v; want in none", o.Alone, o.Err)
		}
	}
	b.kernels[lb.IPv4].Refuse(0, 0)
	b.kernels[lb.IPv6].Refuse(0, 0)
	b.settle()
	b.check(nil)
}

// When the kernel takes nothing at all, every Service says so, and it is not asked about each.
func allAreRefused(t *testing.T, newKernel func(lb.Family) Kernel) {
	b := empty(t, newKernel)
	for _, k := range b.kernels {
		k.Refuse(0, ever)
	}
	b.Begin(services())
	if err := b.round(false); !errors.Is(err, ErrRefused) {
		t.Errorf("error %v", err)
	}
	if n := b.writes(); n > 6 {
		t.Errorf("%d writes in one round", n)
	}
	for i := range many {
		if o := b.outcomes[key(i)]; !errors.Is(o.Err, ErrRefused) || len(o.Alone) > 0 || len(o.Applied.Ports) > 0 {
			t.Errorf("%s: %+v", key(i), o)
		}
	}
	if b.all {
		t.Error("all are said to have been tried although nothing could be written")
	}
	for _, k := range b.kernels {
		k.Refuse(0, 0)
	}
	b.settle()
	b.check(nil)
}

// A write that fails once, as when another program holds a lock, marks no Service as refused.
func aFailureThatPasses(t *testing.T, newKernel func(lb.Family) Kernel) {
	b := started(t, newKernel, 7)
	b.kernels[lb.IPv4].Refuse(port(7), 1)
	b.Update(map[lb.Key]plan.Service{key(6): service(6, 3), key(7): service(7, 3)})
	if err := b.round(false); err != nil {
		t.Error(err)
	}
	b.check(nil)
	if n := len(b.outcomes[key(7)].Applied.Ports[0].Backends.Cluster); n != 3 {
		t.Errorf("the change is not applied: %d backends", n)
	}
}

// Contract clause 7: a listing that fails says nothing of what is there.
func hidden(t *testing.T, newKernel func(lb.Family) Kernel) {
	b := started(t, newKernel)
	four := b.kernels[lb.IPv4]
	before := b.writes()
	four.Hide(true)
	if err := b.round(true); !errors.Is(err, ErrRefused) || b.writes() != before {
		t.Errorf("%d writes, error %v", b.writes()-before, err)
	}
	b.check(nil)
	b.process("", 0)
	b.Begin(services())
	if err := b.round(false); !errors.Is(err, ErrRefused) || b.all || b.writes() != before {
		t.Errorf("after a restart: %d writes, all tried: %v, error %v", b.writes()-before, b.all, err)
	}
	four.Hide(false)
	b.settle()
	b.check(nil)
	if b.writes() != before {
		t.Errorf("%d writes for nothing", b.writes()-before)
	}
}

// Contract clause 1: what others took away, and the kernel does not take back, is not applied.
func lost(t *testing.T, newKernel func(lb.Family) Kernel) {
	b := started(t, newKernel)
	four := b.kernels[lb.IPv4]
	four.Lose()
	four.Refuse(0, ever)
	if err := b.round(true); !errors.Is(err, ErrRefused) {
		t.Errorf("error %v", err)
	}
	for i := range many {
		o := b.outcomes[key(i)]
		if o.Err == nil || len(o.Alone) > 0 || len(o.Applied.Only(lb.IPv4).Ports) > 0 ||
			len(o.Applied.Only(lb.IPv6).Ports) == 0 {
			t.Errorf("%s: %+v", key(i), o)
		}
	}
	four.Refuse(0, 0)
	b.settle()
	b.check(nil)
}

func unusable(t *testing.T, newKernel func(lb.Family) Kernel) {
	b := empty(t, newKernel)
	b.process(lb.IPv6, 0)
	b.Begin(services())
	if err := b.round(false); err != nil || !b.all {
		t.Errorf("all tried: %v, error %v", b.all, err)
	}
	for i := range many {
		o := b.outcomes[key(i)]
		if o.Err == nil || !strings.Contains(o.Err.Error(), "IPv6") || len(o.Alone) > 0 ||
			len(o.Applied.Only(lb.IPv4).Ports) == 0 ||
			len(o.Applied.Only(lb.IPv6).Ports) > 0 {
			t.Errorf("%s: %+v", key(i), o)
		}
	}
}

// Contract clause 6: a start over right rules writes nothing, and removes the rules of Services
// that are gone.
func restart(t *testing.T, newKernel func(lb.Family) Kernel) {
	b := started(t, newKernel)
	before := b.writes()
	b.process("", 0)
	b.Begin(services())
	if err := b.round(false); err != nil || b.writes() != before {
		t.Errorf("%d writes over what is right, error %v", b.writes()-before, err)
	}
	b.check(nil)
	b.process("", 0)
	fewer := services()
	delete(fewer, key(5))
	b.Begin(fewer)
	if err := b.round(false); err != nil {
		t.Error(err)
	}
	if b.kernels[lb.IPv4].Holds(port(5)) || !b.kernels[lb.IPv4].Holds(port(6)) {
		t.Error("not what the new process wants is left")
	}
}

// Failures are tried again after 100 ms, 200 ms and so on.
func retries(t *testing.T, newKernel func(lb.Family) Kernel) {
	synctest.Test(t, func(t *testing.T) {
		b := empty(t, newKernel)
		b.process(lb.IPv6, 0)
		b.kernels[lb.IPv4].Refuse(0, ever)
		stop := b.run()
		time.Sleep(time.Hour)
		if b.writes() != 0 {
			t.Error("touched the kernel before it was known what is wanted")
		}
		b.Begin(services())
		time.Sleep(750 * time.Millisecond)
		synctest.Wait()
		if n := len(b.rounds); n != 4 { // after 0, 100, 300 and 700 ms
			t.Errorf("%d rounds in 750 ms, want 4", n)
		}
		b.kernels[lb.IPv4].Refuse(0, 0)
		time.Sleep(time.Minute)
		synctest.Wait()
		if b.collect(); !b.all || b.rounds[len(b.rounds)-1].Err != nil {
			t.Errorf("after a minute: all tried: %v, error %v", b.all, b.rounds[len(b.rounds)-1].Err)
		}
		stop()
	})
}

// Contract clause 11: a Service that is refused is tried again ever more rarely, however often
// others change, and at once when it changes itself.
func goesOnFailing(t *testing.T, newKernel func(lb.Family) Kernel) {
	synctest.Test(t, func(t *testing.T) {
		b := empty(t, newKernel)
		b.process("", 0)
		four := b.kernels[lb.IPv4]
		four.Refuse(port(7), ever)
		b.Begin(services())
		stop := b.run()
		time.Sleep(time.Second)
		synctest.Wait()
		const changes = 200
		before := four.Writes()
		for i := range changes {
			time.Sleep(50 * time.Millisecond)
			b.Update(map[lb.Key]plan.Service{key(3): service(3, 1+i%2)})
		}
		synctest.Wait()
		if n := four.Writes() - before; n > changes+20 {
			t.Errorf("%d writes for %d changes beside a Service that is refused", n, changes)
		}
		four.Refuse(0, 0)
		b.Update(map[lb.Key]plan.Service{key(7): service(7, 2)})
		synctest.Wait()
		b.collect()
		b.check(nil)
		stop()
	})
}

// What others do to the rules is undone the next time that they are read.
func verification(t *testing.T, newKernel func(lb.Family) Kernel) {
	synctest.Test(t, func(t *testing.T) {
		b := empty(t, newKernel)
		b.process("", time.Minute)
		b.Begin(services())
		stop := b.run()
		time.Sleep(10 * time.Second)
		synctest.Wait()
		before := b.writes()
		time.Sleep(5 * time.Minute)
		synctest.Wait()
		if n := len(b.rounds); n != 6 || b.writes() != before {
			t.Errorf("%d rounds in five minutes, want 6; %d writes for nothing", n, b.writes()-before)
		}
		b.kernels[lb.IPv4].Lose()
		time.Sleep(time.Minute)
		synctest.Wait()
		last := b.rounds[len(b.rounds)-1]
		if !last.Verified || last.Repaired == 0 || !b.kernels[lb.IPv4].Holds(port(1)) {
			t.Errorf("after another minute: %+v", last)
		}
		stop()
		if !b.kernels[lb.IPv4].Holds(port(1)) {
			t.Error("the rules went with the actor")
		}
	})
}

func (b *bench) run() (stop func()) {
	ctx, cancel := context.WithCancel(b.t.Context())
	done := make(chan error)
	go func() { done <- b.Run(ctx) }()
	return func() {
		cancel()
		if err := <-done; err != nil {
			b.t.Error(err)
		}
	}
}
