package e2e

import (
	"context"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/landfall-lb/landfall/e2e/lab"
)

// kubelets stand in for the controllers and kubelets that a lab does not have: they start and stop
// the programs of MetalLB and Landfall as their Deployments and DaemonSets say, and keep Pods and
// the workloads' status.
type kubelets struct {
	l        *lab.Lab
	programs string // MetalLB's

	mu      sync.Mutex
	running map[string][]*lab.Program // MetalLB's programs, by the names of their pods
	pods    map[string]bool           // those that run
	due     map[string]time.Time      // when those that are not ready yet will be
	// kubeProxy is the mode of kube-proxy, proxies are those that run, by node, and cleaned the nodes on
	// which kube-proxy --cleanup has run.
	kubeProxy string
	proxies   map[string]*lab.KubeProxy
	cleaned   map[string]bool
}

const metallbNamespace = "metallb-system"

// startKubelets runs kubelets until the test ends.
func startKubelets(t testing.TB, l *lab.Lab, programs, kubeProxy string) *kubelets {
	t.Helper()
	k := &kubelets{l: l, programs: programs, running: map[string][]*lab.Program{}, pods: map[string]bool{},
		due: map[string]time.Time{}, kubeProxy: kubeProxy, proxies: map[string]*lab.KubeProxy{}, cleaned: map[string]bool{}}
	ctx, cancel := context.WithCancel(t.Context())
	var group sync.WaitGroup
	group.Go(func() {
		for ctx.Err() == nil {
			if err := k.sync(ctx); err != nil && ctx.Err() == nil {
				t.Logf("kubelets: %v", err)
			}
			select {
			case <-ctx.Done():
			case <-time.After(100 * time.Millisecond):
			}
		}
	})
	t.Cleanup(func() {
		cancel()
		group.Wait()
		for name := range k.running {
			k.stopMetalLB(name)
		}
		for _, p := range k.proxies {
			_ = p.Stop()
		}
	})
	return k
}

// metallbRuns reports whether a program of MetalLB runs whose pod's name begins so.
func (k *kubelets) metallbRuns(prefix string) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	for name, programs := range k.running {
		if strings.HasPrefix(name, prefix) && slices.ContainsFunc(programs, (*lab.Program).Running) {
			return true
		}
	}
	return false
}

func (k *kubelets) sync(ctx context.Context) error {
	apps := k.l.Kube().AppsV1()
	before, err := k.l.Kube().CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	sets, err := apps.DaemonSets("").List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	deployments, err := apps.Deployments("").List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	nodes, err := k.l.Kube().CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	if !slices.EqualFunc(before.Items, nodes.Items, sameLabels) {
		return nil // what was read together was never there together; the next look is soon
	}
	for _, set := range sets.Items {
		if err := k.syncSet(ctx, set, nodes.Items); err != nil {
			return err
		}
	}
	if k.kubeProxy != "" {
		if err := k.cleanUp(ctx); err != nil {
			return err
		}
	}
	for _, d := range deployments.Items {
		if err := k.syncDeployment(ctx, d, nodes.Items[0].Name); err != nil {
			return err
		}
	}
	return nil
}

func sameLabels(a, b corev1.Node) bool { return a.Name == b.Name && maps.Equal(a.Labels, b.Labels) }

func (k *kubelets) syncSet(ctx context.Context, set appsv1.DaemonSet, nodes []corev1.Node) error {
	var all int32
	var group lab.Group
	for _, n := range nodes {
		name, wanted := set.Name+"-"+n.Name+"-0", matches(set.Spec.Template.Spec, n)
		group.Run(func() error { return k.pod(ctx, set.Namespace, name, n.Name, set.Spec.Template, wanted) })
		if wanted {
			all++
		}
	}
	err := group.Wait()
	ready := all
	k.mu.Lock()
	for name := range k.due {
		if strings.HasPrefix(name, set.Name+"-") {
			ready--
		}
	}
	k.mu.Unlock()
	if err != nil || set.Status.ObservedGeneration == set.Generation && set.Status.NumberReady == ready {
		return err
	}
	set.Status = appsv1.DaemonSetStatus{ObservedGeneration: set.Generation, DesiredNumberScheduled: all,
		CurrentNumberScheduled: all, NumberReady: ready, UpdatedNumberScheduled: all, NumberAvailable: ready}
	_, err = k.l.Kube().AppsV1().DaemonSets(set.Namespace).UpdateStatus(ctx, &set, metav1.UpdateOptions{})
	return ignoreConflict(err)
}

