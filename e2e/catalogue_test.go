package e2e

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/landfall-lb/landfall/e2e/lab"
	"github.com/landfall-lb/landfall/e2e/lab/labtest"
)

// catalogueObjects are what the bystanders need, and what hostile objects meet.
const catalogueObjects = `
apiVersion: landfall.dev/v1beta1
kind: IPAddressPool
metadata: {name: vmware}
spec:
  addresses: [172.26.236.180-172.26.236.189, "fd00:172:26:236::180/128"]
  serviceAllocation: {namespaces: [default]}
---
apiVersion: landfall.dev/v1beta1
kind: L2Advertisement
metadata: {name: vmware}
spec: {ipAddressPools: [vmware]}
---
apiVersion: landfall.dev/v1beta1
kind: IPAddressPool
metadata: {name: routed}
spec:
  addresses: [203.0.113.180-203.0.113.189, "fd00:203:0:113::180/128"]
  serviceAllocation: {namespaces: [far]}
---
apiVersion: landfall.dev/v1beta1
kind: BGPAdvertisement
metadata: {name: routed}
spec: {ipAddressPools: [routed], peers: [tor-1, tor-1-v6]}
---
apiVersion: landfall.dev/v1beta1
kind: BGPPeer
metadata: {name: tor-1}
spec: {myASN: 64500, peerASN: 64501, peerAddress: 172.26.236.1}
---
apiVersion: landfall.dev/v1beta1
kind: BGPPeer
metadata: {name: tor-1-v6}
spec: {myASN: 64500, peerASN: 64501, peerAddress: "fd00:172:26:236::1"}
---
apiVersion: landfall.dev/v1beta1
kind: IPAddressPool
metadata: {name: bait}
spec: {addresses: [198.18.0.0/24, "fd00:198:18::/120"], serviceAllocation: {namespaces: [hostile]}}
---
apiVersion: landfall.dev/v1beta1
kind: IPAddressPool
metadata: {name: kept}
spec:
  addresses: [198.18.1.0/28]
  autoAssign: false
  avoidBuggyIPs: true
  excludedAddresses: [198.18.1.2/32]
  reservations: [{addresses: 198.18.1.1/32, namespace: default}]
---
apiVersion: landfall.dev/v1beta1
kind: IPAddressPool
metadata: {name: small}
spec: {addresses: [198.18.3.0/28], autoAssign: false, addressesPerNamespace: 1}
---
apiVersion: landfall.dev/v1beta1
kind: IPAddressPool
metadata: {name: tiny}
spec: {addresses: [198.18.4.1/32], autoAssign: false}
---
apiVersion: landfall.dev/v1beta1
kind: IPAddressPool
metadata: {name: six}
spec: {addresses: ["fd00:198:19::/120"], autoAssign: false}
---
apiVersion: landfall.dev/v1beta1
kind: IPAddressPool
metadata: {name: nodes}
spec: {addresses: [172.26.236.179/32], autoAssign: false}
---
apiVersion: landfall.dev/v1beta1
kind: BFDProfile
metadata: {name: slow}
spec: {transmitInterval: 1000, receiveInterval: 1000, detectMultiplier: 10}
---
apiVersion: landfall.dev/v1beta1
kind: BGPPeer
metadata: {name: fuzzer}
spec:
  myASN: 64500
  peerASN: 64666
  peerAddress: 172.26.236.20
  acceptRoutes: true
  bfdProfile: slow
  nodeSelectors: [{matchLabels: {kubernetes.io/hostname: k8s-worker-177}}]
---
apiVersion: landfall.dev/v1beta1
kind: BGPPeer
metadata: {name: fuzzer-v6}
spec:
  myASN: 64500
  peerASN: 64666
  peerAddress: "fd00:172:26:236::20"
  acceptRoutes: true
  bfdProfile: slow
  nodeSelectors: [{matchLabels: {kubernetes.io/hostname: k8s-worker-177}}]
`

