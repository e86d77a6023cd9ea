package relay

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/netip"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
	"github.com/landfall-lb/landfall/proxy/relayfeed/wire"
)

// told is what the proxy says of a Service with frontends.
func told(name string, frontends ...plan.RelayedFrontend) wire.Service {
	s := wire.Service{Key: lb.Key{Namespace: "default", Name: name}}
	if len(frontends) > 0 {
		s.Relayed = &plan.Relayed{Ports: []plan.RelayedPort{{Protocol: lb.TCP, Frontends: frontends}}}
	}
	return s
}

// leads returns to which Service a frontend leads; "" for none.
func (t *table) leads(frontend string) string {
	w, ok, _ := t.find(target{lb.TCP, netip.MustParseAddrPort(frontend)})
	if !ok {
		return ""
	}
	return w.service.key.Name
}

// A frontend that moves from one Service to another leads to the new one as soon as that has it, and stays
// there, in whichever order the two are told.
func TestFrontendMoves(t *testing.T) {
	const at = "198.51.100.1:80"
	wanted := plan.RelayedFrontend{Addr: netip.MustParseAddrPort(at)}
	going := wanted
	going.Going = true
	for _, names := range [][2]string{{"a", "b"}, {"b", "a"}} {
		from, to := names[0], names[1]
		table := newTable(time.Now)
		for i, step := range []struct {
			says []wire.Service
			want string
		}{
			{[]wire.Service{told(from, wanted)}, from},
			{[]wire.Service{told(from, going)}, from},
			{[]wire.Service{told("a", map[bool]plan.RelayedFrontend{true: going, false: wanted}[from == "a"]),
				told("b", map[bool]plan.RelayedFrontend{true: going, false: wanted}[from == "b"])}, to},
			{[]wire.Service{told(from, going)}, to},
			{[]wire.Service{told(to, wanted)}, to},
			{[]wire.Service{told(from)}, to},
			{[]wire.Service{told(from)}, to},
			{[]wire.Service{told(to)}, ""},
		} {
			table.take(wire.Message{Services: step.says})
			if got := table.leads(at); got != step.want {
				t.Errorf("from %s to %s, step %d: it leads to %q, not to %q", from, to, i, got, step.want)
			}
		}
		if len(table.at) > 0 {
			t.Errorf("%v is left", table.at)
		}
	}
}

// A node port leads somewhere only at the addresses at which the node serves node ports: what comes with
// another one was led here by something else. An external IP yields to it, a VIP does not.
func TestNodePortsAreOfTheNode(t *testing.T) {
	frontend := func(at string, external bool) plan.RelayedFrontend {
		return plan.RelayedFrontend{Addr: netip.MustParseAddrPort(at), ExternalIP: external}
	}
	node4, node6 := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")
	table := newTable(time.Now)
	table.take(wire.Message{Complete: true, Services: []wire.Service{
		told("node-port", frontend("0.0.0.0:30080", false), frontend("[::]:30080", false)),
		told("external", frontend("192.0.2.1:30080", true), frontend("192.0.2.1:80", true)),
		told("vip", frontend("[2001:db8::1]:30080", false)),
	}})
	for _, step := range []struct {
		nodePorts []netip.Addr
		want      map[string]string
	}{
		{nil, map[string]string{"192.0.2.1:30080": "external", "192.0.2.2:30080": "", "[2001:db8::2]:30080": ""}},
		{[]netip.Addr{node4, node6}, map[string]string{"192.0.2.1:30080": "node-port", "192.0.2.1:80": "external",
			"192.0.2.2:30080": "", "[2001:db8::1]:30080": "vip", "[2001:db8::2]:30080": ""}},
		{[]netip.Addr{}, map[string]string{"192.0.2.1:30080": "external", "192.0.2.2:30080": ""}},
	} {
		table.take(wire.Message{NodePorts: step.nodePorts})
		for at, want := range step.want {
			if got := table.leads(at); got != want {
				t.Errorf("with node ports at %v, %s leads to %q, not to %q", step.nodePorts, at, got, want)
			}
		}
	}
}

