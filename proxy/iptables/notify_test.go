package iptables

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/nstest"
	"github.com/landfall-lb/landfall/proxy/dialect"
	"github.com/landfall-lb/landfall/proxy/nfnetlink"
)

// What others change is repaired long before rules are read the next time; what they change
// elsewhere, and what we write ourselves, is no reason to read them.
func TestDriftIsNoticed(t *testing.T) {
	for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		t.Run(string(family), func(t *testing.T) {
			ns := nstest.New(t)
			var w *Watcher
			ns.Do(t, func() (err error) { w, err = NewWatcher(); return err })
			defer w.Close()
			kernel := nsKernel{t, ns, variant(family, "nft").Watched(w)}
			verified := make(chan dialect.Sync, 100)
			a := actorWith(dialect.Deps{
				Verify: time.Hour, Watch: w.Watch, Observe: func(s dialect.Sync) {
					if s.Verified {
						verified <- s
					}
				},
			}, map[lb.Family]Kernel{family: kernel})
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan error)
			go func() { ended <- a.Run(ctx) }()
			defer func() {
				cancel()
				if err := <-ended; err != nil {
					t.Error(err)
				}
			}()
			a.Configure(seedConfig)
			a.set(many(3, 2))
			<-verified // at first it is read
			want := listing(t, kernel)
			program := strings.TrimSuffix(kernel.commands.restore, "-restore")
			for i := range 3 {
				a.set(plans(simple(i, 2)))
				ns.Run(t, program, "-t", "nat", "-N", fmt.Sprint("KUBE-", i))
			}
			if n := len(verified); n != 0 {
				t.Errorf("read %d times for nothing", n)
			}
			for _, harm := range []string{
				"-t nat -F " + chainServices, "-t filter -D FORWARD 1", "-t nat -F", "-t nat -A " + chainMasquerade + " -j RETURN",
			} {
				ns.Run(t, program, strings.Fields(harm)...)
				<-verified
				others := func(s string) string { return strings.Join(without(strings.Split(s, "\n"), "KUBE-"), "\n") }
				for i := 0; i < 100 && others(listing(t, kernel)) != others(want); i++ {
					time.Sleep(20 * time.Millisecond)
				}
				if d := cmp.Diff(others(want), others(listing(t, kernel))); d != "" {
					t.Errorf("after %s (-want +got):\n%s", harm, d)
				}
				for len(verified) > 0 {
					<-verified
				}
			}
		})
	}
}

func without(lines []string, part string) []string {
	var left []string
	for _, line := range lines {
		if !strings.Contains(line, part) {
			left = append(left, line)
		}
	}
	return left
}

func FuzzConcerns(f *testing.F) {
	f.Add(uint16(0xa06), []byte{2, 0, 0, 0, 8, 0, 1, 0, 'n', 'a', 't', 0})
	f.Fuzz(func(t *testing.T, kind uint16, data []byte) {
		if concerns(nfnetlink.Message{Kind: kind, Data: data}) && kind>>8 != 0xa {
			t.Errorf("a message of type %x concerns us", kind)
		}
	})
}
