package rescue

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/nstest"
	"github.com/landfall-lb/landfall/proxy/nfnetlink"
	"github.com/landfall-lb/landfall/proxy/nft"
	"github.com/landfall-lb/landfall/proxy/nft/expr"
)

// ack is a TCP packet of a connection that nobody has, as made up by somebody who knows a VIP. flow
// numbers the connection.
func ack(to, vip string, flow int) []byte {
	mac, _ := net.ParseMAC(to)
	dest := netip.MustParseAddr(vip)
	source := netip.AddrFrom4([4]byte{198, 51, 100, 1})
	frame := append(append(mac, 2, 0, 0, 0, 0, 9), 8, 0)
	if dest.Is6() {
		source = netip.MustParseAddr("2001:db8::1")
		frame = append(append(mac, 2, 0, 0, 0, 0, 9), 0x86, 0xdd)
	}
	tcp := make([]byte, 20)
	binary.BigEndian.PutUint16(tcp, uint16(1024+flow))
	tcp[3], tcp[12], tcp[13] = 80, 5<<4, 16 // port, length in words, ACK
	pseudo := append(append(source.AsSlice(), dest.AsSlice()...), 0, unix.IPPROTO_TCP, 0, byte(len(tcp)))
	binary.BigEndian.PutUint16(tcp[16:], checksum(append(pseudo, tcp...)))
	if dest.Is6() {
		frame = append(frame, 0x60, 0, 0, 0, 0, byte(len(tcp)), unix.IPPROTO_TCP, 64)
		return append(append(append(frame, source.AsSlice()...), dest.AsSlice()...), tcp...)
	}
	ip := append([]byte{0x45, 0, 0, byte(20 + len(tcp)), 0, 0, 0, 0, 64, unix.IPPROTO_TCP, 0, 0}, source.AsSlice()...)
	ip = append(ip, dest.AsSlice()...)
	binary.BigEndian.PutUint16(ip[10:], checksum(ip))
	return append(append(frame, ip...), tcp...)
}

