//go:build vm

package vm

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// api is an API server that has the same objects for ever, but those of a cluster: a real one takes minutes to start
// where every instruction is emulated.
type api struct {
	objects map[string][]runtime.Object // by the last part of the path
	cluster *cluster                    // has objects that change; may be nil
}

// serve answers at an address of the calling thread's network namespace, and writes a kubeconfig.
func (a api) serve(t *testing.T, kubeconfig string) error {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	server := &http.Server{Handler: a}
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(func() { server.Close() })
	return os.WriteFile(kubeconfig, fmt.Appendf(nil, `apiVersion: v1
kind: Config
clusters: [{name: here, cluster: {server: "http://%s"}}]
contexts: [{name: here, context: {cluster: here}}]
current-context: here
`, listener.Addr()), 0o600)
}

// kinds of the lists, by the last part of the path.
var kinds = map[string]schema.GroupVersionKind{
	"services":       corev1.SchemeGroupVersion.WithKind("Service"),
	"nodes":          corev1.SchemeGroupVersion.WithKind("Node"),
	"configmaps":     corev1.SchemeGroupVersion.WithKind("ConfigMap"),
	"endpointslices": {Group: "discovery.k8s.io", Version: "v1", Kind: "EndpointSlice"},
	"servicecidrs":   {Group: "networking.k8s.io", Version: "v1", Kind: "ServiceCIDR"},
	"ipaddresspools": {Group: "landfall.dev", Version: "v1beta1", Kind: "IPAddressPool"},
	"bgppeers":       {Group: "landfall.dev", Version: "v1beta1", Kind: "BGPPeer"},
	"bfdprofiles":    {Group: "landfall.dev", Version: "v1beta1", Kind: "BFDProfile"},
	"communities":    {Group: "landfall.dev", Version: "v1beta1", Kind: "Community"},

	"l2advertisements":  {Group: "landfall.dev", Version: "v1beta1", Kind: "L2Advertisement"},
	"bgpadvertisements": {Group: "landfall.dev", Version: "v1beta1", Kind: "BGPAdvertisement"},
}

func (a api) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	if a.cluster != nil && a.cluster.has(r) {
		a.cluster.ServeHTTP(w, r)
		return
	}
	parts := strings.Split(strings.Trim(r.URL.Path, "/"), "/")
	resource := parts[len(parts)-1]
	switch query := r.URL.Query(); {
	case r.Method != http.MethodGet:
		w.WriteHeader(http.StatusForbidden)
		write(w, metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: metav1.StatusFailure,
			Reason: metav1.StatusReasonForbidden, Code: http.StatusForbidden, Message: "nothing changes here"})
	case query.Get("watch") != "":
		a.watch(w, r, resource, query.Get("sendInitialEvents") == "true")
	case len(parts) > 1 && parts[len(parts)-2] == "nodes":
		write(w, a.objects["nodes"][0]) // all others that are asked for by their name are not there
	default:
		kind, known := kinds[resource]
		if !known {
			http.NotFound(w, r)
			return
		}
		items := a.objects[resource]
		if items == nil {
			items = []runtime.Object{}
		}
		write(w, map[string]any{"kind": kind.Kind + "List", "apiVersion": kind.GroupVersion().String(),
			"metadata": map[string]any{"resourceVersion": "1"}, "items": items})
	}
}

// watch sends what is there if it is asked to, and then nothing until the client leaves.
func (a api) watch(w http.ResponseWriter, r *http.Request, resource string, initial bool) {
	if initial {
		for _, o := range a.objects[resource] {
			write(w, map[string]any{"type": "ADDED", "object": o})
		}
		kind := kinds[resource]
		write(w, map[string]any{"type": "BOOKMARK", "object": map[string]any{
			"kind": kind.Kind, "apiVersion": kind.GroupVersion().String(), "metadata": map[string]any{"resourceVersion": "1",
				"annotations": map[string]any{metav1.InitialEventsAnnotationKey: "true"}}}})
	}
	w.(http.Flusher).Flush()
	select {
	case <-r.Context().Done():
	case <-time.After(time.Hour):
	}
}

func write(w http.ResponseWriter, what any) { _ = json.NewEncoder(w).Encode(what) }
