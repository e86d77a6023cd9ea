package plan

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
)

func testAddr(s string) netip.Addr { return netip.MustParseAddr(s) }

// in puts the Service into another namespace. Names stay unique, as stories show only those.
func in(namespace, name string, tweaks ...func(*lb.Service)) change {
	return func(w *world) {
		k := lb.Key{Namespace: namespace, Name: name}
		s, ok := w.services[k]
		if !ok {
			tick := w.next()
			s = lb.Service{Key: k, UID: fmt.Sprint(tick), Created: at(tick), Type: lb.LoadBalancer,
				Families: []lb.Family{lb.IPv4}, FamilyPolicy: lb.SingleStack}
		}
		for _, tweak := range tweaks {
			tweak(&s)
		}
		s.Version = fmt.Sprint(w.next())
		w.services[k] = s
	}
}

// unkept has a Service have so many more ports than are kept.
func unkept(n int) func(*lb.Service) { return func(s *lb.Service) { s.Unkept.Ports = n } }

// manyPorts has the Service have so many ports that its terms are shortened.
func manyPorts(s *lb.Service) {
	for port := range uint16(30) {
		s.Ports = append(s.Ports, lb.ServicePort{Protocol: lb.TCP, Port: 1001 + port})
	}
}

// headless takes the Service down, or up again.
func headless(set bool) func(*lb.Service) { return func(s *lb.Service) { s.Headless = set } }

