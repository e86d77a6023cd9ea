package rescue

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/nft"
	"github.com/landfall-lb/landfall/proxy/nft/expr"
)

// What one VIP may hold of a memory is what it may add while an element lives, as nothing makes
// that longer for free: six VIPs have to be flooded to fill it.
func TestContract11TheShareOfAVIPBoundsWhatItHolds(t *testing.T) {
	h := headerOf(lb.IPv4)
	node := addr(v4.a)
	for _, m := range []struct {
		memory nft.Set
		share  expr.List
	}{
		{h.flows(node), h.share(setShares, flowTimeout)},
		{h.fresh(node), h.share(setFreshShares, freshTimeout)},
	} {
		limit := m.share[1].(*expr.Dynset).Each.(*expr.Limit)
		life := time.Duration(m.memory.Timeout) * time.Millisecond
		held := int(limit.Burst) + int(limit.Rate)*int(life/time.Second)
		if held*5 >= int(m.memory.Size) {
			t.Errorf("%s: one VIP holds up to %d of %d", m.memory.Name, held, m.memory.Size)
		}
	}
	if flowTimeout-renewal < lb.FlowMemory {
		t.Errorf("a connection is forgotten %v after a packet that did not renew it", flowTimeout-renewal)
	}
}

// key is how nft writes a made-up connection.
func key(vip string, flow int) string {
	source := "198.51.100.1"
	if netip.MustParseAddr(vip).Is6() {
		source = "2001:db8::1"
	}
	return fmt.Sprintf("%s . %d . %s . 80", source, 1024+flow, vip)
}

// expiries returns how long connections stay in a memory, by their numbers.
func (l lan) expiries(t *testing.T, h header, set nft.Set) map[int]time.Duration {
	t.Helper()
	var out struct {
		Nftables []struct {
			Set struct {
				Elem []struct {
					Elem struct {
						Val     struct{ Concat []any }
						Expires int
					}
				}
			}
		}
	}
	text := l.b.Run(t, "nft", "-j", "list", "set", nftFamily(h), tableName, set.Name)
	if err := json.Unmarshal([]byte(text), &out); err != nil {
		t.Fatal(err)
	}
	all := map[int]time.Duration{}
	for _, o := range out.Nftables {
		for _, e := range o.Set.Elem {
			all[int(e.Elem.Val.Concat[1].(float64))-1024] = time.Duration(e.Elem.Expires) * time.Second
		}
	}
	return all
}

func nftFamily(h header) string {
	if h.family == lb.IPv6 {
		return "ip6"
	}
	return "ip"
}

// put makes an element of a set what is given, whatever it was.
func (l lan) put(t *testing.T, h header, set, key, rest string) {
	t.Helper()
	at := fmt.Sprintf("element %s %s %s { %s", nftFamily(h), tableName, set, key)
	writeRules(t, l.b, fmt.Sprintf("add %s }\ndelete %s }\nadd %s %s }", at, at, at, rest))
}

// strays returns a function that has a packet of a made-up connection moved.
func (l lan) strays(t *testing.T, a *Actor, vip string) func(flow int) {
	return func(flow int) {
		t.Helper()
		l.b.Do(t, a.apply)
		before := a.Packets()
		for sent := 0; a.Packets() == before; l.b.Do(t, a.apply) { // a busy machine may lose some
			if sent++; sent > 100 {
				t.Fatalf("connection %d is not moved", flow)
			}
			l.send(t, func(yield func([]byte) bool) { yield(ack(l.macB, vip, flow)) })
		}
	}
}

// The packets of connections in memory do not keep them there beyond the share of their VIP: not at
// all those that are remembered for short, and the others as often as the share has room.
func TestContract11KeepingConnectionsAliveIsWithinTheShare(t *testing.T) {
	const soon = 4 * time.Minute
	l := newLAN(t)
	r := limited(t, l.b, DefaultLimit)
	want(t, l.b, r, from(v4.vip, v4.a, v6.vip, v6.a), 2)
	for _, at := range []addresses{v4, v6} {
		h := headerOf(lb.FamilyOf(addr(at.vip)))
		flows, fresh := h.flows(addr(at.a)), h.fresh(addr(at.a))
		stray := l.strays(t, r, at.vip)
		room := func(connections int) {
			l.put(t, h, setShares, at.vip, fmt.Sprintf("limit rate 1/week burst %d packets", connections))
		}
		stray(0) // the share is there now

		room(2) // of three connections with three packets each
		for flow := 10; flow < 13; flow++ {
			for range 3 {
				stray(flow)
			}
		}
		got := l.expiries(t, h, flows)
		if len(got) != 2 || got[10] <= lb.FlowMemory || got[11] <= lb.FlowMemory {
			t.Errorf("%s: with room for two: %v", at.vip, got)
		}

		// The third one stays remembered for short, from its first packet on.
		l.put(t, h, fresh.Name, key(at.vip, 12), "timeout 5m expires 4m")
		stray(12)
		if got := l.expiries(t, h, fresh)[12]; got > soon {
			t.Errorf("%s: packets keep a connection for %v that is above the share", at.vip, got)
		}

		// Of three connections that are to be renewed, there is room for two.
		room(2)
		for flow := 20; flow < 23; flow++ {
			l.put(t, h, flows.Name, key(at.vip, flow), "timeout 90m expires 4m")
		}
		for flow := 20; flow < 23; flow++ {
			for range 3 {
				stray(flow)
			}
		}
		got = l.expiries(t, h, flows)
		if got[20] <= lb.FlowMemory || got[21] <= lb.FlowMemory || got[22] > soon {
			t.Errorf("%s: with room for renewing two of three: %v", at.vip, got)
		}
		room(1) // it is renewed as soon as there is room
		stray(22)
		if got := l.expiries(t, h, flows)[22]; got <= lb.FlowMemory {
			t.Errorf("%s: with room: %v", at.vip, got)
		}
	}
}
