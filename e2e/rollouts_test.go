package e2e

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/landfall-lb/landfall/e2e/lab"
	"github.com/landfall-lb/landfall/e2e/lab/labtest"
	"github.com/landfall-lb/landfall/internal/lb"
)

// TestRollouts has the API server add a sleep and a readiness gate to pods, in namespaces that ask for them. It
// replaces pods as Deployments and kubelets do, over ARP and BGP, with both policies.
func TestRollouts(t *testing.T) {
	t.Parallel()
	cluster := lab.SeedCluster()
	cluster.ToR = lab.ToR{Kind: lab.FRR, Count: 1, ASN: 64501, NodeASN: 64500}
	l := labtest.Start(t, cluster, lab.Options{MutatingPolicies: true,
		Values: map[string]any{"readinessGate": map[string]any{"enabled": true, "timeout": "10m"}}})
	objects := poolAndAdvertisement + "---" + fmt.Sprintf(bgpPool, "") + bgpPeers(cluster, "")
	if err := l.ApplyYAML(t.Context(), objects); err != nil {
		t.Fatal(err)
	}
	asks := map[string]string{lb.LabelPreStopSleep: "", lb.LabelWaitUntilProgrammed: ""}
	for name, labels := range map[string]map[string]string{"asks": asks, "not": nil} {
		if _, err := l.Kube().CoreV1().Namespaces().Create(t.Context(),
			&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}}, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	t.Run("a sleep is added", func(t *testing.T) { testPreStopSleep(t, l) })
	// One that fails may have left a speaker stopped.
	if t.Run("a gate is added, L2", func(t *testing.T) { testReadinessGate(t, l, "arp", seedVIP.Addr(), 31100) }) &&
		t.Run("a gate is added, BGP", func(t *testing.T) { testReadinessGate(t, l, "bgp", bgpVIP.Addr(), 31101) }) {
		t.Run("pods are replaced", func(t *testing.T) { testReplaced(t, l) })
	}
}

// testPreStopSleep has the API server add a sleep to the containers that lack a preStop hook, in
// namespaces that ask for it, where the pod has time for it.
func testPreStopSleep(t *testing.T, l *lab.Lab) {
	own := &corev1.Lifecycle{PreStop: &corev1.LifecycleHandler{Exec: &corev1.ExecAction{Command: []string{"true"}}}}
	start := &corev1.Lifecycle{PostStart: &corev1.LifecycleHandler{Exec: &corev1.ExecAction{Command: []string{"true"}}}}
	for _, tt := range []struct {
		name, namespace string
		change          func(*corev1.PodSpec)
		want            string // of each container: its sleep, or its own hook
	}{
		{"plain", "asks", func(*corev1.PodSpec) {}, "3 own 3+start"},
		{"elsewhere", "not", func(*corev1.PodSpec) {}, "- own -+start"},
		{"job", "asks", func(s *corev1.PodSpec) { s.RestartPolicy = corev1.RestartPolicyNever }, "- own -+start"},
		{"hasty", "asks", func(s *corev1.PodSpec) { s.TerminationGracePeriodSeconds = new(int64(3)) }, "- own -+start"},
		{"own", "asks", func(s *corev1.PodSpec) { s.Containers = s.Containers[1:2] }, "own"},
	} {
		ask := func() (string, error) {
			pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: tt.name}, Spec: corev1.PodSpec{Containers: []corev1.Container{
				{Name: "a", Image: "a"}, {Name: "b", Image: "b", Lifecycle: own}, {Name: "c", Image: "c", Lifecycle: start}}}}
			tt.change(&pod.Spec)
			made, err := l.Kube().CoreV1().Pods(tt.namespace).Create(t.Context(), pod,
				metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
			if err != nil {
				return "", err
			}
			got := ""
			for _, c := range made.Spec.Containers {
				got += " " + hook(c.Lifecycle)
			}
			return got[1:], nil
		}
		// The API server takes a moment to heed a new policy.
		eventually(t, tt.name, func() error {
			got, err := ask()
			if err == nil && got != tt.want {
				err = fmt.Errorf("hooks %q, want %q", got, tt.want)
			}
			return err
		})
	}
}

