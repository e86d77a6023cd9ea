package kube

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/httpstream"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/remotecommand"

	"github.com/landfall-lb/landfall/internal/lb"
)

// maxOutput bounds what is kept of a command's output.
const maxOutput = 64 << 20

// Exec runs a command in a container of a pod, as "kubectl exec" does, and returns what it writes
// to its standard output. It needs the verb create on pods/exec, and get for API servers before
// Kubernetes 1.35.
func (c *Client) Exec(ctx context.Context, pod lb.Key, container string, command ...string) ([]byte, error) {
	return c.ExecUpTo(ctx, maxOutput, pod, container, command...)
}

// ExecUpTo is Exec that keeps at most so many bytes of the output.
func (c *Client) ExecUpTo(ctx context.Context, most int, pod lb.Key, container string, command ...string) (
	[]byte, error) {
	at := c.rest.core.Post().Namespace(pod.Namespace).Resource("pods").Name(pod.Name).SubResource("exec").
		VersionedParams(&corev1.PodExecOptions{Container: container, Command: command, Stdout: true, Stderr: true},
			parameters).URL()
	config := rest.CopyConfig(c.config)
	config.Dial = nil // the executors have connections of their own
	// API servers translate WebSocket since Kubernetes 1.31; a proxy between may take SPDY only.
	overWebSocket, err := remotecommand.NewWebSocketExecutor(config, "GET", at.String())
	if err != nil {
		return nil, err
	}
	overSPDY, err := remotecommand.NewSPDYExecutor(config, "POST", at)
	if err != nil {
		return nil, err
	}
	executor, err := remotecommand.NewFallbackExecutor(overWebSocket, overSPDY, func(err error) bool {
		return httpstream.IsUpgradeFailure(err) || httpstream.IsHTTPSProxyError(err)
	})
	if err != nil {
		return nil, err
	}
	stdout, stderr := limited{most: most}, limited{most: most}
	err = executor.StreamWithContext(ctx, remotecommand.StreamOptions{Stdout: &stdout, Stderr: &stderr})
	switch said := strings.TrimSpace(stderr.String()); {
	case err == nil:
		return stdout.Bytes(), nil
	case said != "":
		return nil, errors.New(said)
	case strings.Contains(err.Error(), "forbidden"):
		return nil, &Denied{Verb: "create", Resource: "pods/exec", Namespace: pod.Namespace, Err: err}
	case ctx.Err() != nil:
		return nil, fmt.Errorf("pod %s does not answer: %w", pod, context.Cause(ctx))
	}
	return nil, fmt.Errorf("pod %s: %w", pod, err)
}

// limited keeps the first bytes.
type limited struct {
	bytes.Buffer
	most int
}

func (l *limited) Write(p []byte) (int, error) {
	l.Buffer.Write(p[:max(min(l.most-l.Len(), len(p)), 0)])
	return len(p), nil // the rest is read and left out
}
