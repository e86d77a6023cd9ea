package main

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/landfall-lb/landfall/internal/kube"
	"github.com/landfall-lb/landfall/internal/lb"
)

// EachService implements services.
func (c *cluster) EachService(_ context.Context, yield func(lb.Service)) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err, _ := c.failing(lb.Key{}); err != nil {
		return err
	}
	for _, s := range c.services {
		yield(s)
	}
	return nil
}

// TakeBack implements services.
func (c *cluster) TakeBack(_ context.Context, given lb.Service, finalizer, addresses bool) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err, _ := c.failing(given.Key); err != nil {
		return err
	}
	s, err := c.patched(given)
	if err != nil {
		return err
	}
	h := kube.Holding{}
	for _, in := range s.Ingress {
		if !addresses {
			h.Addresses = append(h.Addresses, in.Addr)
		}
	}
	if finalizer {
		h.Finalizer = kube.FinalizerRemoved
	}
	if len(given.Conditions)+len(given.Announcements) > 0 || finalizer || addresses {
		show(&s, h)
	}
	s.Announcements, s.Listed = "", nil
	c.store(s)
	c.writes = append(c.writes, "service "+s.Key.Name)
	return nil
}

// install is an installation of which what is said in turn, each for a second, runs; the last one
// stays. Its programs have created the objects that Delete deletes.
type install struct {
	began   time.Time
	said    []said
	fails   int // so many reads
	refuses int // so many deletions
	objects bool
}

var errAway = errors.New("the API server is away")

// said is what an API server says of an installation.
type said struct {
	pods            []kube.InstalledPod
	leader, version string
}

func (i *install) now() (said, error) {
	if i.fails > 0 {
		i.fails--
		return said{}, errAway
	}
	if len(i.said) == 0 {
		return said{}, nil
	}
	return i.said[min(int(time.Since(i.began)/cleanupEvery), len(i.said)-1)], nil
}

// Pods implements installation.
func (i *install) Pods(context.Context) ([]kube.InstalledPod, error) {
	now, err := i.now()
	return now.pods, err
}

// Leader implements installation.
func (i *install) Leader(context.Context) (string, string, error) {
	now, err := i.now()
	return now.leader, now.version, err
}

// Delete implements installation.
func (i *install) Delete(context.Context) error {
	if i.refuses > 0 {
		i.refuses--
		return errAway
	}
	i.objects = false
	return nil
}

// wrote returns a Service with all that Landfall writes.
func wrote(name string) lb.Service {
	s := service(name)
	s.Finalizer, s.Announcements = true, "data"
	s.AllocatedFrom = map[string]string{lb.AnnotationAllocatedFrom: "p"}
	s.Ingress = []lb.Ingress{{Addr: netip.MustParseAddr("10.0.0.1")}}
	s.Conditions = []lb.Condition{{Type: lb.ConditionAssigned, Status: true}, {Type: lb.ConditionAnnounced, Status: true},
		lb.Serving(lb.Condition{Status: true})}
	return s
}

// TestCleanup takes back what Landfall wrote, also while a speaker writes it again and the API
// server fails, and leaves others' Services alone.
func TestCleanup(t *testing.T) {
	for _, addresses := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			c := newCluster()
			theirs, waits, internal := wrote("theirs"), wrote("waits"), wrote("internal")
			theirs.Class = "other"
			waits.Conditions = []lb.Condition{{Type: lb.ConditionAssigned, Reason: lb.ReasonNoPool}}
			waits.Announcements, waits.Ingress = "", nil
			internal.Type, internal.Ingress, internal.Announcements = lb.ClusterIP, nil, "(left over)"
			for _, s := range []lb.Service{wrote("ours"), theirs, waits, internal, service("never")} {
				c.put(s)
			}
			c.fail(refused, nil, refused, refused)
			ended := make(chan struct{})
			go func() { // a speaker that ends after 5 s
				defer close(ended)
				for range 5 {
					time.Sleep(time.Second)
					c.announce("ours", true)
				}
			}()
			left := &install{objects: true, fails: 3, refuses: 8}
			var log strings.Builder
			cleaner := cleaner{services: c, installation: left, addresses: addresses,
				log: slog.New(slog.NewTextHandler(&log, nil))}
			if err := cleaner.run(t.Context()); err != nil {
				t.Fatal(err)
			}
			<-ended
			for _, name := range []string{"ours", "internal", "waits"} {
				s := c.services[key(name)]
				if len(s.Conditions) > 0 || s.Announcements != "" || s.Finalizer != (name == "waits") {
					t.Errorf("%s shows %v, %q, finalizer %v", name, s.Conditions, s.Announcements, s.Finalizer)
				}
			}
			ours := c.services[key("ours")]
			if (len(ours.Ingress) == 0) != addresses || (len(ours.AllocatedFrom) == 0) != addresses {
				t.Errorf("holds %v of %v", ours.Ingress, ours.AllocatedFrom)
			}
			if s := c.services[key("theirs")]; len(s.Conditions) != 3 || !s.Finalizer || s.Announcements == "" {
				t.Errorf("another class's: %+v", s)
			}
			if said := log.String(); strings.Count(said, "another load balancer class") != 1 ||
				!strings.Contains(said, "default/theirs") {
				t.Errorf("it did not say what stays: %s", said)
			}
			if left.objects {
				t.Error("the Leases and the ConfigMap stay")
			}
			c.written()
			if err := cleaner.run(t.Context()); err != nil || len(c.written()) > 0 {
				t.Errorf("again: %v, or something was written", err)
			}
		})
	}
}