var shareStories = []story{
	{name: "a change into a conflict hurts the one that changed", steps: []step{
		{name: "two share", do: []change{newPool("p", "10.0.0.0/30"), service("old", shares("k", 80)),
			service("young", shares("k", 81))},
			want: map[string]string{"old": "10.0.0.0 Assigned", "young": "10.0.0.0 Assigned"}},
		{name: "the older takes the other's port", do: []change{service("old", shares("k", 81))},
			want: map[string]string{"old": "10.0.0.0 Duplicate"}},
		{name: "and back", do: []change{service("old", shares("k", 80))},
			want: map[string]string{"old": "10.0.0.0 Assigned"}},
		{name: "the younger takes the other's", do: []change{service("young", shares("k", 80))},
			want: map[string]string{"young": "10.0.0.0 Duplicate"}},
		{name: "to a free one", do: []change{service("young", shares("k", 82))},
			want: map[string]string{"young": "10.0.0.0 Assigned"}},
		{name: "the older drops its key", do: []change{service("old", shares("", 80))},
			want: map[string]string{"old": "10.0.0.0 Duplicate"}},
		{name: "takes another", do: []change{service("old", shares("other", 80), asks("nonsense"))}},
		{name: "has its own again", do: []change{service("old", shares("k", 80), asks())},
			want: map[string]string{"old": "10.0.0.0 Assigned"}},
		{name: "both at once: the one that the other joined goes on",
			do:   []change{service("old", shares("k", 90)), service("young", shares("k", 90))},
			want: map[string]string{"old": "10.0.0.0 Duplicate"}},
		{name: "it goes", do: []change{noService("young")},
			want: map[string]string{"young": "gone", "old": "10.0.0.0 Assigned"}},
	}},
	{name: "more ports than are kept", steps: []step{
		{name: "two share", do: []change{newPool("p", "10.0.0.0/30"), service("old", shares("k", 80)),
			service("young", shares("k", 81))},
			want: map[string]string{"old": "10.0.0.0 Assigned", "young": "10.0.0.0 Assigned"}},
		{name: "the younger has more", do: []change{service("young", unkept(1))},
			want: map[string]string{"young": "10.0.0.0 Duplicate"}},
		{name: "and no longer", do: []change{service("young", unkept(0))},
			want: map[string]string{"young": "10.0.0.0 Assigned"}},
		{name: "the older has more", do: []change{service("old", unkept(1))},
			want: map[string]string{"old": "10.0.0.0 Duplicate"}},
		{name: "and no longer", do: []change{service("old", unkept(0))},
			want: map[string]string{"old": "10.0.0.0 Assigned"}},
	}},
	{name: "a key that reads like the condition", steps: []step{
		{name: "two share", do: []change{newPool("p", "10.0.0.0/30"), service("old", shares("x (shared by key y", 80)),
			service("young", shares("x (shared by key y", 81))},
			want: map[string]string{"old": "10.0.0.0 Assigned", "young": "10.0.0.0 Assigned"}},
		{name: "the older takes the other's port", do: []change{service("old", shares("x (shared by key y", 81))},
			want: map[string]string{"old": "10.0.0.0 Duplicate"}},
	}},
	{name: "a change into a conflict moves the one that changed", config: Config{MoveDuplicates: true}, steps: []step{
		{name: "two share", do: []change{newPool("p", "10.0.0.0/30"), service("old", shares("k", 80)),
			service("young", shares("k", 81))},
			want: map[string]string{"old": "10.0.0.0 Assigned", "young": "10.0.0.0 Assigned"}},
		{name: "the older takes the other's port", do: []change{service("old", shares("k", 81))}, moves: []string{"old"},
			want: map[string]string{"old": "10.0.0.1 Assigned"}},
		{name: "the younger drops its key: it is alone", do: []change{service("young", shares("", 81))}},
	}},
	{name: "sharing across namespaces", steps: []step{
		{name: "only where the pool allows it", do: []change{newPool("p", "10.0.0.0/29"), service("first", shares("k", 80)),
			in("other", "guest", shares("k", 81)), in("other", "asks", shares("k", 82), asks("10.0.0.0"))},
			want: map[string]string{"first": "10.0.0.0 Assigned", "guest": "10.0.0.1 Assigned",
				"asks": "- SharingRefused"}},
		{name: "it does", do: []change{edit("p", func(p *lb.Pool) { p.ShareAcross = true }),
			in("third", "late", shares("k", 83))},
			want: map[string]string{"asks": "10.0.0.0 Assigned", "late": "10.0.0.0 Assigned"}},
		{name: "it does no longer: nobody loses, also not by a change", do: []change{
			edit("p", func(p *lb.Pool) { p.ShareAcross = false }), in("third", "late", shares("k", 84)),
			in("third", "later", shares("k", 85)), in("third", "latest", shares("k", 85), asks("10.0.0.0"))},
			want: map[string]string{"later": "10.0.0.2 Assigned", "latest": "- SharingRefused"}},
	}},
	// Such as assigned by a version that let every namespace share.
	{name: "shared across namespaces before", config: Config{MoveDuplicates: true}, steps: []step{
		{name: "kept", do: []change{newPool("p", "10.0.0.0/29"), service("first", shares("k", 80), holds("10.0.0.0")),
			in("other", "guest", shares("k", 81), holds("10.0.0.0"))},
			want: map[string]string{"first": "10.0.0.0 Assigned", "guest": "10.0.0.0 Assigned"}},
	}},
	{name: "policy Local in two namespaces", steps: []step{
		{name: "one selector selects other pods", do: []change{newPool("p", "10.0.0.0/29"),
			edit("p", func(p *lb.Pool) { p.ShareAcross = true }), service("first", shares("k", 80), local("app=x")),
			in("other", "guest", shares("k", 81), local("app=x")),
			in("other", "asks", shares("k", 82), local("app=x"), asks("10.0.0.0")),
			in("other", "wide", shares("k", 83), asks("10.0.0.0")), service("same", shares("k", 84), local("app=x"))},
			want: map[string]string{"first": "10.0.0.0 Assigned", "guest": "10.0.0.1 Assigned", "asks": "- SharingRefused",
				"wide": "10.0.0.0 Assigned", "same": "10.0.0.0 Assigned"}},
		{name: "those of its namespace join", do: []change{
			in("other", "near", shares("k", 85), local("app=x"), asks("10.0.0.1"))},
			want: map[string]string{"near": "10.0.0.1 Assigned"}},
	}},
	// Such as assigned by a version that compared selectors alone.
	{name: "policy Local in two namespaces before", config: Config{MoveDuplicates: true}, steps: []step{
		{name: "kept", do: []change{newPool("p", "10.0.0.0/29"), edit("p", func(p *lb.Pool) { p.ShareAcross = true }),
			service("first", shares("k", 80), local("app=x"), holds("10.0.0.0")),
			in("other", "guest", shares("k", 81), local("app=x"), holds("10.0.0.0"))},
			want: map[string]string{"first": "10.0.0.0 Assigned", "guest": "10.0.0.0 Assigned"}},
		{name: "also when they change", do: []change{in("other", "guest", shares("k", 82)), service("first", shares("k", 83)),
			in("other", "late", shares("k", 84), local("app=x"))},
			want: map[string]string{"late": "10.0.0.1 Assigned"}},
	}},
	{name: "a joiner must be delivered wherever the first holder is", steps: []step{
		{name: "Local does not join Cluster", do: []change{newPool("p", "10.0.0.0/29"), service("first", shares("k", 80)),
			service("local", shares("k", 81), local("app=x")), service("asks", shares("k", 82), local(""), asks("10.0.0.0"))},
			want: map[string]string{"first": "10.0.0.0 Assigned", "local": "10.0.0.1 Assigned", "asks": "- SharingRefused"}},
		{name: "Cluster joins Local, and so does Local with its selector", do: []change{
			service("wide", shares("k", 82), asks("10.0.0.1")),
			service("same", shares("k", 83), local("app=x"), asks("10.0.0.1")),
			service("other", shares("k", 84), local("app=y"), asks("10.0.0.1"))},
			want: map[string]string{"wide": "10.0.0.1 Assigned", "same": "10.0.0.1 Assigned", "other": "- SharingRefused"}},
	}},
	{name: "a change by the rightful holder", steps: []step{
		{name: "holds", do: []change{newPool("p", "10.0.0.0/30"), service("old", shares("k", 81), kind(lb.ClusterIP)),
			service("first", shares("k", 80))}, want: map[string]string{"first": "10.0.0.0 Assigned", "old": "-"}},
		{name: "an older one joins", do: []change{service("old", kind(lb.LoadBalancer))},
			want: map[string]string{"old": "10.0.0.0 Assigned"}},
		{name: "and drops its key", do: []change{service("old", shares("", 81))},
			want: map[string]string{"old": "10.0.0.0 Duplicate"}},
		{name: "the first has another port", do: []change{service("first", shares("k", 82))}},
		{name: "another key", do: []change{service("first", shares("other", 82))}},
		{name: "no key", do: []change{service("first", shares("", 82))}},
		{name: "both change at once", do: []change{service("old", shares("x", 82)), service("first", shares("y", 82))}},
	}},
	{name: "both change at once: the one that was first goes on", steps: []step{
		{name: "holds", do: []change{newPool("p", "10.0.0.0/30"), service("old", shares("k", 81), kind(lb.ClusterIP)),
			service("first", shares("k", 80))}, want: map[string]string{"first": "10.0.0.0 Assigned", "old": "-"}},
		{name: "an older one joins", do: []change{service("old", kind(lb.LoadBalancer))},
			want: map[string]string{"old": "10.0.0.0 Assigned"}},
		{name: "to one port", do: []change{service("first", shares("k", 82)), service("old", shares("k", 82))},
			want: map[string]string{"old": "10.0.0.0 Duplicate"}},
	}},
	{name: "a change by one for which the controller decides no more", steps: []step{
		{name: "three share", do: []change{newPool("p", "10.0.0.0/30"), service("old", shares("k", 80)),
			service("young", shares("k", 81)), service("ends", shares("k", 83))},
			want: map[string]string{"old": "10.0.0.0 Assigned", "young": "10.0.0.0 Assigned", "ends": "10.0.0.0 Assigned"}},
		{name: "the older, taken down, drops its key", do: []change{service("old", shares("", 80), headless(true))}},
		{name: "the younger has another port", do: []change{service("young", shares("k", 82))}},
		{name: "the older comes back", do: []change{service("old", headless(false))},
			want: map[string]string{"old": "10.0.0.0 Duplicate"}},
		{name: "with its key", do: []change{service("old", shares("k", 80))},
			want: map[string]string{"old": "10.0.0.0 Assigned"}},
		{name: "now it is deleted, and stays", do: []change{service("old", func(s *lb.Service) { s.Deleting = true }),
			service("old", shares("", 80)), service("ends", shares("k", 84))}},
	}},
	{name: "terms that are shortened", steps: []step{
		{name: "an older one is first", do: []change{newPool("p", "10.0.0.0/30"), service("old", shares("k", 80)),
			service("young", shares("k", 1000), manyPorts)},
			want: map[string]string{"old": "10.0.0.0 Assigned", "young": "10.0.0.0 Assigned"}},
		{name: "it takes a port of the younger", do: []change{service("old", shares("k", 1001))},
			want: map[string]string{"old": "10.0.0.0 Duplicate"}},
	}},
}