// The addresses of an IPv6 network of 64 bits are one client, as a host has as many as it likes.
func TestClientsAreCounted(t *testing.T) {
	table := newTable(time.Now)
	r := &Relay{table: table, options: Options{Limit: 100, ServiceLimit: 100, ClientLimit: 2}}
	s := table.learn(id{protocol: lb.TCP})
	for _, step := range []struct {
		from string
		want bool
	}{
		{"192.0.2.1", true}, {"192.0.2.1", true}, {"192.0.2.1", false}, {"192.0.2.2", true},
		{"2001:db8::1", true}, {"2001:db8::2", true}, {"2001:db8::3", false}, {"2001:db8:0:1::3", true},
	} {
		if got := r.admitTo(s, netip.MustParseAddr(step.from)); got != step.want {
			t.Errorf("one more of %s: %v", step.from, got)
		}
	}
	for _, from := range []string{"192.0.2.1", "192.0.2.1", "192.0.2.2", "2001:db8::9", "2001:db8::1", "2001:db8:0:1::3"} {
		table.close(s, netip.MustParseAddr(from))
	}
	if len(s.clients) > 0 || s.counts.Open != 0 || s.namespace.open.Load() != 0 || s.counts.ClientRefused != 2 {
		t.Errorf("%v, %+v", s.clients, s.counts)
	}
}

// Readers that do not read hold their pipes. So no Service gets all of them, and no client those of its Service,
// however many there are.
func TestContract11PipesAreShared(t *testing.T) {
	p := newPipes(maxPipes)
	defer p.close()
	held := map[*share][]*pipe{}
	take := func(s *share) (n int) {
		for one := s.get(); one != nil; one = s.get() {
			held[s] = append(held[s], one)
			n++
		}
		return n
	}
	client := func(n byte) netip.Addr { return netip.AddrFrom4([4]byte{192, 0, 2, n}) }
	first, second, third := &service{}, &service{}, &service{}
	if n := take(p.of(first, client(1))); n < 32 || n > 43 {
		t.Errorf("one client gets %d of %d", n, p.most)
	}
	n := len(held)
	for i := range byte(100) {
		take(p.of(first, client(i+2)))
	}
	all := 0
	for _, of := range held {
		all += len(of)
	}
	if all != 64 || len(held) == n {
		t.Errorf("one Service gets %d of %d", all, p.most)
	}
	if n := take(p.of(second, client(1))); n < 16 || n > 22 {
		t.Errorf("a client of another Service gets %d", n)
	}
	if n := take(p.of(third, netip.MustParseAddr("2001:db8::1"))); n < 8 {
		t.Errorf("one of a third gets %d", n)
	}
	for s, of := range held {
		for _, one := range of {
			s.put(one, true)
		}
	}
	clear(held)
	if len(p.used) > 0 || len(p.free) != p.made {
		t.Errorf("left: %v, %d of %d free", p.used, len(p.free), p.made)
	}
	if n := take(p.of(second, client(1))); n < 32 {
		t.Errorf("later a client gets %d", n)
	}
	for s, of := range held {
		for _, one := range of {
			s.put(one, true)
		}
	}
}

// Nor does a namespace get all of them, however many Services it has.
func TestContract11NamespacesSharePipes(t *testing.T) {
	p := newPipes(maxPipes)
	defer p.close()
	held := map[*share][]*pipe{}
	take := func(namespace string, i int) (n int) {
		s := p.of(&service{id: id{key: lb.Key{Namespace: namespace, Name: fmt.Sprint(i)}}},
			netip.AddrFrom4([4]byte{192, 0, 2, byte(i)}))
		for one := s.get(); one != nil; one = s.get() {
			held[s] = append(held[s], one)
			n++
		}
		return n
	}
	all := 0
	for i := range 100 {
		all += take("tenant", i)
	}
	if all < maxPipes*4/5 || all > maxPipes*5/6 {
		t.Errorf("a namespace gets %d of %d", all, maxPipes)
	}
	if n := take("neighbor", 1); n < 8 {
		t.Errorf("a client of another one gets %d", n)
	}
	for s, of := range held {
		for _, one := range of {
			s.put(one, true)
		}
	}
	if len(p.used) > 0 || len(p.free) != p.made {
		t.Errorf("left: %v, %d of %d free", p.used, len(p.free), p.made)
	}
}

