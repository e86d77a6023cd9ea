package l2

import (
	"encoding/binary"
	"net"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
)

// What a neighbor makes up for each of many VIPs costs no more than it would for some hundred: changes of who
// announced them last, announcements against it, and questions whether somebody uses them.
func TestContract11MadeUpPacketsForManyVIPs(t *testing.T) {
	const (
		vips   = 1000
		lasts  = 12 // seconds, with a packet for each VIP in each
		atMost = reclaimsKept + (lasts+1)*reclaimRate
	)
	for _, c := range []struct {
		name   string
		sender func(second, i int) net.HardwareAddr
	}{
		{"of a device", func(second, _ int) net.HardwareAddr { return net.HardwareAddr{2, 0xad, 0, 0, 0, byte(second)} }},
		{"of two nodes in turn", func(second, _ int) net.HardwareAddr {
			return net.HardwareAddr{2, 0xaa, 0, 0, 0, byte(second % 2)}
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			overBoth(t, func(t *testing.T, p protocol) {
				s := newSegment()
				var published atomic.Int64
				a := started(t, s, Options{Changed: func() { published.Add(1) }})
				d := desire([]lb.Interface{iface("eth0", 2, 0x78)}, map[netip.Addr]Answer{})
				d.Ours = map[string]string{own.String(): "self", "02:aa:00:00:00:00": "b", "02:aa:00:00:00:01": "c"}
				at := func(i int) netip.Addr {
					b := p.vip.AsSlice()
					binary.BigEndian.PutUint16(b[len(b)-2:], uint16(i))
					vip, _ := netip.AddrFromSlice(b)
					return vip
				}
				for i := range vips {
					d.Answers[at(i)] = Answer{On: []string{"eth0"}, Owned: true}
				}
				a.Set(d)
				time.Sleep(time.Hour)
				s.announced()
				var questions atomic.Int64
				wire := s.socket("eth0")
				go func() {
					for {
						select {
						case <-wire.out:
							questions.Add(1)
						case <-t.Context().Done():
							return
						}
					}
				}()
				changes, before := 0, map[netip.Addr]string{}
				for second := range lasts {
					for i := range vips {
						wire.in <- p.announce(c.sender(second, i), at(i))
					}
					time.Sleep(time.Second)
					now := a.Outcome().Rivals
					for vip, node := range now {
						if was := before[vip]; was != "" && was != node {
							changes++
						}
					}
					before = now
				}
				announced := 0
				for _, n := range s.announced() {
					announced += n / p.forms
				}
				asked := int(questions.Load())
				t.Logf("%d changes, %d announcements, %d questions, %d times another outcome", changes, announced, asked,
					published.Load())
				if changes > atMost || announced > len(burst)*atMost || asked > probeCount*atMost {
					t.Errorf("%d changes, %d announcements and %d questions", changes, announced, asked)
				}
			})
		})
	}
}