// restored has the Service come with the address and the condition that it had in a backup.
func restored(addr string) func(*lb.Service) {
	return func(s *lb.Service) {
		holds(addr)(s)
		s.Conditions = []lb.Condition{{Type: lb.ConditionAssigned, Status: true, Reason: lb.ReasonAssigned,
			Message: addr + " from pool p"}}
	}
}

// restoredStories have Services that share an address and one that comes back to it from a backup.
var restoredStories = []story{
	{name: "the youngest is restored", config: Config{MoveDuplicates: true}, steps: []step{
		{name: "two share", do: []change{newPool("p", "10.0.0.0/30"), service("first", shares("k", 80)),
			service("joined", shares("k", 81))},
			want: map[string]string{"first": "10.0.0.0 Assigned", "joined": "10.0.0.0 Assigned"}},
		{name: "is restored", do: []change{service("back", restored("10.0.0.0"))}, moves: []string{"back"},
			want: map[string]string{"back": "10.0.0.1 Assigned"}},
		{name: "the first is gone, another joins", do: []change{noService("first"), service("late", shares("k", 82))},
			want: map[string]string{"first": "gone", "late": "10.0.0.0 Assigned"}},
		{name: "another is restored", do: []change{service("again", restored("10.0.0.0"))}, moves: []string{"again"},
			want: map[string]string{"again": "10.0.0.2 Assigned"}},
	}},
	{name: "one younger than the first is restored", config: Config{MoveDuplicates: true}, steps: []step{
		{name: "two share", do: []change{newPool("p", "10.0.0.0/30"), service("first", shares("k", 80), created(1)),
			service("joined", shares("k", 81), created(3)), service("third", shares("k", 82), created(4))},
			want: map[string]string{"first": "10.0.0.0 Assigned", "joined": "10.0.0.0 Assigned",
				"third": "10.0.0.0 Assigned"}},
		{name: "is restored", do: []change{service("back", restored("10.0.0.0"), created(2))}, moves: []string{"back"},
			want: map[string]string{"back": "10.0.0.1 Assigned"}},
		{name: "while the first goes", do: []change{service("back", restored("10.0.0.0")), noService("first")},
			moves: []string{"back", "joined", "third"}, want: map[string]string{"first": "gone",
				"back": "10.0.0.0 Assigned", "joined": "10.0.0.1 Assigned", "third": "10.0.0.1 Assigned"}},
	}},
	{name: "one older than the first, younger than who joined it", config: Config{MoveDuplicates: true}, steps: []step{
		{name: "two share", do: []change{newPool("p", "10.0.0.0/30"), service("joined", kind(lb.ClusterIP), shares("k", 81),
			created(1)), service("first", shares("k", 80), created(3))},
			want: map[string]string{"first": "10.0.0.0 Assigned", "joined": "-"}},
		{name: "joins", do: []change{service("joined", kind(lb.LoadBalancer))},
			want: map[string]string{"joined": "10.0.0.0 Assigned"}},
		{name: "is restored", do: []change{service("back", restored("10.0.0.0"), created(2))},
			moves: []string{"joined", "first"}, want: map[string]string{"back": "10.0.0.0 Assigned",
				"joined": "10.0.0.1 Assigned", "first": "10.0.0.1 Assigned"}},
	}},
}

