package plan

import (
	"math/big"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/labels"

	"github.com/landfall-lb/landfall/internal/lb"
)

// A pool lists many IPv4 addresses that Services get next, and no more IPv6 addresses than it says.
func TestHowManyAddressesAPoolListsAhead(t *testing.T) {
	for _, c := range []struct{ ahead, four, six int64 }{{0, 0, 0}, {16, lb.ManyAhead, 16}, {2000, 2000, 2000}} {
		w := newWorld(Config{})
		newPool("p", "10.0.0.0/16", "2001:db8::/64")(w)
		p := w.pools["p"]
		p.ProbeAhead = int(c.ahead)
		w.pools["p"] = p
		w.book.SetPools(w.pools, nil)
		found := map[lb.Family]*big.Int{lb.IPv4: new(big.Int), lb.IPv6: new(big.Int)}
		for _, r := range w.book.Plan(time.Time{}).Pools["p"].Status.Next {
			found[lb.FamilyOf(r.From)].Add(found[lb.FamilyOf(r.From)], r.Size())
		}
		if four, six := found[lb.IPv4].Int64(), found[lb.IPv6].Int64(); four != c.four || six != c.six {
			t.Errorf("probeAhead %d: %d IPv4 and %d IPv6 addresses, want %d and %d", c.ahead, four, six, c.four, c.six)
		}
	}
}

// A pool whose selectors cannot be read serves nobody, and is not ready. One with others goes on, and says so.
func TestAPoolNamesASelectorThatCannotBeRead(t *testing.T) {
	why := lb.Refuse(lb.ReasonSelectorInvalid, "spec.serviceAllocation.serviceSelectors[0] selects nothing")
	one, bad := []labels.Selector{labels.Everything()}, []labels.Selector{labels.Nothing()}
	for name, c := range map[string]struct {
		allocation lb.Allocation
		ready      bool
	}{
		"Services":                      {lb.Allocation{ServiceSelectors: bad}, false},
		"namespaces":                    {lb.Allocation{NamespaceSelectors: bad}, false},
		"namespaces, and Services well": {lb.Allocation{NamespaceSelectors: bad, ServiceSelectors: one}, false},
		"a namespace by name":           {lb.Allocation{NamespaceSelectors: bad, Namespaces: []string{"a"}}, true},
		"one of two":                    {lb.Allocation{ServiceSelectors: slices.Concat(bad, one)}, true},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(Config{})
			newPool("p", "10.0.0.0/28")(w)
			p := w.pools["p"]
			p.Allocation, p.BadSelector = &c.allocation, why
			w.pools["p"] = p
			w.book.SetPools(w.pools, nil)
			got, reason := w.book.Plan(time.Time{}).Pools["p"].Status.Conditions[0], lb.ReasonPoolReady
			if !c.ready {
				reason = why.Reason
			}
			if got.Status != c.ready || got.Reason != reason || !strings.HasSuffix(got.Message, why.Message) {
				t.Errorf("%+v", got)
			}
		})
	}
}
