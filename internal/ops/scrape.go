package ops

import (
	"context"
	"net/http"
	"net/netip"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	dto "github.com/prometheus/client_model/go"

	"github.com/landfall-lb/landfall/internal/listen"
)

// Limits of /metrics.
const (
	// scrapes is how many answers are written at a time: each holds all metrics in memory.
	scrapes = 3
	// restFactor is how many times as long as a gathering took the registry rests after it, so that
	// clients that ask again and again cost a fifth of a processor at most.
	restFactor = 4
)

// scraper serves the metrics of a registry.
type scraper struct {
	handler http.Handler
	slots   chan struct{}
	room    *listen.Room[context.CancelFunc]
}

func newScraper(registry *prometheus.Registry) *scraper {
	return &scraper{
		handler: promhttp.HandlerFor(&paced{registry: registry}, promhttp.HandlerOpts{}),
		slots:   make(chan struct{}, scrapes),
		room:    listen.NewRoom[context.CancelFunc](scrapes),
	}
}

// ServeHTTP answers with all metrics. While clients that do not read hold all slots, it ends the
// answer to one of them: a client that does not read keeps nobody from reading.
func (s *scraper) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	place, end, full := s.room.Enter(clientOf(r), cancel)
	defer s.room.Leave(place)
	if full {
		end()
	}
	select {
	case s.slots <- struct{}{}:
		defer func() { <-s.slots }()
	case <-ctx.Done():
		http.Error(w, "too many requests for metrics at a time", http.StatusServiceUnavailable)
		return
	}
	answer := http.NewResponseController(w)
	stop := context.AfterFunc(ctx, func() { _ = answer.SetWriteDeadline(time.Now()) }) // its write fails at once
	defer stop()
	s.handler.ServeHTTP(w, r)
}

// clientOf returns what stands for the machine that sent a request.
func clientOf(r *http.Request) netip.Prefix {
	address, _ := netip.ParseAddrPort(r.RemoteAddr)
	return listen.Client(address.Addr())
}

// paced gathers metrics once at a time, with a rest in between.
type paced struct {
	registry *prometheus.Registry

	mu   sync.Mutex
	next time.Time // not before
}

// Gather implements prometheus.Gatherer.
func (p *paced) Gather() ([]*dto.MetricFamily, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	time.Sleep(time.Until(p.next))
	started := time.Now()
	families, err := p.registry.Gather()
	p.next = time.Now().Add(restFactor * time.Since(started))
	return families, err
}
