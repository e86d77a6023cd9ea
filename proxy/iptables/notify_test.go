package iptables

import (
	"bytes"
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

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
			a.Set(many(3, 2))
			<-verified // at first it is read
			want := listing(t, kernel)
			program := strings.TrimSuffix(kernel.commands.restore, "-restore")
			for i := range 3 {
				a.Set(plans(simple(i, 2)))
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
				deadline := time.Now().Add(time.Minute)
				for others(listing(t, kernel)) != others(want) && time.Now().Before(deadline) {
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

// Only a message about our two tables concerns us, and only one that names a chain of ours or a
// built-in one, or none.
func FuzzConcerns(f *testing.F) {
	f.Add(uint16(0xa06), []byte{2, 0, 0, 0, 8, 0, 1, 0, 'n', 'a', 't', 0})
	f.Add(uint16(0xa06), []byte{2, 0, 0, 0, 8, 0, 1, 0, 'n', 'a', 't', 0, 7, 0, 2, 0, 'K', '-', 0, 0})
	f.Fuzz(func(t *testing.T, kind uint16, data []byte) {
		if !concerns(nfnetlink.Message{Kind: kind, Data: data}) {
			return
		}
		if kind>>8 != unix.NFNL_SUBSYS_NFTABLES || len(data) < 4 || data[0] != unix.NFPROTO_IPV4 &&
			data[0] != unix.NFPROTO_IPV6 {
			t.Errorf("a message of type %x and family %v concerns us", kind, data[:min(1, len(data))])
		}
		if !bytes.Contains(data, []byte("nat")) && !bytes.Contains(data, []byte("filter")) {
			t.Errorf("a message about another table concerns us: %q", data)
		}
	})
}

// TestConcerns checks which events of the kernel are a reason to read the rules.
func TestConcerns(t *testing.T) {
	attribute := func(kind byte, text string) []byte {
		b := append([]byte{byte(5 + len(text)), 0, kind, 0}, text+"\x00"...)
		return append(b, make([]byte, -len(b)&3)...)
	}
	for _, test := range []struct {
		kind         byte
		family       byte
		table, chain string
		want         bool
	}{
		{unix.NFT_MSG_NEWRULE, unix.NFPROTO_IPV4, "nat", "LF-SERVICES", true},
		{unix.NFT_MSG_DELRULE, unix.NFPROTO_IPV6, "filter", "FORWARD", true},
		{unix.NFT_MSG_DELCHAIN, unix.NFPROTO_IPV4, "nat", "LF-SERVICES", true},
		{unix.NFT_MSG_NEWCHAIN, unix.NFPROTO_IPV4, "nat", "KUBE-SERVICES", false},
		{unix.NFT_MSG_DELTABLE, unix.NFPROTO_IPV4, "nat", "", true},
		{unix.NFT_MSG_NEWRULE, unix.NFPROTO_IPV4, "nat", "KUBE-SERVICES", false},
		{unix.NFT_MSG_NEWRULE, unix.NFPROTO_IPV4, "mangle", "PREROUTING", false},
		{unix.NFT_MSG_NEWRULE, unix.NFPROTO_INET, "nat", "LF-SERVICES", false},
		{unix.NFT_MSG_NEWSETELEM, unix.NFPROTO_IPV4, "nat", "", false},
	} {
		data := append([]byte{test.family, 0, 0, 0}, attribute(unix.NFTA_RULE_TABLE, test.table)...)
		chain := byte(unix.NFTA_RULE_CHAIN)
		if test.kind == unix.NFT_MSG_NEWCHAIN || test.kind == unix.NFT_MSG_DELCHAIN {
			chain = unix.NFTA_CHAIN_NAME
		}
		data = append(data, attribute(chain, test.chain)...)
		m := nfnetlink.Message{Kind: unix.NFNL_SUBSYS_NFTABLES<<8 | uint16(test.kind), Data: data}
		if got := concerns(m); got != test.want {
			t.Errorf("%+v: concerns us: %v", test, got)
		}
	}
}
