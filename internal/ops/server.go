package ops

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

func newRegistry() *prometheus.Registry {
	registry := prometheus.NewRegistry()
	build := prometheus.NewGauge(prometheus.GaugeOpts{
		Name:        "landfall_build_info",
		Help:        "Always 1; the label says which version runs.",
		ConstLabels: prometheus.Labels{"version": BuildVersion()},
	})
	build.Set(1)
	registry.MustRegister(build, collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return registry
}

// server serves metrics, health and status pages.
type server struct {
	mux   *http.ServeMux
	ready checks
}

func newServer(registry *prometheus.Registry) *server {
	s := &server{mux: http.NewServeMux()}
	s.mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	s.mux.Handle("GET /healthz", &checks{}) // a program that answers is alive
	s.mux.Handle("GET /readyz", &s.ready)
	return s
}

// listenMetrics opens the socket before the work begins, so that an address in use ends the program
// before it has changed anything. It returns nil for "" and "0".
func listenMetrics(address string) (net.Listener, error) {
	if address == "" || address == "0" {
		return nil, nil
	}
	if _, _, err := net.SplitHostPort(address); err != nil {
		return nil, Usagef("--metrics-bind-address: %q is not address:port, such as :7480 or 127.0.0.1:7480", address)
	}
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return nil, fmt.Errorf("--metrics-bind-address: %w", err)
	}
	return listener, nil
}

func (s *server) run(ctx context.Context, listener net.Listener) error {
	srv := &http.Server{Handler: s.mux, ReadHeaderTimeout: 5 * time.Second, IdleTimeout: time.Minute}
	stop := context.AfterFunc(ctx, func() { srv.Close() })
	defer stop()
	if err := srv.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve metrics on %s: %w", listener.Addr(), err)
	}
	return nil
}

// checks answers 200 if all of its checks pass, else 503 with one line for each that fails.
type checks struct {
	mu    sync.Mutex
	named []namedCheck
}

type namedCheck struct {
	name  string
	check func() error
}

func (c *checks) add(name string, check func() error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.named = append(c.named, namedCheck{name, check})
}

func (c *checks) ServeHTTP(w http.ResponseWriter, _ *http.Request) {
	c.mu.Lock()
	named := c.named[:len(c.named):len(c.named)]
	c.mu.Unlock()
	var wrong strings.Builder
	for _, n := range named {
		if err := n.check(); err != nil {
			fmt.Fprintf(&wrong, "%s: %v\n", n.name, err)
		}
	}
	if wrong.Len() > 0 {
		http.Error(w, strings.TrimSpace(wrong.String()), http.StatusServiceUnavailable)
		return
	}
	fmt.Fprintln(w, "ok")
}
