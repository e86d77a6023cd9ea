package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	serializer "k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/client-go/kubernetes/scheme"

	"github.com/landfall-lb/landfall/ctl/explain"
	"github.com/landfall-lb/landfall/internal/kube"
	"github.com/landfall-lb/landfall/internal/lb"
)

// fakeCluster is an API server that answers with these objects, in JSON.
type fakeCluster struct {
	// objects are bodies by path, of some lists by path?labelSelector; a path of a list that is not there is an empty
	// list.
	objects map[string]string
	// encoded are bodies in the encoding that API servers answer landfallctl in.
	encoded map[string][]byte
	// refused are paths that this user may not read.
	refused map[string]bool
	// patched is told of patches.
	patched func(path, body string)
}

// serve starts the API server and returns a kubeconfig for it.
func (f fakeCluster) serve(t testing.TB) (kubeconfig string) {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		body, ok := f.objects[r.URL.Path+"?"+r.URL.Query().Get("labelSelector")]
		if !ok {
			body, ok = f.objects[r.URL.Path]
		}
		switch resource := filepath.Base(r.URL.Path); {
		case f.refused[r.URL.Path]:
			w.WriteHeader(http.StatusForbidden)
			_ = json.NewEncoder(w).Encode(metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"},
				Status: "Failure", Code: http.StatusForbidden, Reason: metav1.StatusReasonForbidden,
				Message: resource + ` is forbidden: User "eve" cannot list it`})
		case f.encoded[r.URL.Path] != nil:
			w.Header().Set("Content-Type", runtime.ContentTypeProtobuf)
			_, _ = w.Write(f.encoded[r.URL.Path])
		case ok && r.Method == http.MethodPatch:
			patch, _ := io.ReadAll(r.Body)
			f.patched(r.URL.Path, string(patch))
			fmt.Fprint(w, body)
		case ok:
			fmt.Fprint(w, body)
		case r.Method == http.MethodPatch, !strings.HasSuffix(resource, "s"): // an object, not a list
			w.WriteHeader(http.StatusNotFound)
			_ = json.NewEncoder(w).Encode(metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"},
				Status: "Failure", Code: http.StatusNotFound, Reason: metav1.StatusReasonNotFound, Message: "not found"})
		default:
			fmt.Fprint(w, `{"metadata":{"resourceVersion":"1"},"items":[]}`)
		}
	}))
	t.Cleanup(server.Close)
	kubeconfig = filepath.Join(t.TempDir(), "config")
	writeKubeconfig(t, kubeconfig, "fake", server.URL)
	return kubeconfig
}

// protobuf encodes a list of Services as API servers do.
func protobuf(t testing.TB, list string) []byte {
	t.Helper()
	var services corev1.ServiceList
	if err := json.Unmarshal([]byte(list), &services); err != nil {
		t.Fatal(err)
	}
	services.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("ServiceList"))
	var out bytes.Buffer
	if err := serializer.NewSerializer(scheme.Scheme, scheme.Scheme).Encode(&services, &out); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func writeKubeconfig(t testing.TB, path, context, server string) {
	t.Helper()
	err := os.WriteFile(path, fmt.Appendf(nil, `{"apiVersion":"v1","kind":"Config","current-context":%[1]q,
		"clusters":[{"name":%[1]q,"cluster":{"server":%[2]q}}],"users":[{"name":%[1]q}],
		"contexts":[{"name":%[1]q,"context":{"cluster":%[1]q,"user":%[1]q,"namespace":"shop"}}]}`, context, server), 0o600)
	if err != nil {
		t.Fatal(err)
	}
}

const (
	servicePath = "/api/v1/namespaces/shop/services/web"
	lists       = "/apis/landfall.dev/v1beta1/"
	podsPath    = "/api/v1/namespaces/landfall-system/pods"
)

