package ops

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/http/pprof"
	"time"

	"github.com/landfall-lb/landfall/internal/listen"
)

const (
	// maxPprofConnections is how many profiles are taken at a time.
	maxPprofConnections = 4
	// pprofTimeout bounds the time for an answer, that for the profile included.
	pprofTimeout = 5 * time.Minute
)

// listenPprof opens the socket of --pprof-address, and returns nil if there is none. Profiles show memory, so other
// hosts never get them.
func (c *commonFlags) listenPprof() (net.Listener, error) {
	if c.pprofAddress == "" {
		return nil, nil
	}
	host, port, err := net.SplitHostPort(c.pprofAddress)
	if host == hostLocal {
		host = "127.0.0.1"
	}
	if ip := net.ParseIP(host); err != nil || ip == nil || !ip.IsLoopback() {
		return nil, Usagef("--pprof-address: %q is not a loopback address and a port, such as localhost:6060", c.pprofAddress)
	}
	listener, err := net.Listen("tcp", net.JoinHostPort(host, port))
	if err != nil {
		return nil, fmt.Errorf("--pprof-address: %w", err)
	}
	return listener, nil
}

// runPprof serves profiles until ctx ends.
func (s *server) runPprof(ctx context.Context, listener net.Listener) error {
	mux := http.NewServeMux()
	mux.HandleFunc("/debug/pprof/", pprof.Index)
	mux.HandleFunc("/debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("/debug/pprof/trace", pprof.Trace)
	mux.HandleFunc("/debug/pprof/symbol", pprof.Symbol)
	return s.serve(ctx, listen.Limit(listener, listen.NewRoom[net.Conn](maxPprofConnections)), mux, pprofTimeout)
}
