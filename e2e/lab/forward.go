package lab

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"

	corev1 "k8s.io/api/core/v1"
)

// forward connects pairs of streams to ports at the localhost of a node, where its agents are, over SPDY.
func (l *Lab) forward(ctx context.Context, w http.ResponseWriter, r *http.Request, n Node) {
	conn, byType := upgrade(ctx, w, r, "portforward.k8s.io", 2)
	if conn == nil {
		return
	}
	defer conn.Close()
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
