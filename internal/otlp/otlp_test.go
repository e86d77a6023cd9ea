package otlp

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	commonpb "go.opentelemetry.io/proto/otlp/common/v1"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/proto"

	"github.com/landfall-lb/landfall/internal/lb"
)

// collector is an OpenTelemetry collector that gives these answers first, and takes what comes after.
type collector struct {
	mu      sync.Mutex
	answers []int
	asked   int
	spans   []*tracepb.Span
	program string
	path    string
}

func (c *collector) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	var data tracepb.TracesData
	if err != nil || proto.Unmarshal(body, &data) != nil || r.Header.Get("Content-Type") != "application/x-protobuf" {
		http.Error(w, "that is no OTLP", http.StatusBadRequest)
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.path = r.URL.Path
	if c.asked++; len(c.answers) > 0 {
		w.WriteHeader(c.answers[0])
		c.answers = c.answers[1:]
		return
	}
	for _, resource := range data.GetResourceSpans() {
		c.program = value(resource.GetResource().GetAttributes(), "service.name")
		for _, scope := range resource.GetScopeSpans() {
			c.spans = append(c.spans, scope.GetSpans()...)
		}
	}
}

func value(attributes []*commonpb.KeyValue, key string) string {
	for _, a := range attributes {
		if a.GetKey() == key {
			return a.GetValue().GetStringValue()
		}
	}
	return ""
}

// pipe connects an Exporter and a collector without a network, so that time may be made.
type pipe struct {
	serve http.Handler
	err   error
	hang  bool
}

func (p *pipe) RoundTrip(r *http.Request) (*http.Response, error) {
	if p.hang {
		<-r.Context().Done()
		return nil, r.Context().Err()
	}
	if p.err != nil {
		return nil, p.err
	}
	w := httptest.NewRecorder()
	p.serve.ServeHTTP(w, r)
	return w.Result(), nil
}

func newExporter(t *testing.T, p *pipe) *Exporter {
	t.Helper()
	e, err := New(Options{Endpoint: "http://collector:4318", Program: "landfall-speaker", Version: "1", Node: "n1",
		Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	e.client.Transport = p
	return e
}

// run runs an Exporter until the test ends it.
func run(e *Exporter) (end func()) {
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- e.Run(ctx) }()
	return func() { cancel(); <-ended }
}

func newSpan(name lb.SpanName, n int) lb.Span {
	at := time.Unix(1e9, int64(n))
	return lb.Span{Service: lb.Key{Namespace: "shop", Name: "web"}, UID: "uid", VIP: netip.MustParseAddr("192.0.2.1"), Name: name,
		Start: at, End: at.Add(time.Millisecond), Attributes: []lb.SpanAttribute{{Key: "landfall.pool", Value: "lan"}}}
}

func TestSpansArrive(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &collector{}
		e := newExporter(t, &pipe{serve: c})
		defer run(e)()
		e.Add(newSpan(lb.SpanAssigned, 0))
		second := newSpan(lb.SpanProgrammed, 1)
		second.Attributes = append(second.Attributes, lb.SpanAttribute{Key: "network.interface.name", Value: "eth\xff0"})
		e.Add(second)
		time.Sleep(gather)
		synctest.Wait()
		if c.asked != 1 || len(c.spans) != 2 || c.program != "landfall-speaker" || c.path != "/v1/traces" {
			t.Fatalf("%d requests to %s of %q with %v", c.asked, c.path, c.program, c.spans)
		}
		root, child := c.spans[0], c.spans[1]
		if len(root.GetTraceId()) != 16 || string(root.GetTraceId()) != string(child.GetTraceId()) || len(root.GetSpanId()) != 8 ||
			string(child.GetParentSpanId()) != string(root.GetSpanId()) || root.GetParentSpanId() != nil {
			t.Errorf("the spans are not one trace: %v, %v", root, child)
		}
		got := fmt.Sprintf("%s %d %d %v", child.GetName(), child.GetStartTimeUnixNano(),
			child.GetEndTimeUnixNano()-child.GetStartTimeUnixNano(), child.GetKind())
		if got != "programmed 1000000000000000001 1000000 SPAN_KIND_INTERNAL" {
			t.Error(got)
		}
		for key, want := range map[string]string{"k8s.namespace.name": "shop", "k8s.service.name": "web", "k8s.service.uid": "uid",
			"server.address": "192.0.2.1", "landfall.pool": "lan", "network.interface.name": "eth0"} {
			if got := value(child.GetAttributes(), key); got != want {
				t.Errorf("%s is %q", key, got)
			}
		}
		if e.sent.Load() != 2 || e.dropped.Load() != 0 {
			t.Errorf("%d sent, %d dropped", e.sent.Load(), e.dropped.Load())
		}
	})
}

