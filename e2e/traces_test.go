package e2e

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	commonpb "go.opentelemetry.io/proto/otlp/common/v1"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/proto"

	"github.com/landfall-lb/landfall/e2e/lab"
	"github.com/landfall-lb/landfall/e2e/lab/labtest"
)

// collected is a span with who sent it.
type collected struct {
	*tracepb.Span
	program, node string
}

// traceCollector is an OpenTelemetry collector.
type traceCollector struct {
	mu    sync.Mutex
	spans []collected
}

func (c *traceCollector) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	var data tracepb.TracesData
	if err != nil || r.URL.Path != "/v1/traces" || proto.Unmarshal(body, &data) != nil {
		http.Error(w, "that is no OTLP", http.StatusBadRequest)
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, resource := range data.GetResourceSpans() {
		attributes := resource.GetResource().GetAttributes()
		for _, scope := range resource.GetScopeSpans() {
			for _, s := range scope.GetSpans() {
				c.spans = append(c.spans, collected{s, attribute(attributes, "service.name"), attribute(attributes, "k8s.node.name")})
			}
		}
	}
}

func attribute(attributes []*commonpb.KeyValue, key string) string {
	for _, a := range attributes {
		if a.GetKey() == key {
			return a.GetValue().GetStringValue()
		}
	}
	return ""
}

// of returns the spans of a Service by trace.
func (c *traceCollector) of(service string) map[string][]collected {
	c.mu.Lock()
	defer c.mu.Unlock()
	traces := map[string][]collected{}
	for _, s := range c.spans {
		if attribute(s.GetAttributes(), "k8s.service.name") == service {
			id := fmt.Sprintf("%x", s.GetTraceId())
			traces[id] = append(traces[id], s)
		}
	}
	return traces
}

// collect runs a collector on the control plane's node.
func collect(t *testing.T, l *lab.Lab, address string) *traceCollector {
	t.Helper()
	c := &traceCollector{}
	var listener net.Listener
	err := l.In(l.Cluster().Master().Name, func() (err error) {
		listener, err = (&net.ListenConfig{}).Listen(context.WithoutCancel(t.Context()), "tcp", address)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: c, ReadHeaderTimeout: time.Minute}
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(func() { server.Close() })
	return c
}

// TestTraces wants one trace of a new Service from all three programs, and one more of its address when the owner ends.
func TestTraces(t *testing.T) {
	t.Parallel()
	cluster := lab.SeedCluster()
	address := net.JoinHostPort(cluster.Master().Addr.String(), "4318")
	l := labtest.Start(t, cluster, lab.Options{Values: map[string]any{
		"controller": map[string]any{"replicas": 1}, "tracing": map[string]any{"endpoint": "http://" + address}}})
	c := collect(t, l, address)
	applied(dashboardObjects)(t, l)
	if err := l.AddService(t.Context(), lab.SeedService()); err != nil {
		t.Fatal(err)
	}
	backed("web", fromPool("lan"))(t, l)
	var spans []collected
	nodes := len(l.Cluster().Nodes)
	eventually(t, "all programs have sent their spans", func() error {
		traces := c.of("web")
		if len(traces) != 1 {
			return fmt.Errorf("%d traces", len(traces))
		}
		count := map[string]int{}
		for _, spans = range traces {
			for _, s := range spans {
				count[s.program+" "+s.GetName()]++
			}
		}
		claims := len(workers(l)) // the control plane has the label that excludes it
		want := map[string]int{"landfall-controller assigned": 1, "landfall-proxy programmed": nodes,
			"landfall-speaker claimed": claims, "landfall-speaker owner chosen": 1, "landfall-speaker announced": 1,
			"landfall-speaker confirmed": 1}
		for name, n := range want {
			if count[name] < n {
				return fmt.Errorf("%v, want %v", count, want)
			}
		}
		return nil
	})
	checkTrace(t, spans)
}

// checkTrace holds that the spans hang on the first one, and come in order.
func checkTrace(t *testing.T, spans []collected) {
	t.Helper()
	slices.SortStableFunc(spans, func(a, b collected) int {
		return int(int64(a.GetStartTimeUnixNano()) - int64(b.GetStartTimeUnixNano()))
	})
	ids := map[string]bool{}
	var root collected
	for _, s := range spans {
		ids[string(s.GetSpanId())] = true
		if s.GetName() == "assigned" {
			root = s
		}
	}
	owner, confirmedBy := "", ""
	var text strings.Builder
	for _, s := range spans {
		switch s.GetName() {
		case "assigned":
			if len(s.GetParentSpanId()) != 0 || attribute(s.GetAttributes(), "landfall.pool") != "lan" {
				t.Errorf("the first span: %v", s)
			}
			continue
		case "announced":
			owner = s.node
			if attribute(s.GetAttributes(), "network.protocol.name") != "arp" {
				t.Errorf("announced: %v", s)
			}
		case "confirmed":
			confirmedBy = s.node
		}
		if string(s.GetParentSpanId()) != string(root.GetSpanId()) || s.GetEndTimeUnixNano() < s.GetStartTimeUnixNano() ||
			s.GetStartTimeUnixNano() < root.GetStartTimeUnixNano() {
			t.Errorf("%s on %s does not hang on the first span, or is before it", s.GetName(), s.node)
		}
	}
	for _, s := range spans {
		fmt.Fprintf(&text, "%-14s %-20s %8.3f ms + %.3f ms\n", s.GetName(), s.node,
			float64(s.GetStartTimeUnixNano()-root.GetStartTimeUnixNano())/1e6, float64(s.GetEndTimeUnixNano()-s.GetStartTimeUnixNano())/1e6)
	}
	t.Logf("the trace:\n%s", text.String())
	if len(ids) != len(spans) || owner == "" || owner != confirmedBy {
		t.Errorf("%d IDs of %d spans; %s announces, %s confirms", len(ids), len(spans), owner, confirmedBy)
	}
}
