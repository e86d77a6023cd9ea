package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/landfall-lb/landfall/e2e/lab"
	"github.com/landfall-lb/landfall/e2e/lab/labtest"
	"github.com/landfall-lb/landfall/internal/lb"
)

const poolAndAdvertisement = `
apiVersion: landfall.dev/v1beta1
kind: IPAddressPool
metadata: {name: vmware}
spec: {addresses: [172.26.236.180-172.26.236.199]}
---
apiVersion: landfall.dev/v1beta1
kind: L2Advertisement
metadata: {name: vmware}
spec: {ipAddressPools: [vmware]}
`

var seedVIP = netip.MustParseAddrPort("172.26.236.180:80")

// startProduct starts the seed cluster with Landfall, a pool, its advertisement, and the Service of
// the worked example.
func startProduct(t *testing.T) *lab.Lab {
	t.Helper()
	return startProductWith(t, lab.Options{})
}

// inEachMode runs a test with proxies in nftables and in iptables mode.
func inEachMode(t *testing.T, run func(t *testing.T, l *lab.Lab)) {
	t.Parallel()
	for _, mode := range []string{"nftables", "iptables"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			run(t, startProductWith(t, lab.Options{Values: map[string]any{"proxy": map[string]any{"mode": mode}}}))
		})
	}
}

func startProductWith(t *testing.T, options lab.Options) *lab.Lab {
	t.Helper()
	l := labtest.Start(t, lab.SeedCluster(), options)
	if err := l.ApplyYAML(t.Context(), poolAndAdvertisement); err != nil {
		t.Fatal(err)
	}
	if err := l.AddService(t.Context(), lab.SeedService()); err != nil {
		t.Fatal(err)
	}
	waitAnnounced(t, l, "my-nginx", "172.26.236.180")
	return l
}

// condition returns a condition of a Service in namespace default.
func condition(ctx context.Context, l *lab.Lab, service, kind string) (metav1.Condition, error) {
	s, err := l.Kube().CoreV1().Services("default").Get(ctx, service, metav1.GetOptions{})
	if err != nil {
		return metav1.Condition{}, err
	}
	for _, c := range s.Status.Conditions {
		if c.Type == kind {
			return c, nil
		}
	}
	return metav1.Condition{}, fmt.Errorf("%s has no condition %s", service, kind)
}

// wantCondition waits for a condition with the given status and reason whose message contains text.
func wantCondition(t testing.TB, l *lab.Lab, service, kind, status, reason, text string) {
	t.Helper()
	eventually(t, fmt.Sprintf("%s of %s is %s because of %s", kind, service, status, reason), func() error {
		c, err := condition(t.Context(), l, service, kind)
		if err == nil && (string(c.Status) != status || c.Reason != reason || !strings.Contains(c.Message, text)) {
			err = fmt.Errorf("it is %s because of %s: %s", c.Status, c.Reason, c.Message)
		}
		return err
	})
}

