package main

import (
	"context"
	"crypto/rand"
	"crypto/subtle"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httputil"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/landfall-lb/landfall/internal/kube"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/listen"
)

const (
	dashboardPath = "/dashboard/"
	// tokenValid is how long a token for the dashboard is asked for: the least that the API server gives.
	tokenValid = 10 * time.Minute
	// Limits of the server on this machine.
	dashboardConnections = 32
	dashboardTimeout     = 30 * time.Second
	tunnels              = 4
)

func dashboardCommand(o *options) *cobra.Command {
	port := uint16(0)
	cmd := &cobra.Command{
		Use: "dashboard", Short: "Show a page with pools, addresses, sessions and problems in a browser",
		Long: "Serve the controller's dashboard at an address of this machine's own (127.0.0.1), and print it. The " +
			"address has a secret in it, by which other users and pages do not get the data. It passes requests to a " +
			"controller through the API server (pods/portforward), as a ServiceAccount that may see the dashboard and " +
			"nothing else (serviceaccounts/token): your own credentials never leave this machine. It ends with Ctrl-C.",
		Example: "  landfallctl dashboard\n  landfallctl dashboard --port 8080",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return runDashboard(cmd.Context(), *o, port, cmd.OutOrStdout())
		},
	}
	cmd.Flags().Uint16Var(&port, "port", 0, "TCP `port` on 127.0.0.1 (default: any that is free)")
	return cmd
}

func runDashboard(ctx context.Context, o options, port uint16, stdout io.Writer) error {
	short, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	client, _, err := o.connect(short)
	if err != nil {
		return err
	}
	way := newWay(client, o.home())
	if err := way.try(short); err != nil {
		return o.late(short, client, err)
	}
	listener, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(int(port))))
	if err != nil {
		return fmt.Errorf("--port: %w", err)
	}
	local := newLocal(listener.Addr().String(), rand.Text(), way)
	server := &http.Server{Handler: local, ReadHeaderTimeout: dashboardTimeout, WriteTimeout: dashboardTimeout,
		IdleTimeout: time.Minute, MaxHeaderBytes: 16 << 10}
	defer context.AfterFunc(ctx, func() { server.Close() })()
	fmt.Fprintf(stdout, "%s\n", local.url())
	err = server.Serve(listen.Limit(listener, listen.NewRoom[net.Conn](dashboardConnections)))
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}

// local serves the dashboard on this machine. Every process and every page of a browser can reach the
// port, so its paths begin with a secret; and it answers only under its own address, so that a page whose
// name leads to 127.0.0.1 is not the same origin (DNS rebinding).
type local struct {
	address, secret string
	proxy           http.Handler
}

func newLocal(address, secret string, way http.RoundTripper) *local {
	return &local{address: address, secret: secret, proxy: &httputil.ReverseProxy{
		Transport: way,
		Rewrite: func(r *httputil.ProxyRequest) {
			rest := strings.TrimPrefix(r.In.URL.Path, "/"+secret+"/")
			tag := r.In.Header.Get("If-None-Match")
			r.Out.Header = http.Header{}
			if tag != "" {
				r.Out.Header.Set("If-None-Match", tag)
			}
			r.Out.URL.Scheme, r.Out.URL.Host, r.Out.Host = "https", "landfall-controller", ""
			r.Out.URL.Path, r.Out.URL.RawPath = dashboardPath+rest, ""
		},
		ErrorHandler: func(w http.ResponseWriter, _ *http.Request, err error) {
			http.Error(w, "no controller answers: "+err.Error(), http.StatusBadGateway)
		},
	}}
}

// url is the page's address.
func (l *local) url() string { return "http://" + l.address + "/" + l.secret + "/" }

func (l *local) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	secret, file, below := strings.Cut(strings.TrimPrefix(r.URL.Path, "/"), "/")
	below = below && !strings.Contains(file, "/") // the dashboard has no folders, and there is more beside it
	site := r.Header.Get("Sec-Fetch-Site")
	switch {
	case r.Host != l.address:
		http.Error(w, "open http://"+l.address+" as landfallctl has printed it", http.StatusForbidden)
	case site != "" && site != "same-origin" && site != "none":
		http.Error(w, "another site may not ask", http.StatusForbidden)
	case !below || subtle.ConstantTimeCompare([]byte(secret), []byte(l.secret)) != 1:
		http.Error(w, "not found: open the address that landfallctl has printed", http.StatusNotFound)
	case r.Method != http.MethodGet:
		w.Header().Set("Allow", http.MethodGet)
		http.Error(w, "the dashboard only reads", http.StatusMethodNotAllowed)
	default:
		l.proxy.ServeHTTP(w, r)
	}
}

