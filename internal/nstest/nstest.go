// Package nstest gives tests throw-away network namespaces, so that they meet a real kernel without
// touching the machine's own network.
package nstest

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
)

// NS is a network namespace that ends with its test.
type NS struct {
	// Name is the name under /run/netns, for ip netns exec.
	Name   string
	handle netns.NsHandle
}

var counter atomic.Int64

// New makes a network namespace with its loopback up. Without root the test is skipped.
func New(t testing.TB) *NS {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("network namespaces need root")
	}
	ns := &NS{Name: fmt.Sprintf("lftest-%d-%d", os.Getpid(), counter.Add(1))}
	onThread(t, func() error {
		handle, err := netns.NewNamed(ns.Name)
		ns.handle = handle
		return err
	})
	t.Cleanup(func() {
		ns.handle.Close()
		if err := netns.DeleteNamed(ns.Name); err != nil {
			t.Errorf("delete namespace %s: %v", ns.Name, err)
		}
	})
	ns.Run(t, "ip", "link", "set", "lo", "up")
	return ns
}

// Do calls f on a thread that is in the namespace. Sockets that f opens stay in the namespace,
// goroutines that it starts do not.
func (ns *NS) Do(t testing.TB, f func() error) {
	t.Helper()
	onThread(t, func() error {
		if err := netns.Set(ns.handle); err != nil {
			return err
		}
		return f()
	})
}

// Run runs a command in the namespace, fails the test if it fails, and returns what it printed.
func (ns *NS) Run(t testing.TB, name string, args ...string) string {
	t.Helper()
	var out []byte
	ns.Do(t, func() (err error) {
		if out, err = exec.Command(name, args...).CombinedOutput(); err != nil {
			return fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, out)
		}
		return nil
	})
	return string(out)
}

// Veth joins two namespaces by a virtual cable whose ends carry the given names and addresses (CIDR
// notation; none if "").
func Veth(t testing.TB, a *NS, nameA, addrA string, b *NS, nameB, addrB string) {
	t.Helper()
	a.Do(t, func() error {
		return netlink.LinkAdd(&netlink.Veth{
			LinkAttrs:     netlink.LinkAttrs{Name: nameA},
			PeerName:      nameB,
			PeerNamespace: netlink.NsFd(b.handle),
		})
	})
	for _, end := range []struct {
		ns         *NS
		name, addr string
	}{{a, nameA, addrA}, {b, nameB, addrB}} {
		if end.addr != "" {
			args := []string{"addr", "add", end.addr, "dev", end.name}
			if strings.Contains(end.addr, ":") {
				args = append(args, "nodad")
			}
			end.ns.Run(t, "ip", args...)
		}
		end.ns.Run(t, "ip", "link", "set", end.name, "up")
	}
}

// onThread runs f on a thread of its own, which is thrown away after, as it may have changed
// namespaces.
func onThread(t testing.TB, f func() error) {
	t.Helper()
	failed := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the runtime ends the thread with the goroutine
		failed <- f()
	}()
	if err := <-failed; err != nil {
		t.Fatal(err)
	}
}
