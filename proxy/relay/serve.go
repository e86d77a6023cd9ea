package relay

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/pires/go-proxyproto"

	"github.com/landfall-lb/landfall/internal/lb"
)

// serve serves one client.
func (r *Relay) serve(ctx context.Context, client *Conn, from netip.AddrPort, l listener) {
	defer client.Close()
	began := r.deps.Now()
	to, err := r.deps.Original(client, l.family)
	own := false
	if err == nil && to.Port() == l.port {
		var local netip.AddrPort
		local, err = client.local()
		own = to == local
	}
	if err != nil || own {
		r.refused.Add(1) // who connects to the relay itself
		abort(client)
		return
	}
	w, ok := r.find(ctx, target{lb.TCP, to}, &r.waiting)
	if !ok || !r.admitTo(w.service, from.Addr()) {
		r.refused.Add(1)
		abort(client)
		return
	}
	c, err := r.connect(ctx, w, from, to, client.ttl(lb.FamilyOf(from.Addr())))
	p := &passed{service: w.service, from: from, to: to, at: c.backend, tried: c.tried, began: began}
	if err == nil {
		r.ended(p, r.pass(ctx, w, client, c.conn, p))
		return
	}
	abort(client)
	end := ended{err: err}
	r.table.close(w.service, from.Addr())
	r.log(lb.TCP, w.service, from, to, c.tried, end, r.deps.Now().Sub(began))
}

// find returns where a frontend leads. It waits a moment for one of which the proxy has not spoken yet, unless
// as many wait as may; waiting counts them, and nil does not.
func (r *Relay) find(ctx context.Context, frontend target, waiting *atomic.Int64) (w way, ok bool) {
	if w, ok, _ = r.table.find(frontend); ok {
		return w, true
	}
	if waiting != nil {
		defer waiting.Add(-1)
		if waiting.Add(1) > maxWaiting {
			return w, false
		}
	}
	late := time.NewTimer(findWithin)
	defer late.Stop()
	for {
		w, ok, changed := r.table.find(frontend)
		if ok {
			return w, true
		}
		select {
		case <-ctx.Done():
			return w, false
		case <-late.C:
			return w, false
		case <-changed:
		}
	}
}

// connect connects to a backend, for a client of a frontend whose packets have come with a TTL.
func (r *Relay) connect(ctx context.Context, w way, from, to netip.AddrPort, ttl int) (connection, error) {
	if ttl == 1 {
		w.service.count(Counts{Expired: 1})
		return connection{}, errExpired
	}
	choose := r.table.chooser(w, from, to, rand.Uint64)
	dial := func(ctx context.Context, b netip.AddrPort) (*Conn, error) { return r.deps.Dial(ctx, b, onward(ttl)) }
	d := dialer{dial: dial, tries: r.options.Tries, tryAfter: r.options.TryAfter, timeout: r.options.ConnectTimeout}
	next := func(tried []netip.AddrPort) (netip.AddrPort, bool) { return w.service.choose(choose, tried) }
	failed := func(b netip.AddrPort) {
		if reaches(ttl) {
			r.table.suspect(w.service, b)
		}
	}
	c, err := d.connect(ctx, next, failed)
	w.service.connected(len(c.tried), c.failedHere, err == nil)
	for _, b := range c.tried {
		if err != nil || b != c.backend {
			w.service.leave(b)
		}
	}
	if err != nil {
		return c, fmt.Errorf("no backend answered: %w", err)
	}
	w.service.trust(c.backend)
	r.table.remember(w, from.Addr(), c.backend)
	return c, nil
}

// pass tells the backend who the client is, if the Service asks for that, and passes on all bytes.
func (r *Relay) pass(ctx context.Context, w way, client, backend *Conn, p *passed) ended {
	defer backend.Close()
	p.passage = newPassage(r.pipes.of(w.service, p.from.Addr()), client, backend)
	if w.proxyProtocol > 0 {
		header := proxyproto.HeaderProxyFromAddrs(byte(w.proxyProtocol), net.TCPAddrFromAddrPort(p.from),
			net.TCPAddrFromAddrPort(p.to))
		_ = backend.file.SetWriteDeadline(time.Now().Add(headerWithin))
		if _, err := header.WriteTo(backend.file); err != nil {
			abort(client)
			return ended{err: fmt.Errorf("write the header of the PROXY protocol: %w", err)}
		}
		_ = backend.file.SetWriteDeadline(time.Time{})
	}
	return r.carry(ctx, p)
}

// carry passes on the bytes of a connection, which may be reset or handed on meanwhile.
func (r *Relay) carry(ctx context.Context, p *passed) ended {
	p.reset, p.start = p.abort, r.workers.run
	r.passing.add(p)
	defer r.passing.remove(p)
	return p.run(ctx, r.options.Idle)
}

// log writes a connection or flow that has ended into the access log.
func (r *Relay) log(protocol lb.Protocol, s *service, from, to netip.AddrPort, tried []netip.AddrPort, end ended,
	took time.Duration) {
	if !r.options.AccessLog || end.handedOn {
		return
	}
	leftOut, ok := s.logs(r.deps.Now())
	if !ok {
		return
	}
	args := []any{"service", s.key, "protocol", protocol, "client", from, "frontend", to, "tried", tried,
		"sent", end.sent, "received", end.received, "seconds", took.Seconds()}
	if end.backend.IsValid() {
		args = append(args, "backend", end.backend)
	}
	if end.err != nil {
		args = append(args, "error", end.err)
	}
	if leftOut > 0 {
		args = append(args, "leftOut", leftOut)
	}
	r.deps.Log.Info("connection", args...)
}
