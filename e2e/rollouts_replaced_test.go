package e2e

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/landfall-lb/landfall/e2e/lab"
	"github.com/landfall-lb/landfall/internal/lb"
)

// replaced are Services with one pod each. The test does what Deployments, kubelets and the writer of EndpointSlices
// do when a rollout replaces it.
type replaced struct {
	*lab.Lab
	services []replacedService
	rounds   int
}

type replacedService struct {
	name, policy, client string
	vip                  netip.AddrPort
	pod                  *corev1.Pod
}

// firstNodePort is that of the first Service, the others have the next ones.
const firstNodePort = 31001

// testReplaced replaces pods while clients connect. Where the API server has added the sleep and the gate no
// connection is lost, while Landfall's controllers are away, too. A gate stays closed while no node announces the
// address, and opens then, or after the time-out.
func testReplaced(t *testing.T, l *lab.Lab) {
	at := netip.MustParseAddrPort
	r := &replaced{Lab: l, services: []replacedService{
		{name: "arp-local", policy: "Local", client: lab.ClientName, vip: at("172.26.236.181:80")},
		{name: "arp-cluster", policy: "Cluster", client: lab.ClientName, vip: at("172.26.236.182:80")},
		{name: "bgp-local", policy: "Local", client: lab.FarClientName, vip: at("203.0.113.181:80")},
		{name: "bgp-cluster", policy: "Cluster", client: lab.FarClientName, vip: at("203.0.113.182:80")},
	}}
	for i, s := range r.services {
		if err := l.AddService(t.Context(),
			loadBalancer(s.name, s.policy, s.vip.Addr(), firstNodePort+uint16(i))); err != nil {
			t.Fatal(err)
		}
	}
	r.ready(t, r.create(t, bootNode))
	r.answer(t)
	r.askForBoth(t)
	for _, controller := range l.Agents("controller") {
		if err := controller.Stop(); err != nil {
			t.Fatal(err)
		}
	}
	if lost := r.replace(t, bootNode); lost == 0 {
		t.Error("pods without the sleep have to lose connections, or this test shows nothing")
	}
	if lost := r.replace(t, "k8s-worker-179"); lost > 0 {
		t.Errorf("%d connections were lost", lost)
	}
	if !t.Failed() {
		r.gatesWait(t)
	}
}

// loadBalancer describes a Service that selects pods by its name and asks for an address.
func loadBalancer(name, policy string, vip netip.Addr, nodePort uint16) lab.Service {
	return lab.Service{Namespace: "default", Name: name, App: name, Type: "LoadBalancer", ExternalTrafficPolicy: policy,
		Ports:       []lab.Port{{Port: 80, NodePort: nodePort}},
		Annotations: map[string]string{lb.AnnotationAddresses: vip.String()}}
}

// askForBoth gives the namespace both labels, and waits until the API server heeds them.
func (r *replaced) askForBoth(t *testing.T) {
	t.Helper()
	if _, err := r.Kube().CoreV1().Namespaces().Patch(t.Context(), "default", types.MergePatchType, fmt.Appendf(nil,
		`{"metadata":{"labels":{%q:"",%q:""}}}`, lb.LabelPreStopSleep, lb.LabelWaitUntilProgrammed), metav1.PatchOptions{},
	); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the API server adds both", func() error {
		made, err := r.Kube().CoreV1().Pods("default").Create(t.Context(), aPod("dry", "", ""),
			metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		if err == nil && (len(made.Spec.ReadinessGates) == 0 || sleepOf(made) == 0) {
			err = fmt.Errorf("gates %v, a sleep of %s", made.Spec.ReadinessGates, sleepOf(made))
		}
		return err
	})
}

// aPod is a pod without hooks and gates.
func aPod(name, app, node string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default", Labels: map[string]string{"run": app}},
		Spec:       corev1.PodSpec{NodeName: node, Containers: []corev1.Container{{Name: "a", Image: "a"}}}}
}

// sleepOf is how long a kubelet waits before it sends SIGTERM.
func sleepOf(pod *corev1.Pod) time.Duration {
	if hooks := pod.Spec.Containers[0].Lifecycle; hooks != nil && hooks.PreStop != nil && hooks.PreStop.Sleep != nil {
		return time.Duration(hooks.PreStop.Sleep.Seconds) * time.Second
	}
	return 0
}

// create creates a pod of each Service on a node. They run, and are not ready.
func (r *replaced) create(t *testing.T, node string) (pods []*corev1.Pod) {
	t.Helper()
	r.rounds++
	for i, s := range r.services {
		pod := podOn(r.Lab, node, fmt.Sprintf("%s-%d", s.name, r.rounds), byte(10*r.rounds+i))
		pod.App = s.name
		if err := r.AddPodAs(t.Context(), pod, lab.NotReady); err != nil {
			t.Fatal(err)
		}
		pods = append(pods, runPod(t, r.Lab, aPod(pod.Name, s.name, node), pod.Addr))
	}
	return pods
}