// The Service over BGP, and the node that speaks with the hostile peer, which is at the address of
// the client on the LAN.
var (
	routedVIP  = netip.MustParseAddrPort("203.0.113.180:80")
	routedVIP6 = netip.AddrPortFrom(lab.Twin(routedVIP.Addr()), routedVIP.Port())
)

const (
	hostileHost = lab.ClientName
	besieged    = "k8s-worker-177"
)

// TestCatalogue sends what the catalogue of bad input holds, and checks each answer. Meanwhile
// clients use a Service over L2 and one over BGP, over IPv4 and IPv6, which lose nothing; no agent
// ends, panics, or grows without a bound.
func TestCatalogue(t *testing.T) {
	t.Parallel()
	l := startCatalogueWith(t, map[string]any{
		"proxy":      map[string]any{"mode": "nftables"},
		"relay":      map[string]any{"enabled": true, "udp": true},
		"metrics":    map[string]any{"listen": "all"},
		"controller": map[string]any{"replicas": 1, "dashboard": map[string]any{"enabled": true}},
	})
	began := agentsNow(t, l)
	bystanders := startBystanders(t, l)
	t.Run("refused by the API server", func(t *testing.T) {
		for _, all := range []map[string][]badObject{refusedObjects(t), schemaRows(t)} {
			for _, file := range sortedKeys(all) {
				t.Run(file, func(t *testing.T) { refuseObjects(t, l, file, all[file]) })
			}
		}
	})
	t.Run("told by Landfall", func(t *testing.T) {
		for _, file := range []string{"services", "objects"} {
			t.Run(file, func(t *testing.T) {
				rows := readCatalogue(t, filepath.Join("catalogue", "told-"+file+".yaml"), "Service")
				remove := tellObjects(t, l, "told-"+file, rows)
				if file == "objects" {
					remove() // those Services stay to the end
				}
			})
		}
		t.Run("endpoints", func(t *testing.T) { hostileEndpoints(t, l) })
	})
	t.Run("BGP", func(t *testing.T) { hostileBGP(t, l) })
	t.Run("BFD", func(t *testing.T) { hostileBFD(t, l) })
	t.Run("neighbors", func(t *testing.T) { hostileNeighbors(t, l) })
	t.Run("gossip", func(t *testing.T) { hostileGossip(t, l, nodeAddr(l, besieged)) })
	t.Run("HTTP", func(t *testing.T) { hostileHTTP(t, l) })
	t.Run("the relay's port", func(t *testing.T) { hostileRelay(t, l) })
	t.Run("sockets", func(t *testing.T) { hostileSockets(t, l) })
	host := openHostileHost(t, l)
	t.Run("packets", func(t *testing.T) { host.packets(t, 0) })
	wantUnharmed(t, l, began)
	inMode(t, l, "iptables")
	began = agentsNow(t, l)
	t.Run("packets in iptables mode", func(t *testing.T) { host.packets(t, 1) })
	host.wantNoMore(t)
	bystanders.wantLossless(t)
	wantUnharmed(t, l, began)
	gossipOverIPv6(t, l)
	began, bystanders = agentsNow(t, l), startBystanders(t, l)
	t.Run("gossip over IPv6", func(t *testing.T) { hostileGossip(t, l, lab.Twin(nodeAddr(l, besieged))) })
	bystanders.wantLossless(t)
	wantUnharmed(t, l, began)
}

// inMode starts the proxies anew in another mode, one after the other as a rolling update does, and waits until
// there are no rules but those of it.
func inMode(t *testing.T, l *lab.Lab, mode string) {
	t.Helper()
	for _, a := range l.Agents("proxy") {
		a.SetFlag("mode", mode)
		if err := a.Restart(t.Context()); err != nil {
			t.Fatal(err)
		}
		eventually(t, a.Node+" has only rules of "+mode, func() error {
			tables := mustExec(t, l, a.Node, "nft", "list", "tables")
			if strings.Contains(tables, "table ip landfall\n") || strings.Contains(tables, "table ip6 landfall\n") {
				return errors.New(tables)
			}
			return nil
		})
	}
}

