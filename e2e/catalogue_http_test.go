package e2e

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/landfall-lb/landfall/e2e/lab"
)

// httpRow is a request as it goes over the wire, and the status that it gets.
type httpRow struct {
	name string
	send string
	code int
	body string
}

// request returns a request of HTTP/1.1.
func request(line string, headers ...string) string {
	return line + " HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + strings.Join(append(headers, "", ""), "\r\n")
}

// anyServer are the rows that each server answers alike.
func anyServer() []httpRow {
	long := strings.Repeat("x", 40<<10)
	return []httpRow{
		{"no HTTP", "hello\r\n\r\n", 400, "Bad Request"},
		{"no version", "GET /healthz\r\n\r\n", 400, "Bad Request"},
		{"version 9.9", "GET /healthz HTTP/9.9\r\nHost: x\r\n\r\n", 505, ""},
		{"no host", "GET /healthz HTTP/1.1\r\n\r\n", 400, "missing required Host header"},
		{"two hosts", "GET /healthz HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400, "Bad Request"},
		{"a host with blanks", "GET /healthz HTTP/1.1\r\nHost: a b\r\n\r\n", 400, "malformed Host header"},
		{"a header without a colon", request("GET /healthz", "nonsense"), 400, "Bad Request"},
		{"a header name with blanks", request("GET /healthz", "a b: c"), 400, "Bad Request"},
		{"a header value with a zero byte", request("GET /healthz", "A: b\x00c"), 400, "Bad Request"},
		{"a line of 40 KiB", request("GET /" + long), 431, "Request Header Fields Too Large"},
		{"a header of 40 KiB", request("GET /healthz", "A: "+long), 431, "Request Header Fields Too Large"},
		{"3,000 headers", request("GET /healthz", strings.Split(strings.Repeat("A: bcdefghijk\n", 3000), "\n")[:3000]...),
			431,
			"Request Header Fields Too Large"},
		{"a method with blanks", "GE T /healthz HTTP/1.1\r\nHost: x\r\n\r\n", 400, "Bad Request"},
		{"lengths that disagree", request("POST /healthz", "Content-Length: 5", "Content-Length: 6"), 400, "Bad Request"},
		{"a length below 0", request("POST /healthz", "Content-Length: -1"), 400, "Bad Request"},
		{"an unknown encoding", request("POST /healthz", "Transfer-Encoding: nonsense"), 501,
			"Unsupported transfer encoding"},
		{"a bad escape", request("GET /%zz"), 400, "Bad Request"},
	}
}

// metricsServer are the rows of the ports of metrics. The API server is asked about the forged
// tokens; stranger is one that it knows.
func metricsServer(stranger string) (plain, forged []httpRow) {
	plain = []httpRow{
		{"POST", request("POST /metrics", "Content-Length: 0"), 405, "Method Not Allowed"},
		{"DELETE", request("DELETE /healthz"), 405, "Method Not Allowed"},
		{"TRACE", request("TRACE /readyz"), 405, "Method Not Allowed"},
		{"an unknown path", request("GET /debug/pprof/"), 404, ""},
		{"the status", request("GET /v1/status"), 404, ""},
		{"a path upwards", request("GET /healthz/../v1/status"), 307, ""},
		{"metrics without a token", request("GET /metrics"), 401, "bearer token"},
		{"metrics with a password", request("GET /metrics", "Authorization: Basic YTpi"), 401, "bearer token"},
		{"metrics with an empty token", request("GET /metrics", "Authorization: Bearer "), 401, "bearer token"},
		{"metrics with a token of 9 KiB", request("GET /metrics", "Authorization: Bearer "+strings.Repeat("x", 9<<10)), 401,
			"bearer token"},
		{"metrics with a stranger's token", request("GET /metrics", "Authorization: Bearer "+stranger), 403,
			"may not get /metrics"},
	}
	forged = []httpRow{
		{"metrics with a made-up token", request("GET /metrics", "Authorization: Bearer x.y.z"), 401,
			"does not accept the token"},
		{"metrics with a token that nobody signed", request("GET /metrics",
			"Authorization: Bearer eyJhbGciOiJub25lIn0.eyJzdWIiOiJzeXN0ZW06YWRtaW4ifQ."), 401, "does not accept the token"},
		{"metrics with another signature", request("GET /metrics", "Authorization: Bearer "+stranger[:len(stranger)-8]+
			"AAAAAAAA"), 401, "does not accept the token"},
	}
	return plain, forged
}

// healthServer are the further rows of the node's health port.
func healthServer() []httpRow {
	return []httpRow{
		{"an unknown path", request("GET /metrics"), 404, ""},
		{"a body of 1 MiB", request("POST /livez", "Content-Length: 1048576") + strings.Repeat("x", 1<<20), 200, ""},
	}
}

// dashboardServer are the rows of the dashboard, which is at the port of the controller's metrics; user is the token
// of one who may see it.
func dashboardServer(stranger, user string) []httpRow {
	get := func(path, token string) string { return request("GET "+path, "Authorization: Bearer "+token) }
	return []httpRow{
		{"the dashboard without a token", request("GET /dashboard/"), 401, "bearer token"},
		{"its data without a token", request("GET /dashboard/data"), 401, "bearer token"},
		{"the dashboard with a stranger's token", get("/dashboard/", stranger), 403, "may not get /dashboard"},
		{"the dashboard with a made-up token", get("/dashboard/", "a.b.c"), 401, "does not accept the token"},
		{"POST to the dashboard", request("POST /dashboard/data", "Content-Length: 0"), 405, "Method Not Allowed"},
		{"a path from the dashboard upwards", get("/dashboard/../metrics", user), 307, "Temporary Redirect"},
		{"an escaped path upwards", get("/dashboard/..%2f..%2fetc%2fpasswd", user), 404, "404 page not found"},
		{"an unknown page of the dashboard", get("/dashboard/x", user), 404, "404 page not found"},
		{"a search for 257 bytes", get("/dashboard/data?q="+strings.Repeat("x", 257), user), 400, "256 bytes at most"},
		{"a node of 257 bytes", get("/dashboard/data?node="+strings.Repeat("x", 257), user), 400, "256 bytes at most"},
		{"an offset below 0", get("/dashboard/data?offset=-1", user), 400, "offset is no number"},
		{"a limit beyond 32 bits", get("/dashboard/data?limit=4294967296", user), 400, "limit is no number"},
		{"a limit of 1 billion", get("/dashboard/data?limit=1000000000", user), 200, `"total"`},
		{"metrics with the dashboard's token", get("/metrics", user), 403, "may not get /metrics"},
	}
}

// dashboardToken returns a token as landfallctl gets it.
func dashboardToken(t *testing.T, l *lab.Lab) string {
	t.Helper()
	token, err := l.Kube().CoreV1().ServiceAccounts(lab.Namespace).CreateToken(t.Context(), "landfall-dashboard",
		&authenticationv1.TokenRequest{}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return token.Status.Token
}

// hostileHTTP sends requests that no client would to the ports of the agents.
func hostileHTTP(t *testing.T, l *lab.Lab) {
	stranger := tokenOf(t, l, "nobody")
	metrics, forged := metricsServer(stranger)
	for _, a := range []*lab.Agent{l.Agents("controller")[0], l.Agent("speaker", besieged), l.Agent("proxy", besieged),
		l.Agent("relay", besieged)} {
		for _, addr := range []netip.Addr{nodeAddr(l, a.Node), lab.Twin(nodeAddr(l, a.Node))} {
			address := net.JoinHostPort(addr.String(), metricsPorts[a.Program])
			t.Run(a.Program+" at "+addr.String(), func(t *testing.T) {
				tlsRows(t, l, address)
				httpRows(t, l, address, true, slices.Concat(anyServer(), metrics, forged))
				if a.Program == "controller" {
					httpRows(t, l, address, true, dashboardServer(stranger, dashboardToken(t, l)))
				}
				crowd(t, l, address, true)
			})
		}
	}
	for _, addr := range []netip.Addr{nodeAddr(l, besieged), lab.Twin(nodeAddr(l, besieged))} {
		health := net.JoinHostPort(addr.String(), "10256")
		t.Run("node health at "+addr.String(), func(t *testing.T) {
			httpRows(t, l, health, false, append(anyServer(), healthServer()...))
			crowd(t, l, health, false)
		})
	}
	t.Run("health of a Service", func(t *testing.T) { hostileServiceHealth(t, l) })
}

// hostileServiceHealth sends requests to the port that tells of a Service with policy Local, on a node with a pod.
func hostileServiceHealth(t *testing.T, l *lab.Lab) {
	if err := l.AddService(t.Context(), lab.Service{Namespace: "far", Name: "local", App: "my-nginx", Type: "LoadBalancer",
		ExternalTrafficPolicy: "Local", Ports: []lab.Port{{Port: 8080}}}); err != nil {
		t.Fatal(err)
	}
	services := l.Kube().CoreV1().Services("far")
	defer func() {
		if err := services.Delete(context.WithoutCancel(t.Context()), "local", metav1.DeleteOptions{}); err != nil {
			t.Error(err)
		}
	}()
	s, err := services.Get(t.Context(), "local", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	node := nodeAddr(l, l.Pods("my-nginx")[0].Node).String()
	port := net.JoinHostPort(node, strconv.Itoa(int(s.Spec.HealthCheckNodePort)))
	httpRows(t, l, port, false, append(anyServer(), httpRow{"GET", request("GET /"), 200, "localEndpoints"}))
	crowd(t, l, port, false)
}

// nodeAddr returns the address of a node.
func nodeAddr(l *lab.Lab, name string) netip.Addr {
	nodes := l.Cluster().Nodes
	return nodes[slices.IndexFunc(nodes, func(n lab.Node) bool { return n.Name == name })].Addr
}

// dialHTTP opens a connection, over TLS or not.
func dialHTTP(t *testing.T, l *lab.Lab, address string, secure bool) (net.Conn, error) {
	t.Helper()
	conn, err := l.Dial(t.Context(), hostileHost, "tcp", address)
	if err != nil {
		return nil, err
	}
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		return nil, err
	}
	if secure {
		return tls.Client(conn, &tls.Config{InsecureSkipVerify: true}), nil
	}
	return conn, nil
}

func httpRows(t *testing.T, l *lab.Lab, address string, secure bool, rows []httpRow) {
	for _, row := range rows {
		t.Run(row.name, func(t *testing.T) {
			eventually(t, "the answer", func() error { // an unknown token is asked about once a second
				conn, err := dialHTTP(t, l, address, secure)
				if err != nil {
					return err
				}
				defer conn.Close()
				go func() { _, _ = io.WriteString(conn, row.send) }() // a server may answer before it has all
				response, err := http.ReadResponse(bufio.NewReader(conn), nil)
				if err != nil {
					return err
				}
				defer response.Body.Close()
				body, _ := io.ReadAll(response.Body) // the connection may be cut off in it
				if response.StatusCode != row.code || !strings.Contains(response.Status+" "+string(body), row.body) {
					return fmt.Errorf("%s: %s", response.Status, body)
				}
				return nil
			})
		})
	}
}

// beginning is what a connection begins with, and what comes of it: a line in the log, or an
// answer.
type beginning struct{ name, send, comes string }

// noTLS are beginnings that are no TLS.
func noTLS() []beginning {
	return []beginning{
		{"noise", strings.Repeat("\xff\x00\x13", 50), ""},
		{"SSH", "SSH-2.0-x\r\n", ""},
		{"a greeting of 64 KiB", "\x16\x03\x01\xff\xff" + strings.Repeat("a", 70000), "\x15\x03\x01\x00\x02\x02\x16"},
		{"an alert", "\x15\x03\x03\x00\x02\x02\x28", ""},
		{"data before the greeting", "\x17\x03\x03\x00\x05hello", ""},
	}
}

// tlsRows are beginnings of connections that are no TLS of today.
func tlsRows(t *testing.T, l *lab.Lab, address string) {
	t.Run("HTTP to the port of TLS", func(t *testing.T) {
		httpRows(t, l, address, false, []httpRow{{"GET", request("GET /healthz"), 400,
			"Client sent an HTTP request to an HTTPS server"}})
	})
	for _, row := range noTLS() {
		t.Run(row.name, func(t *testing.T) {
			conn, err := dialHTTP(t, l, address, false)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			go func() { _, _ = io.WriteString(conn, row.send) }()
			said, err := io.ReadAll(conn)
			if string(said) != row.comes || err != nil && !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("an answer %q, %v, want %q", said, err, row.comes)
			}
		})
	}
	for _, version := range []uint16{tls.VersionTLS10, tls.VersionTLS11} {
		t.Run(tls.VersionName(version), func(t *testing.T) {
			conn, err := dialHTTP(t, l, address, false)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			err = tls.Client(conn, &tls.Config{InsecureSkipVerify: true, MinVersion: version,
				MaxVersion: version}).HandshakeContext(t.Context())
			if err == nil || !strings.Contains(err.Error(), "protocol version not supported") {
				t.Error(err)
			}
		})
	}
}

// crowd opens many connections that say nothing, beside which others are answered.
func crowd(t *testing.T, l *lab.Lab, address string, secure bool) {
	t.Run("200 connections that say nothing", func(t *testing.T) {
		for range 200 {
			conn, err := l.Dial(t.Context(), hostileHost, "tcp", address)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
		}
		scheme := "http://"
		if secure {
			scheme = "https://"
		}
		eventually(t, "another client is answered", func() error {
			code, body, err := l.Get(t.Context(), lab.FarClientName, scheme+address+"/healthz")
			if err == nil && code != http.StatusOK {
				err = errors.New(body)
			}
			return err
		})
	})
}
