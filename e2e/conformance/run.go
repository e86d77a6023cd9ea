package conformance

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/landfall-lb/landfall/e2e/cluster"
	"github.com/landfall-lb/landfall/e2e/lab"
)

// Options say what to run.
type Options struct {
	// Mode is that of Landfall's proxy, nftables or iptables; empty for nftables. With [KubeProxy]
	// kube-proxy runs in its place, for comparison, and Landfall only assigns and announces addresses.
	Mode string
	// Focus are groups with commas between; empty for all. Specs is a pattern of the names in them.
	Focus, Specs string
	// Args are further arguments of ginkgo, as --procs.
	Args []string
	// Landfall is the version that results are kept under.
	Landfall string
	// Name, CNI and Nodes are those of the cluster: see [cluster.Options].
	Name, CNI string
	Nodes     int
	// Progress gets a line for each slow step.
	Progress func(line string)
}

// KubeProxy is the mode with kube-proxy in place of Landfall's proxy.
const KubeProxy = "kube-proxy"

// programs are those of the suite, and the names of the images that it asks for, with ours.
type programs struct {
	suite, ginkgo string
	images        map[string]string
}

// Run starts a cluster, runs specs on it, takes it down, and writes conformance.json and
// conformance.md in docs/design. It returns the results of this run. That specs failed is no error.
func Run(ctx context.Context, o Options) (_ []Spec, err error) {
	o.Mode = cmp.Or(o.Mode, "nftables")
	values := "proxy.mode=" + o.Mode
	switch o.Mode {
	case "nftables", "iptables":
	case KubeProxy:
		values = "proxy.enabled=false"
	default:
		return nil, fmt.Errorf("mode %q: want nftables, iptables or %s", o.Mode, KubeProxy)
	}
	if _, _, err := selection(o.Focus, o.Specs); err != nil {
		return nil, err
	}
	repository, err := lab.FindRepository(".")
	if err != nil {
		return nil, err
	}
	tool := func(name string) (string, error) { return lab.Tool(ctx, repository, name, o.Progress) }
	var p programs
	if p.suite, err = tool("e2e.test"); err != nil {
		return nil, err
	}
	if p.ginkgo, err = tool("ginkgo"); err != nil {
		return nil, err
	}
	list, err := listImages(ctx, p.suite)
	if err != nil {
		return nil, err
	}
	p.images = aliases(list)
	archives, err := makeImages(ctx, tool, o.Progress)
	if err != nil {
		return nil, err
	}
	c, err := cluster.Start(ctx, cluster.Options{
		Name: o.Name, CNI: o.CNI, Nodes: o.Nodes, Archives: archives, Progress: o.Progress,
		Values: []string{values},
	})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, c.Close()) }()
	return o.run(ctx, c, p)
}

// run installs Landfall on a cluster, runs the specs and writes down their results.
func (o Options) run(ctx context.Context, c *cluster.Cluster, p programs) ([]Spec, error) {
	if o.Mode == KubeProxy {
		for _, n := range c.Nodes() {
			proxy, err := c.StartKubeProxy(ctx, n.Name, "iptables")
			if err != nil {
				return nil, err
			}
			if err := proxy.WaitHealthy(ctx); err != nil {
				return nil, err
			}
		}
	}
	if err := install(ctx, c, p.images); err != nil {
		return nil, err
	}
	out := filepath.Join(c.Repository(), "bin", "conformance", o.Mode)
	if err := errors.Join(os.RemoveAll(out), os.MkdirAll(out, 0o755)); err != nil {
		return nil, err
	}
	focus, skip, err := selection(o.Focus, o.Specs)
	if err != nil {
		return nil, err
	}
	argv := slices.Concat([]string{p.ginkgo, "--procs=4", "--no-color", "--timeout=3h", "--keep-going",
		"--focus=" + focus, "--skip=" + skip}, o.Args,
		[]string{p.suite, "--", "--kubeconfig=" + c.Kubeconfig(), "--kubectl-path=" + c.Kubectl(), "--provider=skeleton",
			fmt.Sprintf("--num-nodes=%d", len(c.Nodes())), "--report-dir=" + out, "--e2e-output-dir=" + out,
			"--disable-log-dump", "--dump-logs-on-failure=false"})
	began := time.Now()
	failed := o.watch(ctx, c, filepath.Join(out, "log"), argv)
	text, err := os.ReadFile(filepath.Join(out, "junit_01.xml"))
	if err != nil {
		return nil, errors.Join(failed, err)
	}
	specs, err := Parse(text, o.Landfall, began)
	if err != nil {
		return nil, err
	}
	version, err := c.Kube().Discovery().ServerVersion()
	if err != nil {
		return nil, err
	}
	return specs, update(filepath.Join(c.Repository(), "docs", "design"), o.Mode, version.GitVersion, specs)
}

