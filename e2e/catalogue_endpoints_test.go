package e2e

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/landfall-lb/landfall/e2e/lab"
)

// endpointRow are the EndpointSlices of a Service, and what a client of it meets.
type endpointRow struct {
	name   string
	slices []string // of which each is merged into the base
	answer string   // refused, silence, or pod
}

const (
	podAddress = "192.168.100.1" // of my-nginx-2
	podSlice   = `{endpoints: [{addresses: [` + podAddress + `]}]}`
)

func endpointRows() []endpointRow {
	return []endpointRow{
		{"as it should be", []string{podSlice}, "pod"},
		{"none", nil, "refused"},
		{"port 65616, which is 80 in 16 bits", []string{
			`{endpoints: [{addresses: [` + podAddress + `]}], ports: [{name: "", port: 65616}]}`}, "refused"},
		{"port 65536, which is 0 in 16 bits", []string{
			`{endpoints: [{addresses: [` + podAddress + `]}], ports: [{name: "", port: 65536}]}`}, "refused"},
		{"port -1", []string{`{endpoints: [{addresses: [` + podAddress + `]}], ports: [{name: "", port: -1}]}`}, "refused"},
		{"port 0", []string{`{endpoints: [{addresses: [` + podAddress + `]}], ports: [{name: "", port: 0}]}`}, "refused"},
		{"no port", []string{`{endpoints: [{addresses: [` + podAddress + `]}], ports: [{name: ""}]}`}, "refused"},
		{"no ports at all", []string{`{endpoints: [{addresses: [` + podAddress + `]}], ports: []}`}, "refused"},
		{"a port of another name", []string{`{endpoints: [{addresses: [` + podAddress + `]}], ports: [{name: x, port: 80}]}`},
			"refused"},
		{"a port of another protocol", []string{
			`{endpoints: [{addresses: [` + podAddress + `]}], ports: [{name: "", port: 80, protocol: UDP}]}`}, "refused"},
		{"a slice of names", []string{`{addressType: FQDN, endpoints: [{addresses: [example.com]}]}`}, "refused"},
		{"a slice of the other family", []string{`{addressType: IPv6, endpoints: [{addresses: ["2001:db8::1"]}]}`},
			"refused"},
		{"a slice of another Service", []string{`{metadata: {labels: {kubernetes.io/service-name: other}},` +
			` endpoints: [{addresses: [` + podAddress + `]}]}`}, "refused"},
		{"a slice without a Service", []string{`{metadata: {labels: {kubernetes.io/service-name: null}},` +
			` endpoints: [{addresses: [` + podAddress + `]}]}`}, "refused"},
		{"not ready", []string{`{endpoints: [{addresses: [` + podAddress + `], conditions: {ready: false}}]}`}, "refused"},
		{"ready, serving and terminating", []string{`{endpoints: [{addresses: [` + podAddress +
			`], conditions: {ready: true, serving: true, terminating: true}}]}`}, "pod"},
		{"terminating and serving", []string{`{endpoints: [{addresses: [` + podAddress +
			`], conditions: {ready: false, serving: true, terminating: true}}]}`}, "pod"},
		{"terminating and not serving", []string{`{endpoints: [{addresses: [` + podAddress +
			`], conditions: {ready: false, serving: false, terminating: true}}]}`}, "refused"},
		{"one endpoint in three slices", []string{podSlice, podSlice, podSlice}, "pod"},
		{"one endpoint of which two slices do not say the same", []string{podSlice,
			`{endpoints: [{addresses: [` + podAddress + `], conditions: {ready: false}}]}`}, "pod"},
		{"100 addresses of one endpoint", []string{`{endpoints: [{addresses: [` + podAddress +
			strings.Repeat(", 192.0.2.1", 99) + `]}]}`}, "pod"},
		{"on a node that does not exist", []string{`{endpoints: [{addresses: [` + podAddress + `], nodeName: nowhere}]}`},
			"pod"},
		{"hints for a node and a zone that do not exist", []string{`{endpoints: [{addresses: [` + podAddress +
			`], hints: {forZones: [{name: nowhere}]}}]}`}, "pod"},
		{"the last change in the year 9999", []string{`{metadata: {annotations: ` +
			`{endpoints.kubernetes.io/last-change-trigger-time: "9999-12-31T23:59:59Z"}}, endpoints: [{addresses: [` +
			podAddress + `]}]}`}, "pod"},
		{"a closed port of a node", []string{`{endpoints: [{addresses: [172.26.236.178]}], ports: [{name: "", port: 9}]}`},
			"refused"},
	}
}

// hostileEndpoints gives Services endpoints that no controller would, and asks them.
func hostileEndpoints(t *testing.T, l *lab.Lab) {
	ctx := t.Context()
	rows := endpointRows()
	vips := make([]netip.AddrPort, len(rows))
	for i, row := range rows {
		name := fmt.Sprintf("endpoints-%d", i)
		s, err := l.Kube().CoreV1().Services(hostileNamespace).Create(ctx, &corev1.Service{
			ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec:       corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}},
		}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		vips[i] = netip.AddrPortFrom(netip.MustParseAddr(s.Spec.ClusterIP), 80)
		for n, written := range row.slices {
			object := map[string]any{"metadata": map[string]any{"labels": map[string]any{
				"kubernetes.io/service-name": name}}}
			var change map[string]any
			if err := yaml.Unmarshal([]byte(written), &change); err != nil {
				t.Fatalf("%s: %v", row.name, err)
			}
			bad := badObject{Name: row.name, Kind: "EndpointSlice", Object: mergeObjects(object, change),
				Says: &answer{}} // it is taken
			if err := bad.send(ctx, t, l, fmt.Sprintf("%s-%d", name, n)); err != nil {
				t.Fatalf("%s: %v", row.name, err)
			}
		}
	}
	for i, row := range rows {
		t.Run(row.name, func(t *testing.T) {
			eventually(t, "the answer", func() error {
				answer, err := l.Ask(ctx, "coredns-2", "tcp", vips[i])
				got := "pod"
				switch {
				case errors.Is(err, syscall.ECONNREFUSED):
					got = "refused"
				case errors.Is(err, os.ErrDeadlineExceeded):
					got = "silence"
				case err != nil:
					return err
				case answer.Pod != "my-nginx-2":
					got = answer.Pod
				}
				if got != row.answer {
					return fmt.Errorf("%s, want %s", got, row.answer)
				}
				return nil
			})
		})
	}
}
