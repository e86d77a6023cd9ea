package probe

import (
	"bufio"
	"context"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"regexp"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// ample is more time than a connection on loopback takes, however busy the machine is.
const ample = 30 * time.Second

func ask(t *testing.T, address, probe string) (plan.Answer, Result) {
	t.Helper()
	p, err := lb.ParseProbe(probe)
	if err != nil {
		t.Fatal(err)
	}
	to, err := netip.ParseAddrPort(address)
	if err != nil {
		t.Fatal(err)
	}
	var dialer net.Dialer
	return question{to: to, probe: p, within: ample, agent: "landfall-proxy/1", now: time.Now,
		dial: func(ctx context.Context, to netip.AddrPort) (net.Conn, error) {
			return dialer.DialContext(ctx, "tcp", to.String())
		}}.ask(t.Context())
}

func TestAsksHTTP(t *testing.T) {
	var elsewhere atomic.Int32
	mux := http.NewServeMux()
	mux.HandleFunc("GET /elsewhere", func(http.ResponseWriter, *http.Request) { elsewhere.Add(1) })
	mux.HandleFunc("GET /ready", func(w http.ResponseWriter, r *http.Request) {
		if r.Host == "" || !strings.HasPrefix(r.Host, "127.0.0.1:") || r.UserAgent() != "landfall-proxy/1" ||
			r.URL.RawQuery != "full=1" {
			w.WriteHeader(http.StatusTeapot)
		}
	})
	mux.HandleFunc("GET /moved", func(w http.ResponseWriter, r *http.Request) {
		http.Redirect(w, r, "/elsewhere", http.StatusFound)
	})
	mux.HandleFunc("GET /down", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusServiceUnavailable) })
	mux.HandleFunc("GET /hints", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusEarlyHints) })
	mux.HandleFunc("GET /long", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, strings.Repeat("secret", 1<<20))
	})
	mux.HandleFunc("GET /head", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("X-Secret", strings.Repeat("secret", maxAnswer))
	})
	server := httptest.NewServer(mux)
	defer server.Close()
	at := server.Listener.Addr().String()
	for _, tt := range []struct {
		probe  string
		result Result
		failed string
	}{
		{"tcp", Passed, ""},
		{"http:/ready?full=1", Passed, ""},
		{"http:/moved", Passed, ""},
		{"http:/hints", Passed, ""},
		{"http:/long", Passed, ""},
		{"http:/down", Status, `GET "/down": status 503, want 200 to 399`},
		{"http:/nowhere", Status, `GET "/nowhere": status 404, want 200 to 399`},
		{"http:/head", Failed, `GET "/head": the connection was closed without an answer`},
	} {
		if got, result := ask(t, at, tt.probe); result != tt.result || got != (plan.Answer{Failed: tt.failed}) {
			t.Errorf("%s: %s %+v, want %s %q", tt.probe, result, got, tt.result, tt.failed)
		}
	}
	if elsewhere.Load() > 0 {
		t.Error("a redirect was followed")
	}
}

// What a backend sends is not shown to anybody: it may be one that whoever wrote the EndpointSlice cannot reach.
func TestAnswersAreNotShown(t *testing.T) {
	for name, sends := range map[string]string{
		"another protocol":   "SSH-2.0-secret\r\n",
		"a wrong status":     "HTTP/1.1 secret secret\r\n\r\n",
		"a wrong header":     "HTTP/1.1 500 secret\r\nsecret\r\n\r\n",
		"nothing":            "",
		"a status in words":  "HTTP/1.1 500 secret\r\n\r\nsecret",
		"hints without end":  strings.Repeat("HTTP/1.1 103 secret\r\n\r\n", 10000),
		"lines without end":  strings.Repeat("secret", 10000),
		"headers alone":      strings.Repeat("Secret: secret\r\n", 10000),
		"an answer in parts": "HTTP/1.1 200",
	} {
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		go func() {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			defer conn.Close()
			_, _ = http.ReadRequest(bufio.NewReader(conn))
			_, _ = io.WriteString(conn, sends)
		}()
		got, result := ask(t, listener.Addr().String(), "http:/")
		listener.Close()
		if got.Failed == "" || got.Unknown || strings.Contains(strings.ToLower(got.Failed), "secret") ||
			result != Failed && result != Status {
			t.Errorf("%s: %s %+v", name, result, got)
		}
	}
}

func TestAsksWhereNothingListens(t *testing.T) {
	for _, at := range []string{"127.0.0.1:0", "[::1]:0"} {
		listener, err := net.Listen("tcp", at)
		if err != nil {
			t.Fatal(err)
		}
		at = listener.Addr().String()
		if got, result := ask(t, at, "tcp"); result != Passed || got != (plan.Answer{}) {
			t.Errorf("%s: %s %+v", at, result, got)
		}
		listener.Close()
		if got, result := ask(t, at, "tcp"); result != Refused || got.Failed != "connect: connection refused" {
			t.Errorf("%s: %s %+v", at, result, got)
		}
	}
}

