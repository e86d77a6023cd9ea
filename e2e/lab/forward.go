package lab

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/httpstream"
	"k8s.io/apimachinery/pkg/util/httpstream/spdy"
)

// forward connects pairs of streams to ports at the localhost of a node, where its agents are, over SPDY.
func (l *Lab) forward(ctx context.Context, w http.ResponseWriter, r *http.Request, n Node) {
	if _, err := httpstream.Handshake(r, w, []string{"portforward.k8s.io"}); err != nil {
		return
	}
	streams := make(chan httpstream.Stream, 2)
	conn := spdy.NewResponseUpgrader().UpgradeResponse(w, r, func(s httpstream.Stream, _ <-chan struct{}) error {
		streams <- s
		return nil
	})
	if conn == nil {
		return
	}
	defer conn.Close()
	byType := map[string]httpstream.Stream{}
	for len(byType) < 2 {
		select {
		case s := <-streams:
			byType[s.Headers().Get(corev1.StreamType)] = s
		case <-time.After(requestTimeout):
			return
		case <-ctx.Done():
			return
		}
	}
	failure, data := byType[corev1.StreamTypeError], byType[corev1.StreamTypeData]
	defer data.Close()
	defer failure.Close()
	port, err := l.dialIn(ctx, n, data.Headers().Get(corev1.PortHeader))
	if err != nil {
		fmt.Fprint(failure, err)
		return
	}
	defer port.Close()
	defer context.AfterFunc(ctx, func() { port.Close() })()
	go func() {
		_, _ = io.Copy(port, data) // the client has gone
		port.Close()
	}()
	_, _ = io.Copy(data, port)
}

// dialIn connects to a port of a node.
func (l *Lab) dialIn(ctx context.Context, n Node, port string) (conn net.Conn, err error) {
	failed := inNamespace(l.state.namespace(n.Name), func() error {
		conn, err = (&net.Dialer{Timeout: requestTimeout}).DialContext(ctx, "tcp", net.JoinHostPort("127.0.0.1", port))
		return err
	})
	return conn, failed
}
