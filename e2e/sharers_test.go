package e2e

import (
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/landfall-lb/landfall/e2e/lab"
)

// TestContract11AChangeIntoTheOthersPort has two Services share an address of each family, and one of them take the
// port of the other, which is under traffic and loses nothing. By default the one that changed is told and stays; with
// --when-duplicate=move it gets another address and is served there. Then the older one does it, and moves as well.
func TestContract11AChangeIntoTheOthersPort(t *testing.T) {
	t.Parallel()
	l := startDualStack(t, lab.Options{})
	pod := podOn(l, "k8s-worker-177", "other-1", 90)
	pod.App = "other"
	if err := l.AddPod(t.Context(), pod); err != nil {
		t.Fatal(err)
	}
	const first, second = "my-nginx", "other"
	shares := lab.Service{Namespace: "default", Type: "LoadBalancer",
		Annotations: map[string]string{"landfall.dev/allow-shared-ip": "together"},
		IPFamilies:  []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol}}
	shared := []string{seedVIP.Addr().String(), seedVIP6.Addr().String()}
	next := []string{seedVIP.Addr().Next().String(), seedVIP6.Addr().Next().String()}
	for _, s := range []struct {
		name string
		port uint16
		pods []string
	}{{first, 80, []string{"my-nginx-1", "my-nginx-2"}}, {second, 8080, []string{"other-1"}}} {
		shares.Name, shares.App, shares.Ports = s.name, s.name, []lab.Port{{Port: s.port, Target: 80}}
		if err := l.AddService(t.Context(), shares); err != nil {
			t.Fatal(err)
		}
		serve(t, l, s.name, s.port, shared, s.pods...)
	}

	t.Run("by default it is told and stays", func(t *testing.T) {
		stop := undisturbed(t, l, 80, "my-nginx-1", "my-nginx-2")
		setPort(t, l, second, 80)
		wantCondition(t, l, second, "landfall.dev/Assigned", "False", "Duplicate", "default/"+first)
		wantEvent(t, l, second, "Duplicate", "default/"+first)
		time.Sleep(2 * time.Second)
		wantAddresses(t, l, second, shared...)
		wantCondition(t, l, first, "landfall.dev/Assigned", "True", "Assigned", "")
		stop()
	})
	setPort(t, l, second, 8080)
	wantCondition(t, l, second, "landfall.dev/Assigned", "True", "Assigned", "shared")
	serve(t, l, second, 8080, shared, "other-1")
	for _, a := range l.Agents("controller") {
		a.SetFlag("when-duplicate", "move")
		if err := errors.Join(a.Restart(t.Context()), a.WaitReady(t.Context())); err != nil {
			t.Fatal(err)
		}
	}
	t.Run("told to, it moves", func(t *testing.T) {
		stop := undisturbed(t, l, 80, "my-nginx-1", "my-nginx-2")
		setPort(t, l, second, 80)
		wantAddresses(t, l, second, next...)
		wantCondition(t, l, second, "landfall.dev/Assigned", "True", "Assigned", next[0])
		wantEvent(t, l, second, "Assigned", next[0])
		serve(t, l, second, 80, next, "other-1")
		wantAddresses(t, l, first, shared...)
		stop()
	})
	setPort(t, l, second, 8080)
	setShared(t, l, second, shared)
	serve(t, l, second, 8080, shared, "other-1")
	t.Run("so does the older one", func(t *testing.T) {
		stop := undisturbed(t, l, 8080, "other-1")
		setPort(t, l, first, 8080)
		// Those of before are in quarantine for the Service that had them.
		after := []string{seedVIP.Addr().Next().Next().String(), seedVIP6.Addr().Next().Next().String()}
		serve(t, l, first, 8080, after, "my-nginx-1", "my-nginx-2")
		wantAddresses(t, l, second, shared...)
		stop()
	})
}

// undisturbed keeps a port of the shared addresses under traffic. The returned function ends it, and fails the test if
// a connection broke or reached another pod than these.
func undisturbed(t *testing.T, l *lab.Lab, port uint16, pods ...string) (stop func()) {
	t.Helper()
	var all []*traffic
	for _, addr := range []netip.Addr{seedVIP.Addr(), seedVIP6.Addr()} {
		all = append(all, startTraffic(t, l, netip.AddrPortFrom(addr, port)))
	}
	return func() {
		t.Helper()
		time.Sleep(time.Second)
		for _, run := range all {
			report, lost := run.stop(t)
			wantNoneLost(t, report)
			if lost > 0 {
				t.Errorf("%d long-lived connections were lost", lost)
			}
			for pod, n := range report.Pods {
				if !slices.Contains(pods, pod) {
					t.Errorf("%s answered %d times", pod, n)
				}
			}
		}
	}
}

// serve waits until the Service is served at these addresses, by these pods.
func serve(t *testing.T, l *lab.Lab, service string, port uint16, addrs []string, pods ...string) {
	t.Helper()
	wantAddresses(t, l, service, addrs...)
	for _, addr := range addrs {
		wantAnswers(t, l, lab.FarClientName, "tcp", netip.AddrPortFrom(netip.MustParseAddr(addr), port), pods...)
	}
}

// setShared has a Service request addresses until it holds them.
func setShared(t *testing.T, l *lab.Lab, service string, addrs []string) {
	t.Helper()
	const request = "landfall.dev/loadBalancerIPs"
	updateService(t, l, service, func(s *corev1.Service) { s.Annotations[request] = strings.Join(addrs, ",") })
	wantAddresses(t, l, service, addrs...)
	updateService(t, l, service, func(s *corev1.Service) { delete(s.Annotations, request) })
}

// setPort gives a Service another port; that of its pods stays.
func setPort(t *testing.T, l *lab.Lab, service string, port int32) {
	t.Helper()
	updateService(t, l, service, func(s *corev1.Service) {
		s.Spec.Ports[0].Port, s.Spec.Ports[0].TargetPort = port, intstr.FromInt32(80)
	})
}
