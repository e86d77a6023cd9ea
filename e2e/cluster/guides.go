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
	readme       = "README.md"
	guides       = "docs/guide/"
	install      = guides + "install.md"
	upgrade      = guides + "upgrade-uninstall.md"
	trouble      = guides + "troubleshooting.md"
	ctl          = guides + "landfallctl.md"
	replacement  = guides + "kube-proxy-replacement.md"
	metrics      = guides + "metrics.md"
	dashboard    = guides + "dashboard.md"
	hour         = guides + "first-hour.md"
	fromProxy    = guides + "migrate-kube-proxy.md"
	fromMetalLB  = guides + "migrate-metallb.md"
	rolling      = guides + "rollouts.md"
	landfallHome = "kubectl -n landfall-system "
)

// guide is what somebody does who follows the README and the page about the installation, looks after
// the cluster as the others say, and ends it. Pages that no step is of are for other clusters, or are
// reference: TestGuides gives their manifests to an API server, and their values to helm.
var guide = []step{
	{install, "kubectl create namespace landfall-system"},
	{install, "kubectl label namespace landfall-system"},
	{readme, "helm install landfall charts/landfall"},
	{readme, "apiVersion: landfall.dev/v1beta1\nkind: IPAddressPool"},
	{readme, "kubectl wait --for=condition=landfall.dev/Serving service/my-nginx"},
	{readme, "bin/landfallctl status"},
	{readme, "bin/landfallctl explain svc my-nginx"},
	{readme, "apiVersion: landfall.dev/v1beta1\nkind: BGPPeer"},
	{install, "helm test landfall"},
	{hour, "bin/landfallctl doctor"},
	{install, "landfallctl doctor"},
	{hour, "bin/landfallctl status"},
	{install, "helm upgrade landfall"},
	{install, "kubectl get events -A"},
	{upgrade, landfallHome + "rollout status"},
	{upgrade, "helm history"},
	{upgrade, "helm rollback"},
	{trouble, "landfallctl explain svc"},
	{trouble, "landfallctl doctor"},
	{trouble, "kubectl describe service"},
	{trouble, "kubectl get events -A"},
	{trouble, "landfallctl explain peer"},
	{trouble, landfallHome + "get pods -l app.kubernetes.io/component=controller"},
	{trouble, landfallHome + "get pods -o wide"},
	{trouble, "landfallctl bundle"},
	{trouble, "kubectl get services,nodes"},
	{trouble, landfallHome + "logs"},
	{ctl, "landfallctl trace"},
	{ctl, "landfallctl flows"},
	{ctl, "landfallctl bundle"},
	{ctl, "landfallctl drain n1 && kubectl drain n1"},
	{ctl, "kubectl uncordon n1 && landfallctl undrain n1"},
	{replacement, landfallHome + "exec daemonset/landfall-node -c proxy"},
	{metrics, "kubectl exec -n landfall-system POD -c speaker"},
	{metrics, "kubectl exec -n landfall-system POD -c proxy"},
	{metrics, "kubectl exec -n landfall-system daemonset/landfall-node -c speaker"},
	{dashboard, "helm upgrade"},
	{readme, "helm uninstall landfall"},
	{readme, "kubectl get crd -o name"},
	{readme, "kubectl delete namespace landfall-system"},
}

// Why a command is not run.
const (
	sameElsewhere = "the story runs the same command of another page"
	otherValues   = "the values are those of another cluster: TestGuides renders them"
	noHelm        = "it is for installations without helm"
	byOthers      = "CI runs it"
	printed       = "it is what a command prints"
)

