package e2e

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/landfall-lb/landfall/e2e/lab"
	"github.com/landfall-lb/landfall/e2e/lab/labtest"
)

// explained is what landfallctl says, in its first line, of a cluster with one fault.
type explained struct {
	name string
	// make makes the fault, and mend ends it, where the next fault would suffer from it.
	make, mend func(t *testing.T, l *lab.Lab)
	// ask are the arguments of landfallctl, want the beginning of its first line; and has a part of it
	// that depends on the run.
	ask  []string
	want string
	has  string
	// well is set where clients are let in or not on purpose.
	well bool
}

// svc asks for a Service.
func svc(name string) []string { return []string{"explain", "svc", name} }

// firstLine runs landfallctl on the control plane's node. Its exit code is 0 if it finds nothing
// wrong.
func firstLine(ctx context.Context, l *lab.Lab, ctl string, args ...string) (line string, well bool) {
	out, err := l.Exec(ctx, l.Cluster().Master().Name,
		append([]string{ctl, "--kubeconfig", l.Kubeconfig(), "--request-timeout", "30s"}, args...)...)
	line, _, _ = strings.Cut(out, "\n")
	return line, err == nil
}

// explainAll makes one fault after the other, and wants each in the first line.
func explainAll(t *testing.T, l *lab.Lab, faults []explained) {
	t.Helper()
	ctl := filepath.Join(programFolder(t), "landfallctl")
	for _, f := range faults {
		ok := t.Run(f.name, func(t *testing.T) {
			f.make(t, l)
			eventually(t, "landfallctl names the cause", func() error {
				line, well := firstLine(t.Context(), l, ctl, f.ask...)
				if !strings.HasPrefix(line, f.want) || !strings.Contains(line, f.has) || well != f.well {
					return fmt.Errorf("it says %q (nothing is wrong: %v), want %q", line, well, f.want+"…"+f.has)
				}
				return nil
			})
			if f.mend != nil {
				f.mend(t, l)
			}
		})
		if !ok {
			out, _ := l.Exec(context.WithoutCancel(t.Context()), l.Cluster().Master().Name, append([]string{ctl, "--kubeconfig",
				l.Kubeconfig(), "-o", "wide"}, f.ask...)...)
			t.Fatalf("the whole of what it says:\n%s", out)
		}
	}
}

// applied makes a fault of manifests.
func applied(manifest string) func(*testing.T, *lab.Lab) {
	return func(t *testing.T, l *lab.Lab) {
		t.Helper()
		eventually(t, "the API server takes it", func() error { return l.ApplyYAML(t.Context(), manifest) })
	}
}

// created makes a Service.
func created(name string, change func(*corev1.Service)) func(*testing.T, *lab.Lab) {
	return func(t *testing.T, l *lab.Lab) {
		t.Helper()
		createService(t, l, name, change)
	}
}

// backed makes a Service with the endpoints of my-nginx.
func backed(name string, change func(*corev1.Service)) func(*testing.T, *lab.Lab) {
	return func(t *testing.T, l *lab.Lab) {
		t.Helper()
		createService(t, l, name, change)
		copySlice(t, l, "my-nginx", name)
	}
}

// fromPool asks for a pool.
func fromPool(pool string) func(*corev1.Service) {
	return func(s *corev1.Service) { s.Annotations = map[string]string{"landfall.dev/address-pool": pool} }
}

// on runs a command on each node.
func on(argv ...string) func(*testing.T, *lab.Lab) {
	return func(t *testing.T, l *lab.Lab) {
		t.Helper()
		for _, n := range l.Cluster().Nodes {
			mustExec(t, l, n.Name, argv...)
		}
	}
}

// onOne runs a command on one node.
func onOne(node string, argv ...string) func(*testing.T, *lab.Lab) {
	return func(t *testing.T, l *lab.Lab) {
		t.Helper()
		mustExec(t, l, node, argv...)
	}
}

// labelled sets labels of the workers by a merge patch.
func labelled(labels string) func(*testing.T, *lab.Lab) {
	return func(t *testing.T, l *lab.Lab) {
		t.Helper()
		for _, node := range workers(l) {
			_, err := l.Kube().CoreV1().Nodes().Patch(t.Context(), node, types.MergePatchType,
				[]byte(`{"metadata":{"labels":`+labels+`}}`), metav1.PatchOptions{})
			if err != nil {
				t.Fatal(err)
			}
		}
	}
}

