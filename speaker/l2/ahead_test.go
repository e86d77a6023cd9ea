package l2

import (
	"errors"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/mdlayher/arp"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/speaker/plan"
)

// aheadOf is what an actor is told of the next address that a Service gets.
func aheadOf(rank int, addrs ...netip.Addr) Desired {
	d := Desired{Interfaces: []lb.Interface{iface("eth0", 2, 0x78)}, Ahead: map[netip.Addr]plan.Scout{},
		Ours: map[string]string{theirs.String(): "other", own.String(): "self"}}
	for _, addr := range addrs {
		d.Ahead[addr] = plan.Scout{On: []string{"eth0"}, Rank: rank}
	}
	return d
}

// wantScouted compares what is known of one address: the node that has asked, "" if nothing is.
func wantScouted(t *testing.T, what string, a *Actor, addr netip.Addr, node string) {
	t.Helper()
	synctest.Wait()
	var want map[string]string
	if node != "" {
		want = map[string]string{"eth0": node}
	}
	if d := cmp.Diff(want, a.Outcome().Scouted[addr], cmpopts.EquateEmpty()); d != "" {
		t.Errorf("%s: %s", what, d)
	}
}

func wantProbes(t *testing.T, what string, s *segment, want int) {
	t.Helper()
	synctest.Wait()
	if n := s.socket("eth0").probes(); n != want {
		t.Errorf("%s: %d questions, want %d", what, n, want)
	}
}

// An address that nobody uses is asked for in a row, and again after a while; nothing is announced.
// Somebody who answers, however late, ends what is known, and so does a freeze.
func TestProbingAhead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSegment()
		wakes := uint64(0)
		a := started(t, s, Options{Self: "self", AheadRate: 50, Wakes: func() uint64 { return wakes }})
		d := aheadOf(0, vip)
		a.Set(d)
		time.Sleep(2 * probeEvery)
		wantScouted(t, "before the end of the row", a, vip, "")
		time.Sleep(probeEvery)
		wantScouted(t, "after the row", a, vip, "self")
		wantProbes(t, "one row", s, probeCount)
		time.Sleep(aheadEvery)
		wantScouted(t, "after the second row", a, vip, "self")
		wantProbes(t, "the second row", s, probeCount)

		// It answers late, after the end of the row.
		s.open["eth0"].in <- ask(func(q *question) { q.op, q.sender, q.to, q.mac = arp.OperationReply, vip, own, stranger })
		wantScouted(t, "somebody uses it", a, vip, "")
		time.Sleep(sightingLasts + time.Second)
		wantScouted(t, "he may still be there", a, vip, "")
		wantProbes(t, "he is not asked all the time", s, 0)
		time.Sleep(aheadEvery + aheadStagger)
		wantScouted(t, "he is not", a, vip, "self")

		// He says that he is about to use it.
		s.open["eth0"].in <- ask(func(q *question) { q.sender, q.mac = netip.IPv4Unspecified(), stranger })
		wantScouted(t, "about to be used", a, vip, "")
		time.Sleep(2 * aheadEvery)
		wantScouted(t, "left again", a, vip, "self")

		wakes = 1
		d = aheadOf(0, vip)
		d.Wakes = 1
		a.Set(d)
		wantScouted(t, "it was frozen", a, vip, "")
		time.Sleep(probeEvery * probeCount)
		wantScouted(t, "asked again", a, vip, "self")
		s.socket("eth0").probes()

		// The address goes to a Service: what is known stays, for a while.
		d = aheadOf(-1, vip)
		d.Wakes = 1
		a.Set(d)
		time.Sleep(aheadFresh - probeEvery)
		wantScouted(t, "fresh", a, vip, "self")
		wantProbes(t, "it only listens", s, 0)
		time.Sleep(2 * probeEvery)
		wantScouted(t, "stale", a, vip, "")
		wantAnnounced(t, s, nil)
	})
}

var stranger = net.HardwareAddr{2, 0, 0, 0, 9, 9}

// Of the nodes on a LAN one asks; the next one does if it falls silent.
func TestOneNodeOfALANProbesAhead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSegment()
		a := started(t, s, Options{Self: "self", AheadRate: 50})
		a.Set(aheadOf(1, vip))
		time.Sleep(aheadStagger / 2)
		question := ask(func(q *question) { q.sender = netip.IPv4Unspecified() })
		for range 4 { // those of the other one
			s.socket("eth0").in <- question
			time.Sleep(gatherFor)
			wantScouted(t, "the other has asked", a, vip, "other")
			time.Sleep(aheadEvery)
			wantProbes(t, "the other asks", s, 0)
		}
		time.Sleep(time.Second)
		wantProbes(t, "the other has fallen silent", s, probeCount)
		wantScouted(t, "it asks itself", a, vip, "self")
	})
}

