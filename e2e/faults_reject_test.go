package e2e

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/landfall-lb/landfall/e2e/lab"
)

// rejectGossip has a node refuse gossip from others, or take it again (-D), as a host's firewall does that resets
// connections: whoever calls hears what it hears of a node without a speaker.
func rejectGossip(t testing.TB, l *lab.Lab, node, action string, from ...string) {
	t.Helper()
	for command, source := range map[string]func(lab.Node) string{
		"iptables":  func(n lab.Node) string { return n.Addr.String() },
		"ip6tables": func(n lab.Node) string { return lab.Twin(n.Addr).String() },
	} {
		for _, n := range l.Cluster().Nodes {
			if slices.Contains(from, n.Name) {
				mustExec(t, l, node, command, action, "INPUT", "-s", source(n), "-p", "tcp", "--dport", "7947", "-j", "REJECT",
					"--reject-with", "tcp-reset")
				mustExec(t, l, node, command, action, "INPUT", "-s", source(n), "-p", "udp", "--dport", "7947", "-j", "REJECT")
			}
		}
	}
}

// TestContract11ARejectedSpeakerTakesNothing has a firewall between the speaker of one node and all others that rejects
// gossip: the kernels say that no other speaker runs. The others do not miss one that has ended as planned, so nothing
// else tells it of them but ARP and NDP.
func TestContract11ARejectedSpeakerTakesNothing(t *testing.T) {
	t.Parallel()
	l := startDualStack(t, lab.Options{})
	podsBesideAPI(t, l)
	targets := []netip.AddrPort{seedVIP, seedVIP6, nextVIP(seedVIP), nextVIP(seedVIP6)}
	addDual(t, l, "first")
	addDual(t, l, "second")
	for _, target := range targets {
		wantAnswers(t, l, lab.ClientName, "tcp", target, "my-nginx-3", "my-nginx-4")
	}
	lone := workers(l)[0]
	if err := l.Agent("speaker", lone).Stop(); err != nil {
		t.Fatal(err)
	}
	owners := map[netip.AddrPort]string{}
	for _, target := range targets {
		owners[target] = wantAnswererAmong(t, l, target.Addr(), otherThan(l, lone)...)
	}
	filter := func(action string) {
		t.Helper()
		rejectGossip(t, l, lone, action, otherThan(l, lone)...)
		for _, node := range otherThan(l, lone) {
			rejectGossip(t, l, node, action, lone)
		}
	}
	filter("-I")
	takesNothing(t, l, lone, owners)
	filter("-D")
	waitTogether(t, l)
	for target, owner := range owners {
		if now := answerer(t, l, target.Addr()); now != owner {
			t.Errorf("%s answers for %s now, which %s served well", now, target.Addr(), owner)
		}
	}
}

// addDual adds a Service of two families in front of the pods of the worked example.
func addDual(t *testing.T, l *lab.Lab, name string) {
	t.Helper()
	if err := l.AddService(t.Context(), lab.Service{Namespace: "default", Name: name, App: "my-nginx",
		Type: "LoadBalancer", Ports: []lab.Port{{Port: 80}},
		IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol}}); err != nil {
		t.Fatal(err)
	}
	wantCondition(t, l, name, "landfall.dev/Announced", "True", "Announced", "is announced from")
}

// takesNothing starts the speaker that is rejected, under traffic: it answers for no address that others serve, and no
// connection is lost.
func takesNothing(t *testing.T, l *lab.Lab, lone string, owners map[netip.AddrPort]string) {
	const each = 25
	long, probes := map[netip.AddrPort]*flows{}, map[netip.AddrPort]*lab.Probe{}
	for target := range owners {
		long[target] = startFlows(t, l, target, each)
		probes[target] = l.StartProbe(t.Context(), lab.FarClientName, "tcp", target, 4*newEvery)
	}
	speaker := l.Agent("speaker", lone)
	if err := errors.Join(speaker.Start(), speaker.WaitReady(t.Context())); err != nil {
		t.Fatal(err)
	}
	for target := range owners {
		wantReason(t, l, lone, target.Addr(), "AddressConflict")
	}
	const alone = "takes itself for the only one: nodes that refuse connections run none"
	if !strings.Contains(speaker.Log(), alone) {
		t.Errorf("it has not logged %q", alone)
	}
	// Longer than a node remembers that it has seen another one use an address.
	for began := time.Now(); time.Since(began) < 15*time.Second; time.Sleep(newEvery) {
		seen, err := views(t.Context(), l, lone)
		for target, owner := range owners {
			if err == nil && len(seen[target.Addr()].Answering) > 0 {
				t.Fatalf("%s answers for %s, which %s serves", lone, target.Addr(), owner)
			}
		}
	}
	for target, owner := range owners {
		wantAnswererAmong(t, l, target.Addr(), owner)
		report, lost := probes[target].Stop(), long[target].stop()
		t.Logf("%s: %s; long-lived: %d of %d lost", target, report, lost, each)
		if wantNoneLost(t, report); lost > 0 {
			t.Errorf("%d long-lived connections were lost", lost)
		}
	}
	wantInStatus(t, speaker, "it may be a node whose speaker this one does not hear")
}

// wantInStatus waits until a speaker's status contains text.
func wantInStatus(t *testing.T, speaker *lab.Agent, text string) {
	t.Helper()
	eventually(t, fmt.Sprintf("%s says %q", speaker.Node, text), func() error {
		status, err := speaker.Get(t.Context(), "/v1/status")
		if err == nil && !strings.Contains(status, text) {
			err = fmt.Errorf("it says %s", status)
		}
		return err
	})
}
