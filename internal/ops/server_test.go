package ops

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"iter"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httptrace"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// bigRegistry makes registries of many metrics.
func bigRegistry(n int) *prometheus.Registry {
	registry := prometheus.NewRegistry()
	gauge := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "landfall_test"}, []string{"label"})
	for i := range n {
		gauge.WithLabelValues(fmt.Sprintf("%0100d", i)).Set(1)
	}
	registry.MustRegister(gauge)
	return registry
}

// serving is a metrics server on 127.0.0.1 until the test ends.
func serving(t *testing.T, s *server) (address string) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error)
	go func() { ended <- s.run(ctx, []net.Listener{listener}) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return listener.Addr().String()
}

// ownAddress is one at which nobody but this process listens, or has a connection.
func ownAddress() string {
	pid := os.Getpid()
	return fmt.Sprintf("127.%d.%d.%d:7480", 64|pid>>16&63, pid>>8&255, pid&255)
}

// client sends requests over new connections from an address, and accepts any certificate.
func client(from string) *http.Client {
	return &http.Client{Timeout: time.Minute, Transport: &http.Transport{
		DisableKeepAlives: true, TLSClientConfig: &tls.Config{InsecureSkipVerify: true},
		DialContext: (&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}).DialContext,
	}}
}

func get(c *http.Client, url, token string) (code int, body string, err error) {
	r, err := http.NewRequest(http.MethodGet, url, nil)
	if err != nil {
		return 0, "", err
	}
	if token != "" {
		r.Header.Set("Authorization", "Bearer "+token)
	}
	response, err := c.Do(r)
	if err != nil {
		return 0, "", err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	return response.StatusCode, string(text), err
}

// servingSecurely serves over TLS to who brings the token "good".
func servingSecurely(t *testing.T) (address string) {
	t.Helper()
	s := newServer(slog.New(slog.DiscardHandler), bigRegistry(1))
	c, err := newCertificate(nil, "", "", []string{"127.0.0.1"})
	if err != nil {
		t.Fatal(err)
	}
	s.secure(c)
	s.gatekeeper.use(func(_ context.Context, token string) (string, bool, error) {
		return "prometheus", token == "good", nil
	}, nil)
	return serving(t, s)
}

func TestSecureMetrics(t *testing.T) {
	address := servingSecurely(t)
	for i, test := range []struct {
		path, token string
		want        int
	}{
		{"/healthz", "", 200}, {"/readyz", "", 503}, {"/metrics", "", 401}, {"/metrics", "good", 200},
		{"/metrics", "bad", 403}, {"/v1/status", "good", 404},
	} {
		code, body, err := get(client(fmt.Sprintf("127.0.0.%d", i+2)), "https://"+address+test.path, test.token)
		if err != nil || code != test.want {
			t.Errorf("%s with token %q: %d %q, %v; want %d", test.path, test.token, code, body, err, test.want)
		}
	}
	if code, _, err := get(client("127.0.0.9"), "http://"+address+"/metrics", "good"); err == nil && code == 200 {
		t.Error("metrics without TLS")
	}
}

func TestGuardedPages(t *testing.T) {
	s := newServer(slog.New(slog.DiscardHandler), bigRegistry(1))
	rt := &Runtime{server: s}
	page := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, r.URL.Path) })
	what := Guarded{Name: "the page", URL: "/page", Role: "page-reader", Hint: "Ask for it."}
	review := func(_ context.Context, token string) (string, bool, error) { return "eve", token == "good", nil }
	if err := rt.Serve("page", what, page, review); err == nil || !errors.As(err, new(usageError)) {
		t.Errorf("without --metrics-secure: %v", err)
	}
	c, err := newCertificate(nil, "", "", nil)
	if err != nil {
		t.Fatal(err)
	}
	s.secure(c)
	if err := rt.Serve("page", what, page, review); err != nil {
		t.Fatal(err)
	}
	address := serving(t, s)
	for i, test := range []struct {
		path, token string
		code        int
		text        string
	}{
		{"/page/x", "", 401, "access to the page needs the bearer token of a Kubernetes user, such as a ServiceAccount. Ask for it."},
		{"/page/x", "bad", 403, `user "eve" may not get /page: bind a ClusterRole with the nonResourceURL /page, such as the chart's page-reader`},
		{"/page/x", "good", 200, "/page/x"},
		{"/page/../metrics", "good", 503, "has not connected to the API server yet"}, // what lets the page lets no metrics
		{"/pages", "good", 404, ""},
	} {
		code, body, err := get(client(fmt.Sprintf("127.0.0.%d", i+2)), "https://"+address+test.path, test.token)
		if err != nil || code != test.code || !strings.Contains(body, test.text) {
			t.Errorf("%s with token %q: %d %q, %v; want %d", test.path, test.token, code, body, err, test.code)
		}
	}
}