// pools are a pool for each of the faults of pools.
const explainPools = `
apiVersion: landfall.dev/v1beta1
kind: IPAddressPool
metadata: {name: lan}
spec: {addresses: [172.26.236.180-172.26.236.189]}
---
apiVersion: landfall.dev/v1beta1
kind: L2Advertisement
metadata: {name: lan}
spec: {ipAddressPools: [lan, far, small, quota, kept, cable]}
---
apiVersion: landfall.dev/v1beta1
kind: IPAddressPool
metadata: {name: far}
spec: {addresses: [203.0.113.0/28], autoAssign: false}
---
apiVersion: landfall.dev/v1beta1
kind: IPAddressPool
metadata: {name: silent}
spec: {addresses: [172.26.236.190/32], autoAssign: false}
---
apiVersion: landfall.dev/v1beta1
kind: IPAddressPool
metadata: {name: small}
spec: {addresses: [172.26.236.191/32], autoAssign: false}
---
apiVersion: landfall.dev/v1beta1
kind: IPAddressPool
metadata: {name: quota}
spec: {addresses: [172.26.236.192/31], autoAssign: false, addressesPerNamespace: 1}
---
apiVersion: landfall.dev/v1beta1
kind: IPAddressPool
metadata: {name: kept}
spec: {addresses: [172.26.236.194/32], autoAssign: false, quarantine: 1h}
---
apiVersion: landfall.dev/v1beta1
kind: IPAddressPool
metadata: {name: cable}
spec: {addresses: [10.79.0.10/32], autoAssign: false}
`

