package chaos

import (
	"fmt"
	"maps"
	"net"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/e2e/chaos/contract"
	"github.com/landfall-lb/landfall/e2e/chaos/story"
)

func TestClusterIsValid(t *testing.T) {
	c := cluster()
	if err := c.Validate(); err != nil {
		t.Fatal(err)
	}
	if n := len(Cast().Nodes); n != 4 {
		t.Errorf("%d nodes announce, want 4", n)
	}
	for _, s := range services() {
		nodes := map[string]bool{}
		for _, p := range c.Pods {
			if p.App == s.App {
				nodes[p.Node] = true
			}
			if got := appOfPod(p.Name); got != p.App {
				t.Errorf("the app of %s is %q, want %q", p.Name, got, p.App)
			}
		}
		if len(nodes) != 2 {
			t.Errorf("the pods of %s are on %v, want two nodes", s.Name, nodes)
		}
	}
	if a, b := churnService("churn-1"), churnService("churn-2"); reflect.DeepEqual(a.Annotations, b.Annotations) &&
		a.ExternalTrafficPolicy == b.ExternalTrafficPolicy {
		t.Error("Services of churn are all alike")
	}
}

func TestTakeovers(t *testing.T) {
	log := strings.Join([]string{
		`time=2026-01-02T03:04:06.000Z level=INFO msg="owner changes" vip=10.0.0.2 from=n2 to=n1 interfaces=[eth0] handover=true`,
		`time=2026-01-02T03:04:06.000Z level=INFO msg="owner changes" vip=10.0.0.3 from=n1 to=n2 interfaces=[]`,
		`time=2026-01-02T03:04:07.000Z level=INFO msg="something else" vip=10.0.0.4 to=n1 interfaces=[eth0]`, "",
	}, "\n")
	got := takeovers(log)
	if len(got) != 1 || got[0].vip != netip.MustParseAddr("10.0.0.2") || got[0].to != "n1" {
		t.Errorf("got %+v", got)
	}
}

// ownerChanges is a line of a speaker's log.
func ownerChanges(at, vip, to, interfaces string) string {
	return fmt.Sprintf("time=%s level=INFO msg=\"owner changes\" vip=%s from=x to=%s interfaces=%s handover=false\n", at, vip,
		to, interfaces)
}

