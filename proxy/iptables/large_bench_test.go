package iptables

import (
	"fmt"
	"maps"
	"syscall"
	"testing"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/nstest"
)

// spent is processor time in milliseconds: of this program, and of iptables-restore in itself and in the kernel.
type spent struct{ own, restore, kernel float64 }

func spentBy() (s spent) {
	var own, children syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &own) // fails for no process of ours
	_ = syscall.Getrusage(syscall.RUSAGE_CHILDREN, &children)
	ms := func(t syscall.Timeval) float64 { return float64(t.Nano()) / 1e6 }
	return spent{ms(own.Utime) + ms(own.Stime), ms(children.Utime), ms(children.Stime)}
}

// BenchmarkLarge measures the processor time of a change of one endpoint: of a large Service, and of a small one
// beside it.
func BenchmarkLarge(b *testing.B) {
	for _, size := range []struct{ ports, endpoints int }{{0, 0}, {10, 64}, {160, 64}, {1, 4000}} {
		for _, kernel := range []string{"none", "nft"} {
			for _, what := range []string{"large", "small"} {
				b.Run(fmt.Sprintf("%s, %d ports, %d endpoints, %s", kernel, size.ports, size.endpoints, what), func(b *testing.B) {
					var k Kernel = &deaf{}
					if kernel != "none" {
						k = nsKernel{b, nstest.New(b), variant(lb.IPv4, kernel)}
					}
					a := newActor(map[lb.Family]Kernel{lb.IPv4: k}, seedConfig)
					a.families[0].batch = 500
					all := many(100, 2)
					if size.ports > 0 {
						maps.Copy(all, plans(largeNumber(0, size.ports, size.endpoints, 0)))
					}
					a.Set(all)
					settled := func() {
						for range 1000 {
							if err := settle(a, false); err == nil && len(a.families[0].Dirty()) == 0 {
								return
							}
						}
						b.Fatal("does not settle")
					}
					settled()
					before := spentBy()
					for i := 0; b.Loop(); i++ {
						if s := simple(7, 2+(i+1)%2); what == "small" {
							a.Set(plans(s))
						} else if size.ports > 0 {
							a.Set(plans(largeNumber(0, size.ports, size.endpoints, i+1)))
						}
						settled()
					}
					after, n := spentBy(), float64(b.N)
					b.ReportMetric((after.own-before.own)/n, "own-ms")
					b.ReportMetric((after.restore-before.restore)/n, "restore-ms")
					b.ReportMetric((after.kernel-before.kernel)/n, "kernel-ms")
				})
			}
		}
	}
}