// TestContract11ACleanupLeavesNoFinalizer has Services with the finalizer that wait without an address, as they came
// back from a backup. Without a class the controller of a cloud may have set it.
func TestContract11ACleanupLeavesNoFinalizer(t *testing.T) {
	waits := []lb.Condition{{Type: lb.ConditionAssigned, Reason: lb.ReasonNoPool}}
	address := []lb.Ingress{{Addr: netip.MustParseAddr("203.0.113.1")}}
	for name, test := range map[string]struct {
		class string // of the cleanup
		tweak func(s *lb.Service)
		stays bool
	}{
		"of our class":       {"ours", func(s *lb.Service) { s.Class, s.Conditions = "ours", waits }, false},
		"never seen":         {"ours", func(s *lb.Service) { s.Class = "ours" }, false},
		"is being deleted":   {"ours", func(s *lb.Service) { s.Class, s.Deleting = "ours", true }, false},
		"of another":         {"ours", func(s *lb.Service) { s.Class, s.Conditions = "theirs", waits }, true},
		"no load balancer":   {"ours", func(s *lb.Service) { s.Type = lb.ClusterIP }, true},
		"without a class":    {"", func(s *lb.Service) { s.Conditions = waits }, true},
		"somebody's address": {"ours", func(s *lb.Service) { s.Class, s.Ingress = "ours", address }, true},
	} {
		synctest.Test(t, func(t *testing.T) {
			c := newCluster()
			s := service("a")
			s.Finalizer = true
			test.tweak(&s)
			c.put(s)
			cleaner := cleaner{services: c, installation: &install{}, class: test.class, log: slog.New(slog.DiscardHandler)}
			if err := cleaner.run(t.Context()); err != nil {
				t.Errorf("%s: %v", name, err)
			}
			left := c.services[s.Key]
			if left.Finalizer != test.stays || test.class == left.Class && len(left.Conditions) > 0 {
				t.Errorf("%s: finalizer %v, want %v; conditions %v", name, left.Finalizer, test.stays, left.Conditions)
			}
		})
	}
}

// meddle changes a Service again and again until end is called.
func (c *cluster) meddle(key lb.Key, change func(*lb.Service)) (end func()) {
	over, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		for {
			c.mu.Lock()
			s := c.services[key]
			change(&s)
			c.store(s)
			c.mu.Unlock()
			select {
			case <-over:
				return
			case <-time.After(cleanupEvery / 2):
			}
		}
	}()
	return func() { close(over); <-ended }
}

// TestACleanupNamesWhatSomebodyElseWrites has somebody put back the annotation, the finalizer, or both.
func TestACleanupNamesWhatSomebodyElseWrites(t *testing.T) {
	for _, puts := range []struct{ annotation, finalizer bool }{{true, false}, {false, true}, {true, true}} {
		synctest.Test(t, func(t *testing.T) {
			c := newCluster()
			s := service("a")
			s.Class = "ours"
			c.put(s)
			end := c.meddle(s.Key, func(s *lb.Service) {
				s.Finalizer = puts.finalizer
				if puts.annotation {
					s.Announcements = "mine"
				}
			})
			var log strings.Builder
			cleaner := cleaner{services: c, installation: &install{}, class: "ours",
				log: slog.New(slog.NewTextHandler(&log, nil))}
			err := cleaner.run(t.Context())
			end()
			said := log.String()
			if err != nil || strings.Count(said, "goes on writing") != 1 ||
				strings.Contains(said, lb.AnnotationAnnouncements) != puts.annotation ||
				strings.Contains(said, lb.FinalizerCleanup) != puts.finalizer {
				t.Errorf("%+v: %v; it said %s", puts, err, said)
			}
		})
	}
}