func ignoreConflict(err error) error {
	if apierrors.IsConflict(err) {
		return nil // the next look does it
	}
	return err
}

func (k *kubelets) syncDeployment(ctx context.Context, d appsv1.Deployment, node string) error {
	replicas := int32(1) // for all of them one process runs
	if d.Spec.Replicas != nil {
		replicas = *d.Spec.Replicas
	}
	if err := k.pod(ctx, d.Namespace, d.Name, node, d.Spec.Template, replicas > 0); err != nil ||
		d.Status.ObservedGeneration == d.Generation && d.Status.ReadyReplicas == replicas {
		return err
	}
	d.Status = appsv1.DeploymentStatus{ObservedGeneration: d.Generation, Replicas: replicas, UpdatedReplicas: replicas,
		ReadyReplicas: replicas, AvailableReplicas: replicas}
	_, err := k.l.Kube().AppsV1().Deployments(d.Namespace).UpdateStatus(ctx, &d, metav1.UpdateOptions{})
	return ignoreConflict(err)
}

// matches reports whether a pod may run on a node: by the parts of the specification that a
// migration changes.
func matches(pod corev1.PodSpec, n corev1.Node) bool {
	for key, value := range pod.NodeSelector {
		if n.Labels[key] != value {
			return false
		}
	}
	if pod.Affinity == nil || pod.Affinity.NodeAffinity == nil {
		return true
	}
	required := pod.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution
	return slices.ContainsFunc(required.NodeSelectorTerms, func(term corev1.NodeSelectorTerm) bool {
		return !slices.ContainsFunc(term.MatchExpressions, func(e corev1.NodeSelectorRequirement) bool {
			return e.Operator == corev1.NodeSelectorOpNotIn && slices.Contains(e.Values, n.Labels[e.Key])
		})
	})
}

// pod starts or stops the programs of a pod, and keeps its object. The lab has other pods, to which
// the tokens of Landfall's programs are bound.
func (k *kubelets) pod(ctx context.Context, namespace, name, node string, template corev1.PodTemplateSpec,
	wanted bool) error {
	pods := k.l.Kube().CoreV1().Pods(namespace)
	k.mu.Lock()
	runs := k.pods[name]
	k.pods[name] = wanted
	k.mu.Unlock()
	switch {
	case runs == wanted:
		return k.readyWhenDue(ctx, namespace, name)
	case runs:
		k.mu.Lock()
		delete(k.due, name)
		k.mu.Unlock()
		if err := k.stop(namespace, name, node, template); err != nil {
			return err
		}
		return pods.Delete(ctx, name, metav1.DeleteOptions{GracePeriodSeconds: new(int64)})
	}
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: template.Labels},
		Spec: corev1.PodSpec{NodeName: node, HostNetwork: true}}
	for _, c := range template.Spec.Containers {
		pod.Spec.Containers = append(pod.Spec.Containers, corev1.Container{Name: c.Name, Image: c.Image, Command: c.Command,
			Args: c.Args})
	}
	existing, err := pods.Create(ctx, pod, metav1.CreateOptions{})
	if err != nil {
		return err
	}
	addr := ""
	for _, n := range k.l.Cluster().Nodes {
		if n.Name == node {
			addr = n.Addr.String()
		}
	}
	existing.Status = corev1.PodStatus{Phase: corev1.PodRunning, PodIP: addr, PodIPs: []corev1.PodIP{{IP: addr}},
		HostIP: addr, HostIPs: []corev1.HostIP{{IP: addr}}}
	if _, err := pods.UpdateStatus(ctx, existing, metav1.UpdateOptions{}); err != nil {
		return err
	}
	if err := k.start(ctx, namespace, name, node, addr, template); err != nil {
		return err
	}
	// No pod is ready before its first probe.
	wait := int32(0)
	for _, c := range template.Spec.Containers {
		if c.ReadinessProbe != nil {
			wait = max(wait, c.ReadinessProbe.InitialDelaySeconds)
		}
	}
	k.mu.Lock()
	k.due[name] = time.Now().Add(time.Duration(wait) * time.Second)
	k.mu.Unlock()
	return k.readyWhenDue(ctx, namespace, name)
}

