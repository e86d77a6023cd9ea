package main

import (
	"context"
	"fmt"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/leaktest"
	"github.com/landfall-lb/landfall/internal/seeds"
)

// TestMonth has two controllers lead in turn for some days, and then one of them for the rest of a simulated month.
// Each hour Services of all kinds come and go, and pools and nodes with them, while writes fail and addresses are in
// quarantine. All that it remembers is as much at the end as after its first day, when the cluster is the same.
func TestMonth(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &month{cluster: newCluster()}
		m.addPool("p", "10.0.0.0/26")
		p := m.pools["p"]
		p.Quarantine = 3 * time.Hour
		m.pools["p"] = p
		for n := range 3 {
			m.put(service(fmt.Sprint("always-", n)))
		}
		for range 2 {
			each := newProcess(m.cluster)
			each.now = time.Now
			m.all = append(m.all, each)
		}
		for day := range turns {
			m.turn(t, m.all[day%len(m.all)])
			m.day(day)
		}
		before, goroutines := m.rest()
		for day := turns; day < seeds.Of(30, 365); day++ {
			m.day(day)
		}
		after, still := m.rest()
		leaktest.Compare(t, before, after)
		if still != goroutines {
			t.Errorf("%d goroutines, before %d", still, goroutines)
		}
		for _, path := range []string{".book.entries", ".book.holders", ".book.shares", ".book.asking", ".book.kept.at",
			".book.waiting", ".registries", ".replaces", ".withdrawals", ".writes"} {
			if _, there := before[path]; !there {
				t.Errorf("%s is not looked at", path)
			}
			if m.most[path] <= after[path] {
				t.Errorf("%s never held more than the %d entries of a calm cluster", path, after[path])
			}
		}
		if err := m.end(); err != nil {
			t.Error(err)
		}
		t.Logf("%d writes; %d Services and %d addresses in quarantine amid churn, %d and %d at the end", m.writes,
			m.most[".book.entries"], m.most[".book.kept.at"], after[".book.entries"], after[".book.kept.at"])
	})
}

// month is what happens in it.
type month struct {
	*cluster
	all    []*process
	leads  *process
	end    func() error
	hours  []int // whose Services are there
	most   map[string]int
	writes int
}

const (
	lives = 5 // hours of a Service
	turns = 4 // days after which nobody else leads
)

// turn has a controller lead after the one before.
func (m *month) turn(t *testing.T, p *process) {
	t.Helper()
	if m.end != nil {
		if err := m.end(); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	m.leads = p
	m.leads.deliver()
	go func() { ended <- m.leads.lead(ctx) }()
	m.end = func() error {
		cancel()
		return <-ended
	}
	m.wait(time.Minute)
}

func (m *month) day(day int) {
	for hour := range 24 {
		m.hour(day*24 + hour)
	}
}

// wait lets time pass, in which the watches of the leading controller tell what there is, and notes how much it
// remembers.
func (m *month) wait(d time.Duration) {
	if m.most == nil {
		m.most = map[string]int{}
	}
	for range 4 {
		m.leads.deliver()
		time.Sleep(d / 4)
		synctest.Wait()
		if len(m.hours) > 0 && m.hours[0] < turns*24 { // of some days it is enough
			for path, n := range leaktest.Entries(m.leads.controller) {
				m.most[path] = max(m.most[path], n)
			}
		}
	}
	m.writes += len(m.written())
	m.leads.events = nil
}

func (m *month) hour(hour int) {
	if len(m.hours) == lives {
		m.gone(m.hours[0])
	}
	m.hours = append(m.hours, hour)
	if hour%7 == 3 {
		m.fail(conflict, refused, lost, forbidden)
	}
	pool, node := fmt.Sprint("pool-", hour), fmt.Sprint("node-", hour)
	m.addPool(pool, fmt.Sprintf("10.1.%d.0/30", hour%200))
	for _, p := range m.all {
		p.nodes.Set(node, lb.Node{Name: node})
		p.around.Set(lb.SurroundingsConfigMap, map[string]string{node: ""})
		p.sessions.Set("peer", []string{node})
	}
	m.service(hour, "plain", func(*lb.Service) {})
	for _, name := range []string{"shared", "sharing"} {
		m.service(hour, name, func(s *lb.Service) {
			s.Request.Share = fmt.Sprint("key-", hour)
			s.Ports = []lb.ServicePort{{Protocol: lb.TCP, Port: uint16(len(name))}}
		})
	}
	m.service(hour, "pooled", func(s *lb.Service) { s.Request.Pool = pool })
	m.service(hour, "waiting", func(s *lb.Service) { s.Request.Pool = "none" })
	m.service(hour, "asking", func(s *lb.Service) { s.Request.Addresses = []string{"10.0.0.0"} })
	m.wait(10 * time.Minute)
	m.announce(fmt.Sprint("plain-", hour), true)
	s := m.services[key(fmt.Sprint("pooled-", hour))] // another program replaces what it holds
	s.Ingress = []lb.Ingress{{Addr: netip.MustParseAddr("192.0.2.1")}}
	m.put(s)
	m.wait(49 * time.Minute)
}

func (m *month) service(hour int, kind string, change func(*lb.Service)) {
	s := service(fmt.Sprint(kind, "-", hour))
	change(&s)
	m.put(s)
}

// gone has the Services of an hour go, with their pool and node.
func (m *month) gone(hour int) {
	m.hours = m.hours[1:]
	for _, kind := range []string{"plain", "shared", "sharing", "pooled", "waiting", "asking"} {
		m.del(fmt.Sprint(kind, "-", hour))
	}
	m.wait(time.Minute)
	delete(m.pools, fmt.Sprint("pool-", hour))
	for _, p := range m.all {
		p.nodes.Delete(fmt.Sprint("node-", hour))
	}
	m.wait(time.Minute)
}

// rest has all Services go that are not always there, waits until nothing is in quarantine, and returns what the
// leading controller remembers.
func (m *month) rest() (map[string]int, int) {
	for len(m.hours) > 0 {
		m.gone(m.hours[0])
	}
	m.wait(12 * time.Hour)
	// What the book has of pools' status is not kept up to date.
	return leaktest.Entries(m.leads.controller, "book.pools.ordered[].Pool.Status"), leaktest.Goroutines()
}
