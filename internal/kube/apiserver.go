package kube

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"k8s.io/client-go/rest"

	"github.com/landfall-lb/landfall/internal/loop"
)

const (
	// dialTimeout bounds one attempt to connect to the API server, and keepAlive is the time between
	// two probes of an idle connection; both as in client-go.
	dialTimeout = 30 * time.Second
	keepAlive   = 30 * time.Second
	// dialNext is how long an address has to answer before the next one is tried beside it.
	dialNext = time.Second
	// dialSilent is how long no address has to answer for that to be logged.
	dialSilent = 3 * time.Second
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
	trouble  error  // why nothing answered the last time
	failures loop.Failures
}

// dialThrough has a configuration connect by a dialer.
func dialThrough(config *rest.Config, log *slog.Logger, servers []string) (*dialer, error) {
	at, _, err := rest.DefaultServerUrlFor(config)
	if err != nil {
		return nil, fmt.Errorf("address %s of the API server: %w", config.Host, err)
	}
	port := cmp.Or(at.Port(), map[string]string{"http": "80"}[at.Scheme], "443")
	d := newDialer(log, net.JoinHostPort(at.Hostname(), port), servers)
	config.Dial = d.DialContext
	return d, nil
}

func newDialer(log *slog.Logger, server string, servers []string) *dialer {
	d := &net.Dialer{Timeout: dialTimeout, KeepAlive: keepAlive}
	return &dialer{log: log, server: server, servers: servers, dial: d.DialContext}
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
	addresses := d.order(address)
	silent := time.AfterFunc(dialSilent, func() {
		d.note(fmt.Errorf("no answer from %s for %s", strings.Join(addresses, ", "), dialSilent))
	})
	defer silent.Stop()
	won, err := d.race(ctx, network, addresses)
	d.note(err)
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
	return won.conn, nil
}

// note logs the first failure of a row, and its end.
func (d *dialer) note(err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.trouble = err
	d.failures.Log(d.log, "cannot connect to the API server", "connected to the API server again", err)
}

// Unreachable returns why the API server cannot be connected to; nil while the last attempt was
// answered. A connection that has gone silent is given up within a minute.
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
