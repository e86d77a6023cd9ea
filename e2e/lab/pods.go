package lab

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/landfall-lb/landfall/e2e/cache"
	"github.com/landfall-lb/landfall/e2e/lab/podserver"
)

// Conditions are the conditions of a pod's endpoint.
type Conditions struct{ Ready, Serving, Terminating bool }

// The conditions that a pod goes through.
var (
	Ready                 = Conditions{Ready: true, Serving: true}
	NotReady              = Conditions{}
	ServingTerminating    = Conditions{Serving: true, Terminating: true}
	NotServingTerminating = Conditions{Terminating: true}
)

type podState struct {
	Pod
	conditions Conditions
	server     *process
}

// AddPod makes a pod, starts its server, and adds it, ready, to the EndpointSlices of the Services
// that select its app.
func (l *Lab) AddPod(ctx context.Context, p Pod) error { return l.AddPodAs(ctx, p, Ready) }

// AddPodAs adds a pod as [Lab.AddPod] does, with other conditions.
func (l *Lab) AddPodAs(ctx context.Context, p Pod, conditions Conditions) error {
	check := l.cluster
	l.mu.Lock()
	check.Pods = []Pod{p}
	for _, other := range l.pods {
		check.Pods = append(check.Pods, other.Pod)
	}
	l.mu.Unlock()
	if err := check.Validate(); err != nil {
		return err
	}
	if err := l.startPods(ctx, []Pod{p}, conditions); err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.writeSlices(ctx, p.App)
}

// StopPod ends a pod's server by SIGTERM, as a kubelet does; network and endpoints stay.
func (l *Lab) StopPod(name string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	pod, ok := l.pods[name]
	if !ok {
		return fmt.Errorf("no pod %q", name)
	}
	return pod.server.stop(20 * time.Second)
}

// RemovePod takes a pod out of the EndpointSlices and then away, server and network, in that order
// and without a pause.
func (l *Lab) RemovePod(ctx context.Context, name string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	pod, ok := l.pods[name]
	if !ok {
		return fmt.Errorf("no pod %q", name)
	}
	delete(l.pods, name)
	return errors.Join(
		l.writeSlices(ctx, pod.App),
		pod.server.kill(),
		batch(ctx, "", []string{"netns delete " + l.state.namespace(name)}))
}

// SetConditions changes the conditions of a pod's endpoints: one of [Ready], [NotReady],
// [ServingTerminating], [NotServingTerminating].
func (l *Lab) SetConditions(ctx context.Context, name string, conditions Conditions) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	pod, ok := l.pods[name]
	if !ok {
		return fmt.Errorf("no pod %q", name)
	}
	pod.conditions = conditions
	return l.writeSlices(ctx, pod.App)
}

// Pods returns the pods of an app that are there now.
func (l *Lab) Pods(app string) []Pod { return l.podsWith(func(p Pod) bool { return p.App == app }) }

func (l *Lab) podsWith(is func(Pod) bool) []Pod {
	l.mu.Lock()
	defer l.mu.Unlock()
	var pods []Pod
	for _, p := range l.pods {
		if is(p.Pod) {
			pods = append(pods, p.Pod)
		}
	}
	return pods
}

// startPods makes pods and waits until their servers listen.
func (l *Lab) startPods(ctx context.Context, pods []Pod, conditions Conditions) error {
	for _, p := range pods {
		if err := l.makeHost(ctx, planPod(l.cluster, p, l.nodes[p.Node])); err != nil {
			return fmt.Errorf("pod %s: %w", p.Name, err)
		}
		config, err := json.Marshal(podserver.Config{Pod: p.Name, Node: p.Node, Addrs: l.cluster.Addresses(p.Addr),
			TCP: p.TCP, UDP: p.UDP})
		if err != nil {
			return err
		}
		server, err := l.startProcess("pod-"+p.Name,
			command{Host: p.Name, Argv: []string{l.options.Tool, podserver.Command, string(config)}})
		if err != nil {
			return err
		}
		l.mu.Lock()
		l.pods[p.Name] = &podState{Pod: p, conditions: conditions, server: server}
		l.mu.Unlock()
	}
	for _, p := range pods {
		if err := l.waitForPod(ctx, p); err != nil {
			return fmt.Errorf("%w: %s", err, tail(l.logPath("pod-"+p.Name), 3))
		}
	}
	return nil
}

func (l *Lab) waitForPod(ctx context.Context, p Pod) error {
	return WaitFor(ctx, l.progress, "pod "+p.Name, 20*time.Second, func(ctx context.Context) error {
		for _, port := range p.TCP {
			for _, addr := range l.cluster.Addresses(p.Addr) {
				conn, err := l.Dial(ctx, p.Name, "tcp", netip.AddrPortFrom(addr, port).String())
				if err != nil {
					return err
				}
				conn.Close()
			}
		}
		return nil
	})
}

// buildTool returns the program that the pods' servers run from.
func buildTool(ctx context.Context, repo string, progress func(string)) (string, error) {
	if dir := os.Getenv(programsVariable); dir != "" {
		return filepath.Join(dir, "landfall-lab"), nil
	}
	kept, err := cache.Folder()
	if err != nil {
		return "", err
	}
	path := filepath.Join(kept, "bin", "landfall-lab")
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return "", err
	}
	return path,
		buildOnce(ctx, path, "building the lab's own program",
			exec.CommandContext(ctx, "go", "build", "-C", repo, "-o", path, "./e2e/cmd/landfall-lab"), progress)
}
