package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/landfall-lb/landfall/e2e/lab"
	"github.com/landfall-lb/landfall/e2e/lab/labtest"
	"github.com/landfall-lb/landfall/internal/kube"
	"github.com/landfall-lb/landfall/internal/lb"
)

// Each node owns its entry in the status of a BGPPeer, and passwords come from Secrets of one
// namespace and type only.
func TestBGPObjectsAreReadAndTheirStatusWritten(t *testing.T) {
	t.Parallel()
	l := labtest.Start(t, lab.SeedCluster(), lab.Options{Stopped: true})
	ctx := t.Context()
	err := l.ApplyYAML(ctx, `
apiVersion: landfall.dev/v1beta1
kind: BGPPeer
metadata: {name: tor}
spec: {myASN: 64500, peerASN: 64501, peerAddress: 192.0.2.1, passwordSecret: {name: tor}}
---
apiVersion: landfall.dev/v1beta1
kind: BGPAdvertisement
metadata: {name: all}
spec: {communities: [gold]}
---
apiVersion: landfall.dev/v1beta1
kind: Community
metadata: {name: ours}
spec: {communities: [{name: gold, value: "64500:100"}]}
---
apiVersion: landfall.dev/v1beta1
kind: BFDProfile
metadata: {name: fast}
spec: {transmitInterval: 50}
---
apiVersion: v1
kind: Secret
metadata: {name: tor, namespace: default}
type: kubernetes.io/basic-auth
stringData: {username: tor, password: secret}
---
apiVersion: v1
kind: Secret
metadata: {name: other, namespace: default}
stringData: {password: secret}
`)
	if err != nil {
		t.Fatal(err)
	}
	client, err := kube.Connect(kube.Options{Kubeconfig: kubeconfigFromHere(t, l), UserAgent: "test",
		Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	ignore := func(string) {}
	peers, ads, profiles := kube.BGPPeers(client, ignore, ignore), kube.BGPAdvertisements(client, ignore, ignore),
		kube.BFDProfiles(client, ignore)
	communities := kube.Communities(client, ignore)
	named := map[string]bool{"tor": true, "other": true, "missing": true} // other has another type
	passwords := client.Passwords("default", func() map[string]bool { return named }, ignore)
	go client.Run(ctx)
	go passwords.Run(ctx)
	eventually(t, "tables", func() error {
		peer, _ := peers.Get("tor")
		profile, _ := profiles.Get("fast")
		names, _ := communities.Get("ours")
		ad, ok := ads.Get("all")
		if all := passwords.All(); !passwords.Synced() || peer.PeerASN != 64501 || profile.Transmit != 50*time.Millisecond ||
			profile.Multiplier != 3 ||
			names.Values["gold"].B != 100 || !ok || ad.AggregationLength != 32 || len(all) != 1 || all["tor"] != "secret" {
			return fmt.Errorf("%+v %+v %+v %+v %+v", peer, profile, names, ad, passwords.All())
		}
		return nil
	})

	status := client.Status(time.Now)
	words := func(want map[string]lb.PeerNode) {
		t.Helper()
		eventually(t, "status", func() error {
			if peer, _ := peers.Get("tor"); !maps.Equal(peer.Status, want) {
				return fmt.Errorf("%+v, want %+v", peer.Status, want)
			}
			return nil
		})
	}
	up := lb.PeerNode{State: "Established"}
	refused := lb.PeerNode{State: "Refused", Reason: lb.ReasonSecretMissing, Message: "there is no Secret"}
	if err := errors.Join(status.PeerNode(ctx, "tor", "node-1", &up), status.PeerNode(ctx, "tor", "node-2", &refused),
		status.PeerNode(ctx, "tor", "node-3", &up)); err != nil {
		t.Fatal(err)
	}
	words(map[string]lb.PeerNode{"node-1": up, "node-2": refused, "node-3": up})
	if err := errors.Join(status.PeerNode(ctx, "tor", "node-1", nil),
		status.PeerNode(ctx, "tor", "node-2", &up)); err != nil {
		t.Fatal(err)
	}
	words(map[string]lb.PeerNode{"node-2": up, "node-3": up})
	if err := status.DropPeerNodes(ctx, "tor", []string{"node-3", "node-9"}); err != nil {
		t.Fatal(err)
	}
	words(map[string]lb.PeerNode{"node-2": up})
	long := strings.Repeat("node.", 50) + "9" // the API server takes names of 128 characters for who writes
	if err := status.PeerNode(ctx, "tor", long, &up); err != nil {
		t.Error(err)
	}
	words(map[string]lb.PeerNode{"node-2": up, long: up})
	if err := status.PeerNode(ctx, "tor", long, nil); err != nil {
		t.Error(err)
	}
	words(map[string]lb.PeerNode{"node-2": up})
	if err := status.PeerNode(ctx, "nobody", "node-1", &up); !kube.IsNotFound(err) {
		t.Errorf("a peer that is not there: %v", err)
	}

	ready := lb.Condition{Type: lb.ConditionReady, Reason: lb.ReasonUnknownPeer, Message: "there is no BGPPeer x",
		Generation: 1}
	ad, _ := ads.Get("all")
	if wrote, err := status.BGPAdvertisement(ctx, ad, ready); err != nil || !wrote {
		t.Fatalf("wrote %v, %v", wrote, err)
	}
	eventually(t, "condition", func() error {
		if ad, _ = ads.Get("all"); !slices.Contains(ad.Conditions, ready) {
			return fmt.Errorf("%+v", ad.Conditions)
		}
		return nil
	})
	if wrote, err := status.BGPAdvertisement(ctx, ad, ready); err != nil || wrote {
		t.Errorf("an unchanged condition: wrote %v, %v", wrote, err)
	}
	for _, nodes := range []int{1000, 4998} { // two more are written, and the schema takes 5000
		t.Run(fmt.Sprintf("%d nodes report", nodes), func(t *testing.T) { manyNodesReport(t, l, nodes) })
	}
}

// manyNodesReport has a node write its entry beside so many others: the API server bounds what the
// rules of the policy may cost.
func manyNodesReport(t *testing.T, l *lab.Lab, nodes int) {
	self := l.Cluster().Nodes[1].Name
	node, err := l.KubeAs(l.Agent("speaker", self))
	if err != nil {
		t.Fatal(err)
	}
	path := "/apis/landfall.dev/v1beta1/bgppeers/tor/status"
	entry := func(name, state string) string {
		return fmt.Sprintf(`{"name":%q,"state":%q,"since":"2026-01-02T15:04:05Z"}`, name, state)
	}
	object := func(entries ...string) []byte {
		return []byte(`{"apiVersion":"landfall.dev/v1beta1","kind":"BGPPeer","metadata":{"name":"tor"},"status":{"nodes":[` +
			strings.Join(entries, ",") + `]}}`)
	}
	var all []string
	for i := range nodes {
		all = append(all, entry(fmt.Sprintf("worker-%04d.rack-17.example.org", i), "Established"))
	}
	err = l.Kube().CoreV1().RESTClient().Patch(types.MergePatchType).AbsPath(path).Body(object(all...)).
		Do(t.Context()).Error()
	if err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct{ name, state, refusal string }{
		{self, "Idle", ""},        // its first entry
		{self, "Established", ""}, // which it changes
		{"worker-0007.rack-17.example.org", "Forged", "node " + self + " may write its own entry in status.nodes only"},
		{"nowhere", "Idle", "its own entry"},
	} {
		manager := "landfall-speaker/" + test.name
		began := time.Now()
		err := node.CoreV1().RESTClient().Patch(types.ApplyPatchType).AbsPath(path).Param("fieldManager", manager).
			Param("force", "true").Body(object(entry(test.name, test.state))).Do(t.Context()).Error()
		t.Logf("%s writes %s of %s beside %d others in %v", self, test.state, test.name, nodes, time.Since(began))
		if test.refusal == "" && err != nil ||
			test.refusal != "" && (err == nil || !strings.Contains(err.Error(), test.refusal)) {
			t.Errorf("%s writes %s of %s: %v, want %q", self, test.state, test.name, err, test.refusal)
		}
	}
}

// kubeconfigFromHere forwards a port of this machine to the lab's API server, and returns an
// administrator's kubeconfig that uses it.
func kubeconfigFromHere(t *testing.T, l *lab.Lab) string {
	t.Helper()
	server, err := url.Parse(l.RESTConfig().Host)
	if err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { listener.Close() })
	go func() {
		for {
			near, err := listener.Accept()
			if err != nil {
				return
			}
			go func() {
				defer near.Close()
				far, err := l.Dial(context.Background(), l.Cluster().Nodes[0].Name, "tcp", server.Host)
				if err != nil {
					return
				}
				go func() {
					io.Copy(far, near)
					far.Close()
				}()
				io.Copy(near, far)
			}()
		}
	}()
	config, err := os.ReadFile(l.Kubeconfig())
	if err != nil {
		t.Fatal(err)
	}
	there := fmt.Sprintf("server: https://%s\n    tls-server-name: %s", listener.Addr(), server.Hostname())
	path := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(path, []byte(strings.Replace(string(config), "server: "+server.String(), there, 1)),
		0o600); err != nil {
		t.Fatal(err)
	}
	return path
}