// install puts Landfall on the cluster, and gives the images on the nodes the names that the suite
// asks for.
func install(ctx context.Context, c *cluster.Cluster, names map[string]string) error {
	var g lab.Group
	for _, n := range c.Nodes() {
		g.Run(func() error {
			for _, name := range slices.Sorted(maps.Keys(names)) {
				if _, err := n.Run(ctx, "ctr", "-n", "k8s.io", "images", "tag", "--force", names[name], name); err != nil {
					return err
				}
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		return err
	}
	if err := c.Install(ctx); err != nil {
		return err
	}
	if err := c.ApplyYAML(ctx, cluster.Pool); err != nil {
		return err
	}
	return c.WaitPods(ctx, "kube-system", "k8s-app=kube-dns", 2)
}

// watch runs ginkgo on the client behind the router, as specs take a client in the nodes' own network
// for one of the nodes. It says now and then how many specs have ended.
func (o Options) watch(ctx context.Context, c *cluster.Cluster, log string, argv []string) error {
	done := make(chan error, 1)
	go func() {
		line := append([]string{"sh", "-c", `log=$1; shift; exec "$@" >"$log" 2>&1`, "sh", log}, argv...)
		_, err := c.Exec(ctx, lab.FarClientName, line...)
		done <- err
	}()
	began := time.Now()
	tick := time.NewTicker(30 * time.Second)
	defer tick.Stop()
	for {
		select {
		case err := <-done:
			return err
		case <-tick.C:
			text, err := os.ReadFile(log)
			if err != nil {
				continue
			}
			o.Progress(fmt.Sprintf("%d specs have ended, %d failed: %.0f s; log in %s", bytes.Count(text, []byte("•")),
				bytes.Count(text, []byte("• [FAILED]")), time.Since(began).Seconds(), log))
		}
	}
}

// update puts results of a run into the files of the folder docs.
func update(docs, mode, kubernetes string, run []Spec) error {
	path := filepath.Join(docs, "conformance.json")
	var r Report
	text, err := os.ReadFile(path)
	if err == nil {
		err = json.Unmarshal(text, &r)
	}
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("%s: %w", path, err)
	}
	r = r.Merge(mode, kubernetes, run)
	if mode == KubeProxy { // of a comparison what has run is enough
		r.Modes[mode] = in(r.Modes[mode], func(s Spec) bool { return s.Result == Passed || s.Result == Failed })
	}
	if text, err = json.MarshalIndent(r, "", " "); err != nil {
		return err
	}
	return errors.Join(os.WriteFile(path, append(text, '\n'), 0o644),
		os.WriteFile(filepath.Join(docs, "conformance.md"), []byte(r.Markdown()), 0o644))
}

// Summary says how many specs of a run ended how, and which failed.
func Summary(run []Spec) []string {
	n := counts(run)
	lines := []string{fmt.Sprintf("%d passed, %d failed, %d skipped", n[Passed], n[Failed], n[Skipped])}
	for _, s := range run {
		if s.Result == Failed {
			lines = append(lines, strings.TrimPrefix(s.Name, prefix)+": "+s.Reason)
		}
	}
	return lines
}
