// Package nstest gives tests temporary network namespaces, in which they use a real kernel without
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

// NS is a network namespace that exists until its test ends.
type NS struct {
	// Name is the name under /run/netns, for ip netns exec.
	Name   string
	handle netns.NsHandle
}

var counter atomic.Int64

// New creates a network namespace whose loopback interface is up. Without root it skips the test.
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

// ForcesForwarding reports whether the kernel has the parameter force_forwarding of IPv6, as from Linux 6.17 on.
func ForcesForwarding() bool {
	_, err := os.Stat("/proc/sys/net/ipv6/conf/all/force_forwarding")
	return err == nil
}

// Do calls f on a thread inside the namespace. Sockets that f opens stay in the namespace;
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

// Run runs a command in the namespace and returns its output. It fails the test if the command
// fails.
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

// Veth connects two namespaces by a pair of veth interfaces with the given names and addresses
// (CIDR notation; "" for none).
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

// onThread runs f on a thread of its own. The thread ends with f, because f may have changed its
// namespace.
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
