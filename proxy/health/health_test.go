package health

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/nstest"
)

var web = lb.Key{Namespace: "default", Name: "web"}

// bench is an actor in a namespace of its own.
type bench struct {
	*Actor
	t       *testing.T
	ns      *nstest.NS
	now     time.Time
	refuse  error
	reports []string
	answers []string
	told    State
}

func newBench(t *testing.T) *bench {
	b := &bench{t: t, ns: nstest.New(t), now: time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)}
	b.Actor = New(Deps{
		Log: slog.New(slog.DiscardHandler), Now: func() time.Time { return b.now }, NodeAddress: "127.0.0.1:10256",
		Listen: func(network, address string) (l net.Listener, err error) {
			if b.refuse != nil {
				return nil, b.refuse
			}
			b.ns.Do(t, func() error { l, err = net.Listen(network, address); return nil })
			return l, err
		},
		Answered: func(path string, code int) { b.answers = append(b.answers, fmt.Sprint(path, " ", code)) },
		Failed: func(key lb.Key, port uint16, err error) {
			text := "fine"
			if err != nil {
				text = err.Error()
			}
			b.reports = append(b.reports, key.String()+" "+text)
		},
	})
	t.Cleanup(b.closeAll)
	return b
}

// State is all that an actor is told.
type State struct {
	Services map[lb.Key]Service
	Node
}

// tell tells the actor what differs from what it was told before.
func (b *bench) tell(s State) {
	b.SetNode(s.Node)
	for key := range b.told.Services {
		if _, ok := s.Services[key]; !ok {
			b.Update(map[lb.Key]Service{key: {}})
		}
	}
	b.Update(s.Services)
	b.told = s
}

func (b *bench) set(s State) {
	b.t.Helper()
	b.tell(s)
	if err := b.apply(); err != nil {
		b.t.Fatal(err)
	}
}

// get returns the answer of a server, or the error of not reaching it.
func (b *bench) get(url string) (status int, body map[string]any, header http.Header, err error) {
	b.t.Helper()
	var conn net.Conn
	address, _, _ := strings.Cut(strings.TrimPrefix(url, "http://"), "/")
	b.ns.Do(b.t, func() error { conn, err = net.Dial("tcp", address); return nil })
	if err != nil {
		return 0, nil, nil, err
	}
	client := http.Client{Transport: &http.Transport{Dial: func(string, string) (net.Conn, error) { return conn, nil },
		DisableKeepAlives: true}}
	resp, err := client.Get(url)
	if err != nil {
		return 0, nil, nil, err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		b.t.Fatal(err)
	}
	if err := json.Unmarshal(text, &body); err != nil && resp.StatusCode != http.StatusNotFound {
		b.t.Fatalf("body %q: %v", text, err)
	}
	return resp.StatusCode, body, resp.Header, nil
}

func state(local int) State {
	return State{
		Services: map[lb.Key]Service{web: {Port: 32000, Local: map[lb.Family]int{lb.IPv4: local, lb.IPv6: local + 1}}},
		Node:     Node{Known: true, Unapplied: map[lb.Family]time.Time{lb.IPv4: {}, lb.IPv6: {}}},
	}
}