// TestExplain makes one fault after the other in a cluster, and wants landfallctl to name its cause
// in the first line.
func TestExplain(t *testing.T) {
	t.Parallel()
	cluster := lab.SeedCluster()
	l := labtest.Start(t, cluster, lab.Options{Values: map[string]any{"speaker": map[string]any{"requireReady": true}}})
	if err := l.ServeExec(t.Context()); err != nil {
		t.Fatal(err)
	}
	applied(explainPools)(t, l)
	if err := l.AddService(t.Context(), lab.SeedService()); err != nil {
		t.Fatal(err)
	}
	waitAnnounced(t, l, "my-nginx", "172.26.236.180")
	ctl := filepath.Join(programFolder(t), "landfallctl")
	for _, ask := range [][]string{svc("my-nginx"), {"explain", "ip", "172.26.236.180"}, {"explain", "node", workers(l)[0]},
		{"explain", "pool", "lan"}} {
		eventually(t, strings.Join(ask, " "), func() error {
			if line, well := firstLine(t.Context(), l, ctl, ask...); !well {
				return fmt.Errorf("something is wrong: %s", line)
			}
			return nil
		})
	}
	const excluded = "node.kubernetes.io/exclude-from-external-load-balancers"
	local := corev1.ServiceExternalTrafficPolicyLocal
	one := workers(l)[0]
	wellAgain := func(t *testing.T, l *lab.Lab) {
		t.Helper()
		eventually(t, one+" is well again", func() error {
			if line, well := firstLine(t.Context(), l, ctl, "explain", "node", one); !well {
				return fmt.Errorf("landfallctl says %s", line)
			}
			return nil
		})
	}
	unguard := func(t *testing.T, l *lab.Lab) {
		onOne(one, "nft", "delete table inet guard")(t, l)
		wellAgain(t, l)
	}
	explainAll(t, l, []explained{
		{name: "type", make: created("clusterip", func(s *corev1.Service) { s.Spec.Type = corev1.ServiceTypeClusterIP }),
			ask: svc("clusterip"), want: "Service default/clusterip: it is of type ClusterIP"},
		{name: "another load balancer", make: created("foreign", func(s *corev1.Service) {
			s.Spec.LoadBalancerClass = new("example.com/other")
		}), ask: svc("foreign"), want: "Service default/foreign: spec.loadBalancerClass example.com/other gives it to another"},
		{name: "proxy of another product", make: created("delegated", func(s *corev1.Service) {
			s.Labels = map[string]string{"service.kubernetes.io/service-proxy-name": "cilium"}
		}), ask: svc("delegated"),
			want: "Service default/delegated: the label service.kubernetes.io/service-proxy-name=cilium gives it to another"},
		{name: "wrong subnet", make: backed("far", fromPool("far")), ask: svc("far"), has: "(NoInterface)",
			want: "Service default/far: "},
		{name: "no advertisement", make: created("silent", fromPool("silent")), ask: svc("silent"),
			want: "Service default/silent: no L2Advertisement or BGPAdvertisement selects pool silent"},
		{name: "pool exhausted", make: func(t *testing.T, l *lab.Lab) {
			created("first", fromPool("small"))(t, l)
			wantAddresses(t, l, "first", "172.26.236.191")
			created("second", fromPool("small"))(t, l)
		}, ask: svc("second"), want: "Service default/second: all IPv4 addresses of pool small are held (PoolExhausted)"},
		{name: "pool", make: func(*testing.T, *lab.Lab) {}, ask: []string{"explain", "pool", "small"},
			want: "IPAddressPool small: it is full, and default/second waits for an address"},
		{name: "quota", make: func(t *testing.T, l *lab.Lab) {
			created("mine", fromPool("quota"))(t, l)
			wantAddresses(t, l, "mine", "172.26.236.192")
			created("too-much", fromPool("quota"))(t, l)
		}, ask: svc("too-much"), want: "Service default/too-much: ", has: "(QuotaExceeded)"},
		{name: "quarantine", make: func(t *testing.T, l *lab.Lab) {
			created("old", fromPool("kept"))(t, l)
			wantAddresses(t, l, "old", "172.26.236.194")
			if err := l.Kube().CoreV1().Services("default").Delete(t.Context(), "old", metav1.DeleteOptions{}); err != nil {
				t.Fatal(err)
			}
			elsewhere := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "next",
				Annotations: map[string]string{"landfall.dev/loadBalancerIPs": "172.26.236.194"}},
				Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeLoadBalancer, Ports: []corev1.ServicePort{{Port: 80}}}}
			eventually(t, "the address is in quarantine", func() error {
				if line, _ := firstLine(t.Context(), l, ctl, "explain", "ip", "172.26.236.194"); !strings.Contains(line, "quarantine") {
					return fmt.Errorf("landfallctl says %s", line)
				}
				return nil
			})
			if _, err := l.Kube().CoreV1().Services("kube-system").Create(t.Context(), elsewhere, metav1.CreateOptions{}); err != nil {
				t.Fatal(err)
			}
		}, ask: svc("kube-system/next"), want: "Service kube-system/next: ", has: "(AddressKept)"},
		{name: "address of no pool", make: func(*testing.T, *lab.Lab) {}, ask: []string{"explain", "ip", "198.51.100.9"},
			want: "IP 198.51.100.9: no pool contains it"},
		{name: "a targetPort that no container has", make: func(t *testing.T, l *lab.Lab) {
			created("misnamed", nil)(t, l)
			endpoint(t, l, "misnamed", nginx1, "ports: []", "nodeName: "+one)
		}, ask: svc("misnamed"), want: "Service default/misnamed: its endpoints have no port for 80/TCP, so clients are refused",
			has: "(NoBackends)"},
		{name: "a targetPort where no pod listens", make: func(t *testing.T, l *lab.Lab) {
			created("misported", nil)(t, l)
			endpoint(t, l, "misported", nginx1, `ports: [{name: "", port: 8181, protocol: TCP}]`, "nodeName: "+one)
		}, ask: svc("misported"), want: "Service default/misported: nothing listens at 192.168.189.131:8181: k8s-",
			has: "most likely targetPort is not a port of the pods (EndpointUnreachable)"},
		{name: "pods that do not let nodes in", make: on("nft", "add table ip guard; add chain ip guard out "+
			"{ type filter hook output priority 0; }; add rule ip guard out ip daddr 192.168.0.0/16 tcp dport 80 drop"),
			mend: on("nft", "delete table ip guard"), ask: svc("my-nginx"), want: "Service default/my-nginx: k8s-worker-",
			has: "(no answer within 150ms): a NetworkPolicy or firewall drops it, or the pod network does not carry it " +
				"(EndpointUnreachable)"},
		{name: "local without nodes", make: func(t *testing.T, l *lab.Lab) {
			created("nowhere", func(s *corev1.Service) { s.Spec.ExternalTrafficPolicy = local })(t, l)
			endpoint(t, l, "nowhere", nginx1, `ports: [{name: "", port: 80, protocol: TCP}]`, "hostname: pod")
		}, ask: svc("nowhere"), want: "Service default/nowhere: none of its 1 ready endpoint has a nodeName",
			has: "(NoLocalBackends)"},
		{name: "no endpoints", make: created("empty", nil), ask: svc("empty"),
			want: "Service default/empty: it has no endpoints, so clients are refused"},
		{name: "local without pods", make: created("local", func(s *corev1.Service) { s.Spec.ExternalTrafficPolicy = local }),
			ask: svc("local"), want: "Service default/local: it has no endpoints"},
		{name: "local without pods where it may be announced", make: func(t *testing.T, l *lab.Lab) {
			created("elsewhere", func(s *corev1.Service) { s.Spec.ExternalTrafficPolicy = local })(t, l)
			onNode(t, l, "elsewhere", "192.168.176.10", l.Cluster().Master().Name)
		}, ask: svc("elsewhere"), want: "Service default/elsewhere: ", has: "(NoLocalBackends)"},
		{name: "all pods unready", make: func(t *testing.T, l *lab.Lab) { readyPods(t, l, false) },
			mend: func(t *testing.T, l *lab.Lab) {
				readyPods(t, l, true)
				waitAnnounced(t, l, "my-nginx", "172.26.236.180")
			},
			ask: svc("my-nginx"), want: "Service default/my-nginx: none of its 2 endpoints is ready"},
		{name: "exclude label", make: labelled(`{"` + excluded + `":""}`), ask: svc("my-nginx"),
			mend: func(t *testing.T, l *lab.Lab) {
				labelled(`{"`+excluded+`":null}`)(t, l)
				waitAnnounced(t, l, "my-nginx", "172.26.236.180")
			}, want: "Service default/my-nginx: ", has: "(NodeExcluded)"},
		{name: "duplicate address", make: func(t *testing.T, l *lab.Lab) {
			mustExec(t, l, lab.ClientName, "ip", "addr", "add", "172.26.236.189/24", "dev", "eth0")
			backed("twice", func(s *corev1.Service) {
				s.Annotations = map[string]string{"landfall.dev/loadBalancerIPs": "172.26.236.189"}
			})(t, l)
		}, mend: func(t *testing.T, l *lab.Lab) {
			mustExec(t, l, lab.ClientName, "ip", "addr", "del", "172.26.236.189/24", "dev", "eth0")
		}, ask: svc("twice"), want: "Service default/twice: no node announces 172.26.236.189: 172.26.236.189 is in use by ",
			has: "(AddressConflict)"},
		{name: "ip_forward", make: on("sysctl", "-qw", "net.ipv4.ip_forward=0"), ask: svc("my-nginx"),
			mend: on("sysctl", "-qw", "net.ipv4.ip_forward=1"), want: "Service default/my-nginx: ", has: "(ForwardingOff)"},
		{name: "FORWARD DROP", make: on("nft", "add table ip guard; add chain ip guard forward "+
			"{ type filter hook forward priority 0; policy drop; }"), ask: []string{"explain", "node", workers(l)[0]},
			mend: on("nft", "delete table ip guard"), want: "Node " + workers(l)[0] + ": ", has: "(ForwardDropped)"},
		{name: "a rule ahead of Landfall's drops the port", make: on("nft", "add table ip guard; add chain ip guard pre "+
			"{ type filter hook prerouting priority raw; }; add rule ip guard pre tcp dport { 22, 80 } drop"), ask: svc("my-nginx"),
			mend: on("nft", "delete table ip guard"), want: "Service default/my-nginx: k8s-worker-", has: "drops what clients " +
				"send to 172.26.236.180:80/TCP: rule 1 of the chain ip guard pre, which another program has (ClientsDropped)"},
		{name: "a rule in iptables' table mangle drops the address", make: on("iptables", "-t", "mangle", "-A", "PREROUTING",
			"-d", "172.26.236.180", "-j", "DROP"), ask: svc("my-nginx"),
			mend: on("iptables", "-t", "mangle", "-F"), want: "Service default/my-nginx: k8s-worker-",
			has: "rule 1 of the chain ip mangle PREROUTING"},
		{name: "a rule in inet refuses what is forwarded", make: on("nft", "add table inet guard; add chain inet guard fw "+
			"{ type filter hook forward priority filter; }; add rule inet guard fw tcp dport 80 reject"), ask: svc("my-nginx"),
			mend: on("nft", "delete table inet guard"), want: "Service default/my-nginx: k8s-worker-",
			has: "rule 1 of the chain inet guard fw, which another program has (ClientsDropped)"},
		{name: "no way back to clients", make: on("ip", "route", "del", "default"), ask: svc("my-nginx"),
			mend: on("ip", "route", "add", "default", "via", "172.26.236.1"), want: "Service default/my-nginx: k8s-worker-",
			has: "has no route back to clients outside of its own subnets, such as 198.51.100.7: replies to them are lost"},
		{name: "kube-ipvs0", make: func(t *testing.T, l *lab.Lab) {
			onOne(one, "ip", "link", "add", "kube-ipvs0", "type", "bridge")(t, l)
			onOne(one, "ip", "addr", "add", "172.26.236.180/32", "dev", "kube-ipvs0")(t, l)
		}, mend: onOne(one, "ip", "link", "delete", "kube-ipvs0"), ask: []string{"explain", "node", one},
			want: "Node " + one + ": " + one + " answers ARP for all addresses of Services", has: "(ARPNotStrict)"},
		{name: "an address of a Service on lo", make: onOne(one, "ip", "addr", "add", "172.26.236.180/32", "dev", "lo"),
			mend: func(t *testing.T, l *lab.Lab) {
				onOne(one, "ip", "addr", "del", "172.26.236.180/32", "dev", "lo")(t, l)
				wellAgain(t, l)
			}, ask: svc("my-nginx"), want: "Service default/my-nginx: interface lo of " + one + " has 172.26.236.180, so its " +
				"kernel answers for what only the owner may", has: "(AddressOnNode)"},
		{name: "all nodes are drained", make: labelled(`{"landfall.dev/drain":""}`), ask: svc("my-nginx"),
			mend: func(t *testing.T, l *lab.Lab) {
				labelled(`{"landfall.dev/drain":null}`)(t, l)
				waitAnnounced(t, l, "my-nginx", "172.26.236.180")
			}, want: "Service default/my-nginx: 172.26.236.180 is announced from k8s-worker-", has: "(Parting)"},
		{name: "speakers that hang", make: func(t *testing.T, l *lab.Lab) { signalSpeakers(t, l, syscall.SIGSTOP) }, ask: svc("my-nginx"),
			want: "Service default/my-nginx: k8s-worker-", has: "speaker has stopped answering the others (Missing)"},
		{name: "speakers that hang, in the cluster", make: func(*testing.T, *lab.Lab) {}, ask: []string{"doctor"},
			mend: func(t *testing.T, l *lab.Lab) {
				signalSpeakers(t, l, syscall.SIGCONT)
				waitTogether(t, l)
				waitAnnounced(t, l, "my-nginx", "172.26.236.180")
			}, want: "Cluster: k8s-master-176: the speakers on ", has: "hang, or their nodes are cut off"},
		{name: "proxies that hang", make: func(t *testing.T, l *lab.Lab) { signalAgents(t, l, "proxy", syscall.SIGSTOP) },
			ask: svc("my-nginx"), want: "Service default/my-nginx: the proxy on k8s-worker-", has: " hangs: it runs, and answers " +
				"neither the speaker nor landfallctl, so "},
		{name: "a proxy that hangs, by its node", make: func(*testing.T, *lab.Lab) {}, ask: []string{"explain", "node", one},
			want: "Node " + one + ": the proxy on " + one + " hangs: "},
		{name: "proxies that hang, in the cluster", make: func(*testing.T, *lab.Lab) {}, ask: []string{"doctor"},
			mend: func(t *testing.T, l *lab.Lab) {
				signalAgents(t, l, "proxy", syscall.SIGCONT)
				waitAnnounced(t, l, "my-nginx", "172.26.236.180")
			}, want: "Cluster: the proxy on " + one + " hangs: ", has: "(ProxyHangs)"},
		{name: "gossip port blocked", make: onOne(one, "nft", "add table inet guard; add chain inet guard in "+
			"{ type filter hook input priority 0; }; add rule inet guard in meta l4proto { tcp, udp } th dport 7947 drop; "+
			"add rule inet guard in meta l4proto { tcp, udp } th sport 7947 drop"), ask: []string{"explain", "node", one},
			mend: unguard, want: "Node " + one + ": its speaker does not hear the ready speakers on ", has: "(GossipBlocked)"},
		{name: "wrong gossip key", make: func(t *testing.T, l *lab.Lab) { anotherKey(t, l, one) },
			mend: func(t *testing.T, l *lab.Lab) {
				anotherKey(t, l, one) // the one before
				waitTogether(t, l)
			}, ask: []string{"explain", "node", one}, want: "Node " + one + ": its speaker reaches that of ",
			has: "most likely their gossip keys differ (GossipBlocked)"},
		{name: "rp_filter strict", make: on("sh", "-ec", "ip link add up0 type veth peer name up1; ip link set up0 up; "+
			"ip link set up1 up; ip addr add 10.78.0.2/24 dev up0; ip route replace default via 10.78.0.1 dev up0; "+
			"sysctl -qw net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.eth0.rp_filter=1"), ask: svc("my-nginx"),
			mend: on("sh", "-ec", "ip link del up0; ip route replace default via 172.26.236.1; "+
				"sysctl -qw net.ipv4.conf.eth0.rp_filter=0"), want: "Service default/my-nginx: k8s-worker-",
			has: "where its kernel drops what clients behind a router send, as the default route leaves over up0 and rp_filter " +
				"is strict: set net.ipv4.conf.eth0.rp_filter to 2"},
		{name: "conntrack table full", make: func(t *testing.T, l *lab.Lab) { fillConntrack(t, l, one, 970) },
			mend: onOne(one, "conntrack", "-F"), ask: []string{"explain", "node", one},
			want: "Node " + one + ": the table of connections of " + one + " is full, so its kernel drops new ones: it has ",
			has:  "(ConntrackFull)"},
		{name: "missing RBAC of a speaker", make: func(t *testing.T, l *lab.Lab) {
			forbid(t, l, true)
			if err := errors.Join(l.Agent("speaker", one).Kill(), l.Agent("speaker", one).Start()); err != nil {
				t.Fatal(err)
			}
		}, mend: func(t *testing.T, l *lab.Lab) {
			forbid(t, l, false)
			waitTogether(t, l)
		}, ask: []string{"explain", "node", one}, want: "Node " + one + ": ", has: "is forbidden"},
		{name: "CNI route missing", make: onOne(one, "ip", "route", "del", "192.168.189.0/24"),
			mend: onOne(one, "ip", "route", "add", "192.168.189.0/24", "via", "172.26.236.178"),
			ask:  []string{"explain", "node", one},
			want: "Node " + one + ": " + one + " has no route to the pods on ", has: "(PodRouteMissing)"},
		{name: "no network plugin", make: conditioned(corev1.NodeNetworkUnavailable, corev1.ConditionTrue),
			ask:  svc("my-nginx"),
			want: "Service default/my-nginx: ", has: "the Node has the condition NetworkUnavailable: its network plugin (CNI) " +
				"has not set up the network (NetworkUnavailable)"},
		{name: "no network plugin on a node", make: func(*testing.T, *lab.Lab) {}, ask: []string{"explain", "node", one},
			mend: func(t *testing.T, l *lab.Lab) {
				conditioned(corev1.NodeNetworkUnavailable, corev1.ConditionFalse)(t, l)
				waitAnnounced(t, l, "my-nginx", "172.26.236.180")
			}, want: "Node " + one + ": it does not announce 172.26.236.180 and ", has: "(NetworkUnavailable)"},
		{name: "not ready, which counts", make: conditioned(corev1.NodeReady, corev1.ConditionFalse), ask: svc("my-nginx"),
			want: "Service default/my-nginx: ", has: "the Node is not ready, and speakers announce from ready nodes only " +
				"(--require-ready) (NodeNotReady)"},
		{name: "a node that is not ready", make: func(*testing.T, *lab.Lab) {}, ask: []string{"explain", "node", one},
			mend: func(t *testing.T, l *lab.Lab) {
				conditioned(corev1.NodeReady, corev1.ConditionTrue)(t, l)
				waitAnnounced(t, l, "my-nginx", "172.26.236.180")
			}, want: "Node " + one + ": it is not ready: ", has: "(NodeNotReady)"},
		// The other end of the cable is switched off.
		{name: "no carrier", make: func(t *testing.T, l *lab.Lab) {
			on("sh", "-ec", "ip link add up0 type veth peer name up1; ip link set up0 up; "+
				"ip addr add 10.79.0.2/24 dev up0")(t, l)
			backed("unplugged", fromPool("cable"))(t, l)
		}, ask: svc("unplugged"), want: "Service default/unplugged: ", has: "interface up0 of k8s-"},
		{name: "no carrier on a node", make: func(*testing.T, *lab.Lab) {}, ask: []string{"explain", "node", one},
			mend: on("ip", "link", "del", "up0"), want: "Node " + one + ": it does not announce 10.79.0.10: interface up0 of " +
				one + " is down or has no carrier (NoCarrier)"},
		{name: "no carrier on the way to pods", make: onOne(one, "sh", "-ec", "ip link add up0 type veth peer name up1; "+
			"ip link set up0 up; ip route replace 192.168.189.0/24 dev up0; ip route replace 192.168.100.0/24 dev up0"),
			mend: onOne(one, "sh", "-ec", "ip route replace 192.168.189.0/24 via 172.26.236.178; "+
				"ip route replace 192.168.100.0/24 via 172.26.236.179; ip link del up0"), ask: []string{"explain", "node", one},
			want: "Node " + one + ": it does not announce 172.26.236.180 and ", has: "(NoCarrier)"},
		{name: "MTU", make: onOne(one, "ip", "link", "set", "eth0", "mtu", "1400"),
			mend: onOne(one, "ip", "link", "set", "eth0", "mtu", "1500"), ask: append(svc("my-nginx"), "-o", "wide"),
			want: "Service default/my-nginx: interface eth0 of " + one + " has MTU 1400", has: "(MTUMismatch)"},
		{name: "source ranges", make: backed("ranges", func(s *corev1.Service) {
			s.Spec.LoadBalancerSourceRanges = []string{"10.99.0.0/16"}
		}), ask: svc("ranges"), want: "Service default/ranges: ", well: true,
			has: "only for clients in 10.99.0.0/16 (loadBalancerSourceRanges)"},
		{name: "missing RBAC", make: func(*testing.T, *lab.Lab) {}, ask: append(svc("my-nginx"), "--as", "nobody"),
			want: "landfallctl: ", has: "; this rule allows it: "},
		{name: "no API server", make: func(t *testing.T, l *lab.Lab) {
			onOne(one, "nft", "add table inet guard; add chain inet guard out { type filter hook output priority 0; }; "+
				"add rule inet guard out tcp dport 6443 reject with tcp reset")(t, l)
			created("event", nil)(t, l) // what the node acknowledges ends its connections
		},
			mend: unguard, ask: []string{"explain", "node", one},
			want: "Node " + one + ": " + one + " does not reach the API server", has: "(APIServerUnreachable)"},
		{name: "no speaker", make: func(t *testing.T, l *lab.Lab) { showPods(t, l, false) },
			mend: func(t *testing.T, l *lab.Lab) { showPods(t, l, true) },
			ask:  svc("my-nginx"), want: "Service default/my-nginx: no speaker runs"},
	})
}

