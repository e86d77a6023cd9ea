package cluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"github.com/landfall-lb/landfall/e2e/lab"
)

// A step of a guide is a command or a manifest as the file has it, found by what it begins with.
type step struct{ file, begins string }

const (
	readme  = "README.md"
	install = "docs/guide/install.md"
)

// guide is what somebody does who follows the README and the page about the installation.
var guide = []step{
	{install, "kubectl create namespace landfall-system"},
	{install, "kubectl label namespace landfall-system"},
	{readme, "helm install landfall charts/landfall"},
	{readme, "apiVersion: landfall.dev/v1beta1\nkind: IPAddressPool"},
	{readme, "kubectl wait --for=condition=landfall.dev/Serving service/my-nginx"},
	{readme, "kubectl -n landfall-system exec daemonset/landfall-node -c speaker -- landfallctl status"},
	{readme, "landfallctl explain svc my-nginx"},
	{readme, "apiVersion: landfall.dev/v1beta1\nkind: BGPPeer"},
	{install, "helm test landfall"},
	{install, "helm upgrade landfall"},
	{install, "kubectl get events -A"},
	{readme, "helm uninstall landfall"},
	{readme, "kubectl get crd -o name"},
	{readme, "kubectl delete namespace landfall-system"},
}

// notRun are the commands that the guide leaves out, each with a reason.
var notRun = map[step]string{
	{install, "helm install landfall charts/landfall"}:        "the README's has the values of this cluster",
	{install, "helm uninstall landfall"}:                      "the README's is the same",
	{install, "kubectl patch service NAME"}:                   "it is for clusters without the Job",
	{install, "kubectl create secret generic"}:                "it is for installations without helm",
	{install, "kubectl apply --server-side -f bin/manifests"}: "it is for installations without helm",
}

var (
	codeBlock = regexp.MustCompile("(?ms)^```([a-z]*)\n(.*?)^```$")
	// commandLine is one command, which may go on behind a backslash at the end of a line.
	commandLine = regexp.MustCompile(`(?m)^(?:kubectl|helm|landfallctl) (?:[^\n\\]|\\\n|\\.)*`)
)

// commands returns the commands and manifests of a page, in their order.
func commands(markdown string) (all []string) {
	for _, block := range codeBlock.FindAllStringSubmatch(markdown, -1) {
		switch block[1] {
		case "yaml":
			all = append(all, block[2])
		case "":
			all = append(all, commandLine.FindAllString(block[2], -1)...)
		}
	}
	return all
}

// find returns the first command or manifest that begins so.
func (s step) find(markdown string) (string, error) {
	for _, command := range commands(markdown) {
		if strings.HasPrefix(command, s.begins) {
			return command, nil
		}
	}
	return "", fmt.Errorf("%s has no command that begins with %q", s.file, s.begins)
}

// Guides does what the guides say, with the commands that they have, on a cluster that enforces Pod
// Security. Only names and addresses of the cluster are put in place of the examples'.
func (c *Cluster) Guides(ctx context.Context, say func(format string, args ...any)) (err error) {
	shell, err := c.shell()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(shell.tools)) }()
	for _, s := range guide {
		markdown, err := os.ReadFile(filepath.Join(c.Repository(), s.file))
		if err != nil {
			return err
		}
		command, err := s.find(string(markdown))
		if err != nil {
			return err
		}
		if err := c.follow(ctx, shell, c.here().Replace(command)); err != nil {
			return errors.Join(fmt.Errorf("%s: %w", s.file, err), c.explain(ctx))
		}
		first, _, _ := strings.Cut(strings.ReplaceAll(command, "\\\n ", ""), "\n")
		say("%s: %s", s.file, first)
	}
	return nil
}

// here replaces what the guides have as examples.
func (c *Cluster) here() *strings.Replacer {
	return strings.NewReplacer("registry.example.com/landfall", ImageRepository, "image.tag=v1",
		"image.tag="+ImageTag+" --set image.pullPolicy=Never", "192.168.0.0/16", c.Lab.Cluster().PodNetwork.String(),
		"172.26.236.180-172.26.236.199", "172.30.0.200-172.30.0.229", "172.26.236.1,", "172.30.0.1,")
}

// guideShell is where commands are typed.
type guideShell struct{ tools, prelude string }

// shell has kubectl, helm and landfallctl in its PATH, and begins in the source tree.
func (c *Cluster) shell() (guideShell, error) {
	tools, err := os.MkdirTemp("", "landfall-guides")
	if err != nil {
		return guideShell{}, err
	}
	for name, path := range map[string]string{"kubectl": c.Kubectl(), "helm": c.HelmPath(),
		"landfallctl": filepath.Join(os.Getenv(programsVariable), "landfallctl")} {
		if _, err := os.Stat(path); err != nil {
			return guideShell{}, fmt.Errorf("run make cluster, which builds landfallctl: %w", err)
		}
		if err := os.Symlink(path, filepath.Join(tools, name)); err != nil {
			return guideShell{}, err
		}
	}
	return guideShell{tools, fmt.Sprintf("export KUBECONFIG=%s PATH=%s:$PATH\ncd %s\n", c.Kubeconfig(), tools,
		c.Repository())}, nil
}

// follow does one step, and what a reader does around it.
func (c *Cluster) follow(ctx context.Context, in guideShell, command string) error {
	run := func(ctx context.Context, command string) (string, error) {
		return c.Exec(ctx, lab.ClientName, "bash", "-euo", "pipefail", "-c", in.prelude+command)
	}
	switch {
	case strings.HasPrefix(command, "apiVersion:"):
		_, err := run(ctx, "kubectl apply -f - <<'EOF'\n"+command+"EOF\n")
		return err
	case strings.HasPrefix(command, "kubectl wait"): // for a Service that the reader has
		nginx := strings.NewReplacer("IMAGE", PodImage, "REPLICAS", "3", "namespace: web", "namespace: default").Replace(
			web[strings.Index(web, "---\n")+4:] + "---\napiVersion: v1\nkind: Service\n" +
				"metadata: {name: my-nginx, namespace: default}\nspec:\n  type: LoadBalancer\n  selector: {app: web}\n" +
				"  ports: [{port: 80, targetPort: 8080}]\n")
		if err := c.ApplyYAML(ctx, nginx); err != nil {
			return err
		}
		if err := c.waitRolledOut(ctx); err != nil {
			return err
		}
		_, err := run(ctx, command)
		return err
	case strings.Contains(command, "landfallctl"): // what it says takes a moment to become true
		return lab.WaitFor(ctx, c.options.Progress, command, time.Minute, func(ctx context.Context) error {
			out, err := run(ctx, command)
			if err == nil && strings.HasSuffix(command, "status") && !strings.Contains(out, "Nothing is wrong.") {
				err = errors.New(out)
			}
			return err
		})
	case strings.HasPrefix(command, "helm upgrade"):
		if _, err := run(ctx, command); err != nil {
			return err
		}
		return c.waitRolledOut(ctx)
	}
	_, err := run(ctx, command)
	return err
}
