package kube

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/landfall-lb/landfall/api/v1beta1"
	"github.com/landfall-lb/landfall/internal/lb"
)

// fakeAPI lists and watches Services; it can be down.
type fakeAPI struct {
	mu       sync.Mutex
	down     bool
	streams  bool // the first list (KEP-3157)
	services []corev1.Service
	events   chan metav1.WatchEvent
	newest   int // version of the whole, 0 for 1 or with streams 9; what asks for a newer one is refused
	refused  int // requests for a newer version than there is
}

// tooLarge answers as an API server does of which a version is wanted that it does not have, after
// some waiting.
func (f *fakeAPI) tooLarge(w http.ResponseWriter, r *http.Request) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if wanted, _ := strconv.Atoi(r.URL.Query().Get("resourceVersion")); f.newest == 0 || wanted <= f.newest {
		return false
	}
	f.refused++
	status := apierrors.NewTimeoutError("Too large resource version", 1).ErrStatus
	status.TypeMeta = metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}
	status.Details.Causes = []metav1.StatusCause{{Type: metav1.CauseTypeResourceVersionTooLarge,
		Message: "Too large resource version"}}
	w.Header().Set("Retry-After", "1")
	w.WriteHeader(int(status.Code))
	json.NewEncoder(w).Encode(status)
	return true
}

func (f *fakeAPI) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	down, streams, services, newest := f.down, f.streams, f.services, f.newest
	f.mu.Unlock()
	w.Header().Set("Content-Type", "application/json")
	switch {
	case down:
		http.Error(w, "down", http.StatusServiceUnavailable)
	case r.URL.Path != "/api/v1/services":
		http.NotFound(w, r)
	case f.tooLarge(w, r):
	case r.URL.Query().Get("sendInitialEvents") != "" && streams:
		last := corev1.Service{TypeMeta: metav1.TypeMeta{Kind: "Service", APIVersion: "v1"}, ObjectMeta: metav1.ObjectMeta{
			ResourceVersion: strconv.Itoa(max(newest, 9)),
			Annotations:     map[string]string{metav1.InitialEventsAnnotationKey: "true"},
		}}
		for _, s := range services {
			json.NewEncoder(w).Encode(map[string]any{"type": "ADDED", "object": s})
		}
		json.NewEncoder(w).Encode(map[string]any{"type": "BOOKMARK", "object": last})
		f.watch(w, r)
	case r.URL.Query().Get("sendInitialEvents") != "":
		w.WriteHeader(http.StatusUnprocessableEntity)
		json.NewEncoder(w).Encode(metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"},
			Status: "Failure", Reason: metav1.StatusReasonInvalid, Code: 422})
	case r.URL.Query().Get("watch") != "":
		f.watch(w, r)
	default:
		json.NewEncoder(w).Encode(corev1.ServiceList{TypeMeta: metav1.TypeMeta{Kind: "ServiceList", APIVersion: "v1"},
			ListMeta: metav1.ListMeta{ResourceVersion: strconv.Itoa(max(newest, 1))}, Items: services})
	}
}