// What Services get only after many others is asked for later and seldom; once they get it soon, as
// often as the others. What was found out counts all that time.
func TestProbingAheadSeldom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSegment()
		a := started(t, s, Options{Self: "self", AheadRate: 50})
		later := netip.MustParseAddr("10.0.2.20") // by its last 9 bits the 21st of 512
		d := aheadOf(0, vip, later)
		scout := d.Ahead[later]
		scout.Seldom = true
		d.Ahead[later] = scout
		a.Set(d)
		time.Sleep(probeCount * probeEvery)
		wantScouted(t, "after its row", a, vip, "self")
		wantProbes(t, "one row", s, probeCount)
		time.Sleep(20*seldomApart - time.Millisecond)
		wantScouted(t, "its row is not over", a, later, "")
		time.Sleep(2 * time.Millisecond)
		wantScouted(t, "its row is over", a, later, "self")
		wantProbes(t, "its row", s, probeCount)
		time.Sleep(seldomEvery - aheadEvery/2)
		wantScouted(t, "it counts for long", a, later, "self")
		wantProbes(t, "rows of the other", s, int((seldomEvery-aheadEvery/2)/aheadEvery)*probeCount)
		time.Sleep(aheadEvery)
		wantProbes(t, "a row for each", s, 2*probeCount)

		a.Set(aheadOf(0, vip, later))
		time.Sleep(aheadEvery + probeCount*probeEvery)
		s.socket("eth0").probes()
		for range 3 {
			time.Sleep(aheadEvery)
			wantScouted(t, "it counts", a, later, "self")
			wantProbes(t, "a row for each, as often", s, 2*probeCount)
		}
	})
}

// The addresses of a node that is gone, of which the others knew from it alone, are asked for by the next node within
// a minute, and no more of them at once than at first.
func TestAnotherNodeTakesOverWhatIsProbedSeldom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSegment()
		a := started(t, s, Options{Self: "self", AheadRate: 100})
		var all []netip.Addr
		for i := range 64 {
			all = append(all, netip.AddrFrom4([4]byte{10, 0, 2, byte(i)}))
		}
		set := func(rank int) {
			d := aheadOf(rank, all...)
			for addr, scout := range d.Ahead {
				scout.Seldom = true
				d.Ahead[addr] = scout
			}
			a.Set(d)
			synctest.Wait()
		}
		set(1)
		for _, addr := range all {
			s.socket("eth0").in <- ask(func(q *question) { q.sender, q.target = netip.IPv4Unspecified(), addr })
		}
		time.Sleep(time.Minute)
		wantProbes(t, "the other has asked", s, 0)
		wantScouted(t, "the other has asked", a, all[63], "other")
		set(0)
		sent := 0
		for range 10 {
			time.Sleep(time.Second)
			synctest.Wait()
			n := s.socket("eth0").probes()
			if sent += n; n > probeCount*int(time.Second/seldomApart)+probeCount {
				t.Errorf("%d questions in a second", n)
			}
		}
		if want := len(all) * probeCount; sent != want {
			t.Errorf("%d questions in place of the other, want %d", sent, want)
		}
		wantScouted(t, "it has asked itself", a, all[63], "self")
		set(1)
		time.Sleep(time.Minute)
		set(0) // the other was back for a while
		time.Sleep(time.Minute)
		wantProbes(t, "what it has asked itself counts", s, 0)
	})
}

// However many addresses there are, and however bad the rate: no more questions than are allowed.
func TestTheRateOfProbesAheadIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var all []netip.Addr
		for i := range 200 {
			all = append(all, netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}))
		}
		for _, rate := range []float64{0, 0.5, 5} {
			s := newSegment()
			a := started(t, s, Options{Self: "self", AheadRate: rate})
			a.Set(aheadOf(0, all...))
			sent := 0
			for range 120 {
				time.Sleep(time.Second)
				synctest.Wait()
				n := s.socket("eth0").probes()
				if sent += n; n > probeCount+5 {
					t.Errorf("rate %v: %d questions in a second", rate, n)
				}
			}
			if want := int(120 * rate); sent < want-5 || sent > want+probeCount {
				t.Errorf("rate %v: %d questions in two minutes, want about %d", rate, sent, want)
			}
		}
	})
}

