package kube

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/httpstream"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/portforward"
	"k8s.io/client-go/transport/spdy"

	"github.com/landfall-lb/landfall/internal/lb"
)

// DialPod connects to a TCP port at a pod's localhost through the API server, as "kubectl
// port-forward" does. It needs the verb create on pods/portforward, and get for API servers before
// Kubernetes 1.35. Deadlines of the connection have no effect.
func (c *Client) DialPod(ctx context.Context, pod lb.Key, port int) (net.Conn, error) {
	dialer, err := c.forwarder(pod)
	if err != nil {
		return nil, err
	}
	type dialed struct {
		conn *podConn
		err  error
	}
	done := make(chan dialed, 1)
	go func() { // the dialer takes no context
		conn, err := dialPod(dialer, pod, port)
		done <- dialed{conn, err}
		if err == nil && ctx.Err() != nil {
			conn.Close()
		}
	}()
	select {
	case d := <-done:
		if d.err != nil {
			return nil, d.err
		}
		return d.conn, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("pod %s does not answer: %w", pod, context.Cause(ctx))
	}
}

// forwarder returns what connects to a pod's kubelet through the API server.
func (c *Client) forwarder(pod lb.Key) (httpstream.Dialer, error) {
	at := c.rest.core.Post().Namespace(pod.Namespace).Resource("pods").Name(pod.Name).
		SubResource("portforward").URL()
	config := rest.CopyConfig(c.config)
	config.Dial = nil // the dialers have connections of their own
	transport, upgrader, err := spdy.RoundTripperFor(config)
	if err != nil {
		return nil, err
	}
	overSPDY := spdy.NewDialer(upgrader, &http.Client{Transport: transport}, http.MethodPost, at)
	// API servers translate WebSocket since Kubernetes 1.31; a proxy between may take SPDY only.
	overWebSocket, err := portforward.NewSPDYOverWebsocketDialer(at, config)
	if err != nil {
		return nil, err
	}
	return portforward.NewFallbackDialer(overWebSocket, overSPDY, func(err error) bool {
		return httpstream.IsUpgradeFailure(err) || httpstream.IsHTTPSProxyError(err)
	}), nil
}

func dialPod(dialer httpstream.Dialer, pod lb.Key, port int) (*podConn, error) {
	conn, _, err := dialer.Dial(portforward.PortForwardProtocolV1Name)
	if err != nil {
		if apierrors.IsForbidden(err) || strings.Contains(err.Error(), "forbidden") {
			return nil, &Denied{Verb: "create", Resource: "pods/portforward", Namespace: pod.Namespace, Err: err}
		}
		return nil, fmt.Errorf("pod %s: %w", pod, err)
	}
	headers := http.Header{}
	headers.Set(corev1.PortHeader, strconv.Itoa(port))
	headers.Set(corev1.PortForwardRequestIDHeader, "0")
	var streams [2]httpstream.Stream
	for i, kind := range []string{corev1.StreamTypeError, corev1.StreamTypeData} {
		headers.Set(corev1.StreamType, kind)
		if streams[i], err = conn.CreateStream(headers); err != nil {
			conn.Close()
			return nil, fmt.Errorf("pod %s: %w", pod, err)
		}
	}
	_ = streams[0].Close() // nothing is written to it
	p := &podConn{Stream: streams[1], conn: conn, pod: pod, failed: make(chan string, 1)}
	go func() {
		message, _ := io.ReadAll(io.LimitReader(streams[0], maxMessage)) // what could be read says enough
		p.failed <- string(message)
	}()
	return p, nil
}

// maxMessage bounds what a kubelet says of a failure.
const maxMessage = 4 << 10

// podConn is a connection to a port of a pod.
type podConn struct {
	httpstream.Stream
	conn   httpstream.Connection
	pod    lb.Key
	failed chan string // why the kubelet did not connect
}

// Read implements net.Conn. Where the kubelet has no connection, it says why.
func (p *podConn) Read(b []byte) (int, error) {
	n, err := p.Stream.Read(b)
	if !errors.Is(err, io.EOF) {
		return n, err
	}
	select {
	case message := <-p.failed:
		p.failed <- message
		if message != "" {
			return n, fmt.Errorf("pod %s: %s", p.pod, message)
		}
	case <-time.After(time.Second): // the message comes with the end
	}
	return n, err
}

// Close ends the connection.
func (p *podConn) Close() error {
	return cmp.Or(p.Reset(), p.conn.Close())
}

func (p *podConn) LocalAddr() net.Addr              { return podAddr{p.pod} }
func (p *podConn) RemoteAddr() net.Addr             { return podAddr{p.pod} }
func (p *podConn) SetDeadline(time.Time) error      { return nil }
func (p *podConn) SetReadDeadline(time.Time) error  { return nil }
func (p *podConn) SetWriteDeadline(time.Time) error { return nil }

// podAddr stands for the address of a pod.
type podAddr struct{ pod lb.Key }

func (a podAddr) Network() string { return "pod" }
func (a podAddr) String() string  { return a.pod.String() }

// AccountToken asks for a token of a ServiceAccount that is valid for so long, and returns when it
// ends. It needs the verb create on serviceaccounts/token.
func (c *Client) AccountToken(ctx context.Context, account lb.Key, valid time.Duration) (
	token string, ends time.Time, err error) {
	seconds := int64(valid.Seconds())
	var answer authenticationv1.TokenRequest
	request := authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{ExpirationSeconds: &seconds}}
	err = c.rest.core.Post().Namespace(account.Namespace).Resource("serviceaccounts").Name(account.Name).
		SubResource("token").Body(&request).Do(ctx).Into(&answer)
	if err != nil {
		return "", time.Time{}, c.looked(err, "create", "", "serviceaccounts/token", account.Namespace)
	}
	return answer.Status.Token, answer.Status.ExpirationTimestamp.Time, nil
}