// Services of one namespace that take as many connections as they get leave places for others. They do not fill the
// relay unless no other namespace has a Service, and they are many or come one after the other.
func TestContract11TheLargestServicesGiveWay(t *testing.T) {
	for _, c := range []struct {
		services, inTurn int // inTurn have theirs before the others begin
		alone            bool
		most, all        int // of one, and of all
		full             bool
	}{
		{1, 0, true, 5000, 5000, false}, {2, 0, true, 4000, 8000, false}, {2, 1, true, 5000, 8200, false},
		{3, 3, true, 5000, 8840, false}, {4, 4, true, 5000, 9000, true}, {8, 0, true, 1091, 8727, false},
		{16, 0, true, 562, 8992, false}, {20, 0, true, 450, 9000, true}, {200, 0, true, 45, 9000, true},

		{1, 0, false, 5000, 5000, false}, {2, 0, false, 3512, 7024, false}, {2, 1, false, 5000, 7095, false},
		{3, 3, false, 5000, 7200, false}, {4, 4, false, 5000, 7200, false}, {20, 0, false, 360, 7200, false},
		{200, 200, false, 5000, 7200, false},
	} {
		r := &Relay{options: Options{Limit: 10_000, ServiceLimit: 5000, ClientLimit: 10_000}, table: newTable(time.Now),
			crossed: make(chan struct{}, 1)}
		of := func(namespace string) *service {
			return r.table.learn(id{lb.Key{Namespace: namespace, Name: fmt.Sprint(len(r.table.services))}, lb.TCP})
		}
		var neighbor *service
		if !c.alone {
			neighbor = of("neighbor")
		}
		all := make([]*service, c.services)
		for i := range all {
			all[i] = of("default")
		}
		connect := func(s *service) (ok bool) {
			if r.open.Load() == r.high() || !r.admit() {
				return false
			}
			if ok = r.admitTo(s, netip.MustParseAddr("192.0.2.1")); !ok {
				r.release()
			}
			return ok
		}
		for _, s := range all[:c.inTurn] {
			for connect(s) {
			}
		}
		for more := true; more; {
			more = false
			for _, s := range all {
				more = connect(s) || more
			}
		}
		most, sum := 0, 0
		for _, s := range all {
			most, sum = max(most, s.counts.Open), sum+s.counts.Open
		}
		if most != c.most || sum != c.all || (r.open.Load() == r.high()) != c.full {
			t.Errorf("%+v: one has %d, all %d", c, most, sum)
		}
		if c.alone {
			if !c.full && !connect(of("default")) {
				t.Errorf("%+v: another gets nothing", c)
			}
			continue
		}
		for connect(neighbor) {
		}
		if n := neighbor.counts.Open; n < 1371 || r.open.Load() == r.high() {
			t.Errorf("%+v: another namespace gets %d", c, n)
		}
	}
}

