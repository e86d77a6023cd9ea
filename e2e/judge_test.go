package e2e

import (
	"cmp"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/landfall-lb/landfall/e2e/cases"
	"github.com/landfall-lb/landfall/e2e/lab"
	"github.com/landfall-lb/landfall/e2e/lab/labtest"
	"github.com/landfall-lb/landfall/internal/lb"
)

// judged is a case of the table, or one that is about how objects are read.
type judged struct {
	cases.Case
	change func(w cases.World, s *corev1.Service, e *discoveryv1.EndpointSlice)
}

// reading are cases of what only the API's objects have.
func reading() []judged {
	both := cases.Case{From: "outside", To: "vip", Want: "local remote", SNAT: true}
	named := func(c cases.Case, name, want string,
		change func(w cases.World, s *corev1.Service, e *discoveryv1.EndpointSlice)) judged {
		if c.Name = name; want != "" {
			c.Want, c.SNAT = want, false
		}
		return judged{c, change}
	}
	stranger, inside, node := both, both, both
	stranger.From = "stranger"
	inside.From, inside.To = "pod", "cluster"
	node.From, node.To = "node", "cluster"
	headless := func(_ cases.World, s *corev1.Service, _ *discoveryv1.EndpointSlice) {
		s.Labels = map[string]string{corev1.IsHeadlessService: ""}
	}
	return []judged{
		named(both, "44 a slice with the label headless", "reject",
			func(_ cases.World, _ *corev1.Service, e *discoveryv1.EndpointSlice) {
				e.Labels[corev1.IsHeadlessService] = ""
			}),
		named(both, "42 a Service with the label headless", "none", headless),
		named(inside, "42 a Service with the label headless, pod to ClusterIP", "drop", headless),
		named(node, "42 a Service with the label headless, node to ClusterIP", "drop", headless),
		named(both, "a Service of another proxy", "none",
			func(_ cases.World, s *corev1.Service, _ *discoveryv1.EndpointSlice) {
				s.Labels = map[string]string{"service.kubernetes.io/service-proxy-name": "other"}
			}),
		named(both, "22 a blank before a range, listed", "",
			func(w cases.World, s *corev1.Service, _ *discoveryv1.EndpointSlice) {
				s.Spec.LoadBalancerSourceRanges = []string{" " + cases.Host(w.Outside).String()}
			}),
		named(stranger, "22 a blank before a range, unlisted", "drop",
			func(w cases.World, s *corev1.Service, _ *discoveryv1.EndpointSlice) {
				s.Spec.LoadBalancerSourceRanges = []string{" " + cases.Host(w.Outside).String()}
			}),
		named(both, "conditions that are not set", "", func(_ cases.World, _ *corev1.Service, e *discoveryv1.EndpointSlice) {
			for i := range e.Endpoints {
				e.Endpoints[i].Conditions = discoveryv1.EndpointConditions{}
			}
		}),
	}
}

// sample leaves out what Kubernetes has no object for, what its API server refuses, what takes a kernel parameter,
// and KEP-6272 with policy Cluster, which kube-proxy does not have: there Landfall routes on what kube-proxy refuses.
func sample(w cases.World) []judged {
	all := reading()
	for i, c := range cases.For(w.Family, false) {
		switch {
		case w.Family == lb.IPv6 && i%3 > 0, // to save time
			c.Transport() == lb.SCTP, c.Own, c.Unpooled, strings.Contains(c.Name, "ipMode Router"),
			strings.HasPrefix(c.Name, "KEP-6272, ETP Cluster"),
			strings.Contains(c.Name, "liberal"), strings.HasPrefix(c.Name, "42 "), strings.HasSuffix(c.Name, ", off"):
			continue
		}
		all = append(all, judged{Case: c})
	}
	return all
}

// undefined are the cases of ports and protocols that no Service has at a VIP.
var undefined = []string{
	"18 UDP to a TCP port", "19 undefined port of a VIP", "19 undefined port of a VIP, pod",
	"19 undefined port of a VIP, node", "19 undefined port of a VIP, its endpoint", "19 undefined port of the second VIP",
	"19 undefined port of a VIP, no endpoints", "19 undefined port of a VIP, ETP Local without local ones",
	"19 undefined port of a VIP, source ranges", "19 undefined port of a VIP, masqueradeAll",
}

