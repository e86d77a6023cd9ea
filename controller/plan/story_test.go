package plan

import (
	gocmp "cmp"
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/landfall-lb/landfall/internal/lb"
)

// A story is a list of steps that are told to one world; after each comes a pass, and what
// everybody holds is compared.
type story struct {
	name   string
	class  string
	config Config
	steps  []step
}

type step struct {
	name string
	do   []change
	// moves names Services that may lose or change addresses in this step.
	moves []string
	// want is "address[,address] Reason" by Service, with - for no address; only what differs from the
	// step before, and "gone".
	want map[string]string
	// pools is "Reason assigned/available[ assigned6/available6]" by pool, like want.
	pools map[string]string
}

type change func(*world)

// world is what an API server would hold.
type world struct {
	config     Config
	pools      map[string]lb.Pool
	namespaces map[string]lb.Namespace
	nodes      map[string]lb.Node
	services   map[lb.Key]lb.Service
	tick       int
	now        time.Time
	repeats    int // how often each pass is repeated over other maps
	// book is told of each change, as that of a controller.
	book *Book
	told map[lb.Key]lb.Service
}

func newWorld(config Config) *world {
	return &world{
		config: config, pools: map[string]lb.Pool{}, namespaces: map[string]lb.Namespace{}, nodes: map[string]lb.Node{},
		services: map[lb.Key]lb.Service{}, now: at(1_000_000), repeats: 3, book: NewBook(config, 0),
		told: map[lb.Key]lb.Service{},
	}
}

// bothFamilies returns the stories, which are of IPv4, and the same of IPv6, without what pools show.
func bothFamilies(stories []story) (both []story) {
	for _, s := range stories {
		of6 := s
		of6.name += ", IPv6"
		of6.steps = nil
		for _, st := range s.steps {
			st.do, st.pools = append(slices.Clone(st.do), toIPv6), nil
			want := map[string]string{}
			for name, text := range st.want {
				want[name] = addresses4.ReplaceAllStringFunc(text, inIPv6)
			}
			st.want = want
			of6.steps = append(of6.steps, st)
		}
		both = append(both, s, of6)
	}
	return both
}

var addresses4 = regexp.MustCompile(`\d+\.\d+\.\d+\.\d+`)

// inIPv6 returns the IPv6 address that stands for one of IPv4.
func inIPv6(address string) string { return in6(netip.MustParseAddr(address)).String() }

func in6(addr netip.Addr) netip.Addr {
	if addr.Is6() {
		return addr
	}
	four := addr.As4()
	return netip.AddrFrom16([16]byte{0x20, 0x01, 0x0d, 0xb8, 12: four[0], 13: four[1], 14: four[2], 15: four[3]})
}

// toIPv6 has all that is of IPv4 be of IPv6.
func toIPv6(w *world) {
	for name, p := range w.pools {
		p.Ranges, p.Excluded, p.Reservations = slices.Clone(p.Ranges), slices.Clone(p.Excluded), slices.Clone(p.Reservations)
		for _, ranges := range [][]lb.Range{p.Ranges, p.Excluded} {
			for i, r := range ranges {
				ranges[i] = lb.Range{From: in6(r.From), To: in6(r.To)}
			}
		}
		for i, r := range p.Reservations {
			p.Reservations[i].Range = lb.Range{From: in6(r.Range.From), To: in6(r.Range.To)}
		}
		w.pools[name] = p
	}
	for name, n := range w.nodes {
		n.Addresses = slices.Clone(n.Addresses)
		for i, addr := range n.Addresses {
			n.Addresses[i] = in6(addr)
		}
		w.nodes[name] = n
	}
	for k, s := range w.services {
		s.Families = []lb.Family{lb.IPv6}
		s.ClusterIPs, s.Ingress, s.Request.Addresses =
			slices.Clone(s.ClusterIPs), slices.Clone(s.Ingress), slices.Clone(s.Request.Addresses)
		for i, addr := range s.ClusterIPs {
			s.ClusterIPs[i] = in6(addr)
		}
		for i := range s.Ingress {
			s.Ingress[i].Addr = in6(s.Ingress[i].Addr)
		}
		for i, text := range s.Request.Addresses {
			s.Request.Addresses[i] = addresses4.ReplaceAllStringFunc(text, inIPv6)
		}
		w.services[k] = s
	}
}

// pass lets time go by.
func pass(d time.Duration) change { return func(w *world) { w.now = w.now.Add(d) } }

func (w *world) next() int { w.tick++; return w.tick }

func at(tick int) time.Time { return time.Unix(int64(tick), 0) }