// A namespace that is alone may fill the relay. Once another one has a Service, it keeps what it has.
func TestANamespaceIsAloneNoLonger(t *testing.T) {
	r := &Relay{options: Options{Limit: 100, ServiceLimit: 50, ClientLimit: 50}, table: newTable(time.Now),
		crossed: make(chan struct{}, 1)}
	learn := func(namespace, name string, protocol lb.Protocol) *service {
		return r.table.learn(id{lb.Key{Namespace: namespace, Name: name}, protocol})
	}
	client := netip.MustParseAddr("192.0.2.1")
	connect := func(s *service) bool { return r.admit() && r.admitTo(s, client) }
	learn("b", "udp", lb.UDP) // has no connections
	all := []*service{learn("a", "1", lb.TCP), learn("a", "2", lb.TCP), learn("a", "3", lb.TCP)}
	for range 30 {
		for _, s := range all {
			if !connect(s) {
				t.Fatal("alone it gets too few")
			}
		}
	}
	if !connect(all[0]) { // before the rules have changed
		t.Error("a connection that comes beyond nine tenths is reset")
	}
	other := learn("b", "tcp", lb.TCP)
	if connect(all[0]) || all[0].counts.Open != 31 || all[0].counts.Refused != 1 || !connect(other) {
		t.Errorf("%+v beside %+v", all[0].counts, other.counts)
	}
	r.table.close(other, client)
	other.removed = true
	r.table.forget(other)
	if !connect(all[0]) {
		t.Error("alone again it gets nothing")
	}
	for _, s := range all {
		for s.counts.Open > 0 {
			r.table.close(s, client)
		}
	}
	if n := all[0].namespace.open.Load(); n != 0 || other.namespace.open.Load() != 0 {
		t.Errorf("%d are counted still", n)
	}
}

// What the file descriptors allow is shared: flows of UDP get a quarter at most, connections the rest. Flows leave
// half of the ports to others.
func TestLimitsByTheNode(t *testing.T) {
	for _, test := range []struct {
		descriptors        uint64
		ports              int
		connections, flows int
	}{{1 << 20, 28_232, 10_000, 10_000}, {20_356, 28_232, 3750, 5000}, {356, 28_232, 1, 1}, {0, 28_232, 1, 1},
		{1 << 20, 5000, 10_000, 2500}, {1 << 20, 1, 10_000, 1}} {
		connections, flows := Limits(10_000, 10_000, 3, test.descriptors, test.ports)
		if connections != test.connections || flows != test.flows {
			t.Errorf("%d descriptors, %d ports: %d and %d, not %d and %d", test.descriptors, test.ports, connections, flows, test.connections,
				test.flows)
		}
	}
}

// comeTo has clients come to each of these Services until one is not remembered. It returns how many are.
func comeTo(t *table, all []lb.Key) (each []int) {
	for i, key := range all {
		s := t.services[id{key, lb.UDP}]
		for j := 0; j == len(s.remembered); j++ {
			client := netip.AddrFrom4([4]byte{10, byte(i), byte(j >> 8), byte(j)})
			t.remember(way{service: s, affinity: s.Affinity}, client, netip.MustParseAddrPort("10.0.0.1:1"))
		}
		each = append(each, len(s.remembered))
	}
	return each
}

// withAffinity tells of Services that remember clients for an hour.
func withAffinity(all []lb.Key) (m wire.Message) {
	for _, key := range all {
		m.Services = append(m.Services, wire.Service{Key: key, Relayed: &plan.Relayed{Affinity: time.Hour,
			Ports: []plan.RelayedPort{{Protocol: lb.UDP, Frontends: []plan.RelayedFrontend{{Addr: frontend}}}}}})
	}
	return m
}