// refusing adds to differences that kube-proxy does not refuse what is undefined.
func refusing(differences map[string]string) map[string]string {
	for _, name := range undefined {
		differences[name] = cases.Silence
	}
	return differences
}

// documented are the differences from kube-proxy, by mode and the case's name, with what kube-proxy
// does. They are those of the table in docs/guide/proxy.md.
var documented = map[string]map[string]string{
	"iptables": refusing(map[string]string{
		"16 no endpoints, node to vip":      cases.Silence,
		"16 no endpoints, node to external": cases.Silence,
		// As the API server has ServiceCIDRs.
		"18 UDP to a TCP port of a ClusterIP":                   cases.Silence,
		"19 undefined port of a ClusterIP":                      cases.Silence,
		"19 undefined port of a ClusterIP, outside":             cases.Silence,
		"19 undefined port of a ClusterIP, node":                cases.Silence,
		"19 Service networks, undefined port of a ClusterIP":    cases.Silence,
		"19 Service networks, UDP to a TCP port of a ClusterIP": cases.Silence,
	}),
	"nftables": refusing(map[string]string{
		"INVALID from a pod": cases.Passed,
	}),
}

// kube-proxy is the judge: on the same objects of the same API server, in the same namespaces, each
// packet ends as with it in the same mode, but for differences that are documented.
func TestJudge(t *testing.T) {
	t.Parallel()
	// Each contender has a lab of its own.
	var mu sync.Mutex
	answers := map[lb.Family]map[contender]map[string]cases.Seen{lb.IPv4: {}, lb.IPv6: {}}
	t.Run("contenders", func(t *testing.T) {
		for family, seen := range answers {
			for _, who := range []contender{{"kube-proxy", "iptables"}, {"landfall", "iptables"}, {"kube-proxy", "nftables"},
				{"landfall", "nftables"}} {
				t.Run(fmt.Sprint(family, " ", who), func(t *testing.T) {
					t.Parallel()
					found := contend(t, family, who)
					mu.Lock()
					defer mu.Unlock()
					seen[who] = found
				})
			}
		}
	})
	if t.Failed() {
		return
	}
	for family, seen := range answers {
		for _, mode := range []string{"iptables", "nftables"} {
			t.Run(fmt.Sprint(family, " ", mode), func(t *testing.T) {
				judge(t, mode, seen[contender{"kube-proxy", mode}], seen[contender{"landfall", mode}])
			})
		}
	}
}

// contend runs each case with a contender and returns how its packets end.
func contend(t *testing.T, family lb.Family, who contender) map[string]cases.Seen {
	t.Helper()
	cluster := lab.SeedCluster()
	cluster.DualStack, cluster.Pods, cluster.Services = true, nil, nil
	cluster.Nodes = cluster.Nodes[:1]
	l := labtest.Start(t, cluster, lab.Options{NoAgents: true})
	_, err := l.Kube().CoreV1().Namespaces().Create(t.Context(),
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: judgeNamespace}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	w := cases.WorldOf(family)
	putPool(t, l, w)
	o := &contest{site: cases.NewSite(t, w), kubeconfig: l.Kubeconfig(), programs: judgePrograms(t), folder: t.TempDir()}
	connect(t, l, o.site)
	return o.answers(t, &objects{kube: l.Kube(), world: w}, who, sample(w))
}

// putPool gives the API server the kind IPAddressPool, and a pool of the VIPs.
func putPool(t *testing.T, l *lab.Lab, w cases.World) {
	t.Helper()
	definition, err := os.ReadFile("../charts/landfall/charts/crds/templates/landfall.dev_ipaddresspools.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if err := l.ApplyYAML(t.Context(), string(definition)); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the pool", func() error {
		return l.ApplyYAML(t.Context(), fmt.Sprintf(`
apiVersion: landfall.dev/v1beta1
kind: IPAddressPool
metadata: {name: vips}
spec: {addresses: ["%s-%s"]}`, w.Pool.From, w.Pool.To))
	})
}

