package kube

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/client-go/rest"

	"github.com/landfall-lb/landfall/internal/loop"
)

const (
	// dialTimeout bounds one attempt to connect to the API server, with the questions to DNS, as in client-go.
	dialTimeout = 30 * time.Second
	// A connection, or an attempt at one, is given up after lostAfter in which the kernel at its other end has not
	// answered. Otherwise a node that was cut off forwards to endpoints that are gone for as long again: TCP at the API
	// server waits ever longer before it sends once more. A kernel answers for an API server that hangs.
	lostAfter  = 6 * time.Second
	probeAfter = 3 * time.Second // in which an idle connection has not heard anything
	probeEvery = time.Second
	// dialNext is how long an address has to answer before the next one is tried beside it.
	dialNext = time.Second
	// silentFor is how long nothing has to answer, be it a connection or a request, for that to be logged.
	silentFor = 3 * time.Second
	// slowAgain is how long a request without an answer is not logged after another one.
	slowAgain = 30 * time.Second
	// maxServers bounds how many addresses are tried.
	maxServers = 16
)

// checkServers returns an error if a list of addresses for Options.Servers is not one.
func checkServers(servers []string) error {
	if len(servers) > maxServers {
		return fmt.Errorf("%d addresses: at most %d are tried", len(servers), maxServers)
	}
	for _, server := range servers {
		host, port, err := net.SplitHostPort(server)
		if n, bad := strconv.ParseUint(port, 10, 16); err != nil || host == "" || bad != nil || n == 0 {
			return fmt.Errorf("%q is not host:port, such as 192.0.2.10:6443 or [2001:db8::10]:6443", server)
		}
	}
	return nil
}

// A dialer connects to the API server, at the first of several addresses that answers.
//
// A pod knows the API server by the address of the Service default/kubernetes, which only a service
// proxy delivers: without one, the proxy that is to deliver it could never begin. Certificates are
// checked against the name that the connection was asked for, whatever address it ends at.
type dialer struct {
	log     *slog.Logger
	server  string   // the API server's address; another one is that of an HTTP proxy
	servers []string // that are tried beside it
	dial    func(ctx context.Context, network, address string) (net.Conn, error)

	mu       sync.Mutex
	last     string // that answered last
	trouble  error  // why there was no connection the last time
	failures loop.Failures
	slow     time.Time // when a request without an answer was logged
}

// dialThrough has a configuration connect by a dialer.
func dialThrough(config *rest.Config, log *slog.Logger, servers []string) (*dialer, error) {
	at, _, err := rest.DefaultServerUrlFor(config)
	if err != nil {
		return nil, fmt.Errorf("address %s of the API server: %w", config.Host, err)
	}
	port := cmp.Or(at.Port(), map[string]string{"http": "80"}[at.Scheme], "443")
	d := newDialer(log, net.JoinHostPort(at.Hostname(), port), servers)
	config.Wrap(func(next http.RoundTripper) http.RoundTripper { return reporting{d, next} })
	config.Dial = d.DialContext
	return d, nil
}

func newDialer(log *slog.Logger, server string, servers []string) *dialer {
	d := &net.Dialer{Timeout: dialTimeout, Control: patience, KeepAliveConfig: net.KeepAliveConfig{
		Enable: true, Idle: probeAfter, Interval: probeEvery, Count: int((lostAfter - probeAfter) / probeEvery)}}
	all := []string{server}
	for _, other := range servers {
		if !slices.Contains(all, other) {
			all = append(all, other)
		}
	}
	return &dialer{log: log, server: server, servers: all[1:], dial: d.DialContext}
}

// addresses returns those of the API server that are no names.
func (d *dialer) addresses() (all []netip.Addr) {
	for _, server := range append([]string{d.server}, d.servers...) {
		if host, _, err := net.SplitHostPort(server); err == nil {
			if addr, err := netip.ParseAddr(host); err == nil {
				all = append(all, addr.Unmap().WithZone(""))
			}
		}
	}
	return all
}

// DialContext connects to the address, or to one of the others. It tries first the one that
// answered last, and another one when that fails or is slow.
func (d *dialer) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	won, err := d.race(ctx, network, d.order(address))
	if err != nil {
		return nil, err
	}
	if address != d.server {
		return won.conn, nil
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if won.address != cmp.Or(d.last, address) {
		d.log.Info("the API server answers at another address", "address", won.address)
	}
	d.last = won.address
	return &heardConn{Conn: won.conn, unheard: func() { d.passOver(won.address) }}, nil
}