func hook(l *corev1.Lifecycle) string {
	if l == nil {
		return "-"
	}
	text := "-"
	switch {
	case l.PreStop != nil && l.PreStop.Sleep != nil:
		text = fmt.Sprint(l.PreStop.Sleep.Seconds)
	case l.PreStop != nil:
		text = "own"
	}
	if l.PostStart != nil {
		text += "+start"
	}
	return text
}

// testReadinessGate has the API server add the gate in namespaces that ask for it. A pod that waits for the
// gate alone gets its node's traffic at once, with policy Local too, and the gate opens once the node stands
// ready to announce the address as well, or over BGP announces it, for which the test keeps its speaker away at first.
func testReadinessGate(t *testing.T, l *lab.Lab, name string, vip netip.Addr, nodePort uint16) {
	if err := l.AddService(t.Context(), loadBalancer(name, "Local", vip, nodePort)); err != nil {
		t.Fatal(err)
	}
	var pod lab.Pod
	for _, node := range []string{"k8s-worker-179", bootNode} {
		pod = podOn(l, node, name+"-"+node, byte(nodePort-31000))
		pod.App = name
		if err := l.AddPod(t.Context(), pod); err != nil {
			t.Fatal(err)
		}
	}
	waitAnnounced(t, l, name, vip.String())
	port := netip.AddrPortFrom(nodeAddr(l, pod.Node), nodePort)
	if err := l.SetConditions(t.Context(), pod.Name, lab.NotReady); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the node has no endpoint that is ready", func() error {
		if answer, err := l.Ask(t.Context(), lab.ClientName, "tcp", port); err == nil {
			return fmt.Errorf("%+v", answer)
		}
		return nil
	})
	wantReason(t, l, pod.Node, vip, string(lb.ReasonNoLocalBackends))
	speaker := l.Agent("speaker", pod.Node)
	if err := speaker.Stop(); err != nil {
		t.Fatal(err)
	}

	object := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: pod.Name, Namespace: "asks"}, Spec: corev1.PodSpec{
		NodeName: pod.Node, ReadinessGates: []corev1.PodReadinessGate{{ConditionType: "example.com/other"}},
		Containers: []corev1.Container{{Name: "a", Image: "a"}}}}
	pods := l.Kube().CoreV1().Pods("asks")
	dryRun := metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}}
	eventually(t, "the API server adds the gate", func() error {
		for _, gates := range [][]corev1.PodReadinessGate{nil, object.Spec.ReadinessGates} {
			asked := object.DeepCopy()
			asked.Spec.ReadinessGates = gates
			made, err := pods.Create(t.Context(), asked, dryRun)
			want := append(slices.Clone(gates), corev1.PodReadinessGate{ConditionType: lb.ConditionProgrammed})
			if err == nil && !slices.Equal(made.Spec.ReadinessGates, want) {
				err = fmt.Errorf("gates %v, want %v", made.Spec.ReadinessGates, want)
			}
			if err != nil {
				return err
			}
		}
		return nil
	})
	// One of the Service's namespace has the gate in its template.
	object.Namespace = "default"
	object.Spec.ReadinessGates = append(object.Spec.ReadinessGates,
		corev1.PodReadinessGate{ConditionType: lb.ConditionProgrammed})
	runPod(t, l, object, pod.Addr, "example.com/other")
	eventually(t, "the rules deliver to the pod", func() error {
		answer, err := l.Ask(t.Context(), lab.ClientName, "tcp", port)
		if err == nil && answer.Pod != pod.Name {
			err = fmt.Errorf("%s answers", answer.Pod)
		}
		return err
	})
	for range 10 {
		if c := gateOf(t, l, pod.Name); c != nil {
			t.Fatalf("the node does not announce the address, and the gate is %s because of %s: %s", c.Status, c.Reason, c.Message)
		}
		time.Sleep(100 * time.Millisecond)
	}
	if err := speaker.Start(); err != nil {
		t.Fatal(err)
	}
	waitGate(t, l, pod.Name, lb.ReasonProgrammed)
	gatesAreTheNodes(t, l, object.Namespace, pod)
}