func judge(t *testing.T, mode string, theirs, ours map[string]cases.Seen) {
	t.Helper()
	differences := 0
	for _, name := range slices.Sorted(maps.Keys(ours)) {
		their, known := documented[mode][name]
		switch {
		case known && theirs[name].Ends != their:
			t.Errorf("%s: kube-proxy: %s; the documentation says %s", name, theirs[name], their)
		case !known && theirs[name] != ours[name]:
			t.Errorf("%s: kube-proxy: %s; Landfall: %s", name, theirs[name], ours[name])
		case known && theirs[name] == ours[name]:
			t.Errorf("%s: documented as different, but both: %s", name, ours[name])
		case known:
			differences++
		}
	}
	t.Logf("%d cases, %d of them different as documented", len(ours), differences)
}

// answers runs a contender and returns how each case's packets end. Cases of the same configuration, and among them
// those of the same objects, follow one another, so that each is put once.
func (o *contest) answers(t *testing.T, put *objects, who contender, all []judged) map[string]cases.Seen {
	t.Helper()
	seen := map[string]cases.Seen{}
	key := func(c judged) string {
		_, config := c.Plan(o.site.World)
		return c.Zone + fmt.Sprintf("%+v", config)
	}
	slices.SortStableFunc(all, func(a, b judged) int {
		return cmp.Or(strings.Compare(key(a), key(b)), strings.Compare(a.text(put.world), b.text(put.world)))
	})
	running, known, stop := "", "", func() {}
	for _, c := range all {
		if k := key(c); k != running {
			stop()
			put.putNode(t, c.Zone)
			_, config := c.Plan(o.site.World)
			running, known, stop = k, "", o.run(t, who, config)
			o.wait(t, put.mark(t))
			if who.program == "kube-proxy" && c.Zone != "" {
				// kube-proxy 1.35 listens to its Node before anybody listens to it: where the Node comes in between, it
				// forgets the zone until another comes.
				put.putNode(t, "")
				put.putNode(t, c.Zone)
			}
		}
		if text := c.text(put.world); text != known {
			o.wait(t, put.put(t, c))
			known = text
		}
		o.site.Forget(t)
		if who.program == "kube-proxy" && documented[who.mode][c.Name] == cases.Silence {
			c.Want = "drop" // no need to wait for long
		}
		seen[c.Name] = o.look(t, who, c)
	}
	stop()
	return seen
}

// look returns how the case's packets end. A contender may write rules before it has heard of all:
// kube-proxy hears of its node's zone when it likes. So where a case does not end as the table says,
// the last of a few looks counts.
func (o *contest) look(t *testing.T, who contender, c judged) cases.Seen {
	t.Helper()
	seen := o.site.Look(t, c.Case)
	_, known := documented[who.mode][c.Name]
	for i := 0; i < 4 && !known && c.InWords(o.site.World, seen) != c.Wanted(o.site.World); i++ {
		time.Sleep(time.Second)
		o.site.Forget(t)
		seen = o.site.Look(t, c.Case)
	}
	return seen
}

// connect lets the node of the site reach the API server.
func connect(t *testing.T, l *lab.Lab, s *cases.Site) {
	t.Helper()
	master := l.Cluster().Nodes[0]
	const cable = "site"
	for _, command := range []string{
		fmt.Sprintf("ip link add api0 netns %s type veth peer name %s netns %s", s.Node.Name, cable,
			l.Namespace(master.Name)),
		fmt.Sprintf("ip -n %s addr add 10.255.255.1/30 dev %s", l.Namespace(master.Name), cable),
		fmt.Sprintf("ip -n %s link set %s up", l.Namespace(master.Name), cable),
		fmt.Sprintf("ip -n %s addr add 10.255.255.2/30 dev api0", s.Node.Name),
		fmt.Sprintf("ip -n %s link set api0 up", s.Node.Name),
		fmt.Sprintf("ip -n %s route add %s/32 via 10.255.255.1", s.Node.Name, master.Addr),
	} {
		argv := strings.Fields(command)
		if out, err := exec.CommandContext(t.Context(), argv[0], argv[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v: %s", command, err, out)
		}
	}
}

// judgePrograms returns the paths of both proxies.
func judgePrograms(t *testing.T) map[string]string {
	t.Helper()
	repository, err := lab.FindRepository(".")
	if err != nil {
		t.Fatal(err)
	}
	judge, err := lab.Tool(t.Context(), repository, "kube-proxy", func(line string) { t.Log(line) })
	if err != nil {
		t.Fatal(err)
	}
	ours := filepath.Join(programFolder(t), "landfall-proxy")
	return map[string]string{"kube-proxy": judge, "landfall": ours}
}
