package main

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/kube"
	"github.com/landfall-lb/landfall/internal/lb"
)

// controllers are pods behind an API server, and a ServiceAccount whose token they accept.
type controllers struct {
	mu      sync.Mutex
	pods    []kube.PodState
	served  map[string]string // by pod, the address of a server in its place
	dialed  []string
	tokens  int
	seen    []string // Authorization of each request
	refused error
	only    string // the namespace whose pods the user may list; empty for all
}

func (c *controllers) PodsWith(_ context.Context, namespace, _ string) ([]kube.PodState, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.only != "" && namespace != c.only {
		return nil, &kube.Denied{Verb: "list", Resource: "pods", Err: errors.New("forbidden")}
	}
	return slices.DeleteFunc(slices.Clone(c.pods), func(p kube.PodState) bool {
		return namespace != "" && p.Namespace != namespace
	}), nil
}

func (c *controllers) AccountToken(_ context.Context, account lb.Key, valid time.Duration) (string, time.Time, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.refused != nil {
		return "", time.Time{}, c.refused
	}
	c.tokens++
	if account.Namespace != "landfall-system" {
		return "a token of " + account.String(), time.Time{}, nil
	}
	return fmt.Sprintf("%s-%d", account.Name, c.tokens), time.Unix(1e9, 0).Add(valid), nil
}

func (c *controllers) DialPod(ctx context.Context, pod lb.Key, port int) (net.Conn, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.dialed = append(c.dialed, fmt.Sprintf("%s:%d", pod.Name, port))
	address, ok := c.served[pod.Name]
	if !ok {
		return nil, fmt.Errorf("pod %s: connection refused", pod)
	}
	return (&net.Dialer{}).DialContext(ctx, "tcp", address)
}

// controllerPod is a pod of the controller with the dashboard, or without.
func controllerPod(name, account string) kube.PodState {
	p := kube.PodState{Key: lb.Key{Namespace: "landfall-system", Name: name}, Labels: map[string]string{},
		Containers: []kube.Container{{Name: "controller", Running: true,
			Command: []string{"landfall-controller", "--metrics-bind-address=:7480"}}}}
	if account != "" {
		p.Labels[lb.LabelDashboard] = account
	}
	return p
}

// newControllers starts a controller that answers with what it was asked for.
func newControllers(t *testing.T) *controllers {
	t.Helper()
	c := &controllers{pods: []kube.PodState{controllerPod("c-0", "landfall-dashboard"), controllerPod("c-1", "landfall-dashboard")},
		served: map[string]string{}}
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c.mu.Lock()
		c.seen = append(c.seen, r.Header.Get("Authorization"))
		c.mu.Unlock()
		w.Header().Set("Content-Security-Policy", "default-src 'none'")
		w.Header().Set("ETag", `"7"`)
		if r.Header.Get("If-None-Match") == `"7"` {
			w.WriteHeader(http.StatusNotModified)
			return
		}
		fmt.Fprintf(w, "%s %s cookie=%q agent=%q", r.Method, r.URL, r.Header.Get("Cookie"), r.Header.Get("X-Forwarded-For"))
	}))
	t.Cleanup(server.Close)
	c.served["c-1"] = server.Listener.Addr().String()
	return c
}

func newTestWay(c *controllers) *way {
	w := newWay(c, "landfall-system")
	w.now = func() time.Time { return time.Unix(1e9, 0) }
	return w
}

func TestDashboardHasItsOwnAddressOnly(t *testing.T) {
	c := newControllers(t)
	l := newLocal("127.0.0.1:4711", "SECRET", newTestWay(c))
	for name, test := range map[string]struct {
		method, path string
		header       map[string]string
		code         int
		text         string
	}{
		"the page": {path: "/SECRET/", code: 200, text: `GET /dashboard/ cookie="" agent=""`},
		"data": {path: "/SECRET/data?q=%3Cb%3E&offset=50", code: 200,
			text: "GET /dashboard/data?q=%3Cb%3E&offset=50 "},
		"data that have not changed":   {path: "/SECRET/data", header: map[string]string{"If-None-Match": `"7"`}, code: 304},
		"what else browsers send":      {path: "/SECRET/", header: map[string]string{"Cookie": "x=1"}, code: 200, text: `cookie=""`},
		"the page's own requests":      {path: "/SECRET/data", header: map[string]string{"Sec-Fetch-Site": "same-origin"}, code: 200},
		"typed by a person":            {path: "/SECRET/", header: map[string]string{"Sec-Fetch-Site": "none"}, code: 200},
		"another site":                 {path: "/SECRET/", header: map[string]string{"Sec-Fetch-Site": "cross-site"}, code: 403},
		"another port of this machine": {path: "/SECRET/", header: map[string]string{"Sec-Fetch-Site": "same-site"}, code: 403},
		"DNS rebinding":                {path: "/SECRET/", header: map[string]string{"Host": "evil.example:4711"}, code: 403},
		"another name":                 {path: "/SECRET/", header: map[string]string{"Host": "localhost:4711"}, code: 403},
		"without the secret":           {path: "/", code: 404},
		"without the slash":            {path: "/SECRET", code: 404},
		"another secret":               {path: "/SECRE1/data", code: 404},
		"the path that it leads to":    {path: "/dashboard/data", code: 404},
		"up from there":                {path: "/SECRET/../metrics", code: 404},
		"a write":                      {method: http.MethodPost, path: "/SECRET/data", code: 405},
	} {
		r := httptest.NewRequest(cmp.Or(test.method, http.MethodGet), "http://127.0.0.1:4711"+test.path, nil)
		for key, value := range test.header {
			if key == "Host" {
				r.Host = value
			} else {
				r.Header.Set(key, value)
			}
		}
		w := httptest.NewRecorder()
		l.ServeHTTP(w, r)
		if w.Code != test.code || !strings.Contains(w.Body.String(), test.text) {
			t.Errorf("%s: %d %q, want %d with %q", name, w.Code, w.Body, test.code, test.text)
		}
		if w.Code == 200 && w.Header().Get("Content-Security-Policy") == "" {
			t.Errorf("%s: the controller's policy is lost", name)
		}
	}
	if slices.ContainsFunc(c.seen, func(token string) bool { return token != "Bearer landfall-dashboard-1" }) {
		t.Errorf("tokens: %v", c.seen)
	}
	if c.dialed[0] != "c-0:7480" || c.dialed[1] != "c-1:7480" {
		t.Errorf("dialed %v", c.dialed)
	}
}

