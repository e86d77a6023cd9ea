package nftables

import (
	"testing"

	"github.com/landfall-lb/landfall/e2e/cases"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/nstest"
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

// cleanup runs on nodes where the tables are not, or no longer: in iptables mode, and a second time.
func TestEndRelayWithoutTables(t *testing.T) {
	ns := nstest.New(t)
	a := newTestActor(t, ns)
	for _, when := range []string{"before there was a table", "of a table without a relay", "after the table has gone"} {
		if relayed, err := EndRelay(a.netlink); err != nil || len(relayed) > 0 {
			t.Errorf("%s: %v, %v", when, relayed, err)
		}
		if when == "before there was a table" {
			a.settle(t, variety())
		} else if err := Cleanup(a.netlink); err != nil {
			t.Fatal(err)
		}
	}
}
