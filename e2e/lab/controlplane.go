package lab

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os/exec"
	"strings"
	"syscall"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

const apiPort = "6443"

// controlPlane is etcd and the API server, both in the master's namespace.
type controlPlane struct {
	lab     *Lab
	master  Node
	binary  string
	ca      *authority
	admin   *rest.Config
	etcd    *process
	server  *process
	address string // host:port that the API server answers on
}

func newControlPlane(l *Lab, binary string) (*controlPlane, error) {
	master := l.cluster.Master()
	c := &controlPlane{lab: l, master: master, binary: binary, address: net.JoinHostPort(master.Addr.String(), apiPort)}
	now := time.Now()
	var err error
	if c.ca, err = newAuthority(now); err != nil {
		return nil, err
	}
	serverCert, serverKey, err := c.ca.issue(now, pkix.Name{CommonName: "kube-apiserver"},
		[]net.IP{net.IPv4(127, 0, 0, 1), master.Addr.AsSlice(), l.cluster.ServiceNetwork.Masked().Addr().Next().AsSlice()},
		[]string{"localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc",
			"kubernetes.default.svc.cluster.local"})
	if err != nil {
		return nil, err
	}
	adminCert, adminKey, err := c.ca.issue(now,
		pkix.Name{CommonName: "lab-admin", Organization: []string{"system:masters"}}, nil, nil)
	if err != nil {
		return nil, err
	}
	signing, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	signingKey, err := encodeKey(signing)
	if err != nil {
		return nil, err
	}
	c.admin = &rest.Config{
		Host:            "https://" + c.address,
		TLSClientConfig: rest.TLSClientConfig{CAData: c.ca.pem, CertData: adminCert, KeyData: adminKey},
		QPS:             -1, // a test waits for what it asks for, not for a rate limit
		Dial: func(ctx context.Context, network, address string) (net.Conn, error) {
			return dialIn(ctx, l.state.namespace(master.Name), &net.Dialer{}, network, address)
		},
	}
	if wrote := l.options.Wrote; wrote != nil {
		c.admin.Wrap(func(next http.RoundTripper) http.RoundTripper { return changes{next, wrote} })
	}
	return c, errors.Join(
		writeFiles(map[string][]byte{
			l.state.path("ca.crt"):      c.ca.pem,
			l.state.path("server.crt"):  serverCert,
			l.state.path("server.key"):  serverKey,
			l.state.path("signing.key"): signingKey,
		}),
		clientcmd.WriteToFile(
			*c.kubeconfig(&clientcmdapi.AuthInfo{ClientCertificateData: adminCert, ClientKeyData: adminKey}), l.Kubeconfig()),
	)
}

// changes tells of what the API server was asked to change, and did.
type changes struct {
	next  http.RoundTripper
	wrote func()
}

// RoundTrip implements http.RoundTripper.
func (c changes) RoundTrip(request *http.Request) (*http.Response, error) {
	response, err := c.next.RoundTrip(request)
	if err == nil && request.Method != http.MethodGet && response.StatusCode < http.StatusMultipleChoices {
		c.wrote()
	}
	return response, err
}

// kubeconfig describes the API server to a program on any node.
func (c *controlPlane) kubeconfig(user *clientcmdapi.AuthInfo) *clientcmdapi.Config {
	config := clientcmdapi.NewConfig()
	config.Clusters["lab"] = &clientcmdapi.Cluster{Server: "https://" + c.address, CertificateAuthorityData: c.ca.pem}
	config.AuthInfos["lab"] = user
	config.Contexts["lab"] = &clientcmdapi.Context{Cluster: "lab", AuthInfo: "lab"}
	config.CurrentContext = "lab"
	return config
}

// startEtcd starts etcd; the API server waits for it by itself.
func (c *controlPlane) startEtcd() (err error) {
	binary := assetFromEnvironment("etcd")
	if binary == "" {
		if binary, err = exec.LookPath("etcd"); err != nil {
			return err
		}
	}
	c.etcd, err = c.lab.startProcess("etcd", command{Host: c.master.Name, Argv: []string{
		binary, "--data-dir", c.lab.state.path("etcd"), "--unsafe-no-fsync",
		"--listen-client-urls", "http://127.0.0.1:2379", "--advertise-client-urls", "http://127.0.0.1:2379",
		"--listen-peer-urls", "http://127.0.0.1:2380", "--initial-advertise-peer-urls", "http://127.0.0.1:2380",
		"--initial-cluster", "default=http://127.0.0.1:2380",
	}})
	return err
}

