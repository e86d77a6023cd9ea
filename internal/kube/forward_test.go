package kube

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/httpstream"
	"k8s.io/apimachinery/pkg/util/httpstream/spdy"
	"k8s.io/client-go/tools/portforward"

	"github.com/landfall-lb/landfall/api/v1beta1"
	"github.com/landfall-lb/landfall/internal/lb"
)

// forwarding is an API server that forwards ports of pods: "echo" answers what it hears, "closed" has no such
// port, "forbidden" may not be forwarded, and "hung" never answers.
func forwarding(t *testing.T) *Client {
	t.Helper()
	hang := make(chan struct{})
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.Method == http.MethodGet:
			http.Error(w, "no WebSocket here", http.StatusBadRequest)
		case strings.Contains(r.URL.Path, "/forbidden/"):
			http.Error(w, `pods "forbidden" is forbidden`, http.StatusForbidden)
		case strings.Contains(r.URL.Path, "/hung/"):
			<-hang
		default:
			forward(w, r)
		}
	}))
	t.Cleanup(func() { close(hang); server.Close() })
	file := filepath.Join(t.TempDir(), "config")
	text := fmt.Sprintf(`{"apiVersion":"v1","kind":"Config","current-context":"c","clusters":[{"name":"c","cluster":{"server":%q}}],`+
		`"contexts":[{"name":"c","context":{"cluster":"c"}}]}`, server.URL)
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	client, err := Connect(Options{Kubeconfig: file, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	return client
}

// forward does what a kubelet does.
func forward(w http.ResponseWriter, r *http.Request) {
	if _, err := httpstream.Handshake(r, w, []string{portforward.PortForwardProtocolV1Name}); err != nil {
		return
	}
	streams := make(chan httpstream.Stream, 2)
	conn := spdy.NewResponseUpgrader().UpgradeResponse(w, r, func(s httpstream.Stream, _ <-chan struct{}) error {
		streams <- s
		return nil
	})
	if conn == nil {
		return
	}
	defer conn.Close()
	failure, data := <-streams, <-streams
	if strings.Contains(r.URL.Path, "/closed/") {
		fmt.Fprintf(failure, "port %s: connection refused", failure.Headers().Get(corev1.PortHeader))
		failure.Close()
		data.Close()
		<-conn.CloseChan()
		return
	}
	_, _ = io.Copy(data, data)
}

func TestDialPod(t *testing.T) {
	client := forwarding(t)
	pod := func(name string) lb.Key { return lb.Key{Namespace: "landfall-system", Name: name} }
	conn, err := client.DialPod(t.Context(), pod("echo"), 7480)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(conn, "hello"); err != nil {
		t.Fatal(err)
	}
	heard := make([]byte, 5)
	if _, err := io.ReadFull(conn, heard); err != nil || string(heard) != "hello" {
		t.Errorf("heard %q, %v", heard, err)
	}
	if conn.Close() != nil || conn.RemoteAddr().String() != "landfall-system/echo" {
		t.Error(conn.RemoteAddr())
	}
	conn, err = client.DialPod(t.Context(), pod("closed"), 7480)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := conn.Read(heard); err == nil || err.Error() != "pod landfall-system/closed: port 7480: connection refused" {
		t.Errorf("a port that is closed: %v", err)
	}
	denied := (*Denied)(nil)
	if _, err := client.DialPod(t.Context(), pod("forbidden"), 7480); !errors.As(err, &denied) ||
		!strings.Contains(denied.Rule(), "pods/portforward") {
		t.Errorf("without permission: %v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := client.DialPod(ctx, pod("hung"), 7480); err == nil || !strings.Contains(err.Error(), "does not answer") {
		t.Errorf("a kubelet that hangs: %v", err)
	}
}

func TestConvertSessions(t *testing.T) {
	since := metav1.NewTime(time.Unix(1e9, 0))
	_, got := convertSessions(&v1beta1.BGPPeer{
		ObjectMeta: metav1.ObjectMeta{Name: "tor"},
		Spec:       v1beta1.BGPPeerSpec{PeerAddress: "192.0.2.254", PeerASN: new(int64(64512)), BFDProfile: "fast", Password: "secret"},
		Status: v1beta1.BGPPeerStatus{Nodes: []v1beta1.BGPPeerNode{
			{Name: "n2", State: "Idle", Reason: "NotEstablished", Message: "refused", Since: since}, {Name: "n1", State: "Established"}}},
	})
	want := lb.PeerSessions{Name: "tor", Addr: got.Addr, PeerASN: 64512, BFD: true, Sessions: []lb.PeerSession{
		{Node: "n1", PeerNode: lb.PeerNode{State: "Established"}},
		{Node: "n2", PeerNode: lb.PeerNode{State: "Idle", Reason: "NotEstablished", Message: "refused"}, Since: since.Time}}}
	if !reflect.DeepEqual(got, want) || got.Addr.String() != "192.0.2.254" {
		t.Errorf("%+v, want %+v", got, want)
	}
}

// TestSinceWhen holds that the controller's tables know since when something is wrong.
func TestSinceWhen(t *testing.T) {
	since := metav1.NewTime(time.Unix(1e9, 0))
	o := &corev1.Service{Status: corev1.ServiceStatus{Conditions: []metav1.Condition{
		{Type: lb.ConditionAssigned, Status: metav1.ConditionTrue, LastTransitionTime: since},
		{Type: lb.ConditionAnnounced, Status: metav1.ConditionFalse, LastTransitionTime: since},
		{Type: "example.com/Other", Status: metav1.ConditionFalse, LastTransitionTime: since}}}}
	_, s := convertRequestingService(o, false)
	if len(s.FalseSince) != 1 || !s.FalseSince[lb.ConditionAnnounced].Equal(since.Time) {
		t.Errorf("a Service: %v", s.FalseSince)
	}
	if _, well := convertRequestingService(&corev1.Service{}, false); well.FalseSince != nil {
		t.Errorf("a Service without conditions: %v", well.FalseSince)
	}
	pool := &v1beta1.IPAddressPool{}
	pool.Status.Conditions = []metav1.Condition{{Type: lb.ConditionReady, Status: metav1.ConditionTrue, LastTransitionTime: since}}
	if _, p := convertPool(pool); !p.Since[lb.ConditionReady].Equal(since.Time) || poolSpec(p).Since != nil {
		t.Errorf("a pool: %v, as a specification %v", p.Since, poolSpec(p).Since)
	}
}