func checksum(b []byte) uint16 {
	var sum uint32
	for ; len(b) > 1; b = b[2:] {
		sum += uint32(binary.BigEndian.Uint16(b))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}

// send sends frames from the client.
func (l lan) send(t testing.TB, frames func(yield func([]byte) bool)) {
	t.Helper()
	l.client.Do(t, func() error {
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		eth0, err := net.InterfaceByName("eth0")
		if err != nil {
			return err
		}
		for frame := range frames {
			for {
				if err := unix.Sendto(fd, frame, 0, &unix.SockaddrLinklayer{Ifindex: eth0.Index}); err != unix.ENOBUFS {
					if err != nil {
						return err
					}
					break
				}
			}
		}
		return nil
	})
}

// madeUp matches what ack makes.
var madeUp = []string{"ip saddr 198.51.100.1", "ip6 saddr 2001:db8::1"}

// arrivals counts what comes at a node from now on that one of the matches is for.
func arrivals(t testing.TB, node *nstest.NS, matches ...string) (read func() int) {
	t.Helper()
	writeRules(t, node, `
		table inet arrivals {
			chain pre {
				type filter hook prerouting priority -300
				`+strings.Join(matches, " counter\n")+` counter
			}
		}`)
	return func() (n int) {
		var out struct {
			Nftables []struct {
				Rule struct {
					Expr []struct{ Counter struct{ Packets int } }
				}
			}
		}
		text := node.Run(t, "nft", "-j", "list", "chain", "inet", "arrivals", "pre")
		if err := json.Unmarshal([]byte(text), &out); err != nil {
			t.Fatal(err)
		}
		for _, o := range out.Nftables {
			for _, e := range o.Rule.Expr {
				n += e.Counter.Packets
			}
		}
		return n
	}
}

// remembered counts what a memory of an actor's node holds.
func remembered(t testing.TB, node *nstest.NS, a *Actor, set nft.Set, family lb.Family) int {
	t.Helper()
	return len(memory(t, node, a, set, family))
}

// rememberedOf counts what a memory of an actor of node b holds of one VIP.
func (l lan) rememberedOf(t testing.TB, a *Actor, set nft.Set, vip string) (n int) {
	t.Helper()
	h := headerOf(lb.FamilyOf(addr(vip)))
	for _, key := range memory(t, l.b, a, set, h.family) {
		if at := key[h.size+4:]; bytes.Equal(at[:h.size], addr(vip).AsSlice()) { // behind the source and its padded port
			n++
		}
	}
	return n
}

// memory returns what a memory of an actor's node holds.
func memory(t testing.TB, node *nstest.NS, a *Actor, set nft.Set, family lb.Family) (keys [][]byte) {
	t.Helper()
	node.Do(t, func() error {
		l := nft.Listing{Conn: a.kernel.(Kernel).conn, Table: headerOf(family).table()}
		return nfnetlink.Complete(func() error {
			sets, err := l.Sets()
			if err != nil {
				return err
			}
			keys, err = readKeys(l, sets, set)
			return err
		})
	})
	return keys
}

// limited is an actor of a node with a limit.
func limited(t testing.TB, node *nstest.NS, limit int) *Actor {
	t.Helper()
	a := rescuer(t, node)
	a.limit = limit
	return a
}

// TestContract11AStrayFloodIsBounded sends made-up packets for one VIP, all of one connection and
// then each of another. The node moves as many as the limit allows, remembers none of the second
// kind for long, and still rescues connections of another VIP.
func TestContract11AStrayFloodIsBounded(t *testing.T) {
	const flood, limit = 3000, 10
	l := newLAN(t)
	others := map[string]string{v4.vip: "10.0.0.101", v6.vip: "fd00::101"}
	writeRules(t, l.a, `
		add rule ip test pre ip daddr 10.0.0.101 tcp dport 80 dnat to 10.1.0.2:80
		add rule ip6 test pre ip6 daddr fd00::101 tcp dport 80 dnat to [fd01:0::2]:80`)
	for _, at := range []addresses{v4, v6} {
		l.point(t, others[at.vip], l.macA)
	}
	conns := append(l.dial(t, others[v4.vip], 5), l.dial(t, others[v6.vip], 5)...)
	arrived := arrivals(t, l.b, madeUp...)
	r := limited(t, l.b, limit)
	w := from(v4.vip, v4.a, v6.vip, v6.a, others[v4.vip], v4.a, others[v6.vip], v6.a)
	want(t, l.b, r, w, 2)
	for _, at := range []addresses{v4, v6} {
		l.point(t, others[at.vip], l.macB)
		family, target := lb.FamilyOf(addr(at.vip)), addr(at.a)
		for _, one := range []bool{true, false} {
			l.b.Do(t, r.apply)
			began, moved, dropped, before := time.Now(), r.Packets(), r.Dropped(), arrived()
			for sent := 0; arrived()-before < flood/2; sent += flood { // a busy machine may lose some
				l.send(t, func(yield func([]byte) bool) {
					for i := range flood {
						flow := 1 + sent + i
						if one {
							flow = 0
						}
						if !yield(ack(l.macB, at.vip, flow)) {
							return
						}
					}
				})
			}
			l.b.Do(t, r.apply)
			came, most := arrived()-before, limit*burst+limit*int(time.Since(began)/time.Second+1)
			m, d := int(r.Packets()-moved), int(r.Dropped()-dropped)
			if one {
				most *= 1 + confirmedLimit
			}
			late := 4 * len(conns) // acknowledgements of connections of the other VIP may come only now
			if m > most+late || m == 0 || m+d < came || m+d > came+late {
				t.Errorf("%s, of one connection %v: of %d packets %d were moved, want at most %d; %d were dropped", at.vip, one,
					came, m, most, d)
			}
			n := remembered(t, l.b, r, headerOf(family).flows(target), family)
			if n == 0 || n > 1+len(conns) {
				t.Errorf("%s, of one connection %v: %d connections are remembered", at.vip, one, n)
			}
			if n := remembered(t, l.b, r, headerOf(family).fresh(target), family); n > most+1+len(conns) {
				t.Errorf("%s: %d connections are remembered for a short while", at.vip, n)
			}
			if n := lost(conns); n > 0 {
				t.Errorf("%d of %d connections of another VIP were lost", n, len(conns))
			}
		}
	}
	if text := l.b.Run(t, "nft", "list", "set", "ip", tableName, setFlooded); !strings.Contains(text, v4.vip) {
		t.Errorf("the address is not named:\n%s", text)
	}
	for _, family := range []string{"ip", "ip6"} {
		text := l.b.Run(t, "nft", "list", "table", family, tableName)
		l.b.Run(t, "nft", "delete", "table", family, tableName)
		writeRules(t, l.b, text) // it is readable
	}
}

// TestContract11AFloodDoesNotGoRound has the same on a ring: what the first node does not move
// costs the others nothing.
func TestContract11AFloodDoesNotGoRound(t *testing.T) {
	const flood, limit = 2000, 10
	r := newRack(t, 4)
	r.actors[0].limit = limit
	r.all(t)
	for _, at := range []addresses{v4, v6} {
		began, before := time.Now(), r.packets(t)
		r.send(t, func(yield func([]byte) bool) {
			for i := range flood {
				if !yield(ack(r.macs[0], at.vip, i)) {
					return
				}
			}
		})
		r.nodes[0].Do(t, r.actors[0].apply)
		most := limit*burst + limit*int(time.Since(began)/time.Second+1)
		if n := r.packets(t) - before; n > most*len(r.nodes) || n < limit {
			t.Errorf("%s: %d packets of %d went round, want at most %d", at.vip, n, flood, most*len(r.nodes))
		}
	}
}

// TestContract5TheLimitLetsAPlannedMovePass has 10,000 connections of one VIP move at once: all of
// them are remembered, and none of their packets is dropped.
func TestContract5TheLimitLetsAPlannedMovePass(t *testing.T) {
	const connections = 10_000
	l := newLAN(t)
	arrived := arrivals(t, l.b, madeUp...)
	r := rescuer(t, l.b)
	want(t, l.b, r, from(v4.vip, v4.a, v6.vip, v6.a), 2)
	for _, at := range []addresses{v4, v6} {
		before, moved := arrived(), r.Packets()
		l.send(t, func(yield func([]byte) bool) {
			for i := range 2 * connections { // two packets each
				if !yield(ack(l.macB, at.vip, i/2)) {
					return
				}
			}
		})
		l.b.Do(t, r.apply)
		came, m := arrived()-before, int(r.Packets()-moved)
		if r.Dropped() != 0 || m != came {
			t.Errorf("%s: of %d packets %d were moved and %d dropped", at.vip, came, m, r.Dropped())
		}
		family := lb.FamilyOf(addr(at.vip))
		n := remembered(t, l.b, r, headerOf(family).flows(addr(at.a)), family)
		if least := came - connections; n < least || n == 0 {
			t.Errorf("%s: %d connections are remembered, want %d", at.vip, n, least)
		}
	}
}

// TestContract5OnlyTheFirstPacketOfAConnectionCounts has connections move that send packet after
// packet, within a limit that lets only their first packets pass.
func TestContract5OnlyTheFirstPacketOfAConnectionCounts(t *testing.T) {
	const connections, packets, limit = 400, 5, 50
	l := newLAN(t)
	r := limited(t, l.b, limit)
	want(t, l.b, r, from(v4.vip, v4.a, v6.vip, v6.a), 2)
	for _, at := range []addresses{v4, v6} {
		l.send(t, func(yield func([]byte) bool) {
			for i := range packets * connections {
				if !yield(ack(l.macB, at.vip, i%connections)) {
					return
				}
			}
		})
		l.b.Do(t, r.apply)
		if n := r.Dropped(); n > 0 {
			t.Errorf("%s: %d packets were dropped", at.vip, n)
		}
		family := lb.FamilyOf(addr(at.vip))
		if n := remembered(t, l.b, r, headerOf(family).flows(addr(at.a)), family); n == 0 {
			t.Errorf("%s: no connections are remembered", at.vip)
		}
	}
}

// TestContract5PassingPacketsCountOnce has each node of a ring get connections that no node knows:
// the first packet of each counts at each of the others too, the second one does not.
func TestContract5PassingPacketsCountOnce(t *testing.T) {
	const connections, limit = 150, 100
	r := newRack(t, 5)
	for i := range r.actors {
		r.actors[i].limit = limit
	}
	r.all(t)
	for i := range r.nodes {
		r.send(t, func(yield func([]byte) bool) {
			for k := range 2 * connections {
				if !yield(ack(r.macs[i], v4.vip, 1000*i+k/2)) {
					return
				}
			}
		})
	}
	for i := range r.nodes {
		r.nodes[i].Do(t, r.actors[i].apply)
		if n := r.actors[i].Dropped(); n > 0 {
			t.Errorf("node %d dropped %d packets", i, n)
		}
	}
}

// TestContract11FloodedVIPsLeaveRoomForOthers floods two VIPs with as many connections as a source
// address can have, and then has one of a third VIP remembered.
func TestContract11FloodedVIPsLeaveRoomForOthers(t *testing.T) {
	const ports = 65536
	l := newLAN(t)
	two, three := "10.0.0.101", "10.0.0.102"
	r := limited(t, l.b, 0)
	want(t, l.b, r, from(v4.vip, v4.a, two, v4.a, three, v4.a), 1)
	flows := headerOf(lb.IPv4).flows(addr(v4.a))
	for _, vip := range []string{v4.vip, two} {
		l.send(t, func(yield func([]byte) bool) {
			for i := range 2 * ports {
				if !yield(ack(l.macB, vip, i/2)) {
					return
				}
			}
		})
	}
	before := remembered(t, l.b, r, flows, lb.IPv4)
	if before > 2*shareBurst+shareMore {
		t.Errorf("%d connections are remembered of two addresses", before)
	}
	for sent := 0; remembered(t, l.b, r, flows, lb.IPv4) <= before; sent++ { // a busy machine may lose some
		if sent == 20 {
			t.Fatal("no connection of the third address is remembered")
		}
		l.send(t, func(yield func([]byte) bool) { yield(ack(l.macB, three, 1)) })
	}
}

// bucket is what a limit of the kernel has left.
type bucket struct {
	left, at float64 // packets, and the second of the last look
}

func (b *bucket) matches(l expr.Limit, now float64) bool {
	b.left = min(b.left+float64(l.Rate)*(now-b.at), float64(l.Burst))
	b.at = now
	if b.left < 1 {
		return l.Over
	}
	b.left--
	return !l.Over
}

// owner is whose bucket it is: a set's for a VIP, or a rule's.
type owner struct {
	set       string
	vip, rule int
}

// gauge says what rules of limits do with packets, as the kernel would at the times that it is told.
type gauge struct {
	rules []nft.Rule
	each  map[owner]*bucket
}

// passes reports whether the rules let a packet for a VIP pass.
func (g gauge) passes(t *testing.T, vip int, now float64) bool {
	t.Helper()
	matches := func(of owner, l expr.Limit) bool {
		if g.each[of] == nil {
			g.each[of] = &bucket{left: float64(l.Burst), at: now}
		}
		return g.each[of].matches(l, now)
	}
rules:
	for i, r := range g.rules {
		for _, e := range r.Exprs {
			switch e := e.(type) {
			case *expr.Payload: // the VIP
			case *expr.Dynset:
				if !matches(owner{set: e.SetName, vip: vip}, *e.Each.(*expr.Limit)) {
					continue rules
				}
			case *expr.Limit:
				if !matches(owner{rule: i}, *e) {
					continue rules
				}
			case *expr.Verdict:
				return e.Kind == expr.VerdictReturn
			default:
				t.Fatalf("%T", e)
			}
		}
	}
	return true
}

// TestContract11FloodsLeaveEachVIPItsShare walks packets through the rules: some VIPs are flooded for a minute, and
// then another one moves, with as many connections at once as its share has.
func TestContract11FloodsLeaveEachVIPItsShare(t *testing.T) {
	const limit, seconds, ticks = 64, 40, 64
	for _, test := range []struct{ flooded, above int }{{1, 10}, {5, 2}, {5, 10}, {20, 2}, {sureLimit * sureRate / 2, 2}} {
		g := gauge{rules: headerOf(lb.IPv4).limitRules(limit)[chainUnconfirmed], each: map[owner]*bucket{}}
		moved := 0
		flood := func(now float64) {
			for n := range test.above * limit * test.flooded / ticks {
				if g.passes(t, n%test.flooded, now) {
					moved++
				}
			}
		}
		for tick := range seconds * ticks {
			flood(float64(tick) / ticks)
		}
		if most := nodeLimit * limit * (seconds + burst); moved > most || moved < limit*seconds {
			t.Errorf("%d flooded VIPs: %d packets are moved, want at most %d", test.flooded, moved, most)
		}
		const more = 15 * ticks
		dropped := 0
		for tick := range more {
			now := seconds + float64(tick)/ticks
			flood(now)
			// All at once, and then what has to be sent again, or comes of others, in each second.
			if tick > 0 && tick%ticks != 0 {
				continue
			}
			packets := limit / sureRate
			if tick == 0 {
				packets = limit / sureBurst
			}
			for range packets {
				if !g.passes(t, -1, now) {
					dropped++
				}
			}
		}
		if dropped > 0 {
			t.Errorf("%d VIPs are flooded with %d times the limit: %d packets of another VIP are dropped", test.flooded,
				test.above, dropped)
		}
	}
}

// TestContract11AFewFloodsLeaveRoomForALargeMove walks packets through the rules: as long as fewer VIPs are flooded than
// use up what whoever comes first gets, all connections of another VIP move at once that may.
func TestContract11AFewFloodsLeaveRoomForALargeMove(t *testing.T) {
	const limit, seconds, ticks = 64, 40, 64
	for _, flooded := range []int{0, 1, 2, commonLimit - 1} {
		g := gauge{rules: headerOf(lb.IPv4).limitRules(limit)[chainUnconfirmed], each: map[owner]*bucket{}}
		for tick := range seconds * ticks {
			for n := range 10 * limit * flooded / ticks {
				g.passes(t, n%flooded, float64(tick)/ticks)
			}
		}
		dropped := 0
		for range limit * burst {
			if !g.passes(t, -1, seconds) {
				dropped++
			}
		}
		if dropped > 0 {
			t.Errorf("%d VIPs are flooded: %d of %d packets of another VIP are dropped", flooded, dropped, limit*burst)
		}
	}
}

// TestContract11FloodedVIPsLeaveTheLimitToOthers floods five VIPs, which is more than the node's limit takes, and has
// connections of a sixth one move then.
func TestContract11FloodedVIPsLeaveTheLimitToOthers(t *testing.T) {
	const limit = 20
	const flood, connections = 3 * burst * limit, limit / sureBurst
	for _, at := range []addresses{v4, v6} {
		l := newLAN(t)
		r := limited(t, l.b, limit)
		family := lb.FamilyOf(addr(at.vip))
		var vips, pairs []string
		for vip := addr(at.vip); len(vips) < 6; vip = vip.Next() {
			vips, pairs = append(vips, vip.String()), append(pairs, vip.String(), at.a)
		}
		flooded, sixth := vips[:5], vips[5]
		want(t, l.b, r, from(pairs...), 1)
		arrived := arrivals(t, l.b, map[lb.Family]string{lb.IPv4: "ip", lb.IPv6: "ip6"}[family]+" daddr "+sixth)
		came, moved := 0, 0
		for try := range 20 { // a busy machine may lose some
			l.send(t, func(yield func([]byte) bool) {
				for i := range flood {
					for _, vip := range flooded {
						if !yield(ack(l.macB, vip, i)) {
							return
						}
					}
				}
				for i := range connections {
					if !yield(ack(l.macB, sixth, connections*try+i)) {
						return
					}
				}
			})
			for range 40 {
				moved = l.rememberedOf(t, r, headerOf(family).fresh(addr(at.a)), sixth)
				if came = arrived(); came > 0 && moved == came {
					break
				}
				time.Sleep(50 * time.Millisecond)
			}
			if came > 0 {
				break
			}
		}
		if came == 0 || moved != came {
			t.Errorf("while %d addresses are flooded, %d of %d packets of another one are moved", len(flooded), moved, came)
		}
	}
}

// BenchmarkMove has connections of one VIP move at once that send a packet every second each, and
// says how many packets the limits have dropped until all of them are remembered, and when they
// are.
func BenchmarkMove(b *testing.B) {
	for _, connections := range []int{50_000, 65_000} {
		b.Run(fmt.Sprint(connections), func(b *testing.B) {
			for range b.N {
				l := newLAN(b)
				r := rescuer(b, l.b)
				want(b, l.b, r, from(v4.vip, v4.a), 1)
				began, known, rounds := time.Now(), 0, 0
				for ; known < connections && rounds < 60; rounds++ {
					time.Sleep(time.Until(began.Add(time.Duration(rounds) * time.Second)))
					l.send(b, func(yield func([]byte) bool) {
						for i := range connections {
							if !yield(ack(l.macB, v4.vip, i)) {
								return
							}
						}
					})
					known = remembered(b, l.b, r, headerOf(lb.IPv4).flows(addr(v4.a)), lb.IPv4)
				}
				b.ReportMetric(time.Since(began).Seconds(), "s/all-remembered")
				l.b.Do(b, r.apply)
				b.ReportMetric(float64(r.Dropped()), "dropped")
				b.ReportMetric(float64(r.Packets()), "moved")
				b.ReportMetric(float64(rounds*connections), "sent")
				b.ReportMetric(float64(known), "remembered")
			}
		})
	}
}

// TestTheLimitHasASwitch changes the limit of a node, as a new proxy with another flag does.
func TestTheLimitHasASwitch(t *testing.T) {
	l := newLAN(t)
	for _, limit := range []int{DefaultLimit, 0, 7} {
		r := limited(t, l.b, limit)
		want(t, l.b, r, from(v4.vip, v4.a, v6.vip, v6.a), 2)
		for _, family := range []string{"ip", "ip6"} {
			text := l.b.Run(t, "nft", "list", "chain", family, tableName, chainUnconfirmed)
			if got := strings.Contains(text, fmt.Sprintf("limit rate over %d/second", limit)); got != (limit > 0) {
				t.Errorf("limit %d: %s", limit, text)
			}
		}
	}
}

func TestAFloodIsCountedAndLogged(t *testing.T) {
	var log strings.Builder
	a := newActor(fakeDeps, &fakeKernel{})
	a.log = slog.New(slog.NewTextHandler(&log, nil))
	vip := []netip.Addr{addr("192.0.2.1")}
	for _, have := range []held{{dropped: 5, flooded: vip}, {dropped: 7, flooded: vip}, {dropped: 7}, {dropped: 2}} {
		a.watchFlood(lb.IPv4, have)
	}
	a.watchFlood(lb.IPv6, held{dropped: 10})
	if a.Dropped() != 19 {
		t.Errorf("%d packets", a.Dropped())
	}
	if n := strings.Count(log.String(), "\n"); n != 2 || !strings.Contains(log.String(), "192.0.2.1") {
		t.Errorf("the log:\n%s", log.String())
	}
}
