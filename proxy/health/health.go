// Package health answers load balancers in front of the cluster: on the healthCheckNodePort of each
// Service that has one, and for the node as a whole on /healthz and /livez (KEP-3836), as
// kube-proxy does.
package health

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/landfall-lb/landfall/internal/actor"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/listen"
	"github.com/landfall-lb/landfall/internal/loop"
)

// Limits for clients, which may be anybody who reaches the node.
const (
	// nodeConnections is how many connections to the node's own server are open at a time, and
	// serviceConnections how many to the health ports of all Services together.
	nodeConnections, serviceConnections = 64, 1024
	// maxHeader is how many bytes of a request's headers are read, besides net/http's own 4 kB.
	maxHeader = 4 << 10
	// writeTimeout is how long a client may take to receive an answer.
	writeTimeout = 10 * time.Second
)

// Stale is how old the oldest change may be that is not in the kernel yet, before the proxy counts
// as unhealthy.
const Stale = time.Minute

// Service is what the health port of one Service answers.
type Service struct {
	Port uint16
	// Local counts the ready endpoints of this node that the kernel delivers to, for each address
	// family that the Service has.
	Local map[lb.Family]int
}

// Node is what the node's own health server answers.
type Node struct {
	// Known is set once the node's own Node object has been seen.
	Known bool
	// Leaving says why the node shall not attract traffic any more; "" when it shall.
	Leaving lb.Reason
	// Unapplied is, for each address family that the proxy serves, when the oldest change came that
	// the kernel has not confirmed; zero when there is none.
	Unapplied map[lb.Family]time.Time
}

// Deps are what an Actor needs.
type Deps struct {
	Log *slog.Logger
	Now func() time.Time
	// NodeAddress is where /healthz and /livez are served; empty for nowhere.
	NodeAddress string
	// Listen opens a socket; net.Listen.
	Listen func(network, address string) (net.Listener, error)
	// Answered is told of each answer on /healthz and /livez; may be nil.
	Answered func(path string, code int)
	// Failed is told when a Service's port cannot be opened, and with a nil error when it can be
	// again. It must not block.
	Failed func(service lb.Key, port uint16, err error)
}

// Actor keeps the servers open that are wanted.
type Actor struct {
	deps   Deps
	runner *loop.Runner

	mu        sync.Mutex
	node      Node
	services  map[lb.Key]Service
	byPort    map[uint16][]lb.Key // in order; the first one has the port
	addresses map[lb.Family][]netip.Addr

	// The rest belongs to the goroutine that runs apply.
	servers map[socket]*server
	failed  map[socket]string
	serving sync.WaitGroup

	ofNode, ofServices *listen.Room[net.Conn]
}

// socket is where a server listens: a port of a Service, or the node's health address.
type socket struct {
	network, address string
	family           lb.Family // of a Service's port
	port             uint16    // 0 for the node's own
}

type server struct {
	http     *http.Server
	listener net.Listener
	done     chan struct{} // closed when it has ended
}

var _ actor.Updater[lb.Key, Service] = (*Actor)(nil)

// New returns an Actor that serves nothing before Run.
func New(deps Deps) *Actor {
	a := &Actor{
		deps: deps, services: map[lb.Key]Service{}, byPort: map[uint16][]lb.Key{}, servers: map[socket]*server{},
		failed: map[socket]string{}, ofNode: listen.NewRoom[net.Conn](nodeConnections),
		ofServices: listen.NewRoom[net.Conn](serviceConnections),
	}
	a.runner = loop.New(func(context.Context) (time.Duration, error) { return 0, a.apply() },
		loop.Options{MaxBackoff: 5 * time.Second})
	a.runner.Poke()
	return a
}

// SetNode says what is so for the node. Answers follow at once. It never blocks.
func (a *Actor) SetNode(node Node) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.node = node
}

// Begin says what is so for all Services. It never blocks.
func (a *Actor) Begin(all map[lb.Key]Service) { a.Update(all) }

// Update says what is so now for the Services that it names; one without families needs no port.
// Answers follow at once, servers that open or close a moment later. It never blocks.
func (a *Actor) Update(changes map[lb.Key]Service) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for key, now := range changes {
		a.update(key, now)
	}
}

func (a *Actor) update(key lb.Key, now Service) {
	before := a.services[key]
	if len(now.Local) == 0 {
		delete(a.services, key)
	} else {
		a.services[key] = now
	}
	if needs(before, now) && needs(now, before) {
		return // only counts can differ
	}
	if len(before.Local) > 0 {
		a.byPort[before.Port] = slices.DeleteFunc(a.byPort[before.Port], func(k lb.Key) bool { return k == key })
		if len(a.byPort[before.Port]) == 0 {
			delete(a.byPort, before.Port)
		}
	}
	if len(now.Local) > 0 {
		keys := append(a.byPort[now.Port], key)
		slices.SortFunc(keys, lb.Key.Compare)
		a.byPort[now.Port] = keys
	}
	a.runner.Poke()
}

