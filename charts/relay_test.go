package charts

import (
	"slices"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// TestRelayOwnPods has the relay in a DaemonSet whose pods of two releases run side by side: with a surge, and
// without a port that the scheduler would compare. They and the proxy share the directory of the node's sockets.
func TestRelayOwnPods(t *testing.T) {
	t.Parallel()
	for _, separate := range []string{"false", "true"} {
		objects := render(t, "relay.enabled=true", "relay.ownPods=true", "node.separatePods="+separate,
			`proxy.nodeSelector=null`, "serviceMonitor.enabled=true")
		proxySet := map[string]string{"false": "landfall-node", "true": "landfall-proxy"}[separate]
		node := as[appsv1.DaemonSet](t, objects, "DaemonSet "+proxySet).Spec
		spec := as[appsv1.DaemonSet](t, objects, "DaemonSet landfall-relay").Spec
		for _, c := range node.Template.Spec.Containers {
			if c.Name == "relay" {
				t.Errorf("%s has a relay too", proxySet)
			}
		}
		one, none := intstr.FromInt32(1), intstr.FromInt32(0)
		if r := spec.UpdateStrategy.RollingUpdate; r == nil || *r.MaxSurge != one || *r.MaxUnavailable != none {
			t.Errorf("the strategy is %+v", spec.UpdateStrategy)
		}
		pod := spec.Template.Spec
		relay := pod.Containers[0]
		if len(pod.Containers) != 1 || relay.Name != "relay" || len(relay.Ports) > 0 || !pod.HostNetwork {
			t.Errorf("the pod is %+v", pod)
		}
		if relay.ReadinessProbe.Exec == nil || relay.LivenessProbe.Exec == nil ||
			!slices.Contains(relay.Args, "--hand-over-socket=/run/landfall/hand-over/relay.sock") {
			t.Errorf("probes %+v %+v, arguments %q", relay.ReadinessProbe, relay.LivenessProbe, relay.Args)
		}
		for name, volumes := range map[string][]corev1.Volume{proxySet: node.Template.Spec.Volumes, "relay": pod.Volumes} {
			i := slices.IndexFunc(volumes, func(v corev1.Volume) bool { return v.Name == "feed" })
			if feed := volumes[i].HostPath; feed == nil || feed.Path != "/run/landfall/landfall-system-landfall" {
				t.Errorf("%s: the sockets are in %+v", name, volumes[i])
			}
		}
		metrics := as[corev1.Service](t, objects, "Service landfall-relay-metrics").Spec
		if len(metrics.Ports) != 1 || metrics.Ports[0].TargetPort.IntValue() != 7483 {
			t.Errorf("metrics: %+v", metrics.Ports)
		}
	}
	if _, err := template(t, "relay.enabled=true", "relay.ownPods=true", "podMonitor.enabled=true"); err == nil {
		t.Error("a PodMonitor finds no port")
	}
	shared := as[appsv1.DaemonSet](t, render(t, "relay.enabled=true"), "DaemonSet landfall-node").Spec.Template.Spec
	if i := slices.IndexFunc(shared.Containers, func(c corev1.Container) bool { return c.Name == "relay" }); i < 0 ||
		len(shared.Containers[i].Ports) == 0 || slices.ContainsFunc(shared.Containers[i].Args, func(arg string) bool {
		return arg == "--hand-over-socket=/run/landfall/hand-over/relay.sock"
	}) {
		t.Error("without it, the relay is not a container of the proxy's pod that lists its ports")
	}
}

// TestRelayUpdateStrategy has the relay's own pods replaced as node.updateStrategy says, on as many nodes at once, but
// by a surge: the next relay of a node has to start before the one before ends.
func TestRelayUpdateStrategy(t *testing.T) {
	t.Parallel()
	const strategy = "node.updateStrategy."
	for _, test := range []struct {
		set  []string
		want string // the surge; empty for OnDelete
	}{
		{nil, "1"},
		{[]string{strategy + `rollingUpdate.maxUnavailable="25%"`}, "25%"},
		{[]string{strategy + "rollingUpdate.maxUnavailable=0", strategy + "rollingUpdate.maxSurge=3"}, "3"},
		{[]string{strategy + "rollingUpdate=null"}, "1"},
		{[]string{strategy + `type="OnDelete"`}, ""},
	} {
		set := append([]string{"relay.enabled=true", "relay.ownPods=true"}, test.set...)
		got := as[appsv1.DaemonSet](t, render(t, set...), "DaemonSet landfall-relay").Spec.UpdateStrategy
		if test.want == "" {
			if got.Type != appsv1.OnDeleteDaemonSetStrategyType || got.RollingUpdate != nil {
				t.Errorf("%q: the strategy is %+v", test.set, got)
			}
			continue
		}
		if r := got.RollingUpdate; got.Type != appsv1.RollingUpdateDaemonSetStrategyType || r == nil ||
			r.MaxSurge.String() != test.want || r.MaxUnavailable.String() != "0" {
			t.Errorf("%q: the strategy is %s, %+v", test.set, got.Type, r)
		}
	}
}
