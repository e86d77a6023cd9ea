package cases

import (
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
)

// Beside sends first packets of connections to a site's Service without a pause, while another
// proxy serves it too, behind ours. Whoever serves, no packet may be lost.
type Beside struct {
	s     *Site
	sent  atomic.Int64
	stop  chan struct{}
	group sync.WaitGroup
}

// NewBeside starts the other proxy and the stream. The site's world is of IPv4.
//
// The node drops each packet at its end, so that it never knows a connection and chooses anew for
// each.
func NewBeside(t *testing.T, s *Site) *Beside {
	t.Helper()
	w := s.World
	if w.Family != lb.IPv4 {
		t.Fatal("the other proxy serves IPv4 only")
	}
	b := &Beside{s: s, stop: make(chan struct{})}
	s.Node.Run(t, "sysctl", "-qw", "net.ipv4.icmp_ratelimit=0")
	s.Node.Run(t, "nft", fmt.Sprintf(`
		table ip beside {
			counter refused {}
			counter untranslated {}
			counter unmasked {}
			counter whole {}
			chain translate {
				type nat hook prerouting priority -99;
				ip daddr { %[1]s, %[2]s, %[3]s } udp dport { 80, %[4]d } mark set 0x40 dnat to %[5]s:%[6]d
			}
			chain marked { type nat hook postrouting priority 101; mark 0x40 masquerade; }
			chain stray { type filter hook input priority 0; udp dport %[4]d counter name untranslated drop; }
			chain answers { type filter hook output priority 0; icmp type destination-unreachable counter name refused; }
			chain ends {
				type filter hook postrouting priority 200
				udp dport 80 counter name untranslated drop
				ip saddr %[7]s udp dport %[6]d counter name unmasked drop
				udp dport %[6]d counter name whole drop
			}
		}`, w.ClusterIP, w.VIP, w.Node, NodePort, w.Local, BackendPort(lb.UDP), w.Outside))
	for _, to := range []netip.AddrPort{netip.AddrPortFrom(w.ClusterIP, ServicePort),
		netip.AddrPortFrom(w.VIP, ServicePort),
		netip.AddrPortFrom(w.Node, NodePort)} {
		var conn net.Conn
		s.At["outside"].Do(t, func() (err error) {
			conn, err = net.Dial("udp", to.String())
			return err
		})
		b.group.Go(func() {
			defer conn.Close()
			for {
				select {
				case <-b.stop:
					return
				default:
					_, _ = conn.Write([]byte("x")) // fails after a refusal, which the node counts
					b.sent.Add(1)
				}
			}
		})
	}
	t.Cleanup(b.Stop)
	return b
}

// Wait returns after some more packets.
func (b *Beside) Wait() {
	for enough := b.sent.Load() + 300; b.sent.Load() < enough; {
		time.Sleep(time.Millisecond)
	}
}

// Stop ends the stream.
func (b *Beside) Stop() {
	select {
	case <-b.stop:
	default:
		close(b.stop)
	}
	b.group.Wait()
}

// WantNoneLost stops the stream, and fails the test for packets that were refused, not sent to an
// endpoint, or sent there without the masquerade that brings the answer back.
func (b *Beside) WantNoneLost(t *testing.T) {
	t.Helper()
	b.Stop()
	whole := 0
	for _, name := range []string{"whole", "refused", "untranslated", "unmasked"} {
		out := b.s.Node.Run(t, "nft", "list", "counter", "ip", "beside", name)
		var packets int
		if _, numbers, ok := strings.Cut(out, "packets "); !ok {
			t.Fatalf("no counter in %q", out)
		} else if _, err := fmt.Sscan(numbers, &packets); err != nil {
			t.Fatal(err)
		}
		switch {
		case name == "whole":
			whole = packets
		case packets > 0:
			t.Errorf("%d packets were %s", packets, name)
		}
	}
	if t.Logf("%d packets reached an endpoint", whole); whole == 0 {
		t.Error("no packet reached an endpoint")
	}
}
