package iptables

import (
	"maps"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/nstest"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// Whoever looks at any time sees each rule that is right before and after a change, and the kernel
// is never told to remove one.
func TestContract6RightRulesAreNeverRemoved(t *testing.T) {
	ns := nstest.New(t)
	kernel := nsKernel{t, ns, variant(lb.IPv4, "nft")}
	r := rand.New(rand.NewPCG(5, 5))
	steady := map[lb.Key]plan.Service{}
	for n := range 5 {
		s := random(r, n)
		steady[s.Key] = s
	}
	a := newActor(map[lb.Family]Kernel{lb.IPv4: kernel}, seedConfig)
	a.Set(steady)
	if err := settle(a, false); err != nil {
		t.Fatal(err)
	}
	want := strings.Split(strings.TrimSpace(listing(t, kernel)), "\n")

	before := ns.Run(t, "nft", "-a", "list", "ruleset")
	done, watched := make(chan struct{}), sync.WaitGroup{}
	watched.Go(func() {
		looks := 0
		for ; ; looks++ {
			got := listing(t, kernel)
			for _, line := range want {
				if !strings.Contains(got, line+"\n") {
					t.Errorf("look %d: missing %s", looks, line)
				}
			}
			select {
			case <-done:
				t.Logf("looked %d times", looks)
				return
			default:
			}
		}
	})
	for i := range 40 {
		s := random(r, 5+i%3)
		if i%5 == 4 {
			s = plan.Service{Key: s.Key}
		}
		a.Set(plans(s))
		if err := settle(a, i%10 == 9); err != nil {
			t.Error(err)
		}
		if i%10 == 5 { // a restart in between
			a = newActor(map[lb.Family]Kernel{lb.IPv4: kernel}, seedConfig)
			all := plans(s)
			maps.Copy(all, steady)
			a.Set(all)
			if err := settle(a, false); err != nil {
				t.Error(err)
			}
		}
	}
	close(done)
	watched.Wait()
	// A rule that was ever removed and put back would have another handle.
	after := ns.Run(t, "nft", "-a", "list", "ruleset")
	for line := range strings.Lines(before) {
		if strings.Contains(line, "handle") && !strings.Contains(after, line) {
			t.Errorf("removed, or moved: %s", line)
		}
	}
}