func TestContract4HealthPort(t *testing.T) {
	b := newBench(t)
	change := func(f func(*State)) func() State {
		return func() State { s := state(3); f(&s); return s }
	}
	for _, tt := range []struct {
		name    string
		state   func() State
		url     string
		status  int
		local   float64
		healthy bool
	}{
		{"ready endpoints", change(func(*State) {}), "http://127.0.0.1:32000/", 200, 3, true},
		{"any path", change(func(*State) {}), "http://127.0.0.1:32000/any/path", 200, 3, true},
		{"the other family has its own count", change(func(*State) {}), "http://[::1]:32000/", 200, 4, true},
		{"none", func() State { return state(0) }, "http://127.0.0.1:32000/", 503, 0, true},
		{"node leaves", change(func(s *State) { s.Leaving = lb.ReasonNodeLeaving }), "http://127.0.0.1:32000/", 503, 3, true},
		{"changes wait for a while", change(func(s *State) { s.Unapplied[lb.IPv4] = b.now.Add(1 - Stale) }),
			"http://127.0.0.1:32000/", 200, 3, true},
		{"changes wait for too long", change(func(s *State) { s.Unapplied[lb.IPv6] = b.now.Add(-Stale) }),
			"http://127.0.0.1:32000/", 503, 3, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b.set(tt.state())
			status, body, header, err := b.get(tt.url)
			if err != nil {
				t.Fatal(err)
			}
			want := map[string]any{
				"service":        map[string]any{"namespace": "default", "name": "web"},
				"localEndpoints": tt.local, "serviceProxyHealthy": tt.healthy,
			}
			if status != tt.status || !reflect.DeepEqual(body, want) {
				t.Errorf("answer %d %v, want %d %v", status, body, tt.status, want)
			}
			for name, value := range map[string]string{
				"Content-Type": "application/json", "X-Content-Type-Options": "nosniff",
				"X-Load-Balancing-Endpoint-Weight": string(rune('0' + int(tt.local))),
			} {
				if header.Get(name) != value {
					t.Errorf("%s: %q, want %q", name, header.Get(name), value)
				}
			}
		})
	}
}

// Ports open, move to another Service and close; a Service that is gone never gets a 200.
func TestContract4PortsFollowServices(t *testing.T) {
	b := newBench(t)
	b.set(state(1))
	moved := state(1)
	moved.Services = map[lb.Key]Service{web: {Port: 32001, Local: map[lb.Family]int{lb.IPv4: 1}},
		{Namespace: "default", Name: "other"}: {Port: 32000, Local: map[lb.Family]int{lb.IPv4: 0}}}
	b.set(moved)
	if status, body, _, err := b.get("http://127.0.0.1:32000/"); err != nil || status != 503 ||
		body["service"].(map[string]any)["name"] != "other" {
		t.Errorf("port 32000 answers %d %v %v", status, body, err)
	}
	if status, _, _, err := b.get("http://127.0.0.1:32001/"); err != nil || status != 200 {
		t.Errorf("port 32001 answers %d %v", status, err)
	}
	if _, _, _, err := b.get("http://[::1]:32000/"); err == nil {
		t.Error("the IPv6 port is still open")
	}
	b.tell(State{}) // the server is still open when a request comes in
	if status, _, _, err := b.get("http://127.0.0.1:32001/"); err != nil || status != 503 {
		t.Errorf("a port without a Service answers %d %v", status, err)
	}
	b.set(State{})
	if _, _, _, err := b.get("http://127.0.0.1:32001/"); err == nil {
		t.Error("the port is still open")
	}
}

func TestPortThatCannotBeOpened(t *testing.T) {
	b := newBench(t)
	b.refuse = errors.New("address already in use")
	b.tell(State{Services: map[lb.Key]Service{web: {Port: 32000, Local: map[lb.Family]int{lb.IPv4: 1}}}})
	for range 3 {
		if b.apply() == nil {
			t.Fatal("no error, so nothing is tried again")
		}
	}
	b.refuse = nil
	if err := b.apply(); err != nil {
		t.Fatal(err)
	}
	if status, _, _, err := b.get("http://127.0.0.1:32000/"); err != nil || status != 200 {
		t.Errorf("answer %d %v", status, err)
	}
	if want := []string{"default/web address already in use", "default/web fine"}; !reflect.DeepEqual(b.reports, want) {
		t.Errorf("reports %q, want %q", b.reports, want)
	}
}

func TestAddresses(t *testing.T) {
	b := newBench(t)
	b.ns.Run(t, "ip", "addr", "add", "192.0.2.7/32", "dev", "lo")
	b.SetAddresses(map[lb.Family][]netip.Addr{lb.IPv4: {netip.MustParseAddr("192.0.2.7")}})
	b.set(state(1))
	if _, _, _, err := b.get("http://192.0.2.7:32000/"); err != nil {
		t.Error(err)
	}
	if _, _, _, err := b.get("http://127.0.0.1:32000/"); err == nil {
		t.Error("open at an address that was not asked for")
	}
}

