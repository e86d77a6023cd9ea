package kube

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/landfall-lb/landfall/internal/lb"
)

// fakeAPI lists and watches Services; it can be down.
type fakeAPI struct {
	mu       sync.Mutex
	down     bool
	services []corev1.Service
	events   chan metav1.WatchEvent
}

func (f *fakeAPI) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	down, services := f.down, f.services
	f.mu.Unlock()
	w.Header().Set("Content-Type", "application/json")
	switch {
	case down:
		http.Error(w, "down", http.StatusServiceUnavailable)
	case r.URL.Path != "/api/v1/services":
		http.NotFound(w, r)
	case r.URL.Query().Get("sendInitialEvents") != "":
		w.WriteHeader(http.StatusUnprocessableEntity)
		json.NewEncoder(w).Encode(metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: "Failure", Reason: metav1.StatusReasonInvalid, Code: 422})
	case r.URL.Query().Get("watch") != "":
		w.(http.Flusher).Flush()
		for {
			select {
			case event, ok := <-f.events:
				if !ok {
					return
				}
				json.NewEncoder(w).Encode(event)
				w.(http.Flusher).Flush()
			case <-r.Context().Done():
				return
			}
		}
	default:
		json.NewEncoder(w).Encode(corev1.ServiceList{TypeMeta: metav1.TypeMeta{Kind: "ServiceList", APIVersion: "v1"},
			ListMeta: metav1.ListMeta{ResourceVersion: "1"}, Items: services})
	}
}

func (f *fakeAPI) setDown(down bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.down = down
}

func service(name, version string, port int32) corev1.Service {
	return corev1.Service{
		TypeMeta:   metav1.TypeMeta{Kind: "Service", APIVersion: "v1"},
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, ResourceVersion: version},
		Spec:       corev1.ServiceSpec{Type: corev1.ServiceTypeClusterIP, Ports: []corev1.ServicePort{{Port: port}}},
	}
}

func event(t *testing.T, kind string, s corev1.Service) metav1.WatchEvent {
	t.Helper()
	raw, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	e := metav1.WatchEvent{Type: kind}
	e.Object.Raw = raw
	return e
}

func newClient(t *testing.T, url string) *Client {
	t.Helper()
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	content := fmt.Sprintf(`{"apiVersion":"v1","kind":"Config","current-context":"c","contexts":[{"name":"c","context":{"cluster":"c","user":"u"}}],
"clusters":[{"name":"c","cluster":{"server":%q}}],"users":[{"name":"u","user":{}}]}`, url)
	if err := os.WriteFile(kubeconfig, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	client, err := Connect(Options{Kubeconfig: kubeconfig, UserAgent: "test", Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	return client
}

func TestTableFollowsTheServerAndOutlivesIt(t *testing.T) {
	api := &fakeAPI{down: true, services: []corev1.Service{service("a", "1", 80), service("b", "1", 81)}, events: make(chan metav1.WatchEvent)}
	server := httptest.NewServer(api)
	defer server.Close()
	client := newClient(t, server.URL)
	changes := make(chan string, 100)
	table := Services(client, "", func(k lb.Key) { changes <- k.Name })
	synced := make(chan struct{}, 100)
	client.OnSync(func() { synced <- struct{}{} })

	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- client.Run(ctx) }()
	defer func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("Run: %v", err)
		}
	}()

	time.Sleep(100 * time.Millisecond)
	if table.Synced() || len(table.All()) > 0 {
		t.Error("the table is synced before the server has answered")
	}
	api.setDown(false)
	await(t, synced)
	if !table.Synced() {
		t.Error("the table is not synced after a full list")
	}
	expectChanges(t, changes, "a", "b")

	api.events <- event(t, "MODIFIED", service("a", "2", 80)) // only the version differs: nothing to tell
	api.events <- event(t, "MODIFIED", service("b", "3", 99))
	expectChanges(t, changes, "b")
	if a, _ := table.Get(lb.Key{Namespace: "default", Name: "a"}); a.Version != "2" {
		t.Errorf("version of a is %q, want the newest", a.Version)
	}

	// The server goes away: what is known stays. Back again, only what differs is told.
	api.setDown(true)
	close(api.events)
	time.Sleep(300 * time.Millisecond)
	if len(table.All()) != 2 || !table.Synced() {
		t.Error("the table was emptied while the server was away")
	}
	api.mu.Lock()
	api.services = []corev1.Service{service("b", "4", 99), service("c", "5", 82)}
	api.events = make(chan metav1.WatchEvent)
	api.mu.Unlock()
	api.setDown(false)
	await(t, synced)
	expectChanges(t, changes, "a", "c")
	api.events <- event(t, "DELETED", service("c", "6", 82))
	expectChanges(t, changes, "c")
	if len(table.All()) != 1 {
		t.Errorf("table: %v", table.All())
	}
}

func await(t *testing.T, c <-chan struct{}) {
	t.Helper()
	select {
	case <-c:
	case <-time.After(20 * time.Second):
		t.Fatal("nothing came in 20 s")
	}
}

// expectChanges waits for the names in any order and for no other.
func expectChanges(t *testing.T, changes <-chan string, names ...string) {
	t.Helper()
	want, got := map[string]int{}, map[string]int{}
	for _, name := range names {
		want[name]++
		select {
		case name := <-changes:
			got[name]++
		case <-time.After(20 * time.Second):
			t.Fatalf("after 20 s only %v changed, want %v", got, names)
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("changes (-want +got):\n%s", diff)
	}
}

func TestConnectRefusesWhatItCannotUse(t *testing.T) {
	_, err := Connect(Options{Kubeconfig: "/nonexistent/kubeconfig", Log: slog.New(slog.DiscardHandler)})
	if want := "--kubeconfig /nonexistent/kubeconfig: stat /nonexistent/kubeconfig: no such file or directory"; err == nil || err.Error() != want {
		t.Errorf("error %v, want %s", err, want)
	}
}