// TestTimes has connections and answers come at their times, in a bubble of synctest.
func TestTimes(t *testing.T) {
	within := 80 * time.Millisecond
	for _, tt := range []struct {
		name    string
		connect time.Duration // until then
		busy    time.Duration // of this node's processors, after
		err     error
		answer  time.Duration
		probe   lb.Probe
		want    Result
		failed  string
	}{
		{"in time", within - 1, 0, nil, 0, lb.Probe{Kind: lb.ProbeTCP}, Passed, ""},
		{"no connection", time.Hour, 0, nil, 0, lb.Probe{Kind: lb.ProbeTCP}, TimedOut, "connect: no answer within 80ms"},
		{"a busy node", time.Hour, lateness + 1, nil, 0, lb.Probe{Kind: lb.ProbeTCP}, Unclear, ""},
		{"no socket left", 0, 0, syscall.EMFILE, 0, lb.Probe{Kind: lb.ProbeTCP}, Unclear, ""},
		{"no route", 0, 0, syscall.EHOSTUNREACH, 0, lb.Probe{Kind: lb.ProbeTCP}, Failed, "connect: no route to host"},
		{"slow, in time", 0, 0, nil, plan.AnswerTime - 1, lb.Probe{Kind: lb.ProbeHTTP, Path: "/"}, Passed, ""},
		{"too slow", 0, 0, nil, time.Hour, lb.Probe{Kind: lb.ProbeHTTP, Path: "/"}, TimedOut,
			`GET "/": no answer within 1s`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				dial := func(ctx context.Context, _ netip.AddrPort) (net.Conn, error) {
					select {
					case <-ctx.Done():
						time.Sleep(tt.busy)
						return nil, ctx.Err()
					case <-time.After(tt.connect):
					}
					if tt.err != nil {
						return nil, &net.OpError{Op: "dial", Err: tt.err}
					}
					here, there := net.Pipe()
					if tt.probe.Kind == lb.ProbeHTTP {
						go answerAfter(there, tt.answer)
					}
					return here, nil
				}
				got, result := question{to: netip.MustParseAddrPort("10.1.0.2:80"), probe: tt.probe, within: within, dial: dial,
					now: time.Now}.ask(t.Context())
				if result != tt.want || got.Failed != tt.failed || got.Unknown != (tt.want == Unclear) {
					t.Errorf("%s %+v, want %s %q", result, got, tt.want, tt.failed)
				}
				time.Sleep(2 * time.Hour) // until the backend has ended too
			})
		})
	}
}

// answerAfter answers one request after some time.
func answerAfter(conn net.Conn, wait time.Duration) {
	defer conn.Close()
	if _, err := http.ReadRequest(bufio.NewReader(conn)); err != nil {
		return
	}
	time.Sleep(wait)
	_, _ = io.WriteString(conn, "HTTP/1.1 200 OK\r\n\r\n")
}

// canned is a connection to a backend that sends what was made before, and ends.
type canned struct {
	net.Conn
	answer *strings.Reader
}

func (c canned) Read(b []byte) (int, error)  { return c.answer.Read(b) }
func (c canned) Write(b []byte) (int, error) { return len(b), nil }
func (c canned) SetDeadline(time.Time) error { return nil }
func (c canned) Close() error                { return nil }

// FuzzAnswer has backends send anything: no more than a head is read, only a status from 200 to 399 passes, and what is
// said of the others has none of the backend's words.
func FuzzAnswer(f *testing.F) {
	for _, seed := range []string{"HTTP/1.1 200 OK\r\n\r\nhello", "HTTP/1.1 103 x\r\n\r\nHTTP/1.1 404 y\r\n\r\n",
		"HTTP/1.0 399 \r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n", "HTTP/1.1 -12 x\r\n\r\n",
		"HTTP/1.1 200", "HTTP/2.0 200 OK\r\n\r\n", "SSH-2.0-x\r\n", "", "HTTP/1.1 101 x\r\nUpgrade: y\r\n\r\nz",
		strings.Repeat("HTTP/1.1 100 c\r\n\r\n", 600)} {
		f.Add(seed)
	}
	says := regexp.MustCompile(`^GET "/x": (status \d{3}, want 200 to 399|the answer is not HTTP, or its head is too large|` +
		`the connection was closed without an answer)$`)
	f.Fuzz(func(t *testing.T, sends string) {
		conn := canned{answer: strings.NewReader(sends)}
		got, result := question{to: netip.MustParseAddrPort("192.0.2.1:80"), probe: lb.Probe{Kind: lb.ProbeHTTP, Path: "/x"},
			within: time.Hour, now: func() time.Time { return time.Time{} },
			dial: func(context.Context, netip.AddrPort) (net.Conn, error) { return conn, nil }}.ask(t.Context())
		if read := len(sends) - conn.answer.Len(); read > maxAnswer {
			t.Errorf("%d bytes were read", read)
		}
		switch {
		case got.Unknown:
			t.Errorf("%q: %+v, %s", sends, got, result)
		case result == Passed:
			if got.Failed != "" || !regexp.MustCompile(`HTTP/\d\.\d +\+?[23]\d\d`).MatchString(sends) {
				t.Errorf("%q passes, and says %q", sends, got.Failed)
			}
		case result != Status && result != Failed || !says.MatchString(got.Failed):
			t.Errorf("%q: %s, %q", sends, result, got.Failed)
		}
	})
}
