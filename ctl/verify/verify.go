// Package verify checks that an installation of Landfall works: its programs are ready, and a
// Service gets an address that is announced and answers.
package verify

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
)

// API is what verify asks of the API server.
type API interface {
	Workloads(ctx context.Context, namespace, selector string) ([]lb.Workload, error)
	AllPools(ctx context.Context) (pools []lb.Pool, installed bool, err error)
	AllL2Advertisements(ctx context.Context) ([]lb.L2Advertisement, error)
	AllBGPAdvertisements(ctx context.Context) ([]lb.BGPAdvertisement, error)
	OneService(ctx context.Context, key lb.Key) (lb.Service, bool, error)
	CreateService(ctx context.Context, key lb.Key, class string, port uint16, pods map[string]string) error
	DeleteService(ctx context.Context, key lb.Key) error
}

// Options say what to check.
type Options struct {
	API API
	Say func(text string) // is called after each check that ended well
	// Namespace is Landfall's, Selector the labels of its Deployments and DaemonSets.
	Namespace, Selector string
	// Class is the loadBalancerClass of the Service that is created; may be empty.
	Class string
	// Service is one that exists, to check in place of a new one; may be zero.
	Service lb.Key
	// Pods are the labels of the pod that runs this, and Port the one that it serves: a new Service leads
	// to it, and connections are made. Without Pods a new Service leads nowhere, and is not announced.
	Pods map[string]string
	Port uint16
	// Timeout is how long to wait for each thing.
	Timeout time.Duration
	// Dial opens connections, Listen the port.
	Dial   func(ctx context.Context, network, address string) (net.Conn, error)
	Listen func(network, address string) (net.Listener, error)
}

// TestService is the name of the Service that is created in Landfall's namespace, and deleted.
const TestService = "landfall-test"

const (
	pause = 500 * time.Millisecond
	// deleteTimeout is how long to wait until the Service is gone; the controller waits 10 s at most
	// until no node announces it.
	deleteTimeout = 25 * time.Second
)

// Run checks, and says how each check ended; the error says what failed first. The Service that it
// creates is deleted also when a check fails or ctx ends.
func Run(ctx context.Context, o Options) error {
	v := verifier{Options: o}
	if err := v.programs(ctx); err != nil {
		return err
	}
	if err := v.configuration(ctx); err != nil {
		return err
	}
	if v.Service != (lb.Key{}) {
		return v.service(ctx, v.Service)
	}
	return v.newService(ctx)
}

type verifier struct{ Options }

func (v verifier) say(format string, args ...any) { v.Say(fmt.Sprintf(format, args...)) }

// wait polls until check returns nil, and returns its last error when the time is over. Errors of
// the API server end it only then: the server may be busy.
func (v verifier) wait(ctx context.Context, check func(context.Context) error) error {
	ctx, cancel := context.WithTimeoutCause(ctx, v.Timeout, fmt.Errorf("after %s", v.Timeout))
	defer cancel()
	for {
		err := check(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", context.Cause(ctx), err)
		case <-time.After(pause):
		}
	}
}