// The first of several goes, or comes back, just when another one that cannot share with them is restored. That decides
// whom those come before that joined the first.
func TestContract11TheFirstGoesWhileAnotherIsRestored(t *testing.T) {
	w := newWorld(Config{})
	for _, do := range []change{newPool("p", "10.0.0.0/30"), service("first", shares("k", 80), created(1)),
		service("joined", shares("k", 81), created(3)), service("third", shares("k", 82), created(4))} {
		do(w)
	}
	w.settle(t, false)
	service("back", restored("10.0.0.0"), created(2))(w)
	first := w.services[key("first")]
	for _, there := range []bool{false, true} {
		w.book.Set(w.services[key("back")], Pending{}, w.now)
		if there {
			w.services[first.Key] = first
			w.book.Set(first, Pending{}, w.now)
		} else {
			delete(w.services, first.Key)
			w.book.Delete(first.Key, w.now)
		}
		p := w.book.Plan(w.now)
		w.compare(t, p)
		for _, name := range []string{"joined", "third"} {
			if d := p.Services[key(name)]; d.Condition == nil || d.Condition.Status != there {
				t.Errorf("the first is there: %v: %s is decided as %v", there, name, d.Condition)
			}
		}
	}
}

// shareDualStories have Services of two families.
var shareDualStories = []story{
	{name: "a change into a conflict at two addresses", steps: []step{
		{name: "holds", do: []change{newPool("p", "10.0.0.0/30", "fd00::/126"),
			service("old", requireDual, shares("k", 81), kind(lb.ClusterIP)), service("first", requireDual, shares("k", 80))},
			want: map[string]string{"first": "10.0.0.0,fd00:: Assigned", "old": "-"}},
		{name: "an older one joins", do: []change{service("old", kind(lb.LoadBalancer))},
			want: map[string]string{"old": "10.0.0.0,fd00:: Assigned"}},
		{name: "and drops its key", do: []change{service("old", shares("", 81))},
			want: map[string]string{"old": "10.0.0.0,fd00:: Duplicate"}},
		{name: "asks for nonsense as well", do: []change{service("old", asksPool("nope"))}},
		{name: "and back", do: []change{service("old", shares("k", 81), asksPool(""))},
			want: map[string]string{"old": "10.0.0.0,fd00:: Assigned"}},
	}},
}

// forgedStories have tenants who may write services/status.
var forgedStories = []story{
	{name: "an address written into a status takes nothing", config: Config{MoveDuplicates: true}, steps: []step{
		{name: "two hold", do: []change{newPool("p", "10.0.0.0/29"), service("tenant"), service("shop")},
			want: map[string]string{"tenant": "10.0.0.0 Assigned", "shop": "10.0.0.1 Assigned"}},
		{name: "the older writes the other's address beside its own",
			do: []change{service("tenant", holds("10.0.0.0", "10.0.0.1"))}, moves: []string{"tenant"},
			want: map[string]string{"tenant": "10.0.0.0 Assigned"}},
		{name: "instead of its own", do: []change{service("tenant", holds("10.0.0.1"))}, moves: []string{"tenant"},
			want: map[string]string{"tenant": "10.0.0.0 Assigned"}},
		{name: "what it requests names nothing", do: []change{service("tenant", holds("10.0.0.1"),
			asksPool("; keeps 10.0.0.1"), shares("10.0.0.1 from pool p", 80))}, moves: []string{"tenant"},
			want: map[string]string{"tenant": "10.0.0.0 PoolNotFound"}},
	}},
	{name: "the addresses of two", steps: []step{
		{name: "hold", do: []change{newPool("p", "10.0.0.0/29"), service("tenant", asksPool("nope")), service("shop"),
			service("web")},
			want: map[string]string{"tenant": "- PoolNotFound", "shop": "10.0.0.0 Assigned", "web": "10.0.0.1 Assigned"}},
		{name: "an older one writes both", do: []change{service("tenant", asksPool(""), holds("10.0.0.0", "10.0.0.1"))},
			want: map[string]string{"tenant": "10.0.0.0,10.0.0.1 Duplicate"}},
		{name: "again", do: []change{service("tenant", asksPool("nope"))}},
	}},
	{name: "one without any", steps: []step{
		{name: "holds", do: []change{newPool("p", "10.0.0.0/29"), service("old", kind(lb.ClusterIP)), service("shop")},
			want: map[string]string{"old": "-", "shop": "10.0.0.0 Assigned"}},
		{name: "shows it at once", do: []change{service("old", kind(lb.LoadBalancer), holds("10.0.0.0"))},
			want: map[string]string{"old": "10.0.0.0 Duplicate"}},
		{name: "until it is free", do: []change{noService("shop")},
			want: map[string]string{"shop": "gone", "old": "10.0.0.0 Assigned"}},
	}},
}

// noWeb deletes the Service web of namespace shop.
func noWeb(w *world) { delete(w.services, lb.Key{Namespace: "shop", Name: "web"}) }

