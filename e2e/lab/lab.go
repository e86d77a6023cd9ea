package lab

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/landfall-lb/landfall/e2e/router"
)

// Options say how to start a lab. The zero value starts all of Landfall on a lab named lf1 (or the
// next free number).
type Options struct {
	// Name is the prefix of the lab's network namespaces: a letter, then up to 9 letters and digits.
	Name string
	// Repository is the root of the source tree; empty for the one around the working directory.
	Repository string
	// Programs is the folder with landfall-controller, landfall-speaker and landfall-proxy; empty for
	// that of [Programs].
	Programs string
	// Tool is the program landfall-lab, which the pods' servers run from; empty for the one in the
	// folder of LANDFALL_PROGRAMS, or else one that is built.
	Tool string
	// NoAgents leaves out Landfall: no chart is rendered, nothing of it is applied.
	NoAgents bool
	// Kubelets is for a cluster whose nodes are started by somebody else (e2e/cluster): no Nodes and no
	// agents are made, and the API server is one for kubelets and a controller-manager.
	Kubelets bool
	// Stopped applies the chart without starting its programs; [Agent.Start] does.
	Stopped bool
	// Values are chart values, over those that fit the lab to the chart.
	Values map[string]any
	// Args are further arguments by container name, after those of the chart.
	Args map[string][]string
	// MutatingPolicies has the API server serve MutatingAdmissionPolicies, which 1.35 does not by default.
	MutatingPolicies bool
	// Wrote is called whenever the API server has taken a change from the lab; nil for nobody.
	Wrote func()
	// Env are further variables (NAME=VALUE) by container name.
	Env map[string][]string
	// Progress gets a line for each slow step, and again every few seconds while it lasts; nil drops
	// them.
	Progress func(line string)
}

// Lab is a running lab. Its methods may be called from several goroutines.
type Lab struct {
	cluster  Cluster
	options  Options
	state    *state
	control  *controlPlane
	progress func(string)
	kube     kubernetes.Interface
	dynamic  dynamic.Interface
	agents   []*Agent
	routers  []*Router
	kept     bool
	spine    *Router
	calico   map[string]*router.Router // by node

	nodes map[string]Node

	mu       sync.Mutex // guards what follows
	pods     map[string]*podState
	services map[string]Service
}

// Start builds the cluster and returns when the API server, the pods' servers and the agents are
// ready. It needs root. What it needs and does not find it installs (Debian packages) or builds
// (kube-apiserver, helm), which takes minutes once. On an error nothing is left behind.
func Start(ctx context.Context, cluster Cluster, options Options) (_ *Lab, err error) {
	if os.Geteuid() != 0 {
		return nil, errors.New("the lab makes network namespaces: run it as root")
	}
	if err := cluster.Validate(); err != nil {
		return nil, fmt.Errorf("cluster: %w", err)
	}
	l := &Lab{
		cluster: cluster, options: options, progress: options.Progress,
		nodes: map[string]Node{}, pods: map[string]*podState{}, services: map[string]Service{},
	}
	if l.progress == nil {
		l.progress = func(string) {}
	}
	for _, n := range cluster.Nodes {
		l.nodes[n.Name] = n
	}
	t, err := l.prerequisites(ctx)
	if err != nil {
		return nil, err
	}
	if l.state, err = claimState(ctx, options.Name); err != nil {
		return nil, err
	}
	if err := l.build(ctx, t); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return l, nil
}

// prerequisites are the programs that a lab runs.
type prerequisites struct{ apiServer, helm string }

func (l *Lab) prerequisites(ctx context.Context) (t prerequisites, err error) {
	o := &l.options
	if o.Repository == "" {
		if o.Repository, err = FindRepository("."); err != nil {
			return t, err
		}
	}
	if err := ensurePrograms(ctx, debianPackages, l.progress); err != nil {
		return t, err
	}
	if l.cluster.ToR.Count > 0 {
		if err := ensurePrograms(ctx, routerPackages, l.progress); err != nil {
			return t, err
		}
	}
	if t.apiServer, err = Tool(ctx, o.Repository, "kube-apiserver", l.progress); err != nil {
		return t, err
	}
	if o.Tool == "" {
		if o.Tool, err = buildTool(ctx, o.Repository, l.progress); err != nil {
			return t, err
		}
	}
	if o.NoAgents || o.Kubelets {
		return t, nil
	}
	if t.helm, err = Tool(ctx, o.Repository, "helm", l.progress); err != nil {
		return t, err
	}
	if o.Programs == "" {
		o.Programs, err = Programs(ctx, o.Repository, l.progress)
	}
	return t, err
}

