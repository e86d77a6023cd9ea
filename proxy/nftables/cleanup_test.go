package nftables

import (
	"testing"

	"github.com/landfall-lb/landfall/e2e/cases"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/seeds"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// Contract clause 6: where kube-proxy serves a node too, our rules come and go without a loss. No
// packet meets a table of which a part is missing.
func TestContract6ComingAndGoingBesideAnother(t *testing.T) {
	w := cases.WorldOf(lb.IPv4)
	s := cases.NewSite(t, w)
	service, config := three(w, plan.Random, 0, "local", "local2", "remote")
	services := map[lb.Key]plan.Service{service.Key: service}
	b := cases.NewBeside(t, s)
	for range seeds.Of(15, 300) {
		a := newTestActor(t, s.Node)
		a.Configure(config)
		a.settle(t, services)
		b.Wait()
		config.DropInvalid = !config.DropInvalid // other rules over these
		a.Configure(config)
		a.settle(t, services)
		b.Wait()
		if err := Cleanup(a.netlink); err != nil {
			t.Fatal(err)
		}
		b.Wait()
	}
	b.WantNoneLost(t)
}