// forgedRuleStories have tenants write addresses that the rules of pools keep from them.
var forgedRuleStories = []story{
	{name: "an address of another namespace", steps: []step{
		{name: "holds", do: []change{newPool("p", "10.0.0.0/29"), service("tenant", kind(lb.ClusterIP), shares("k", 81)),
			in("shop", "web", shares("k", 80))}, want: map[string]string{"tenant": "-", "web": "10.0.0.0 Assigned"}},
		{name: "is shown, with its key", do: []change{service("tenant", kind(lb.LoadBalancer), holds("10.0.0.0"))},
			moves: []string{"tenant"}, want: map[string]string{"tenant": "10.0.0.1 Assigned"}},
		{name: "and asked for", do: []change{service("guest", holds("10.0.0.0"), shares("k", 82), asks("10.0.0.0"))},
			want: map[string]string{"guest": "10.0.0.0 SharingRefused"}},
		{name: "while another request is refused", do: []change{
			service("other", holds("10.0.0.0"), shares("k", 84), asksPool("nope"))},
			want: map[string]string{"other": "10.0.0.0 PoolNotFound"}},
		{name: "it may be shared", do: []change{edit("p", func(p *lb.Pool) { p.ShareAcross = true })},
			want: map[string]string{"guest": "10.0.0.0 Assigned"}},
	}},
	{name: "an address of another namespace, until its holder goes", steps: []step{
		{name: "is shown", do: []change{newPool("p", "10.0.0.0/29"),
			edit("p", func(p *lb.Pool) { p.Quarantine = time.Minute }), in("shop", "web"),
			service("guest", kind(lb.ClusterIP)), service("other", kind(lb.ClusterIP))},
			want: map[string]string{"web": "10.0.0.0 Assigned", "guest": "-", "other": "-"}},
		{name: "by one that gets no other", do: []change{
			service("guest", kind(lb.LoadBalancer), holds("10.0.0.0"), asksPool("nope"))},
			want: map[string]string{"guest": "10.0.0.0 PoolNotFound"}},
		{name: "the status of the holder is emptied", do: []change{in("shop", "web", holds())},
			moves: []string{"web"}, want: map[string]string{"web": "10.0.0.0 Assigned"}},
		{name: "the holder is deleted", do: []change{noWeb, service("guest", asks("10.0.0.0"), asksPool(""))},
			want: map[string]string{"web": "gone", "guest": "10.0.0.0 AddressKept"}},
		{name: "and comes back", do: []change{in("shop", "web")}, want: map[string]string{"web": "10.0.0.0 Assigned",
			"guest": "10.0.0.0 AddressTaken"}},
		{name: "is deleted, and its time is over", do: []change{noWeb, pass(time.Second)},
			want: map[string]string{"web": "gone", "guest": "10.0.0.0 AddressKept"}},
		{name: "the time is over", do: []change{pass(time.Hour)}, want: map[string]string{"guest": "10.0.0.0 Assigned"}},
	}},
	{name: "an address that may be shared, with another key", steps: []step{
		{name: "hold", do: []change{newPool("p", "10.0.0.0/29"), edit("p", func(p *lb.Pool) {
			p.Quarantine, p.ShareAcross = time.Minute, true
		}), in("shop", "web", shares("k", 80)), service("guest", kind(lb.ClusterIP))},
			want: map[string]string{"web": "10.0.0.0 Assigned", "guest": "-"}},
		{name: "is shown", do: []change{
			service("guest", kind(lb.LoadBalancer), holds("10.0.0.0"), shares("other", 81), asks("10.0.0.0"))},
			want: map[string]string{"guest": "10.0.0.0 Duplicate"}},
		{name: "the holder goes", do: []change{noWeb}, want: map[string]string{"web": "gone",
			"guest": "10.0.0.0 AddressKept"}},
		{name: "and comes back", do: []change{in("shop", "web", shares("k", 80))},
			want: map[string]string{"web": "10.0.0.0 Assigned", "guest": "10.0.0.0 Duplicate"}},
	}},
	{name: "an address that may be shared, asked for while it is shown beside the own one", steps: []step{
		{name: "hold", do: []change{newPool("p", "10.0.0.0/29"), edit("p", func(p *lb.Pool) { p.ShareAcross = true }),
			service("tenant"), in("shop", "web")},
			want: map[string]string{"tenant": "10.0.0.0 Assigned", "web": "10.0.0.1 Assigned"}},
		{name: "is not to be had so", do: []change{service("tenant", holds("10.0.0.0", "10.0.0.1"), asks("10.0.0.1"))},
			moves: []string{"tenant"}, want: map[string]string{"tenant": "10.0.0.0 AddressTaken"}},
		{name: "nor instead of the own one", do: []change{service("tenant", holds("10.0.0.1"))}, moves: []string{"tenant"}},
		{name: "with one key it is", do: []change{service("tenant", holds("10.0.0.0", "10.0.0.1"), shares("k", 81)),
			in("shop", "web", shares("k", 80))}, moves: []string{"tenant"},
			want: map[string]string{"tenant": "10.0.0.1 Assigned"}},
	}},
	{name: "an address that may be shared, until its holder is no load balancer", steps: []step{
		{name: "is shown", do: []change{newPool("p", "10.0.0.0/29"), edit("p", func(p *lb.Pool) {
			p.Quarantine, p.ShareAcross = time.Minute, true
		}), in("shop", "web"), service("guest", kind(lb.ClusterIP))},
			want: map[string]string{"web": "10.0.0.0 Assigned", "guest": "-"}},
		{name: "by one that gets no other", do: []change{
			in("shop", "web", func(s *lb.Service) { s.Finalizer = true }),
			service("guest", kind(lb.LoadBalancer), holds("10.0.0.0"), asksPool("nope"))},
			want: map[string]string{"guest": "10.0.0.0 Duplicate"}},
		{name: "and asked for", do: []change{service("waits", asks("10.0.0.0"))},
			want: map[string]string{"waits": "- AddressTaken"}},
		{name: "it is none", do: []change{in("shop", "web", holds(), kind(lb.ClusterIP))}, moves: []string{"web"},
			want: map[string]string{"web": "-", "guest": "10.0.0.0 PoolNotFound"}},
		{name: "and is one again", do: []change{in("shop", "web", kind(lb.LoadBalancer))},
			want: map[string]string{"web": "10.0.0.0 Assigned", "guest": "10.0.0.0 Duplicate"}},
	}},
	{name: "an address that is reserved for another namespace, with a quarantine", steps: []step{
		{name: "is shown, and taken out again", do: []change{newPool("p", "10.0.0.0/28"), edit("p", func(p *lb.Pool) {
			p.Quarantine = -1
			p.Reservations = []lb.Reservation{{Range: parsed("10.0.0.5/32"), Namespace: "shop"}}
		}), service("tenant", holds("10.0.0.5")), service("asks", holds("10.0.0.5"), asks("10.0.0.5"))},
			moves: []string{"tenant"},
			want:  map[string]string{"tenant": "10.0.0.0 Assigned", "asks": "10.0.0.5 AddressReserved"}},
		{name: "is deleted", do: []change{noService("asks")}, want: map[string]string{"asks": "gone"}},
		{name: "is still there for it", do: []change{in("shop", "web", asks("10.0.0.5"))},
			want: map[string]string{"web": "10.0.0.5 Assigned"}},
	}},
	{name: "while there is no other", steps: []step{
		{name: "hold", do: []change{newPool("p", "10.0.0.0/31"), service("tenant", kind(lb.ClusterIP), shares("k", 81)),
			in("shop", "web", shares("k", 80)), in("shop", "api")},
			want: map[string]string{"tenant": "-", "web": "10.0.0.0 Assigned", "api": "10.0.0.1 Assigned"}},
		{name: "is shown", do: []change{service("tenant", kind(lb.LoadBalancer), holds("10.0.0.0"))},
			want: map[string]string{"tenant": "10.0.0.0 PoolExhausted"}},
		{name: "the holder changes its port", do: []change{in("shop", "web", shares("k", 81))}},
		{name: "there is one", do: []change{func(w *world) { delete(w.services, lb.Key{Namespace: "shop", Name: "api"}) }},
			moves: []string{"tenant"}, want: map[string]string{"api": "gone", "tenant": "10.0.0.1 Assigned"}},
	}},
	{name: "addresses that pools keep", steps: []step{
		{name: "excluded, reserved, of a node, of a pool for others", do: []change{newPool("p", "10.0.0.0/28"),
			newPool("q", "10.1.0.0/28"), node("n", "10.0.0.6"), edit("p", func(p *lb.Pool) {
				p.Excluded = []lb.Range{parsed("10.0.0.4/32")}
				p.Reservations = []lb.Reservation{{Range: parsed("10.0.0.5/32"), Namespace: "shop"}}
			}), edit("q", func(p *lb.Pool) { p.Allocation = &lb.Allocation{Namespaces: []string{"shop"}} }),
			service("a", holds("10.0.0.4")), service("b", holds("10.0.0.5")), service("c", holds("10.0.0.6")),
			service("d", holds("10.1.0.1"))}, moves: []string{"a", "b", "c", "d"},
			want: map[string]string{"a": "10.0.0.0 Assigned", "b": "10.0.0.1 Assigned", "c": "10.0.0.2 Assigned",
				"d": "10.0.0.3 Assigned"}},
		{name: "beside one of the same family that it may have", do: []change{service("e", holds("10.0.0.4", "10.0.0.9"))},
			moves: []string{"e"}, want: map[string]string{"e": "10.0.0.9 Assigned"}},
		{name: "asked for as well", do: []change{service("f", holds("10.0.0.5"), asks("10.0.0.5"))},
			want: map[string]string{"f": "10.0.0.5 AddressReserved"}},
		{name: "what MetalLB assigned is adopted", do: []change{service("g", holds("10.0.0.4"), marked)},
			want: map[string]string{"g": "10.0.0.4 Assigned"}},
		{name: "and kept as what Landfall assigned", do: []change{service("g", func(s *lb.Service) { s.AllocatedFrom = nil }),
			edit("p", func(p *lb.Pool) { p.Excluded = []lb.Range{parsed("10.0.0.0-10.0.0.4")} })}},
	}},
	{name: "an address in quarantine", steps: []step{
		{name: "is freed", do: []change{newPool("p", "10.0.0.0/29"),
			edit("p", func(p *lb.Pool) { p.Quarantine = time.Minute }), in("shop", "web")},
			want: map[string]string{"web": "10.0.0.0 Assigned"}},
		{name: "and shown by others", do: []change{
			noWeb,
			service("tenant", holds("10.0.0.0")), service("asks", holds("10.0.0.0"), asks("10.0.0.0"))},
			moves: []string{"tenant"},
			want:  map[string]string{"web": "gone", "tenant": "10.0.0.1 Assigned", "asks": "10.0.0.0 AddressKept"}},
		{name: "until its time is over", do: []change{pass(time.Hour)}, want: map[string]string{"asks": "10.0.0.0 Assigned"}},
	}},
	{name: "more than the quota, of what others hold", steps: []step{
		{name: "has none", do: []change{newPool("p", "10.0.0.0/29"), edit("p", func(p *lb.Pool) {
			p.PerNamespace, p.ShareAcross = 1, true
		}), in("shop", "web"), service("a", kind(lb.ClusterIP)), service("b", kind(lb.ClusterIP))},
			want: map[string]string{"web": "10.0.0.0 Assigned", "a": "-", "b": "-"}},
		{name: "shows one", do: []change{service("a", kind(lb.LoadBalancer), holds("10.0.0.0"), asksPool("nope"))},
			want: map[string]string{"a": "10.0.0.0 Duplicate"}},
		{name: "and another", do: []change{service("b", kind(lb.LoadBalancer), holds("10.0.0.5"), asksPool("nope"))},
			want: map[string]string{"a": "10.0.0.0 PoolNotFound", "b": "10.0.0.5 PoolNotFound"}},
	}},
	{name: "more than the quota", steps: []step{
		{name: "has one", do: []change{newPool("p", "10.0.0.0/29"), edit("p", func(p *lb.Pool) { p.PerNamespace = 1 }),
			service("b", kind(lb.ClusterIP)), service("a")}, want: map[string]string{"a": "10.0.0.0 Assigned", "b": "-"}},
		{name: "and shows another", do: []change{service("b", kind(lb.LoadBalancer), holds("10.0.0.5"))},
			want: map[string]string{"b": "10.0.0.5 QuotaExceeded"}},
		{name: "of which it may have one", do: []change{noService("a")},
			want: map[string]string{"a": "gone", "b": "10.0.0.5 Assigned"}},
	}},
}