// TestACollectorThatFails has one that is away, busy, or refuses.
func TestACollectorThatFails(t *testing.T) {
	for name, test := range map[string]struct {
		answers               []int
		err                   error
		asked                 int
		sent, dropped, arrive int
	}{
		"busy once":     {answers: []int{503}, asked: 2, sent: 1, arrive: 1},
		"busy for long": {answers: []int{429, 502, 503, 504}, asked: 4, dropped: 1},
		"refuses":       {answers: []int{400}, asked: 1, dropped: 1},
		"elsewhere":     {answers: []int{301}, asked: 1, dropped: 1},
		"away":          {err: &net.OpError{Op: "dial", Err: io.EOF}, dropped: 1},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := &collector{answers: test.answers}
				e := newExporter(t, &pipe{serve: c, err: test.err})
				defer run(e)()
				e.Add(newSpan(lb.SpanClaimed, 0))
				time.Sleep(time.Minute)
				synctest.Wait()
				if c.asked != test.asked || len(c.spans) != test.arrive || e.sent.Load() != uint64(test.sent) ||
					e.dropped.Load() != uint64(test.dropped) {
					t.Errorf("asked %d times, %d arrived, %d sent, %d dropped", c.asked, len(c.spans), e.sent.Load(), e.dropped.Load())
				}
			})
		})
	}
}

// TestACollectorThatHangs costs no more than the queue, holds up nobody who adds, and does not keep the
// program from ending.
func TestACollectorThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newExporter(t, &pipe{hang: true})
		end := run(e)
		began := time.Now()
		for i := range 3 * queue {
			e.Add(newSpan(lb.SpanClaimed, i))
			if i%batch == 0 {
				synctest.Wait()
			}
		}
		if took := time.Since(began); took != 0 {
			t.Errorf("adding took %s", took)
		}
		if dropped := e.dropped.Load(); dropped < queue || len(e.spans) > queue {
			t.Errorf("%d dropped, %d wait", dropped, len(e.spans))
		}
		time.Sleep(10 * time.Minute)
		began = time.Now()
		end()
		if took := time.Since(began); took > 2*farewell {
			t.Errorf("it took %s to end", took)
		}
		if all := e.dropped.Load(); all != 3*queue || e.sent.Load() != 0 {
			t.Errorf("%d of %d dropped, %d sent", all, 3*queue, e.sent.Load())
		}
	})
}

// TestTheEndSendsWhatWaits ends the program before a batch is full.
func TestTheEndSendsWhatWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &collector{}
		e := newExporter(t, &pipe{serve: c})
		end := run(e)
		for i := range 3 * batch {
			e.Add(newSpan(lb.SpanClaimed, i))
		}
		end()
		if len(c.spans) != 3*batch || e.dropped.Load() != 0 {
			t.Errorf("%d arrived, %d dropped", len(c.spans), e.dropped.Load())
		}
	})
}

func TestEndpoints(t *testing.T) {
	for endpoint, want := range map[string]string{
		"http://collector:4318":           "http://collector:4318/v1/traces",
		"http://collector:4318/":          "http://collector:4318/v1/traces",
		"https://[2001:db8::1]/otlp/v1/x": "https://[2001:db8::1]/otlp/v1/x",
		"collector:4318":                  "",
		"grpc://collector:4317":           "",
		"http://":                         "",
		"http://me:secret@collector":      "",
		"http://collector?x=1":            "",
		"http://collector\x7f":            "",
	} {
		e, err := New(Options{Endpoint: endpoint})
		if (err == nil) != (want != "") || err == nil && e.url != want {
			t.Errorf("%s: %v, %v", endpoint, e, err)
		}
		if err != nil && strings.Contains(err.Error(), "secret") {
			t.Errorf("the error shows the password: %v", err)
		}
	}
}

func TestAnExporterThatIsOff(*testing.T) {
	var off *Exporter
	off.Add(lb.Span{})
	if off.On() {
		panic("it is on")
	}
}

func BenchmarkAdd(b *testing.B) {
	e, _ := New(Options{Endpoint: "http://collector", Log: slog.New(slog.DiscardHandler)})
	s := newSpan(lb.SpanClaimed, 0)
	for b.Loop() {
		e.Add(s)
	}
}
