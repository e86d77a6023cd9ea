package main

import (
	"encoding/json"
	"net/netip"
	"os/exec"
	"runtime"
	"strings"
	"testing"

	"github.com/vishvananda/netns"

	"github.com/landfall-lb/landfall/internal/nstest"
)

// First packets get through rules that translate them, which takes right checksums, and no further than the pods'
// namespace. Connections go on.
func TestFirstPackets(t *testing.T) {
	node := nstest.New(t)
	node.Run(t, "sysctl", "-qw", "net.ipv4.ip_forward=1")
	byHand := references[len(references)-1]
	load := exec.Command("ip", "netns", "exec", node.Name, "nft", "-f", "-")
	load.Stdin = strings.NewReader(byHand.rules)
	if out, err := load.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	p, err := newPath(outsidePlan{}, node.Name)
	if err != nil {
		t.Fatal(err)
	}
	const packets = 50
	for _, vip := range []string{clusterVIP, localVIP} {
		to, before := netip.MustParseAddr(vip), dropped(t, p)
		err := p.inside(func() error {
			if err := p.connections(to, 1); err != nil {
				return err
			}
			return p.firsts(to, packets)
		})
		if err != nil {
			t.Fatalf("%s: %v", vip, err)
		}
		if got := dropped(t, p) - before; got != packets {
			t.Errorf("%s: %d of %d first packets came to the pods", vip, got, packets)
		}
	}
}

// dropped is how many first packets came to the pods so far.
func dropped(t *testing.T, p *path) (n int) {
	t.Helper()
	done := make(chan struct{})
	var out []byte
	var err error
	go func() {
		defer close(done)
		runtime.LockOSThread() // never unlocked: the thread ends in another namespace
		if err = netns.Set(p.pods); err == nil {
			out, err = exec.Command("nft", "-j", "list", "table", "ip", "firsts").Output()
		}
	}()
	<-done
	if err != nil {
		t.Fatal(err)
	}
	var listed struct {
		Nftables []struct {
			Rule struct {
				Expr []struct {
					Counter *struct{ Packets int }
				}
			}
		}
	}
	if err := json.Unmarshal(out, &listed); err != nil {
		t.Fatal(err)
	}
	for _, object := range listed.Nftables {
		for _, e := range object.Rule.Expr {
			if e.Counter != nil {
				n += e.Counter.Packets
			}
		}
	}
	return n
}