// TestContract11SoManyShowAnAddress has more Services show the address of another one than can share it: each of them
// costs nothing more than one that waits.
func TestContract11SoManyShowAnAddress(t *testing.T) {
	w := newWorld(Config{})
	w.repeats = 0
	newPool("p", "10.0.0.0/16")(w)
	service("shop")(w)
	w.settle(t, false)
	for i := range maxSharers {
		service(fmt.Sprint("s", i), holds("10.0.0.0"), created(0))(w)
	}
	w.settle(t, false)
	for name, got := range w.shownServices() {
		if (got == "10.0.0.0 Assigned") != (name == "shop") || !strings.HasSuffix(got, " Assigned") {
			t.Fatalf("%s: %s", name, got)
		}
	}
}

func TestContract11ForgedStories(t *testing.T) {
	for _, s := range bothFamilies(slices.Concat(forgedStories, forgedRuleStories)) {
		for _, lagging := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/lagging=%v", s.name, lagging), func(t *testing.T) { tell(t, s, false, lagging) })
		}
	}
}

// TestContract11SoManyShareAnAddress has the next one get another address, or be told.
func TestContract11SoManyShareAnAddress(t *testing.T) {
	w := newWorld(Config{})
	w.repeats = 0
	newPool("p", "10.0.0.0/30")(w)
	for i := range maxSharers {
		service(fmt.Sprint("s", i), shares("k", uint16(i+1)))(w)
	}
	w.settle(t, false)
	service("more", shares("k", 2000))(w)
	service("asks", shares("k", 2001), asks("10.0.0.0"))(w)
	w.settle(t, false)
	shown := w.shownServices()
	if shown["s999"] != "10.0.0.0 Assigned" || shown["more"] != "10.0.0.1 Assigned" || shown["asks"] != "- TooManySharers" {
		t.Errorf("s999 %s, more %s, asks %s", shown["s999"], shown["more"], shown["asks"])
	}
	want := "asks for 10.0.0.0, which 1000 Services share, the most that can share an address"
	if got := w.services[key("asks")].Conditions[0].Message; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	noService("s7")(w)
	w.settle(t, false)
	if got := w.shownServices()["asks"]; got != "10.0.0.0 Assigned" {
		t.Errorf("after one went: asks %s", got)
	}
}

