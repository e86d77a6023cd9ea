package chaos

import (
	"bufio"
	"context"
	"encoding/json"
	"net"
	"net/netip"
	"strings"
	"sync"
	"time"

	"github.com/landfall-lb/landfall/e2e/chaos/contract"
	"github.com/landfall-lb/landfall/e2e/lab"
	"github.com/landfall-lb/landfall/e2e/lab/podserver"
	"github.com/landfall-lb/landfall/internal/lb"
)

const (
	// sampleEvery is how often each address and protocol is asked, lineEvery how often a flow carries a line.
	sampleEvery = 300 * time.Millisecond
	lineEvery   = 500 * time.Millisecond
)

// target is an address and port that clients ask.
type target struct {
	service, app, network, from string
	local, direct, relayed      bool
	affine                      bool
	to                          netip.AddrPort
	client                      netip.Addr
}

// targetsOf returns what clients ask of a Service with these addresses. Addresses on the LAN are asked from there and
// from behind the router by turns.
func targetsOf(c lab.Cluster, s lab.Service, addrs []netip.Addr) []target {
	var all []target
	for i, a := range addrs {
		for j, p := range s.Ports {
			t := target{service: s.Name, app: s.App, local: s.ExternalTrafficPolicy == "Local", network: "tcp",
				direct:  s.Annotations[lb.AnnotationForwarding] == lb.ForwardingDirect,
				relayed: s.Annotations[lb.AnnotationRelay] == "true", affine: s.Affinity,
				to: netip.AddrPortFrom(a, p.Port), from: lab.ClientName, client: c.LAN.Client}
			if p.Protocol == "UDP" {
				t.network = "udp"
			}
			if (i+j)%2 == 1 || s.Annotations[lb.AnnotationPool] == "routed" {
				t.from, t.client = lab.FarClientName, c.Far.Client
			}
			if a.Is6() {
				t.client = lab.Twin(t.client)
			}
			all = append(all, t)
		}
	}
	return all
}

// traffic is what clients do in a round.
type traffic struct {
	l      *lab.Lab
	cancel context.CancelFunc
	ctx    context.Context
	group  sync.WaitGroup

	mu      sync.Mutex
	samples []contract.Sample
	flows   []contract.Flow
	onLoss  func(string)
}

func startTraffic(ctx context.Context, l *lab.Lab, onLoss func(string)) *traffic {
	ctx, cancel := context.WithCancel(ctx)
	return &traffic{l: l, cancel: cancel, ctx: ctx, onLoss: onLoss}
}

// sample asks a target again and again until the round or ctx ends, whether or not what it asked before was answered.
func (t *traffic) sample(ctx context.Context, g target, every time.Duration) {
	t.group.Go(func() {
		tick := time.NewTicker(every)
		defer tick.Stop()
		for t.ctx.Err() == nil && ctx.Err() == nil {
			t.group.Go(func() { t.one(g) })
			select {
			case <-tick.C:
			case <-t.ctx.Done():
			case <-ctx.Done():
			}
		}
	})
}

// one asks once.
func (t *traffic) one(g target) {
	s := contract.Sample{Service: g.service, Wanted: g.app, Local: g.local, Direct: g.direct, Affine: g.affine,
		Network: g.network, Target: g.to, Client: g.client, Began: time.Now()}
	// Not the round's context: what is under way when the round ends runs to its own end.
	answer, err := t.l.Attempt(context.WithoutCancel(t.ctx), g.from, g.network, g.to)
	s.Ended = time.Now()
	if err != nil {
		s.Err = err.Error()
		t.onLoss(g.network + " to " + g.to.String() + " of " + g.service + ": " + s.Err)
	} else {
		s.Pod, s.App, s.Source = answer.Pod, appOfPod(answer.Pod), answer.Client.Addr()
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.samples = append(t.samples, s)
}

// appOfPod returns the app of a pod's name, which ends in a number.
func appOfPod(pod string) string { return pod[:max(0, strings.LastIndexByte(pod, '-'))] }

// flow opens a connection that is to last for the round.
func (t *traffic) flow(g target) {
	t.group.Go(func() {
		f := contract.Flow{Service: g.service, Relayed: g.relayed, Target: g.to, Client: g.client, Began: time.Now()}
		conn, err := t.l.Dial(t.ctx, g.from, g.network, g.to.String())
		if err != nil {
			return // what new connections meet is judged by the samples
		}
		defer conn.Close()
		f.Pod, f.Asked, err = t.talk(conn)
		if err != nil {
			f.Broke, f.Err = time.Now(), err.Error()
			t.onLoss("a connection to " + g.to.String() + " of " + g.service + " broke: " + f.Err)
		}
		t.mu.Lock()
		defer t.mu.Unlock()
		t.flows = append(t.flows, f)
	})
}

// talk sends lines and waits for answers until the round ends.
func (t *traffic) talk(conn net.Conn) (pod string, asked time.Time, err error) {
	in := bufio.NewReader(conn)
	for {
		asked = time.Now()
		if err := conn.SetDeadline(asked.Add(lab.LineTimeout)); err != nil {
			return pod, asked, err
		}
		if _, err := conn.Write([]byte("hello\n")); err != nil {
			return pod, asked, err
		}
		line, err := in.ReadBytes('\n')
		if err != nil {
			return pod, asked, err
		}
		var answer podserver.Answer
		if err := json.Unmarshal(line, &answer); err != nil {
			return pod, asked, err
		}
		pod = answer.Pod
		select {
		case <-t.ctx.Done():
			return pod, asked, nil
		case <-time.After(lineEvery):
		}
	}
}

// stop ends the traffic, waits for what is under way, and returns what was seen.
func (t *traffic) stop() ([]contract.Sample, []contract.Flow) {
	t.cancel()
	t.group.Wait()
	return t.samples, t.flows
}
