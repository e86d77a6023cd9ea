package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

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
			return runKubeProxy(cmd.Context(), *o, f, cmd.OutOrStdout())
		},
	}
	o.addOutput(cmd, "values")
	f.add(cmd)
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
	pause time.Duration
}

func runKubeProxy(ctx context.Context, o options, f migrateOptions, stdout io.Writer) error {
	m, err := readTakeover(ctx, o, f, stdout)
	if err != nil {
		return err
	}
	switch {
	case o.output == "values":
		return printYAML(stdout, m.config.Values)
	case f.apply:
		return m.run(ctx, m.steps())
	case f.undo:
		return m.run(ctx, m.undoSteps())
	}
	return m.show(stdout)
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
	if config == nil {
		return nil, fmt.Errorf("there is no ConfigMap %s/%s: is kube-proxy elsewhere (--kube-proxy-namespace, "+
			"--kube-proxy-configmap), or does another service proxy run?", f.kubeProxyNamespace, f.kubeProxyConfigName)
	}
	m := &takeover{config: migrate.ReadKubeProxy(config), pause: f.pause}
	m.installer = newInstaller(client, f, stdout, m.config.Values)
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
		return nil, fmt.Errorf("there is no DaemonSet %s/%s: give --kube-proxy-daemonset, or follow the guide where "+
			"kube-proxy is no DaemonSet", f.kubeProxyNamespace, f.kubeProxyDaemonSet)
	}
	m.set = migrate.NewWorkload(sets[0])
	m.nodes = migrate.LinuxNodes(nodes)
	return m, nil
}

func (m *takeover) steps() []move {
	return []move{
		{"install Landfall beside kube-proxy", m.install},
		{"take over one node after another", m.takeNodes},
		{"keep kube-proxy off new nodes", m.settle},
	}
}

func (m *takeover) undoSteps() []move {
	return []move{
		{"start kube-proxy on all nodes, beside Landfall", m.giveBack},
	}
}

// takeNodes stops kube-proxy on one node after another, and removes its rules there. Landfall's are
// ahead of them already.
func (m *takeover) takeNodes(ctx context.Context) error {
	live, err := m.get(ctx, workloadPath(m.set))
	if err != nil {
		return err
	}
	if text(live, "spec", "template", "spec", "nodeSelector", migrate.LabelNode) == "never" {
		return nil // all nodes were taken over by an earlier run
	}
	if err := m.change(ctx, workloadPath(m.set), migrate.StopWhere(m.set, migrate.FromKubeProxy)); err != nil {
		return err
	}
	for _, node := range m.nodes {
		if err := m.takeNode(ctx, node); err != nil {
			return fmt.Errorf("node %s: %w", node, err)
		}
	}
	return nil
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
	select {
	case <-time.After(m.pause):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// podMissing says why no pod of Landfall's DaemonSet is ready on a node; "" if one is.
func (m *takeover) podMissing(ctx context.Context, node string) (string, error) {
	pods, err := m.list(ctx, "/api/v1/namespaces/"+m.choice.Namespace+"/pods", ourLabels)
	for _, p := range pods {
		owner, _ := json.Marshal(p["metadata"])
		if text(p, "spec", "nodeName") != node || !strings.Contains(string(owner), `"kind":"DaemonSet"`) {
			continue
		}
		if status, _ := condition(p, "Ready"); status == "True" {
			return "", err
		}
		return "pod " + name(p) + " is not ready", err
	}
	return "there is none on the node", err
}

// cleanUp runs kube-proxy --cleanup on a node: it removes chains and tables of all its modes, IPVS'
// virtual servers, ipsets and kube-ipvs0.
func (m *takeover) cleanUp(ctx context.Context, node string) error {
	pod := migrate.CleanupPod(m.set, node)
	uri := "/api/v1/namespaces/" + m.set.Namespace + "/pods/" + pod.Metadata.Name
	if err := m.deletePod(ctx, uri); err != nil { // one of an earlier run
		return err
	}
	if err := m.apply(ctx, uri, pod, false); err != nil {
		return err
	}
	var failed error
	err := m.until(ctx, "kube-proxy --cleanup", func() (string, error) {
		live, err := m.get(ctx, uri)
		phase := text(live, "status", "phase")
		switch {
		case phase == "Failed":
			failed = fmt.Errorf("kube-proxy --cleanup failed: kubectl -n %s logs %s", m.set.Namespace, pod.Metadata.Name)
			return "", nil
		case phase != "Succeeded":
			return "pod " + pod.Metadata.Name + " is " + phase, err
		}
		return "", err
	})
	if err := errors.Join(err, failed); err != nil {
		return err // the pod stays, to be looked at
	}
	return m.deletePod(ctx, uri)
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
	if err := m.unlabelNodes(ctx, migrate.FromKubeProxy); err != nil {
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
	if err := m.unlabelNodes(ctx, migrate.FromKubeProxy); err != nil {
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
	line("From kube-proxy (mode %s) to Landfall, on %d nodes.\n\nIts configuration:\n", m.config.Mode, len(m.nodes))
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