// A VIP that is announced and probed side by side is not defended: its holder was there first.
func TestWhatIsStillProbedIsNotDefended(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSegment()
		a := run(t, s)
		d := desire([]lb.Interface{iface("eth0", 2, 0x78)}, map[netip.Addr]Answer{vip: {On: []string{"eth0"}, Owned: true}})
		d.Probes = map[netip.Addr][]string{vip: {"eth0"}}
		a.Set(d)
		synctest.Wait()
		key := "eth0 " + vip.String() + " " + own.String()
		wantAnnounced(t, s, map[string]int{key: 2})
		wantOutcome(t, a, map[netip.Addr][]string{vip: {"eth0"}})
		s.open["eth0"].in <- ask(func(q *question) { q.op, q.sender, q.to = arp.OperationReply, vip, own })
		synctest.Wait()
		wantConflicts(t, "its answer", a, conflicts(theirs.String()))
		wantAnnounced(t, s, nil)
		d.Answers = nil // as the plan decides
		a.Set(d)
		time.Sleep(time.Minute)
		wantAnnounced(t, s, nil)
		if s.open["eth0"].probes() < probeCount {
			t.Error("it was not probed")
		}
	})
}

// Real kernels: two nodes, of which one asks for each address; who uses two of the addresses, in IPv4
// and IPv6, answers that one, which knows then that they are not free.
func TestProbingAheadOnALAN(t *testing.T) {
	l := newLAN(t)
	used, used6 := netip.MustParseAddr("172.26.236.190"), netip.MustParseAddr("2001:db8::190")
	l.client.Run(t, "ip", "addr", "add", used.String()+"/24", "dev", "eth0")
	l.client.Run(t, "ip", "-6", "addr", "add", used6.String()+"/64", "dev", "eth0", "nodad")
	nodes := []*node{l.node(t, "172.26.236.178/24"), l.node(t, "172.26.236.179/24")}
	asker := map[netip.Addr]int{vip: 0, vip6: 1, used: 0, used6: 1}
	for i, n := range nodes {
		d := Desired{Interfaces: []lb.Interface{n.i}, Ours: maps.Clone(l.ours), Ahead: map[netip.Addr]plan.Scout{}}
		for addr, first := range asker {
			d.Ahead[addr] = plan.Scout{On: []string{"eth0"}, Rank: 8 * (i ^ first)}
		}
		n.actor.Set(d)
	}
	for _, n := range nodes {
		eventually(t, "each node knows who has asked", func() bool {
			o := n.actor.Outcome().Scouted
			return o[vip]["eth0"] == nodes[0].i.MAC.String() && o[vip6]["eth0"] == nodes[1].i.MAC.String()
		})
	}
	for addr, first := range map[netip.Addr]int{used: 0, used6: 1} {
		eventually(t, "who has asked knows the answer", func() bool {
			return len(nodes[first].actor.Outcome().ConflictingHosts[addr]) == 1
		})
		if o := nodes[first].actor.Outcome(); len(o.Scouted[addr]) > 0 {
			t.Errorf("%s counts as free: %v", addr, o.Scouted)
		}
	}
}

// A look goes through the addresses that are listened for only if something may be otherwise than
// before.
func TestCalmLooksGoThroughNoAddress(t *testing.T) {
	a := New(Options{Self: "self", AheadRate: 100, Log: newTestActor(nil, nil).opts.Log, Stats: noStats{},
		Listen: newSegment().Listen})
	defer stopServing(a)
	addr, at, now := netip.MustParseAddr("172.26.240.1"), place{"eth0", lb.IPv4}, time.Now()
	d := desire([]lb.Interface{iface("eth0", 2, 1)}, map[netip.Addr]Answer{})
	d.Ahead = map[netip.Addr]plan.Scout{addr: {On: []string{"eth0"}, Rank: -1}}
	look := func(why string, after time.Duration, calm, known bool) {
		t.Helper()
		now = now.Add(after)
		a.apply(now)
		_, knows := a.Outcome().Scouted[addr]
		if a.ports[at].calm != calm || knows != known {
			t.Errorf("%s: calm is %t and the address known %t, want %t and %t", why, a.ports[at].calm, knows, calm, known)
		}
	}
	hear := func() {
		a.mu.Lock()
		a.overhear(at, addr, "other")
		a.mu.Unlock()
	}
	a.Set(d)
	look("the first look opens the interface", 0, false, false)
	look("the second is the first that heeds what is desired", 0, false, false)
	look("nothing is otherwise", time.Second, true, false)
	hear()
	look("another node was heard", time.Second, false, true)
	look("nothing is otherwise", time.Second, true, true)
	a.Set(d)
	look("something was desired", time.Second, false, true)
	look("nothing is otherwise", aheadFresh-2*time.Second-time.Nanosecond, true, true)
	look("what was heard is over", time.Second, false, false)
	look("nothing is otherwise", time.Second, true, false)
}

