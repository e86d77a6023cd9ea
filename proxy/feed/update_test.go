package feed

import (
	"encoding/json"
	"math"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
)

func (r *reader) say(line string) {
	r.t.Helper()
	if _, err := r.conn.Write([]byte(line + "\n")); err != nil {
		r.t.Fatal(err)
	}
}

// expectDead waits until these nodes count as dead.
func (r running) expectDead(t *testing.T, want ...string) {
	t.Helper()
	for {
		n, ok := r.Heard()
		if slices.Equal(n.Dead, want) {
			if !ok && len(want) > 0 {
				t.Errorf("nobody has said %v", want)
			}
			return
		}
		select {
		case <-r.changes:
		case <-time.After(time.Minute):
			t.Fatalf("dead are %v, want %v", n.Dead, want)
		}
	}
}

func TestWhatASpeakerSaysCountsWhileItIsThere(t *testing.T) {
	path := filepath.Join(t.TempDir(), "feed.sock")
	a := start(t, path)
	one := dial(t, path)
	one.say(`{"dead":["a","b"]}`)
	a.expectDead(t, "a", "b")
	one.say(`{"dead":["b"],"beat":2000,"later":"versions say more"}`)
	a.expectDead(t, "b")
	one.say(`{"same":true}`)
	two := dial(t, path) // its successor, which knows nothing yet
	a.expectDead(t, "b")
	two.say(`{"dead":["c"]}`)
	a.expectDead(t, "c")
	one.say(`{"changes":true,"dead":["x"]}`) // whoever is not the last has to connect anew, and say all
	for one.in.Scan() {                      // until it is cut off
	}
	two.say(`{"changes":true,"dead":["c","d"]}`)
	a.expectDead(t, "c", "d")
	two.conn.Close()
	a.expectDead(t)
}

// TestChangesAddUp has a speaker, and the next one, say where VIPs were.
func TestChangesAddUp(t *testing.T) {
	path := filepath.Join(t.TempDir(), "feed.sock")
	a := start(t, path)
	var all lb.FeedUpdate
	say := func(r *reader, line string) (news string) {
		t.Helper()
		r.say(line)
		for {
			if n, ok := a.Heard(); ok && len(n.Previous)+len(n.Ended) > 0 {
				all.Apply(n)
				n.Changes, n.Number = false, 0
				text, err := json.Marshal(n)
				if err != nil {
					t.Fatal(err)
				}
				return string(text)
			}
			select {
			case <-a.changes:
			case <-time.After(time.Minute):
				t.Fatalf("nothing came of %s", line)
			}
		}
	}
	want := func(line, got, news string) {
		t.Helper()
		if got != news {
			t.Errorf("%s is heard as %s, want %s", line, got, news)
		}
	}
	one := dial(t, path)
	for _, c := range [][2]string{
		{`{"former":{"192.0.2.1":["10.0.0.1"],"192.0.2.2":[]},"ring":{"192.0.2.2":["10.0.0.1"]}}`, ``},
		{`{"changes":true,"former":{"192.0.2.2":["10.0.0.2"]}}`, ``},
		{`{"changes":true,"former":{"192.0.2.3":[]},"ended":["192.0.2.2"]}`,
			`{"ended":["192.0.2.2"],"former":{"192.0.2.3":[]}}`},
	} {
		if c[1] == "" {
			c[1] = strings.Replace(c[0], `"changes":true,`, "", 1)
		}
		want(c[0], say(one, c[0]), c[1])
	}
	one.conn.Close()
	a.expectDead(t)
	two := dial(t, path)
	line := `{"former":{"192.0.2.3":["10.0.0.3"],"192.0.2.4":[]}}`
	want(line, say(two, line), `{"ended":["192.0.2.1"],"former":{"192.0.2.3":["10.0.0.3"],"192.0.2.4":[]}}`)
	if len(all.Previous) != 2 || len(all.Ring) != 0 {
		t.Errorf("what was heard adds up to %+v", all)
	}
}