// build makes everything, the control plane first, as it takes longest to be ready.
func (l *Lab) build(ctx context.Context, t prerequisites) (err error) {
	for _, dir := range []string{"logs", "etcd", "agents", "bin"} {
		if err := os.MkdirAll(l.state.path(dir), 0o755); err != nil {
			return err
		}
	}
	if err := os.Chmod(l.state.path("etcd"), 0o700); err != nil {
		return err
	}
	if l.control, err = newControlPlane(l, t.apiServer); err != nil {
		return fmt.Errorf("control plane: %w", err)
	}
	if err := l.connect(); err != nil {
		return err
	}
	lan := planLAN(l.cluster)
	for _, h := range append(lan, planNode(l.cluster, l.control.master)) {
		if err := l.makeHost(ctx, h); err != nil {
			return err
		}
	}
	if err := l.control.startEtcd(); err != nil {
		return fmt.Errorf("etcd: %w", err)
	}
	var g Group
	g.Run(func() error { return l.control.start(ctx, l.progress) })
	g.Run(func() error {
		for _, n := range l.cluster.Nodes {
			if n.Name == l.control.master.Name {
				continue
			}
			if err := l.makeHost(ctx, planNode(l.cluster, n)); err != nil {
				return err
			}
		}
		return l.startPods(ctx, l.cluster.Pods, Ready)
	})
	g.Run(func() error { return l.startRouters(ctx) })
	var chart *chart
	if !l.options.NoAgents && !l.options.Kubelets {
		g.Run(func() (err error) {
			chart, err = l.renderChart(ctx, t.helm)
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return err
	}
	if err := l.startCalico(ctx); err != nil {
		return err
	}
	if l.options.Kubelets {
		return nil
	}
	if err := l.createObjects(ctx); err != nil {
		return err
	}
	if chart != nil {
		return l.installChart(ctx, chart)
	}
	return nil
}

// connect makes the clients of the API server. They fail until it runs.
func (l *Lab) connect() (err error) {
	if l.kube, err = kubernetes.NewForConfig(l.control.admin); err != nil {
		return err
	}
	l.dynamic, err = dynamic.NewForConfig(l.control.admin)
	return err
}

// makeHost makes a host's namespace with all that is in it.
func (l *Lab) makeHost(ctx context.Context, h hostPlan) error {
	if err := os.MkdirAll(l.state.path("run", h.Name), 0o755); err != nil {
		return err
	}
	ns := l.state.namespace(h.Name)
	if err := batch(ctx, "", []string{"netns add " + ns}); err != nil {
		return err
	}
	if err := setSysctls(ns, h.Sysctls); err != nil {
		return fmt.Errorf("%s: %w", h.Name, err)
	}
	own, others := h.commands(l.state.namespace)
	if err := batch(ctx, ns, own); err != nil {
		return err
	}
	for _, host := range slices.Sorted(maps.Keys(others)) {
		if err := batch(ctx, l.state.namespace(host), others[host]); err != nil {
			return err
		}
	}
	for _, c := range h.Cables {
		if err := setSysctls(l.state.namespace(c.To), c.ThereSysctls); err != nil {
			return fmt.Errorf("%s: %w", c.To, err)
		}
	}
	if len(h.FDB) > 0 {
		if err := feed(ctx, strings.Join(h.FDB, "\n")+"\n", "bridge", "-netns", ns, "-batch", "-"); err != nil {
			return err
		}
	}
	for i, rules := range h.Rules {
		restore := []string{"iptables-restore", "ip6tables-restore"}[i]
		if err := feed(ctx, rules, "ip", "netns", "exec", ns, restore, "--noflush"); err != nil {
			return err
		}
	}
	return nil
}

// Close takes the lab down: processes, namespaces, files. A lab that is kept stays.
func (l *Lab) Close() error {
	if l.kept {
		return nil
	}
	// Not the caller's context, which has often just ended.
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	return l.state.remove(ctx)
}

// Keep lets the lab outlive this program; "landfall-lab down" takes it down.
func (l *Lab) Keep() error {
	l.kept = true
	return l.state.keep()
}

// Name returns the lab's name.
func (l *Lab) Name() string { return l.state.name }

// Cluster returns the description that the lab was started from.
func (l *Lab) Cluster() Cluster { return l.cluster }

// Namespace returns the name of a host's network namespace, for ip netns exec.
func (l *Lab) Namespace(host string) string { return l.state.namespace(host) }

// Kubeconfig returns the path of an administrator's kubeconfig. It works inside the namespaces of
// the nodes.
func (l *Lab) Kubeconfig() string { return l.state.path("admin.kubeconfig") }

// RESTConfig returns an administrator's configuration for client-go, which reaches the API server
// from outside the lab.
func (l *Lab) RESTConfig() *rest.Config { return rest.CopyConfig(l.control.admin) }

// Kube returns a client with an administrator's rights.
func (l *Lab) Kube() kubernetes.Interface { return l.kube }

// KubeAs returns a client with the rights of an agent: its token.
func (l *Lab) KubeAs(a *Agent) (kubernetes.Interface, error) {
	token, err := os.ReadFile(a.Path("/run/secrets/kubernetes.io/serviceaccount/token"))
	if err != nil {
		return nil, err
	}
	return l.KubeWithToken(string(token))
}

// KubeWithToken returns a client with the rights of a token.
func (l *Lab) KubeWithToken(token string) (kubernetes.Interface, error) {
	config := rest.AnonymousClientConfig(l.control.admin)
	config.BearerToken = token
	return kubernetes.NewForConfig(config)
}

// Dynamic returns a client for objects of any kind, with an administrator's rights.
func (l *Lab) Dynamic() dynamic.Interface { return l.dynamic }
