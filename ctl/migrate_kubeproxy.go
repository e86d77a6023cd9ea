package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"path"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"sigs.k8s.io/yaml"

	"github.com/landfall-lb/landfall/ctl/migrate"
)

func kubeProxyCommand(o *options) *cobra.Command {
	var f migrateOptions
	cmd := &cobra.Command{
		Use: "kube-proxy", Short: "Plan the takeover from kube-proxy, carry it out, or go back",
		Long: "Plan the takeover from kube-proxy: what happens to each field of its configuration, the Helm values of " +
			"Landfall, and the steps. --apply takes over one node after another, each checked before the next; kube-proxy's " +
			"rules, IPVS' virtual servers, ipsets and kube-ipvs0 included, are removed by kube-proxy --cleanup. --undo goes " +
			"back.",
		Example: "  landfallctl migrate kube-proxy\n  landfallctl migrate kube-proxy -o values > values.yaml\n" +
			"  landfallctl migrate kube-proxy --apply --chart charts/landfall",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			f.choices.Namespace = o.home()
			return runKubeProxy(cmd.Context(), *o, f, cmd.OutOrStdout())
		},
	}
	o.addOutput(cmd, "values")
	f.add(cmd)
	cmd.Flags().StringVar(&f.choices.ClusterCIDR, "cluster-cidr", "", "pod network, as `CIDR` or one of each family, "+
		"where kube-proxy's configuration does not say it")
	cmd.Flags().StringVar(&f.kubeProxyDaemonSet, "kube-proxy-daemonset", "kube-proxy", "`name` of kube-proxy's DaemonSet")
	return cmd
}

// takeover takes nodes over from kube-proxy, or gives them back.
type takeover struct {
	installer
	config migrate.KubeProxy
	// set is kube-proxy's DaemonSet, image that of its pods.
	set   migrate.Workload
	nodes []string
}

func runKubeProxy(ctx context.Context, o options, f migrateOptions, stdout io.Writer) error {
	m, err := readTakeover(ctx, o, f, stdout)
	if err != nil {
		return err
	}
	switch {
	case o.output == "values":
		return printYAML(stdout, m.config.Values)
	case f.undo:
		return m.run(ctx, m.undoSteps())
	case f.apply && len(m.config.Blockers) == 0:
		if done, err := m.taken(ctx); done || err != nil {
			if err == nil {
				_, err = fmt.Fprintln(stdout, "Nothing to do: all nodes were taken over. --undo goes back.")
			}
			return err
		}
		return m.run(ctx, m.steps())
	}
	if err := m.show(stdout); err != nil {
		return err
	}
	if len(m.config.Blockers) > 0 && f.apply {
		return fmt.Errorf("nothing was done: %s", strings.Join(m.config.Blockers, "; "))
	}
	return nil
}

func readTakeover(ctx context.Context, o options, f migrateOptions, stdout io.Writer) (*takeover, error) {
	reading, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	client, _, err := o.connect(reading)
	if err != nil {
		return nil, err
	}
	config, err := readKubeProxy(reading, client, f)
	if err != nil {
		return nil, o.late(reading, client, err)
	}
	sets, err := readObjects(reading, client, nil,
		appsPath+f.kubeProxyNamespace+"/daemonsets/"+f.kubeProxyDaemonSet)
	if err != nil {
		return nil, o.late(reading, client, err)
	}
	nodes, err := readObjects(reading, client, nil, nodesPath)
	if err != nil {
		return nil, o.late(reading, client, err)
	}
	if len(sets) == 0 {
		return nil, fmt.Errorf("there is no DaemonSet %s/%s: %s", f.kubeProxyNamespace, f.kubeProxyDaemonSet,
			cmp.Or(migrate.Elsewhere(nodes), "give --kube-proxy-namespace and --kube-proxy-daemonset, or does another service "+
				"proxy run?"))
	}
	m := &takeover{set: migrate.NewWorkload(sets[0]), nodes: migrate.LinuxNodes(nodes)}
	if config == nil { // without one, flags are all
		ok := false
		if config, ok = migrate.KubeProxyFlags(m.set); !ok {
			return nil, fmt.Errorf("there is no ConfigMap %s/%s with kube-proxy's configuration: give --kube-proxy-configmap",
				f.kubeProxyNamespace, f.kubeProxyConfigName)
		}
	}
	m.config = migrate.PlanKubeProxy(config, m.set, f.choices)
	m.config.NoteOldKernels(nodes)
	if services, err := readObjects(reading, client, nil, servicesPath); err != nil {
		m.config.Notes = append(m.config.Notes, "external IPs that Landfall does not serve are not named, as the Services "+
			"could not be read: "+o.late(reading, client, err).Error())
	} else {
		m.config.NoteExternalIPs(services, nodes)
	}
	m.installer = newInstaller(client, o.user, f, stdout, m.config.Values)
	return m, nil
}

