package plan

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/labels"

	"github.com/landfall-lb/landfall/internal/lb"
)

// edit changes a pool that is there.
func edit(name string, f func(*lb.Pool)) change {
	return func(w *world) {
		p := w.pools[name]
		f(&p)
		p.Generation++
		w.pools[name] = p
	}
}

func parsed(written string) lb.Range {
	r, err := lb.ParseRange(written)
	if err != nil {
		panic(err)
	}
	return r
}

func labelled(set labels.Set) func(*lb.Service) { return func(s *lb.Service) { s.Labels = set } }

func node(name, addr string) change {
	return func(w *world) {
		w.nodes[name] = lb.Node{Name: name, Addresses: []netip.Addr{netip.MustParseAddr(addr)}}
	}
}

func namespace(set labels.Set) change {
	return func(w *world) { w.namespaces["default"] = lb.Namespace{Name: "default", Labels: set} }
}

func request(f func(*lb.Request)) func(*lb.Service) { return func(s *lb.Service) { f(&s.Request) } }

var disagrees = request(func(r *lb.Request) { r.Disagreement = "one is 1 and another is 2" })

func selector(s string) labels.Selector {
	parsed, err := labels.Parse(s)
	if err != nil {
		panic(err)
	}
	return parsed
}

var ruleStories = []story{
	{name: "pools by priority, namespace and labels", steps: []step{
		{name: "priority before age, zero last, general after those", do: []change{
			newPool("general", "10.0.0.0/32"), newPool("last", "10.1.0.0/32"), newPool("second", "10.2.0.0/32"),
			newPool("first", "10.3.0.0/32"),
			edit("last", func(p *lb.Pool) { p.Allocation = &lb.Allocation{} }),
			edit("second", func(p *lb.Pool) { p.Allocation = &lb.Allocation{Priority: 20} }),
			edit("first", func(p *lb.Pool) { p.Allocation = &lb.Allocation{Priority: 10} }),
			service("a"), service("b"), service("c"), service("d")},
			want: map[string]string{"a": "10.3.0.0 Assigned", "b": "10.2.0.0 Assigned", "c": "10.1.0.0 Assigned",
				"d": "10.0.0.0 Assigned"}},
		{name: "for others: nobody loses, newcomers go elsewhere, asking does not help", do: []change{
			edit("first", func(p *lb.Pool) {
				p.Ranges, p.Allocation.Namespaces = []lb.Range{parsed("10.3.0.0/24")}, []string{"other"}
			}),
			service("e"), service("f", asksPool("first")), service("g", asks("10.3.0.9"))},
			want: map[string]string{"e": "- PoolExhausted", "f": "- PoolNotAllowed", "g": "- PoolNotAllowed"}},
		{name: "the namespace is labelled", do: []change{
			edit("first", func(p *lb.Pool) { p.Allocation.NamespaceSelectors = []labels.Selector{selector("team=x")} }),
			namespace(labels.Set{"team": "x"})},
			want: map[string]string{"e": "10.3.0.1 Assigned", "f": "10.3.0.2 Assigned", "g": "10.3.0.9 Assigned"}},
		{name: "and only some Services", do: []change{
			edit("first", func(p *lb.Pool) {
				p.Allocation.ServiceSelectors = []labels.Selector{selector("tier=gold"), selector("tier=silver")}
			}), service("h", labelled(labels.Set{"tier": "silver"})), service("i", labelled(labels.Set{"tier": "lead"}))},
			want: map[string]string{"h": "10.3.0.3 Assigned", "i": "- PoolExhausted"}},
	}},
	{name: "only pools for others", steps: []step{
		{name: "says so", do: []change{newPool("p", "10.0.0.0/24"),
			edit("p", func(p *lb.Pool) { p.Allocation = &lb.Allocation{Namespaces: []string{"other"}} }), service("a")},
			want: map[string]string{"a": "- NoPool"}},
	}},
	{name: "what is never handed out", steps: []step{
		{name: "excluded, of a node, buggy", do: []change{newPool("p", "10.0.0.254-10.0.1.4"),
			edit("p", func(p *lb.Pool) { p.AvoidBuggy, p.Excluded = true, []lb.Range{parsed("10.0.1.1-10.0.1.2")} }),
			node("n1", "10.0.1.3"),
			service("a"), service("b"), service("c"), service("d", asks("10.0.1.0")), service("e", asks("10.0.1.1")),
			service("f", asks("10.0.1.3"))},
			want: map[string]string{"a": "10.0.0.254 Assigned", "b": "10.0.1.4 Assigned", "c": "- PoolExhausted",
				"d": "- AddressExcluded", "e": "- AddressExcluded", "f": "- AddressExcluded"},
			pools: map[string]string{"p": "Ready 2/0"}},
		{name: "a holder keeps what is excluded later",
			do:    []change{edit("p", func(p *lb.Pool) { p.Excluded = append(p.Excluded, parsed("10.0.0.254/32")) })},
			pools: map[string]string{"p": "Ready 2/0"}},
		{name: "the node goes", do: []change{func(w *world) { delete(w.nodes, "n1") }},
			want:  map[string]string{"c": "10.0.1.3 Assigned", "f": "- AddressTaken"},
			pools: map[string]string{"p": "Ready 3/0"}},
	}},
	{name: "the gateway", config: Config{Never: []lb.Range{parsed("10.0.0.1/32")}}, steps: []step{
		{name: "is skipped", do: []change{newPool("p", "10.0.0.1-10.0.0.2"), service("a"), service("b", asks("10.0.0.1"))},
			want: map[string]string{"a": "10.0.0.2 Assigned", "b": "- AddressExcluded"}},
	}},
	{name: "more at once than the quota", steps: []step{
		{name: "three of two", do: []change{newPool("p", "10.0.0.0/24"), edit("p", func(p *lb.Pool) { p.PerNamespace = 2 }),
			service("a", request(func(r *lb.Request) { r.PerFamily = "3" }))},
			want: map[string]string{"a": "- QuotaExceeded"}},
		{name: "by name", do: []change{
			service("a", asks("10.0.0.1", "10.0.0.2", "10.0.0.3")),
			service("b", asks("10.0.0.8"), request(func(r *lb.Request) { r.PerFamily = "3" })),
			service("c", asks("10.0.0.5", "10.0.0.6"), request(func(r *lb.Request) { r.PerFamily = "2" }))},
			want: map[string]string{"a": "- QuotaExceeded", "b": "- QuotaExceeded", "c": "10.0.0.5,10.0.0.6 Assigned"}},
		{name: "one has gone: another one, but not two", do: []change{service("c", asks("10.0.0.5"),
			request(func(r *lb.Request) { r.PerFamily = "1" })), service("a", asks("10.0.0.1", "10.0.0.2"),
			request(func(r *lb.Request) { r.PerFamily = "2" }))},
			moves: []string{"c"}, want: map[string]string{"a": "- QuotaExceeded", "c": "10.0.0.5 Assigned"}},
		{name: "what a Service of the namespace has already costs nothing", do: []change{service("c", shares("k", 80)),
			service("d", asks("10.0.0.5", "10.0.0.7"), shares("k", 81),
				request(func(r *lb.Request) { r.PerFamily = "2" }))},
			want: map[string]string{"d": "10.0.0.5,10.0.0.7 Assigned"}},
		{name: "over IPv6", do: []change{newPool("q", "fd00::/120"), edit("q", func(p *lb.Pool) { p.PerNamespace = 1 }),
			service("e", families(lb.SingleStack, lb.IPv6), asks("fd00::1", "fd00::2"),
				request(func(r *lb.Request) { r.PerFamily = "2" })),
			service("f", families(lb.SingleStack, lb.IPv6), asks("fd00::2"))},
			want: map[string]string{"e": "- QuotaExceeded", "f": "fd00::2 Assigned"}},
	}},
	{name: "a quota for each namespace", steps: []step{
		{name: "two", do: []change{newPool("p", "10.0.0.0/24"), edit("p", func(p *lb.Pool) { p.PerNamespace = 2 }),
			service("a"), service("b"), service("c"), service("d", asks("10.0.0.9"))},
			want: map[string]string{"a": "10.0.0.0 Assigned", "b": "10.0.0.1 Assigned", "c": "- QuotaExceeded",
				"d": "- QuotaExceeded"}},
		{name: "one less", do: []change{noService("a")}, want: map[string]string{"a": "gone", "c": "10.0.0.0 Assigned"}},
		{name: "lower: nobody loses", do: []change{edit("p", func(p *lb.Pool) { p.PerNamespace = 1 })}},
		{name: "sharing costs nothing", do: []change{service("b", shares("k", 80)), service("d", asks(), shares("k", 81))},
			want: map[string]string{"d": "10.0.0.1 Assigned"}},
	}},
	{name: "reservations", steps: []step{
		{name: "for a Service and for a namespace", do: []change{newPool("p", "10.0.0.0/30"), edit("p", func(p *lb.Pool) {
			p.Reservations = []lb.Reservation{{Range: parsed("10.0.0.0/32"), Namespace: "other"},
				{Range: parsed("10.0.0.1/32"), Namespace: "default", Name: "mine"}}
		}), service("a"), service("b"), service("c"), service("d", asks("10.0.0.1")), service("e", asks("10.0.0.0"))},
			want: map[string]string{"a": "10.0.0.2 Assigned", "b": "10.0.0.3 Assigned", "c": "- PoolExhausted",
				"d": "- AddressReserved", "e": "- AddressReserved"},
			pools: map[string]string{"p": "Ready 2/0"}},
		{name: "comes", do: []change{service("mine")},
			want:  map[string]string{"mine": "10.0.0.1 Assigned", "d": "- AddressTaken"},
			pools: map[string]string{"p": "Ready 3/0"}},
		{name: "goes", do: []change{noService("mine")}, want: map[string]string{"mine": "gone", "d": "- AddressReserved"},
			pools: map[string]string{"p": "Ready 2/0"}},
		{name: "comes again", do: []change{service("mine")},
			want:  map[string]string{"mine": "10.0.0.1 Assigned", "d": "- AddressTaken"},
			pools: map[string]string{"p": "Ready 3/0"}},
	}},
	{name: "a reserved range", steps: []step{
		{name: "serves its own, the lowest first", do: []change{newPool("p", "10.0.0.0/29"), edit("p", func(p *lb.Pool) {
			p.Reservations = []lb.Reservation{{Range: parsed("10.0.0.0/30"), Namespace: "default"},
				{Range: parsed("10.0.0.2/31"), Namespace: "default", Name: "mine"}}
			p.Excluded = []lb.Range{parsed("10.0.0.1/32")}
		}), service("a"), service("mine"), service("b"), service("c")},
			want: map[string]string{"a": "10.0.0.0 Assigned", "mine": "10.0.0.2 Assigned", "b": "10.0.0.4 Assigned",
				"c": "10.0.0.5 Assigned"}},
		{name: "what is freed is found again", do: []change{noService("a"), noService("b"), service("d")},
			want: map[string]string{"a": "gone", "b": "gone", "d": "10.0.0.0 Assigned"}},
		{name: "what is kept is found first", do: []change{edit("p", func(p *lb.Pool) { p.Quarantine = time.Minute }),
			noService("mine")}, want: map[string]string{"mine": "gone"}},
		{name: "comes again", do: []change{service("mine")}, want: map[string]string{"mine": "10.0.0.2 Assigned"}},
	}},
	// More addresses than anybody could look at one by one, none of which is to be had.
	{name: "reserved ranges without an address to give", steps: []step{
		{name: "excluded, and outside of the pool",
			do: []change{newPool("p", "fd00:0:0:1::/64", "fd00:0:0:2::/127"), edit("p", func(p *lb.Pool) {
				p.Reservations = []lb.Reservation{{Range: parsed("fd00:0:0:1::/64"), Namespace: "default"},
					{Range: parsed("fd00:0:0:3::/64"), Namespace: "default"}}
				p.Excluded = []lb.Range{parsed("fd00:0:0:1::/64")}
			}), service("a", families(lb.SingleStack, lb.IPv6))}, want: map[string]string{"a": "fd00:0:0:2:: Assigned"}},
	}},
	{name: "quarantine", steps: []step{
		{name: "two hold", do: []change{newPool("p", "10.0.0.0/31"),
			edit("p", func(p *lb.Pool) { p.Quarantine = time.Minute }), service("a"), service("b")},
			want: map[string]string{"a": "10.0.0.0 Assigned", "b": "10.0.0.1 Assigned"}},
		{name: "freed, but not for strangers", do: []change{noService("a"), service("c"),
			service("d", asks("10.0.0.0"), func(s *lb.Service) { s.Type = lb.ClusterIP })},
			want: map[string]string{"a": "gone", "c": "- PoolExhausted", "d": "-"}, pools: map[string]string{"p": "Ready 1/0"}},
		{name: "its holder comes back", do: []change{service("a")}, want: map[string]string{"a": "10.0.0.0 Assigned"},
			pools: map[string]string{"p": "Ready 2/0"}},
		{name: "freed again", do: []change{noService("a")}, want: map[string]string{"a": "gone"},
			pools: map[string]string{"p": "Ready 1/0"}},
		{name: "the time is over", do: []change{pass(time.Minute)}, want: map[string]string{"c": "10.0.0.0 Assigned"},
			pools: map[string]string{"p": "Ready 2/0"}},
		{name: "for ever", do: []change{edit("p", func(p *lb.Pool) { p.Quarantine = -1 }), noService("c"), service("e")},
			want: map[string]string{"c": "gone", "e": "- PoolExhausted"}, pools: map[string]string{"p": "Ready 1/0"}},
		{name: "is for ever", do: []change{pass(1000 * time.Hour)}},
		{name: "until somebody of its namespace asks for it", do: []change{service("e", asks("10.0.0.0"))},
			want: map[string]string{"e": "10.0.0.0 Assigned"}, pools: map[string]string{"p": "Ready 2/0"}},
		{name: "no more quarantine", do: []change{noService("e"), edit("p", func(p *lb.Pool) { p.Quarantine = 0 }),
			service("f")},
			want: map[string]string{"e": "gone", "f": "10.0.0.0 Assigned"}},
	}},
	{name: "what is kept counts towards the quota", steps: []step{
		{name: "one", do: []change{newPool("p", "10.0.0.0/30"), edit("p", func(p *lb.Pool) {
			p.Quarantine, p.PerNamespace = time.Minute, 1
		}), service("a")}, want: map[string]string{"a": "10.0.0.0 Assigned"}},
		{name: "is kept", do: []change{noService("a")}, want: map[string]string{"a": "gone"},
			pools: map[string]string{"p": "Ready 0/3"}},
		{name: "comes back", do: []change{service("a")}, want: map[string]string{"a": "10.0.0.0 Assigned"},
			pools: map[string]string{"p": "Ready 1/3"}},
		{name: "goes again", do: []change{pass(time.Second), noService("a")}, want: map[string]string{"a": "gone"},
			pools: map[string]string{"p": "Ready 0/3"}},
		{name: "another takes its room", do: []change{service("b")}, want: map[string]string{"b": "10.0.0.1 Assigned"},
			pools: map[string]string{"p": "Ready 1/3"}},
		{name: "what was freed last is kept", do: []change{pass(time.Second), noService("b")},
			want: map[string]string{"b": "gone"}, pools: map[string]string{"p": "Ready 0/3"}},
		{name: "not for the first", do: []change{service("a")}, want: map[string]string{"a": "10.0.0.0 Assigned"},
			pools: map[string]string{"p": "Ready 1/3"}},
		{name: "a larger quota", do: []change{edit("p", func(p *lb.Pool) { p.PerNamespace = 2 }), service("c")},
			want: map[string]string{"c": "10.0.0.1 Assigned"}, pools: map[string]string{"p": "Ready 2/2"}},
		{name: "has room for two", do: []change{pass(time.Second), noService("a"), noService("c")},
			want: map[string]string{"a": "gone", "c": "gone"}, pools: map[string]string{"p": "Ready 0/2"}},
		{name: "a smaller one for the newest", do: []change{edit("p", func(p *lb.Pool) { p.PerNamespace = 1 })},
			pools: map[string]string{"p": "Ready 0/3"}},
	}},
	{name: "sharing by key", steps: []step{
		{name: "together where ports allow it", do: []change{newPool("p", "10.0.0.0/24"), service("a", shares("k", 80)),
			service("b", shares("k", 81)),
			service("c", shares("k", 80)), service("d", shares("other", 82)), service("e"),
			service("f", shares("", 83), asks("10.0.0.0"))},
			want: map[string]string{"a": "10.0.0.0 Assigned", "b": "10.0.0.0 Assigned", "c": "10.0.0.1 Assigned",
				"d": "10.0.0.2 Assigned",
				"e": "10.0.0.3 Assigned", "f": "- AddressTaken"},
			pools: map[string]string{"p": "Ready 4/252"}},
		{name: "by name too", do: []change{service("g", shares("k", 84), asks("10.0.0.1")),
			service("h", shares("k", 80), asks("10.0.0.0")), service("i", shares("q", 85), asks("10.0.0.0"))},
			want: map[string]string{"g": "10.0.0.1 Assigned", "h": "- SharingRefused", "i": "- SharingRefused"}},
		{name: "Local beside Cluster, and Local beside Local only with one selector", do: []change{
			service("l", shares("l", 80), local("app=x")), service("m", shares("l", 81), local("app=x")),
			service("n", shares("l", 82), local("app=y")),
			service("o", shares("l", 83)), service("q", shares("l", 84), local(""))},
			want: map[string]string{"l": "10.0.0.4 Assigned", "m": "10.0.0.4 Assigned", "n": "10.0.0.5 Assigned",
				"o": "10.0.0.4 Assigned", "q": "10.0.0.6 Assigned"},
			pools: map[string]string{"p": "Ready 7/249"}},
		{name: "one gives its port up", do: []change{service("a", shares("k", 90))},
			want: map[string]string{"h": "10.0.0.0 Assigned"}},
		{name: "ports that collide later: the one that changed is told, nobody moves",
			do: []change{service("a", shares("k", 81))}, want: map[string]string{"a": "10.0.0.0 Duplicate"}},
		{name: "the last one leaves", do: []change{noService("l"), noService("m"), noService("o"),
			service("r", shares("l", 83))},
			want:  map[string]string{"l": "gone", "m": "gone", "o": "gone", "r": "10.0.0.5 Assigned"},
			pools: map[string]string{"p": "Ready 6/250"}},
	}},
	{name: "told to move", config: Config{MoveOutside: true, MoveDuplicates: true}, steps: []step{
		{name: "two hold one", do: []change{newPool("p", "10.0.0.0/24"), service("old", holds("10.0.0.4")),
			service("young", holds("10.0.0.4"))}, moves: []string{"young"},
			want: map[string]string{"old": "10.0.0.4 Assigned", "young": "10.0.0.0 Assigned"}},
		{name: "the pool moves", do: []change{newPool("p", "10.0.1.0/24")}, moves: []string{"old", "young"},
			want: map[string]string{"old": "10.0.1.0 Assigned", "young": "10.0.1.1 Assigned"}},
		{name: "nothing to move to: keeps", do: []change{noPool("p"),
			service("stays", holds("10.9.9.9"), marked, request(func(r *lb.Request) { r.WhenOutside = "keep" }))},
			want: map[string]string{"old": "10.0.1.0 NoPool", "young": "10.0.1.1 NoPool", "stays": "10.9.9.9 HeldOutside"}},
	}},
	{name: "told to move by annotation", steps: []step{
		{name: "one of two", do: []change{newPool("p", "10.0.0.0/24"), service("a", holds("10.9.0.1"), marked),
			service("b", holds("10.9.0.2"), marked, request(func(r *lb.Request) { r.WhenOutside = "move" }))},
			moves: []string{"b"}, want: map[string]string{"a": "10.9.0.1 HeldOutside", "b": "10.0.0.0 Assigned"}},
		{name: "nonsense", do: []change{service("a", request(func(r *lb.Request) { r.WhenOutside = "go" }))},
			want: map[string]string{"a": "10.9.0.1 RequestInvalid"}},
	}},
	{name: "several addresses of a family", steps: []step{
		{name: "two, all or nothing", do: []change{newPool("p", "10.0.0.0-10.0.0.3"),
			service("a", request(func(r *lb.Request) { r.PerFamily = "2" })), service("b"),
			service("c", request(func(r *lb.Request) { r.PerFamily = "2" })),
			service("d", request(func(r *lb.Request) { r.PerFamily = "0" })),
			service("e", asks("10.0.0.3", "10.0.0.2"))},
			want: map[string]string{"a": "10.0.0.0,10.0.0.1 Assigned", "b": "10.0.0.2 Assigned", "c": "- PoolExhausted",
				"d": "- RequestInvalid", "e": "- AddressInvalid"}},
		{name: "one more", do: []change{service("a", request(func(r *lb.Request) { r.PerFamily = "3" }))},
			want: map[string]string{"a": "10.0.0.0,10.0.0.1,10.0.0.3 Assigned"}},
		{name: "fewer on request", do: []change{service("a", request(func(r *lb.Request) { r.PerFamily = "1" }))},
			moves: []string{"a"},
			want:  map[string]string{"a": "10.0.0.0 Assigned", "c": "10.0.0.1,10.0.0.3 Assigned"}},
		{name: "by name", do: []change{newPool("p", "10.0.0.0-10.0.0.9"),
			service("f", asks("10.0.0.9", "10.0.0.8"), request(func(r *lb.Request) { r.PerFamily = "3" }))},
			want: map[string]string{"f": "10.0.0.9,10.0.0.8,10.0.0.4 Assigned"}},
	}},
	{name: "requests that disagree", steps: []step{
		{name: "a newcomer gets nothing, a holder keeps what it has", do: []change{newPool("p", "10.0.0.0/24"), service("a"),
			service("a", asks("10.0.0.7"), disagrees), service("b", asks("10.0.0.8"), disagrees)},
			want: map[string]string{"a": "- RequestsDisagree", "b": "- RequestsDisagree"}},
		{name: "agree", do: []change{service("a", request(func(r *lb.Request) { r.Disagreement = "" }))},
			want: map[string]string{"a": "10.0.0.7 Assigned"}},
		{name: "again not", do: []change{service("a", disagrees)}, want: map[string]string{"a": "10.0.0.7 RequestsDisagree"}},
	}},
	{name: "ipMode", steps: []step{
		{name: "nonsense", do: []change{newPool("p", "10.0.0.0/24"),
			service("a", request(func(r *lb.Request) { r.Mode = "DSR" }))}, want: map[string]string{"a": "- RequestInvalid"}},
		{name: "Proxy", do: []change{service("a", request(func(r *lb.Request) { r.Mode = "Proxy" }))},
			want: map[string]string{"a": "10.0.0.0 Assigned"}},
	}},
}

func TestContract8RuleStories(t *testing.T) {
	for _, s := range ruleStories {
		for _, lagging := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/lagging=%v", s.name, lagging), func(t *testing.T) { tell(t, s, false, lagging) })
		}
	}
}
