package lab

import (
	"bufio"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/e2e/lab/podserver"
)

const (
	// requestTimeout is how long a single request may take before it counts as failed. A probe's may
	// take up to patience, as on a busy machine, unless packets of it were lost.
	requestTimeout = 2 * time.Second
	patience       = 10 * time.Second
	// lineEvery is how often a long-lived connection carries a line.
	lineEvery = 100 * time.Millisecond
)

// LineTimeout is how long a long-lived connection may be without an answer before it counts as broken.
const LineTimeout = patience

// Dial opens a connection from a host. address is an IP address and a port.
func (l *Lab) Dial(ctx context.Context, host, network, address string) (net.Conn, error) {
	return dialIn(ctx, l.state.namespace(host), &net.Dialer{Timeout: requestTimeout}, network, address)
}

// In runs f on a thread in a host's network namespace: sockets that f opens stay in it.
func (l *Lab) In(host string, f func() error) error { return inNamespace(l.state.namespace(host), f) }

// Talk sends a line, which takes the pods' server to answer, again and again until ctx ends. It fails
// when the connection breaks.
func Talk(ctx context.Context, conn net.Conn) error {
	in := bufio.NewReader(conn)
	tick := time.NewTicker(lineEvery)
	defer tick.Stop()
	for {
		if err := conn.SetDeadline(time.Now().Add(LineTimeout)); err != nil {
			return err
		}
		if _, err := conn.Write([]byte("\n")); err != nil {
			return err
		}
		if _, err := in.ReadString('\n'); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// HTTPClient returns an HTTP client whose connections begin at a host, each request with one of its
// own.
func (l *Lab) HTTPClient(host string) *http.Client {
	return &http.Client{Timeout: requestTimeout, Transport: &http.Transport{
		DisableKeepAlives: true,
		TLSClientConfig:   &tls.Config{InsecureSkipVerify: true}, // as the kubelet's probes
		DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			return l.Dial(ctx, host, network, address)
		},
	}}
}

// Ask sends one request to a pod's server from a host, over a new connection, and returns what the
// pod answers. network is "tcp" or "udp".
func (l *Lab) Ask(ctx context.Context, host, network string, target netip.AddrPort) (podserver.Answer, error) {
	answer, _, err := l.ask(ctx, host, network, target, requestTimeout)
	return answer, err
}

// Attempt sends one request as a probe does. It fails if there is no answer, or a very late one because packets were
// lost; an answer that is late alone shows a busy machine.
func (l *Lab) Attempt(ctx context.Context, host, network string, target netip.AddrPort) (podserver.Answer, error) {
	o := outcome{began: time.Now()}
	o.answer, o.resent, o.err = l.ask(ctx, host, network, target, patience)
	o.ended = time.Now()
	return o.answer, o.failure()
}

// ask also says how many packets of a TCP connection were sent again.
func (l *Lab) ask(ctx context.Context, host, network string, target netip.AddrPort, timeout time.Duration) (
	answer podserver.Answer, resent int, err error) {
	deadline := time.Now().Add(timeout)
	conn, err := dialIn(ctx, l.state.namespace(host), &net.Dialer{Deadline: deadline}, network, target.String())
	if err != nil {
		return answer, 0, err
	}
	defer conn.Close()
	if err := conn.SetDeadline(deadline); err != nil {
		return answer, 0, err
	}
	if _, err := conn.Write([]byte("hello\n")); err != nil {
		return answer, 0, err
	}
	line, err := bufio.NewReader(conn).ReadBytes('\n')
	if err != nil {
		return answer, 0, err
	}
	if tcp, ok := conn.(*net.TCPConn); ok {
		if resent, err = retransmissions(tcp); err != nil {
			return answer, 0, err
		}
	}
	return answer, resent, json.Unmarshal(line, &answer)
}

// retransmissions is how many segments of a connection the kernel has sent again, SYNs included.
func retransmissions(conn *net.TCPConn) (int, error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return 0, err
	}
	var info *unix.TCPInfo
	var infoErr error
	if err := raw.Control(func(fd uintptr) {
		info, infoErr = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
	}); err != nil {
		return 0, err
	}
	if infoErr != nil {
		return 0, fmt.Errorf("TCP_INFO: %w", infoErr)
	}
	return int(info.Total_retrans), nil
}