func startCatalogue(t *testing.T) *lab.Lab { return startCatalogueWith(t, map[string]any{}) }

// startCatalogueWith starts the lab of the catalogue, with more values of the chart.
func startCatalogueWith(t *testing.T, values map[string]any) *lab.Lab {
	t.Helper()
	cluster := lab.SeedCluster()
	cluster.DualStack = true
	cluster.ToR = lab.ToR{Kind: lab.FRR, Count: 1, ASN: 64501, NodeASN: 64500}
	values["speaker"] = map[string]any{"bgpListen": ":179"}
	l := labtest.Start(t, cluster, lab.Options{Values: values})
	ctx := t.Context()
	hostile := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: hostileNamespace}}
	if _, err := l.Kube().CoreV1().Namespaces().Create(ctx, hostile, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := l.ApplyYAML(ctx, catalogueObjects); err != nil {
		t.Fatal(err)
	}
	near, far := lab.SeedService(), lab.Service{Namespace: "far", Name: "routed", App: "my-nginx", Type: "LoadBalancer",
		Ports: []lab.Port{{Port: 80}}}
	near.IPFamilies = []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol}
	far.IPFamilies = near.IPFamilies
	for _, s := range []lab.Service{near, far} {
		if err := l.AddService(ctx, s); err != nil {
			t.Fatal(err)
		}
	}
	wantAddresses(t, l, "my-nginx", "172.26.236.180", "fd00:172:26:236::180")
	wantCondition(t, l, "my-nginx", "landfall.dev/Announced", "True", "Announced", "172.26.236.180 is announced from ")
	for _, vip := range []netip.AddrPort{routedVIP, routedVIP6} {
		wantRouted(t, l, vip.Addr(), workers(l)...)
	}
	return l
}

// bystanders are clients of the Services that nobody attacks.
type bystanders struct {
	probes []*lab.Probe
	flows  []*flows
}

const bystanderEvery = 25 * time.Millisecond

func startBystanders(t *testing.T, l *lab.Lab) *bystanders {
	t.Helper()
	b := &bystanders{}
	for _, of := range []struct {
		from   string
		target netip.AddrPort
	}{
		{lab.ClientName, seedVIP}, {lab.FarClientName, routedVIP},
		{lab.ClientName, seedVIP6}, {lab.FarClientName, routedVIP6},
	} {
		b.flows = append(b.flows, startFlowsFrom(t, l, of.from, of.target, 20))
	}
	// New ones come from other clients: see startTraffic.
	for _, target := range []netip.AddrPort{seedVIP, routedVIP, seedVIP6, routedVIP6} {
		b.probes = append(b.probes, l.StartProbe(t.Context(), lab.FarClientName, "tcp", target, bystanderEvery))
	}
	return b
}

func (b *bystanders) wantLossless(t *testing.T) {
	t.Helper()
	for _, p := range b.probes {
		report := p.Stop()
		t.Logf("new connections: %s", report)
		wantNoneLost(t, report)
	}
	for _, f := range b.flows {
		if lost := f.stop(); lost > 0 {
			t.Errorf("%d long-lived connections were lost", lost)
		}
	}
}

// watchedPrograms are those that must not be harmed.
var watchedPrograms = []string{"controller", "speaker", "proxy", "relay"}

// agentsNow returns the process of each agent.
func agentsNow(t *testing.T, l *lab.Lab) map[string]int {
	t.Helper()
	running := map[string]int{}
	for _, program := range watchedPrograms {
		for _, a := range l.Agents(program) {
			pid, err := a.PID()
			if err != nil {
				t.Error(err)
			}
			running[a.Name()] = pid
		}
	}
	return running
}

// maxResident is what an agent may need after all of it.
const maxResident = 256 << 20

