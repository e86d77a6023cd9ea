package plan

import (
	"math/big"
	"testing"
	"time"

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
