package l2

import (
	"net"
	"slices"
	"sync"
	"testing"

	"github.com/mdlayher/arp"
	"github.com/mdlayher/ethernet"

	"github.com/landfall-lb/landfall/internal/loop"
	"github.com/landfall-lb/landfall/internal/nstest"
)

// drops counts packets without an answer. Whoever holds it keeps a reader at the packet that it has.
type drops struct {
	noStats
	sync.Mutex
	taken, overrun int
}

func (d *drops) Dropped(_ string, why Drop, n int) {
	d.Lock()
	defer d.Unlock()
	if why == dropOverrun {
		d.overrun += n
	} else {
		d.taken += n
	}
}

func (d *drops) counts() (taken, overrun int) {
	d.Lock()
	defer d.Unlock()
	return d.taken, d.overrun
}

// What comes while the reader is busy waits for it, within a bound, and what the kernel has no room for is counted.
func TestContract11AFloodWaitsOrIsCounted(t *testing.T) {
	t.Parallel()
	neighbor, ns := nstest.New(t), nstest.New(t)
	nstest.Veth(t, neighbor, "eth0", "172.26.236.9/24", ns, "eth0", "172.26.236.178/24")
	n := &node{ns: ns}
	n.i = n.iface(t)
	stranger := net.HardwareAddr{2, 0, 0, 0, 0, 0x66}
	question, err := encodeARP(arp.OperationRequest, stranger, vip.Next(), make(net.HardwareAddr, 6), vip,
		ethernet.Broadcast)
	if err != nil {
		t.Fatal(err)
	}
	solicitation, err := probeNDP(stranger, vip6)
	if err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		open  func(around) (responder, error)
		frame []byte
	}{
		"ARP": {func(a around) (responder, error) { return newARPResponder(n.i, listenARP, a) }, question},
		"NDP": {func(a around) (responder, error) { return newNDPResponder(n.i, listenNDP, a) },
			to(n.i.MAC, solicitation)},
	} {
		t.Run(name, func(t *testing.T) {
			var d drops
			var r responder
			var pulses loop.Pulses
			ns.Do(t, func() (err error) {
				r, err = tt.open(around{stat: &d, awake: func() bool { return true }, pulses: &pulses})
				return err
			})
			done := make(chan error)
			go func() { done <- r.serve() }()
			t.Cleanup(func() {
				r.close()
				<-done
			})
			flood := func(frames int) {
				d.Lock() // the reader is busy
				defer d.Unlock()
				transmit(t, neighbor, slices.Repeat([][]byte{tt.frame}, frames)...)
			}
			flood(4000)
			eventually(t, "what waited is taken", func() bool {
				taken, _ := d.counts()
				return taken > 1500 // less than all, as a busy machine may lose some between the two ends
			})
			if _, overrun := d.counts(); overrun != 0 {
				t.Errorf("there was no room for %d of 4,000 packets", overrun)
			}
			flood(20_000)
			eventually(t, "what found no room is counted", func() bool {
				transmit(t, neighbor, tt.frame)
				_, overrun := d.counts()
				return overrun > 1000
			})
		})
	}
}
