package e2e

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/landfall-lb/landfall/e2e/lab"
)

// storm changes Services and pods at random while programs are stopped and killed at random, and
// notes who holds which address.
type storm struct {
	l      *lab.Lab
	random *rand.Rand
	// holders is the address that each living Service was seen with first.
	holders map[string]string
}

const stormSteps = 60

// After a storm of changes and kills the cluster is as a fresh start would make it, and no address
// was ever moved or held twice.
func TestStorm(t *testing.T) { inEachMode(t, testStorm) }

func testStorm(t *testing.T, l *lab.Lab) {
	ctx := t.Context()
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	s := &storm{l: l, random: rand.New(rand.NewPCG(seed, 0)), holders: map[string]string{"my-nginx": "172.26.236.180"}}
	for range stormSteps {
		what, err := s.step(ctx)
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		if err := s.look(ctx); err != nil {
			t.Fatalf("after %s: %v", what, err)
		}
		time.Sleep(time.Duration(s.random.IntN(150)) * time.Millisecond)
	}
	s.calm(t)
	for name, address := range s.holders {
		waitAnnounced(t, l, name, address)
		wantAnswers(t, l, lab.ClientName, "tcp", netip.AddrPortFrom(netip.MustParseAddr(address), 80), "my-nginx-1",
			"my-nginx-2")
	}
	time.Sleep(settle)
	for _, node := range l.Cluster().Nodes {
		wantRulesOfFreshStart(t, l, node.Name)
	}
}

// step does one thing at random and says what.
func (s *storm) step(ctx context.Context) (what string, err error) {
	services := s.l.Kube().CoreV1().Services("default")
	name := fmt.Sprintf("web-%d", s.random.IntN(3))
	switch s.random.IntN(6) {
	case 0:
		what = "create " + name
		err = s.l.AddService(ctx, lab.Service{Namespace: "default", Name: name, App: "my-nginx", Type: "LoadBalancer",
			Ports: []lab.Port{{Port: 80}}})
		if apierrors.IsAlreadyExists(err) {
			err = nil
		}
	case 1:
		what = "delete " + name
		if _, err = services.Get(ctx, name, metav1.GetOptions{}); err == nil {
			delete(s.holders, name)
			err = s.l.RemoveService(ctx, "default", name)
		}
	case 2:
		what = "another policy for " + name
		err = s.change(ctx, name, func(svc *corev1.Service) {
			if svc.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal {
				svc.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyCluster
			} else {
				svc.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
			}
		})
	case 3:
		what = "another port for " + name
		// 80 and 8081
		err = s.change(ctx, name, func(svc *corev1.Service) { svc.Spec.Ports[0].Port = 8161 - svc.Spec.Ports[0].Port })
	case 4:
		pod := fmt.Sprintf("my-nginx-%d", 1+s.random.IntN(2))
		what = "another state for " + pod
		states := []lab.Conditions{lab.Ready, lab.NotReady, lab.ServingTerminating}
		err = s.l.SetConditions(ctx, pod, states[s.random.IntN(len(states))])
	default:
		program := []string{"controller", "speaker", "proxy"}[s.random.IntN(3)]
		agents := s.l.Agents(program)
		agent := agents[s.random.IntN(len(agents))]
		what = "restart " + agent.Name()
		if s.random.IntN(2) == 0 {
			what = "kill " + agent.Name()
			err = agent.Kill()
		} else if err = agent.WaitReady(ctx); err == nil {
			err = agent.Stop()
		}
		if err == nil {
			err = agent.Start()
		}
	}
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		err = nil
	}
	return what, err
}

func (s *storm) change(ctx context.Context, name string, change func(*corev1.Service)) error {
	services := s.l.Kube().CoreV1().Services("default")
	svc, err := services.Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return err
	}
	change(svc)
	_, err = services.Update(ctx, svc, metav1.UpdateOptions{})
	return err
}

// look checks that no address is held twice and none has moved.
func (s *storm) look(ctx context.Context) error {
	list, err := s.l.Kube().CoreV1().Services("default").List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	holder := map[string]string{}
	for _, svc := range list.Items {
		for _, in := range svc.Status.LoadBalancer.Ingress {
			if other, ok := holder[in.IP]; ok {
				return fmt.Errorf("%s is held by %s and by %s", in.IP, other, svc.Name)
			}
			holder[in.IP] = svc.Name
			if svc.DeletionTimestamp != nil {
				continue // it goes once nobody announces it
			}
			if before, ok := s.holders[svc.Name]; ok && before != in.IP {
				return fmt.Errorf("%s had %s and has %s now", svc.Name, before, in.IP)
			}
			s.holders[svc.Name] = in.IP
		}
	}
	return nil
}

// calm puts pods, ports and policies back, and waits for the agents and for addresses.
func (s *storm) calm(t *testing.T) {
	t.Helper()
	ctx := t.Context()
	for _, pod := range []string{"my-nginx-1", "my-nginx-2"} {
		if err := s.l.SetConditions(ctx, pod, lab.Ready); err != nil {
			t.Fatal(err)
		}
	}
	for _, program := range []string{"controller", "speaker", "proxy"} {
		for _, a := range s.l.Agents(program) {
			if err := a.WaitReady(ctx); err != nil {
				t.Fatal(err)
			}
			if log := a.Log(); strings.Contains(log, "panic:") || strings.Contains(log, "goroutine ") {
				t.Errorf("%s has crashed:\n%s", a.Name(), log)
			}
		}
	}
	var list *corev1.ServiceList
	eventually(t, "the deleted Services are gone", func() (err error) {
		if list, err = s.l.Kube().CoreV1().Services("default").List(ctx, metav1.ListOptions{}); err != nil {
			return err
		}
		for _, svc := range list.Items {
			if svc.DeletionTimestamp != nil {
				return fmt.Errorf("%s is still there", svc.Name)
			}
		}
		return nil
	})
	for _, svc := range list.Items {
		if svc.Spec.Type != corev1.ServiceTypeLoadBalancer {
			continue
		}
		updateService(t, s.l, svc.Name, func(svc *corev1.Service) {
			svc.Spec.Ports[0].Port = 80
			svc.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyCluster
		})
		eventually(t, svc.Name+" has an address", func() error {
			addrs, err := addressesOf(ctx, s.l, svc.Name)
			if err == nil && len(addrs) != 1 {
				err = fmt.Errorf("it has %v", addrs)
			}
			return err
		})
	}
	if err := s.look(ctx); err != nil {
		t.Error(err)
	}
}