// addressesOf returns what a Service holds.
func addressesOf(ctx context.Context, l *lab.Lab, service string) ([]string, error) {
	s, err := l.Kube().CoreV1().Services("default").Get(ctx, service, metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	var addrs []string
	for _, in := range s.Status.LoadBalancer.Ingress {
		addrs = append(addrs, in.IP)
	}
	return addrs, nil
}

func wantAddresses(t testing.TB, l *lab.Lab, service string, want ...string) {
	t.Helper()
	eventually(t, fmt.Sprintf("%s holds %v", service, want), func() error {
		got, err := addressesOf(t.Context(), l, service)
		if err == nil && !slices.Equal(got, want) {
			err = fmt.Errorf("it holds %v", got)
		}
		return err
	})
}

func waitAnnounced(t testing.TB, l *lab.Lab, service, vip string) {
	t.Helper()
	wantAddresses(t, l, service, vip)
	wantCondition(t, l, service, "landfall.dev/Announced", "True", "Announced", vip+" is announced from ")
}

// ownerOf returns the node that announces the VIP of my-nginx.
func ownerOf(t *testing.T, l *lab.Lab) string {
	t.Helper()
	list, err := announcements(t.Context(), l, "my-nginx")
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range list {
		if a.Owner != "" {
			return a.Owner
		}
	}
	t.Fatalf("no node announces the address: %+v", list)
	return ""
}

// announcements reads who announces the addresses of a Service in namespace default.
func announcements(ctx context.Context, l *lab.Lab, name string) ([]lb.Announcement, error) {
	s, err := l.Kube().CoreV1().Services("default").Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	return lb.DecodeAnnouncements(s.Annotations[lb.AnnotationAnnouncements])
}

// updateService changes a Service in namespace default.
func updateService(t testing.TB, l *lab.Lab, name string, change func(*corev1.Service)) {
	t.Helper()
	eventually(t, "update "+name, func() error {
		services := l.Kube().CoreV1().Services("default")
		s, err := services.Get(t.Context(), name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		change(s)
		_, err = services.Update(t.Context(), s, metav1.UpdateOptions{})
		return err
	})
}

// wantAnswers waits until requests from a client to target are all answered, by exactly the given
// pods, and the source check holds.
func wantAnswers(t *testing.T, l *lab.Lab, from, network string, target netip.AddrPort, pods ...string) lab.Spread {
	t.Helper()
	var s lab.Spread
	slices.Sort(pods)
	eventually(t, fmt.Sprintf("%s asks %s over %s and %v answer", from, target, network, pods), func() error {
		s = l.Spread(t.Context(), from, network, target, 20)
		var got []string
		for pod := range s.Pods {
			got = append(got, pod)
		}
		slices.Sort(got)
		if len(s.Failures) > 0 || !slices.Equal(got, pods) {
			return fmt.Errorf("answers by %v, failures %q", s.Pods, s.Failures)
		}
		return nil
	})
	return s
}

// wantRefused waits until a connection is refused rather than left to time out (contract 9).
func wantRefused(t *testing.T, l *lab.Lab, from string, target netip.AddrPort) {
	t.Helper()
	eventually(t, fmt.Sprintf("%s is refused at %s", from, target), func() error {
		answer, err := l.Ask(t.Context(), from, "tcp", target)
		switch {
		case err == nil:
			return fmt.Errorf("it is answered by %s", answer.Pod)
		case !errors.Is(err, syscall.ECONNREFUSED):
			return fmt.Errorf("instead: %w", err)
		}
		return nil
	})
}

// ourRules returns a node's Landfall rules, sorted: where their order matters, they say so by their
// probabilities.
func ourRules(t *testing.T, l *lab.Lab, node string) []string {
	t.Helper()
	text, err := l.Rules(t.Context(), node)
	if err != nil {
		t.Fatal(err)
	}
	var rules []string
	for line := range strings.Lines(text) {
		if strings.Contains(line, "LF-") {
			rules = append(rules, strings.TrimSpace(line))
		}
	}
	// In nftables mode they are the rules and elements of a table.
	if text, err = l.Exec(t.Context(), node, "nft", "--stateless", "list", "ruleset"); err != nil {
		t.Fatal(err)
	}
	_, text, _ = strings.Cut(text, "table ip landfall {")
	text, _, _ = strings.Cut(text, "\n}")
	for rule := range strings.FieldsFuncSeq(text, func(r rune) bool { return r == ',' || r == '\n' }) {
		rules = append(rules, strings.TrimSpace(rule))
	}
	slices.Sort(rules)
	return rules
}

// wantRulesOfFreshStart compares a node's rules with those that a proxy writes that finds none.
func wantRulesOfFreshStart(t *testing.T, l *lab.Lab, node string) {
	t.Helper()
	proxy := l.Agent("proxy", node)
	before := ourRules(t, l, node)
	if err := proxy.Stop(); err != nil {
		t.Fatal(err)
	}
	for _, command := range []string{"iptables -t nat -F", "iptables -t nat -X", "iptables -F", "iptables -X",
		"nft add table ip landfall", "nft delete table ip landfall",
		"sysctl -qw net.ipv4.conf.all.route_localnet=0"} { // which the rules say that Landfall has set
		mustExec(t, l, node, strings.Fields(command)...)
	}
	if err := proxy.Start(); err != nil {
		t.Fatal(err)
	}
	if err := proxy.WaitReady(t.Context()); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the rules of a fresh start on "+node, func() error {
		after := ourRules(t, l, node)
		if slices.Equal(before, after) {
			return nil
		}
		return fmt.Errorf("only before: %s\nonly after: %s", strings.Join(without(before, after), "\n"),
			strings.Join(without(after, before), "\n"))
	})
}

// without returns what of a is not in b.
func without(a, b []string) []string {
	return slices.DeleteFunc(slices.Clone(a), func(s string) bool { return slices.Contains(b, s) })
}

// settle is longer than the drain time, after which rules of addresses that were taken away go.
const settle = 7 * time.Second
