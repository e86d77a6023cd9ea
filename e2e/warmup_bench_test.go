package e2e

import (
	"bytes"
	"slices"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/e2e/lab"
)

// BenchmarkWarmUp starts the proxy and the speaker of a node at once, again and again, and reports after which time the
// node answered for an address that it is the first to get: over ARP until its first word about the address, which
// another node answers for meanwhile, over BGP until its route is on the wire.
// go test -run '^$' -bench WarmUp -benchtime 15x -timeout 30m ./e2e
func BenchmarkWarmUp(b *testing.B) {
	for _, over := range []struct {
		name    string
		start   func(testing.TB) boots
		answers func(*testing.B, *lab.Lab) func(frame []byte) bool
		end     func(*lab.Agent) error
	}{
		{"L2", bootsOverL2, saysARP, (*lab.Agent).Stop},
		{"L2 after a crash", bootsOverL2, saysARP, (*lab.Agent).Kill},
		{"BGP", bootsOverBGP, func(*testing.B, *lab.Lab) func([]byte) bool { return announces }, (*lab.Agent).Stop},
	} {
		b.Run(over.name, func(b *testing.B) {
			boot := over.start(b)
			programs := []*lab.Agent{boot.Agent("proxy", bootNode), boot.Agent("speaker", bootNode)}
			var took []time.Duration
			for b.Loop() {
				boot.served(b)
				time.Sleep(time.Second)
				for _, a := range programs {
					if err := over.end(a); err != nil {
						b.Fatal(err)
					}
				}
				time.Sleep(2 * time.Second)
				answered := sniff(b, boot.Lab, bootNode, patience, over.answers(b, boot.Lab))
				began := time.Now()
				for _, a := range programs {
					if err := a.Start(); err != nil {
						b.Fatal(err)
					}
				}
				at := <-answered
				if at.IsZero() {
					b.Fatal("the node does not answer")
				}
				took = append(took, at.Sub(began))
			}
			reportGaps(b, took)
		})
	}
}

// saysARP returns a function that reports whether a frame says that bootNode has the VIP.
func saysARP(b *testing.B, l *lab.Lab) func(frame []byte) bool {
	own := nodeMAC(b, l, bootNode)
	return func(frame []byte) bool {
		mac, addr, ok := arpOf(frame)
		return ok && addr == seedVIP.Addr() && slices.Equal(mac, own)
	}
}

// announces reports whether a frame has an UPDATE with the route to the VIP of [bgpVIP].
func announces(frame []byte) bool {
	vip := bgpVIP.Addr().As4()
	return bytes.HasSuffix(updateIn(frame), slices.Concat([]byte{32}, vip[:]))
}