// runPod creates a pod whose containers run, at an address, and which has other conditions.
func runPod(t *testing.T, l *lab.Lab, object *corev1.Pod, addr netip.Addr,
	others ...corev1.PodConditionType) *corev1.Pod {
	t.Helper()
	pods := l.Kube().CoreV1().Pods(object.Namespace)
	made, err := pods.Create(t.Context(), object, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	made.Status.PodIPs, made.Status.PodIP = []corev1.PodIP{{IP: addr.String()}}, addr.String()
	for _, name := range append(others, corev1.ContainersReady) {
		made.Status.Conditions = append(made.Status.Conditions, corev1.PodCondition{Type: name, Status: corev1.ConditionTrue})
	}
	if _, err := pods.UpdateStatus(t.Context(), made, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	return made
}

// gateOf returns the condition of a pod's gate; nil before it has one.
func gateOf(t *testing.T, l *lab.Lab, pod string) *corev1.PodCondition {
	t.Helper()
	now, err := l.Kube().CoreV1().Pods("default").Get(t.Context(), pod, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	at := slices.IndexFunc(now.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == lb.ConditionProgrammed
	})
	if at < 0 {
		return nil
	}
	return &now.Status.Conditions[at]
}

// waitGate waits until a pod's gate opens, which has to be for a reason; it returns the message.
func waitGate(t *testing.T, l *lab.Lab, pod string, reason lb.Reason) (message string) {
	t.Helper()
	eventually(t, "the gate of "+pod+" opens", func() error {
		c := gateOf(t, l, pod)
		switch {
		case c == nil || c.Status != corev1.ConditionTrue:
			return fmt.Errorf("the condition is %v", c)
		case c.Reason != string(reason):
			t.Errorf("the gate of %s opened because of %s, want %s: %s", pod, c.Reason, reason, c.Message)
		}
		message = c.Message
		return nil
	})
	return message
}

// gatesAreTheNodes writes the status of a pod with the tokens of nodes.
func gatesAreTheNodes(t *testing.T, l *lab.Lab, namespace string, pod lab.Pod) {
	other := workers(l)[slices.IndexFunc(workers(l), func(name string) bool { return name != pod.Node })]
	for _, test := range []struct{ what, node, body, refusal string }{
		{"its gate", pod.Node, `{"status":{"conditions":[{"type":"landfall.dev/programmed","status":"True"}]}}`, ""},
		{"the gate of another node's pod", other,
			`{"status":{"conditions":[{"type":"landfall.dev/programmed","status":"False"}]}}`, "its own pods only"},
		{"another condition", pod.Node, `{"status":{"conditions":[{"type":"Ready","status":"True"}]}}`,
			"landfall.dev/programmed only"},
		{"its phase", pod.Node, `{"status":{"phase":"Failed"}}`, "landfall.dev/programmed only"},
		{"what the kubelet has seen", pod.Node, `{"status":{"observedGeneration":77}}`, "landfall.dev/programmed only"},
		{"a label", pod.Node, `{"metadata":{"labels":{"app":"x"}}}`, "may not change labels"},
	} {
		as, err := l.KubeAs(l.Agent("proxy", test.node))
		if err != nil {
			t.Fatal(err)
		}
		_, err = as.CoreV1().Pods(namespace).Patch(t.Context(), pod.Name, types.StrategicMergePatchType, []byte(test.body),
			metav1.PatchOptions{}, "status")
		if err := refused(err, test.refusal); err != nil {
			t.Errorf("%s: %v", test.what, err)
		}
	}
}