// wantUnharmed checks that all agents are those from before, have not panicked, and are small.
func wantUnharmed(t *testing.T, l *lab.Lab, began map[string]int) {
	t.Helper()
	now, largest := agentsNow(t, l), 0
	for _, program := range watchedPrograms {
		for _, a := range l.Agents(program) {
			if now[a.Name()] != began[a.Name()] {
				t.Errorf("%s has ended", a.Name())
			}
			for line := range strings.Lines(a.Log()) {
				if strings.Contains(line, "panic") || strings.HasPrefix(line, "fatal error") {
					t.Errorf("%s: %s", a.Name(), line)
				}
			}
			size := resident(t, now[a.Name()])
			if size > maxResident {
				t.Errorf("%s has %d MiB", a.Name(), size>>20)
			}
			largest = max(largest, size)
		}
	}
	t.Logf("the largest agent has %d MiB", largest>>20)
}

// resident returns how many bytes of memory a process has.
func resident(t *testing.T, pid int) int {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
	var size, pages int
	if err == nil {
		_, err = fmt.Sscan(string(text), &size, &pages)
	}
	if err != nil {
		t.Error(err)
	}
	return pages * os.Getpagesize()
}

// counter returns a metric with its labels; 0 while there is none.
func counter(t testing.TB, a *lab.Agent, name string) float64 {
	t.Helper()
	var page string
	eventually(t, "the metrics of "+a.Name(), func() (err error) { // a busy machine takes its time
		page, err = a.Get(t.Context(), "/metrics")
		return err
	})
	value, _ := metricIn(t, page, name)
	return value
}

// wantCounted does something n times, and waits until a metric has grown by as much.
func wantCounted(t *testing.T, a *lab.Agent, name string, n int, do func() error) {
	t.Helper()
	wantGrown(t, a, name, n, func() error {
		for range n {
			if err := do(); err != nil {
				return err
			}
		}
		return nil
	})
}

// wantGrown does something once, and waits until a counter of the agent has grown by n.
func wantGrown(t *testing.T, a *lab.Agent, name string, n int, do func() error) {
	t.Helper()
	before := counter(t, a, name)
	if err := do(); err != nil {
		t.Fatal(err)
	}
	eventually(t, name+" grows", func() error {
		if grown := counter(t, a, name) - before; grown < float64(n) {
			return fmt.Errorf("by %.0f, want %d", grown, n)
		}
		return nil
	})
}

// wantLogged waits until an agent has logged a line with all of the words after the log was so
// long.
func wantLogged(t *testing.T, a *lab.Agent, after int, words ...string) {
	t.Helper()
	eventually(t, fmt.Sprintf("%s logs %q", a.Name(), words), func() error { return logged(a, after, words) })
}

// wantLogOf does something, again from time to time, until an agent has logged a line of it: a speaker logs some lines
// a second at most.
func wantLogOf(t *testing.T, a *lab.Agent, do func() error, words ...string) {
	t.Helper()
	wantShown(t, fmt.Sprintf("%s logs %q", a.Name(), words), do, func() func() error {
		after := len(a.Log())
		return func() error { return logged(a, after, words) }
	})
}

// wantCountOf does something, again from time to time, until an agent has counted it.
func wantCountOf(t *testing.T, a *lab.Agent, name string, do func() error) {
	t.Helper()
	wantShown(t, name+" grows", do, func() func() error {
		before := counter(t, a, name)
		return func() error {
			if counter(t, a, name) == before {
				return errors.New("it is as it was")
			}
			return nil
		}
	})
}

// wantShown does something, again from time to time, as packets get lost, until that shows. begin is called each time
// before, and returns what finds out.
func wantShown(t *testing.T, what string, do func() error, begin func() (shows func() error)) {
	t.Helper()
	eventually(t, what, func() error {
		shows := begin()
		if err := do(); err != nil {
			return err
		}
		return within(2*time.Second, shows)
	})
}

// logged returns an error unless the agent has logged a line with all of the words, if there are any,
// after the log was so long.
func logged(a *lab.Agent, after int, words []string) error {
	if len(words) == 0 {
		return nil
	}
	log := a.Log()[after:]
	for line := range strings.Lines(log) {
		if !slices.ContainsFunc(words, func(word string) bool { return !strings.Contains(line, word) }) {
			return nil
		}
	}
	return fmt.Errorf("%.2000s", log)
}
