package e2e

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/landfall-lb/landfall/e2e/lab"
	"github.com/landfall-lb/landfall/e2e/lab/labtest"
)

const fieldObjects = `
apiVersion: landfall.dev/v1beta1
kind: IPAddressPool
metadata: {name: routed, labels: {tier: gold}}
spec: {addresses: [203.0.113.176/28, "fd00:203:0:113::180/124"]}
---
apiVersion: landfall.dev/v1beta1
kind: Community
metadata: {name: names}
spec: {communities: [{name: gold, value: "64500:777"}, {name: wide, value: "large:64500:7:7"}]}
---
apiVersion: landfall.dev/v1beta1
kind: BFDProfile
metadata: {name: odd}
spec: {transmitInterval: 70, receiveInterval: 80, detectMultiplier: 4}
---
apiVersion: v1
kind: Secret
metadata: {name: tor, namespace: landfall-system}
type: kubernetes.io/basic-auth
stringData: {password: from-a-secret}
`

// fieldCase sets fields of a peer and an advertisement, and says what the router shows then.
type fieldCase struct {
	name     string
	peer, ad string   // fields besides those that each case has
	router   []string // configuration
	restore  []string // what takes it back
	before   func(t *testing.T, l *lab.Lab)
	// shows are words that the router's answer to a command has, absent words that it does not have.
	shows, absent map[string][]string
	// state is that of the session, in the peer's status; says is in its message.
	state, says string
	after       func(t *testing.T, l *lab.Lab)
}

const (
	fieldNode     = "k8s-worker-177"
	fieldNeighbor = "show bgp neighbors 172.26.236.177 json"
	fieldPath     = "show bgp ipv4 unicast 203.0.113.176/32"
	fieldTable    = "show bgp ipv4 unicast"
	fieldTable6   = "show bgp ipv6 unicast"
	fieldBGP      = "router bgp 64501"
	established   = `"bgpState":"Established"`
)