func key(name string) lb.Key { return lb.Key{Namespace: "default", Name: name} }

// newPool makes or edits a pool.
func newPool(name string, ranges ...string) change { return poolWith(name, true, ranges...) }

func poolWith(name string, auto bool, ranges ...string) change {
	return func(w *world) {
		p, ok := w.pools[name]
		if !ok {
			p = lb.Pool{Name: name, Created: at(w.next())}
		}
		p.AutoAssign, p.Ranges, p.Problem = auto, nil, nil
		for _, written := range ranges {
			r, err := lb.ParseRange(written)
			if err != nil {
				p.Problem = lb.Refuse(lb.ReasonPoolInvalid, "%v", err)
				continue
			}
			p.Ranges = append(p.Ranges, r)
		}
		p.Generation++
		w.pools[name] = p
	}
}

func noPool(name string) change { return func(w *world) { delete(w.pools, name) } }

// service makes a Service of type LoadBalancer and family IPv4, as the tweaks say, or edits it.
func service(name string, tweaks ...func(*lb.Service)) change {
	return func(w *world) {
		s, ok := w.services[key(name)]
		if !ok {
			tick := w.next()
			s = lb.Service{
				Key: key(name), UID: strconv.Itoa(tick), Created: at(tick), Type: lb.LoadBalancer,
				Families: []lb.Family{lb.IPv4}, FamilyPolicy: lb.SingleStack,
				ClusterIPs: []netip.Addr{netip.MustParseAddr("10.96.0.1")},
			}
		}
		for _, tweak := range tweaks {
			tweak(&s)
		}
		s.Version = strconv.Itoa(w.next())
		w.services[s.Key] = s
	}
}

func noService(name string) change { return func(w *world) { delete(w.services, key(name)) } }

func asks(addrs ...string) func(*lb.Service) {
	return func(s *lb.Service) { s.Request.Addresses = addrs }
}

func asksPool(name string) func(*lb.Service) { return func(s *lb.Service) { s.Request.Pool = name } }

func holds(addrs ...string) func(*lb.Service) {
	return func(s *lb.Service) {
		s.Ingress = nil
		for _, a := range addrs {
			s.Ingress = append(s.Ingress, lb.Ingress{Addr: netip.MustParseAddr(a)})
		}
	}
}

// marked gives the Service the mark of MetalLB, which has assigned its addresses.
func marked(s *lb.Service) { s.AllocatedFrom = map[string]string{lb.AnnotationAllocatedFrom: "theirs"} }

func routes(addrs ...string) func(*lb.Service) {
	return func(s *lb.Service) {
		s.ExternalIPs = nil
		for _, a := range addrs {
			s.ExternalIPs = append(s.ExternalIPs, netip.MustParseAddr(a))
		}
	}
}

func class(name string) func(*lb.Service) { return func(s *lb.Service) { s.Class = name } }

func kind(t lb.ServiceType) func(*lb.Service) { return func(s *lb.Service) { s.Type = t } }

func created(tick int) func(*lb.Service) { return func(s *lb.Service) { s.Created = at(tick) } }

func families(policy lb.FamilyPolicy, fs ...lb.Family) func(*lb.Service) {
	return func(s *lb.Service) { s.FamilyPolicy, s.Families = policy, fs }
}

// shares gives the Service a sharing key and one port.
func shares(sharing string, port uint16) func(*lb.Service) {
	return func(s *lb.Service) {
		s.Request.Share, s.Ports = sharing, []lb.ServicePort{{Protocol: lb.TCP, Port: port}}
	}
}

// local gives the Service policy Local and a selector.
func local(selector string) func(*lb.Service) {
	return func(s *lb.Service) { s.ExternalPolicy, s.Request.Selector = lb.Local, selector }
}

var (
	requireDual = families(lb.RequireDualStack, lb.IPv4, lb.IPv6)
	preferDual  = families(lb.PreferDualStack, lb.IPv4, lb.IPv6)
)

// assign runs a pass several times over maps that were made anew, as their order must not matter.
func (w *world) assign(t *testing.T, pending map[lb.Key]Pending) Plan {
	t.Helper()
	first := assignModel(w.input(pending))
	for range w.repeats {
		pools, services := map[string]lb.Pool{}, map[lb.Key]lb.Service{}
		for _, name := range slices.Backward(slices.Sorted(maps.Keys(w.pools))) {
			pools[name] = w.pools[name]
		}
		for _, k := range slices.SortedFunc(maps.Keys(w.services), func(a, b lb.Key) int { return b.Compare(a) }) {
			services[k] = w.services[k]
		}
		in := w.input(pending)
		in.Pools, in.Services = pools, services
		again := assignModel(in)
		if !reflect.DeepEqual(first, again) {
			t.Fatalf("the same input gives another plan:\n%v\n%v", first, again)
		}
	}
	return first
}