// TestExplainBGP makes faults of BGP sessions one after the other.
func TestExplainBGP(t *testing.T) {
	t.Parallel()
	l := startBGP(t, lab.ToR{Kind: lab.FRR, Count: 1, ASN: 64513, NodeASN: 64512}, false, "")
	if err := l.ServeExec(t.Context()); err != nil {
		t.Fatal(err)
	}
	peer := func(asn uint32, spec string) func(*testing.T, *lab.Lab) {
		return func(t *testing.T, l *lab.Lab) {
			t.Helper()
			c := l.Cluster()
			c.ToR.ASN = asn
			applied(bgpPeers(c, spec))(t, l)
		}
	}
	const down = "Service default/my-nginx: BGP session with tor-1 (172.26.236.1) from "
	explainAll(t, l, []explained{
		{name: "prefix filtered by the router", make: func(t *testing.T, l *lab.Lab) {
			configure(t, l, "ip prefix-list vips seq 5 permit 203.0.113.180/32")
			configure(t, l, "router bgp 64513", " address-family ipv4 unicast", "  neighbor nodes prefix-list vips in")
			backed("filtered", nil)(t, l)
			wantAddresses(t, l, "filtered", "203.0.113.181")
		}, mend: func(t *testing.T, l *lab.Lab) {
			configure(t, l, "router bgp 64513", " address-family ipv4 unicast", "  no neighbor nodes prefix-list vips in")
			wantRouted(t, l, netip.MustParseAddr("203.0.113.181"), workers(l)...)
		}, ask: svc("filtered"), want: "Service default/filtered: tor-1 (172.26.236.1) has not taken the route to " +
			"203.0.113.181/32: it announces 1 other route of Landfall's back to the nodes, but not this one (RouteFiltered)"},
		{name: "the filter is gone", make: func(*testing.T, *lab.Lab) {}, ask: svc("filtered"),
			want: "Service default/filtered: 203.0.113.181 is announced", well: true},
		{name: "session refused", make: peer(64513, ", peerPort: 1790"), ask: svc("my-nginx"), want: down,
			has: "172.26.236.1 refuses the connection: no BGP daemon listens on port 1790"},
		{name: "wrong ASN", make: peer(64599, ", peerPort: 179"), ask: svc("my-nginx"), want: down,
			has: "the AS numbers differ: this side has 64512 and expects 64599"},
		{name: "hold time", make: func(t *testing.T, l *lab.Lab) {
			configure(t, l, "router bgp 64513", " bgp minimum-holdtime 60")
			peer(64513, ", peerPort: 179, holdTime: 9s, connectTime: 1s")(t, l)
		}, mend: func(t *testing.T, l *lab.Lab) { configure(t, l, "router bgp 64513", " no bgp minimum-holdtime") },
			ask: svc("my-nginx"), want: down, has: "the router does not accept the hold time of 9s"},
		// As a router with GTSM (RFC 5082) does.
		{name: "TTL", make: onOne("tor-1", "nft", "add table ip gtsm; add chain ip gtsm in { type filter hook input priority 0; "+
			"}; add rule ip gtsm in tcp dport 179 ip ttl < 255 drop"), mend: onOne("tor-1", "nft", "delete table ip gtsm"), ask: svc("my-nginx"), want: down, has: "another TTL (GTSM)"},
		{name: "wrong password", make: peer(64513, ", peerPort: 179, password: wrong, connectTime: 1s"), ask: svc("my-nginx"),
			want: down, has: "most likely the MD5 passwords differ"},
		{name: "peer", make: func(*testing.T, *lab.Lab) {}, ask: []string{"explain", "peer", "tor-1"},
			want: "BGPPeer tor-1: BGP session with tor-1", has: "most likely the MD5 passwords differ"},
	})
}

