package plan

import (
	"fmt"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
)

// A tenant with a quota of one address creates and deletes Services, or has one Service ask for one address
// after the other. What is kept for it leaves the pool's other addresses to others.
func TestContract11QuarantineKeepsToTheQuota(t *testing.T) {
	for _, churn := range []struct {
		name  string
		quota int
		do    func(i int) []change
	}{
		{"Services come and go", 1, func(i int) []change {
			return []change{service(fmt.Sprint("s", i)), noService(fmt.Sprint("s", i-1))}
		}},
		{"a Service asks for one after the other", 2, func(i int) []change {
			return []change{service("a", asks(fmt.Sprint("10.0.0.", i%16)))}
		}},
	} {
		for _, quarantine := range []time.Duration{time.Minute, -1} {
			w := newWorld(Config{})
			newPool("p", "10.0.0.0/28")(w)
			edit("p", func(p *lb.Pool) { p.PerNamespace, p.Quarantine = churn.quota, quarantine })(w)
			for i := range 40 {
				for _, do := range churn.do(i) {
					do(w)
				}
				pass(time.Second)(w)
				if p := w.settle(t, false).Pools["p"].Families[lb.IPv4]; p.Busy > churn.quota+1 {
					t.Fatalf("%s, kept for %s: %d addresses are in use or kept after %d steps, with a quota of %d", churn.name,
						quarantine, p.Busy, i+1, churn.quota)
				}
			}
		}
	}
}