func (w *world) input(pending map[lb.Key]Pending) modelInput {
	return modelInput{Config: w.config, Pools: w.pools, Namespaces: w.namespaces, Nodes: w.nodes, Services: w.services,
		Pending: pending, Now: w.now}
}

// tellBook tells the book of what has changed and returns its plan.
func (w *world) tellBook(pending map[lb.Key]Pending) Plan {
	w.book.SetPools(w.pools, w.nodes)
	w.book.SetNamespaces(w.namespaces)
	for k := range w.told {
		if _, ok := w.services[k]; !ok {
			w.book.Delete(k, w.now)
			delete(w.told, k)
		}
	}
	for k, s := range w.services {
		if p, ok := pending[k]; ok || w.told[k].Version != s.Version {
			w.book.Set(s, p, w.now)
			w.told[k] = s
		}
	}
	return w.book.Plan(w.now)
}

// apply writes a decision, as the controller does.
func (w *world) apply(k lb.Key, d Decision) {
	s := w.services[k]
	s.Ingress, s.Conditions = nil, nil
	for _, addr := range d.Addresses {
		s.Ingress = append(s.Ingress, lb.Ingress{Addr: addr, Mode: gocmp.Or(d.Mode, lb.IPModeVIP)})
	}
	if d.Condition != nil {
		s.Conditions = []lb.Condition{*d.Condition}
	}
	s.Version = strconv.Itoa(w.next())
	w.services[k] = s
}

func (w *world) shows(k lb.Key, d Decision) bool {
	s := w.services[k]
	var conditions []lb.Condition
	if d.Condition != nil {
		conditions = append(conditions, *d.Condition)
	}
	return slices.Equal(s.Conditions, conditions) && slices.Equal(addresses(s), d.Addresses)
}

func addresses(s lb.Service) []netip.Addr {
	var addrs []netip.Addr
	for _, in := range s.Ingress {
		addrs = append(addrs, in.Addr)
	}
	return addrs
}

// settle passes until nothing changes any more. A lagging world sees each write only after another
// pass that must not undo it.
func (w *world) settle(t *testing.T, lagging bool) Plan {
	t.Helper()
	for range 4 {
		p := w.tellBook(nil)
		for name, pool := range p.Pools {
			// As in the status of the pool, from which the next controller learns it.
			known := w.pools[name]
			known.Status.Released = pool.Status.Released
			w.pools[name] = known
		}
		w.compare(t, p)
		pending, changed := map[lb.Key]Pending{}, false
		for k, d := range p.Services {
			if !w.shows(k, d) {
				s := w.services[k]
				pending[k], changed = Pending{UID: s.UID, Version: s.Version, Addresses: d.Addresses}, true
			}
		}
		if !changed {
			return p
		}
		if lagging {
			again := w.assign(t, pending)
			for k := range pending {
				if d := again.Services[k]; !reflect.DeepEqual(d.Addresses, p.Services[k].Addresses) {
					t.Fatalf("%s: while a write is on its way, the plan changes from %v to %v", k, p.Services[k].Addresses,
						d.Addresses)
				}
			}
		}
		for k, d := range p.Services {
			if !w.shows(k, d) {
				w.apply(k, d)
			}
		}
	}
	t.Fatal("the plan does not settle")
	return Plan{}
}

// compare has a process that knows only what is stored decide as well: it must come to the same
// result.
func (w *world) compare(t *testing.T, p Plan) {
	t.Helper()
	all := w.assign(t, nil)
	for k, d := range all.Services {
		mine, decided := p.Services[k]
		switch {
		case decided && !reflect.DeepEqual(mine, d):
			t.Fatalf("%s: the book decides %v %v, a new process %v %v", k, mine.Addresses, mine.Condition, d.Addresses,
				d.Condition)
		case !decided && !w.shows(k, d):
			t.Fatalf("tick %d: %s: the book decides nothing, as it shows %v %v; a new process %v %v", w.tick, k,
				addresses(w.services[k]), w.services[k].Conditions, d.Addresses, d.Condition)
		}
	}
	if a, b := shownPools(all), shownPools(p); !maps.Equal(a, b) {
		diff := cmp.Diff(a, b)
		t.Fatalf("pools (-new process +book):\n%s", diff)
	}
}

