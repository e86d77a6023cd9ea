package migrate

import (
	"cmp"
	"fmt"
	"hash/fnv"
	"maps"
	"slices"
)

// NewWorkload returns a Deployment or DaemonSet, as it was before a migration.
func NewWorkload(o Object) Workload {
	o.Spec = original(o)
	template, _ := dig(o.Spec, "template", "spec").(map[string]any)
	w := Workload{Kind: o.Kind, Namespace: o.Metadata.Namespace, Name: o.Metadata.Name, Pods: map[string]string{},
		Keeper: Keeper(o), template: template}
	labels, _ := dig(o.Spec, "selector", "matchLabels").(map[string]any)
	for key, value := range labels {
		w.Pods[key] = fmt.Sprint(value)
	}
	return w
}

// LinuxNodes returns the names of the nodes that run Linux, in order.
func LinuxNodes(objects []Object) []string {
	var all []string
	for _, o := range objects {
		if o.Kind == "Node" && cmp.Or(o.Metadata.Labels["kubernetes.io/os"], "linux") == "linux" {
			all = append(all, o.Metadata.Name)
		}
	}
	slices.Sort(all)
	return all
}

// Pod is a pod to create.
type Pod struct {
	APIVersion string         `json:"apiVersion"`
	Kind       string         `json:"kind"`
	Metadata   PodMetadata    `json:"metadata"`
	Spec       map[string]any `json:"spec"`
}

// PodMetadata is the metadata of a Pod.
type PodMetadata struct {
	Namespace string            `json:"namespace"`
	Name      string            `json:"name"`
	Labels    map[string]string `json:"labels"`
}

// CleanupPod returns a pod that runs kube-proxy --cleanup once on a node, with the image and the
// volumes that kube-proxy's own pods have.
func CleanupPod(w Workload, node string) Pod {
	var image, secrets, volumes any
	mounts := []any{}
	containers, _ := w.template["containers"].([]any)
	if len(containers) > 0 {
		image = dig(containers[0], "image")
		mounts, _ = dig(containers[0], "volumeMounts").([]any)
	}
	secrets, volumes = w.template["imagePullSecrets"], w.template["volumes"]
	spec := map[string]any{
		"nodeName": node, "hostNetwork": true, "restartPolicy": "Never", "priorityClassName": "system-node-critical",
		"tolerations": []any{map[string]any{"operator": "Exists"}},
		"containers": []any{map[string]any{
			"name": "cleanup", "image": image, "command": []any{"kube-proxy", "--cleanup"},
			"securityContext": map[string]any{"privileged": true}, "volumeMounts": mounts,
		}},
		"imagePullSecrets": secrets, "volumes": volumes,
	}
	maps.DeleteFunc(spec, func(_ string, value any) bool { return value == nil })
	sum := fnv.New32a()
	_, _ = sum.Write([]byte(node)) // a node's name may be longer than a pod's, and the rest of one
	return Pod{APIVersion: "v1", Kind: "Pod", Spec: spec, Metadata: PodMetadata{Namespace: w.Namespace,
		Name:   fmt.Sprintf("landfall-kube-proxy-cleanup-%08x", sum.Sum32()),
		Labels: map[string]string{LabelFrom: FromKubeProxy}}}
}