// way passes requests to a controller, through the API server and with a token for the dashboard.
type way struct {
	client    dashboardClient
	namespace string // of Landfall
	transport http.RoundTripper
	now       func() time.Time

	mu    sync.Mutex
	token string
	renew time.Time // when to ask for another token
}

// dashboardClient is what kube.Client offers.
type dashboardClient interface {
	podLister
	DialPod(ctx context.Context, pod lb.Key, port int) (net.Conn, error)
	AccountToken(ctx context.Context, account lb.Key, valid time.Duration) (string, time.Time, error)
}

func newWay(client dashboardClient, namespace string) *way {
	w := &way{client: client, namespace: namespace, now: time.Now}
	w.transport = &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) { return w.dial(ctx) },
		// The certificate is the controller's own and proves nothing; the API server leads to the pod.
		TLSClientConfig:     &tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS12},
		TLSHandshakeTimeout: dashboardTimeout, ResponseHeaderTimeout: dashboardTimeout,
		MaxConnsPerHost: tunnels, IdleConnTimeout: time.Minute, DisableCompression: true,
	}
	return w
}

// try asks for the dashboard once, to name what is missing before a browser is opened.
func (w *way) try(ctx context.Context) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://landfall-controller"+dashboardPath+
		"data?limit=1", nil)
	if err != nil {
		return err
	}
	response, err := w.RoundTrip(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if response.StatusCode == http.StatusOK {
		return nil
	}
	text, _ := io.ReadAll(io.LimitReader(response.Body, 1<<10))
	return fmt.Errorf("the controller answers %s: %s", response.Status, strings.TrimSpace(string(text)))
}

// RoundTrip implements http.RoundTripper.
func (w *way) RoundTrip(r *http.Request) (*http.Response, error) {
	token, err := w.valid(r.Context())
	if err != nil {
		return nil, err
	}
	r = r.Clone(r.Context())
	r.Header.Set("Authorization", "Bearer "+token)
	return w.transport.RoundTrip(r)
}

// valid returns a token that is valid for a while.
func (w *way) valid(ctx context.Context) (string, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.token != "" && w.now().Before(w.renew) {
		return w.token, nil
	}
	pods, err := w.pods(ctx)
	if err != nil {
		return "", err
	}
	account := lb.Key{Namespace: pods[0].Namespace, Name: pods[0].Labels[lb.LabelDashboard]}
	token, ends, err := w.client.AccountToken(ctx, account, tokenValid)
	if err != nil {
		return "", fmt.Errorf("ask for a token of ServiceAccount %s: %w", account, err)
	}
	w.token, w.renew = token, ends.Add(-tokenValid/5)
	return token, nil
}

// pods returns the pods of controllers that serve the dashboard, in the order of their names.
func (w *way) pods(ctx context.Context) ([]kube.PodState, error) {
	all, err := landfallPods(ctx, w.client, w.namespace)
	if err != nil {
		return nil, reading("pods", err)
	}
	running, off := []kube.PodState(nil), false
	for _, p := range all {
		if i := controllerOf(p); i >= 0 && p.Containers[i].Running {
			if p.Labels[lb.LabelDashboard] == "" {
				off = true
			} else {
				running = append(running, p)
			}
		}
	}
	switch {
	case len(running) > 0:
		return running, nil
	case off:
		return nil, errors.New("the dashboard is off: set controller.dashboard.enabled=true in the values of the Helm chart")
	}
	return nil, errors.New("no pod runs landfall-controller")
}

// controllerOf returns which container of a pod is the controller; -1 if none is.
func controllerOf(p kube.PodState) int {
	return slices.IndexFunc(p.Containers, func(c kube.Container) bool { return program(c) == "landfall-controller" })
}

// dial connects to the first controller that takes the connection.
func (w *way) dial(ctx context.Context) (net.Conn, error) {
	pods, err := w.pods(ctx)
	if err != nil {
		return nil, err
	}
	var failed []error
	for _, p := range pods {
		address := flagOf([]kube.PodState{p}, "landfall-controller", "metrics-bind-address")
		_, text, _ := net.SplitHostPort(address)
		port, err := strconv.ParseUint(text, 10, 16)
		if err != nil {
			failed = append(failed, fmt.Errorf("pod %s: its --metrics-bind-address is %q", p.Key, address))
			continue
		}
		conn, err := w.client.DialPod(ctx, p.Key, int(port))
		if err == nil {
			return conn, nil
		}
		failed = append(failed, err)
	}
	return nil, errors.Join(failed...)
}