func (m *takeover) steps() []move {
	return []move{
		{"check permissions and nodes", m.check},
		{"install Landfall beside kube-proxy", m.installed},
		{"take over one node after another", m.takeNodes},
		{"keep kube-proxy off new nodes", m.settle},
	}
}

func (m *takeover) undoSteps() []move {
	return []move{
		{"check permissions", func(ctx context.Context) error { return m.permitted(ctx, m.needs()) }},
		{"start kube-proxy on all nodes, beside Landfall", m.giveBack},
	}
}

// takeNodes stops kube-proxy on one node after another, and removes its rules there. Landfall's are
// ahead of them already.
func (m *takeover) takeNodes(ctx context.Context) error {
	stopped, err := m.stopped(ctx)
	if stopped || err != nil {
		return err // an earlier run has taken all nodes over
	}
	if err := m.change(ctx, workloadPath(m.set), migrate.StopWhere(m.set, migrate.FromKubeProxy)); err != nil {
		return err
	}
	taken := map[string]bool{} // one that an earlier run has labelled may have kube-proxy's rules yet
	for {
		nodes, err := m.linuxNodes(ctx)
		nodes = slices.DeleteFunc(nodes, func(o map[string]any) bool { return taken[name(o)] })
		if len(nodes) == 0 || err != nil {
			return err // in a large cluster nodes join meanwhile
		}
		for _, o := range nodes {
			if err := m.takeNode(ctx, name(o)); err != nil {
				return fmt.Errorf("node %s: %w", name(o), err)
			}
			taken[name(o)] = true
		}
	}
}

// stopped reports whether kube-proxy has no pods anywhere.
func (m *takeover) stopped(ctx context.Context) (bool, error) {
	live, err := m.get(ctx, workloadPath(m.set))
	return text(live, "spec", "template", "spec", "nodeSelector", migrate.LabelNode) == "never", err
}

func (m *takeover) linuxNodes(ctx context.Context) ([]map[string]any, error) {
	nodes, err := m.list(ctx, nodesPath, "")
	return slices.DeleteFunc(nodes, func(o map[string]any) bool {
		return cmp.Or(text(o, "metadata", "labels", "kubernetes.io/os"), "linux") != "linux"
	}), err
}

// taken reports whether an earlier run has come to its end.
func (m *takeover) taken(ctx context.Context) (bool, error) {
	if stopped, err := m.stopped(ctx); !stopped || err != nil {
		return false, err
	}
	marked, err := m.list(ctx, nodesPath, migrate.LabelNode+"="+migrate.FromKubeProxy)
	return len(marked) == 0, err
}

// check is all that has to be so before anything is changed.
func (m *takeover) check(ctx context.Context) error {
	if err := m.permitted(ctx, m.needs()); err != nil {
		return err
	}
	return m.nodesReady(ctx, "kube-proxy's rules there cannot be removed")
}

// installed checks that Landfall's proxy is in what somebody has installed, perhaps without this plan's
// values: with speakers alone, nobody would serve Services once kube-proxy has stopped.
func (m *takeover) installed(ctx context.Context) error {
	if err := m.install(ctx); err != nil {
		return err
	}
	sets, err := m.list(ctx, appsPath+m.choice.Namespace+"/daemonsets", ourLabels)
	if err != nil {
		return err
	}
	why := ""
	for _, o := range sets {
		spec, _ := o["spec"].(map[string]any)
		template, _ := spec["template"].(map[string]any)
		found, problem := migrate.Proxy(template["spec"])
		if found {
			return nil
		}
		why = cmp.Or(why, problem)
	}
	return fmt.Errorf("%s: helm upgrade %s CHART -n %s --reset-then-reuse-values -f VALUES, with the values of -o values",
		why, m.release, m.choice.Namespace)
}