func fieldCases() []fieldCase {
	return []fieldCase{
		{
			name: "communities by number and by name, MED and prepending, to an external router",
			ad:   `med: 50, asPathPrepend: 2, communities: ["64500:100", gold, no-export, "large:64500:1:2", wide]`,
			shows: map[string][]string{fieldPath: {
				"64500 64500 64500\n", "metric 50", "Community: 64500:100 64500:777 no-export",
				"Large Community: 64500:1:2 64500:7:7", "from 172.26.236.177",
			}},
		},
		{
			name:  "fields change in place: the session stays, and the rest of the path is as by default",
			ad:    `med: 60`,
			shows: map[string][]string{fieldPath: {"metric 60", "  64500\n"}, fieldNeighbor: {`"connectionsEstablished":1`}},
			absent: map[string][]string{fieldPath: {
				"64500:100", "Large", "64500 64500",
			}},
		},
		{
			name: "aggregation of both families, IPv6 over an IPv4 session", peer: `dualStackAddressFamily: true`,
			ad: `aggregationLength: 29, aggregationLengthV6: 126`,
			shows: map[string][]string{fieldTable: {"203.0.113.176/29"},
				fieldTable6: {"fd00:203:0:113::180/126", "fd00:172:26:236::177"}},
			absent: map[string][]string{fieldTable: {"/32"}, fieldTable6: {"/128"}},
		},
		{
			name: "local preference, to an internal router, by localASN", peer: `localASN: 64501`, ad: `localPref: 300`,
			router:  []string{fieldBGP, "neighbor nodes remote-as 64501"},
			restore: []string{fieldBGP, "neighbor nodes remote-as 64500"},
			shows:   map[string][]string{fieldPath: {"localpref 300", "internal", "Local"}},
			absent:  map[string][]string{fieldPath: {"64500"}},
		},
		{
			name: "hold time", peer: `holdTime: 30s, keepaliveTime: 7s`,
			shows: map[string][]string{fieldNeighbor: {established, `"bgpTimerHoldTimeMsecs":30000`}},
		},
		{
			name: "router ID and source address", peer: `routerID: 9.9.9.9, sourceAddress: 172.26.236.250`,
			before: func(t *testing.T, l *lab.Lab) {
				if _, err := l.Exec(t.Context(), fieldNode, "ip", "addr", "add", "172.26.236.250/24", "dev", "eth0"); err != nil {
					t.Fatal(err)
				}
			},
			router:  []string{fieldBGP, "neighbor 172.26.236.250 peer-group nodes"},
			restore: []string{fieldBGP, "no neighbor 172.26.236.250"},
			shows:   map[string][]string{"show bgp neighbors 172.26.236.250 json": {established, `"remoteRouterId":"9.9.9.9"`}},
		},
		{
			name: "a wrong password", peer: `password: wrong`, state: "Idle", says: "MD5",
			router: []string{fieldBGP, "neighbor nodes password from-a-secret"},
			absent: map[string][]string{fieldNeighbor: {established}},
		},
		{
			name: "the right password, of a Secret", peer: `passwordSecret: {name: tor}`,
			shows:   map[string][]string{fieldNeighbor: {established}},
			restore: []string{fieldBGP, "no neighbor nodes password"},
		},
		{
			name: "a Secret that is not there", peer: `passwordSecret: {name: other}`, state: "Refused", says: "other",
			absent: map[string][]string{fieldNeighbor: {established}},
		},
		{
			name: "any external AS number", peer: `dynamicASN: external`,
			shows: map[string][]string{fieldNeighbor: {established}},
		},
		{
			name: "an AS number that is not the node's own", peer: `dynamicASN: internal`, state: "Idle",
			says:   "dynamicASN internal",
			absent: map[string][]string{fieldNeighbor: {established}},
		},
		{
			name: "a port on which nobody listens", peer: `peerPort: 1790`, state: "Idle", says: "connection refused",
			absent: map[string][]string{fieldNeighbor: {established}},
		},
		{
			name: "IPv4 over an IPv6 session", peer: `peerAddress: "fd00:172:26:236::1", dualStackAddressFamily: true`,
			shows: map[string][]string{fieldTable: {"203.0.113.176/32", "172.26.236.177"},
				fieldTable6: {"fd00:203:0:113::180/128"}},
		},
		{
			name: "BFD with the profile's timers", peer: `bfdProfile: odd`, says: "BFD is Up",
			shows: map[string][]string{"show bfd peer 172.26.236.177 json": {
				`"status":"up"`, `"remote-receive-interval":80`, `"remote-transmit-interval":70`, `"remote-detect-multiplier":4`,
			}},
		},
		{
			name: "graceful restart", peer: `enableGracefulRestart: true`,
			shows: map[string][]string{fieldNeighbor: {established, `"remoteGrMode":"Restart"`}},
			after: restartSeenByRouter,
		},
		{
			name: "routes of the router are shown if they may be", peer: `acceptRoutes: true`,
			router:  []string{fieldBGP, "no bgp network import-check", "address-family ipv4 unicast", "network 10.99.0.0/24"},
			restore: []string{fieldBGP, "address-family ipv4 unicast", "no network 10.99.0.0/24"},
			after: func(t *testing.T, l *lab.Lab) {
				eventually(t, "the speaker shows the route", func() error {
					out, err := l.Agent("speaker", fieldNode).Get(t.Context(), "/v1/status")
					if err == nil && !strings.Contains(out, `"prefix": "10.99.0.0/24"`) {
						err = errors.New("no 10.99.0.0/24")
					}
					return err
				})
				if out, err := l.Exec(t.Context(), fieldNode, "ip", "route"); err != nil || strings.Contains(out, "10.99.0.0") {
					t.Errorf("installed: %v\n%s", err, out)
				}
			},
		},
		{
			name: "pools, services, nodes and peers selected", ad: `ipAddressPoolSelectors: [{matchLabels: {tier: gold}}], ` +
				`serviceSelectors: [{matchLabels: {app: my-nginx}}], ` +
				`nodeSelectors: [{matchLabels: {kubernetes.io/hostname: k8s-worker-177}}], peers: [tor]`,
			shows: map[string][]string{fieldTable: {"203.0.113.176/32"}},
		},
		{
			name: "another pool selected", ad: `ipAddressPoolSelectors: [{matchLabels: {tier: silver}}]`,
			shows: map[string][]string{fieldNeighbor: {established}}, absent: map[string][]string{fieldTable: {"203.0.113"}},
		},
		{
			name: "another Service selected", ad: `serviceSelectors: [{matchLabels: {app: other}}]`,
			shows: map[string][]string{fieldNeighbor: {established}}, absent: map[string][]string{fieldTable: {"203.0.113"}},
		},
		{
			name: "another node selected", ad: `nodeSelectors: [{matchLabels: {kubernetes.io/hostname: k8s-worker-178}}]`,
			shows: map[string][]string{fieldNeighbor: {established}}, absent: map[string][]string{fieldTable: {"203.0.113"}},
		},
		{
			name: "another peer selected", ad: `peers: [other]`,
			shows: map[string][]string{fieldNeighbor: {established}}, absent: map[string][]string{fieldTable: {"203.0.113"}},
		},
	}
}

// restartSeenByRouter ends the speaker as a crash does: the router keeps the route, as a stale one,
// until the next speaker announces it.
func restartSeenByRouter(t *testing.T, l *lab.Lab) {
	shows := map[string][]string{fieldPath: {"valid"}}
	wantOnRouter(t, l, shows, nil)
	agent := l.Agent("speaker", fieldNode)
	if err := agent.Kill(); err != nil {
		t.Fatal(err)
	}
	wantOnRouter(t, l, map[string][]string{fieldPath: {"stale"}}, nil)
	if err := agent.Start(); err != nil {
		t.Fatal(err)
	}
	wantOnRouter(t, l, shows, map[string][]string{fieldPath: {"stale"}})
}