// invariants compares what is held with what was held before the step, and with what the step
// itself made be held.
func (w *world) invariants(t *testing.T, before, given map[lb.Key]lb.Service, mayMove []string) {
	t.Helper()
	holders := map[netip.Addr]lb.Key{}
	for k, s := range w.services {
		for _, addr := range addresses(s) {
			if len(s.Conditions) > 0 && !slices.Contains(shownAddresses(&s), addr) {
				continue // it merely shows the address, and its condition says so
			}
			other, twice := holders[addr]
			if twice && (s.Request.Share == "" || s.Request.Share != w.services[other].Request.Share) &&
				(!slices.Contains(addresses(given[k]), addr) || !slices.Contains(addresses(given[other]), addr)) {
				t.Errorf("%s is held by both %s and %s", addr, k, other)
			}
			holders[addr] = k
		}
	}
	for k, was := range before {
		is, ok := w.services[k]
		if !ok || is.UID != was.UID || slices.Contains(mayMove, k.Name) {
			continue
		}
		for _, addr := range addresses(was) {
			if !slices.Contains(addresses(is), addr) {
				t.Errorf("%s was taken from %s", addr, k)
			}
		}
	}
}

func (w *world) shownServices() map[string]string {
	shown := map[string]string{}
	for k, s := range w.services {
		var parts []string
		for _, addr := range addresses(s) {
			parts = append(parts, addr.String())
		}
		text := strings.Join(parts, ",")
		if text == "" {
			text = "-"
		}
		for _, c := range s.Conditions {
			text += " " + string(c.Reason)
			if c.Status != (c.Reason == lb.ReasonAssigned) {
				text += fmt.Sprintf(" (%v?)", c.Status)
			}
		}
		shown[k.Name] = text
	}
	return shown
}

func shownPools(p Plan) map[string]string {
	shown := map[string]string{}
	for name, pp := range p.Pools {
		s := pp.Status
		shown[name] = fmt.Sprintf("%s %s/%s", s.Conditions[0].Reason, s.AssignedIPv4, s.AvailableIPv4)
		if _, ok := pp.Families[lb.IPv6]; ok {
			shown[name] += fmt.Sprintf(" %s/%s", s.AssignedIPv6, s.AvailableIPv6)
		}
	}
	return shown
}

// tell runs a story. Duplicated tells each change twice, lagging lets writes be seen late; the
// result must be the same.
func tell(t *testing.T, s story, duplicated, lagging bool) {
	s.config.Class = s.class
	w := newWorld(s.config)
	want, pools := map[string]string{}, map[string]string{}
	for _, st := range s.steps {
		before := maps.Clone(w.services)
		for _, do := range st.do {
			do(w)
		}
		if duplicated {
			w.settle(t, lagging)
			for _, do := range st.do {
				do(w)
			}
		}
		given := maps.Clone(w.services)
		p := w.settle(t, lagging)
		update(want, st.want)
		update(pools, st.pools)
		if diff := cmp.Diff(want, w.shownServices()); diff != "" {
			t.Fatalf("%s: Services (-want +got):\n%s", st.name, diff)
		}
		if diff := cmp.Diff(pools, shownPools(p)); len(pools) > 0 && diff != "" {
			t.Fatalf("%s: pools (-want +got):\n%s", st.name, diff)
		}
		w.invariants(t, before, given, st.moves)
		if t.Failed() {
			t.Fatalf("after step %q", st.name)
		}
	}
}

func TestContract8Stories(t *testing.T) {
	for _, s := range stories {
		for _, duplicated := range []bool{false, true} {
			for _, lagging := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s/duplicated=%v/lagging=%v", s.name, duplicated, lagging), func(t *testing.T) {
					tell(t, s, duplicated, lagging)
				})
			}
		}
	}
}

// TestContract8PendingWriteHolds has a Service that looks as if it held nothing, as the write is
// not seen yet, and another that is older and comes only now, as it was of another type before.
func TestContract8PendingWriteHolds(t *testing.T) {
	w := newWorld(Config{})
	for _, do := range []change{newPool("p", "10.0.0.1-10.0.0.9"), service("young", created(50)),
		service("old", created(1))} {
		do(w)
	}
	young := w.services[key("young")]
	written := Pending{UID: young.UID, Version: young.Version, Addresses: []netip.Addr{netip.MustParseAddr("10.0.0.1")}}
	for name, test := range map[string]struct {
		tweak      func(*Pending)
		young, old string
	}{
		"not seen":                  {func(*Pending) {}, "[10.0.0.1]", "[10.0.0.2]"},
		"seen, and gone since":      {func(p *Pending) { p.Version = "older" }, "[10.0.0.2]", "[10.0.0.1]"},
		"of another of its name":    {func(p *Pending) { p.UID = "other" }, "[10.0.0.2]", "[10.0.0.1]"},
		"nothing held, all refused": {func(p *Pending) { p.Addresses = nil }, "[10.0.0.2]", "[10.0.0.1]"},
	} {
		p := written
		test.tweak(&p)
		plan := w.assign(t, map[lb.Key]Pending{young.Key: p})
		got := fmt.Sprint(plan.Services[key("young")].Addresses, plan.Services[key("old")].Addresses)
		if want := test.young + " " + test.old; got != want {
			t.Errorf("%s: young and old hold %s, want %s", name, got, want)
		}
	}
}