func (m *takeover) takeNode(ctx context.Context, node string) error {
	// With a program that does not run there, nothing would follow changes once kube-proxy has stopped.
	if err := m.until(ctx, "Landfall's pod runs", func() (string, error) { return m.podMissing(ctx, node) }); err != nil {
		return err
	}
	if err := m.label(ctx, nodesPath+"/"+node, migrate.LabelNode, migrate.FromKubeProxy); err != nil {
		return err
	}
	if err := m.noPods(ctx, m.set.Namespace, m.set.Pods, node); err != nil {
		return err
	}
	if err := m.cleanUp(ctx, node); err != nil {
		return err
	}
	if err := m.until(ctx, "Landfall's pod is ready", func() (string, error) {
		return m.podMissing(ctx, node)
	}); err != nil {
		return err
	}
	m.say("%s is taken over", node)
	return m.sleep(ctx)
}

// podMissing says why no pod with Landfall's proxy is ready on a node; "" if one is.
func (m *takeover) podMissing(ctx context.Context, node string) (string, error) {
	pods, err := m.list(ctx, "/api/v1/namespaces/"+m.choice.Namespace+"/pods", ourLabels)
	for _, p := range pods {
		// A pod with the speaker alone (node.separatePods), or one that ends, serves no Services.
		if proxy, _ := migrate.Proxy(p["spec"]); text(p, "spec", "nodeName") != node || !proxy ||
			text(p, "metadata", "deletionTimestamp") != "" {
			continue
		}
		if status, _ := condition(p, "Ready"); status == "True" {
			return "", err
		}
		return "pod " + name(p) + " is not ready", err
	}
	return "there is none with Landfall's proxy on the node", err
}

// cleanupTries is how often kube-proxy --cleanup may fail on a node. After the IPVS mode its first run
// does (1.35): it removes the chains of the iptables mode first, and rules of the IPVS mode still jump to
// one of them. The same run removes these rules, so that the second succeeds.
const cleanupTries = 2

// cleanUp runs kube-proxy --cleanup on a node: it removes chains and tables of all its modes, IPVS'
// virtual servers, ipsets and kube-ipvs0.
func (m *takeover) cleanUp(ctx context.Context, node string) error {
	pod := migrate.CleanupPod(m.set, node)
	uri := "/api/v1/namespaces/" + m.set.Namespace + "/pods/" + pod.Metadata.Name
	for try := 1; ; try++ {
		if err := m.deletePod(ctx, uri); err != nil { // one of an earlier run
			return err
		}
		if err := m.apply(ctx, uri, pod, false); err != nil {
			return err
		}
		succeeded, err := m.podEnds(ctx, "kube-proxy --cleanup", uri)
		switch {
		case err != nil:
			return err
		case succeeded:
			return m.deletePod(ctx, uri)
		case try == cleanupTries: // the pod stays, to be looked at
			return fmt.Errorf("kube-proxy --cleanup failed: kubectl -n %s logs %s", m.set.Namespace, pod.Metadata.Name)
		}
	}
}

// podEnds waits until a pod has ended, and reports whether it succeeded.
func (m *takeover) podEnds(ctx context.Context, what, uri string) (succeeded bool, err error) {
	err = m.until(ctx, what, func() (string, error) {
		live, err := m.get(ctx, uri)
		phase := text(live, "status", "phase")
		succeeded = phase == "Succeeded"
		if succeeded || phase == "Failed" {
			return "", err
		}
		return "pod " + path.Base(uri) + " is " + phase, err
	})
	return succeeded, err
}