// readyWhenDue makes a pod ready when it is time.
func (k *kubelets) readyWhenDue(ctx context.Context, namespace, name string) error {
	k.mu.Lock()
	due, waits := k.due[name]
	k.mu.Unlock()
	if !waits || time.Now().Before(due) {
		return nil
	}
	pods := k.l.Kube().CoreV1().Pods(namespace)
	existing, err := pods.Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return err
	}
	existing.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
	if _, err = pods.UpdateStatus(ctx, existing, metav1.UpdateOptions{}); err == nil {
		k.mu.Lock()
		delete(k.due, name)
		k.mu.Unlock()
	}
	return err
}

// cleanUp runs the pods that a migration creates on nodes.
func (k *kubelets) cleanUp(ctx context.Context) error {
	pods := k.l.Kube().CoreV1().Pods("kube-system")
	all, err := pods.List(ctx, metav1.ListOptions{LabelSelector: "landfall.dev/migrated-from=kube-proxy"})
	if err != nil {
		return err
	}
	for _, p := range all.Items {
		if p.Status.Phase == corev1.PodSucceeded || !slices.Equal(p.Spec.Containers[0].Command, []string{"kube-proxy",
			"--cleanup"}) {
			continue
		}
		if err := k.l.CleanupKubeProxy(ctx, p.Spec.NodeName); err != nil {
			return err
		}
		k.mu.Lock()
		k.cleaned[p.Spec.NodeName] = true
		k.mu.Unlock()
		p.Status.Phase = corev1.PodSucceeded
		if _, err := pods.UpdateStatus(ctx, &p, metav1.UpdateOptions{}); ignoreConflict(err) != nil {
			return err
		}
	}
	return nil
}

// start starts the programs of a pod: Landfall's as the chart has them, kube-proxy, and MetalLB's. With
// kube-proxy it waits until they are ready.
func (k *kubelets) start(ctx context.Context, namespace, name, node, addr string,
	template corev1.PodTemplateSpec) error {
	if namespace == "kube-system" {
		p, err := k.l.StartKubeProxy(ctx, node, k.kubeProxy, "--v=2")
		if err != nil {
			return err
		}
		k.mu.Lock()
		k.proxies[node] = p
		k.mu.Unlock()
		return p.WaitHealthy(ctx)
	}
	if namespace != metallbNamespace {
		for _, c := range template.Spec.Containers {
			agent := k.l.Agent(c.Name, node)
			if err := agent.Start(); err != nil {
				return err
			}
			if k.kubeProxy != "" {
				if err := agent.WaitReady(ctx); err != nil {
					return err
				}
			}
		}
		return nil
	}
	for _, c := range template.Spec.Containers {
		argv, env := k.metallb(c, namespace, name, node, addr)
		if argv == nil {
			continue
		}
		p, err := k.l.StartProgram(node+"-metallb-"+c.Name, node, argv, env...)
		if err != nil {
			return err
		}
		k.mu.Lock()
		k.running[name] = append(k.running[name], p)
		k.mu.Unlock()
	}
	return nil
}

