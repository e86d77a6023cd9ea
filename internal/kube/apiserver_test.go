package kube

import (
	"bufio"
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
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
			asked: service + " " + one + " " + two, again: service + " " + one + " " + two},
		"a slow one is late": {answers: "slow silent ok", want: two, after: 2 * dialNext,
			asked: service + " " + one + " " + two, again: two, log: "answers at another address"},
		"all refuse": {answers: "refused refused refused", asked: service + " " + one + " " + two,
			again: service + " " + one + " " + two},
		"all are silent": {answers: "silent silent silent", after: dialTimeout, asked: service + " " + one + " " + two,
			again: service + " " + one + " " + two},
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
				if (err != nil) != (c.want == "") || err == nil && conn.(*heardConn).Conn.(countedConn).address != c.want {
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

// pipes are addresses of API servers that answer over pipes: "serves", "mute" takes a connection and says nothing,
// "hangs" answers no request, "refused".
type pipes struct {
	t       *testing.T
	cert    tls.Certificate
	answers map[string]string
	ended   sync.WaitGroup
}

func (p *pipes) dial(_ context.Context, _, address string) (net.Conn, error) {
	if p.answers[address] == "refused" {
		return nil, errors.New("dial " + address + ": connection refused")
	}
	client, server := net.Pipe()
	p.ended.Go(func() {
		defer server.Close()
		if p.answers[address] == "mute" {
			<-p.t.Context().Done()
			return
		}
		secure := tls.Server(server, &tls.Config{Certificates: []tls.Certificate{p.cert}})
		for requests := bufio.NewReader(secure); ; {
			if _, err := http.ReadRequest(requests); err != nil {
				return
			}
			if p.answers[address] == "hangs" {
				<-p.t.Context().Done()
				return
			}
			if _, err := io.WriteString(secure, "HTTP/1.1 204 No Content\r\n\r\n"); err != nil {
				return
			}
		}
	})
	return client, nil
}

// Whatever keeps an agent from the API server is logged within five seconds, with the address, once.
func TestSaysWhatKeepsItFromTheAPIServer(t *testing.T) {
	const server = "192.0.2.1:6443"
	cert, roots := certificate(t, "192.0.2.1")
	for name, c := range map[string]struct {
		answer    string
		roots     *x509.CertPool
		want      string // in the log
		connected bool   // which is no trouble, however slow the answer
	}{
		"refused":             {answer: "refused", want: "connection refused"},
		"mute":                {answer: "mute", want: "no answer from " + server + " for 3s"},
		"a wrong certificate": {answer: "serves", roots: x509.NewCertPool(), want: "failed to verify certificate"},
		"no answer":           {answer: "hangs", roots: roots, want: "has not answered a request yet", connected: true},
		"all is well":         {answer: "serves", roots: roots, connected: true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				servers := &pipes{t: t, cert: cert, answers: map[string]string{server: c.answer}}
				var log bytes.Buffer
				client := &Client{dialer: newDialer(slog.New(slog.NewTextHandler(&log, nil)), server, nil)}
				client.dialer.dial = servers.dial
				transport := &http.Transport{DialContext: client.dialer.DialContext, TLSHandshakeTimeout: 10 * time.Second,
					TLSClientConfig: &tls.Config{RootCAs: c.roots}}
				ctx, cancel := context.WithCancel(t.Context())
				var requests sync.WaitGroup
				for range 3 {
					requests.Go(func() {
						request, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+server+"/api/v1/nodes", nil)
						if err != nil {
							t.Error(err)
							return
						}
						if response, err := (reporting{client.dialer, transport}).RoundTrip(request); err == nil {
							response.Body.Close()
						}
					})
				}
				time.Sleep(5 * time.Second)
				synctest.Wait()
				said := log.String()
				if c.want == "" && said != "" || !strings.Contains(said, c.want) || strings.Count(said, "\n") > 1 ||
					said != "" && !strings.Contains(said, server) {
					t.Errorf("logged %q, want %q once, with %s", said, c.want, server)
				}
				if err := client.Unreachable(); (err == nil) != c.connected {
					t.Errorf("unreachable: %v", err)
				}
				cancel()
				requests.Wait()
				transport.CloseIdleConnections()
			})
		})
	}
}

// An address that takes connections and says nothing is not the first that the next connection tries.
func TestPassesOverMuteAddress(t *testing.T) {
	const mute, works = "192.0.2.1:6443", "192.0.2.2:6443"
	cert, roots := certificate(t, "192.0.2.1")
	synctest.Test(t, func(t *testing.T) {
		servers := &pipes{t: t, cert: cert, answers: map[string]string{mute: "mute", works: "serves"}}
		d := newDialer(slog.New(slog.DiscardHandler), mute, []string{mute, works})
		d.dial = servers.dial
		transport := &http.Transport{DialContext: d.DialContext, TLSHandshakeTimeout: 10 * time.Second,
			TLSClientConfig: &tls.Config{RootCAs: roots}}
		defer transport.CloseIdleConnections()
		for i, fails := range []bool{true, false} {
			request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://"+mute+"/", nil)
			if err != nil {
				t.Fatal(err)
			}
			response, err := reporting{d, transport}.RoundTrip(request)
			if err == nil {
				response.Body.Close()
			}
			if (err != nil) != fails {
				t.Errorf("request %d: %v", i, err)
			}
		}
	})
}

// The client that programs use notes it too.
func TestClientOfAWrongCertificate(t *testing.T) {
	server := httptest.NewTLSServer(http.NotFoundHandler())
	defer server.Close()
	server.Config.ErrorLog = log.New(io.Discard, "", 0)
	file := filepath.Join(t.TempDir(), "kubeconfig")
	if err := clientcmd.WriteToFile(clientcmdapi.Config{CurrentContext: "c",
		Clusters: map[string]*clientcmdapi.Cluster{"c": {Server: server.URL}},
		Contexts: map[string]*clientcmdapi.Context{"c": {Cluster: "c"}}}, file); err != nil {
		t.Fatal(err)
	}
	c, err := Connect(Options{Kubeconfig: file, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	_, err = c.core.Namespaces().Get(t.Context(), "default", metav1.GetOptions{})
	if err == nil || !strings.Contains(c.Trouble(), "failed to verify certificate") {
		t.Errorf("the request ended with %v, and the trouble is %q", err, c.Trouble())
	}
}

// certificate returns one for an address, and what trusts it.
func certificate(t *testing.T, addr string) (tls.Certificate, *x509.CertPool) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	// The clock of synctest begins in the year 2000.
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotBefore: time.Unix(0, 0),
		NotAfter: time.Now().Add(24 * time.Hour), IPAddresses: []net.IP{net.ParseIP(addr)}}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	parsed, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AddCert(parsed)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, roots
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