// TestOneThatNamesWhatIsUnannouncedKnowsOfGates has a speaker of an earlier release, which does not say Gates, say what
// is unannounced once it is asked.
func TestOneThatNamesWhatIsUnannouncedKnowsOfGates(t *testing.T) {
	path := filepath.Join(t.TempDir(), "feed.sock")
	a := start(t, path)
	say := func(r *reader, line string, want bool) {
		t.Helper()
		r.say(line)
		for {
			if n, ok := a.Heard(); ok && len(n.Previous) > 0 {
				if n.Gates != want {
					t.Errorf("%s is heard with gates %v", line, n.Gates)
				}
				return
			}
			select {
			case <-a.changes:
			case <-time.After(time.Minute):
				t.Fatalf("nothing came of %s", line)
			}
		}
	}
	one := dial(t, path)
	say(one, `{"former":{"192.0.2.1":[]}}`, false)
	say(one, `{"changes":true,"former":{"192.0.2.1":[]},"unannounced":{"192.0.2.1":{"reason":"NotEstablished"}}}`, true)
	say(one, `{"changes":true,"former":{"192.0.2.1":[]}}`, true)
	two := dial(t, path)
	say(two, `{"former":{"192.0.2.1":[]}}`, false)
	say(two, `{"former":{"192.0.2.1":[]},"gates":true}`, true)
}

// TestRescuedIsAnswered: a speaker hears the number of its last update once all is in the kernel
// that Heard has returned up to then; no other reader hears it.
func TestRescuedIsAnswered(t *testing.T) {
	path := filepath.Join(t.TempDir(), "feed.sock")
	a := start(t, path)
	a.Begin(nil)
	hears := func(r *reader, want uint64) {
		t.Helper()
		for range 3 { // a beat may come first, and says the same
			var m lb.FeedMessage
			if !r.in.Scan() || json.Unmarshal(r.in.Bytes(), &m) != nil {
				t.Fatalf("heard %q, %v", r.in.Bytes(), r.in.Err())
			}
			if m.Rescued == want {
				return
			}
		}
		t.Errorf("%d is not heard", want)
	}
	number := func(dead string) uint64 {
		t.Helper()
		a.expectDead(t, dead)
		n, _ := a.Heard()
		return n.Number
	}
	one := dial(t, path)
	hears(one, 0)
	one.say(`{"dead":["a"],"number":41}`)
	first := number("a")
	one.say(`{"dead":["b"],"number":42,"changes":true}`)
	second := number("b")
	a.Rescued(first)
	hears(one, 0) // 41 is not the last one any more
	a.Rescued(second)
	hears(one, 42)
	two := dial(t, path)
	hears(two, 0)
	two.say(`{"dead":["c"],"number":1}`)
	third := number("c")
	a.Rescued(second) // late
	hears(two, 0)
	a.Rescued(third)
	hears(two, 1)
	hears(one, 0)
	two.say(`{"dead":["d"],"changes":true}`) // of an earlier release
	a.Rescued(number("d"))
	hears(two, 0)
}

// Nonsense is not believed, and the speaker still hears what is delivered.
func TestContract7NonsenseFromASpeakerIsIgnored(t *testing.T) {
	for name, line := range map[string]string{
		"no JSON":             `dead: a`,
		"another type":        `{"dead":"a"}`,
		"no name":             `{"dead":[""]}`,
		"a long name":         `{"dead":["` + strings.Repeat("a", 300) + `"]}`,
		"no address":          `{"former":{"192.0.2.1":["here"]}}`,
		"an empty one":        `{"gone":[""]}`,
		"an empty address":    `{"former":{"192.0.2.1":[""]}}`,
		"another family":      `{"former":{"192.0.2.1":["2001:db8::1"]}}`,
		"a zone":              `{"former":{"fe80::1":["fe80::2%eth0"]}}`,
		"too many nodes":      `{"former":{"192.0.2.1":["192.0.2.2"` + strings.Repeat(`,"192.0.2.2"`, 20) + `]}}`,
		"another in a ring":   `{"ring":{"192.0.2.1":["2001:db8::1"]}}`,
		"too long a ring":     `{"ring":{"192.0.2.1":["192.0.2.2"` + strings.Repeat(`,"192.0.2.2"`, 20) + `]}}`,
		"a line without end":  `{"dead":["a"]}` + strings.Repeat(" ", maxLine+1),
		"a beat of days":      `{"beat":100000000}`,
		"a beat before times": `{"beat":-1}`,
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "feed.sock")
			a := start(t, path)
			a.Update(nil)
			r := dial(t, path)
			r.say(`{"dead":["x"]}`)
			a.expectDead(t, "x")
			r.say(line)
			a.expectDead(t)
			a.Begin(nil)
			r.expect(lb.FeedMessage{Complete: true})
		})
	}
}