// TestAnnouncedAfter: a node that was cut off took two addresses and gave one up while it was away, and took a third
// when it was back, which it then gave up. Its clock was set wrong before that, and during it.
func TestAnnouncedAfter(t *testing.T) {
	const ahead, behind, right = "2026-01-04T03:04:00.000Z", "2025-12-31T03:04:00.000Z", "2026-01-02T03:04:09.000Z"
	before := ownerChanges(ahead, "10.0.0.9", "n1", "[eth0]")
	during := ownerChanges(behind, "10.0.0.1", "n1", "[eth0]") + ownerChanges(ahead, "10.0.0.2", "n1", "[eth0]") +
		ownerChanges(ahead, "10.0.0.1", `""`, "[]")
	after := ownerChanges(right, "10.0.0.3", "n1", "[eth0]") + ownerChanges(right, "10.0.0.3", "n2", "[eth0]")
	of := bounds{logs{"s": before}.lengths(), logs{"s": before + during}.lengths()}
	want := []netip.Addr{netip.MustParseAddr("10.0.0.2"), netip.MustParseAddr("10.0.0.3")}
	if got := announcedAfter(logs{"s": before + during + after}, of, "s", "n1"); !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

// What was logged before an event does not belong to it, however far ahead the clock of the program was.
func TestLogsAfter(t *testing.T) {
	before := logs{"a": ownerChanges("2036-01-02T03:04:05.000Z", "10.0.0.1", "n1", "[eth0]"), "b": "one\n"}
	now := logs{"a": before["a"] + "past\n", "b": before["b"], "c": "new\n"}
	if got, want := now.after(before.lengths()), (logs{"a": "past\n", "b": "", "c": "new\n"}); !maps.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
	began := time.Now()
	marks := []mark{{began, lengths{"a": 1}}, {began.Add(time.Minute), lengths{"a": 2}}}
	for after, want := range map[time.Duration]int{-1: 0, 0: 1, time.Second: 1, time.Minute: 2, time.Hour: 2} {
		if got := markBefore(marks, began.Add(after))["a"]; got != want {
			t.Errorf("%v after the first: %d, want %d", after, got, want)
		}
	}
}

func TestUses(t *testing.T) {
	addr := netip.MustParseAddr("192.168.177.20")
	for text, want := range map[string]bool{
		`{"services":[{"ports":[{"backends":[{"address":"192.168.177.20:80","ready":true}]}]}]}`:  true,
		`{"services":[{"ports":[{"backends":[{"address":"192.168.177.20:80","ready":false}]}]}]}`: false,
		`{"services":[{"ports":[{"backends":[{"address":"192.168.177.21:80","ready":true}]}]}]}`:  false,
		`{"services":[]}`: false, ``: false,
	} {
		if got := uses(text, addr); got != want {
			t.Errorf("%s: %v, want %v", text, got, want)
		}
	}
}

func TestFrames(t *testing.T) {
	w := &wire{mac: net.HardwareAddr{2, 0, 0, 0, 0, 1}, own: netip.MustParseAddr("172.26.236.20"),
		link: netip.MustParseAddr("fe80::1%eth0")}
	arp := w.arpFrame(1, w.own, netip.MustParseAddr("172.26.236.180"))
	if want := "\xff\xff\xff\xff\xff\xff\x02\x00\x00\x00\x00\x01\x08\x06\x00\x01\x08\x00\x06\x04\x00\x01" +
		"\x02\x00\x00\x00\x00\x01\xac\x1a\xec\x14\x00\x00\x00\x00\x00\x00\xac\x1a\xec\xb4"; string(arp[:42]) != want || len(arp) != 60 {
		t.Errorf("% x", arp)
	}
	ns, err := w.solicitation(netip.MustParseAddr("fd00::180"))
	if err != nil {
		t.Fatal(err)
	}
	if want := "\x33\x33\xff\x00\x01\x80\x02\x00\x00\x00\x00\x01\x86\xdd\x60\x00\x00\x00\x00\x20\x3a\xff"; string(ns[:22]) != want ||
		len(ns) != 14+40+32 {
		t.Errorf("% x", ns)
	}
}

func TestAdvertisementFrame(t *testing.T) {
	w := &wire{mac: net.HardwareAddr{2, 0, 0, 0, 0, 1}}
	na, err := w.advertisement(netip.MustParseAddr("fd00::180"))
	if err != nil {
		t.Fatal(err)
	}
	if want := "\x33\x33\x00\x00\x00\x01\x02\x00\x00\x00\x00\x01\x86\xdd\x60\x00\x00\x00\x00\x20\x3a\xff\xfd\x00"; string(na[:24]) != want ||
		len(na) != 14+40+32 || na[54] != 136 {
		t.Errorf("% x", na)
	}
}

func TestReport(t *testing.T) {
	told := story.Story{Seed: 7, Config: story.Config{Mode: "nftables", Direct: true}, Rounds: []story.Round{
		{Events: []story.Event{{ID: 1, Kind: story.Stop}, {ID: 2, Kind: story.Burst}}}, {Events: []story.Event{{ID: 3, Kind: story.Stop}}}}}
	if text := Report(Result{Told: told, Changes: 700, Fastest: 104, LoadBefore: "1.67 2.17 7.33", LoadAfter: "9 3 2"}); !strings.Contains(text, "seed 7: nftables, direct forwarding, 2 rounds, 3 events") ||
		!strings.Contains(text, "700 changes of objects, up to 104 in a second; burst 1, stop 2\n") ||
		!strings.Contains(text, "1.67 2.17 7.33 at the beginning, 9 3 2 at the end") || !strings.Contains(text, "every clause held") {
		t.Error(text)
	}
	var bad []contract.Violation
	for range mostShown + 2 {
		bad = append(bad, contract.Violation{Clause: 5, Name: "planned changes lose nothing", Round: 3, Text: "a request"})
	}
	text := Report(Result{Violations: bad, Journal: "the journal\n"})
	if strings.Count(text, "VIOLATED in round 3: clause 5") != mostShown || !strings.Contains(text, "lose nothing: 7 in all") ||
		!strings.HasSuffix(text, "the journal\n") {
		t.Error(text)
	}
	if Alike(bad, []contract.Violation{{Name: "another"}}) || !Alike(bad, bad[:1]) {
		t.Error("violations of one clause are alike, and others are not")
	}
}