// nginx1 is the address of a pod of my-nginx.
const nginx1 = "192.168.189.131"

// endpoint gives a Service one endpoint, with these ports and this field.
func endpoint(t *testing.T, l *lab.Lab, name, addr, ports, field string) {
	t.Helper()
	applied(fmt.Sprintf(`
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: %[1]s-1, namespace: default, labels: {kubernetes.io/service-name: %[1]s}}
addressType: IPv4
%[2]s
endpoints: [{addresses: [%[3]s], conditions: {ready: true, serving: true}, %[4]s}]
`, name, ports, addr, field))(t, l)
}

// signalSpeakers sends the speakers of all workers a signal.
func signalSpeakers(t *testing.T, l *lab.Lab, sig syscall.Signal) {
	t.Helper()
	signalAgents(t, l, "speaker", sig)
}

// signalAgents sends a program on all workers a signal.
func signalAgents(t *testing.T, l *lab.Lab, program string, sig syscall.Signal) {
	t.Helper()
	for _, node := range workers(l) {
		if err := l.Agent(program, node).Signal(sig); err != nil {
			t.Fatal(err)
		}
	}
}

// onNode gives a Service an endpoint on a node.
func onNode(t *testing.T, l *lab.Lab, name, addr, node string) {
	t.Helper()
	endpoint(t, l, name, addr, `ports: [{name: "", port: 80, protocol: TCP}]`, "nodeName: "+node)
}