// Spread is how a number of requests came out.
type Spread struct {
	// Pods and Sources count the answers by the pod that gave them and by the client's address as that
	// pod saw it.
	Pods    map[string]int
	Sources map[netip.Addr]int
	// SourcesOf has the addresses that each pod saw.
	SourcesOf map[string]map[netip.Addr]int
	// Failures are the errors of requests without an answer.
	Failures []error
}

// Spread sends n requests one after the other, each over a new connection, and counts who answers.
func (l *Lab) Spread(ctx context.Context, host, network string, target netip.AddrPort, n int) Spread {
	s := Spread{Pods: map[string]int{}, Sources: map[netip.Addr]int{}, SourcesOf: map[string]map[netip.Addr]int{}}
	for range n {
		answer, err := l.Ask(ctx, host, network, target)
		if err != nil {
			s.Failures = append(s.Failures, err)
			continue
		}
		source := answer.Client.Addr()
		s.Pods[answer.Pod]++
		s.Sources[source]++
		if s.SourcesOf[answer.Pod] == nil {
			s.SourcesOf[answer.Pod] = map[netip.Addr]int{}
		}
		s.SourcesOf[answer.Pod][source]++
	}
	return s
}

// Get asks for a page over HTTP from a host and returns its status code and body.
func (l *Lab) Get(ctx context.Context, host, url string) (code int, body string, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return 0, "", err
	}
	resp, err := l.HTTPClient(host).Do(req)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	return resp.StatusCode, string(text), err
}

// Probe is a running series of requests, each over a new connection, at a steady pace. See
// [Lab.StartProbe].
type Probe struct {
	cancel context.CancelFunc
	done   chan struct{}
	result Report
}

// Report is what a probe saw.
type Report struct {
	Sent, Answered int
	// Slow counts answers that took longer than 100 ms, as after a lost first packet.
	Slow int
	// Gap is the longest time without an answer, from one answer (or the start) to the next (or the
	// end).
	Gap time.Duration
	// Hit is for how long requests were hit: from the beginning of the first that took 500 ms or got
	// no answer to that of the last. Where a part of them goes another way, and there is no gap, this
	// is what an outage costs. A first packet that is lost is sent again after a second; a busy
	// machine alone makes answers later than 100 ms, but hardly than this.
	Hit time.Duration
	// Failures counts the requests without an answer by their error. FirstFailed is when the first of
	// them began.
	Failures    map[string]int
	FirstFailed time.Time
	// Lost are the requests without an answer, Late those whose answer took longer than requestTimeout on a
	// busy machine, in the order in which they ended.
	Lost, Late []Loss
	// Pods counts answers by pod, Sources by the client's address as the pod saw it.
	Pods    map[string]int
	Sources map[netip.Addr]int
}

// Loss is a request without an answer, or a connection that broke.
type Loss struct {
	Began, Ended time.Time
	TimedOut     bool // as against refused or reset
	Why          string
}

// TimedOut reports whether an error says that something took too long.
func TimedOut(err error) bool {
	timeout, ok := errors.AsType[net.Error](err)
	return ok && timeout.Timeout()
}

// Failed is how many requests got no answer.
func (r Report) Failed() int { return r.Sent - r.Answered }

// String says it in a line.
func (r Report) String() string {
	text := fmt.Sprintf("%d of %d answered, %d slow, hit for %d ms, longest gap %d ms, failures %v",
		r.Answered, r.Sent, r.Slow, r.Hit.Milliseconds(), r.Gap.Milliseconds(), r.Failures)
	if !r.FirstFailed.IsZero() {
		text += ", the first at " + r.FirstFailed.Format("15:04:05.000")
	}
	return text
}

const (
	slowAnswer = 100 * time.Millisecond
	hitAnswer  = 500 * time.Millisecond
)

// outcome is one request of a probe.
type outcome struct {
	began, ended time.Time
	answer       podserver.Answer
	resent       int
	err          error
}

// errLate is the failure of a request whose answer was very late because packets were lost.
var errLate = fmt.Errorf("late, packets were sent again: %w", os.ErrDeadlineExceeded)

