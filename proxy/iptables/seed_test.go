package iptables

import (
	"flag"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/nstest"
	"github.com/landfall-lb/landfall/proxy/plan"
)

var update = flag.Bool("update", false, "rewrite the golden files")

// The names that the articles behind the seed cluster show, with our prefix.
func TestSeedClusterChainNames(t *testing.T) {
	nginx, kubernetes, dns := lb.Key{Namespace: "default", Name: "my-nginx"},
		lb.Key{Namespace: "default", Name: "kubernetes"}, lb.Key{Namespace: "kube-system", Name: "kube-dns"}
	http, https := plan.Port{Protocol: lb.TCP}, plan.Port{Name: "https", Protocol: lb.TCP}
	dnsUDP, dnsTCP := plan.Port{Name: "dns", Protocol: lb.UDP}, plan.Port{Name: "dns-tcp", Protocol: lb.TCP}
	for _, tt := range []struct{ got, want string }{
		{prefixCluster + suffix(nginx, http), "LF-SVC-BEPXDJBUHFCSYIC3"},
		{prefixSourceRange + suffix(nginx, http), "LF-FW-BEPXDJBUHFCSYIC3"},
		{prefixExternal + suffix(nginx, http), "LF-EXT-BEPXDJBUHFCSYIC3"},
		{prefixLocal + suffix(nginx, http), "LF-SVL-BEPXDJBUHFCSYIC3"},
		{endpointChain(nginx, http, netip.MustParseAddrPort("192.168.100.1:80")), "LF-SEP-IQE2HBJHR23S7HKO"},
		{endpointChain(nginx, http, netip.MustParseAddrPort("192.168.189.131:80")), "LF-SEP-KXZ7A5GCKOVBKJL6"},
		{prefixCluster + suffix(kubernetes, https), "LF-SVC-NPX46M4PTMTKRN6Y"},
		{prefixCluster + suffix(dns, dnsUDP), "LF-SVC-TCOU7JCQXEZGVUNU"},
		{endpointChain(dns, dnsUDP, netip.MustParseAddrPort("10.200.0.27:53")), "LF-SEP-LRUTK6XRXU43VLIG"},
		{prefixCluster + suffix(dns, dnsTCP), "LF-SVC-ERIFXISQEP7F7OF4"},
	} {
		if tt.got != tt.want {
			t.Errorf("chain %s, want %s", tt.got, tt.want)
		}
	}
}

// seed returns the Services of the seed cluster as worker-179 plans them.
func seed(nginx func(*lb.Service)) map[lb.Key]plan.Service {
	node := plan.Node{Name: "k8s-worker-179", Addresses: []netip.Addr{addr("172.26.236.179")}}
	key := lb.Key{Namespace: "default", Name: "my-nginx"}
	svc := lb.Service{
		Key: key, Type: lb.LoadBalancer, ClusterIPs: []netip.Addr{addr("10.106.189.218")},
		Ports:          []lb.ServicePort{{Protocol: lb.TCP, Port: 80, NodePort: 31428}},
		ExternalPolicy: lb.Cluster, InternalPolicy: lb.Cluster, HealthCheckNodePort: 32000,
		Ingress: []lb.Ingress{{Addr: addr("172.26.236.180")}},
	}
	nginx(&svc)
	dns := lb.Service{
		Key: lb.Key{Namespace: "kube-system", Name: "kube-dns"}, Type: lb.ClusterIP,
		ClusterIPs: []netip.Addr{addr("10.96.0.10")},
		Ports: []lb.ServicePort{
			{Name: "dns", Protocol: lb.UDP, Port: 53}, {Name: "dns-tcp", Protocol: lb.TCP, Port: 53},
			{Name: "metrics", Protocol: lb.TCP, Port: 9153},
		},
		ExternalPolicy: lb.Cluster, InternalPolicy: lb.Cluster,
	}
	kubernetes := lb.Service{
		Key: lb.Key{Namespace: "default", Name: "kubernetes"}, Type: lb.ClusterIP,
		ClusterIPs:     []netip.Addr{addr("10.96.0.1")},
		Ports:          []lb.ServicePort{{Name: "https", Protocol: lb.TCP, Port: 443}},
		ExternalPolicy: lb.Cluster, InternalPolicy: lb.Cluster,
	}
	dnsOn := map[string][]string{"k8s-worker-177": {"192.168.77.2"}}
	web := plan.New(svc, endpoints(key, "", lb.TCP, 80,
		map[string][]string{"k8s-worker-178": {"192.168.189.131"}, "k8s-worker-179": {"192.168.100.1"}}), node)
	web.Sole = web.VIPs
	return plans(web,
		plan.New(dns, slices.Concat(endpoints(dns.Key, "dns", lb.UDP, 53, dnsOn),
			endpoints(dns.Key, "dns-tcp", lb.TCP, 53, dnsOn)), node),
		plan.New(kubernetes, endpoints(kubernetes.Key, "https", lb.TCP, 6443, map[string][]string{"": {"172.26.236.176"}}),
			node),
	)
}

var seedConfig = plan.Config{
	Pods: plan.Detector{Prefixes: prefixes("192.168.0.0/16", "fd00:10::/56")}, MasqueradeBit: 14, LoopbackNodePorts: true,
	DropInvalid: true,
}

// The rules of the seed cluster, as the kernel prints them back, stand in golden files; both
// variants of iptables agree on them.
func TestSeedClusterListing(t *testing.T) {
	stories := map[string]func(*lb.Service){
		"cluster": func(*lb.Service) {},
		"local":   func(s *lb.Service) { s.ExternalPolicy = lb.Local },
		"ranges":  func(s *lb.Service) { s.SourceRanges = prefixes("172.26.0.0/16", "198.51.100.0/24") },
	}
	for name, nginx := range stories {
		for _, kind := range []string{"nft", "legacy"} {
			t.Run(name+"/"+kind, func(t *testing.T) {
				kernel := nsKernel{t, nstest.New(t), variant(lb.IPv4, kind)}
				a := newActor(map[lb.Family]Kernel{lb.IPv4: kernel}, seedConfig)
				a.Set(seed(nginx))
				if err := settle(a, false); err != nil {
					t.Fatal(err)
				}
				golden := filepath.Join("testdata", "seed-"+name+".rules")
				got := listing(t, kernel)
				if *update {
					if err := os.WriteFile(golden, []byte(got), 0o644); err != nil {
						t.Fatal(err)
					}
				}
				want, err := os.ReadFile(golden)
				if err != nil {
					t.Fatal(err)
				}
				if d := cmp.Diff(string(want), got); d != "" {
					t.Errorf("rules (-want +got):\n%s", d)
				}
			})
		}
	}
}

// listing returns the kernel's rules, ours and our jumps, in a stable order.
func listing(t *testing.T, kernel Kernel) string {
	t.Helper()
	have, err := readSave(t.Context(), kernel)
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	for _, table := range []struct {
		name   string
		chains chains
	}{{"filter", have.filter}, {"nat", have.nat}} {
		b.WriteString("*" + table.name + "\n")
		for _, chain := range slices.Sorted(maps.Keys(table.chains)) {
			for _, r := range table.chains[chain] {
				b.WriteString("-A " + chain + " " + r + "\n")
			}
		}
	}
	return b.String()
}