// TestContract11NobodyKeepsACleanupFromItsEnd has a tenant write Landfall's annotation anew all the time.
func TestContract11NobodyKeepsACleanupFromItsEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster()
		for _, name := range []string{"a", "b", "rewritten"} {
			c.put(wrote(name))
		}
		end := c.meddle(key("rewritten"), func(s *lb.Service) { s.Announcements = "mine" })
		var log strings.Builder
		left := &install{objects: true}
		cleaner := cleaner{services: c, installation: left, log: slog.New(slog.NewTextHandler(&log, nil))}
		began := time.Now()
		err := cleaner.run(t.Context())
		if took := time.Since(began); err != nil || took > (maxTakenBack+cleanupPasses+2)*cleanupEvery || left.objects {
			t.Errorf("%v after %v, objects are left: %v", err, took, left.objects)
		}
		end()
		for _, name := range []string{"a", "b", "rewritten"} {
			s := c.services[key(name)]
			if len(s.Conditions) > 0 || s.Finalizer || s.Announcements != "" && name != "rewritten" {
				t.Errorf("%s shows %v, %q, finalizer %v", name, s.Conditions, s.Announcements, s.Finalizer)
			}
		}
		if said := log.String(); strings.Count(said, "goes on writing") != 1 || !strings.Contains(said, "default/rewritten") {
			t.Errorf("it said %s", said)
		}
	})
}

// TestCleanupEnds has a controller that goes on, an API server that is away, and a person who
// interrupts.
func TestCleanupEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster()
		c.put(wrote("a"))
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			for ctx.Err() == nil {
				time.Sleep(cleanupEvery / 2)
				c.put(wrote("a"))
			}
		}()
		cleaner := cleaner{services: c, installation: &install{}, log: slog.New(slog.DiscardHandler)}
		began := time.Now()
		err := cleaner.run(ctx)
		if err == nil || !strings.Contains(err.Error(), "still running?") || time.Since(began) > cleanupTimeout+time.Second {
			t.Errorf("%v after %v", err, time.Since(began))
		}
		cancel()
		if err := cleaner.run(ctx); !errors.Is(err, context.Canceled) {
			t.Errorf("interrupted: %v", err)
		}
		<-ended
	})
}

// TestCleanupWaitsForTheEnd has pods that end, that go on, or that are on a node that is away, and
// another controller; nothing is taken back while something runs.
func TestCleanupWaitsForTheEnd(t *testing.T) {
	const grace = 30 * time.Second
	runs := kube.InstalledPod{Name: "landfall-node-x", Node: "n1"}
	ends := kube.InstalledPod{Name: "landfall-node-x", Node: "n1", Ending: true, Grace: grace}
	pods := func(of ...kube.InstalledPod) said { return said{pods: of} }
	// Its holder renews the Lease every two seconds.
	var leads []said
	for i := range 100 {
		leads = append(leads, said{leader: "c_1", version: string(rune('a' + i/2))})
	}
	for name, test := range map[string]struct {
		said  []said
		fails int
		takes time.Duration // until the first pass
		want  string        // of the error; "" for none
	}{
		"nothing runs":               {},
		"pods end":                   {said: []said{pods(runs), pods(runs), pods(ends, runs), pods(ends), pods()}, takes: 4 * time.Second},
		"a node is away":             {said: []said{pods(runs), pods(ends)}, takes: time.Second + grace + awayAfter},
		"it is not uninstalled":      {said: []said{pods(runs)}, want: "Landfall still runs: pod landfall-node-x runs"},
		"a pod ends and one runs":    {said: []said{pods(runs, ends)}, want: "pod landfall-node-x runs"},
		"the API server fails":       {fails: 3, takes: 3 * time.Second},
		"the API server stays away":  {fails: 1 << 30, want: "find out whether Landfall still runs: "},
		"another controller leads":   {said: append(leads, leads...), want: "controller c_1 holds its Lease"},
		"a controller was killed":    {said: []said{{leader: "c_1", version: "7"}}, takes: silentAfter},
		"a controller has given up":  {said: []said{{version: "7"}}},
		"a controller gives up soon": {said: append(leads[:5:5], said{version: "8"}), takes: 5 * time.Second},
	} {
		synctest.Test(t, func(t *testing.T) {
			c := newCluster()
			c.put(wrote("ours"))
			left := &install{began: time.Now(), said: test.said, fails: test.fails, objects: true}
			cleaner := cleaner{services: c, installation: left, log: slog.New(slog.DiscardHandler)}
			err := cleaner.run(t.Context())
			if test.want == "" {
				// At the end it finds nothing so many times in a row.
				if took := time.Since(left.began) - cleanupPasses*cleanupEvery; err != nil || took != test.takes || left.objects {
					t.Errorf("%s: %v after %v, want %v; objects are left: %v", name, err, took, test.takes, left.objects)
				}
				return
			}
			if err == nil || !strings.Contains(err.Error(), test.want) || len(c.written()) > 0 || !left.objects {
				t.Errorf("%s: %v, want %q; or something was taken back", name, err, test.want)
			}
		})
	}
}

// TestCleanupIsInterrupted while it waits.
func TestCleanupIsInterrupted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(5*time.Second, cancel)
		left := &install{said: []said{{pods: []kube.InstalledPod{{Name: "p"}}}}, objects: true}
		cleaner := cleaner{services: newCluster(), installation: left, log: slog.New(slog.DiscardHandler)}
		if err := cleaner.run(ctx); !errors.Is(err, context.Canceled) || !left.objects {
			t.Errorf("%v", err)
		}
	})
}