// notRun are the commands that the stories leave out, each with a reason.
var notRun = map[step]string{
	{readme, "make image BUILDER=docker"}:                     "there is no registry",
	{readme, "make "}:                                         byOthers,
	{readme, "kubectl create deployment"}:                     "there is no image nginx",
	{readme, "kubectl expose deployment"}:                     "there is no image nginx",
	{install, "helm install landfall charts/landfall"}:        "the README's has the values of this cluster",
	{install, "helm uninstall landfall"}:                      sameElsewhere,
	{install, "kubectl patch service NAME"}:                   "it is for clusters without the Job",
	{install, "kubectl create secret generic"}:                noHelm,
	{install, "kubectl apply --server-side -f bin/manifests"}: noHelm,

	{hour, "make "}:                                    byOthers,
	{hour, "helm install"}:                             otherValues,
	{hour, "apiVersion:"}:                              sameElsewhere,
	{hour, "helm test"}:                                sameElsewhere,
	{hour, "kubectl create deployment"}:                "there is no image nginx",
	{hour, "kubectl expose deployment"}:                "there is no image nginx",
	{hour, "kubectl wait"}:                             sameElsewhere,
	{hour, "kubectl get service hello"}:                "there is no image nginx",
	{upgrade, "helm upgrade"}:                          sameElsewhere,
	{upgrade, "helm uninstall"}:                        sameElsewhere,
	{upgrade, "helm get manifest"}:                     "no gossip key is rotated here",
	{upgrade, "kubectl get secret"}:                    "no gossip key is rotated here",
	{upgrade, "landfallctl drain NODE"}:                sameElsewhere,
	{upgrade, "kubectl drain NODE"}:                    sameElsewhere,
	{ctl, "landfallctl explain svc web"}:               sameElsewhere,
	{ctl, "landfallctl doctor"}:                        sameElsewhere,
	{ctl, "landfallctl watch"}:                         "it does not end: the short check runs it",
	{ctl, "landfallctl undrain n1 gives"}:              printed,
	{ctl, "kubectl landfall __complete"}:               "it is a line of a script",
	{ctl, "apiVersion: rbac"}:                          "the short check creates it",
	{replacement, "helm install"}:                      otherValues,
	{dashboard, "landfallctl dashboard"}:               "it does not end: the short check runs it",
	{metrics, "helm upgrade"}:                          "it needs the kinds of Prometheus' operator",
	{fromProxy, "kubectl get services -A -o jsonpath"}: "no Service has external IPs here",
	{fromProxy, "helm upgrade landfall charts/landfall -n landfall-system --reset-then-reuse-values --set"}: "make " +
		"test-e2e switches modes under load",
}

var (
	codeBlock = regexp.MustCompile("(?ms)^```([a-z]*)\n(.*?)^```$")
	// commandStart begins a command in a block, hereDocument a text in one.
	commandStart = regexp.MustCompile(`^(kubectl|helm|make|(bin/)?landfallctl) `)
	hereDocument = regexp.MustCompile(`<<'?(\w+)'?$`)
)

// commands returns the commands and manifests of a page, in their order.
func commands(markdown string) (all []string) {
	for _, block := range codeBlock.FindAllStringSubmatch(markdown, -1) {
		switch block[1] {
		case "yaml":
			all = append(all, block[2])
		case "":
			all = append(all, shellCommands(block[2])...)
		}
	}
	return all
}

