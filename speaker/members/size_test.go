package members

import (
	"fmt"
	"math"
	"net/netip"
	"runtime"
	"testing"

	"github.com/landfall-lb/landfall/speaker/plan"
)

// scattered replaces the addresses of updates by others of which no two follow each other.
func scattered(updates []update) {
	done := map[*sheet]bool{}
	for _, u := range updates {
		if done[u.sheet] {
			continue
		}
		done[u.sheet] = true
		for i, vip := range u.sheet.vips {
			b := vip.As16()
			n := int(b[14])<<8 | int(b[15])
			n *= 3
			if n%2 == 0 {
				n++
			}
			b[13], b[14], b[15] = b[13]+byte(n>>16), byte(n>>8), byte(n)
			u.sheet.vips[i] = netip.AddrFrom16(b)
			if vip.Is4() {
				u.sheet.vips[i] = netip.AddrFrom16(b).Unmap()
			}
		}
	}
}

// BenchmarkGossip gives the figures of docs/guide/l2.md by simulation: the bytes that one node of a large
// cluster sends, without what memberlist, encryption and IP add.
func BenchmarkGossip(b *testing.B) {
	for _, nodes := range []int{200, 1000} {
		for _, spread := range []bool{false, true} {
			const vips = 10_000
			b.Run(fmt.Sprintf("%d nodes, %d VIPs, scattered %v", nodes, vips, spread), func(b *testing.B) {
				updates := manyAlike(nodes, vips)
				if spread {
					scattered(updates)
				}
				old, message := 0, encodeCompact(updates...)
				for _, u := range updates {
					old += len(encode(u))
				}
				// memberlist has longer intervals in larger clusters. A node begins one exchange and answers
				// one in each.
				interval := 15 * (1 + math.Ceil(math.Max(0, math.Log2(float64(nodes))-5)))
				passes := retransmitMult * math.Ceil(math.Log10(float64(nodes+1)))
				change := encode(update{node: updates[0].node, born: updates[0].born,
					entries: []entry{{vip: address(1), seq: 10_000, claim: plan.Claim{Answering: true}}}})
				greeting := 0
				j := newJournal(updates[0].node, updates[0].born)
				for _, e := range updates[0].explicit().entries {
					j.pending[e.vip] = &e.claim
				}
				for _, m := range j.greet(true, nodes).encode() {
					greeting += len(m)
				}
				var before, after runtime.MemStats
				book := newBook()
				for b.Loop() {
					b.StopTimer()
					book = newBook()
					runtime.GC()
					runtime.ReadMemStats(&before)
					b.StartTimer()
					got, err := decode(message)
					if err != nil {
						b.Fatal(err)
					}
					book.merge(got...)
				}
				runtime.GC()
				runtime.ReadMemStats(&after)
				b.ReportMetric(float64(old)/1024, "old-state-KiB")
				b.ReportMetric(float64(len(message))/1024, "state-KiB")
				b.ReportMetric(2*float64(len(message))/interval, "rest-B/s")
				b.ReportMetric(passes*float64(len(change)), "change-B")
				b.ReportMetric(float64(greeting), "greeting-B")
				b.ReportMetric((float64(after.HeapAlloc)-float64(before.HeapAlloc))/(1<<20), "book-MiB")
				runtime.KeepAlive(book)
				runtime.KeepAlive(updates)
			})
		}
	}
}

func BenchmarkState(b *testing.B) {
	updates := manyAlike(1000, 10_000)
	book := newBook()
	book.merge(updates...)
	standings := map[string]plan.Standing{}
	for _, u := range updates {
		standings[u.node] = plan.Standing{Live: true}
	}
	message := encodeCompact(updates...)
	b.Run("hold", func(b *testing.B) { // for how long nothing else goes on
		for b.Loop() {
			book.updates(standings)
		}
	})
	b.Run("merge a portion", func(b *testing.B) { // for how long nothing else goes on
		parts := portions(updates)
		for b.Loop() {
			b.StopTimer()
			book := newBook()
			b.StartTimer()
			for _, part := range parts {
				book.merge(part...)
			}
		}
		b.ReportMetric(float64(b.Elapsed().Microseconds())/float64(b.N*len(parts)), "µs/portion")
	})
	b.Run("encode", func(b *testing.B) {
		for b.Loop() {
			encodeCompact(book.updates(standings)...)
		}
	})
	b.Run("no news", func(b *testing.B) {
		for b.Loop() {
			got, err := decode(message)
			if err != nil {
				b.Fatal(err)
			}
			book.merge(got...)
		}
	})
}
