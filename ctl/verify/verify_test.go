package verify

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
)

// cluster is an API server with a Landfall that serves what is created, as far as it is well.
type cluster struct {
	mu        sync.Mutex
	ready     func() int // pods of each program
	programs  []string
	pools     int
	l2, bgp   int
	assigns   bool
	announces bool
	// stays is how often a deleted Service is still there.
	stays    int
	refuses  error // of a creation
	services map[lb.Key]lb.Service
	log      []string
}

func (c *cluster) Workloads(context.Context, string, string) (all []lb.Workload, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, name := range c.programs {
		all = append(all, lb.Workload{Kind: "DaemonSet", Name: name, Wanted: 3, Ready: c.ready()})
	}
	return all, nil
}

func (c *cluster) AllPools(context.Context) ([]lb.Pool, bool, error) {
	return make([]lb.Pool, max(c.pools, 0)), c.pools >= 0, nil
}

func (c *cluster) AllL2Advertisements(context.Context) ([]lb.L2Advertisement, error) {
	return make([]lb.L2Advertisement, c.l2), nil
}

func (c *cluster) AllBGPAdvertisements(context.Context) ([]lb.BGPAdvertisement, error) {
	return make([]lb.BGPAdvertisement, c.bgp), nil
}

func (c *cluster) OneService(_ context.Context, key lb.Key) (lb.Service, bool, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	s, ok := c.services[key]
	if ok && s.Deleting {
		if c.stays--; c.stays < 0 {
			delete(c.services, key)
			return s, false, nil
		}
	}
	return s, ok, nil
}

func (c *cluster) CreateService(_ context.Context, key lb.Key, class string, port uint16,
	pods map[string]string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.log = append(c.log, fmt.Sprintf("create %s class %q port %d pods %v", key, class, port, pods))
	if _, there := c.services[key]; there {
		return errors.New("exists")
	}
	if c.refuses == nil {
		c.put(key, port)
	}
	return c.refuses
}

// put has a Service with what Landfall writes to it.
func (c *cluster) put(key lb.Key, port uint16) {
	s := lb.Service{Key: key, Type: lb.LoadBalancer, Ports: []lb.ServicePort{{Protocol: lb.UDP, Port: 53},
		{Protocol: lb.TCP, Port: port}}, Conditions: []lb.Condition{
		{Type: lb.ConditionAssigned, Status: c.assigns, Reason: "PoolFull", Message: "no address is free"},
		{Type: lb.ConditionAnnounced, Status: c.announces, Reason: "NoBackends", Message: "no endpoint"}}}
	if c.assigns {
		s.Ingress = []lb.Ingress{{Addr: netip.MustParseAddr("192.0.2.10")}, {Addr: netip.MustParseAddr("2001:db8::10")}}
	}
	c.services[key] = s
}

func (c *cluster) DeleteService(_ context.Context, key lb.Key) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if s, ok := c.services[key]; ok {
		s.Deleting = true
		c.services[key] = s
		c.log = append(c.log, "delete "+key.String())
	}
	return nil
}

var own = lb.Key{Namespace: "landfall-system", Name: TestService}

