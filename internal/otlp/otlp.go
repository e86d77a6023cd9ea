// Package otlp sends spans to an OpenTelemetry collector: OTLP over HTTP, in protobuf.
//
// It uses OpenTelemetry's messages, and not its SDK and exporter: these bring gRPC along, which makes
// each program 22 MB (two thirds) larger, and do not tell how many spans they have dropped.
package otlp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/url"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/loop"
)

// Limits of what traces cost.
const (
	// queue is how many spans wait at most; more are dropped.
	queue = 4096
	// batch is how many spans one request has at most, and gather how long the first of them waits.
	batch  = 512
	gather = time.Second
	// timeout bounds one request, and attempts is how often one is sent that the collector did not take
	// because it was away or busy.
	timeout  = 10 * time.Second
	attempts = 4
	// farewell bounds the time that the last spans take when the program ends.
	farewell = 2 * time.Second
	// maxAnswer is how much of an answer is read.
	maxAnswer  = 4 << 10
	tracesPath = "/v1/traces"
)

// Options say where spans go, and who sends them.
type Options struct {
	// Endpoint is the collector's URL, such as http://collector:4318; without a path, that of the
	// protocol is added.
	Endpoint string
	// SecretDir is a directory, such as a mounted Secret, that may have ca.crt, the authorities that the
	// collector's certificate may be from, in PEM, and headers, which each request gets: a line "Name: value"
	// each. They are read for each request. Empty: none.
	SecretDir string
	// Program, Version and Node say who sends.
	Program, Version, Node string
	Log                    *slog.Logger
}

// Exporter sends spans. A nil Exporter is one that is off.
type Exporter struct {
	url      string
	node     string
	resource []lb.SpanAttribute
	log      *slog.Logger
	client   *http.Client
	spans    chan lb.Span
	failures loop.Failures

	secretDir   string
	authorities []byte // that client trusts, as secretDir has them

	sent, dropped atomic.Uint64
}

// New returns an Exporter that keeps spans until Run is called.
func New(o Options) (*Exporter, error) {
	at, err := url.Parse(o.Endpoint)
	switch {
	case err != nil:
		return nil, fmt.Errorf("%q is not a URL", o.Endpoint)
	case at.Scheme != "http" && at.Scheme != "https", at.Hostname() == "":
		return nil, fmt.Errorf("%q is not a URL such as http://collector:4318", o.Endpoint)
	case at.User != nil, at.RawQuery != "", at.Fragment != "":
		return nil, errors.New("a URL with a user, a query or a fragment")
	case at.Path == "", at.Path == "/":
		at.Path = tracesPath
	}
	return &Exporter{
		url: at.String(), secretDir: o.SecretDir, node: o.Node, log: o.Log, spans: make(chan lb.Span, queue),
		resource: []lb.SpanAttribute{{Key: "service.name", Value: o.Program}, {Key: "service.version", Value: o.Version},
			{Key: "k8s.node.name", Value: o.Node}},
		client: &http.Client{Timeout: timeout,
			Transport:     newTransport(nil),
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }},
	}, nil
}

// On reports whether spans go anywhere.
func (e *Exporter) On() bool { return e != nil }

// Add takes a span, or drops it if too many wait. It never blocks.
func (e *Exporter) Add(s lb.Span) {
	if e == nil {
		return
	}
	select {
	case e.spans <- s:
	default:
		e.dropped.Add(1)
	}
}

// Run sends spans until ctx ends, and then those that wait.
func (e *Exporter) Run(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			e.leave(context.WithoutCancel(ctx))
			return nil
		case first := <-e.spans:
			e.send(ctx, e.collect(ctx, first))
		}
	}
}

// collect returns a batch, which is full or has waited for a while.
func (e *Exporter) collect(ctx context.Context, first lb.Span) []lb.Span {
	spans := []lb.Span{first}
	timer := time.NewTimer(gather)
	defer timer.Stop()
	for len(spans) < batch {
		select {
		case s := <-e.spans:
			spans = append(spans, s)
		case <-timer.C:
			return spans
		case <-ctx.Done():
			return spans
		}
	}
	return spans
}

