package gate

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/landfall-lb/landfall/internal/lb"
)

var (
	vip1  = netip.MustParseAddr("172.26.236.180")
	vip2  = netip.MustParseAddr("172.26.236.181")
	nginx = lb.Key{Namespace: "default", Name: "my-nginx"}
)

func delivery(vip netip.Addr, ready int) lb.Delivery {
	return lb.Delivery{Service: nginx, VIP: vip, Policy: lb.Cluster, Ready: ready}
}

// proxy is the other end of a Feed's connections.
type proxy struct {
	t    *testing.T
	conn chan net.Conn // nil: refuses
	ends atomic.Int32  // how often the Feed said that a VIP is delivered no more
}

func (p *proxy) dial(ctx context.Context) (net.Conn, error) {
	select {
	case conn := <-p.conn:
		if conn == nil {
			return nil, errors.New("connection refused")
		}
		return conn, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// accept waits for the next connection and returns the proxy's end, where whatever comes is read.
func (p *proxy) accept() net.Conn {
	ours, theirs := net.Pipe()
	p.conn <- theirs
	go func() { _, _ = io.Copy(io.Discard, ours) }()
	return ours
}

func (p *proxy) say(conn net.Conn, m lb.FeedMessage) {
	p.t.Helper()
	if err := json.NewEncoder(conn).Encode(m); err != nil {
		p.t.Fatal(err)
	}
	synctest.Wait()
}

// feedTest runs a story against a Feed with a hold of 30 s, in fake time.
func feedTest(t *testing.T, story func(t *testing.T, p *proxy, f *Feed, changes func() [][]netip.Addr)) {
	synctest.Test(t, func(t *testing.T) {
		p := &proxy{t: t, conn: make(chan net.Conn)}
		var mu sync.Mutex
		var changed [][]netip.Addr
		f := NewFeed(Options{Dial: p.dial, Hold: 30 * time.Second, Log: slog.New(slog.DiscardHandler),
			Changed: func(vips []netip.Addr) {
				mu.Lock()
				defer mu.Unlock()
				changed = append(changed, vips)
			}, Ended: func() { p.ends.Add(1) }})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- f.Run(ctx) }()
		story(t, p, f, func() [][]netip.Addr {
			synctest.Wait()
			mu.Lock()
			defer mu.Unlock()
			was := changed
			changed = nil
			return was
		})
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

func want(t *testing.T, f *Feed, reason lb.Reason, connected bool) {
	t.Helper()
	synctest.Wait()
	if f.Reason() != reason || f.Connected() != connected {
		t.Errorf("reason %q, connected %v; want %q, %v", f.Reason(), f.Connected(), reason, connected)
	}
}

func TestContract1NothingIsKnownBeforeTheFirstWord(t *testing.T) {
	feedTest(t, func(t *testing.T, p *proxy, f *Feed, changes func() [][]netip.Addr) {
		want(t, f, lb.ReasonFeedUnknown, false)
		p.conn <- nil
		conn := p.accept()
		want(t, f, lb.ReasonFeedUnknown, false)
		p.say(conn, lb.FeedMessage{Complete: true})
		want(t, f, "", true)
		if got := changes(); len(got) != 1 || got[0] != nil {
			t.Errorf("told of %v, want of everything once", got)
		}
		if d := f.Delivery(lb.DeliveryKey{Service: nginx, VIP: vip1}); d != nil {
			t.Errorf("the proxy said nothing of %v", d)
		}
	})
}

func TestChangesAreTold(t *testing.T) {
	feedTest(t, func(t *testing.T, p *proxy, f *Feed, changes func() [][]netip.Addr) {
		conn := p.accept()
		p.say(conn, lb.FeedMessage{Complete: true, Deliveries: []lb.Delivery{delivery(vip1, 1), delivery(vip2, 1)}})
		changes()
		refused := delivery(vip2, 1)
		refused.Refusal = lb.Refuse(lb.ReasonNotProgrammed, "exit status 4")
		for i, c := range []struct {
			m     lb.FeedMessage
			want  [][]netip.Addr
			ended bool
		}{
			{lb.FeedMessage{Deliveries: []lb.Delivery{delivery(vip1, 2)}}, [][]netip.Addr{{vip1}}, false},
			{lb.FeedMessage{Deliveries: []lb.Delivery{delivery(vip1, 2)}}, nil, false},
			{lb.FeedMessage{Deliveries: []lb.Delivery{refused}}, [][]netip.Addr{{vip2}}, true},
			{lb.FeedMessage{Deliveries: []lb.Delivery{refused}}, nil, false},
			{lb.FeedMessage{Removed: []lb.DeliveryKey{refused.Key()}}, [][]netip.Addr{{vip2}}, false},
			{lb.FeedMessage{Removed: []lb.DeliveryKey{refused.Key()}}, nil, false},
			{lb.FeedMessage{Complete: true, Deliveries: []lb.Delivery{delivery(vip2, 1)}}, [][]netip.Addr{{vip1, vip2}}, false},
		} {
			ends := p.ends.Load()
			p.say(conn, c.m)
			if ended := p.ends.Load() > ends; ended != c.ended {
				t.Errorf("message %d: ended %v", i, ended)
			}
			if d := cmp.Diff(c.want, changes(), cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); d != "" {
				t.Errorf("message %d: %s", i, d)
			}
		}
		if d := f.Delivery(lb.DeliveryKey{Service: nginx, VIP: vip2}); d == nil || *d != delivery(vip2, 1) {
			t.Errorf("got %v", d)
		}
	})
}

func TestContract6ProxyRestartWithinTheHoldChangesNothing(t *testing.T) {
	feedTest(t, func(t *testing.T, p *proxy, f *Feed, changes func() [][]netip.Addr) {
		complete := lb.FeedMessage{Complete: true, Deliveries: []lb.Delivery{delivery(vip1, 1)}}
		conn := p.accept()
		p.say(conn, complete)
		changes()
		for range 3 {
			conn.Close()
			want(t, f, "", false)
			if d := f.Delivery(lb.DeliveryKey{Service: nginx, VIP: vip1}); d == nil {
				t.Error("the last word is forgotten")
			}
			// The new process takes its time: it connects after 10 s and knows what the kernel holds after
			// 19 more.
			time.Sleep(10 * time.Second)
			conn = p.accept()
			time.Sleep(19 * time.Second)
			want(t, f, "", false)
			p.say(conn, complete)
			want(t, f, "", true)
		}
		time.Sleep(time.Hour)
		want(t, f, "", true)
		if got := changes(); got != nil {
			t.Errorf("told of changes: %v", got)
		}
	})
}

// Contract clause 6: of what a restarted proxy does not know yet the last report stays, as long as it counts.
func TestContract6WhatIsUnknownStays(t *testing.T) {
	feedTest(t, func(t *testing.T, p *proxy, f *Feed, changes func() [][]netip.Addr) {
		unknown := func(vip netip.Addr) lb.Delivery {
			d := delivery(vip, 0)
			d.Unknown, d.Refusal = true, lb.Refuse(lb.ReasonNotProgrammed, "not confirmed yet")
			return d
		}
		check := func(when string, vip netip.Addr, want lb.Delivery, told ...[]netip.Addr) {
			t.Helper()
			if got := changes(); !slices.EqualFunc(got, told, slices.Equal[[]netip.Addr]) {
				t.Errorf("%s: told of %v, want %v", when, got, told)
			}
			if d := f.Delivery(lb.DeliveryKey{Service: nginx, VIP: vip}); d == nil || !d.Equal(want) {
				t.Errorf("%s: %+v, want %+v", when, d, want)
			}
		}
		conn := p.accept()
		p.say(conn, lb.FeedMessage{Complete: true, Deliveries: []lb.Delivery{delivery(vip1, 1)}})
		changes()
		conn.Close()
		time.Sleep(time.Second)
		conn = p.accept()
		p.say(conn, lb.FeedMessage{Complete: true, Deliveries: []lb.Delivery{unknown(vip1), unknown(vip2)}})
		check("after a restart", vip1, delivery(vip1, 1), []netip.Addr{vip2})
		check("of a new VIP", vip2, unknown(vip2))
		p.say(conn, lb.FeedMessage{Deliveries: []lb.Delivery{unknown(vip1)}})
		check("while it stays unknown", vip1, delivery(vip1, 1))
		p.say(conn, lb.FeedMessage{Deliveries: []lb.Delivery{delivery(vip1, 2)}})
		check("once it is known", vip1, delivery(vip1, 2), []netip.Addr{vip1})
		conn.Close()
		time.Sleep(time.Minute)
		changes()
		conn = p.accept()
		p.say(conn, lb.FeedMessage{Complete: true, Deliveries: []lb.Delivery{unknown(vip1)}})
		check("after the hold", vip1, unknown(vip1), nil)
	})
}

func TestContract1FeedLostForLongerThanTheHold(t *testing.T) {
	feedTest(t, func(t *testing.T, p *proxy, f *Feed, changes func() [][]netip.Addr) {
		conn := p.accept()
		p.say(conn, lb.FeedMessage{Complete: true, Deliveries: []lb.Delivery{delivery(vip1, 1)}})
		changes()
		conn.Close()
		time.Sleep(29 * time.Second)
		want(t, f, "", false)
		// A connection without a word does not stop the hold, nor does one that is lost again begin it
		// anew.
		conn = p.accept()
		conn.Close()
		time.Sleep(2 * time.Second)
		want(t, f, lb.ReasonFeedLost, false)
		if got := changes(); len(got) != 1 || got[0] != nil {
			t.Errorf("told of %v, want of everything once", got)
		}
		conn = p.accept()
		want(t, f, lb.ReasonFeedLost, false)
		p.say(conn, lb.FeedMessage{Complete: true})
		want(t, f, "", true)
		if got := changes(); len(got) != 1 || got[0] != nil {
			t.Errorf("told of %v, want of everything once", got)
		}
	})
}

func TestContract7AFeedThatMakesNoSenseIsHeldNotBelieved(t *testing.T) {
	for name, line := range map[string]string{
		"not complete at first": `{"deliveries":[]}`,
		"not JSON":              `hello`,
		"cut short":             `{"complete":true,"deliveries":[{"service":`,
		"bad address":           `{"complete":true,"deliveries":[{"vip":"1.2.3"}]}`,
	} {
		t.Run(name, func(t *testing.T) {
			feedTest(t, func(t *testing.T, p *proxy, f *Feed, changes func() [][]netip.Addr) {
				conn := p.accept()
				p.say(conn, lb.FeedMessage{Complete: true, Deliveries: []lb.Delivery{delivery(vip1, 1)}})
				conn.Close()
				changes()
				conn = p.accept()
				if _, err := conn.Write([]byte(line + "\n")); err != nil {
					t.Fatal(err)
				}
				conn.Close()
				want(t, f, "", false)
				if d := f.Delivery(lb.DeliveryKey{Service: nginx, VIP: vip1}); d == nil || changes() != nil {
					t.Error("what was known is gone")
				}
			})
		})
	}
}

func FuzzRead(f *testing.F) {
	var seed bytes.Buffer
	encoder := json.NewEncoder(&seed)
	_ = encoder.Encode(lb.FeedMessage{Complete: true, Deliveries: []lb.Delivery{delivery(vip1, 1)}})
	_ = encoder.Encode(lb.FeedMessage{Removed: []lb.DeliveryKey{{Service: nginx, VIP: vip1}}})
	f.Add(seed.Bytes())
	f.Fuzz(func(t *testing.T, b []byte) {
		var known map[lb.DeliveryKey]lb.Delivery
		first := true
		if err := read(bytes.NewReader(b), func(m lb.FeedMessage) {
			if first && !m.Complete {
				t.Fatal("began with an incomplete message")
			}
			first = false
			known, _, _ = merge(known, m)
		}); err == nil {
			t.Fatal("a feed that ends is no error")
		}
	})
}

func TestDialUnix(t *testing.T) {
	path := filepath.Join(t.TempDir(), "feed.sock")
	if _, err := DialUnix(path)(t.Context()); err == nil {
		t.Error("connected to a socket that is not there")
	}
	listener, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	conn, err := DialUnix(path)(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	conn.Close()
}

func TestContract2EndpointsAlone(t *testing.T) {
	service := lb.Service{Key: nginx, ExternalPolicy: lb.Local,
		Ports: []lb.ServicePort{{Name: "http", Protocol: lb.TCP, Port: 80}, {Name: "https", Protocol: lb.TCP, Port: 443}}}
	endpoint := func(addr, node string, ready, terminating bool) lb.Endpoint {
		return lb.Endpoint{Addr: netip.MustParseAddr(addr), Node: node, Ready: ready, Serving: true, Terminating: terminating}
	}
	slice := func(endpoints ...lb.Endpoint) lb.Slice {
		return lb.Slice{Service: nginx, Family: lb.IPv4,
			Ports:     []lb.SlicePort{{Name: "http", Protocol: lb.TCP, Port: 80}, {Name: "https", Protocol: lb.TCP, Port: 443}},
			Endpoints: endpoints}
	}
	for _, c := range []struct {
		name                                     string
		slices                                   []lb.Slice
		ready, serving, localReady, localServing int
		reason                                   lb.Reason
	}{
		{"none", nil, 0, 0, 0, 0, lb.ReasonNoBackends},
		{
			"here and there",
			[]lb.Slice{slice(endpoint("192.168.1.1", "here", true, false), endpoint("192.168.2.1", "there", true, false))}, 2, 0,
			1, 0, ""},
		{"there", []lb.Slice{slice(endpoint("192.168.2.1", "there", true, false))}, 1, 0, 0, 0, lb.ReasonNoLocalBackends},
		{
			"terminating here, ready there",
			[]lb.Slice{slice(endpoint("192.168.1.1", "here", false, true), endpoint("192.168.2.1", "there", true, false))}, 1, 0,
			0, 1, lb.ReasonNoLocalBackends},
		{"terminating here, none ready", []lb.Slice{slice(endpoint("192.168.1.1", "here", false, true))}, 0, 1, 0, 1, ""},
		{
			"the other family",
			[]lb.Slice{{Service: nginx, Family: lb.IPv6, Ports: slice().Ports,
				Endpoints: []lb.Endpoint{endpoint("2001:db8::1", "here", true, false)}}}, 0, 0, 0, 0, lb.ReasonNoBackends},
	} {
		t.Run(c.name, func(t *testing.T) {
			for _, slicesInOrder := range [][]lb.Slice{c.slices, append(slices.Clone(c.slices), c.slices...)} {
				got := Endpoints(service, vip1, slicesInOrder, "here")
				want := lb.Delivery{Service: nginx, VIP: vip1, Policy: lb.Local, Ready: c.ready, Serving: c.serving,
					LocalReady: c.localReady, LocalServing: c.localServing}
				if got != want || got.Deliverable() != c.reason {
					t.Errorf("got %+v, %q; want %+v, %q", got, got.Deliverable(), want, c.reason)
				}
			}
		})
	}
}

// chosen is Endpoints as the proxy chooses for each port.
func chosen(s lb.Service, vip netip.Addr, all []lb.Slice, node string) lb.Delivery {
	d := lb.Delivery{Service: s.Key, VIP: vip, Policy: s.ExternalPolicy}
	count := func(list func(lb.Usable) []lb.Backend) (ready, serving int) {
		addrs := map[netip.Addr]bool{}
		for _, port := range s.Ports {
			for _, b := range list(lb.Choose(all, port.Name, port.Protocol, lb.FamilyOf(vip), lb.Place{Node: node})) {
				addrs[b.Addr.Addr()] = addrs[b.Addr.Addr()] || b.Ready
			}
		}
		for _, isReady := range addrs {
			if isReady {
				ready++
			} else {
				serving++
			}
		}
		return ready, serving
	}
	d.Ready, d.Serving = count(func(u lb.Usable) []lb.Backend { return u.Cluster })
	d.LocalReady, d.LocalServing = count(func(u lb.Usable) []lb.Backend { return u.Local })
	return d
}

// The speaker counts the endpoints that the proxy would choose.
func TestEndpointsAreThoseThatAreChosen(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	some := func(n int) bool { return random.IntN(n) == 0 }
	ports := []lb.SlicePort{{Name: "a", Protocol: lb.TCP, Port: 1}, {Name: "a", Protocol: lb.UDP, Port: 1},
		{Name: "b", Protocol: lb.TCP, Port: 2}, {Name: "c", Protocol: lb.TCP, Port: 3}}
	for range 20_000 {
		service := lb.Service{Key: nginx,
			Ports: []lb.ServicePort{{Name: "a", Protocol: lb.TCP}, {Name: "b", Protocol: lb.TCP}}}
		if some(2) {
			service.Ports = append(service.Ports, lb.ServicePort{Name: "a", Protocol: lb.UDP})
		}
		hints := random.IntN(3) // nowhere, here and there, everywhere
		var all []lb.Slice
		for range random.IntN(4) {
			slice := lb.Slice{Family: lb.IPv4}
			if some(8) {
				slice.Family = lb.IPv6
			}
			for _, p := range ports {
				if some(2) {
					slice.Ports = append(slice.Ports, p)
				}
			}
			for range random.IntN(4) {
				n := random.IntN(6)
				ep := lb.Endpoint{Addr: netip.AddrFrom4([4]byte{10, 0, 0, byte(n)}), Node: []string{"here", "there", ""}[n%3],
					Ready: some(2), Serving: some(2), Terminating: some(2)}
				if hints == 2 || hints == 1 && n > 2 {
					ep.ForNodes = []string{[]string{"here", "there"}[n%2]}
				}
				slice.Endpoints = append(slice.Endpoints, ep)
			}
			all = append(all, slice)
		}
		if got, want := Endpoints(service, vip1, all, "here"), chosen(service, vip1, all, "here"); got != want {
			t.Fatalf("ports %v, slices %+v:\n got %+v\nwant %+v", service.Ports, all, got, want)
		}
	}
}

// Contract clause 11: what a Service costs grows with the ports and with the endpoints of its slices, and not with the
// product of both and its own ports. The API server takes these.
func TestContract11EndpointsCostPortsAndEndpoints(t *testing.T) {
	service, slice := lb.Service{Key: nginx}, lb.Slice{Family: lb.IPv4}
	for i := range 20_000 {
		name := fmt.Sprint("p", i)
		slice.Ports = append(slice.Ports, lb.SlicePort{Name: name, Protocol: lb.TCP, Port: uint16(i + 1)})
		service.Ports = append(service.Ports, lb.ServicePort{Name: name, Protocol: lb.TCP, Port: uint16(i + 1)})
	}
	for i := range 1000 {
		slice.Endpoints = append(slice.Endpoints, lb.Endpoint{Addr: netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)}),
			Node: "here", Ready: true})
	}
	got := Endpoints(service, vip1, slices.Repeat([]lb.Slice{slice}, 100), "here")
	if got.Ready != 1000 || got.LocalReady != 1000 {
		t.Errorf("%+v", got)
	}
}

// TestWaitingForTheProxyIsLoggedOnce checks that a proxy that is not there yet is news, once,
// whatever the attempts to connect fail with.
func TestWaitingForTheProxyIsLoggedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
		defer cancel()
		var out bytes.Buffer
		attempts := 0
		f := NewFeed(Options{Hold: 30 * time.Second, Log: slog.New(slog.NewTextHandler(&out, nil)),
			Dial: func(context.Context) (net.Conn, error) {
				attempts++
				return nil, fmt.Errorf("attempt %d", attempts)
			},
		})
		if err := f.Run(ctx); err != nil {
			t.Error(err)
		}
		_, line, _ := strings.Cut(out.String(), "level=")
		want := `INFO msg="waiting for the feed of the proxy" error="connect to the proxy: attempt 1"` + "\n"
		if line != want || attempts < 100 {
			t.Errorf("after %d attempts logged %q, want %q", attempts, line, want)
		}
	})
}