// programs waits until all pods of Landfall are ready.
func (v verifier) programs(ctx context.Context) error {
	var found []lb.Workload
	err := v.wait(ctx, func(ctx context.Context) (err error) {
		if found, err = v.API.Workloads(ctx, v.Namespace, v.Selector); err != nil {
			return err
		}
		if len(found) == 0 {
			return fmt.Errorf("namespace %s has no Deployment or DaemonSet with labels %s", v.Namespace, v.Selector)
		}
		for _, w := range found {
			if w.Ready < w.Wanted || w.Wanted == 0 {
				return fmt.Errorf("%s %s/%s: %d of %d pods are ready", w.Kind, v.Namespace, w.Name, w.Ready, w.Wanted)
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	for _, w := range found {
		v.say("%s %s/%s: %d of %d pods are ready", w.Kind, v.Namespace, w.Name, w.Ready, w.Wanted)
	}
	return nil
}

// configuration looks for what an administrator creates, and says what is missing.
func (v verifier) configuration(ctx context.Context) error {
	pools, installed, err := v.API.AllPools(ctx)
	if err == nil && !installed {
		err = errors.New("the API server does not know IPAddressPools: install the CRDs of the chart")
	}
	if err != nil {
		return err
	}
	l2, err := v.API.AllL2Advertisements(ctx)
	if err != nil {
		return err
	}
	bgp, err := v.API.AllBGPAdvertisements(ctx)
	if err != nil {
		return err
	}
	var missing []error
	if len(pools) == 0 {
		missing = append(missing, errors.New("there is no IPAddressPool: create one (docs/guide/install.md)"))
	}
	if len(l2)+len(bgp) == 0 {
		missing = append(missing, errors.New("there is no L2Advertisement or BGPAdvertisement: create one "+
			"(docs/guide/install.md)"))
	}
	if len(missing) > 0 {
		return errors.Join(missing...)
	}
	v.say("IPAddressPools: %d, L2Advertisements: %d, BGPAdvertisements: %d", len(pools), len(l2), len(bgp))
	return nil
}

// newService creates a Service, checks and deletes it.
func (v verifier) newService(ctx context.Context) (err error) {
	key := lb.Key{Namespace: v.Namespace, Name: TestService}
	if len(v.Pods) > 0 {
		stop, err := v.serve()
		if err != nil {
			return err
		}
		defer stop()
	}
	if err := v.remove(ctx, key); err != nil { // an earlier run may have been cut off
		return err
	}
	defer func() {
		ctx := context.WithoutCancel(ctx)
		if removeErr := v.remove(ctx, key); removeErr != nil {
			err = errors.Join(err, removeErr)
		} else if err == nil {
			v.say("Service %s is deleted", key)
		}
	}()
	if err := v.API.CreateService(ctx, key, v.Class, v.Port, v.Pods); err != nil {
		return err
	}
	return v.service(ctx, key)
}

// remove deletes a Service, and waits until it is gone.
func (v verifier) remove(ctx context.Context, key lb.Key) error {
	v.Timeout = deleteTimeout
	return v.wait(ctx, func(ctx context.Context) error {
		if err := v.API.DeleteService(ctx, key); err != nil {
			return err
		}
		_, found, err := v.API.OneService(ctx, key)
		if err == nil && found {
			err = fmt.Errorf("the Service %s is still being deleted", key)
		}
		return err
	})
}

// service waits for addresses, their announcement, and answers.
func (v verifier) service(ctx context.Context, key lb.Key) error {
	announced := v.Service == key || len(v.Pods) > 0
	var s lb.Service
	began := time.Now()
	err := v.wait(ctx, func(ctx context.Context) (err error) {
		var found bool
		if s, found, err = v.API.OneService(ctx, key); err != nil {
			return err
		}
		return ready(key, s, found, announced)
	})
	if err != nil {
		return err
	}
	var addresses []string
	for _, vip := range s.VIPs() {
		addresses = append(addresses, vip.String())
	}
	v.say("Service %s has %s after %.1f s", key, strings.Join(addresses, " and "), time.Since(began).Seconds())
	if !announced {
		v.say("no connection was tried, as the Service has no endpoint here: name one with --service, or run helm test")
		return nil
	}
	v.say("nodes announce it: %s", message(s, lb.ConditionAnnounced))
	for _, port := range s.Ports {
		if port.Protocol != lb.TCP {
			continue
		}
		for _, vip := range s.VIPs() {
			if err := v.connect(ctx, netip.AddrPortFrom(vip, port.Port)); err != nil {
				return err
			}
		}
		return nil
	}
	v.say("no connection was tried, as the Service has no TCP port")
	return nil
}

// ready says what a Service still lacks.
func ready(key lb.Key, s lb.Service, found, announced bool) error {
	switch {
	case !found:
		return fmt.Errorf("there is no Service %s", key)
	case len(s.VIPs()) == 0:
		return fmt.Errorf("the Service %s has no address: %s", key, message(s, lb.ConditionAssigned))
	case announced && !shows(s, lb.ConditionAnnounced):
		return fmt.Errorf("the Service %s is not announced: %s", key, message(s, lb.ConditionAnnounced))
	}
	return nil
}

func shows(s lb.Service, kind string) bool {
	c, _ := lb.FindCondition(s.Conditions, kind)
	return c.Status
}

func message(s lb.Service, kind string) string {
	if c, ok := lb.FindCondition(s.Conditions, kind); ok {
		return fmt.Sprintf("%s: %s", c.Reason, c.Message)
	}
	return "no condition " + kind + " yet"
}

// greeting is what the port of the pod says, so that an answer is known to be its own.
const greeting = "landfall-test\n"

// serve answers connections to the port until stop is called.
func (v verifier) serve() (stop func(), err error) {
	listener, err := v.Listen("tcp", fmt.Sprintf(":%d", v.Port))
	if err != nil {
		return nil, err
	}
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			_, _ = io.WriteString(conn, greeting)
			conn.Close()
		}
	}()
	return func() { listener.Close() }, nil
}

// connect waits until an address accepts a connection, and greets if it leads here.
func (v verifier) connect(ctx context.Context, to netip.AddrPort) error {
	began := time.Now()
	err := v.wait(ctx, func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
		defer cancel()
		conn, err := v.Dial(ctx, "tcp", to.String())
		if err != nil {
			return err
		}
		defer conn.Close()
		if len(v.Pods) == 0 || v.Service != (lb.Key{}) {
			return nil
		}
		deadline, _ := ctx.Deadline()
		if err := conn.SetReadDeadline(deadline); err != nil {
			return err
		}
		got, err := io.ReadAll(io.LimitReader(conn, int64(len(greeting))))
		if string(got) != greeting {
			return fmt.Errorf("%s is answered by another program, with %q: %w", to, got, errors.Join(err, errForeign))
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("connect to %s: %w", to, err)
	}
	v.say("%s answers after %.1f s", to, time.Since(began).Seconds())
	return nil
}

var errForeign = errors.New("not the greeting of this pod")