// Session affinity remembers clients of many Services as long as there is room, fewer of each namespace the less there
// is, and some of each. What is over makes room, and so does a Service that is relayed no more.
func TestContract11ServicesShareWhatIsRemembered(t *testing.T) {
	now := time.Unix(10_000, 0)
	table := newTable(func() time.Time { return now })
	var services []lb.Key
	for i := range 30 {
		services = append(services, lb.Key{Namespace: fmt.Sprint(i % 5), Name: fmt.Sprint(i)})
	}
	m := withAffinity(services)
	table.take(m)
	for _, round := range []string{"at first", "once their time is over"} {
		each, all := comeTo(table, services), 0
		for _, n := range each {
			all += n
		}
		least, most := slices.Min(each), slices.Max(each)
		if least < minRemembered || least == maxRemembered || most != maxRemembered ||
			all > maxRememberedTogether || all < maxRememberedTogether*9/10 {
			t.Errorf("%s: %d to %d of each are remembered, %d in all", round, least, most, all)
		}
		if n := table.remembered.all; n != all {
			t.Errorf("%s: %d are counted, and there are %d", round, n, all)
		}
		now = now.Add(time.Hour - time.Second)
		if table.sweep(); table.remembered.all != all {
			t.Errorf("%s: some are forgotten before their time", round)
		}
		now = now.Add(time.Second)
		if table.sweep(); table.remembered.all != 0 {
			t.Errorf("%s: %d are left when their time is over", round, table.remembered.all)
		}
	}
	comeTo(table, services)
	for i := range m.Services {
		m.Services[i].Relayed = nil
	}
	if table.take(m); table.remembered.all != 0 || len(table.remembered.of) != 0 {
		t.Errorf("%d are left of Services that are not relayed, by namespace %v", table.remembered.all, table.remembered.of)
	}
}

// The Services of one namespace, however many, leave room to those of another.
func TestContract11ANamespaceLeavesRoomToRemember(t *testing.T) {
	for _, n := range []int{24, 100, 1000} {
		now := time.Unix(10_000, 0)
		table := newTable(func() time.Time { return now })
		var services []lb.Key
		for i := range n {
			services = append(services, lb.Key{Namespace: "many", Name: fmt.Sprint(i)})
		}
		other := []lb.Key{{Namespace: "shop", Name: "web"}}
		table.take(withAffinity(slices.Concat(services, other)))
		comeTo(table, services)
		of := table.remembered.all
		if each := comeTo(table, other); each[0] < maxRemembered*3/4 || table.remembered.all > maxRememberedTogether {
			t.Errorf("%d are remembered of %d Services of one namespace, %d of one of another", of, n, each[0])
		}
	}
}

// heap returns how many bytes are in use.
func heap() int {
	var m runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m)
	return int(m.HeapAlloc)
}

// What the clients that are remembered took of memory is given back when they are forgotten.
func TestContract11WhatIsForgottenTakesNoMemory(t *testing.T) {
	for _, how := range []string{"their time is over", "the Service has no affinity any more"} {
		now := time.Unix(10_000, 0)
		table := newTable(func() time.Time { return now })
		var services []lb.Key
		for i := range 20 {
			services = append(services, lb.Key{Namespace: fmt.Sprint(i), Name: "web"})
		}
		table.take(withAffinity(services))
		before := heap()
		comeTo(table, services)
		full := heap()
		if how == "their time is over" {
			now = now.Add(time.Hour)
			table.sweep()
		} else {
			for _, s := range table.services {
				table.remember(way{service: s}, netip.MustParseAddr("10.0.0.1"), netip.MustParseAddrPort("10.0.0.1:1"))
			}
		}
		if after := heap(); table.remembered.all != 0 || after-before > (full-before)/4 {
			t.Errorf("%s: %d are left, and %d of %d bytes", how, table.remembered.all, after-before, full-before)
		}
		runtime.KeepAlive(table)
	}
}

// It is given back too where each sweep forgets only a third of those that are left.
func TestContract11WhatIsForgottenLittleByLittleTakesNoMemory(t *testing.T) {
	now := time.Unix(10_000, 0)
	table := newTable(func() time.Time { return now })
	var services []lb.Key
	for i := range 20 {
		services = append(services, lb.Key{Namespace: fmt.Sprint(i), Name: "web"})
	}
	table.take(withAffinity(services))
	before := heap()
	comeTo(table, services)
	full := heap()
	for range 10 {
		for _, s := range table.services {
			i := 0
			for who, m := range s.remembered {
				if i++; i%3 == 0 {
					m.last = now.Add(-time.Hour - returnsWithin)
					s.remembered[who] = m
				}
			}
		}
		table.sweep()
	}
	left, after := table.remembered.all, heap()
	if left == 0 || left > len(services)*maxRemembered/50 || after-before > (full-before)/10 {
		t.Errorf("%d are left, and %d of %d bytes", left, after-before, full-before)
	}
	runtime.KeepAlive(table)
}

