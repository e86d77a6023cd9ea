package ops

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"golang.org/x/sync/errgroup"

	"github.com/landfall-lb/landfall/internal/listen"
)

// Limits of each address of the metrics server.
const (
	// maxConnections is how many connections are open at a time.
	maxConnections = 64
	// maxHeader is how many bytes of a request's headers are read, besides net/http's own 4 kB.
	maxHeader = 12 << 10
	// readTimeout bounds the time for the TLS handshake and for reading a request.
	readTimeout = 5 * time.Second
	// writeTimeout bounds the time for an answer; Prometheus gives up after 10 s.
	writeTimeout = 15 * time.Second
	// idleTimeout is as long as Prometheus keeps a connection between two scrapes.
	idleTimeout = 5 * time.Minute
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

// server serves metrics and health on TCP, and these and the status on a unix socket.
type server struct {
	log         *slog.Logger
	tcp, local  *http.ServeMux
	metrics     http.Handler
	gatekeeper  *gatekeeper // nil: everybody may read metrics
	certificate *certificate
	live, ready checks
}

func newServer(log *slog.Logger, registry *prometheus.Registry) *server {
	s := &server{log: log, tcp: http.NewServeMux(), local: http.NewServeMux(), metrics: newScraper(registry),
		ready: checks{none: "starting"}}
	for _, mux := range []*http.ServeMux{s.tcp, s.local} {
		mux.Handle("GET /healthz", s.live.handler(true))
		mux.Handle("GET /readyz", s.ready.handler(mux == s.local))
	}
	s.local.Handle("GET /metrics", s.metrics)
	s.tcp.HandleFunc("GET /metrics", func(w http.ResponseWriter, r *http.Request) {
		if s.gatekeeper != nil {
			s.gatekeeper.ServeHTTP(w, r)
			return
		}
		s.metrics.ServeHTTP(w, r)
	})
	return s
}

// secure has the TCP side speak TLS, and ask who reads metrics.
func (s *server) secure(c *certificate) {
	s.certificate = c
	s.gatekeeper = newGatekeeper(guardedMetrics, s.metrics)
}

// run serves on all listeners until ctx ends.
func (s *server) run(ctx context.Context, listeners []net.Listener) error {
	group, ctx := errgroup.WithContext(ctx)
	for _, l := range listeners {
		group.Go(func() error {
			limited := listen.Limit(l, listen.NewRoom[net.Conn](maxConnections))
			if s.certificate != nil {
				limited = tls.NewListener(limited, s.certificate.config())
			}
			return s.serve(ctx, limited, s.tcp, writeTimeout)
		})
	}
	return group.Wait()
}

// serve serves on one listener until ctx ends.
func (s *server) serve(ctx context.Context, listener net.Listener, handler http.Handler, write time.Duration) error {
	srv := &http.Server{
		Handler: handler, ReadTimeout: readTimeout, WriteTimeout: write, IdleTimeout: idleTimeout, MaxHeaderBytes: maxHeader,
		ConnContext: withConnection,
		ErrorLog:    slog.NewLogLogger(s.log.Handler(), slog.LevelDebug), // what clients do wrong is no news
	}
	stop := context.AfterFunc(ctx, func() { srv.Close() })
	defer stop()
	if err := srv.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve on %s: %w", listener.Addr(), err)
	}
	return nil
}

// Detailed is an error with a detail that is only for root on the node: a check has it cut where everybody may ask.
type Detailed struct {
	Err    error
	Detail string
}

func (d Detailed) Error() string { return d.Err.Error() + ": " + d.Detail }

func (d Detailed) Unwrap() error { return d.Err }

// checks answers 200 if all of its checks pass, else 503 with one line for each that fails.
type checks struct {
	// none is why it answers 503 while there is no check yet; "" if it does not.
	none  string
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

// handler answers with what is Detailed or without.
func (c *checks) handler(details bool) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) { c.answer(w, details) }
}

func (c *checks) answer(w http.ResponseWriter, details bool) {
	c.mu.Lock()
	named := c.named[:len(c.named):len(c.named)]
	c.mu.Unlock()
	var wrong strings.Builder
	if len(named) == 0 {
		wrong.WriteString(c.none)
	}
	for _, n := range named {
		err := n.check()
		if detailed := (Detailed{}); !details && errors.As(err, &detailed) {
			err = detailed.Err
		}
		if err != nil {
			fmt.Fprintf(&wrong, "%s: %v\n", n.name, err)
		}
	}
	if wrong.Len() > 0 {
		http.Error(w, strings.TrimSpace(wrong.String()), http.StatusServiceUnavailable)
		return
	}
	fmt.Fprintln(w, "ok")
}
