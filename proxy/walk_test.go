package main

import (
	"maps"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/path"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// fakePath has what it was told, and tells what the test says.
type fakePath struct {
	targets map[lb.Key][]plan.Target
	news    path.News
	known   bool
	told    int // how many times something was told of a Service
}

func (f *fakePath) Begin(all map[lb.Key][]plan.Target) {
	f.targets = map[lb.Key][]plan.Target{}
	f.Update(all)
}

func (f *fakePath) Update(changes map[lb.Key][]plan.Target) {
	for key, targets := range changes {
		f.told++
		f.targets[key] = targets
		if targets == nil {
			delete(f.targets, key)
		}
	}
}

func (f *fakePath) take() (path.News, bool) {
	news := f.news
	f.news = path.News{Off: news.Off}
	return news, f.known
}

// lose says that endpoints of Services are not reached, or are again.
func (f *fakePath) lose(why *lb.Refusal, service string, addrs ...string) {
	f.news.Lost = plan.Lost{}
	f.news.Services = map[lb.Key]bool{key(service): true}
	for _, a := range addrs {
		f.news.Lost[plan.Target{Addr: netip.MustParseAddr(a), Pod: true}] = why
	}
}

var noRoute = lb.Refuse(lb.ReasonPodRouteMissing, "no route")

func newPathBench(t *testing.T) (*bench, *fakePath) {
	b, f := newBench(t), &fakePath{}
	b.from.path, b.to.targets = f.take, f
	return b, f
}

// confirmAll runs until the kernel has confirmed the rules.
func (b *bench) confirmAll() {
	b.run()
	b.rules.confirm()
	b.run()
}

// An address that the Node gets or loses decides which endpoints the node itself is.
func TestTheNodesOwnAddressesAreTold(t *testing.T) {
	b := newBench(t)
	b.put("web", "192.0.2.1", "172.31.0.1")
	b.put("other", "192.0.2.2", "10.200.1.2")
	b.synced()
	b.run()
	b.rules.confirm()
	b.run()
	want := func(what string, web bool) {
		t.Helper()
		for name, vip := range map[string]string{"web": "192.0.2.1", "other": "192.0.2.2"} {
			d := b.feed.all[lb.DeliveryKey{Service: key(name), VIP: netip.MustParseAddr(vip)}]
			if d.Deliverable() != "" || d.OnNode != (web && name == "web") {
				t.Errorf("%s: of %s the feed says %+v", what, name, d)
			}
		}
	}
	want("its address", true)
	for _, addr := range []string{"172.31.0.9", "172.31.0.1"} {
		node, _ := b.nodes.Get("here")
		node.Addresses = []netip.Addr{netip.MustParseAddr(addr)}
		b.nodes.Set("here", node)
		b.markNode("here")
		b.run()
		want("with the address "+addr, addr == "172.31.0.1")
	}
}

func TestContract1NothingIsSaidBeforeThePathIsKnown(t *testing.T) {
	b, f := newPathBench(t)
	b.put("web", "192.0.2.1", "10.200.1.2")
	b.synced()
	b.run()
	b.rules.confirm()
	b.run()
	if len(f.targets[key("web")]) != 1 || b.feed.complete {
		t.Errorf("targets %v, feed complete %v", f.targets, b.feed.complete)
	}
	f.known = true
	f.lose(noRoute, "web", "10.200.1.2")
	b.run()
	if !b.feed.complete {
		t.Error("the feed is not complete")
	}
	b.expectDelivery("web", "192.0.2.1", "refused")
}

// TestANodesAddressIsNoPod has an endpoint that is not reached as a pod turn out to be a Node.
func TestANodesAddressIsNoPod(t *testing.T) {
	b, f := newPathBench(t)
	f.known = true
	b.put("web", "192.0.2.1", "10.200.1.2")
	b.synced()
	b.confirmAll()
	f.lose(noRoute, "web", "10.200.1.2")
	b.confirmAll()
	b.expectDelivery("web", "192.0.2.1", "refused")
	b.nodes.Set("new", lb.Node{Name: "new", Addresses: []netip.Addr{netip.MustParseAddr("10.200.1.2")}})
	b.markNode("new")
	b.confirmAll()
	b.expectDelivery("web", "192.0.2.1", "1")
}

func TestContract1ALostPathIsWithdrawnFirst(t *testing.T) {
	b, f := newPathBench(t)
	f.known = true
	b.put("web", "192.0.2.1", "10.200.1.2", "10.200.1.3")
	b.put("other", "192.0.2.2", "10.200.1.2")
	b.synced()
	b.confirmAll()
	b.expectDelivery("web", "192.0.2.1", "2")
	b.order = nil
	f.lose(noRoute, "web", "10.200.1.2")
	b.run()
	if want := []string{"feed web", "rules web"}; !slices.Equal(b.order, want) {
		t.Errorf("order %v, want %v", b.order, want)
	}
	b.confirmAll()
	b.expectDelivery("web", "192.0.2.1", "1")
	if got := b.rules.wanted[key("web")].Ports[0].Backends.Local; len(got) != 1 {
		t.Errorf("the rules deliver to %v", got)
	}
	b.order = nil
	f.lose(noRoute, "web", "10.200.1.3")
	b.run()
	b.expectDelivery("web", "192.0.2.1", "refused")
	if got := b.health.state.Services[key("web")].Local[lb.IPv4]; got != 0 {
		t.Errorf("the health port counts %d", got)
	}
	if got := b.rules.wanted[key("web")].Ports[0].Backends.Local; len(got) != 2 {
		t.Errorf("without a way to any, the rules deliver to %v", got)
	}
	b.confirmAll()
	f.lose(nil, "web", "10.200.1.2", "10.200.1.3")
	b.confirmAll()
	b.expectDelivery("web", "192.0.2.1", "2")
	if len(b.lost) != 0 {
		t.Errorf("lost: %v", b.lost)
	}

	b.order = nil
	f.news.Off = lb.Refuse(lb.ReasonConntrackFull, "full")
	b.run()
	b.expectDelivery("web", "192.0.2.1", "refused")
	b.expectDelivery("other", "192.0.2.2", "refused")
	if slices.Contains(b.order, "rules web") {
		t.Errorf("rules were written: %v", b.order)
	}
	f.news.Off = nil
	b.run()
	b.expectDelivery("web", "192.0.2.1", "2")
	b.delete("web")
	b.run()
	b.clock = b.clock.Add(time.Minute)
	b.run()
	if got := slices.Collect(maps.Keys(f.targets)); !slices.Equal(got, []lb.Key{key("other")}) {
		t.Errorf("targets of %v", got)
	}
}

// An address is a pod's unless a Node has it: a Node that comes later changes that, and nothing for others.
func TestTargetsFollowNodes(t *testing.T) {
	b, f := newPathBench(t)
	f.known = true
	b.put("web", "192.0.2.1", "203.0.113.7")
	b.put("other", "192.0.2.2", "203.0.113.8")
	b.synced()
	b.confirmAll()
	if got := f.targets[key("web")]; len(got) != 1 || !got[0].Pod {
		t.Errorf("targets %v", got)
	}
	b.nodes.Set("there", lb.Node{Name: "there", Addresses: []netip.Addr{netip.MustParseAddr("203.0.113.7")}})
	b.markNode("there")
	f.told = 0
	b.run()
	if got := f.targets[key("web")]; len(got) != 1 || got[0].Pod || f.told != 1 {
		t.Errorf("targets %v, told of %d Services", got, f.told)
	}
	b.nodes.Delete("there")
	b.markNode("there")
	b.run()
	if got := f.targets[key("web")]; len(got) != 1 || !got[0].Pod || f.told != 2 {
		t.Errorf("targets %v, told of %d Services", got, f.told)
	}
}

// Contract clause 11: the path is told what is new of a Service's endpoints, and nothing else, whatever is planned.
func TestContract11ThePathIsToldWhatIsNew(t *testing.T) {
	b, f := newPathBench(t)
	f.known = true
	b.put("web", "192.0.2.1", "10.200.1.1")
	b.put("other", "192.0.2.2", "10.200.1.1")
	b.synced()
	b.confirmAll()
	f.told = 0
	b.own[0].Addresses = append(b.own[0].Addresses, netip.MustParsePrefix("10.9.1.1/24"))
	b.proxy.markAll(b.clock)
	b.confirmAll()
	if f.told != 0 {
		t.Errorf("told of %d Services, and nothing has changed", f.told)
	}
	b.put("web", "192.0.2.1", "10.200.1.1", "10.200.1.2")
	b.confirmAll()
	if f.told != 1 || len(f.targets[key("web")]) != 2 {
		t.Errorf("told of %d Services, targets %v", f.told, f.targets)
	}
	b.delete("web")
	b.confirmAll()
	b.put("web", "192.0.2.1", "10.200.1.1")
	b.confirmAll()
	if f.told != 3 || len(f.targets[key("web")]) != 1 {
		t.Errorf("told of %d Services, targets %v", f.told, f.targets)
	}
}

// tooMany is a slice with one endpoint more than a Service may have, none of which b.put gives to any.
func tooMany(service string) lb.Slice {
	s := lb.Slice{Service: key(service), Key: key("crowd"), Family: lb.IPv4,
		Ports: []lb.SlicePort{{Protocol: lb.TCP, Port: 8080}}}
	for i := range 1<<17 + 1 {
		s.Endpoints = append(s.Endpoints, lb.Endpoint{Node: "there", Ready: true, Serving: true, ForZones: []string{"z"},
			Addr: netip.AddrFrom4([4]byte{10, 100 + byte(i>>16), byte(i >> 8), byte(i)})})
	}
	return s
}

// Contract clause 11: what a node does not serve, because it or its namespace is too large, needs no path. What it had
// before does.
func TestContract11RefusedServicesNeedNoPath(t *testing.T) {
	for name, refuse := range map[string]func(*bench, lb.Slice){
		"by itself": func(b *bench, had lb.Slice) {
			b.slices.Set(key("web"), []lb.Slice{tooMany("web"), had})
			b.put("new", "192.0.2.2")
			b.slices.Set(key("new"), []lb.Slice{tooMany("new")})
		},
		"without a port": func(b *bench, had lb.Slice) {
			portless := tooMany("web")
			portless.Ports = nil
			b.slices.Set(key("web"), []lb.Slice{portless, had})
			b.put("new", "192.0.2.2")
			b.slices.Set(key("new"), []lb.Slice{portless})
		},
		"with its namespace": func(b *bench, had lb.Slice) {
			second := lb.Endpoint{Addr: netip.MustParseAddr("10.200.1.2"), Ready: true, Node: "there"}
			had.Endpoints = append(had.Endpoints, second)
			b.slices.Set(key("web"), []lb.Slice{had})
			b.put("new", "192.0.2.2", "10.200.1.3")
		},
	} {
		t.Run(name, func(t *testing.T) {
			f := &fakePath{known: true}
			b := newBench(t, room(1))
			b.from.path, b.to.targets = f.take, f
			b.put("web", "192.0.2.1", "10.200.1.1")
			b.synced()
			b.confirmed()
			had, _ := b.slices.Get(key("web"))
			refuse(b, had[0])
			b.markEndpoints(key("web"))
			b.markEndpoints(key("new"))
			b.confirmed()
			if got := f.targets[key("web")]; len(got) != 1 || got[0].Addr != had[0].Endpoints[0].Addr {
				t.Errorf("%d targets of what it had", len(got))
			}
			if got := f.targets[key("new")]; len(got) > 0 {
				t.Errorf("%d targets of a Service that has nothing", len(got))
			}
			for _, name := range []string{"web", "new"} {
				if r := b.records[key(name)]; r.state() != stateFailed {
					t.Errorf("%s: %s, planned %+v", name, r.state(), r.planned.Excess)
				}
			}
			b.put("web", "192.0.2.1", "10.200.1.1")
			b.delete("new")
			b.confirmed()
			if r := b.records[key("web")]; r.state() != stateApplied || len(f.targets[key("web")]) != 1 {
				t.Errorf("it fits: %s, %d targets", r.state(), len(f.targets[key("web")]))
			}
		})
	}
}