// metallb returns how a container of MetalLB is started; nil for one that the lab does without.
func (k *kubelets) metallb(c corev1.Container, namespace, pod, node, addr string) (argv, env []string) {
	// What the containers of a pod share is in the node's own /run.
	const shared = "/run/frr_reloader"
	env = []string{"METALLB_NAMESPACE=" + namespace, "METALLB_NODE_NAME=" + node, "METALLB_POD_NAME=" + pod,
		"METALLB_HOST=" + addr, "METALLB_ML_BIND_ADDR=" + addr, "METALLB_ML_LABELS=app=metallb,component=speaker",
		"METALLB_ML_SECRET_NAME=memberlist", "METALLB_DEPLOYMENT=controller", "METALLB_BGP_TYPE=native",
		"FRRK8S_NAMESPACE=" + namespace, "FRR_CONFIG_FILE=" + shared + "/frr.conf",
		"FRR_RELOADER_PID_FILE=" + shared + "/reloader.pid", "SHARED_VOLUME=" + shared}
	for _, e := range c.Env {
		if e.Name == "METALLB_BGP_TYPE" {
			env = append(env, e.Name+"="+e.Value)
		}
	}
	switch c.Name {
	case "speaker", "controller":
		argv = append([]string{k.programs + "/" + c.Name}, c.Args...)
	case "frr-k8s":
		argv = []string{k.programs + "/frr-k8s", "--node-name=" + node, "--namespace=" + namespace}
	case "frr":
		argv = []string{"bash", "-c", frrContainer}
	case "reloader":
		// A shell cannot trap a signal that it has been told to ignore, as by nohup.
		argv = []string{"env", "--default-signal=HUP", "bash", "-c", reloaderContainer, "sh",
			k.programs + "/" + lab.MetalLBReloader}
	}
	return argv, env
}

const (
	// frrContainer does what the container frr does with Debian's FRR. When it is stopped, its processes are
	// killed, as those of a container are whose first process ends.
	frrContainer = `set -e
mkdir -p /run/frr /run/frr_etc "$SHARED_VOLUME"
chown frr:frr /run/frr /run/frr_etc
mount --bind /run/frr_etc /etc/frr
echo 'service integrated-vtysh-config' >/etc/frr/vtysh.conf
printf 'frr defaults traditional\nhostname Router\nline vty\n' >/etc/frr/frr.conf
rm -f /run/frr/*
trap 'kill -9 $(jobs -p); exit' TERM
/usr/lib/frr/zebra -A 127.0.0.1 -s 90000000 &
until [ -S /run/frr/zserv.api ]; do sleep 0.1; done
/usr/lib/frr/bgpd -A 127.0.0.1 -p 0 &
/usr/lib/frr/bfdd -A 127.0.0.1 &
until [ -S /run/frr/bgpd.vty ] && [ -S /run/frr/bfdd.vty ]; do sleep 0.1; done
vtysh -b
wait`
	reloaderContainer = `until [ -S /run/frr/bgpd.vty ]; do sleep 0.1; done
mount --bind /run/frr_etc /etc/frr
exec bash "$1"`
)

// stopMetalLB stops the programs of a pod of MetalLB, all at the same time.
func (k *kubelets) stopMetalLB(pod string) {
	k.mu.Lock()
	programs := k.running[pod]
	k.mu.Unlock()
	var group sync.WaitGroup
	for _, p := range programs {
		group.Go(func() { p.Stop(2 * time.Second) })
	}
	group.Wait()
	k.mu.Lock()
	delete(k.running, pod)
	k.mu.Unlock()
}

func (k *kubelets) stop(namespace, name, node string, template corev1.PodTemplateSpec) error {
	if namespace == "kube-system" {
		k.mu.Lock()
		p := k.proxies[node]
		k.mu.Unlock()
		return p.Stop()
	}
	if namespace != metallbNamespace {
		for _, c := range template.Spec.Containers {
			if err := k.l.Agent(c.Name, node).Stop(); err != nil {
				return err
			}
		}
		return nil
	}
	k.stopMetalLB(name)
	return nil
}