// TestContract11HoldersAreNamedToTheirNamespace keeps the names of other namespaces' Services out of
// conditions.
func TestContract11HoldersAreNamedToTheirNamespace(t *testing.T) {
	w := newWorld(Config{})
	quarantined := edit("p", func(p *lb.Pool) {
		p.Quarantine = -1
		p.Reservations = []lb.Reservation{{Range: lb.Range{From: testAddr("10.0.0.9"), To: testAddr("10.0.0.9")},
			Namespace: "secret", Name: "later"}}
	})
	for _, do := range []change{newPool("p", "10.0.0.0/28"), quarantined, in("secret", "held", asks("10.0.0.1")),
		in("secret", "shared", asks("10.0.0.2"), shares("k", 80)), in("secret", "kept", asks("10.0.0.3"))} {
		do(w)
	}
	w.settle(t, false)
	delete(w.services, lb.Key{Namespace: "secret", Name: "kept"})
	for _, do := range []change{service("a", asks("10.0.0.1")), service("b", asks("10.0.0.2"), shares("k", 81)),
		service("c", asks("10.0.0.3")), service("d", asks("10.0.0.9")), service("e", holds("10.0.0.1"), func(s *lb.Service) {
			s.Conditions = []lb.Condition{{Type: lb.ConditionAssigned, Reason: lb.ReasonDuplicate,
				Message: "10.0.0.1 is held by a Service of another namespace as well"}}
		}),
		in("secret", "knows", asks("10.0.0.1"))} {
		do(w)
	}
	w.settle(t, false)
	for k, s := range w.services {
		message := s.Conditions[0].Message
		if k.Namespace == "default" && (s.Conditions[0].Status || strings.Contains(message, "secret") ||
			!strings.Contains(message, "of another namespace")) {
			t.Errorf("%s: %q", k, message)
		}
		if want := "asks for 10.0.0.1, which Service secret/held holds"; k.Name == "knows" && message != want {
			t.Errorf("%s: %q, want %q", k, message, want)
		}
	}
}

func TestContract11SharingStories(t *testing.T) {
	for _, s := range slices.Concat(bothFamilies(shareStories), restoredStories, shareDualStories) {
		for _, duplicated := range []bool{false, true} {
			for _, lagging := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s/duplicated=%v/lagging=%v", s.name, duplicated, lagging), func(t *testing.T) {
					tell(t, s, duplicated, lagging)
				})
			}
		}
	}
}