// leave sends what waits.
func (e *Exporter) leave(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, farewell)
	defer cancel()
	for {
		var spans []lb.Span
		for len(spans) < batch && len(e.spans) > 0 {
			spans = append(spans, <-e.spans)
		}
		if len(spans) == 0 {
			return
		}
		body, err := encode(e.resource, e.node, spans)
		if err == nil {
			err = e.post(ctx, body)
		}
		e.count(len(spans), err)
		if err != nil && !errors.As(err, new(rejection)) {
			e.dropped.Add(uint64(len(e.spans)))
			return
		}
	}
}

// send sends a batch, several times if the collector is away or busy.
func (e *Exporter) send(ctx context.Context, spans []lb.Span) {
	backoff := loop.Backoff{Min: time.Second, Max: 8 * time.Second}
	body, err := encode(e.resource, e.node, spans)
	for attempt := 0; attempt < attempts && body != nil; attempt++ {
		if attempt > 0 {
			select {
			case <-ctx.Done():
			case <-time.After(backoff.Next()):
			}
		}
		// What ends with the program is sent once more, with what else waits.
		if ctx.Err() != nil {
			ended, cancel := context.WithTimeout(context.WithoutCancel(ctx), farewell)
			defer cancel()
			ctx = ended
		}
		if err = e.post(ctx, body); err == nil || errors.As(err, new(refusal)) || errors.As(err, new(rejection)) {
			break
		}
	}
	e.failures.Log(e.log, "cannot send traces; dropping them", "sending traces again", err, "endpoint", e.url)
	e.count(len(spans), err)
}

// count counts the spans of a request: as dropped, if err is not nil, but for those that a rejection left.
func (e *Exporter) count(spans int, err error) {
	dropped := 0
	if part := (rejection{}); errors.As(err, &part) {
		dropped = min(part.spans, spans)
	} else if err != nil {
		dropped = spans
	}
	e.dropped.Add(uint64(dropped))
	e.sent.Add(uint64(spans - dropped))
}

// refusal is an answer that another attempt would get too.
type refusal struct{ error }

func (e *Exporter) post(ctx context.Context, body []byte) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, e.url, bytes.NewReader(body))
	if err != nil {
		return refusal{err}
	}
	if err := e.trust(); err != nil {
		return err
	}
	if request.Header, err = readHeaders(e.secretDir); err != nil {
		return err
	}
	request.Header.Set("Content-Type", "application/x-protobuf")
	response, err := e.client.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	text, _ := io.ReadAll(io.LimitReader(response.Body, maxAnswer)) // what could be read says enough
	switch response.StatusCode {
	case http.StatusOK, http.StatusAccepted, http.StatusNoContent:
		if rejected := decodeRejection(text); rejected.spans > 0 {
			return rejected
		}
		return nil
	case http.StatusTooManyRequests, http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		return fmt.Errorf("the answer is %s", response.Status)
	}
	return refusal{fmt.Errorf("the answer is %s: %.200q", response.Status, text)}
}

var (
	descSent = prometheus.NewDesc("landfall_trace_spans_sent_total",
		"Spans that the collector at --otlp-endpoint has taken.", nil, nil)
	descDropped = prometheus.NewDesc("landfall_trace_spans_dropped_total",
		"Spans that were lost, as the collector did not take them or too many waited.", nil, nil)
)

// Describe implements prometheus.Collector.
func (e *Exporter) Describe(descs chan<- *prometheus.Desc) { descs <- descSent; descs <- descDropped }

// Collect implements prometheus.Collector.
func (e *Exporter) Collect(out chan<- prometheus.Metric) {
	for desc, n := range map[*prometheus.Desc]uint64{descSent: e.sent.Load(), descDropped: e.dropped.Load()} {
		out <- prometheus.MustNewConstMetric(desc, prometheus.CounterValue, float64(n))
	}
}