// wantOnRouter waits until the router's answers have some words and do not have others.
func wantOnRouter(t *testing.T, l *lab.Lab, shows, absent map[string][]string) {
	t.Helper()
	eventually(t, "the router's view", func() error {
		for command, words := range shows {
			if err := compareAnswer(t, l, command, words, true); err != nil {
				return err
			}
		}
		for command, words := range absent {
			if err := compareAnswer(t, l, command, words, false); err != nil {
				return err
			}
		}
		return nil
	})
}

// compareAnswer fails unless the router's answer has all words, or with want false none.
func compareAnswer(t *testing.T, l *lab.Lab, command string, words []string, want bool) error {
	t.Helper()
	out, err := l.Routers()[0].Ask(t.Context(), command)
	if err != nil {
		return err
	}
	out = strings.ReplaceAll(out, `": `, `":`) // of JSON, however it is laid out
	for _, word := range words {
		if strings.Contains(out, word) != want {
			return fmt.Errorf("%s: that the answer has %q is %v:\n%s", command, word, !want, out)
		}
	}
	return nil
}

// Each field of the objects around BGP has its effect at the router, from the API server to FRR's
// own view.
func TestBGPFieldsReachTheRouter(t *testing.T) {
	t.Parallel()
	cluster := lab.SeedCluster()
	cluster.DualStack = true
	cluster.ToR = lab.ToR{Kind: lab.FRR, Count: 1, ASN: 64501, NodeASN: 64500, BFD: 100 * time.Millisecond}
	l := labtest.Start(
		t, cluster, lab.Options{Values: map[string]any{"speaker": map[string]any{"bgpSecrets": []string{"tor"}}}})
	if err := l.ApplyYAML(t.Context(), fieldObjects); err != nil {
		t.Fatal(err)
	}
	service := lab.SeedService()
	service.IPFamilies = []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol}
	if err := l.AddService(t.Context(), service); err != nil {
		t.Fatal(err)
	}
	// A label to select the Service by.
	updateService(t, l, "my-nginx", func(s *corev1.Service) { s.Labels = map[string]string{"app": "my-nginx"} })
	wantAddresses(t, l, "my-nginx", "203.0.113.176", "fd00:203:0:113::180")
	for _, c := range fieldCases() {
		ok := t.Run(c.name, func(t *testing.T) {
			if c.before != nil {
				c.before(t, l)
			}
			if c.router != nil {
				if err := l.Routers()[0].Configure(t.Context(), c.router...); err != nil {
					t.Fatal(err)
				}
			}
			if err := l.ApplyYAML(t.Context(), c.objects()); err != nil {
				t.Fatal(err)
			}
			if c.state == "" {
				c.state = "Established"
			}
			wantPeer(t, l, c.state, c.says)
			wantOnRouter(t, l, c.shows, c.absent)
			if c.after != nil {
				c.after(t, l)
			}
			if c.restore != nil {
				if err := l.Routers()[0].Configure(t.Context(), c.restore...); err != nil {
					t.Fatal(err)
				}
			}
		})
		if !ok {
			return
		}
	}
}

// objects are the peer and the advertisement of the case.
func (c fieldCase) objects() string {
	peer := "myASN: 64500, nodeSelectors: [{matchLabels: {kubernetes.io/hostname: " + fieldNode + "}}]"
	for unless, field := range map[string]string{"dynamicASN:": "peerASN: 64501",
		"peerAddress:": "peerAddress: 172.26.236.1"} {
		if !strings.Contains(c.peer, unless) {
			peer += ", " + field
		}
	}
	peer += ", connectTime: 1s"
	if c.peer != "" {
		peer += ", " + c.peer
	}
	return fmt.Sprintf("apiVersion: landfall.dev/v1beta1\nkind: BGPPeer\nmetadata: {name: tor}\nspec: {%s}\n---\n"+
		"apiVersion: landfall.dev/v1beta1\nkind: BGPAdvertisement\nmetadata: {name: routed}\nspec: {%s}\n", peer, c.ad)
}

// wantPeer waits until the status of the peer shows a state and words for the one node that is to
// have a session.
func wantPeer(t *testing.T, l *lab.Lab, state, says string) {
	t.Helper()
	peers := l.Dynamic().Resource(schema.GroupVersionResource{Group: "landfall.dev", Version: "v1beta1",
		Resource: "bgppeers"})
	eventually(t, "the peer's status", func() error {
		o, err := peers.Get(t.Context(), "tor", metav1.GetOptions{})
		if err != nil {
			return err
		}
		nodes, _, _ := unstructured.NestedSlice(o.Object, "status", "nodes")
		text := fmt.Sprint(nodes)
		if len(nodes) != 1 ||
			!slices.Contains(strings.FieldsFunc(text, func(r rune) bool { return strings.ContainsRune(" []", r) }),
				"state:"+state) || !strings.Contains(text, says) {
			return fmt.Errorf("it shows %s, want %s and %q", text, state, says)
		}
		return nil
	})
}