// TestClientsThatDoNotReadHarmNobody has clients that ask for metrics and never read, while kubelet
// and Prometheus ask too.
func TestClientsThatDoNotReadHarmNobody(t *testing.T) {
	s := newServer(slog.New(slog.DiscardHandler), bigRegistry(5000)) // an answer of some 700 kB
	address := serving(t, s)
	before, most := heap(), int64(0)
	for i := range 100 {
		d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP("127.0.0.66")}, Control: smallBuffer}
		conn, err := d.Dial("tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if _, err := io.WriteString(conn, "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil &&
			!strings.Contains(err.Error(), "reset") {
			t.Fatal(err)
		}
		if code, _, err := get(client("127.0.0.2"), "http://"+address+"/healthz", ""); code != 200 {
			t.Fatalf("a probe: %d %v", code, err)
		}
		if i%10 == 9 {
			most = max(most, heap()-before)
		}
	}
	code, body, err := get(client("127.0.0.3"), "http://"+address+"/metrics", "")
	for range 2 { // a busy machine may need longer than writeTimeout for one: the next scrape comes through
		if err != nil {
			code, body, err = get(client("127.0.0.3"), "http://"+address+"/metrics", "")
		}
	}
	if err != nil || code != 200 || strings.Count(body, "\nlandfall_test{") != 5000 {
		t.Errorf("Prometheus gets %d, %d bytes, %v", code, len(body), err)
	}
	if most>>20 > 10*scrapes { // some 5 MB for each answer that is being written
		t.Errorf("the clients hold %d MB", most>>20)
	}
	t.Logf("the clients held %d MB at most", most>>20)
}

// TestContract11AFloodLeavesPrometheusItsConnection has clients flood a port, first one with the address of Prometheus and
// then many: Prometheus goes on with the connection that it has.
func TestContract11AFloodLeavesPrometheusItsConnection(t *testing.T) {
	address := servingSecurely(t)
	scraper := client("127.0.0.66")
	scraper.Transport.(*http.Transport).DisableKeepAlives = false
	defer scraper.CloseIdleConnections()
	scrape := func() (again bool) {
		ctx := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{
			GotConn: func(got httptrace.GotConnInfo) { again = got.Reused }})
		r, _ := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+address+"/metrics", nil)
		r.Header.Set("Authorization", "Bearer good")
		response, err := scraper.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		defer response.Body.Close()
		if _, err := io.Copy(io.Discard, response.Body); err != nil || response.StatusCode != 200 {
			t.Errorf("%s %v", response.Status, err)
		}
		return again
	}
	scrape()
	for _, addresses := range []int{1, 200} {
		for i := range 200 {
			from := net.ParseIP("127.0.0.66")
			if addresses > 1 {
				from = net.ParseIP(fmt.Sprintf("127.0.1.%d", i%addresses+1))
			}
			conn, err := (&net.Dialer{LocalAddr: &net.TCPAddr{IP: from}}).Dial("tcp", address)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
		}
		if !scrape() {
			t.Errorf("a flood of %d addresses has ended the connection of Prometheus", addresses)
		}
	}
}

func heap() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

func TestRequestsAreBounded(t *testing.T) {
	address := serving(t, newServer(slog.New(slog.DiscardHandler), bigRegistry(1)))
	conn, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	fmt.Fprintf(conn, "GET /healthz HTTP/1.1\r\nHost: x\r\nX: %s\r\n\r\n", strings.Repeat("x", maxHeader+8<<10))
	if answer, _ := io.ReadAll(conn); !strings.Contains(string(answer), "431") {
		t.Errorf("a large header: %q", answer)
	}
	for _, method := range []string{http.MethodPost, http.MethodPut, http.MethodDelete} {
		r, _ := http.NewRequest(method, "http://"+address+"/metrics", strings.NewReader("x"))
		if response, err := client("127.0.0.2").Do(r); err != nil || response.StatusCode != 405 {
			t.Errorf("%s: %v, %v", method, response, err)
		}
	}
}

type item struct {
	Name string `json:"name"`
}

func items(n int) iter.Seq[item] {
	return func(yield func(item) bool) {
		for i := range n {
			if !yield(item{fmt.Sprint(i)}) {
				return
			}
		}
	}
}