// A change of what comes in through VRFs is news for all VIPs, and what was said last stays while the proxy restarts.
func TestVRFsAreHeardOf(t *testing.T) {
	var heard []string
	f := NewFeed(Options{Log: slog.New(slog.DiscardHandler), Changed: func(vips []netip.Addr) {
		heard = append(heard, fmt.Sprint(vips))
	}})
	for _, step := range []struct {
		vrfs map[string]string
		want string
	}{
		{map[string]string{"red": ""}, "[[]]"}, {map[string]string{"red": ""}, "[]"},
		{map[string]string{"red": "the VRF is down"}, "[[]]"}, {nil, "[[]]"}, {nil, "[]"},
	} {
		heard = []string{}
		f.take(lb.FeedMessage{Complete: f.reason != "", VRFs: step.vrfs})
		if got := fmt.Sprint(heard); got != step.want || len(f.VRFs()) != len(step.vrfs) || f.VRFs()["red"] != step.vrfs["red"] {
			t.Errorf("%v: told %s, want %s; has %v", step.vrfs, got, step.want, f.VRFs())
		}
	}
	f.take(lb.FeedMessage{VRFs: map[string]string{"red": ""}})
	f.wait()
	f.lost()
	defer f.stopHold()
	if _, known := f.VRFs()["red"]; !known {
		t.Error("forgotten while the proxy restarts")
	}
}

// Whether the proxy asks for what is not announced is news for all VIPs, and stays while the proxy restarts.
func TestGatesAreHeardOf(t *testing.T) {
	var heard []string
	f := NewFeed(Options{Log: slog.New(slog.DiscardHandler), Changed: func(vips []netip.Addr) {
		heard = append(heard, fmt.Sprint(vips))
	}})
	for _, step := range []struct {
		gates bool
		want  string
	}{{false, "[[]]"}, {true, "[[]]"}, {true, "[]"}, {false, "[[]]"}, {true, "[[]]"}} {
		heard = []string{}
		f.take(lb.FeedMessage{Complete: f.reason != "", Gates: step.gates})
		if got := fmt.Sprint(heard); got != step.want || f.Gates() != step.gates {
			t.Errorf("%v: told %s, want %s; asks: %v", step.gates, got, step.want, f.Gates())
		}
	}
	f.wait()
	f.lost()
	defer f.stopHold()
	if !f.Gates() {
		t.Error("forgotten while the proxy restarts")
	}
}