// anotherKey gives the speaker on a node another key for gossip, or its first one back.
func anotherKey(t *testing.T, l *lab.Lab, node string) {
	t.Helper()
	speaker := l.Agent("speaker", node)
	file := speaker.Path("/run/secrets/landfall/gossip/key")
	key, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	bare, err := base64.StdEncoding.DecodeString(string(key))
	if err != nil {
		t.Fatal(err)
	}
	slices.Reverse(bare)
	if err := os.WriteFile(file, []byte(base64.StdEncoding.EncodeToString(bare)), 0o400); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(speaker.Kill(), speaker.Start()); err != nil {
		t.Fatal(err)
	}
}

// fillConntrack fills so much of a node's table of connections, up to the 30 s that it remembers a datagram
// without an answer, with datagrams to itself.
func fillConntrack(t testing.TB, l *lab.Lab, node string, permille int) {
	t.Helper()
	room, err := strconv.Atoi(strings.TrimSpace(mustExec(t, l, node, "sysctl", "-n", "net.netfilter.nf_conntrack_max")))
	if err != nil {
		t.Fatal(err)
	}
	err = l.In(node, func() error {
		conn, err := net.ListenUDP("udp4", &net.UDPAddr{})
		if err != nil {
			return err
		}
		defer conn.Close()
		for i := range room / 1000 * permille {
			to := netip.AddrFrom4([4]byte{127, byte(1 + i>>16), byte(i >> 8), byte(i)})
			// Ports unreachable come back as errors, of which there are few a second.
			_, _ = conn.WriteToUDPAddrPort([]byte("x"), netip.AddrPortFrom(to, 9))
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// forbid takes from the speakers what the chart's ClusterRole allows, or gives it back.
func forbid(t *testing.T, l *lab.Lab, all bool) {
	t.Helper()
	bindings := l.Kube().RbacV1().ClusterRoleBindings()
	name := "landfall-speaker"
	b, err := bindings.Get(t.Context(), name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for i := range b.Subjects {
		b.Subjects[i].Name = strings.TrimSuffix(b.Subjects[i].Name, "-of-nobody")
		if all {
			b.Subjects[i].Name += "-of-nobody"
		}
	}
	if _, err := bindings.Update(t.Context(), b, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
}

// configure changes what all routers have.
func configure(t *testing.T, l *lab.Lab, lines ...string) {
	t.Helper()
	for _, r := range l.Routers() {
		if err := r.Configure(t.Context(), lines...); err != nil {
			t.Fatal(err)
		}
	}
}

// readyPods sets whether the pods of my-nginx are ready.
func readyPods(t *testing.T, l *lab.Lab, ready bool) {
	t.Helper()
	eventually(t, "the EndpointSlices are written", func() error {
		slices, err := l.Kube().DiscoveryV1().EndpointSlices("default").List(t.Context(),
			metav1.ListOptions{LabelSelector: "kubernetes.io/service-name=my-nginx"})
		if err != nil {
			return err
		}
		for _, s := range slices.Items {
			for i := range s.Endpoints {
				s.Endpoints[i].Conditions.Ready, s.Endpoints[i].Conditions.Serving = new(ready), new(ready)
			}
			if _, err := l.Kube().DiscoveryV1().EndpointSlices("default").Update(t.Context(), &s, metav1.UpdateOptions{}); err != nil {
				return err
			}
		}
		return nil
	})
}

// copySlice gives a Service the endpoints of another.
func copySlice(t *testing.T, l *lab.Lab, from, to string) {
	t.Helper()
	slices, err := l.Kube().DiscoveryV1().EndpointSlices("default").List(t.Context(),
		metav1.ListOptions{LabelSelector: "kubernetes.io/service-name=" + from})
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range slices.Items {
		s.ObjectMeta = metav1.ObjectMeta{Name: to + "-1", Labels: map[string]string{"kubernetes.io/service-name": to}}
		for i := range s.Ports {
			s.Ports[i].Name = new("")
		}
		if _, err := l.Kube().DiscoveryV1().EndpointSlices("default").Create(t.Context(), &s, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
}

// conditioned sets a condition of each Node.
func conditioned(kind corev1.NodeConditionType, to corev1.ConditionStatus) func(*testing.T, *lab.Lab) {
	return func(t *testing.T, l *lab.Lab) {
		t.Helper()
		for _, n := range l.Cluster().Nodes {
			setNodeCondition(t, l, n.Name, kind, to)
		}
	}
}

// showPods sets whether the pods of speaker and proxy run, as their status has it.
func showPods(t *testing.T, l *lab.Lab, running bool) {
	t.Helper()
	for _, n := range l.Cluster().Nodes {
		if err := l.ShowPod(t.Context(), "landfall-node-"+n.Name+"-0", running); err != nil {
			t.Fatal(err)
		}
	}
}