func TestNodeHealth(t *testing.T) {
	b := newBench(t)
	for _, tt := range []struct {
		name           string
		change         func(*State)
		healthz, livez int
		healthy        bool
	}{
		{"fine", func(*State) {}, 200, 200, true},
		{"own Node not seen", func(s *State) { s.Known = false }, 503, 200, true},
		{"node leaves", func(s *State) { s.Leaving = lb.ReasonNodeLeaving }, 503, 200, true},
		{"one family is stale", func(s *State) { s.Unapplied[lb.IPv6] = b.now.Add(-2 * Stale) }, 503, 503, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := state(0)
			tt.change(&s)
			b.set(s)
			status, body, _, err := b.get("http://127.0.0.1:10256/healthz")
			if err != nil || status != tt.healthz || body["healthy"] != tt.healthy {
				t.Errorf("healthz: %d %v %v", status, body, err)
			}
			if eligible := s.Known && s.Leaving == ""; body["nodeEligible"] != eligible {
				t.Errorf("healthz: %v, want nodeEligible %v", body, eligible)
			}
			if _, ok := body["lastUpdated"]; !ok {
				t.Errorf("healthz: %v lacks lastUpdated", body)
			}
			v4 := body["status"].(map[string]any)["IPv4"].(map[string]any)["healthy"]
			if v4 != true {
				t.Errorf("healthz: %v: IPv4 is fine", body)
			}
			status, body, _, err = b.get("http://127.0.0.1:10256/livez")
			if _, ok := body["nodeEligible"]; err != nil || status != tt.livez || ok {
				t.Errorf("livez: %d %v %v", status, body, err)
			}
		})
	}
}

// The bodies are kube-proxy's to the letter, as some who ask read them with less than a parser; the
// method is of no concern.
func TestBodies(t *testing.T) {
	b := newBench(t)
	ask := func(method, url string) string {
		var answer string
		b.ns.Do(t, func() error {
			address := strings.TrimPrefix(url, "http://")
			address, _, _ = strings.Cut(address, "/")
			conn, err := net.Dial("tcp", address)
			if err != nil {
				return err
			}
			defer conn.Close()
			fmt.Fprintf(conn, "%s /%s HTTP/1.0\r\n\r\n", method, url[strings.LastIndex(url, "/")+1:])
			text, err := io.ReadAll(conn)
			_, answer, _ = strings.Cut(string(text), "\r\n\r\n")
			return err
		})
		return answer
	}
	leaving := state(2)
	leaving.Leaving = lb.ReasonNodeLeaving
	stale := state(2)
	stale.Unapplied[lb.IPv6] = b.now.Add(-2 * Stale)
	const fine, at, then = `{"lastUpdated":"2026-05-01T12:00:00Z","healthy":true}`, `"2026-05-01T12:00:00Z"`,
		`"2026-05-01T11:58:00Z"`
	for _, tt := range []struct {
		name        string
		state       State
		method, url string
		want        string
	}{
		{"service", state(2), "GET", "http://127.0.0.1:32000/",
			"{\n\t\"service\": {\n\t\t\"namespace\": \"default\",\n\t\t\"name\": \"web\"\n\t},\n\t\"localEndpoints\": " +
				"2,\n\t\"serviceProxyHealthy\": true\n}"},
		{"service, another method", state(0), "POST", "http://127.0.0.1:32000/x",
			"{\n\t\"service\": {\n\t\t\"namespace\": \"default\",\n\t\t\"name\": \"web\"\n\t},\n\t\"localEndpoints\": " +
				"0,\n\t\"serviceProxyHealthy\": true\n}"},
		{"healthz", state(2), "GET", "http://127.0.0.1:10256/healthz",
			`{"lastUpdated":` + at + `,"currentTime":` + at + `,"nodeEligible":true,"healthy":true,"status":{"IPv4":` + fine +
				`,"IPv6":` + fine + `}}`},
		{"healthz, node leaves", leaving, "GET", "http://127.0.0.1:10256/healthz",
			`{"lastUpdated":` + at + `,"currentTime":` + at + `,"nodeEligible":false,"healthy":true,"status":{"IPv4":` + fine +
				`,"IPv6":` + fine + `},"reason":"NodeLeaving"}`},
		{"livez, node leaves", leaving, "HEAD", "http://127.0.0.1:10256/livez", ""},
		{"livez", leaving, "GET", "http://127.0.0.1:10256/livez",
			`{"lastUpdated":` + at + `,"currentTime":` + at + `,"healthy":true,"status":{"IPv4":` + fine + `,"IPv6":` + fine +
				`}}`},
		{"livez, a family waits", stale, "GET", "http://127.0.0.1:10256/livez",
			`{"lastUpdated":` + then + `,"currentTime":` + at + `,"healthy":false,"status":{"IPv4":` + fine +
				`,"IPv6":{"lastUpdated":` + then + `,"healthy":false}}}`},
	} {
		b.set(tt.state)
		if got := ask(tt.method, tt.url); got != tt.want {
			t.Errorf("%s: %s\nwant %s", tt.name, got, tt.want)
		}
	}
	if want := []string{"/healthz 200", "/healthz 503", "/livez 200", "/livez 200", "/livez 503"}; !slices.Equal(b.answers,
		want) {
		t.Errorf("counted %q, want %q", b.answers, want)
	}
}

