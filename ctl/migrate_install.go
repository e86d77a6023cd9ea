package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"time"

	"sigs.k8s.io/yaml"

	"github.com/landfall-lb/landfall/ctl/migrate"
	"github.com/landfall-lb/landfall/internal/kube"
)

// installer is a migration that begins with an installation of Landfall.
type installer struct {
	migrator
	choice migrate.Choices
	values map[string]any
	// chart is what helm installs; "" if somebody else installs Landfall.
	chart, helm, release string
	// files and set are values that the user adds to those of the plan.
	files, set []string
	// user is who helm is, in which cluster: the same as landfallctl.
	user kube.UserConfig
	// ready says which of Landfall's programs are not ready; "" if all are.
	ready func(ctx context.Context) (missing string, err error)
}

func newInstaller(client *kube.Client, user kube.UserConfig, f migrateOptions, out io.Writer,
	values map[string]any) installer {
	return installer{
		user:     user,
		migrator: migrator{server: client, out: out, wait: f.wait, pause: f.pause, poll: 200 * time.Millisecond},
		choice:   f.choices, values: values, chart: f.chart, helm: f.helm, release: f.name,
		files: f.values, set: f.set,
		ready: func(ctx context.Context) (string, error) { return landfallReady(ctx, client, f.choices.Namespace) },
	}
}

// move is one step of a migration.
type move struct {
	what string
	do   func(ctx context.Context) error
}

const (
	appsPath     = "/apis/apps/v1/namespaces/"
	servicesPath = "/api/v1/services"
	nodesPath    = "/api/v1/nodes"
	crdsPath     = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
	l2Path       = "/apis/metallb.io/v1beta1/"
	ourLabels    = "app.kubernetes.io/name=landfall"
)

// run does the steps. Each begins only when the one before is known to have worked.
func (m *migrator) run(ctx context.Context, steps []move) error {
	for i, s := range steps {
		fmt.Fprintf(m.out, "%d/%d %s\n", i+1, len(steps), s.what)
		if err := s.do(ctx); err != nil {
			const again = "give the same command again to go on, or with --undo in place of --apply to go back"
			if errors.Is(err, context.Canceled) {
				return fmt.Errorf("interrupted in step %d (%s): %s", i+1, s.what, again)
			}
			return fmt.Errorf("step %d (%s): %w; %s", i+1, s.what, err, again)
		}
	}
	return nil
}

func workloadPath(w migrate.Workload) string {
	return appsPath + w.Namespace + "/" + strings.ToLower(w.Kind) + "s/" + w.Name
}

func (m *installer) helmCommand(values string) []string {
	argv := []string{m.helm, "upgrade", "--install", m.release, m.chart, "--namespace", m.choice.Namespace,
		"--create-namespace", "--values", values}
	for _, file := range m.files {
		argv = append(argv, "--values", file)
	}
	for _, value := range m.set {
		argv = append(argv, "--set", value)
	}
	for _, flag := range []struct{ name, value string }{
		{"--kubeconfig", m.user.Kubeconfig}, {"--kube-context", m.user.Context}, {"--kube-as-user", m.user.As},
	} {
		if flag.value != "" {
			argv = append(argv, flag.name, flag.value)
		}
	}
	for _, group := range m.user.AsGroups {
		argv = append(argv, "--kube-as-group", group)
	}
	return argv
}

// install has helm install Landfall, unless it is there. Definitions that somebody applied by hand
// are given to the release first: helm refuses to touch what it did not create.
func (m *installer) install(ctx context.Context) error {
	there, err := m.list(ctx, appsPath+m.choice.Namespace+"/daemonsets", ourLabels)
	if err != nil {
		return err
	}
	if len(there) == 0 {
		if m.chart == "" {
			return fmt.Errorf("it is not in the namespace %s: give --chart, or run helm upgrade --install with the values of "+
				"-o values yourself", m.choice.Namespace)
		}
		if err := m.adoptDefinitions(ctx); err != nil {
			return err
		}
		if err := m.runHelm(ctx); err != nil {
			return err
		}
	}
	return m.until(ctx, "Landfall's programs are ready", func() (string, error) { return m.ready(ctx) })
}

func (m *installer) adoptDefinitions(ctx context.Context) error {
	definitions, err := m.list(ctx, crdsPath, "")
	if err != nil {
		return err
	}
	for _, d := range definitions {
		if text(d, "spec", "group") != "landfall.dev" ||
			text(d, "metadata", "annotations", "meta.helm.sh/release-name") != "" {
			continue
		}
		m.say("%s was not installed by helm: the release %s takes it over", name(d), m.release)
		err := m.patch(ctx, crdsPath+"/"+name(d), map[string]any{"metadata": map[string]any{
			"labels": map[string]any{"app.kubernetes.io/managed-by": "Helm"},
			"annotations": map[string]any{"meta.helm.sh/release-name": m.release,
				"meta.helm.sh/release-namespace": m.choice.Namespace},
		}})
		if err != nil {
			return err
		}
	}
	return nil
}

func (m *installer) runHelm(ctx context.Context) error {
	text, err := yaml.Marshal(m.values)
	if err != nil {
		return err
	}
	file, err := os.CreateTemp("", "landfall-values-*.yaml")
	if err != nil {
		return err
	}
	defer func() { _ = os.Remove(file.Name()) }()
	_, err = file.Write(text)
	if err := errors.Join(err, file.Close()); err != nil {
		return err
	}
	argv := m.helmCommand(file.Name())
	m.say("%s", strings.Join(argv, " "))
	out, err := exec.CommandContext(ctx, argv[0], argv[1:]...).CombinedOutput()
	if err != nil && ctx.Err() == nil {
		return fmt.Errorf("helm: %w: %s", err, strings.TrimSpace(string(out)))
	}
	return context.Cause(ctx)
}