// passOver has the next connection try another address first than the one that accepts connections and says
// nothing, as a load balancer without API servers does, or one whose API server hangs.
func (d *dialer) passOver(address string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.last != address {
		return // another one has answered since
	}
	all := append([]string{d.server}, d.servers...)
	d.last = all[(slices.Index(all, address)+1)%len(all)]
}

// heardConn is a connection that tells when it is closed before anything was read.
type heardConn struct {
	net.Conn
	heard   atomic.Bool
	unheard func()
}

func (c *heardConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if n > 0 && !c.heard.Load() {
		c.heard.Store(true)
	}
	return n, err
}

func (c *heardConn) Close() error {
	if !c.heard.Swap(true) {
		c.unheard()
	}
	return c.Conn.Close()
}

// reporting notes whether a request got its connection, up to the check of the certificate, and why not.
type reporting struct {
	dialer *dialer
	next   http.RoundTripper
}

// RoundTrip implements http.RoundTripper.
func (r reporting) RoundTrip(request *http.Request) (*http.Response, error) {
	d := r.dialer
	var connected, resolving atomic.Bool
	silent := time.AfterFunc(silentFor, func() {
		addresses := strings.Join(d.order(d.server), ", ")
		switch {
		case connected.Load():
			d.noteSlow(request)
		case resolving.Load():
			d.note(fmt.Errorf("no answer from DNS for %s, of %s", silentFor, addresses))
		default:
			d.note(fmt.Errorf("no answer from %s for %s", addresses, silentFor))
		}
	})
	defer silent.Stop()
	trace := &httptrace.ClientTrace{
		GotConn: func(httptrace.GotConnInfo) {
			connected.Store(true)
			d.note(nil)
		},
		DNSStart: func(httptrace.DNSStartInfo) { resolving.Store(true) },
		DNSDone:  func(httptrace.DNSDoneInfo) { resolving.Store(false) },
	}
	response, err := r.next.RoundTrip(request.WithContext(httptrace.WithClientTrace(request.Context(), trace)))
	if err != nil && !connected.Load() && request.Context().Err() == nil {
		d.note(err)
	}
	return response, err
}

// WrappedRoundTripper returns the transport below, by which client-go finds what it closes.
func (r reporting) WrappedRoundTripper() http.RoundTripper { return r.next }

// note logs the first failure of a row, and its end.
func (d *dialer) note(err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.trouble = err
	d.failures.Log(d.log, "cannot connect to the API server", "connected to the API server again", err,
		"server", d.server)
}

// noteSlow logs a request that was sent and has no answer. The API server may be busy, so this does not count as
// trouble.
func (d *dialer) noteSlow(request *http.Request) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if now := time.Now(); d.slow.IsZero() || now.Sub(d.slow) >= slowAgain {
		d.slow = now
		d.log.Warn("the API server has not answered a request yet", "server", d.server, "method", request.Method,
			"path", request.URL.Path, "waited", silentFor)
	}
}

// Unreachable returns why the API server cannot be connected to; nil while the last attempt has led to a
// connection. A connection over which no packet comes is given up after lostAfter.
func (c *Client) Unreachable() error {
	c.dialer.mu.Lock()
	defer c.dialer.mu.Unlock()
	return c.dialer.trouble
}

// order returns what to try for an address, the most likely first.
func (d *dialer) order(address string) []string {
	if address != d.server {
		return []string{address}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	var order []string
	for _, a := range append([]string{d.last, address}, d.servers...) {
		if a != "" && !slices.Contains(order, a) {
			order = append(order, a)
		}
	}
	return order
}

type dialed struct {
	address string
	conn    net.Conn
	err     error
}

// race tries one address after the other, without waiting for a slow one, and returns the first
// connection. The others are closed when they come.
func (d *dialer) race(ctx context.Context, network string, addresses []string) (dialed, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	results := make(chan dialed, len(addresses))
	next := time.NewTimer(0)
	defer next.Stop()
	var failed []error
	for begun := 0; len(failed) < len(addresses); {
		select {
		case <-next.C:
			if begun == len(addresses) {
				continue
			}
			address := addresses[begun]
			begun++
			go func() {
				conn, err := d.dial(ctx, network, address)
				results <- dialed{address, conn, err}
			}()
			next.Reset(dialNext)
		case r := <-results:
			if r.err == nil {
				go closeLate(results, begun-len(failed)-1)
				return r, nil
			}
			failed = append(failed, r.err)
			next.Reset(0)
		}
	}
	return dialed{}, errors.Join(failed...)
}

// closeLate closes the connections among the n results that are still to come.
func closeLate(results <-chan dialed, n int) {
	for range n {
		if r := <-results; r.err == nil {
			r.conn.Close()
		}
	}
}
