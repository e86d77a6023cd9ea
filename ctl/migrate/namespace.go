package migrate

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// This file finds MetalLB's namespace, and its programs there. In other namespaces the labels of MetalLB's programs
// prove nothing: every tenant can give them to workloads of his own.

// MetalLBNamespace returns the namespace of MetalLB: named, or that of its objects if named is "", or that of
// its manifests if there are no objects.
func MetalLBNamespace(objects []Object, named string) (string, error) {
	if named != "" {
		return named, nil
	}
	// Some versions of MetalLB write what they report of a Service into its namespace.
	own := func(o Object) bool { return isMetalLB(o) && !strings.HasSuffix(o.Kind, "Status") }
	switch found := namespaces(objects, own); len(found) {
	case 0:
		return "metallb-system", nil
	case 1:
		return found[0], nil
	default:
		return "", fmt.Errorf("objects of MetalLB's kinds are in the namespaces %s, and MetalLB reads only those in its "+
			"own: name it with --metallb-namespace", atMostNamed(found, ", "))
	}
}

// namespaces returns the namespaces of those objects for which which is true.
func namespaces(objects []Object, which func(Object) bool) []string {
	var all []string
	for _, o := range objects {
		if which(o) {
			all = append(all, o.Metadata.Namespace)
		}
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// inNamespace leaves out MetalLB's objects in other namespaces than its own, which MetalLB does not read, and
// returns these namespaces.
func inNamespace(objects []Object, namespace string) (kept []Object, others []string) {
	foreign := func(o Object) bool {
		extras := o.Kind == "ConfigMap" && o.Metadata.Name == "bgpextras"
		return (isMetalLB(o) || extras) && o.Metadata.Namespace != namespace
	}
	return slices.DeleteFunc(slices.Clone(objects), foreign), namespaces(objects, foreign)
}

// component returns which program of MetalLB's a workload runs, by the labels of MetalLB's manifests and its chart:
// "controller", "speaker", "frr-k8s", or "" for others.
func component(o Object) string {
	name := cmp.Or(o.Metadata.Labels["app.kubernetes.io/name"], o.Metadata.Labels["app"])
	component := cmp.Or(o.Metadata.Labels["app.kubernetes.io/component"], o.Metadata.Labels["component"])
	switch {
	case o.Kind == "Deployment" && name == "metallb" && component == "controller",
		o.Kind == "DaemonSet" && name == "metallb" && component == "speaker":
		return component
	case o.Kind == "DaemonSet" && (name == "frr-k8s" || component == "frr-k8s"):
		// It has the sessions of MetalLB's mode frr-k8s, and would keep routes without the speaker.
		return "frr-k8s"
	}
	return ""
}

// findWorkloads finds MetalLB's programs in its namespace, and frr-k8s also in one that a speaker there names.
func (p *Plan) findWorkloads(objects []Object) {
	here := map[string]bool{p.namespace: true}
	for _, o := range objects {
		if o.Metadata.Namespace != p.namespace {
			continue
		}
		switch w := NewWorkload(o); component(o) {
		case "controller":
			p.Controllers = append(p.Controllers, w)
		case "speaker":
			p.Speakers = append(p.Speakers, w)
			flag, _ := w.Flag("frrk8s-namespace")
			here[cmp.Or(flag, w.env("FRRK8S_NAMESPACE"), p.namespace)] = true
		}
	}
	for _, o := range objects {
		if component(o) == "frr-k8s" && here[o.Metadata.Namespace] {
			p.Speakers = append(p.Speakers, NewWorkload(o))
		}
	}
	others := namespaces(objects, func(o Object) bool {
		found := component(o)
		return found != "" && o.Metadata.Namespace != p.namespace && (found != "frr-k8s" || !here[o.Metadata.Namespace])
	})
	elsewhere := atMostNamed(others, ", ")
	if len(p.Controllers) == 0 || len(p.Speakers) == 0 {
		text := fmt.Sprintf("MetalLB's controller (Deployment) or speaker (DaemonSet) is not found in the namespace %s by "+
			"their labels app.kubernetes.io/name or app: metallb, and component: controller or speaker", p.namespace)
		if elsewhere != "" {
			text += fmt.Sprintf("; workloads in %s have them: if MetalLB is there, give --metallb-namespace", elsewhere)
		}
		p.block("%s", text)
	} else if elsewhere != "" {
		p.note("workloads in %s have the labels of MetalLB's programs, and are left alone: MetalLB is in %s", elsewhere,
			p.namespace)
	}
}

// env returns the value of an environment variable of a container; "" if the specification does not say it.
func (w Workload) env(name string) string {
	containers, _ := w.template["containers"].([]any)
	for _, c := range containers {
		list, _ := dig(c, "env").([]any)
		for _, e := range list {
			if value, _ := dig(e, "value").(string); dig(e, "name") == name && value != "" {
				return value
			}
		}
	}
	return ""
}
