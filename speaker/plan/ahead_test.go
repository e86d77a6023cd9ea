package plan

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/labels"

	"github.com/landfall-lb/landfall/internal/lb"
)

// nextOf is a pool that hands out two addresses next, the second of which is on no subnet of the node.
func nextOf(f *Facts) {
	pool := f.Pools["lan"]
	pool.ProbeAhead = 2
	pool.Status.Next = []lb.Range{
		{From: netip.MustParseAddr("172.26.236.181"), To: netip.MustParseAddr("172.26.236.182")},
		{From: netip.MustParseAddr("172.26.99.1"), To: netip.MustParseAddr("172.26.99.1")},
	}
	f.Pools = map[string]lb.Pool{"lan": pool}
	f.Live = []string{w177, w178, w179}
}

func aheadFacts(self string, tweak ...func(*Facts)) Facts {
	f := facts(self)
	for name, pool := range f.Pools {
		delete(f.Pools, name)
		pool.Name = "lan"
		f.Pools["lan"] = pool
		break
	}
	nextOf(&f)
	for _, t := range tweak {
		t(&f)
	}
	return f
}

func TestWhatIsProbedAhead(t *testing.T) {
	both := "172.26.236.181 172.26.236.182"
	ad := func(change func(*lb.L2Advertisement)) func(*Facts) {
		return func(f *Facts) {
			one := lb.L2Advertisement{Name: "one"}
			change(&one)
			f.Advertisements = map[string]lb.L2Advertisement{"one": one}
		}
	}
	for _, c := range []struct {
		name  string
		facts func(*Facts)
		held  string
		most  int
		want  string
	}{
		{name: "what is on a subnet of the node", want: both},
		{name: "one of them is held", held: "172.26.236.181", want: "172.26.236.182"},
		{name: "not more than there is room for", most: 1, want: "172.26.236.181"},
		{name: "one of them seldom", facts: often(1), want: "172.26.236.181 (172.26.236.182)"},
		{name: "no room for those of this pool", facts: func(f *Facts) {
			often(1)(f)
			withPool(f, "another", "172.26.236.191")
		}, most: 2, want: "172.26.236.181 172.26.236.191"},
		{name: "of another family", facts: func(f *Facts) {
			often(1)(f)
			f.Interfaces[0].Addresses = append(f.Interfaces[0].Addresses, netip.MustParsePrefix("2001:db8::178/64"))
			pool := f.Pools["lan"]
			pool.Status.Next = append(pool.Status.Next, lb.Range{From: netip.MustParseAddr("2001:db8::1"),
				To: netip.MustParseAddr("2001:db8::1")})
			f.Pools["lan"] = pool
		}, want: "172.26.236.181 (172.26.236.182) 2001:db8::1"},
		{name: "the pool says so", facts: func(f *Facts) {
			pool := f.Pools["lan"]
			pool.ProbeAhead = 0
			f.Pools["lan"] = pool
		}},
		{name: "no advertisement", facts: func(f *Facts) { f.Advertisements = nil }},
		{name: "for some Services, maybe for the next one", facts: ad(func(a *lb.L2Advertisement) {
			a.ServiceSelectors = []labels.Selector{labels.Nothing()}
		}), want: both},
		{name: "of another pool", facts: ad(func(a *lb.L2Advertisement) { a.Pools = []string{"other"} })},
		{name: "for other nodes", facts: ad(func(a *lb.L2Advertisement) {
			a.NodeSelectors = []labels.Selector{labels.Nothing()}
		})},
		{name: "on another interface", facts: ad(func(a *lb.L2Advertisement) { a.Interfaces = []string{"eth9"} })},
		{name: "has not met the others", facts: func(f *Facts) { f.Joined = false }},
		{name: "may have been cut off", facts: func(f *Facts) { f.Estranged = true }},
		{name: "is leaving", facts: func(f *Facts) { f.Node.Leaving = lb.ReasonNodeDrained }},
		{name: "is stopping", facts: func(f *Facts) { f.Stopping = true }},
		{name: "has no Node", facts: func(f *Facts) { f.Node = nil }},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := aheadFacts(w178)
			if c.facts != nil {
				c.facts(&f)
			}
			most := c.most
			if most == 0 {
				most = MaxAhead
			}
			held := func(addr netip.Addr) bool { return addr.String() == c.held }
			got := Ahead(f, held, most, nil)
			if text := listed(got); text != c.want {
				t.Errorf("%s, want %s", text, c.want)
			}
			again := maps.Clone(got)
			for addr := range again { // they only listen for it: it was handed out, and is free again
				again[addr] = Scout{Rank: -1, On: again[addr].On}
				break
			}
			if again = Ahead(f, held, most, again); !maps.EqualFunc(got, again, Scout.Equal) {
				t.Errorf("%v, and with what was known %v", got, again)
			}
		})
	}
}

// A node of another rack looks at all addresses that come next with each new Service. It words no refusal for any.
func TestAddressesThatANodeDoesNotProbeCostLittle(t *testing.T) {
	const many = 512
	f := aheadFacts(w178)
	pool := f.Pools["lan"]
	pool.Status.Next = []lb.Range{{From: netip.MustParseAddr("172.26.99.0"), To: netip.MustParseAddr("172.26.100.255")}}
	f.Pools["lan"] = pool
	none := func(netip.Addr) bool { return false }
	if got := testing.AllocsPerRun(10, func() { Ahead(f, none, MaxAhead, nil) }); got >= many {
		t.Errorf("%v allocations for %d addresses on no subnet of the node", got, many)
	}
}

// often has the pool probe only the first addresses of each family often.
func often(n int) func(*Facts) {
	return func(f *Facts) {
		pool := f.Pools["lan"]
		pool.ProbeAhead = n
		f.Pools["lan"] = pool
	}
}

// withPool adds a pool that hands out one address next.
func withPool(f *Facts, name, next string) {
	addr := netip.MustParseAddr(next)
	added := pool(name, next, next)
	added.ProbeAhead, added.Status.Next = 1, []lb.Range{{From: addr, To: addr}}
	f.Pools[name] = added
}

// listed names the addresses in order, those that are probed seldom in parentheses.
func listed(scouts map[netip.Addr]Scout) string {
	var list []string
	for _, addr := range slices.SortedFunc(maps.Keys(scouts), netip.Addr.Compare) {
		text := addr.String()
		if scouts[addr].Seldom {
			text = "(" + text + ")"
		}
		list = append(list, text)
	}
	return strings.Join(list, " ")
}

// Each of the nodes has another rank for each address, and the first one is who owns it if all
// deliver it.
func TestRanksOfProbesAhead(t *testing.T) {
	first := map[string]int{}
	for i := range 64 {
		addr := netip.AddrFrom4([4]byte{10, 0, 0, byte(i)})
		nodes, ranks := []string{w177, w178, w179}, map[int]string{}
		for _, node := range nodes {
			ranks[rankOf(addr, node, nodes)] = node
		}
		if len(ranks) != 3 || ranks[0] != Winner(addr, nodes) {
			t.Errorf("%s: %v, the winner is %s", addr, ranks, Winner(addr, nodes))
		}
		first[ranks[0]]++
	}
	for node, n := range first {
		if n < 10 {
			t.Errorf("%s is first for %d of 64 addresses: %s", node, n, fmt.Sprint(first))
		}
	}
}