// Outcomes are made of what differs from the one before: each says what one made anew would say, its
// version differs just if it does, and one that was read stays as it was.
func TestOutcomesFollowWhatChanges(t *testing.T) {
	for seed := range uint64(20) {
		random := rand.New(rand.NewPCG(seed, 0))
		wakes := uint64(0)
		fails := map[string]bool{}
		a := New(Options{Self: "self", AheadRate: 100, Log: slog.New(slog.DiscardHandler), Stats: noStats{},
			Wakes: func() uint64 { return wakes }, Listen: func(i lb.Interface) (net.PacketConn, error) {
				if fails[i.Name] {
					return nil, errors.New("no")
				}
				return sink{make(chan struct{})}, nil
			}})
		interfaces := []lb.Interface{iface("eth0", 2, 1), iface("eth1", 3, 2)}
		now := time.Now()
		var read, kept Outcome
		for range 300 {
			now = now.Add(time.Duration(random.IntN(1000)) * time.Millisecond)
			addr := netip.AddrFrom4([4]byte{192, 0, 2, byte(random.IntN(12))})
			at := place{interfaces[random.IntN(2)].Name, lb.IPv4}
			switch random.IntN(12) {
			case 0:
				wakes++
			case 1:
				fails[at.iface] = !fails[at.iface]
				if p := a.ports[at]; p != nil && fails[at.iface] {
					p.fail(now, errors.New("no"))
				}
			case 2:
				now = now.Add(aheadFresh / 2)
			case 3, 4:
				a.seen.note(at, addr, theirs.String(), now)
			case 5, 6, 7:
				a.overhear(at, addr, "other")
			default:
				a.Set(randomlyAhead(random, interfaces, wakes))
			}
			a.apply(now)
			outcome := a.Outcome()
			want := Outcome{Answering: answeringAnew(a), Scouted: scoutedAnew(a, now)}
			if d := cmp.Diff(want, Outcome{Answering: outcome.Answering, Scouted: outcome.Scouted}, cmpopts.EquateEmpty(),
				cmpopts.EquateComparable(netip.Addr{})); d != "" {
				t.Fatalf("seed %d: %s", seed, d)
			}
			same := cmp.Equal(withoutVersion(read), withoutVersion(outcome), cmpopts.EquateEmpty(),
				cmpopts.EquateComparable(netip.Addr{}))
			if same != (read.Version == outcome.Version) {
				t.Fatalf("seed %d: version %d after %d, and that it says the same is %t", seed, outcome.Version, read.Version, same)
			}
			if d := cmp.Diff(kept, read, cmpopts.EquateComparable(netip.Addr{})); d != "" {
				t.Fatalf("seed %d: an outcome that was read has changed: %s", seed, d)
			}
			read, kept = outcome, cloned(outcome)
		}
		stopServing(a)
	}
}

// randomlyAhead is what may be desired of twelve addresses: some are answered for, some are probed ahead.
func randomlyAhead(random *rand.Rand, interfaces []lb.Interface, wakes uint64) Desired {
	d := Desired{Interfaces: interfaces, Answers: map[netip.Addr]Answer{}, Ahead: map[netip.Addr]plan.Scout{},
		Ours: map[string]string{own.String(): "self"}, Wakes: wakes}
	for i := range byte(12) {
		addr := netip.AddrFrom4([4]byte{192, 0, 2, i})
		on := [][]string{{"eth0"}, {"eth1"}, {"eth0", "eth1"}}[random.IntN(3)]
		switch random.IntN(4) {
		case 0:
		case 1:
			d.Answers[addr] = Answer{On: on, Owned: true}
		default:
			d.Ahead[addr] = plan.Scout{On: on, Rank: random.IntN(3) - 1, Seldom: random.IntN(4) == 0}
		}
	}
	return d
}

func answeringAnew(a *Actor) map[netip.Addr][]string {
	found := map[netip.Addr][]string{}
	for at, p := range a.ports {
		for vip := range p.vips {
			found[vip] = append(found[vip], at.iface)
			slices.Sort(found[vip])
		}
	}
	return found
}

func scoutedAnew(a *Actor, now time.Time) map[netip.Addr]map[string]string {
	found := map[netip.Addr]map[string]string{}
	for at, p := range a.ports {
		for addr, v := range p.ahead {
			node := v.scouted(a.opts.Self, now)
			used := len(a.seen[place{"eth0", lb.IPv4}][addr])+len(a.seen[place{"eth1", lb.IPv4}][addr]) > 0
			if node == "" || p.problem != nil || used {
				continue
			}
			if found[addr] == nil {
				found[addr] = map[string]string{}
			}
			found[addr][at.iface] = node
		}
	}
	return found
}

func withoutVersion(o Outcome) Outcome {
	o.Version = 0
	return o
}

// cloned copies what an outcome consists of that the next one may share.
func cloned(o Outcome) Outcome {
	o.Answering, o.Scouted = maps.Clone(o.Answering), maps.Clone(o.Scouted)
	for vip, on := range o.Answering {
		o.Answering[vip] = slices.Clone(on)
	}
	for addr, nodes := range o.Scouted {
		o.Scouted[addr] = maps.Clone(nodes)
	}
	return o
}