// remembersMany returns a Service that remembers as many clients as it may, every nth of them since an hour.
func remembersMany(now time.Time, n int) *service {
	s := &service{remembered: map[remembering]remembered{}}
	for i := range maxRemembered {
		last := now
		if n > 0 && i%n == 0 {
			last = now.Add(-time.Hour)
		}
		s.remembered[remembering{"web", netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)})}] = remembered{last: last}
	}
	return s
}

// A sweep that finds nothing to forget takes no memory.
func TestASweepWithNothingToForget(t *testing.T) {
	now := time.Unix(10_000, 0)
	s := remembersMany(now, 0)
	if n := testing.AllocsPerRun(10, func() { s.sweep(now, time.Hour) }); n != 0 {
		t.Errorf("it allocates %v times", n)
	}
}

// BenchmarkSweep is what it takes to look through the clients of a Service, which is locked meanwhile.
func BenchmarkSweep(b *testing.B) {
	for _, of := range []struct {
		over  string
		every int
	}{{"none", 0}, {"a tenth", 10}, {"half", 2}, {"all", 1}} {
		b.Run(of.over, func(b *testing.B) {
			now := time.Unix(10_000, 0)
			b.ReportAllocs()
			for b.Loop() {
				b.StopTimer()
				s := remembersMany(now, of.every)
				b.StartTimer()
				s.sweep(now, time.Hour)
			}
		})
	}
}

// A Service that is not relayed for a moment keeps what it remembers while it has connections, until a day after its
// time is over.
func TestARemovedServiceRemembers(t *testing.T) {
	now := time.Unix(10_000, 0)
	table := newTable(func() time.Time { return now })
	services := []lb.Key{{Name: "web"}}
	m := withAffinity(services)
	table.take(m)
	comeTo(table, services)
	table.services[id{services[0], lb.UDP}].count(Counts{Open: 1})
	m.Services[0].Relayed = nil
	table.take(m)
	if table.sweep(); table.remembered.all != maxRemembered {
		t.Errorf("%d are remembered while it is not relayed", table.remembered.all)
	}
	now = now.Add(time.Hour + returnsWithin)
	if table.sweep(); table.remembered.all != 0 {
		t.Errorf("%d are remembered a day after their time is over", table.remembered.all)
	}
}

// A relay that is told of all Services in several messages knows each with its message, keeps those that it knew, and
// forgets the ones that were not named only with the last. If the proxy begins anew before, so does that.
func TestContract11AllServicesInSeveralMessages(t *testing.T) {
	at := func(i int) plan.RelayedFrontend {
		return plan.RelayedFrontend{Addr: netip.AddrPortFrom(netip.MustParseAddr("198.51.100.1"), uint16(i))}
	}
	a, b, c, d := told("a", at(1)), told("b", at(2)), told("c", at(3)), told("d", at(4))
	table := newTable(time.Now)
	for i, step := range []struct {
		wire.Message
		all  bool
		want []string // where the ports 1 to 4 lead
	}{
		{wire.Message{Complete: true, Services: []wire.Service{a, b}}, true, []string{"a", "b", "", ""}},
		{wire.Message{Complete: true, More: true, Services: []wire.Service{c}}, false, []string{"a", "b", "c", ""}},
		{wire.Message{}, false, []string{"a", "b", "c", ""}}, // says nothing
		{wire.Message{More: true, Services: []wire.Service{told("a")}}, false, []string{"", "b", "c", ""}},
		{wire.Message{Services: []wire.Service{d}}, true, []string{"", "", "c", "d"}},
		{wire.Message{Services: []wire.Service{a}}, false, []string{"a", "", "c", "d"}}, // a change
		{wire.Message{Complete: true, More: true, Services: []wire.Service{c}}, false, []string{"a", "", "c", "d"}},
		{wire.Message{Complete: true, More: true, Services: []wire.Service{a}}, false, []string{"a", "", "c", "d"}},
		{wire.Message{Services: []wire.Service{b}}, true, []string{"a", "b", "", ""}},
		{wire.Message{Complete: true}, true, []string{"", "", "", ""}},
	} {
		all := table.take(step.Message)
		var got []string
		for port := range 4 {
			got = append(got, table.leads(at(port+1).Addr.String()))
		}
		if all != step.all || !slices.Equal(got, step.want) {
			t.Errorf("step %d: all: %v, ports lead to %q; want %v, %q", i, all, got, step.all, step.want)
		}
	}
}