// start starts the API server and waits until it is ready.
func (c *controlPlane) start(ctx context.Context, progress func(string)) (err error) {
	file := c.lab.state.path
	// No controller-manager creates the default ServiceAccounts here.
	flags := []string{"--authorization-mode=RBAC", "--disable-admission-plugins=ServiceAccount",
		"--kubelet-preferred-address-types=InternalIP"} // see ServeExec
	if c.lab.options.Kubelets {
		if flags, err = c.kubeletFlags(); err != nil {
			return err
		}
	}
	if c.lab.options.MutatingPolicies {
		flags = append(flags, "--feature-gates=MutatingAdmissionPolicy=true",
			"--runtime-config=admissionregistration.k8s.io/v1beta1=true")
	}
	c.server, err = c.lab.startProcess("kube-apiserver", command{Host: c.master.Name, Argv: append([]string{
		c.binary,
		"--etcd-servers=http://127.0.0.1:2379",
		"--bind-address=0.0.0.0", "--secure-port=" + apiPort, "--advertise-address=" + c.master.Addr.String(),
		"--tls-cert-file=" + file("server.crt"), "--tls-private-key-file=" + file("server.key"),
		"--client-ca-file=" + file("ca.crt"),
		"--service-account-issuer=https://kubernetes.default.svc", "--service-account-key-file=" + file("signing.key"),
		"--service-account-signing-key-file=" + file("signing.key"),
		"--service-cluster-ip-range=" + joined(c.lab.cluster.serviceNetworks()),
		"--allow-privileged",
	}, flags...)})
	if err != nil {
		return err
	}
	client, err := rest.HTTPClientFor(c.admin)
	if err != nil {
		return err
	}
	defer client.CloseIdleConnections()
	err = WaitFor(ctx, progress, "the API server", 3*time.Minute, func(ctx context.Context) error {
		if !c.server.running() || !c.etcd.running() {
			return permanent{errors.New("ended at once")}
		}
		return httpOK(ctx, client, c.admin.Host+"/readyz")
	})
	if err != nil {
		return fmt.Errorf("%w\nkube-apiserver: %s\netcd: %s", err, tail(c.lab.logPath("kube-apiserver"), 8),
			tail(c.lab.logPath("etcd"), 3))
	}
	return nil
}

// joined lists networks as flags take them.
func joined(networks []netip.Prefix) string {
	var all []string
	for _, p := range networks {
		all = append(all, p.String())
	}
	return strings.Join(all, ",")
}

// StopAPI stops the API server; etcd keeps its data. All else goes on.
func (l *Lab) StopAPI() error {
	// After SIGTERM it takes a minute to leave.
	return l.control.server.kill()
}

// StartAPI starts the API server after [Lab.StopAPI] and waits until it is ready.
func (l *Lab) StartAPI(ctx context.Context) error {
	return l.control.start(ctx, l.progress)
}

// SignalAPI sends the API server a signal: SIGSTOP has its clients wait, SIGCONT lets it go on.
func (l *Lab) SignalAPI(sig syscall.Signal) error { return l.control.server.signal(sig) }

// SignalEtcd does so with etcd.
func (l *Lab) SignalEtcd(sig syscall.Signal) error { return l.control.etcd.signal(sig) }

func httpOK(ctx context.Context, client *http.Client, url string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return errors.New(resp.Status)
	}
	return nil
}

// permanent is an error that no wait can mend.
type permanent struct{ error }

// WaitFor calls f until it succeeds, and says every few seconds what it waits for. The last error
// of f explains a time-out.
func WaitFor(
	ctx context.Context, progress func(line string), what string, limit time.Duration,
	f func(context.Context) error) error {
	start := time.Now()
	asked := ctx
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	said := start
	for {
		attempt, stop := context.WithTimeout(ctx, 5*time.Second)
		err := f(attempt)
		stop()
		if err == nil {
			return nil
		}
		if asked.Err() != nil {
			return fmt.Errorf("waiting for %s: %w", what, context.Cause(asked))
		}
		if _, ok := errors.AsType[permanent](err); ok {
			return fmt.Errorf("%s: %w", what, err)
		}
		if time.Since(said) >= progressEvery {
			said = time.Now()
			progress(fmt.Sprintf("waiting for %s: %s (%v)", what, seconds(time.Since(start)), err))
		}
		select {
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
			return fmt.Errorf("%s: not there after %s: %w", what, seconds(time.Since(start)), err)
		}
	}
}