// TestContract11WhoWasFirst has conditions say which Service held a shared address first, also if
// an older one joins, and whatever else it does.
func TestContract11WhoWasFirst(t *testing.T) {
	w := newWorld(Config{})
	says := func(step string, want map[string]string) {
		t.Helper()
		w.settle(t, true)
		for name, text := range want {
			if got := w.services[key(name)].Conditions[0].Message; got != text {
				t.Errorf("%s: %s: %q, want %q", step, name, got, text)
			}
		}
	}
	for _, do := range []change{newPool("p", "10.0.0.0/30"), service("old", kind(lb.ClusterIP), shares("k", 81)),
		service("first", shares("k", 80))} {
		do(w)
	}
	says("alone", map[string]string{"first": `10.0.0.0 from pool p (shared by key "k" on 80/TCP)`})
	service("old", kind(lb.LoadBalancer))(w)
	joined := map[string]string{"first": `10.0.0.0 from pool p (shared by key "k" on 80/TCP)`,
		"old": `10.0.0.0 from pool p (shared by key "k" on 81/TCP; 10.0.0.0 after default/first)`}
	says("an older one joins", joined)
	service("old", asksPool(`nope (shared by key "k" on 80/TCP)`))(w)
	says(
		"asks for nonsense", map[string]string{"old": `asks for pool "nope (shared by key \"k\" on 80/TCP)", which does not ` +
			`exist; keeps 10.0.0.0 (shared by key "k" on 81/TCP; 10.0.0.0 after default/first)`})
	service("old", asksPool(""))(w)
	service("first", shares("k", 82))(w)
	joined["first"] = `10.0.0.0 from pool p (shared by key "k" on 82/TCP)`
	says("the first changes its port", joined)
	service("old", shares("k", 82))(w)
	says("a conflict", map[string]string{"first": joined["first"], "old": "10.0.0.0 is held by Service default/first as " +
		"well, which comes first, and both have port 82/TCP; undo the change, ask for another address, or delete and " +
		"create this Service"})
	noService("first")(w)
	says("the first goes", map[string]string{"old": `10.0.0.0 from pool p (shared by key "k" on 82/TCP)`})
}

// TestContract11TermsAreBounded has a Service with all that it can have share its address.
func TestContract11TermsAreBounded(t *testing.T) {
	s := lb.Service{Request: lb.Request{Share: strings.Repeat("k", 10_000), Selector: strings.Repeat("s", 10_000)},
		ExternalPolicy: lb.Local}
	for i := range 2000 {
		s.Ports = append(s.Ports, lb.ServicePort{Protocol: lb.TCP, Port: uint16(i + 1)})
	}
	terms := lb.SharingTerms(&s)
	if len(terms) > 500 {
		t.Errorf("%d characters", len(terms))
	}
	s.Ports[1999].Port = 3000
	if lb.SharingTerms(&s) == terms {
		t.Error("another port has the same terms")
	}
}

// Services that wait search again when anybody's Service ends. Those that look for an address to share do not
// look again at addresses where nothing has changed: one tenant's many, or large, Services would have everybody
// wait for addresses.
func TestContract11FruitlessSearchesAreNotRepeated(t *testing.T) {
	const held, waiting = 100, 20
	w := newWorld(Config{})
	newPool("full", "10.0.0.0-10.0.0.99")(w)
	newPool("other", "10.1.0.0/24")(w)
	for i := range held + waiting {
		service(fmt.Sprint(i), shares("k", 80), asksPool("full"))(w)
	}
	service("bystander", asksPool("other"))(w)
	book := NewBook(Config{}, 0)
	book.SetPools(w.pools, nil)
	for _, s := range w.services {
		book.Set(s, Pending{}, w.now)
	}
	if got := book.Plan(w.now).Pools["full"].Families[lb.IPv4].Assigned; got != held {
		t.Fatalf("%d addresses are held", got)
	}
	s := w.services[key("bystander")]
	allocations := testing.AllocsPerRun(5, func() {
		book.Delete(s.Key, w.now)
		book.Plan(w.now)
		book.Set(s, Pending{}, w.now)
		book.Plan(w.now)
	})
	// To look whether it may join makes one or two for each address.
	if allocations > held*waiting/4 {
		t.Errorf("%.0f allocations for the end of another Service, with %d that wait and %d addresses", allocations, waiting,
			held)
	}
}

// Of many Services that share an address the first ends, and each that is the first then: the others' conditions stay
// as they are, but for that of the next. Who comes back comes last.
func TestContract11TheEndOfTheFirstConcernsTheNext(t *testing.T) {
	w := newWorld(Config{})
	newPool("p", "10.0.0.0/30")(w)
	sharer := func(i int) change {
		return service(fmt.Sprint("s", i), shares("k", uint16(80+i)))
	}
	for i := range 20 {
		sharer(i)(w)
	}
	w.settle(t, false)
	for i := range 18 {
		before := maps.Clone(w.services)
		noService(fmt.Sprint("s", i))(w)
		w.settle(t, false)
		var changed []string
		for k, s := range w.services {
			if !slices.Equal(s.Conditions, before[k].Conditions) {
				changed = append(changed, k.Name)
			}
		}
		if want := fmt.Sprint("s", i+1); !slices.Equal(changed, []string{want}) {
			t.Fatalf("after the end of s%d %v changed, want %s", i, changed, want)
		}
		if i%5 == 0 {
			sharer(i)(w)
			w.settle(t, false)
			first := w.book.first(netip.MustParseAddr("10.0.0.0"))
			if want := fmt.Sprint("s", i+1); first.Key.Name != want {
				t.Fatalf("the first is %s after s%d came back, want %s", first.Key, i, want)
			}
		}
	}
}