// messagesOfAll returns what the proxy says at first on a node that relays as much as it may, in Services of some
// frontends and endpoints: all in one line, or as it is said.
func messagesOfAll(frontends, endpoints int, inOne bool) (all []wire.Message) {
	at := func(i int) netip.AddrPort {
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)}), 80)
	}
	m, size := wire.Message{Complete: true, More: true}, 0
	for n := 0; n+frontends+endpoints <= plan.MaxRelayedOfNode; n += frontends + endpoints {
		port := plan.RelayedPort{Name: "http", Protocol: lb.TCP}
		for i := range frontends {
			port.Frontends = append(port.Frontends, plan.RelayedFrontend{Addr: at(n + i)})
		}
		for i := range endpoints {
			port.Cluster = append(port.Cluster, plan.RelayedBackend{Addr: at(n + i)})
		}
		s := wire.Service{Key: lb.Key{Namespace: fmt.Sprint(n / plan.MaxRelayedTogether), Name: fmt.Sprint(n)},
			Relayed: &plan.Relayed{Ports: []plan.RelayedPort{port}}}
		if size += s.Relayed.Size(); size > wire.MaxServices && len(m.Services) > 0 && !inOne {
			all, m, size = append(all, m), wire.Message{More: true}, s.Relayed.Size()
		}
		m.Services = append(m.Services, s)
	}
	m.More = false
	return append(all, m)
}

// BenchmarkTakeAll has a relay take in as much as a node relays at most, and reports how long its longest line is, how
// much it holds then, and how long a connection's look-up waits at most meanwhile.
func BenchmarkTakeAll(b *testing.B) {
	for _, inOne := range []bool{true, false} {
		for _, shape := range []struct{ frontends, endpoints int }{{4, 60}, {64, 0}, {4096, 0}, {1 << 16, 0}} {
			name := fmt.Sprintf("inOne=%v/frontends=%d,endpoints=%d", inOne, shape.frontends, shape.endpoints)
			b.Run(name, func(b *testing.B) {
				var lines [][]byte
				for _, m := range messagesOfAll(shape.frontends, shape.endpoints, inOne) {
					line, err := json.Marshal(m)
					if err != nil {
						b.Fatal(err)
					}
					lines = append(lines, line)
				}
				longest := len(slices.MaxFunc(lines, func(a, b []byte) int { return cmp.Compare(len(a), len(b)) }))
				var waited time.Duration
				held := 0
				for range b.N {
					before := heap()
					t := newTable(time.Now)
					done := make(chan struct{})
					go func() {
						defer close(done)
						for _, line := range lines {
							m, err := decodeMessage(line)
							if err != nil {
								b.Error(err)
							}
							t.take(m)
						}
					}()
					for !isClosed(done) {
						began := time.Now()
						t.find(target{lb.TCP, frontend})
						waited = max(waited, time.Since(began))
						time.Sleep(100 * time.Microsecond)
					}
					held = heap() - before
					runtime.KeepAlive(t)
				}
				b.ReportMetric(float64(longest), "longest-line")
				b.ReportMetric(float64(held)/(1<<20), "MiB")
				b.ReportMetric(float64(waited.Microseconds()), "µs-waited")
			})
		}
	}
}
