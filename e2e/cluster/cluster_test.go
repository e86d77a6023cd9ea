package cluster

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	yamlutil "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/yaml"

	"github.com/landfall-lb/landfall/e2e/lab"
)

// Starting a cluster takes root, programs that build for minutes and much memory, so that "make
// cluster" tests it. What can be known without is tested here.

func TestTopology(t *testing.T) {
	c := topology(9)
	if err := c.Validate(); err != nil {
		t.Fatal(err)
	}
	zones := map[int]int{}
	for _, n := range c.Nodes[1:7] {
		zones[(&Node{Node: n}).zone()]++
	}
	if zones[1] != 2 || zones[2] != 2 || zones[3] != 2 {
		t.Errorf("six nodes are in the zones %v", zones)
	}
	if !c.ServiceNetwork.Contains(dnsAddr) {
		t.Errorf("the address %s of the cluster's DNS is not in %s", dnsAddr, c.ServiceNetwork)
	}
	seen := map[string]bool{}
	for _, w := range append(moreOnLAN(), Webs...) {
		if seen[w.Addr.String()] || c.LAN.Prefix.Contains(w.Addr) == w.Routed() {
			t.Errorf("%s has the address %s", w.Name, w.Addr)
		}
		seen[w.Addr.String()] = true
	}
}

// Each file of a node is what its reader expects, with nothing left to fill in.
func TestFilesOfANode(t *testing.T) {
	fills := regexp.MustCompile(`@[A-Z]+@`)
	for _, carrier := range []string{Bridge, Routed, Flannel} {
		n := lab.Node{Name: "node-1", Addr: topology(1).Nodes[1].Addr, PodNetwork: topology(1).Nodes[1].PodNetwork}
		files := nodeFiles(nodeFacts{
			node: n, state: "/state", disk: "/state/nodes/node-1", logs: "/state/logs", carrier: carrier,
			kubelet: lab.Credentials{Cert: "/c", Key: "/k", Kubeconfig: "/kc"}, images: []string{"/a.tar", "/b.tar"},
			tools: tools{kubelet: "/kubelet", flanneld: "/flanneld", plugins: "/cni"},
		})
		for path, text := range files {
			if left := fills.FindString(text); left != "" {
				t.Errorf("%s, %s: %s is left", carrier, path, left)
			}
			switch {
			case strings.HasSuffix(path, ".json"), strings.HasSuffix(path, ".conflist"):
				if !json.Valid([]byte(text)) {
					t.Errorf("%s, %s is no JSON:\n%s", carrier, path, text)
				}
			case strings.HasSuffix(path, ".yaml"):
				if err := yaml.UnmarshalStrict([]byte(text), &map[string]any{}); err != nil {
					t.Errorf("%s, %s: %v", carrier, path, err)
				}
			}
		}
		if got := strings.Contains(files["start.sh"], "/flanneld"); got != (carrier == Flannel) {
			t.Errorf("%s: flanneld runs: %v", carrier, got)
		}
		if got := strings.Contains(files["cni/10-cluster.conflist"], lab.PodBridge); got != (carrier != Routed) {
			t.Errorf("%s: pods are on the bridge: %v", carrier, got)
		}
	}
}

func TestManifests(t *testing.T) {
	for name, text := range map[string]string{"coreDNS": coreDNS, "Pool": Pool, "web": web, "service": service,
		"serviceLB": serviceLB, "otherPool": otherPool} {
		reader := yamlutil.NewYAMLOrJSONDecoder(strings.NewReader(text), 4096)
		for {
			var object unstructured.Unstructured
			if err := reader.Decode(&object); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			if object.GetKind() == "" || object.GetName() == "" {
				t.Errorf("%s holds %v", name, object.Object)
			}
		}
	}
}

func TestOutcome(t *testing.T) {
	var o Outcome
	o.Add(Outcome{Long: 20, Broken: 1, New: 100, Why: []string{"a"}})
	o.Add(Outcome{Long: 20, New: 100, Failed: 2, Why: []string{"b"}})
	if got, want := o.String(), "1 of 40 long-lived connections broken, 2 of 200 new ones failed"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	if len(o.Why) != 2 {
		t.Errorf("reasons %q", o.Why)
	}
}

func TestWhyAPodIsNotReady(t *testing.T) {
	pod := corev1.Pod{Status: corev1.PodStatus{
		Phase: corev1.PodPending,
		ContainerStatuses: []corev1.ContainerStatus{{Name: "web", State: corev1.ContainerState{
			Waiting: &corev1.ContainerStateWaiting{Reason: "ErrImageNeverPull", Message: "no image"}}}},
	}}
	pod.Name = "web-1"
	if got, want := describePod(pod), "web-1 is Pending, web: ErrImageNeverPull no image"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestWhatStaysAfterUninstall(t *testing.T) {
	for trace, want := range map[string]bool{
		"IPAddressPool lan": true, "CustomResourceDefinition bgppeers.landfall.dev": true,
		"CustomResourceDefinition bgppeers.example.com": false, "Namespace landfall-system": true,
		"APIService v1beta1.landfall.dev": true, "APIService v1.apps": false,
		"ConfigMap landfall-system/kube-root-ca.crt": true, "ConfigMap landfall-system/landfall-surroundings": false,
		"Lease landfall-system/landfall-speaker": false, "ServiceAccount landfall-system/landfall-node": false,
		"Service web/l2-local: address [map[ip:172.30.0.202]]":               true,
		"Service web/l2-local: annotation metallb.io/ip-allocated-from-pool": true,
		"Service web/l2-local: annotation landfall.dev/announcements":        false,
		"Service web/l2-local: condition landfall.dev/Serving":               false,
		"node-1: table ip landfall":                                          false,
	} {
		if stays(trace) != want {
			t.Errorf("%q stays: %v", trace, !want)
		}
	}
}

func TestMebibytes(t *testing.T) {
	const status = "Name:\tlandfall-proxy\nVmRSS:\t   59392 kB\nRssAnon:\t    20480 kB\n"
	for key, want := range map[string]string{"VmRSS": "58 MiB", "RssAnon": "20 MiB", "VmSwap": "unknown memory"} {
		if got := mebibytes(status, key); got != want {
			t.Errorf("%s: %s, want %s", key, got, want)
		}
	}
	const rollup = "00400000-7fff ---p 00000000 00:00 0    [rollup]\nRss: 2048 kB\nPss:  1024 kB\nSwapPss: 0 kB\n"
	if got := mebibytes(rollup, "Pss"); got != "1 MiB" {
		t.Errorf("Pss: %s", got)
	}
}

// TestShows takes what the check needs out of the dashboard's data, one after another.
func TestShows(t *testing.T) {
	var rows []string
	for _, w := range Webs {
		by := `"owner": "node-1"`
		if w.Routed() {
			by = `"routes": [{"nodes": ["node-1"]}]`
		}
		rows = append(rows, fmt.Sprintf(`{"name": %q, "addresses": [{"vip": %q, %s}]}`, w.Name, w.Addr, by))
	}
	all := `{"synced": true, "overview": {"wrong": 0}, "page": {"rows": [` + strings.Join(rows, ",") + `]}}`
	if err := shows(all); err != nil {
		t.Error(err)
	}
	for what, instead := range map[string]string{rows[1]: "{}", `"owner": "node-1"`: `"owner": ""`,
		`"nodes": ["node-1"]`: `"nodes": []`, "true": "false", `"wrong": 0`: `"wrong": 1`} {
		if shows(strings.Replace(all, what, instead, 1)) == nil {
			t.Errorf("with %s for %s all is said to be well", instead, what)
		}
	}
}
