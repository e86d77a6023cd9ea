package lab

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	yamlutil "k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/restmapper"
	"sigs.k8s.io/yaml"
)

const (
	// Namespace is where the chart is installed.
	Namespace   = "landfall-system"
	releaseName = "landfall"
	chartFolder = "charts/landfall"
)

// chart is what the chart renders to.
type chart struct {
	crds, others []*unstructured.Unstructured
	daemonSets   []appsv1.DaemonSet
	deployments  []appsv1.Deployment
}

// chartValues are the values that fit the chart to the lab, as an administrator of such a cluster
// would set them.
func (l *Lab) chartValues() map[string]any {
	return map[string]any{
		// No kube-proxy delivers the address of default/kubernetes before Landfall's proxy runs.
		"kubernetesServiceHost": l.control.master.Addr.String(),
		"kubernetesServicePort": 6443,
		"proxy": map[string]any{"clusterCIDR": joined(l.cluster.prefixes(l.cluster.PodNetwork)),
			"mode": proxyMode()},
		// One is enough where nothing evicts it; a test of the leader election asks for more.
		"controller": map[string]any{"replicas": 1},
	}
}

// proxyMode is how the proxies write rules: as $LANDFALL_LAB_PROXY_MODE says, auto if it is not
// set. Tests are run in each mode.
func proxyMode() string { return cmp.Or(os.Getenv("LANDFALL_LAB_PROXY_MODE"), "auto") }

// renderChart renders the chart with helm.
func (l *Lab) renderChart(ctx context.Context, helm string) (*chart, error) {
	args := []string{
		"template", releaseName, filepath.Join(l.options.Repository, chartFolder),
		"--namespace", Namespace, "--include-crds", "--no-hooks", "--kube-version", "v1.35.4",
	}
	if l.options.MutatingPolicies {
		args = append(args, "--api-versions", "admissionregistration.k8s.io/v1beta1/MutatingAdmissionPolicy")
	}
	for i, values := range []map[string]any{l.chartValues(), l.options.Values} {
		text, err := yaml.Marshal(values)
		if err != nil {
			return nil, err
		}
		file := l.state.path(fmt.Sprintf("values-%d.yaml", i))
		if err := os.WriteFile(file, text, 0o600); err != nil {
			return nil, err
		}
		args = append(args, "--values", file)
	}
	cmd := exec.CommandContext(ctx, helm, args...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return nil, fmt.Errorf("render the chart: %w: %s", err, strings.TrimSpace(stderr.String()))
	}
	return parseChart(&stdout)
}

// parseChart reads rendered manifests.
func parseChart(r io.Reader) (*chart, error) {
	c := &chart{}
	decoder := yamlutil.NewYAMLOrJSONDecoder(r, 4096)
	for {
		object := &unstructured.Unstructured{}
		if err := decoder.Decode(object); errors.Is(err, io.EOF) {
			return c, nil
		} else if err != nil {
			return nil, fmt.Errorf("read the rendered chart: %w", err)
		}
		if len(object.Object) == 0 {
			continue
		}
		if err := c.add(object); err != nil {
			return nil, fmt.Errorf("%s %s: %w", object.GetKind(), object.GetName(), err)
		}
	}
}

func (c *chart) add(object *unstructured.Unstructured) error {
	switch object.GetKind() {
	case "CustomResourceDefinition":
		c.crds = append(c.crds, object)
		return nil
	case "DaemonSet":
		c.daemonSets = append(c.daemonSets, appsv1.DaemonSet{})
		c.others = append(c.others, object)
		return runtime.DefaultUnstructuredConverter.FromUnstructured(object.Object, &c.daemonSets[len(c.daemonSets)-1])
	case "Deployment":
		c.deployments = append(c.deployments, appsv1.Deployment{})
		c.others = append(c.others, object)
		return runtime.DefaultUnstructuredConverter.FromUnstructured(object.Object, &c.deployments[len(c.deployments)-1])
	default:
		c.others = append(c.others, object)
		return nil
	}
}

// installChart applies what the chart rendered and starts its containers.
func (l *Lab) installChart(ctx context.Context, c *chart) error {
	if err := l.ensureNamespace(ctx, Namespace); err != nil {
		return err
	}
	if err := l.applyCRDs(ctx, c.crds); err != nil {
		return err
	}
	if err := l.Apply(ctx, c.others...); err != nil {
		return fmt.Errorf("apply the chart: %w", err)
	}
	if err := l.planAgents(ctx, c); err != nil {
		return err
	}
	if l.options.Stopped {
		return nil
	}
	for _, a := range l.agents {
		if err := a.Start(); err != nil {
			return err
		}
	}
	return l.waitReady(ctx, "the agents", l.agents)
}