func TestStatusIsJSONElementByElement(t *testing.T) {
	for n, want := range map[int]string{
		0: "{\n  \"name\": \"head\",\n  \"items\": []\n}\n",
		2: "{\n  \"name\": \"head\",\n  \"items\": [\n    {\n      \"name\": \"0\"\n    },\n    {\n      \"name\": \"1\"\n " +
			"   }\n  ]\n}\n",
	} {
		var out bytes.Buffer
		if err := WriteStatus(&out, item{"head"}, "items", items(n)); err != nil || out.String() != want {
			t.Errorf("%d items: %v\n%s", n, err, out.String())
		}
	}
	broken, made := errors.New("the client has gone"), 0
	err := WriteStatus(failing{broken}, item{}, "items", func(yield func(item) bool) {
		for made = 0; made < 1e6 && yield(item{strings.Repeat("x", 1000)}); made++ {
		}
	})
	if !errors.Is(err, broken) || made > 1000 {
		t.Errorf("a client that has gone: %v after %d elements", err, made)
	}
}

type failing struct{ err error }

func (f failing) Write([]byte) (int, error) { return 0, f.err }

func TestStatusIsForThisUserOnly(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "prog.sock")
	address := ""
	p := Program{Name: "prog", StatusSocket: "/nonexistent/prog.sock"}
	if got := runProgram(p, nil, "status"); got.code != 1 ||
		!strings.Contains(got.stderr, "no program serves /nonexistent") {
		t.Errorf("status without a program: %+v", got)
	}
	p.Run = func(ctx context.Context, rt *Runtime) error {
		rt.Status(func(w io.Writer, _ string) error { return WriteStatus(w, item{"prog"}, "items", items(3)) })
		for { // the socket opens beside Run
			got := runProgram(p, nil, "status", "--status-socket="+socket)
			if got.code == 0 {
				if !strings.Contains(got.stdout, `"name": "prog"`) || !strings.HasSuffix(got.stdout, "]\n}\n") {
					t.Errorf("status: %s", got.stdout)
				}
				break
			}
			time.Sleep(time.Millisecond)
		}
		if info, err := os.Stat(socket); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("mode %v, %v", info.Mode(), err)
		}
		if code, _, err := get(client("127.0.0.1"), "http://"+address+"/v1/status", ""); err != nil || code != 404 {
			t.Errorf("/v1/status over TCP: %d %v", code, err)
		}
		return nil
	}
	address = ownAddress()
	if got := runProgram(p, nil, "--status-socket="+socket, "--metrics-bind-address="+address); got.code != 0 {
		t.Errorf("%+v", got)
	}
}

// Clients with more addresses than a port has places lock out a kubelet whose address is not the program's own, and not
// the probe that asks on the socket. That follows the loops.
func TestContract11ProbesOnTheSocketPassAFullPort(t *testing.T) {
	socket, address := filepath.Join(t.TempDir(), "prog.sock"), ownAddress()
	var busy time.Duration
	alive := func(args ...string) result {
		p := Program{Name: "prog", ProbeSocket: true, Run: func(context.Context, *Runtime) error { return nil }}
		return runProgram(p, nil, append([]string{"alive"}, args...)...)
	}
	if got := alive(); got.code != 2 || !strings.Contains(got.stderr, "alive needs --probe-socket") {
		t.Errorf("without a socket: %+v", got)
	}
	if got := alive("--probe-socket=" + socket); got.code != 1 || !strings.Contains(got.stderr, "no program serves") {
		t.Errorf("without a program: %+v", got)
	}
	p := Program{Name: "prog", ProbeSocket: true, Run: func(_ context.Context, rt *Runtime) error {
		rt.Live("pools", func() time.Duration { return busy })
		connect := func(from string) net.Conn {
			c, err := (&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}).Dial("tcp", address)
			if err != nil {
				t.Error(err)
				return nil
			}
			t.Cleanup(func() { c.Close() })
			return c
		}
		kubelet := connect("127.9.0.1")
		for i := range maxConnections {
			connect(fmt.Sprintf("127.9.1.%d", i+1))
		}
		if t.Failed() {
			return nil
		}
		_ = kubelet.SetReadDeadline(time.Now().Add(readTimeout / 2))
		if _, err := kubelet.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("the port has room for all: %v", err)
		}
		got := alive("--probe-socket=" + socket)
		for got.code != 0 { // the socket opens beside Run
			time.Sleep(time.Millisecond)
			got = alive("--probe-socket=" + socket)
		}
		if got.stdout != "ok\n" {
			t.Errorf("%+v", got)
		}
		busy = 3 * time.Minute
		if got := alive("--probe-socket=" + socket); got.code != 1 || !strings.Contains(got.stderr, "pools: hangs") {
			t.Errorf("a loop that hangs: %+v", got)
		}
		return nil
	}}
	if got := runProgram(p, nil, "--probe-socket="+socket, "--metrics-bind-address="+address); got.code != 0 {
		t.Errorf("%+v", got)
	}
}

