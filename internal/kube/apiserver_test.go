package kube

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// apiServers are addresses and how each answers an attempt to connect: "ok", "refused", "silent",
// or "slow", which is after five seconds.
type apiServers struct {
	answers map[string]string

	mu    sync.Mutex
	asked []string
	open  int
}

// take returns what was asked since it was last called, and how many connections are open.
func (s *apiServers) take() (asked string, open int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	asked, s.asked = strings.Join(s.asked, " "), nil
	return asked, s.open
}

type countedConn struct {
	net.Conn
	address string
	closed  func()
}

func (c countedConn) Close() error {
	c.closed()
	return nil
}

func (s *apiServers) dial(ctx context.Context, _, address string) (net.Conn, error) {
	s.mu.Lock()
	s.asked = append(s.asked, address)
	answer := s.answers[address]
	s.mu.Unlock()
	switch answer {
	case "refused":
		return nil, errors.New("dial " + address + ": connection refused")
	case "silent":
		<-ctx.Done()
		return nil, ctx.Err()
	case "slow":
		time.Sleep(5 * time.Second) // however the race ends
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.open++
	return countedConn{address: address, closed: func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.open--
	}}, nil
}

func TestDialer(t *testing.T) {
	const service, one, two = "10.96.0.1:443", "192.0.2.1:6443", "192.0.2.2:6443"
	for name, c := range map[string]struct {
		answers string // of the Service, one and two
		want    string // which one is connected to
		after   time.Duration
		asked   string // by the first connection
		again   string // by the second one
		log     string
	}{
		"the Service works": {answers: "ok ok ok", want: service, asked: service, again: service},
		"it refuses": {answers: "refused ok ok", want: one, asked: service + " " + one, again: one,
			log: "answers at another address"},
		"it is silent": {answers: "silent ok ok", want: one, after: dialNext, asked: service + " " + one, again: one,
			log: "answers at another address"},
		"one is silent too": {answers: "silent silent ok", want: two, after: 2 * dialNext,
			asked: service + " " + one + " " + two, again: two, log: "answers at another address"},
		"it is slow": {answers: "slow silent silent", want: service, after: 5 * time.Second,
			asked: service + " " + one + " " + two, again: service + " " + one + " " + two,
			log: "no answer from 10.96.0.1:443, 192.0.2.1:6443, 192.0.2.2:6443 for 3s"},
		"a slow one is late": {answers: "slow silent ok", want: two, after: 2 * dialNext,
			asked: service + " " + one + " " + two, again: two, log: "answers at another address"},
		"all refuse": {answers: "refused refused refused", asked: service + " " + one + " " + two,
			again: service + " " + one + " " + two, log: "connection refused"},
		"all are silent": {answers: "silent silent silent", after: dialTimeout, asked: service + " " + one + " " + two,
			again: service + " " + one + " " + two, log: "no answer from"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				answers := strings.Fields(c.answers)
				servers := &apiServers{answers: map[string]string{service: answers[0], one: answers[1], two: answers[2]}}
				var log bytes.Buffer
				d := newDialer(slog.New(slog.NewTextHandler(&log, nil)), service, []string{one, two})
				d.dial = servers.dial
				began := time.Now()
				conn, err := d.DialContext(t.Context(), "tcp", service)
				if took := time.Since(began); took != c.after {
					t.Errorf("took %s, want %s", took, c.after)
				}
				if (err != nil) != (c.want == "") || err == nil && conn.(countedConn).address != c.want {
					t.Fatalf("connected to %v (%v), want %q", conn, err, c.want)
				}
				if got, _ := servers.take(); got != c.asked {
					t.Errorf("asked %s, want %s", got, c.asked)
				}
				time.Sleep(time.Minute) // those that come late are closed
				if _, open := servers.take(); open != len(strings.Fields(c.want)) {
					t.Errorf("%d connections are open after one to %q", open, c.want)
				}
				if again, err := d.DialContext(t.Context(), "tcp", service); err == nil {
					again.Close()
				}
				if got, _ := servers.take(); got != c.again {
					t.Errorf("the second time it asked %s, want %s", got, c.again)
				}
				if got := log.String(); c.log == "" && got != "" || !strings.Contains(got, c.log) {
					t.Errorf("logged %s, want %q", got, c.log)
				}
				time.Sleep(time.Minute)
			})
		})
	}
}

// What is asked for another address, such as that of an HTTP proxy, goes there.
func TestDialerOfAnotherAddress(t *testing.T) {
	servers := &apiServers{answers: map[string]string{"proxy:3128": "refused", "192.0.2.1:6443": "ok"}}
	d := newDialer(slog.New(slog.DiscardHandler), "10.96.0.1:443", []string{"192.0.2.1:6443"})
	d.dial = servers.dial
	if _, err := d.DialContext(t.Context(), "tcp", "proxy:3128"); err == nil {
		t.Error("connected")
	}
	if asked, _ := servers.take(); asked != "proxy:3128" {
		t.Errorf("asked %s", asked)
	}
}

func TestAddressesOfAPIServers(t *testing.T) {
	d := newDialer(slog.New(slog.DiscardHandler), "10.96.0.1:443",
		[]string{"api.example.com:6443", "[2001:db8::1]:6443", "[::ffff:192.0.2.1]:6443"})
	if got := fmt.Sprint(d.addresses()); got != "[10.96.0.1 2001:db8::1 192.0.2.1]" {
		t.Errorf("addresses %s", got)
	}
}

func TestCheckServers(t *testing.T) {
	for _, bad := range []string{"", "192.0.2.1", "192.0.2.1:", ":6443", "192.0.2.1:0", "192.0.2.1:65536",
		"2001:db8::1:6443"} {
		if err := checkServers([]string{"192.0.2.1:6443", bad}); err == nil || !strings.Contains(err.Error(), "host:port") {
			t.Errorf("%q: %v", bad, err)
		}
	}
	if err := checkServers([]string{"192.0.2.1:6443", "[2001:db8::1]:6443", "api.example.com:443"}); err != nil {
		t.Error(err)
	}
	if err := checkServers(make([]string, maxServers+1)); err == nil || !strings.Contains(err.Error(), "at most 16") {
		t.Error(err)
	}
}