// needs reports whether b has all the servers that a needs.
func needs(a, b Service) bool {
	for family := range a.Local {
		if _, ok := b.Local[family]; !ok {
			return false
		}
	}
	return a.Port == b.Port || len(a.Local) == 0
}

// SetAddresses limits the health ports of Services to these addresses of the node; a family without
// an entry uses all addresses.
func (a *Actor) SetAddresses(addresses map[lb.Family][]netip.Addr) {
	a.mu.Lock()
	a.addresses = addresses
	a.mu.Unlock()
	a.runner.Poke()
}

// Busy returns for how long the actor has been at one thing.
func (a *Actor) Busy() time.Duration { return a.runner.Busy() }

// Run serves until ctx ends.
func (a *Actor) Run(ctx context.Context) error {
	defer a.closeAll()
	return a.runner.Run(ctx)
}

func (a *Actor) closeAll() {
	for at, s := range a.servers {
		s.http.Close()
		delete(a.servers, at)
	}
	a.serving.Wait()
}

// apply opens and closes servers. One that cannot be opened does not hold back the others.
func (a *Actor) apply() error {
	wanted := a.wanted()
	for at, s := range a.servers {
		ended := false
		select {
		case <-s.done:
			ended = true
		default:
		}
		if _, ok := wanted[at]; !ok || ended {
			s.http.Close()
			<-s.done
			delete(a.servers, at)
		}
	}
	for at := range a.failed {
		if _, ok := wanted[at]; !ok {
			delete(a.failed, at)
		}
	}
	var errs []error
	for at, key := range wanted {
		if a.servers[at] != nil {
			continue
		}
		err := a.open(at)
		a.note(at, key, err)
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// wanted returns the sockets that shall be open, with the Service that each is for.
func (a *Actor) wanted() map[socket]lb.Key {
	a.mu.Lock()
	defer a.mu.Unlock()
	wanted := map[socket]lb.Key{}
	if a.deps.NodeAddress != "" {
		wanted[socket{network: "tcp", address: a.deps.NodeAddress}] = lb.Key{}
	}
	for port, keys := range a.byPort {
		key := keys[0]
		for family := range a.services[key].Local {
			network, addrs := "tcp4", []netip.Addr{netip.IPv4Unspecified()}
			if family == lb.IPv6 {
				network, addrs = "tcp6", []netip.Addr{netip.IPv6Unspecified()}
			}
			if limited, ok := a.addresses[family]; ok {
				addrs = limited
			}
			for _, addr := range addrs {
				wanted[socket{network, netip.AddrPortFrom(addr, port).String(), family, port}] = key
			}
		}
	}
	return wanted
}

func (a *Actor) open(at socket) error {
	listener, err := a.deps.Listen(at.network, at.address)
	if err != nil {
		return err
	}
	handler, room := a.serviceHandler(at), a.ofServices
	if at.port == 0 {
		handler, room = a.nodeHandler(), a.ofNode
	}
	listener = listen.Limit(listener, room)
	s := &server{
		http: &http.Server{
			Handler: handler, ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 10 * time.Second, WriteTimeout: writeTimeout,
			IdleTimeout: time.Minute, MaxHeaderBytes: maxHeader,
			ErrorLog: slog.NewLogLogger(a.deps.Log.Handler(), slog.LevelDebug),
		},
		listener: listener,
		done:     make(chan struct{}),
	}
	a.servers[at] = s
	a.serving.Go(func() {
		defer close(s.done)
		if err := s.http.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
			a.deps.Log.Warn("a health server stopped", "address", at.address, "error", err)
			a.runner.Poke() // opens it again
		}
	})
	return nil
}

// note tells of failures and recoveries, each once.
func (a *Actor) note(at socket, key lb.Key, err error) {
	said, wasFailed := a.failed[at]
	switch {
	case err == nil && !wasFailed, err != nil && wasFailed && said == err.Error():
		return
	case err == nil:
		delete(a.failed, at)
		a.deps.Log.Info("opened a health server that failed before", "address", at.address)
	default:
		a.failed[at] = err.Error()
		a.deps.Log.Warn("cannot open a health server; trying again", "service", key, "error", err)
	}
	if at.port != 0 {
		a.deps.Failed(key, at.port, err)
	}
}

// stale reports whether changes of a family wait for too long.
func (a *Actor) stale(family lb.Family, now time.Time) bool {
	oldest := a.node.Unapplied[family]
	return !oldest.IsZero() && now.Sub(oldest) >= Stale
}

// healthy reports whether no family is stale.
func (a *Actor) healthy(now time.Time) bool {
	for family := range a.node.Unapplied {
		if a.stale(family, now) {
			return false
		}
	}
	return true
}