// TestContract11ReadinessTellsDetailsToRootOnly has everybody ask at the port who may not know which other nodes there are.
func TestContract11ReadinessTellsDetailsToRootOnly(t *testing.T) {
	rt := &Runtime{server: newServer(slog.New(slog.DiscardHandler), bigRegistry(1))}
	rt.Ready("speaker", func() error { return fmt.Errorf("waits: %w", Detailed{errors.New("met nobody"), "n2, n3 refuse"}) })
	rt.Ready("rules", func() error { return errors.New("still waiting") })
	for what, mux := range map[string]*http.ServeMux{
		"speaker: met nobody\nrules: still waiting\n":                       rt.server.tcp,
		"speaker: waits: met nobody: n2, n3 refuse\nrules: still waiting\n": rt.server.local,
	} {
		w := httptest.NewRecorder()
		mux.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/readyz", nil))
		if w.Code != 503 || w.Body.String() != what {
			t.Errorf("%d %q, want %q", w.Code, w.Body.String(), what)
		}
	}
}

func TestHealthFollowsTheLoops(t *testing.T) {
	rt := &Runtime{server: newServer(slog.New(slog.DiscardHandler), bigRegistry(1))}
	var rules, plan time.Duration
	rt.Live("rules", func() time.Duration { return rules })
	rt.Live("plan", func() time.Duration { return plan })
	for _, test := range []struct {
		rules, plan time.Duration
		code        int
		body        string
	}{
		{0, 0, 200, "ok\n"},
		{time.Minute, 90 * time.Second, 200, "ok\n"},
		{3 * time.Minute, 0, 503, "rules: hangs: no progress for 3m0s\n"},
		{3 * time.Minute, time.Hour, 503, "rules: hangs: no progress for 3m0s\nplan: hangs: no progress for 1h0m0s\n"},
		{0, time.Second, 200, "ok\n"},
	} {
		rules, plan = test.rules, test.plan
		w := httptest.NewRecorder()
		rt.server.tcp.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/healthz", nil))
		if w.Code != test.code || w.Body.String() != test.body {
			t.Errorf("%v, %v: %d %q, want %d %q", rules, plan, w.Code, w.Body.String(), test.code, test.body)
		}
	}
}

// pipes is a listener for connections that have no buffer.
type pipes struct {
	conns chan net.Conn
	ended chan struct{}
}

func (p pipes) Accept() (net.Conn, error) {
	select {
	case conn := <-p.conns:
		return conn, nil
	case <-p.ended:
		return nil, net.ErrClosed
	}
}

func (p pipes) Close() error {
	select {
	case <-p.ended:
	default:
		close(p.ended)
	}
	return nil
}

func (pipes) Addr() net.Addr { return &net.UnixAddr{} }

// TestAnswersThatNobodyReadsEnd has a client that asks and never reads: the server gives up after its time.
func TestAnswersThatNobodyReadsEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServer(slog.New(slog.DiscardHandler), prometheus.NewRegistry())
		failed := make(chan error, 1)
		s.tcp.HandleFunc("GET /much", func(w http.ResponseWriter, _ *http.Request) {
			_, err := io.WriteString(w, strings.Repeat("x", 1<<20))
			failed <- err
		})
		ctx, cancel := context.WithCancel(t.Context())
		listener, ended := pipes{make(chan net.Conn), make(chan struct{})}, make(chan error, 1)
		go func() { ended <- s.run(ctx, []net.Listener{listener}) }()
		ours, theirs := net.Pipe()
		listener.conns <- theirs
		began := time.Now()
		if _, err := io.WriteString(ours, "GET /much HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
			t.Fatal(err)
		}
		select {
		case err := <-failed:
			if took := time.Since(began); !errors.Is(err, os.ErrDeadlineExceeded) || took != writeTimeout {
				t.Errorf("it gave up after %v: %v", took, err)
			}
		case <-time.After(time.Hour):
			t.Error("an hour later it still writes")
		}
		ours.Close()
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}