// A server that dies by itself is opened again.
func TestServerThatEndsIsReopened(t *testing.T) {
	b := newBench(t)
	b.set(state(1))
	for _, s := range b.servers {
		s.listener.Close()
		<-s.done
	}
	if err := b.apply(); err != nil {
		t.Fatal(err)
	}
	if status, _, _, err := b.get("http://127.0.0.1:32000/"); err != nil || status != 200 {
		t.Errorf("answer %d %v", status, err)
	}
}

// TestClientsThatHoldConnectionsKeepNobodyOut has a client that opens connections to all ports and
// says nothing, and one that sends a large header.
func TestClientsThatHoldConnectionsKeepNobodyOut(t *testing.T) {
	b := newBench(t)
	services := map[lb.Key]Service{}
	for i := range 8 {
		services[lb.Key{Namespace: "default", Name: fmt.Sprint(i)}] = Service{Port: uint16(30000 + i),
			Local: map[lb.Family]int{lb.IPv4: 1}}
	}
	b.set(State{Services: services, Node: Node{Known: true}})
	dial := func(from, address string) net.Conn {
		t.Helper()
		var conn net.Conn
		b.ns.Do(t, func() (err error) {
			conn, err = (&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}).Dial("tcp", address)
			return err
		})
		t.Cleanup(func() { conn.Close() })
		return conn
	}
	for i := range serviceConnections + 100 {
		dial("127.0.0.66", fmt.Sprintf("127.0.0.1:%d", 30000+i%8))
		if i < nodeConnections+10 {
			dial("127.0.0.66", "127.0.0.1:10256")
		}
	}
	for _, url := range []string{"http://127.0.0.1:30003/", "http://127.0.0.1:10256/healthz"} {
		if status, _, _, err := b.get(url); err != nil || status != http.StatusOK {
			t.Errorf("%s: %d, %v", url, status, err)
		}
	}
	if n := b.ofServices.Len(); n > serviceConnections {
		t.Errorf("%d connections to health ports are open", n)
	}
	if n := b.ofNode.Len(); n > nodeConnections {
		t.Errorf("%d connections to the node's server are open", n)
	}
	large := dial("127.0.0.2", "127.0.0.1:30003")
	fmt.Fprintf(large, "GET / HTTP/1.1\r\nHost: x\r\nX: %s\r\n\r\n", strings.Repeat("x", maxHeader+8<<10))
	if answer, _ := io.ReadAll(large); !strings.Contains(string(answer), "431") {
		t.Errorf("a large header: %q", answer)
	}
}