// applyCRDs applies custom resource definitions and waits until the API server serves them.
func (l *Lab) applyCRDs(ctx context.Context, crds []*unstructured.Unstructured) error {
	client := l.dynamic.Resource(apiextensionsv1.SchemeGroupVersion.WithResource("customresourcedefinitions"))
	for _, crd := range crds {
		if err := apply(ctx, client, crd); err != nil {
			return err
		}
	}
	for _, crd := range crds {
		err := WaitFor(ctx, l.progress, "definition "+crd.GetName(), 30*time.Second, func(ctx context.Context) error {
			got, err := client.Get(ctx, crd.GetName(), metav1.GetOptions{})
			if err != nil {
				return err
			}
			var typed apiextensionsv1.CustomResourceDefinition
			if err := runtime.DefaultUnstructuredConverter.FromUnstructured(got.Object, &typed); err != nil {
				return err
			}
			for _, cond := range typed.Status.Conditions {
				if cond.Type == apiextensionsv1.Established && cond.Status == apiextensionsv1.ConditionTrue {
					return nil
				}
			}
			return errors.New("not established")
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// Apply applies objects of any kind (server-side, unknown fields refused), as "kubectl apply
// --server-side" does.
func (l *Lab) Apply(ctx context.Context, objects ...*unstructured.Unstructured) error {
	groups, err := restmapper.GetAPIGroupResources(l.kube.Discovery())
	if err != nil {
		return err
	}
	mapper := restmapper.NewDiscoveryRESTMapper(groups)
	for _, object := range objects {
		gvk := object.GroupVersionKind()
		mapping, err := mapper.RESTMapping(gvk.GroupKind(), gvk.Version)
		if err != nil {
			return err
		}
		var client dynamic.ResourceInterface = l.dynamic.Resource(mapping.Resource)
		if ns := object.GetNamespace(); ns != "" {
			client = l.dynamic.Resource(mapping.Resource).Namespace(ns)
		}
		if err := apply(ctx, client, object); err != nil {
			return err
		}
	}
	return nil
}

// ApplyYAML applies the objects in a manifest.
func (l *Lab) ApplyYAML(ctx context.Context, manifest string) error {
	c, err := parseChart(strings.NewReader(manifest))
	if err != nil {
		return err
	}
	return l.Apply(ctx, append(c.crds, c.others...)...)
}

func apply(ctx context.Context, client dynamic.ResourceInterface, object *unstructured.Unstructured) error {
	data, err := object.MarshalJSON()
	if err != nil {
		return err
	}
	force := true
	_, err = client.Patch(ctx, object.GetName(), types.ApplyPatchType, data,
		metav1.PatchOptions{FieldManager: fieldManager, Force: &force, FieldValidation: metav1.FieldValidationStrict})
	if err != nil {
		return fmt.Errorf("%s %s: %w", object.GetKind(), object.GetName(), err)
	}
	return nil
}

// planAgents makes an agent of each container that a kubelet would start: those of a DaemonSet on
// each node that its selector matches, those of a Deployment on as many nodes as it has replicas,
// the control plane first.
func (l *Lab) planAgents(ctx context.Context, c *chart) error {
	for _, ds := range c.daemonSets {
		for _, n := range l.cluster.Nodes {
			if err := l.planPodAgents(ctx, ds.Name, ds.Spec.Template.Spec, n); err != nil {
				return fmt.Errorf("of DaemonSet %s: %w", ds.Name, err)
			}
		}
	}
	for _, d := range c.deployments {
		replicas := 1
		if d.Spec.Replicas != nil {
			replicas = int(*d.Spec.Replicas)
		}
		for i := range replicas {
			if err := l.planPodAgents(ctx, d.Name, d.Spec.Template.Spec, l.cluster.Nodes[i%len(l.cluster.Nodes)]); err != nil {
				return fmt.Errorf("of Deployment %s: %w", d.Name, err)
			}
		}
	}
	return nil
}

func (l *Lab) planPodAgents(ctx context.Context, owner string, spec corev1.PodSpec, n Node) error {
	node, err := l.kube.CoreV1().Nodes().Get(ctx, n.Name, metav1.GetOptions{})
	if err != nil {
		return err
	}
	if !labels.SelectorFromSet(spec.NodeSelector).Matches(labels.Set(node.Labels)) {
		return nil
	}
	account, err := l.serviceAccount(ctx, owner, spec.ServiceAccountName, n)
	if err != nil {
		return err
	}
	for _, container := range spec.Containers {
		if l.Agent(container.Name, n.Name) != nil {
			return fmt.Errorf("two containers named %s on %s", container.Name, n.Name)
		}
		a, err := l.newAgent(ctx, owner, spec, container, n, account)
		if err != nil {
			return fmt.Errorf("container %s: %w", container.Name, err)
		}
		l.agents = append(l.agents, a)
	}
	return nil
}
