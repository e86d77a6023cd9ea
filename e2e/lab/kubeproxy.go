package lab

import (
	"context"
	"fmt"
	"net/http"
	"time"
)

// KubeProxy is upstream's kube-proxy on one node, to compare with and to take over from. See
// [Lab.StartKubeProxy].
type KubeProxy struct {
	lab     *Lab
	node    string
	process *process
}

// kubeProxyMetrics is where kube-proxy serves its metrics by default, on the node only.
const kubeProxyMetrics = "http://127.0.0.1:10249/"

// StartKubeProxy starts kube-proxy on a node in a mode of its own (iptables or nftables), with
// further flags. It is built if it is not there, which takes minutes once.
func (l *Lab) StartKubeProxy(ctx context.Context, node, mode string, flags ...string) (*KubeProxy, error) {
	binary, err := Tool(ctx, l.options.Repository, "kube-proxy", l.progress)
	if err != nil {
		return nil, err
	}
	argv := append([]string{
		binary, "--proxy-mode=" + mode, "--kubeconfig=" + l.Kubeconfig(), "--hostname-override=" + node,
		"--cluster-cidr=" + l.cluster.PodNetwork.String(),
		// The limits of conntrack are the machine's.
		"--conntrack-max-per-core=0", "--conntrack-tcp-timeout-established=0s", "--conntrack-tcp-timeout-close-wait=0s",
	}, flags...)
	p, err := l.startProcess(node+"-kube-proxy", command{Host: node, Argv: argv})
	if err != nil {
		return nil, err
	}
	return &KubeProxy{lab: l, node: node, process: p}, nil
}

// WaitHealthy waits until kube-proxy's own server answers, at most half a minute. Its rules may
// come later.
func (k *KubeProxy) WaitHealthy(ctx context.Context) error {
	return WaitFor(ctx, k.lab.progress, "kube-proxy on "+k.node, 30*time.Second, func(ctx context.Context) error {
		if !k.process.running() {
			return permanent{fmt.Errorf("kube-proxy on %s has ended: %w\n%s", k.node, k.process.err,
				tail(k.lab.logPath(k.node+"-kube-proxy"), 12))}
		}
		code, _, err := k.lab.Get(ctx, k.node, kubeProxyMetrics+"healthz")
		if err == nil && code != http.StatusOK {
			err = fmt.Errorf("kube-proxy: %d", code)
		}
		return err
	})
}

// Metrics returns kube-proxy's metrics as text.
func (k *KubeProxy) Metrics(ctx context.Context) (string, error) {
	_, text, err := k.lab.Get(ctx, k.node, kubeProxyMetrics+"metrics")
	return text, err
}

// Stop ends kube-proxy. Its rules stay.
func (k *KubeProxy) Stop() error {
	if !k.process.running() {
		return fmt.Errorf("kube-proxy on %s has ended by itself: %w", k.node, k.process.err)
	}
	_ = k.process.stop(10 * time.Second) // it ends by the signal, without a status of its own
	return nil
}

// CleanupKubeProxy runs kube-proxy --cleanup on a node.
func (l *Lab) CleanupKubeProxy(ctx context.Context, node string) error {
	binary, err := Tool(ctx, l.options.Repository, "kube-proxy", l.progress)
	if err == nil {
		_, err = l.Exec(ctx, node, binary, "--cleanup")
	}
	return err
}