// failure is why a request failed, or nil. An answer that is very late because packets were lost is a failure; one that
// is late alone shows a busy machine.
func (o outcome) failure() error {
	if o.err == nil && o.resent > 0 && o.ended.Sub(o.began) > requestTimeout {
		return errLate
	}
	return o.err
}

// StartProbe sends a request from host to target every interval, whether or not the ones before
// were answered, until [Probe.Stop]. network is "tcp" or "udp".
func (l *Lab) StartProbe(
	ctx context.Context, host, network string, target netip.AddrPort, interval time.Duration) *Probe {
	ctx, cancel := context.WithCancel(ctx)
	p := &Probe{cancel: cancel, done: make(chan struct{})}
	outcomes := make(chan outcome)
	go func() {
		var g Group
		tick := time.NewTicker(interval)
		defer tick.Stop()
		for ctx.Err() == nil {
			g.Run(func() error {
				o := outcome{began: time.Now()}
				// Not ctx: what is under way when the probe stops runs to its own end.
				o.answer, o.resent, o.err = l.ask(context.WithoutCancel(ctx), host, network, target, patience)
				o.ended = time.Now()
				outcomes <- o
				return nil
			})
			select {
			case <-tick.C:
			case <-ctx.Done():
			}
		}
		_ = g.Wait()
		close(outcomes)
	}()
	go func() {
		defer close(p.done)
		var all []outcome
		for o := range outcomes {
			all = append(all, o)
		}
		p.result = summarise(all)
	}()
	return p
}

// Stop ends the probe, waits for the requests that are under way, and returns what it saw.
func (p *Probe) Stop() Report {
	p.cancel()
	<-p.done
	return p.result
}

// summarise reads the outcomes of a probe, which come in the order in which they ended.
func summarise(all []outcome) Report {
	r := Report{Sent: len(all), Failures: map[string]int{}, Pods: map[string]int{}, Sources: map[netip.Addr]int{}}
	if len(all) == 0 {
		return r
	}
	first, lastBegan := all[0].began, all[0].began
	for _, o := range all {
		if o.began.Before(first) {
			first = o.began
		}
		if o.began.After(lastBegan) {
			lastBegan = o.began
		}
	}
	heard := first
	var firstHit, lastHit time.Time
	for _, o := range all {
		if o.failure() == nil && o.ended.Sub(o.began) < hitAnswer {
			continue
		}
		if firstHit.IsZero() || o.began.Before(firstHit) {
			firstHit = o.began
		}
		if o.began.After(lastHit) {
			lastHit = o.began
		}
	}
	r.Hit = lastHit.Sub(firstHit)
	for _, o := range all {
		if err := o.failure(); err != nil {
			r.Failures[reasonOf(err)]++
			r.Lost = append(r.Lost, Loss{Began: o.began, Ended: o.ended, TimedOut: TimedOut(err), Why: reasonOf(err)})
			if r.FirstFailed.IsZero() || o.began.Before(r.FirstFailed) {
				r.FirstFailed = o.began
			}
			continue
		}
		if o.ended.Sub(o.began) > requestTimeout {
			r.Late = append(r.Late, Loss{Began: o.began, Ended: o.ended, TimedOut: true, Why: "late"})
		}
		r.Answered++
		r.Pods[o.answer.Pod]++
		r.Sources[o.answer.Client.Addr()]++
		if o.ended.Sub(o.began) > slowAnswer {
			r.Slow++
		}
		r.Gap = max(r.Gap, o.ended.Sub(heard))
		heard = o.ended
	}
	// If the last requests got no answer, the gap lasts until the probe gave up sending.
	r.Gap = max(r.Gap, lastBegan.Sub(heard))
	return r
}

// reasonOf returns the innermost error, without the ports that differ from one request to the next.
func reasonOf(err error) string {
	at, inNetwork := errors.AsType[*net.OpError](err)
	switch {
	case errors.Is(err, errLate):
		return "late, packets were sent again"
	case TimedOut(err) && inNetwork: // of "dial", or of "read" once there was a connection
		return "timeout of " + at.Op
	case TimedOut(err):
		return "timeout"
	}
	for inner := errors.Unwrap(err); inner != nil; inner = errors.Unwrap(err) {
		err = inner
	}
	return err.Error()
}