func TestRun(t *testing.T) {
	pods := map[string]string{"component": "test"}
	web := lb.Key{Namespace: "default", Name: "web"}
	for name, c := range map[string]struct {
		change func(*cluster, *Options)
		// said is the last line but for the deletion, fails a part of the error.
		said, fails string
		creates     bool
	}{
		"all is well": {said: "[2001:db8::10]:8080 answers after 0.0 s", creates: true},
		"an earlier run was cut off": {change: func(c *cluster, _ *Options) { c.put(own, 8080); c.stays = 4 },
			said: "[2001:db8::10]:8080 answers", creates: true},
		"it takes a while": {change: func(c *cluster, _ *Options) {
			began := time.Now()
			c.ready = func() int { return int(time.Since(began) / (10 * time.Second)) }
		}, said: "answers after", creates: true},
		"a pod is not ready": {change: func(c *cluster, _ *Options) { c.ready = func() int { return 2 } },
			fails: "after 1m0s: DaemonSet landfall-system/node: 2 of 3 pods are ready"},
		"nothing is installed": {change: func(c *cluster, _ *Options) { c.programs = nil },
			fails: "no Deployment or DaemonSet with labels x=y"},
		"no pool": {change: func(c *cluster, _ *Options) { c.pools = 0 }, fails: "there is no IPAddressPool"},
		"no CRDs": {change: func(c *cluster, _ *Options) { c.pools = -1 }, fails: "install the CRDs"},
		"no advertisement": {change: func(c *cluster, _ *Options) { c.l2 = 0 },
			fails: "no L2Advertisement or BGPAdvertisement"},
		"BGP alone": {change: func(c *cluster, _ *Options) { c.l2, c.bgp = 0, 1 }, said: "answers", creates: true},
		"no address": {change: func(c *cluster, _ *Options) { c.assigns = false }, creates: true,
			fails: "Service landfall-system/landfall-test has no address: PoolFull: no address is free"},
		"not announced": {change: func(c *cluster, _ *Options) { c.announces = false }, creates: true,
			fails: "is not announced: NoBackends: no endpoint"},
		"not allowed": {change: func(c *cluster, _ *Options) { c.refuses = errors.New("forbidden") }, creates: true,
			fails: "forbidden"},
		"no answer": {change: func(_ *cluster, o *Options) {
			o.Dial = func(context.Context, string, string) (net.Conn, error) { return nil, errors.New("refused") }
		}, creates: true, fails: "connect to 192.0.2.10:8080: after 1m0s: refused"},
		"another answers": {change: func(_ *cluster, o *Options) {
			o.Dial = func(context.Context, string, string) (net.Conn, error) { return answer("SSH-2.0"), nil }
		}, creates: true, fails: "is answered by another program"},
		"the port is taken": {change: func(_ *cluster, o *Options) {
			o.Listen = func(string, string) (net.Listener, error) { return nil, errors.New("in use") }
		}, fails: "in use"},
		"no pod": {change: func(c *cluster, o *Options) { c.announces, o.Pods = false, nil },
			said: "no connection was tried", creates: true},
		"a Service": {change: func(c *cluster, o *Options) { c.put(web, 80); o.Service, o.Pods = web, nil },
			said: "[2001:db8::10]:80 answers"},
		"no such Service": {change: func(_ *cluster, o *Options) { o.Service = web },
			fails: "there is no Service default/web"},
		"a Service of UDP": {change: func(c *cluster, o *Options) {
			c.put(web, 80)
			s := c.services[web]
			s.Ports = s.Ports[:1]
			c.services[web], o.Service = s, web
		}, said: "the Service has no TCP port"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				api := &cluster{ready: func() int { return 3 }, programs: []string{"node"}, pools: 1, l2: 1, assigns: true,
					announces: true, services: map[lb.Key]lb.Service{}}
				var out strings.Builder
				o := Options{API: api, Say: func(text string) { fmt.Fprintln(&out, "ok: "+text) },
					Namespace: own.Namespace, Selector: "x=y", Class: "lb", Pods: pods, Port: 8080,
					Timeout: time.Minute, Listen: func(string, string) (net.Listener, error) { return closed{}, nil },
					Dial: func(context.Context, string, string) (net.Conn, error) { return answer(greeting), nil }}
				if c.change != nil {
					c.change(api, &o)
				}
				err := Run(t.Context(), o)
				if c.fails == "" && err != nil || c.fails != "" && (err == nil || !strings.Contains(err.Error(), c.fails)) {
					t.Errorf("error %v, want %q", err, c.fails)
				}
				lines := strings.Split(strings.TrimSuffix(strings.TrimSpace(out.String()),
					"\nok: Service landfall-system/landfall-test is deleted"), "\n")
				if last := lines[len(lines)-1]; !strings.Contains(last, c.said) {
					t.Errorf("the last line is %q, want %q", last, c.said)
				}
				if _, left := api.services[own]; left {
					t.Error("the Service is left")
				}
				want := fmt.Sprintf("create landfall-system/landfall-test class %q port 8080 pods %v", "lb", o.Pods)
				if created := strings.Contains(strings.Join(api.log, "\n"), want); created != c.creates {
					t.Errorf("did %q, want %q: %v", api.log, want, c.creates)
				}
			})
		})
	}
}

// TestRunCleansUpAfterAnEnd is told to end while it waits for an address.
func TestRunCleansUpAfterAnEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		api := &cluster{ready: func() int { return 3 }, programs: []string{"node"}, pools: 1, l2: 1, stays: 3,
			services: map[lb.Key]lb.Service{}}
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		err := Run(ctx, Options{API: api, Say: func(string) {}, Namespace: own.Namespace, Timeout: time.Minute})
		if !errors.Is(err, context.DeadlineExceeded) || len(api.services) > 0 {
			t.Errorf("error %v, left %v", err, api.services)
		}
	})
}

// TestServe answers with the greeting by which Run knows its own port.
func TestServe(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	v := verifier{Options{Say: func(text string) { fmt.Fprintln(&out, "ok: "+text) },
		Timeout: time.Minute, Pods: map[string]string{"a": "b"},
		Dial:   new(net.Dialer).DialContext,
		Listen: func(string, string) (net.Listener, error) { return listener, nil }}}
	stop, err := v.serve()
	if err != nil {
		t.Fatal(err)
	}
	to := listener.Addr().(*net.TCPAddr).AddrPort()
	if err := v.connect(t.Context(), to); err != nil {
		t.Error(err)
	}
	stop()
	if v.Timeout = time.Millisecond; v.connect(t.Context(), to) == nil {
		t.Error("a closed port answers")
	}
}

// answer is a connection on which the other side says something, and closes it.
func answer(text string) net.Conn {
	here, there := net.Pipe()
	go func() {
		_, _ = io.WriteString(there, text)
		there.Close()
	}()
	return here
}

// closed is a listener that accepts nothing.
type closed struct{}

func (closed) Accept() (net.Conn, error) { return nil, net.ErrClosed }
func (closed) Close() error              { return nil }
func (closed) Addr() net.Addr            { return &net.TCPAddr{} }