// ready has pods get ready once their gates are open, if they have some, and the Services have them instead of those
// before, which it returns. While only the gate is open, no other node knows of the pod, and its own delivers to it.
func (r *replaced) ready(t *testing.T, pods []*corev1.Pod) (before []*corev1.Pod) {
	t.Helper()
	for i, pod := range pods {
		if len(pod.Spec.ReadinessGates) > 0 {
			waitGate(t, r.Lab, pod.Name, lb.ReasonProgrammed)
			r.wantDelivered(t, pod, r.services[i], firstNodePort+uint16(i))
		}
		ready := []byte(`{"status":{"conditions":[{"type":"Ready","status":"True"}]}}`)
		if _, err := r.Kube().CoreV1().Pods("default").Patch(t.Context(), pod.Name, types.StrategicMergePatchType, ready,
			metav1.PatchOptions{}, "status"); err != nil {
			t.Fatal(err)
		}
		if err := r.SetConditions(t.Context(), pod.Name, lab.Ready); err != nil {
			t.Fatal(err)
		}
		if had := r.services[i].pod; had != nil {
			before = append(before, had)
		}
		r.services[i].pod = pod
	}
	return before
}

// wantDelivered asks the node of a pod, which with policy Local has pods of its own only.
func (r *replaced) wantDelivered(t *testing.T, pod *corev1.Pod, s replacedService, port uint16) {
	t.Helper()
	node := pod.Spec.NodeName
	answer, err := r.Attempt(t.Context(), lab.ClientName, "tcp", netip.AddrPortFrom(nodeAddr(r.Lab, node), port))
	if s.policy == "Local" && (err != nil || answer.Node != node) {
		t.Errorf("the gate of %s is open, and %s answers %+v: %v", pod.Name, node, answer, err)
	}
}

// answer waits until the Services' pods answer.
func (r *replaced) answer(t *testing.T) {
	t.Helper()
	for _, s := range r.services {
		wantAnswers(t, r.Lab, s.client, "tcp", s.vip, s.pod.Name)
	}
}

// replace replaces the pods by others on a node, and returns how many new connections were lost.
func (r *replaced) replace(t *testing.T, node string) (lost int) {
	t.Helper()
	var probes []*lab.Probe
	for _, s := range r.services {
		probes = append(probes, r.StartProbe(t.Context(), s.client, "tcp", s.vip, newEvery))
	}
	r.end(t, r.ready(t, r.create(t, node)))
	r.answer(t)
	for i, s := range r.services {
		report := probes[i].Stop()
		t.Logf("%s: %s", s.name, report)
		if len(report.Pods) != 2 {
			t.Errorf("%s: the pods that answered: %v, want both", s.name, report.Pods)
		}
		lost += report.Failed()
	}
	return lost
}

// late is how late a busy controller-manager writes EndpointSlices.
const late = 500 * time.Millisecond

// end deletes pods. Their kubelets know at once and nodes late, as the writer of EndpointSlices is.
func (r *replaced) end(t *testing.T, pods []*corev1.Pod) {
	t.Helper()
	objects, sleep := r.Kube().CoreV1().Pods("default"), sleepOf(pods[0])
	each := func(f func(pod string) error) {
		t.Helper()
		for _, pod := range pods {
			if err := f(pod.Name); err != nil {
				t.Fatal(err)
			}
		}
	}
	each(func(pod string) error { return objects.Delete(t.Context(), pod, metav1.DeleteOptions{}) })
	if sleep == 0 {
		each(r.StopPod)
	}
	time.Sleep(late)
	each(func(pod string) error { return r.SetConditions(t.Context(), pod, lab.ServingTerminating) })
	if sleep > 0 {
		time.Sleep(sleep - late)
		each(r.StopPod)
	}
	each(func(pod string) error {
		return objects.Delete(t.Context(), pod, metav1.DeleteOptions{GracePeriodSeconds: new(int64)})
	})
	each(func(pod string) error { return r.RemovePod(t.Context(), pod) })
}

// gatesWait has no node forward, so that none announces: gates stay closed. They open on a node where the time-out is
// short, and on another one once the addresses are announced. A pod of no Service shows how far that node is: it
// waits for two seconds.
func (r *replaced) gatesWait(t *testing.T) {
	const hasty, timeout = "k8s-worker-177", "2s"
	proxy := r.Agent("proxy", hasty)
	proxy.SetFlag("readiness-gate-timeout", timeout)
	restart(t, proxy, (*lab.Agent).Stop, 0)
	forward := func(on string) {
		t.Helper()
		for _, node := range workers(r.Lab) {
			mustExec(t, r.Lab, node, "sysctl", "-qw", "net.ipv4.ip_forward="+on)
		}
	}
	forward("0")
	for _, s := range r.services {
		for _, node := range workers(r.Lab) {
			if s.policy == "Cluster" || s.pod.Spec.NodeName == node {
				wantReason(t, r.Lab, node, s.vip.Addr(), string(lb.ReasonForwardingOff))
			}
		}
	}
	waiting, impatient := r.create(t, bootNode), r.create(t, hasty)
	waitGate(t, r.Lab, runPod(t, r.Lab, aPod("of-no-service", "", bootNode), netip.MustParseAddr("192.168.189.200")).Name,
		lb.ReasonNoService)
	for i, s := range r.services {
		if c := gateOf(t, r.Lab, waiting[i].Name); c != nil {
			t.Errorf("no node announces %s, and the gate is %s because of %s: %s", s.name, c.Status, c.Reason, c.Message)
		}
		want := fmt.Sprintf("%s did not announce %s for default/%s (%s) within %s", hasty, s.vip.Addr(), s.name,
			lb.ReasonForwardingOff, timeout)
		if message := waitGate(t, r.Lab, impatient[i].Name, lb.ReasonTimedOut); !strings.Contains(message, want) {
			t.Errorf("the gate opened as %q, want %q", message, want)
		}
	}
	forward("1")
	r.ready(t, waiting)
}