// deletePod deletes a pod, if it is there, and waits until it has ended.
func (m *takeover) deletePod(ctx context.Context, uri string) error {
	if _, err := m.server.Send(ctx, http.MethodDelete, uri, "", nil); err != nil {
		return err
	}
	return m.until(ctx, "an old pod goes", func() (string, error) {
		live, err := m.get(ctx, uri)
		if live != nil {
			return uri + " is still there", err
		}
		return "", err
	})
}

// settle has no node run kube-proxy, those that join later included, and removes the labels.
func (m *takeover) settle(ctx context.Context) error {
	if err := m.change(ctx, workloadPath(m.set), migrate.Stop()); err != nil {
		return err
	}
	nodes, err := m.linuxNodes(ctx)
	if err != nil {
		return err
	}
	for _, o := range nodes { // those that have joined since the last look
		if text(o, "metadata", "labels", migrate.LabelNode) == "" {
			if err := errors.Join(m.noPods(ctx, m.set.Namespace, m.set.Pods, name(o)), m.cleanUp(ctx, name(o))); err != nil {
				return fmt.Errorf("node %s: %w", name(o), err)
			}
		}
	}
	if err := m.unlabelNodes(ctx, migrate.LabelNode, migrate.FromKubeProxy); err != nil {
		return err
	}
	m.say("kube-proxy is a DaemonSet without pods now; kubectl -n %s delete daemonset %s makes it final, and kubeadm "+
		"upgrade brings it back unless skipPhases has addon/kube-proxy", m.set.Namespace, m.set.Name)
	return nil
}

// giveBack starts kube-proxy everywhere. Landfall's rules stay ahead of its own until the proxy is
// removed, so nothing is lost whichever of the two ends.
func (m *takeover) giveBack(ctx context.Context) error {
	// A cleanup that an earlier run began would remove kube-proxy's new rules.
	pods := "/api/v1/namespaces/" + m.set.Namespace + "/pods"
	cleanups, err := m.list(ctx, pods, migrate.LabelFrom+"="+migrate.FromKubeProxy)
	if err != nil {
		return err
	}
	for _, p := range cleanups {
		if err := m.deletePod(ctx, pods+"/"+name(p)); err != nil {
			return err
		}
	}
	if err := m.revert(ctx, workloadPath(m.set)); err != nil {
		return err
	}
	if err := m.unlabelNodes(ctx, migrate.LabelNode, migrate.FromKubeProxy); err != nil {
		return err
	}
	if err := m.workloadsReady(ctx, []migrate.Workload{m.set}); err != nil {
		return err
	}
	m.say("kube-proxy runs on all nodes. Stop Landfall's proxy: helm upgrade %s CHART -n %s --reset-then-reuse-values "+
		"--set proxy.enabled=false --set speaker.gate=none; then remove its rules: "+
		"docs/guide/migrate-kube-proxy.md, Give back",
		m.release, m.choice.Namespace)
	return nil
}

// show prints the plan.
func (m *takeover) show(w io.Writer) error {
	var out strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&out, format+"\n", args...) }
	line("From kube-proxy (mode %s) to Landfall, on %d nodes.\n", m.config.Mode, len(m.nodes))
	for _, b := range m.config.Blockers {
		line("First: %s\n", b)
	}
	line("Its configuration:\n")
	for _, s := range m.config.Settings {
		to := s.Why
		if s.Chart != "" {
			to = s.Chart
		}
		line("  %s: %s -> %s", s.Field, s.Value, to)
	}
	for _, field := range m.config.Unknown {
		line("  %s -> not known to this landfallctl: compare it yourself", field)
	}
	line("\nHelm values (-o values):\n")
	values, err := yaml.Marshal(m.config.Values)
	if err != nil {
		return err
	}
	for text := range strings.Lines(string(values)) {
		out.WriteString("  " + text)
	}
	if len(m.config.Notes) > 0 {
		line("\nNotes:\n")
	}
	for _, note := range m.config.Notes {
		line("  - %s", note)
	}
	line("\nSteps of --apply; --undo goes back from each:\n")
	for i, s := range m.steps() {
		line("  %d. %s", i+1, s.what)
	}
	_, err = io.WriteString(w, out.String())
	return err
}