// A speaker that hangs keeps its socket open.
func TestASpeakerThatHangsIsNoticed(t *testing.T) {
	path := filepath.Join(t.TempDir(), "feed.sock")
	a := start(t, path)
	a.Update(nil)
	r := dial(t, path)
	r.say(`{"dead":["x"],"beat":20}`)
	a.expectDead(t, "x")
	a.expectDead(t)
	if r.in.Scan() {
		t.Errorf("it hears %q", r.in.Bytes())
	}
}

// A speaker hears from a proxy that has nothing to say.
func TestBeat(t *testing.T) {
	path := filepath.Join(t.TempDir(), "feed.sock")
	a := start(t, path)
	a.Begin(nil)
	r := dial(t, path)
	r.expect(lb.FeedMessage{Complete: true})
	r.expect(lb.FeedMessage{})
	r.expect(lb.FeedMessage{})
}

func FuzzDecode(f *testing.F) {
	f.Add([]byte(`{"dead":["k8s-worker-177"],"beat":2000}`))
	f.Add([]byte(`{"same":true,"beat":2000}`))
	f.Add([]byte(`{"former":{"192.0.2.1":["172.26.236.177"],"2001:db8::1":["2001:db8::177"]}}`))
	f.Add([]byte(`{"former":{"192.0.2.1":[]},"unannounced":{"192.0.2.1":{"reason":"NotOwner","elsewhere":true}}}`))
	f.Add([]byte(`{"ring":{"192.0.2.1":["172.26.236.177","172.26.236.178"]}}`))
	f.Fuzz(func(t *testing.T, line []byte) {
		n, err := decode(line)
		if err != nil {
			return
		}
		if len(n.Dead) > maxDead || slices.Contains(n.Dead, "") || n.Beat < 0 {
			t.Errorf("%q is taken for %+v", line, n)
		}
		for vip, nodes := range n.Previous {
			for _, node := range nodes {
				if !vip.IsValid() || net.ParseIP(node.String()) == nil || lb.FamilyOf(vip) != lb.FamilyOf(node) {
					t.Errorf("%q is taken for %+v", line, n)
				}
			}
		}
		for vip, why := range n.Unannounced {
			if _, named := n.Previous[vip]; !named || why.Reason == "" || len(why.Reason) > maxReason {
				t.Errorf("%q is taken for %+v", line, n)
			}
		}
		text, err := json.Marshal(n)
		if err != nil {
			t.Fatal(err)
		}
		again, err := decode(text)
		if err != nil || !slices.Equal(again.Dead, n.Dead) || len(again.Previous) != len(n.Previous) ||
			len(again.Ring) != len(n.Ring) || len(again.Unannounced) != len(n.Unannounced) {
			t.Errorf("%q is read as %+v, and that as %+v, %v", line, n, again, err)
		}
	})
}

// A speaker says all in one line when it connects. All that it may say has to fit: otherwise whoever has many
// addresses, as a tenant without a quota can, would have every proxy ignore its speaker.
func TestContract11AllThatASpeakerMaySayFits(t *testing.T) {
	const some = 64
	longest := func(n byte) netip.Addr {
		return netip.AddrFrom16([16]byte{0xfd, 0x11, 0x11, 0x11, 0x11, 0x11, 0x11, 0x11, 0x11, 0x11, 0x11, 0x11, 0x11, 0x11,
			0x11, n})
	}
	u := lb.FeedUpdate{Previous: map[netip.Addr][]netip.Addr{}, Ring: map[netip.Addr][]netip.Addr{},
		Unannounced: map[netip.Addr]lb.Unannounced{}}
	for i := range byte(some) {
		vip := longest(0x20 + i)
		u.Previous[vip] = []netip.Addr{longest(0xff)}
		for range lb.MaxRing {
			u.Ring[vip] = append(u.Ring[vip], longest(0xff))
		}
		u.Unannounced[vip] = lb.Unannounced{Reason: lb.Reason(strings.Repeat("r", maxReason)), Elsewhere: true,
			Service: math.MaxUint32}
		u.Dead, u.Gone = append(u.Dead, strings.Repeat("n", maxName)), append(u.Gone, longest(0xff))
	}
	line, err := json.Marshal(u)
	if err != nil {
		t.Fatal(err)
	}
	nodes, err := json.Marshal(lb.FeedUpdate{Dead: u.Dead, Gone: u.Gone})
	if err != nil {
		t.Fatal(err)
	}
	if all := (len(line)-len(nodes))*maxVIPs/some + len(nodes)*maxDead/some; all > maxLine {
		t.Errorf("a line with %d addresses and %d dead nodes has %d bytes; %d are read", maxVIPs, maxDead, all, maxLine)
	}
}