// A tenant's pod that looks like a controller is not dialed, and sees no token.
func TestDashboardPassesTenantsBy(t *testing.T) {
	for _, tenant := range tenants {
		c := newControllers(t)
		theirs := controllerPod("c-1", "deployer") // what answers in its place would be believed
		theirs.Namespace = tenant
		c.pods = slices.Insert(c.pods, 0, theirs)
		w := newTestWay(c)
		if err := w.try(t.Context()); err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(c.dialed, []string{"c-0:7480", "c-1:7480"}) || !slices.Equal(c.seen, []string{"Bearer landfall-dashboard-1"}) {
			t.Errorf("with a pod in %s: dialed %v with %v", tenant, c.dialed, c.seen)
		}
	}
}

func TestDashboardRenewsItsToken(t *testing.T) {
	c := newControllers(t)
	w := newTestWay(c)
	for _, test := range []struct {
		after time.Duration
		want  string
	}{{0, "landfall-dashboard-1"}, {tokenValid / 2, "landfall-dashboard-1"}, {tokenValid, "landfall-dashboard-2"}} {
		w.now = func() time.Time { return time.Unix(1e9, 0).Add(test.after) }
		if token, err := w.valid(t.Context()); err != nil || token != test.want {
			t.Errorf("after %s: %q, %v", test.after, token, err)
		}
	}
}

func TestDashboardSaysWhatIsMissing(t *testing.T) {
	for name, test := range map[string]struct {
		change func(*controllers)
		want   string
	}{
		"nothing":                   {func(*controllers) {}, ""},
		"pods of one namespace":     {func(c *controllers) { c.only = "landfall-system" }, ""},
		"pods of another namespace": {func(c *controllers) { c.only = "web" }, `resources: ["pods"], verbs: ["list"]`},
		"no controller":             {func(c *controllers) { c.pods = nil }, "no pod of Landfall is in namespace landfall-system"},
		"no controller among the pods": {func(c *controllers) {
			for i := range c.pods {
				c.pods[i].Containers[0].Command[0] = "landfall-speaker"
			}
		}, "no pod runs landfall-controller"},
		"off": {func(c *controllers) { c.pods = []kube.PodState{controllerPod("c-0", "")} },
			"the dashboard is off: set controller.dashboard.enabled=true"},
		"no token": {func(c *controllers) {
			c.refused = &kube.Denied{Verb: "create", Resource: "serviceaccounts/token", Err: errors.New("forbidden")}
		}, `resources: ["serviceaccounts/token"], verbs: ["create"]`},
		"no way": {func(c *controllers) { c.served = nil }, "pod landfall-system/c-0: connection refused\npod landfall-system/c-1"},
		"no port": {func(c *controllers) {
			c.pods[0].Containers[0].Command = c.pods[0].Containers[0].Command[:1]
			c.pods = c.pods[:1]
		},
			`its --metrics-bind-address is ""`},
	} {
		c := newControllers(t)
		test.change(c)
		err := newTestWay(c).try(t.Context())
		if got := fmt.Sprint(err); (err != nil) != (test.want != "") || !strings.Contains(got, test.want) {
			t.Errorf("%s: %s, want %q", name, got, test.want)
		}
	}
	refusing := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		http.Error(w, "bind a ClusterRole", http.StatusForbidden)
	}))
	defer refusing.Close()
	c := newControllers(t)
	c.served["c-0"] = refusing.Listener.Addr().String()
	if err := newTestWay(c).try(t.Context()); err == nil || err.Error() != "the controller answers 403 Forbidden: bind a ClusterRole" {
		t.Error(err)
	}
}

// TestDashboardOverlivesAController has the controller that answers end.
func TestDashboardOverlivesAController(t *testing.T) {
	c := newControllers(t)
	w := newTestWay(c)
	l := newLocal("127.0.0.1:4711", "S", w)
	ask := func() int {
		answer := httptest.NewRecorder()
		l.ServeHTTP(answer, httptest.NewRequest(http.MethodGet, "http://127.0.0.1:4711/S/", nil))
		return answer.Code
	}
	first := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "ok") }))
	first.TLS = &tls.Config{}
	first.StartTLS()
	c.served["c-0"] = first.Listener.Addr().String()
	if code := ask(); code != 200 {
		t.Fatal(code)
	}
	first.CloseClientConnections()
	first.Close()
	if code := ask(); code != 200 {
		t.Errorf("from the other controller: %d", code)
	}
	c.mu.Lock()
	c.pods = nil
	c.mu.Unlock()
	w.transport.(*http.Transport).CloseIdleConnections()
	if code := ask(); code != http.StatusBadGateway {
		t.Errorf("without controllers: %d", code)
	}
}
