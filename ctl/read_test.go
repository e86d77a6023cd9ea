package main

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/landfall-lb/landfall/internal/kube"
)

// lists are the kinds that the report is made of, by their paths.
var lists = map[string][2]string{
	"/api/v1/services":                             {"v1", "ServiceList"},
	"/apis/landfall.dev/v1beta1/ipaddresspools":    {"landfall.dev/v1beta1", "IPAddressPoolList"},
	"/apis/landfall.dev/v1beta1/l2advertisements":  {"landfall.dev/v1beta1", "L2AdvertisementList"},
	"/apis/landfall.dev/v1beta1/bgpadvertisements": {"landfall.dev/v1beta1", "BGPAdvertisementList"},
	"/apis/landfall.dev/v1beta1/bgppeers":          {"landfall.dev/v1beta1", "BGPPeerList"},
}

// refusing is an API server with nothing in it that refuses one kind.
func refusing(t *testing.T, refused string) *kube.Client {
	t.Helper()
	failure := func(w http.ResponseWriter, code int, reason metav1.StatusReason, message string) {
		w.WriteHeader(code)
		_ = json.NewEncoder(w).Encode(metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"},
			Status: "Failure", Code: int32(code), Reason: reason, Message: message})
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		switch list, q := lists[r.URL.Path], r.URL.Query(); {
		case strings.HasSuffix(r.URL.Path, "/"+refused):
			failure(w, http.StatusForbidden, metav1.StatusReasonForbidden, refused+` is forbidden: User "eve" cannot list it`)
		case q.Get("sendInitialEvents") != "":
			failure(w, http.StatusUnprocessableEntity, metav1.StatusReasonInvalid, "")
		case q.Get("watch") != "":
			w.(http.Flusher).Flush()
			<-r.Context().Done()
		default:
			fmt.Fprintf(w, `{"apiVersion":%q,"kind":%q,"metadata":{"resourceVersion":"1"},"items":[]}`, list[0], list[1])
		}
	}))
	t.Cleanup(server.Close)
	config := filepath.Join(t.TempDir(), "config")
	err := os.WriteFile(config, fmt.Appendf(nil, `{"apiVersion":"v1","kind":"Config","current-context":"x",
		"clusters":[{"name":"x","cluster":{"server":%q}}],"users":[{"name":"x"}],
		"contexts":[{"name":"x","context":{"cluster":"x","user":"x"}}]}`, server.URL), 0o600)
	if err != nil {
		t.Fatal(err)
	}
	client, err := kube.Connect(kube.Options{Kubeconfig: config, UserAgent: "test", Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	return client
}

// A user with the role view may read no BGPPeers, and sees the rest. What the report is about has
// to be readable: an error says what is not.
func TestStatusWithoutWhatTheUserMayNotRead(t *testing.T) {
	// All connect first, as that sets the logger of a library, and one of its goroutines may outlive a
	// client that has ended.
	clients := map[string]*kube.Client{"nothing": refusing(t, "nothing"), "events": refusing(t, "events")}
	for path := range lists {
		clients[filepath.Base(path)] = refusing(t, filepath.Base(path))
	}
	w, err := read(t.Context(), clients["bgppeers"], options{timeout: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	if err := newReport(w).print(&out); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"POOL ", "VIP ", "BGPPeers and their sessions are not shown", `User "eve" cannot`,
		"landfall-view-peers"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%q is missing:\n%s", want, out.String())
		}
	}
	for name, client := range clients {
		if name == "bgppeers" || name == "nothing" || name == "events" {
			continue
		}
		_, err := read(t.Context(), client, options{timeout: time.Hour})
		if err == nil || !strings.HasPrefix(err.Error(), "read "+name+": ") || !strings.Contains(err.Error(), "eve") {
			t.Errorf("without %s: %v", name, err)
		}
	}
	for _, name := range []string{"nothing", "events"} {
		if w, err := read(t.Context(), clients[name], options{timeout: time.Hour}); err != nil || w.refused != nil {
			t.Errorf("without %s: %v, %v", name, w.refused, err)
		}
	}
}