// fakeWell is a cluster with n nodes and one Service, of which everything is well.
func fakeWell(n int) fakeCluster {
	var nodes, pods []string
	for i := range n {
		nodes = append(nodes, fmt.Sprintf(`{"metadata":{"name":"n%d"},"status":{"conditions":[{"type":"Ready","status":"True"}]}}`,
			i))
		pods = append(pods, fmt.Sprintf(`{"metadata":{"name":"landfall-node-%[1]d","namespace":"landfall-system"},
			"spec":{"nodeName":"n%[1]d","containers":[{"name":"speaker","command":["landfall-speaker"]},
			{"name":"proxy","command":["landfall-proxy"]},{"name":"relay","command":["landfall-proxy","relay"]}]},
			"status":{"phase":"Running","containerStatuses":[
			{"name":"speaker","ready":true,"state":{"running":{}}},{"name":"proxy","ready":true,"state":{"running":{}}},
			{"name":"relay","ready":true,"state":{"running":{}}}]}}`, i))
	}
	service := `{"metadata":{"name":"web","namespace":"shop","annotations":{"landfall.dev/announcements":` +
		`"{\"version\":1,\"vips\":[{\"vip\":\"192.0.2.10\",\"reason\":\"Announced\",\"owner\":\"n0\",\"protocol\":\"ARP\"}]}"}},
		"spec":{"type":"LoadBalancer"},"status":{"loadBalancer":{"ingress":[{"ip":"192.0.2.10"}]},"conditions":[
		{"type":"landfall.dev/Assigned","status":"True","reason":"Assigned","message":"192.0.2.10 from pool lan"},
		{"type":"landfall.dev/Announced","status":"True","reason":"Announced",
		"message":"192.0.2.10 is announced from n0 (ARP on eth0)"}]}}`
	return fakeCluster{refused: map[string]bool{}, objects: map[string]string{
		"/version":         `{"gitVersion":"v1.35.4"}`,
		servicePath:        service,
		"/api/v1/nodes":    `{"items":[` + strings.Join(nodes, ",") + `]}`,
		"/api/v1/pods":     `{"items":[` + strings.Join(pods, ",") + `]}`,
		podsPath:           `{"items":[` + strings.Join(pods, ",") + `]}`,
		"/api/v1/services": `{"items":[` + service + `]}`,
		"/apis/discovery.k8s.io/v1/namespaces/shop/endpointslices": `{"items":[{"metadata":{"name":"web-1","namespace":"shop",
			"labels":{"kubernetes.io/service-name":"web"}},"addressType":"IPv4","endpoints":[{"addresses":["10.0.0.2"]}]}]}`,
		lists + "ipaddresspools": `{"items":[{"metadata":{"name":"lan"},"spec":{"addresses":["192.0.2.0/24"]},
			"status":{"conditions":[{"type":"Ready","status":"True","reason":"Ready","message":"in use"}]}}]}`,
		lists + "l2advertisements": `{"items":[{"metadata":{"name":"all"}}]}`,
	}}
}

// agents answer for the programs in the pods, as pods/exec does.
type agents struct {
	nodes int
	asked atomic.Int32
}

func (a *agents) exec(_ context.Context, pod lb.Key, container string, command ...string) ([]byte, error) {
	a.asked.Add(1)
	var node int
	if _, err := fmt.Sscanf(pod.Name, "landfall-node-%d", &node); err != nil {
		return nil, err
	}
	if slices.Contains(command, "reach") {
		return json.Marshal(lb.Reach{Node: fmt.Sprint("n", node)})
	}
	if container == "proxy" {
		return json.Marshal(explain.ProxyStatus{Node: fmt.Sprint("n", node), Mode: "nftables", Services: []explain.ProxyService{
			{Service: "shop/web", State: "applied"}}})
	}
	if slices.Contains(command, "--status-only=192.0.2.99") {
		return json.Marshal(explain.SpeakerStatus{Node: fmt.Sprint("n", node)})
	}
	if !strings.Contains(strings.Join(command, " "), "192.0.2.10") {
		return nil, fmt.Errorf("command %q", command)
	}
	said := explain.SpeakerStatus{Node: fmt.Sprint("n", node), VIPs: make([]explain.SpeakerVIP, 1)}
	if err := said.VIPs[0].VIP.UnmarshalText([]byte("192.0.2.10")); err != nil {
		return nil, err
	}
	said.VIPs[0].Owner = "n0"
	said.VIPs[0].Services = []string{"shop/web"}
	for i := range a.nodes {
		reason := lb.ReasonNotOwner
		if i == 0 {
			reason = lb.ReasonAnnounced
		}
		said.VIPs[0].Nodes = append(said.VIPs[0].Nodes, explain.NodeVIP{Node: fmt.Sprint("n", i), Reason: reason,
			Answering: i == 0})
	}
	return json.Marshal(said)
}

// connected returns a gatherer for a cluster whose programs answer.
func (f fakeCluster) connected(t testing.TB, programs *agents) *gatherer {
	t.Helper()
	o := options{user: kube.UserConfig{Kubeconfig: f.serve(t)}}
	client, server, err := o.connect(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	g := newGatherer(client, server, o)
	g.exec = programs.exec
	return g
}
