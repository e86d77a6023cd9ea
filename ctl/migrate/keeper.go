package migrate

import (
	"cmp"
	"fmt"
	"strings"
)

// Keeper names what would soon put a workload back as it was, such as an operator or Argo CD; "" if
// nothing is known to.
func Keeper(o Object) string {
	for _, owner := range o.Metadata.OwnerReferences {
		if owner.Controller {
			return fmt.Sprintf("the controller of %s %s", owner.Kind, owner.Name)
		}
	}
	labels, annotations := o.Metadata.Labels, o.Metadata.Annotations
	for _, product := range []struct{ name, found string }{
		{"Argo CD", cmp.Or(annotations["argocd.argoproj.io/tracking-id"], labels["argocd.argoproj.io/instance"])},
		{"Flux", cmp.Or(labels["kustomize.toolkit.fluxcd.io/name"], labels["helm.toolkit.fluxcd.io/name"])},
		{"Rancher", cmp.Or(annotations["objectset.rio.cattle.io/id"], labels["fleet.cattle.io/bundle-name"])},
	} {
		if product.found != "" {
			name, _, _ := strings.Cut(product.found, ":")
			return fmt.Sprintf("%s (%s)", product.name, name)
		}
	}
	if labels["addonmanager.kubernetes.io/mode"] == "Reconcile" {
		return "the add-on manager"
	}
	return ""
}

// NotReadyNodes returns the nodes that the cluster has given up on: their kubelets stop no pods.
func NotReadyNodes(objects []map[string]any) []string {
	var names []string
	for _, o := range objects {
		conditions, _ := dig(o, "status", "conditions").([]any)
		for _, c := range conditions {
			if status := dig(c, "status"); dig(c, "type") == "Ready" && (status == "False" || status == "Unknown") {
				name, _ := dig(o, "metadata", "name").(string)
				names = append(names, name)
			}
		}
	}
	return names
}

// Proxy says of a pod, or of the template of pods, whether Landfall's proxy for all Services is in it;
// why says why not.
func Proxy(spec any) (found bool, why string) {
	containers, _ := dig(spec, "containers").([]any)
	for _, c := range containers {
		command, _ := dig(c, "command").([]any)
		if len(command) == 0 || fmt.Sprint(command[0]) != "landfall-proxy" {
			continue
		}
		args, _ := dig(c, "args").([]any)
		for _, a := range args {
			if only, ok := strings.CutPrefix(fmt.Sprint(a), "--service-proxy-name="); ok && only != "" {
				return false, fmt.Sprintf("Landfall's proxy serves only Services with the label "+
					"service.kubernetes.io/service-proxy-name: %s (proxy.serviceProxyName)", only)
			}
		}
		return true, ""
	}
	return false, "Landfall is installed without its proxy (proxy.enabled)"
}