// TestMessages pins the sentences that people read.
func TestMessages(t *testing.T) {
	w := newWorld(Config{})
	for _, do := range []change{
		newPool("small", "10.0.0.1/32"), poolWith("reserved", false, "10.1.0.0/30"),
		newPool("late", "10.0.0.0/31", "10.7.0.0/24"),
		service("first"), service("second"), service("third", asks("10.0.0.1")), service("fourth", asks("192.0.2.1")),
		service("fifth", asks("fd00::1")), service("sixth", asks("x")), service("seventh", asksPool("nope")),
		service("eighth", asksPool("late")), service("ninth", asks("10.1.0.1")), service("tenth", holds("10.1.0.1")),
		service("eleventh", holds("192.0.2.7"), marked), service("twelfth", families(lb.SingleStack, lb.IPv6)),
		service("thirteenth", requireDual, asks("10.1.0.2")),
		service("fourteenth", holds("10.1.0.3"), preferDual), service("fifteenth", asks("10.1.0.0", "10.1.0.2")),
	} {
		do(w)
	}
	got := map[string]string{}
	p := w.settle(t, false)
	for k, d := range p.Services {
		got[k.Name] = d.Condition.Message
	}
	for name, pool := range p.Pools {
		got["pool "+name] = pool.Status.Conditions[0].Message
	}
	want := map[string]string{
		"first":   "10.0.0.1 from pool small",
		"second":  "all IPv4 addresses of pool small are held",
		"third":   "asks for 10.0.0.1, which Service default/first holds",
		"fourth":  "asks for 192.0.2.1, which is in no pool",
		"fifth":   "asks for fd00::1, but its spec.ipFamilies has no IPv6",
		"sixth":   `asks for "x", which is not an IP address`,
		"seventh": "asks for pool nope, which does not exist",
		"eighth": "pool late hands out nothing new: 10.0.0.1 is also in the older pool small; Services keep what " +
			"they hold of pool late, and it hands out nothing new",
		"ninth": "asks for 10.1.0.1, which Service default/tenth holds",
		"tenth": "10.1.0.1 from pool reserved",
		"eleventh": "keeps 192.0.2.7, which is in no pool and so is not announced; add it to a pool, or ask for " +
			"another address",
		"twelfth":    "no pool with autoAssign has IPv6 addresses",
		"thirteenth": "no pool with autoAssign has IPv6 addresses",
		"fourteenth": "10.1.0.3 from pool reserved; no pool with autoAssign has IPv6 addresses",
		"fifteenth": "asks for both 10.1.0.0 and 10.1.0.2; it can have one address of each family, unless annotation " +
			"landfall.dev/addresses-per-family asks for more",
		"pool small":    "hands out addresses",
		"pool reserved": "hands out addresses to Services that ask for them",
		"pool late": "10.0.0.1 is also in the older pool small; Services keep what they hold of pool late, and it " +
			"hands out nothing new",
	}
	edited := w.pools["small"]
	edited.Reservations = []lb.Reservation{
		{Range: lb.Range{From: netip.MustParseAddr("10.0.0.0"), To: netip.MustParseAddr("10.0.0.1")}, Namespace: "default"}}
	w.pools["small"] = edited
	status := w.settle(t, false).Pools["small"].Status
	wantReady := "hands out addresses; spec.reservations[0] for default/* has no effect on 10.0.0.0, which " +
		"spec.addresses does not contain"
	if got := status.Conditions[0].Message; got != wantReady {
		t.Errorf("a reservation outside the pool: %q", got)
	}
	if got, want := status.Conditions[2].Message, "none of 0 IPv4 addresses is left (Services hold 1)"; got != want {
		t.Errorf("Exhausted: %q, want %q", got, want)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

// update changes m as a step says.
func update(m, changes map[string]string) {
	for name, text := range changes {
		if text == "gone" {
			delete(m, name)
		} else {
			m[name] = text
		}
	}
}
