package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"strconv"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/landfall-lb/landfall/e2e/lab"
	"github.com/landfall-lb/landfall/e2e/lab/labtest"
)

// counted sums a metric of all proxies over the series that have all these labels.
func counted(t *testing.T, l *lab.Lab, metric string, labels ...string) (sum float64, err error) {
	t.Helper()
	series := regexp.MustCompile(`(?m)^landfall_proxy_service_` + metric + `\{(.*)\} (\S+)$`)
	for _, a := range l.Agents("proxy") {
		text, err := a.Get(t.Context(), "/metrics")
		if err != nil {
			return 0, err
		}
		for _, found := range series.FindAllStringSubmatch(text, -1) {
			has := true
			for _, label := range labels {
				has = has && strings.Contains(found[1], label)
			}
			value, err := strconv.ParseFloat(found[2], 64)
			if err != nil {
				return 0, err
			}
			if has {
				sum += value
			}
		}
	}
	return sum, nil
}

// TestDayTwoStatus reads what a cluster shows as data: who announces an address and where, conditions of
// advertisements, sessions by node, and what each Service gets, in both modes of the proxy.
func TestDayTwoStatus(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"nftables", "iptables"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			l := startProductWith(t, lab.Options{Values: map[string]any{
				"proxy": map[string]any{"mode": mode, "serviceCounters": "external"}}})
			if err := l.ServeExec(t.Context()); err != nil {
				t.Fatal(err)
			}
			waitAnnounced(t, l, "my-nginx", seedVIP.Addr().String())
			backed("ranges", func(s *corev1.Service) { s.Spec.LoadBalancerSourceRanges = []string{"10.99.0.0/16"} })(t, l)
			countersOfServices(t, l)
			flowCounters(t, l)
			statusOfObjects(t, l)
		})
	}
}

// countersOfServices has clients come, be refused and be dropped.
func countersOfServices(t *testing.T, l *lab.Lab) {
	const requests = 40
	if s := l.Spread(t.Context(), lab.ClientName, "tcp", seedVIP, requests); len(s.Failures) > 0 {
		t.Fatal(s.Failures)
	}
	dropped := netip.MustParseAddrPort("172.26.236.181:80")
	wantAddresses(t, l, "ranges", dropped.Addr().String())
	answerer(t, l, dropped.Addr())
	if _, err := l.Ask(t.Context(), lab.ClientName, "tcp", dropped); err == nil {
		t.Error("a client outside of the source ranges is answered")
	}
	const web, ranges = `service="default/my-nginx"`, `service="default/ranges"`
	for _, want := range []struct {
		metric string
		labels []string
		least  float64
	}{
		{"connections_total", []string{web}, requests},
		{"packets_total", []string{web, `direction="received"`}, 4 * requests},
		{"packets_total", []string{web, `direction="sent"`}, 3 * requests},
		{"bytes_total", []string{web, `direction="received"`}, 200 * requests},
		{"bytes_total", []string{web, `direction="sent"`}, 200 * requests},
		{"refused_connections_total", []string{ranges, `reason="SourceRefused"`}, 1},
	} {
		eventually(t, fmt.Sprintf("%s %v is %v or more", want.metric, want.labels, want.least), func() error {
			got, err := counted(t, l, want.metric, want.labels...)
			if err == nil && got < want.least {
				err = fmt.Errorf("it is %v", got)
			}
			return err
		})
	}
	for service, part := range map[string]string{"my-nginx": " connections, ", "ranges": " refused: SourceRefused"} {
		eventually(t, "explain shows the counters of "+service, func() error {
			code, out := landfallctl(t, l, "explain", "svc", service)
			if code != 0 || !strings.Contains(out, "note     traffic: ") || !strings.Contains(out, part) {
				return fmt.Errorf("it ends with %d: %s", code, out)
			}
			return nil
		})
	}
}

// flowCounters has a kernel count the packets of connections, which flows shows.
func flowCounters(t *testing.T, l *lab.Lab) {
	on("sysctl", "-qw", "net.netfilter.nf_conntrack_acct=1")(t, l)
	f := startFlows(t, l, seedVIP, 3)
	eventually(t, "flows counts packets", func() error {
		code, out := landfallctl(t, l, "flows", "my-nginx", "-o", "json", "--limit", "1000")
		var said struct {
			Flows []struct {
				State, Pod, Backend string
				Packets, Bytes      uint64
			}
		}
		if err := json.Unmarshal([]byte(out), &said); err != nil || code != 0 {
			return fmt.Errorf("it ends with %d, %w: %s", code, err, out)
		}
		counted := 0
		for _, flow := range said.Flows {
			if flow.State == "ESTABLISHED" && flow.Packets > 3 && flow.Bytes > 100 && strings.HasSuffix(flow.Backend, ":80") {
				counted++
			}
		}
		if counted != 3 {
			return fmt.Errorf("%d open connections have counters: %s", counted, out)
		}
		return nil
	})
	if lost := f.stop(); lost > 0 {
		t.Errorf("%d connections were lost", lost)
	}
}