// shellCommands returns the commands in a block. One goes on over a line that ends in a backslash, &&
// or |, within single quotes, and in a here document.
func shellCommands(block string) (all []string) {
	var command strings.Builder
	until := ""
	for line := range strings.Lines(block) {
		if command.Len() == 0 && !commandStart.MatchString(line) {
			continue
		}
		command.WriteString(line)
		line = strings.TrimRight(line, "\n")
		if until != "" && line != until {
			continue
		}
		if m := hereDocument.FindStringSubmatch(line); m != nil {
			until = m[1]
			continue
		}
		ends := until != "" || !strings.HasSuffix(line, `\`) && !strings.HasSuffix(line, "&&") &&
			!strings.HasSuffix(line, "|") && strings.Count(command.String(), "'")%2 == 0
		if ends {
			all = append(all, strings.TrimRight(command.String(), "\n"))
			command.Reset()
			until = ""
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

// read returns the command as its page has it.
func (s step) read(repository string) (string, error) {
	markdown, err := os.ReadFile(filepath.Join(repository, s.file))
	if err != nil {
		return "", err
	}
	return s.find(string(markdown))
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
		if err := c.step(ctx, shell, s, say); err != nil {
			return err
		}
	}
	return nil
}

// step does one step, and says so.
func (c *Cluster) step(ctx context.Context, in guideShell, s step, say func(format string, args ...any)) error {
	command, err := s.read(c.Repository())
	if err != nil {
		return err
	}
	first, _, _ := strings.Cut(strings.ReplaceAll(command, "\\\n ", ""), "\n")
	c.options.Progress(first)
	do := func() error { return c.follow(ctx, in, c.here(command)) }
	if s.file == fromProxy && strings.HasPrefix(command, "kubectl label node NODE") {
		do = func() error { return c.nodeByNode(ctx, in, command) }
	}
	if err := do(); err != nil {
		return errors.Join(fmt.Errorf("%s: %w", s.file, err), c.explain(ctx))
	}
	say("%s: %s", s.file, first)
	return nil
}

// placeholder is a word of the guides for which a reader has another one.
var placeholder = regexp.MustCompile(`\b(NODE|NAME|NAMESPACE|POD|n1)\b`)

// here replaces what the guides have as examples.
func (c *Cluster) here(command string) string {
	command = strings.NewReplacer("registry.example.com/landfall", ImageRepository, "image.tag=v1",
		"image.tag="+ImageTag+" --set image.pullPolicy=Never", "192.168.0.0/16", c.Lab.Cluster().PodNetwork.String(),
		"172.26.236.180-172.26.236.199", "172.30.0.200-172.30.0.229", "172.26.236.1,", "172.30.0.1,",
		"namespace shop", "namespace web", "-n shop rollout", "-n web rollout", "web -n shop", "my-nginx -n default",
		"svc/shop/web", "svc/default/my-nginx",
		"203.0.113.7", c.Lab.Cluster().LAN.Client.String(), "explain peer NAME", "explain peer tor-1").Replace(command)
	if strings.HasPrefix(command, "apiVersion:") {
		return command
	}
	return placeholder.ReplaceAllStringFunc(command, func(word string) string {
		return map[string]string{"NODE": "node-3", "n1": "node-3", "NAME": "my-nginx", "NAMESPACE": "default",
			"POD": "$(kubectl get pods -n landfall-system -l app.kubernetes.io/component=node -o name | head -n 1)"}[word]
	})
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
		"landfallctl": landfallctlPath()} {
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

// typed runs a command as the reader of a guide types it.
func (c *Cluster) typed(ctx context.Context, in guideShell, command string) (string, error) {
	return c.Exec(ctx, lab.ClientName, "bash", "-euo", "pipefail", "-c", in.prelude+command)
}

// follow does one step, and what a reader does around it.
func (c *Cluster) follow(ctx context.Context, in guideShell, command string) error {
	switch {
	case strings.HasPrefix(command, "apiVersion:"):
		command = "kubectl apply -f - <<'EOF'\n" + command + "EOF\n"
	case strings.HasPrefix(command, "kubectl wait"): // for a Service that the reader has
		if err := c.createNginx(ctx); err != nil {
			return err
		}
	case strings.HasPrefix(command, "landfallctl bundle"): // it writes into the current folder
		command = "cd " + in.tools + "\n" + command
	case strings.Contains(command, "landfallctl") && !strings.Contains(command, "drain") &&
		!strings.Contains(command, "migrate"): // what it says takes a moment to become true
		return lab.WaitFor(ctx, c.options.Progress, command, time.Minute, func(ctx context.Context) error {
			out, err := c.typed(ctx, in, command)
			if err == nil && strings.HasSuffix(command, "status") && !strings.Contains(out, "Nothing is wrong.") {
				err = errors.New(out)
			}
			return err
		})
	}
	if _, err := c.typed(ctx, in, command); err != nil {
		return err
	}
	for _, changes := range []string{"helm install", "helm upgrade", "helm rollback"} {
		if strings.HasPrefix(command, changes) {
			return c.waitRolledOut(ctx)
		}
	}
	return nil
}

// createNginx creates the Service that the README has, and its pods.
func (c *Cluster) createNginx(ctx context.Context) error {
	return c.ApplyYAML(ctx, strings.NewReplacer("IMAGE", PodImage, "REPLICAS", "3", "namespace: web",
		"namespace: default").Replace(
		web[strings.Index(web, "---\n")+4:]+"---\napiVersion: v1\nkind: Service\n"+
			"metadata: {name: my-nginx, namespace: default}\nspec:\n  type: LoadBalancer\n  selector: {app: web}\n"+
			"  ports: [{port: 80, targetPort: 8080}]\n"))
}