func (f *fakeAPI) watch(w http.ResponseWriter, r *http.Request) {
	w.(http.Flusher).Flush()
	f.mu.Lock()
	events := f.events
	f.mu.Unlock()
	for {
		select {
		case event, ok := <-events:
			if !ok {
				return
			}
			json.NewEncoder(w).Encode(event)
			w.(http.Flusher).Flush()
		case <-r.Context().Done():
			return
		}
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
	return connect(t, url, Fold{})
}

func connect(t *testing.T, url string, fold Fold) *Client {
	t.Helper()
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	content := fmt.Sprintf(
		`{"apiVersion":"v1","kind":"Config","current-context":"c","contexts":[{"name":"c","context":{"cluster":"c","user":"u"}}],
"clusters":[{"name":"c","cluster":{"server":%q,"insecure-skip-tls-verify":true}}],
"users":[{"name":"u","user":{}}]}`, url)
	if err := os.WriteFile(kubeconfig, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	client, err := Connect(Options{Kubeconfig: kubeconfig, UserAgent: "test", Log: slog.New(slog.DiscardHandler),
		Fold: fold})
	if err != nil {
		t.Fatal(err)
	}
	return client
}

func TestTableFollowsTheServerAndOutlivesIt(t *testing.T) {
	api := &fakeAPI{down: true, services: []corev1.Service{service("a", "1", 80), service("b", "1", 81)},
		events: make(chan metav1.WatchEvent)}
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

// follow has a table follow the Services of an API server, and says which have changed. stop ends
// that.
func follow(t *testing.T, api *fakeAPI) (table *Table[lb.Key, lb.Service], changes chan string, stop func()) {
	t.Helper()
	server := httptest.NewServer(api)
	t.Cleanup(server.Close)
	client := newClient(t, server.URL)
	changes = make(chan string, 100)
	table = Services(client, "", func(k lb.Key) { changes <- k.Name })
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- client.Run(ctx) }()
	return table, changes, func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
}

// TestTableFollowsTheServerBack has etcd restored from a snapshot: all versions are lower than what
// the client has seen.
func TestTableFollowsTheServerBack(t *testing.T) {
	for _, streams := range []bool{false, true} {
		api := &fakeAPI{streams: streams, newest: 100,
			services: []corev1.Service{service("a", "90", 80), service("b", "95", 81)}, events: make(chan metav1.WatchEvent)}
		table, changes, stop := follow(t, api)
		expectChanges(t, changes, "a", "b")

		api.setDown(true)
		close(api.events)
		time.Sleep(300 * time.Millisecond)
		api.mu.Lock()
		api.newest, api.services, api.events = 50, []corev1.Service{service("a", "40", 70), service("c", "45", 82)},
			make(chan metav1.WatchEvent)
		api.down = false
		api.mu.Unlock()
		expectChanges(t, changes, "a", "b", "c")
		if a, _ := table.Get(lb.Key{Namespace: "default", Name: "a"}); a.Version != "40" {
			t.Errorf("streams %v: a has version %q", streams, a.Version)
		}
		api.events <- event(t, "MODIFIED", service("c", "51", 83))
		expectChanges(t, changes, "c")
		api.mu.Lock()
		// Once for the stream and, where there is none, once for the list.
		if api.refused > 2 || api.refused == 0 {
			t.Errorf("streams %v: asked %d times for a version that there is not", streams, api.refused)
		}
		api.mu.Unlock()
		stop()
	}
}

// A first list that is streamed gives the same table as one that comes as a whole.
func TestTableTakesAStreamedList(t *testing.T) {
	services := []corev1.Service{service("a", "1", 80), service("b", "1", 81)}
	services[0].Spec.ClusterIPs, services[0].Annotations = []string{"10.96.0.1"},
		map[string]string{lb.AnnotationScheduler: "maglev"}
	tables := map[bool]map[lb.Key]lb.Service{}
	for _, streams := range []bool{false, true} {
		api := &fakeAPI{streams: streams, services: services, events: make(chan metav1.WatchEvent)}
		table, changes, stop := follow(t, api)
		expectChanges(t, changes, "a", "b")
		tables[streams] = table.All()
		api.events <- event(t, "MODIFIED", service("b", "3", 99))
		expectChanges(t, changes, "b")
		if b, _ := table.Get(lb.Key{Namespace: "default", Name: "b"}); b.Ports[0].Port != 99 {
			t.Errorf("streamed: %v: b is %+v after a change", streams, b)
		}
		stop()
	}
	if diff := cmp.Diff(tables[false], tables[true],
		cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); diff != "" || len(tables[true]) != 2 {
		t.Errorf("streamed %v (-whole +streamed):\n%s", tables[true], diff)
	}
}

// An API server without ServiceCIDRs (before Kubernetes 1.33) or pools, or one that does not show
// them, holds nobody up.
func TestOptionalTable(t *testing.T) {
	lists := map[string]any{
		"/apis/networking.k8s.io/v1/servicecidrs": networkingv1.ServiceCIDRList{
			TypeMeta: metav1.TypeMeta{Kind: "ServiceCIDRList", APIVersion: "networking.k8s.io/v1"},
			ListMeta: metav1.ListMeta{ResourceVersion: "1"},
			Items: []networkingv1.ServiceCIDR{{ObjectMeta: metav1.ObjectMeta{Name: "kubernetes"},
				Spec: networkingv1.ServiceCIDRSpec{CIDRs: []string{"10.96.0.0/12", "fd00::/112"}}}},
		},
		"/apis/landfall.dev/v1beta1/ipaddresspools": v1beta1.IPAddressPoolList{
			TypeMeta: metav1.TypeMeta{Kind: "IPAddressPoolList", APIVersion: "landfall.dev/v1beta1"},
			ListMeta: metav1.ListMeta{ResourceVersion: "1"},
			Items: []v1beta1.IPAddressPool{{ObjectMeta: metav1.ObjectMeta{Name: "lan"},
				Spec: v1beta1.IPAddressPoolSpec{Addresses: []v1beta1.AddressRange{"192.0.2.0/30"},
					ExcludedAddresses: []v1beta1.AddressRange{"192.0.2.1/32"}}}},
		},
	}
	for _, code := range []int{http.StatusNotFound, http.StatusForbidden, http.StatusOK} {
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			switch q := r.URL.Query(); {
			case lists[r.URL.Path] == nil || code != http.StatusOK:
				w.WriteHeader(code)
				json.NewEncoder(w).Encode(metav1.Status{
					TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: "Failure", Code: int32(code),
					Reason: map[int]metav1.StatusReason{http.StatusNotFound: metav1.StatusReasonNotFound,
						http.StatusForbidden: metav1.StatusReasonForbidden}[code],
				})
			case q.Get("sendInitialEvents") != "":
				w.WriteHeader(http.StatusUnprocessableEntity)
				json.NewEncoder(w).Encode(metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"},
					Status: "Failure", Reason: metav1.StatusReasonInvalid, Code: 422})
			case q.Get("watch") != "":
				w.(http.Flusher).Flush()
				<-r.Context().Done()
			default:
				json.NewEncoder(w).Encode(lists[r.URL.Path])
			}
		}))
		client := newClient(t, server.URL)
		synced := make(chan struct{}, 100)
		client.OnSync(func() { synced <- struct{}{} })
		table, pools := ServiceNetworks(client, func(string) {}), PoolRanges(client, func(string) {})
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- client.Run(ctx) }()
		await(t, synced)
		await(t, synced)
		want, wantPools := map[string][]netip.Prefix{}, map[string][]lb.Range{}
		if code == http.StatusOK {
			wantPools["lan"] = []lb.Range{{From: netip.MustParseAddr("192.0.2.0"), To: netip.MustParseAddr("192.0.2.0")},
				{From: netip.MustParseAddr("192.0.2.2"), To: netip.MustParseAddr("192.0.2.3")}}
			want["kubernetes"] = []netip.Prefix{netip.MustParsePrefix("10.96.0.0/12"), netip.MustParsePrefix("fd00::/112")}
		}
		if diff := cmp.Diff(want, table.All(), cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })); diff != "" ||
			!table.Synced() {
			t.Errorf("status %d: synced %v; (-want +got):\n%s", code, table.Synced(), diff)
		}
		if !reflect.DeepEqual(pools.All(), wantPools) || !pools.Synced() {
			t.Errorf("status %d: synced %v; pools %v, want %v", code, pools.Synced(), pools.All(), wantPools)
		}
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		server.Close()
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
	want := "--kubeconfig /nonexistent/kubeconfig: stat /nonexistent/kubeconfig: no such file or directory"
	if err == nil || err.Error() != want {
		t.Errorf("error %v, want %s", err, want)
	}
}