// statusOfObjects reads what the objects of a cluster show.
func statusOfObjects(t *testing.T, l *lab.Lab) {
	list, err := announcements(t.Context(), l, "my-nginx")
	if err != nil || len(list) != 1 || list[0].Owner == "" || list[0].Protocol != "ARP" || len(list[0].Interfaces) != 1 ||
		list[0].Interfaces[0] != "eth0" {
		t.Errorf("announcements of my-nginx: %+v, %v", list, err)
	}
	applied(`
apiVersion: landfall.dev/v1beta1
kind: BGPPeer
metadata: {name: away}
spec: {myASN: 64512, peerASN: 64513, peerAddress: 172.26.236.1}
---
apiVersion: landfall.dev/v1beta1
kind: L2Advertisement
metadata: {name: lost}
spec: {ipAddressPools: [nowhere]}
`)(t, l)
	get := func(resource, name string, fields ...string) (any, error) {
		o, err := l.Dynamic().Resource(schema.GroupVersionResource{Group: "landfall.dev", Version: "v1beta1",
			Resource: resource}).Get(t.Context(), name, metav1.GetOptions{})
		if err != nil {
			return nil, err
		}
		value, found, err := unstructured.NestedFieldNoCopy(o.Object, fields...)
		if err == nil && !found {
			err = errors.New("it has no " + strings.Join(fields, "."))
		}
		return value, err
	}
	for _, want := range []struct {
		resource, name string
		fields         []string
		parts          []string
	}{
		{"l2advertisements", "vmware", []string{"status", "conditions"}, []string{`"status":"True"`, `"type":"Ready"`}},
		{"l2advertisements", "lost", []string{"status", "conditions"}, []string{`"status":"False"`, `"reason":"UnknownPool"`}},
		{"ipaddresspools", "vmware", []string{"status"}, []string{`"assignedIPv4":"2"`, `"availableIPv4":"18"`, `"type":"Ready"`}},
		{"bgppeers", "away", []string{"status"}, []string{`"k8s-worker-177"`, `"k8s-worker-179"`, `"Idle"`,
			`connection refused`}},
	} {
		eventually(t, fmt.Sprintf("%s %s shows %q", want.resource, want.name, want.parts), func() error {
			value, err := get(want.resource, want.name, want.fields...)
			if err != nil {
				return err
			}
			text, err := json.Marshal(value)
			if err != nil {
				return err
			}
			for _, part := range want.parts {
				if !strings.Contains(string(text), part) {
					return fmt.Errorf("no %s in %s", part, text)
				}
			}
			return nil
		})
	}
}

// TestDoctorBeforeInstall examines a cluster that has no Landfall yet.
func TestDoctorBeforeInstall(t *testing.T) {
	t.Parallel()
	l := labtest.Start(t, lab.SeedCluster(), lab.Options{NoAgents: true})
	wantVerdict := func(want string, well bool) {
		t.Helper()
		code, out := landfallctl(t, l, "doctor")
		if line, _, _ := strings.Cut(out, "\n"); !strings.HasPrefix(line, "Cluster: "+want) || well != (code == 0) {
			t.Errorf("doctor ends with %d: %s", code, out)
		}
	}
	wantVerdict("Landfall is not installed, and nothing is in its way", true)

	labelled(`{"node.kubernetes.io/exclude-from-external-load-balancers":""}`)(t, l)
	wantVerdict("every node has the label node.kubernetes.io/exclude-from-external-load-balancers", false)
	labelled(`{"node.kubernetes.io/exclude-from-external-load-balancers":null}`)(t, l)

	applied(`
apiVersion: v1
kind: Namespace
metadata: {name: landfall-system, labels: {pod-security.kubernetes.io/enforce: restricted}}
`)(t, l)
	wantVerdict("namespace landfall-system enforces Pod Security restricted, so the pods of speaker and proxy are refused", false)
	applied(`
apiVersion: v1
kind: Namespace
metadata: {name: landfall-system, labels: {pod-security.kubernetes.io/enforce: privileged}}
`)(t, l)
	applied(`
apiVersion: v1
kind: Namespace
metadata: {name: metallb-system}
---
apiVersion: v1
kind: Pod
metadata: {name: speaker, namespace: metallb-system, labels: {app.kubernetes.io/name: metallb}}
spec: {containers: [{name: speaker, image: metallb}]}
`)(t, l)
	wantVerdict("MetalLB also gives addresses to Services without spec.loadBalancerClass", false)
	applied(`
apiVersion: v1
kind: Pod
metadata: {name: kube-proxy, namespace: kube-system, labels: {k8s-app: kube-proxy}}
spec: {containers: [{name: kube-proxy, image: kube-proxy}]}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: kube-proxy, namespace: kube-system}
data: {config.conf: "mode: ipvs"}
`)(t, l)
	wantVerdict("kube-proxy runs in mode ipvs without strictARP, so every node answers ARP for every address", false)
	if code, out := landfallctl(t, l, "doctor", "--node", workers(l)[0]); code != 1 ||
		!strings.HasPrefix(out, "Node "+workers(l)[0]+": kube-proxy runs in mode ipvs without strictARP") {
		t.Errorf("doctor --node ends with %d: %s", code, out)
	}
}
