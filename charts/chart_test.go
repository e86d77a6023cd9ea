package charts

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	yamlutil "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/yaml"
)

const kubeVersion = "1.35.4" // helm built from its module thinks of a very old one

// clusterCIDR is the one value that has no default.
const clusterCIDR = `proxy.clusterCIDR="192.168.0.0/16"`

// helm is the program in LANDFALL_HELM, or the one that the lab builds from the pinned module.
var helm = sync.OnceValues(func() (string, error) {
	if path := os.Getenv("LANDFALL_HELM"); path != "" {
		return path, nil
	}
	cmd := exec.Command("go", "run", "./e2e/cmd/landfall-lab", "tool", "helm")
	cmd.Dir = ".."
	out, err := cmd.Output()
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		return "", errors.New(string(exit.Stderr))
	}
	return strings.TrimSpace(string(out)), err
})

// run calls helm and returns what it prints.
func run(t *testing.T, args ...string) (string, error) {
	t.Helper()
	path, err := helm()
	if err != nil {
		t.Fatalf("no helm: %v", err)
	}
	cmd := exec.CommandContext(t.Context(), path, args...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return "", errors.New(stderr.String() + stdout.String())
	}
	return stdout.String(), nil
}

func template(t *testing.T, set ...string) (string, error) {
	t.Helper()
	args := []string{"template", "landfall", "landfall", "--namespace", "landfall-system", "--kube-version", kubeVersion,
		"--set-json", clusterCIDR}
	for _, s := range set {
		args = append(args, "--set-json", s)
	}
	return run(t, args...)
}

// rendered has each object by kind and name.
type rendered map[string]json.RawMessage

func render(t *testing.T, set ...string) rendered {
	t.Helper()
	text, err := template(t, set...)
	if err != nil {
		t.Fatalf("%v: %v", set, err)
	}
	return decode(t, text)
}

func decode(t *testing.T, text string) rendered {
	t.Helper()
	objects := rendered{}
	decoder := yamlutil.NewYAMLOrJSONDecoder(strings.NewReader(text), 4096)
	for {
		var raw json.RawMessage
		if err := decoder.Decode(&raw); errors.Is(err, io.EOF) {
			return objects
		} else if err != nil {
			t.Fatal(err)
		}
		var meta struct {
			Kind     string
			Metadata struct{ Name string }
		}
		if err := json.Unmarshal(raw, &meta); err != nil || meta.Kind == "" {
			continue
		}
		id := meta.Kind + " " + meta.Metadata.Name
		if _, ok := objects[id]; ok {
			t.Errorf("%s is rendered twice", id)
		}
		objects[id] = raw
	}
}

// as decodes an object, refusing fields that its kind does not have.
func as[T any](t *testing.T, objects rendered, id string) T {
	t.Helper()
	var object T
	raw, ok := objects[id]
	if !ok {
		t.Fatalf("no %s among %v", id, ids(objects))
	}
	if err := yaml.UnmarshalStrict(raw, &object); err != nil {
		t.Fatalf("%s: %v", id, err)
	}
	return object
}

func ids(objects rendered) []string {
	var all []string
	for id := range objects {
		all = append(all, id)
	}
	slices.Sort(all)
	return all
}

func container(t *testing.T, pod corev1.PodSpec, name string) corev1.Container {
	t.Helper()
	i := slices.IndexFunc(pod.Containers, func(c corev1.Container) bool { return c.Name == name })
	if i < 0 {
		t.Fatalf("no container %s", name)
	}
	return pod.Containers[i]
}

func TestLint(t *testing.T) {
	t.Parallel()
	if out, err := run(t, "lint", "--strict", "--set-json", clusterCIDR, "landfall"); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

func TestDefaults(t *testing.T) {
	t.Parallel()
	objects := render(t)
	var others []string
	for _, id := range ids(objects) {
		if !strings.HasPrefix(id, "CustomResourceDefinition ") {
			others = append(others, id)
		}
	}
	want := []string{
		"ClusterRole landfall-cleanup", "ClusterRole landfall-controller", "ClusterRole landfall-metrics-auth",
		"ClusterRole landfall-metrics-reader", "ClusterRole landfall-operator", "ClusterRole landfall-proxy",
		"ClusterRole landfall-speaker", "ClusterRole landfall-test", "ClusterRole landfall-view", "ClusterRole landfall-view-peers",
		"ClusterRoleBinding landfall-cleanup", "ClusterRoleBinding landfall-controller",
		"ClusterRoleBinding landfall-metrics-auth", "ClusterRoleBinding landfall-proxy",
		"ClusterRoleBinding landfall-speaker", "ClusterRoleBinding landfall-test", "DaemonSet landfall-node",
		"Deployment landfall-controller", "Job landfall-cleanup", "Pod landfall-test",
		"PodDisruptionBudget landfall-controller",
		"Role landfall-cleanup", "Role landfall-controller", "Role landfall-operator", "Role landfall-proxy",
		"Role landfall-speaker",
		"Role landfall-test", "RoleBinding landfall-cleanup", "RoleBinding landfall-controller",
		"RoleBinding landfall-proxy", "RoleBinding landfall-speaker", "RoleBinding landfall-test",
		"Secret landfall-gossip", "ServiceAccount landfall-cleanup", "ServiceAccount landfall-controller",
		"ServiceAccount landfall-node", "ServiceAccount landfall-test",
		"ValidatingAdmissionPolicy landfall-node-events",
		"ValidatingAdmissionPolicy landfall-node-gateways", "ValidatingAdmissionPolicy landfall-node-leases",
		"ValidatingAdmissionPolicy landfall-node-peers",
		"ValidatingAdmissionPolicy landfall-node-services",
		"ValidatingAdmissionPolicy landfall-service-conditions",
		"ValidatingAdmissionPolicyBinding landfall-node-events",
		"ValidatingAdmissionPolicyBinding landfall-node-gateways",
		"ValidatingAdmissionPolicyBinding landfall-node-leases",
		"ValidatingAdmissionPolicyBinding landfall-node-peers",
		"ValidatingAdmissionPolicyBinding landfall-node-services",
		"ValidatingAdmissionPolicyBinding landfall-service-conditions",
	}
	if diff := cmp.Diff(want, others); diff != "" {
		t.Errorf("objects (-want +got):\n%s", diff)
	}
}

// TestDefinitionsAreUpgradedAndKept checks that every definition that is generated is rendered, so
// that upgrades bring new schemas, and that none goes with the release.
func TestDefinitionsAreUpgradedAndKept(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("landfall/charts/crds/templates/landfall.dev_*.yaml")
	if err != nil || len(files) < 2 {
		t.Fatalf("definitions: %v, %v", files, err)
	}
	objects := render(t)
	for _, file := range files {
		plural := strings.TrimSuffix(strings.TrimPrefix(filepath.Base(file), "landfall.dev_"), ".yaml")
		var crd struct {
			Metadata struct{ Annotations map[string]string }
		}
		if err := json.Unmarshal(objects["CustomResourceDefinition "+plural+".landfall.dev"], &crd); err != nil {
			t.Errorf("%s: %v", plural, err)
		}
		if crd.Metadata.Annotations["helm.sh/resource-policy"] != "keep" {
			t.Errorf("%s would be deleted with the release, and all objects with it", plural)
		}
	}
	for _, id := range ids(render(t, "crds.enabled=false")) {
		if strings.HasPrefix(id, "CustomResourceDefinition ") {
			t.Errorf("crds.enabled=false renders %s", id)
		}
	}
}

// TestPrivileges pins what the pods may do to their nodes.
func TestPrivileges(t *testing.T) {
	t.Parallel()
	objects := render(t)
	node := as[appsv1.DaemonSet](t, objects, "DaemonSet landfall-node").Spec.Template.Spec
	controller := as[appsv1.Deployment](t, objects, "Deployment landfall-controller").Spec.Template.Spec
	if !node.HostNetwork || controller.HostNetwork {
		t.Errorf("host network: node %v, controller %v", node.HostNetwork, controller.HostNetwork)
	}
	if sc := controller.SecurityContext; sc.RunAsNonRoot == nil || !*sc.RunAsNonRoot {
		t.Error("the controller may run as root")
	}
	for name, want := range map[string][]corev1.Capability{"controller": nil,
		"speaker": {"IPC_LOCK", "NET_ADMIN", "NET_RAW", "SYS_NICE"}, "proxy": {"NET_ADMIN", "NET_RAW"}} {
		pod := node
		if name == "controller" {
			pod = controller
		}
		if pod.SecurityContext.SeccompProfile.Type != corev1.SeccompProfileTypeRuntimeDefault {
			t.Errorf("%s: seccomp profile %v", name, pod.SecurityContext.SeccompProfile)
		}
		sc := container(t, pod, name).SecurityContext
		if sc.Privileged != nil || *sc.AllowPrivilegeEscalation || !*sc.ReadOnlyRootFilesystem ||
			!slices.Equal(sc.Capabilities.Drop, []corev1.Capability{"ALL"}) {
			t.Errorf("%s: %+v", name, sc)
		}
		if diff := cmp.Diff(want, sc.Capabilities.Add); diff != "" {
			t.Errorf("%s: capabilities (-want +got):\n%s", name, diff)
		}
	}
	for listen, want := range map[string][]corev1.Capability{
		":179":      {"IPC_LOCK", "NET_ADMIN", "NET_BIND_SERVICE", "NET_RAW", "SYS_NICE"},
		"[::]:1179": {"IPC_LOCK", "NET_ADMIN", "NET_RAW", "SYS_NICE"},
	} {
		pod := as[appsv1.DaemonSet](t, render(t, "speaker.bgpListen=\""+listen+"\""),
			"DaemonSet landfall-node").Spec.Template.Spec
		if diff := cmp.Diff(want, container(t, pod, "speaker").SecurityContext.Capabilities.Add); diff != "" {
			t.Errorf("bgpListen %s: capabilities (-want +got):\n%s", listen, diff)
		}
	}
	for _, tt := range []struct {
		set  []string
		want []string
	}{
		{nil, []string{"/run/xtables.lock", "/proc/sys/net"}},
		{[]string{"proxy.setKernelParameters=false"}, []string{"/run/xtables.lock"}},
	} {
		var paths []string
		pod := as[appsv1.DaemonSet](t, render(t, tt.set...), "DaemonSet landfall-node").Spec.Template.Spec
		for _, v := range pod.Volumes {
			if v.HostPath != nil {
				paths = append(paths, v.HostPath.Path)
			}
		}
		if diff := cmp.Diff(tt.want, paths); diff != "" {
			t.Errorf("%v: what the node pod mounts of the host (-want +got):\n%s", tt.set, diff)
		}
		for _, m := range container(t, pod, "speaker").VolumeMounts {
			if m.Name == "proc-sys-net" {
				t.Error("the speaker can set kernel parameters")
			}
		}
	}
}

// TestRights pins what each program may do to the cluster; "resource:verbs".
func TestRights(t *testing.T) {
	t.Parallel()
	objects := render(t)
	for role, want := range map[string][]string{
		"metrics-auth": {"subjectaccessreviews:create", "tokenreviews:create"},
		"controller": {"bgppeers/status:update", "bgppeers:get,list,watch", "events:create,patch",
			"ipaddresspools/status:update", "ipaddresspools:get,list,watch", "namespaces:list,watch", "nodes:list,watch",
			"services/status:patch", "services:list,watch"},
		"proxy": {"bgppeers:list,watch", "endpointslices:list,watch", "events:create,patch", "ipaddresspools:list,watch",
			"nodes:list,watch", "servicecidrs:list,watch", "services/status:patch", "services:list,watch"},
	} {
		if diff := cmp.Diff(
			want, rights(as[rbacv1.ClusterRole](t, objects, "ClusterRole landfall-"+role).Rules)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", role, diff)
		}
	}
	speaker := rights(as[rbacv1.ClusterRole](t, objects, "ClusterRole landfall-speaker").Rules)
	for _, right := range speaker {
		resource, verbs, _ := strings.Cut(right, ":")
		if !strings.HasSuffix(verbs, "list,watch") && !strings.HasSuffix(resource, "/status") && resource != "events" ||
			strings.Contains(resource, "secrets") {
			t.Errorf("the speaker may do this in the whole cluster: %s", right)
		}
	}
	for _, right := range []string{
		"bgppeers:list,watch", "bgppeers/status:patch", "bgpadvertisements:get,list,watch",
		"bgpadvertisements/status:update",
		"bfdprofiles:list,watch", "communities:list,watch",
	} {
		if !slices.Contains(speaker, right) {
			t.Errorf("the speaker may not do %s: %v", right, speaker)
		}
	}
	view := rights(as[rbacv1.ClusterRole](t, objects, "ClusterRole landfall-view").Rules)
	if diff := cmp.Diff([]string{"bfdprofiles:get,list,watch", "bgpadvertisements:get,list,watch",
		"communities:get,list,watch", "ipaddresspools:get,list,watch", "l2advertisements:get,list,watch"}, view); diff != "" {
		t.Errorf("the role view reads BGP passwords with BGPPeers (-want +got):\n%s", diff)
	}
	operator := rights(as[rbacv1.ClusterRole](t, objects, "ClusterRole landfall-operator").Rules)
	if slices.ContainsFunc(operator, func(right string) bool { return strings.Contains(right, "exec") }) {
		t.Errorf("users of landfallctl may run commands in all pods: %v", operator)
	}
	if diff := cmp.Diff([]string{"configmaps:list", "daemonsets:list", "deployments:list", "leases:get,list",
		"pods/exec:create,get", "pods/log:get"}, rights(as[rbacv1.Role](t, objects, "Role landfall-operator").Rules)); diff != "" {
		t.Errorf("users of landfallctl in Landfall's namespace (-want +got):\n%s", diff)
	}
	bound := render(t, `rbac.operators=[{"kind":"Group","name":"sre"}]`)
	for _, subjects := range [][]rbacv1.Subject{
		as[rbacv1.ClusterRoleBinding](t, bound, "ClusterRoleBinding landfall-operator").Subjects,
		as[rbacv1.RoleBinding](t, bound, "RoleBinding landfall-operator").Subjects,
	} {
		if len(subjects) != 1 || subjects[0].Kind != "Group" || subjects[0].Name != "sre" {
			t.Errorf("rbac.operators: bound to %v", subjects)
		}
	}
	own := as[rbacv1.Role](t, objects, "Role landfall-speaker").Rules
	if diff := cmp.Diff([]string{"configmaps:create", "configmaps:list,watch,patch", "daemonsets:list,watch",
		"leases:create", "leases:get,update"}, rights(own)); diff != "" {
		t.Errorf("the speaker in its namespace (-want +got):\n%s", diff)
	}
	for _, rule := range own {
		if rule.Resources[0] == "daemonsets" && !slices.Equal(rule.ResourceNames, []string{"landfall-node"}) {
			t.Errorf("the speaker may watch the DaemonSets %v", rule.ResourceNames)
		}
	}
	proxy := as[rbacv1.Role](t, objects, "Role landfall-proxy").Rules
	if diff := cmp.Diff([]rbacv1.PolicyRule{{APIGroups: []string{"apps"}, Resources: []string{"daemonsets"},
		ResourceNames: []string{"landfall-node", "landfall-proxy"}, Verbs: []string{"get", "list", "watch"}}}, proxy); diff != "" {
		t.Errorf("the proxy in its namespace (-want +got):\n%s", diff)
	}
	passwords := as[rbacv1.Role](t, render(t, `speaker.bgpSecrets=["tor","far","tor"]`), "Role landfall-speaker").Rules
	if i := slices.IndexFunc(passwords, func(r rbacv1.PolicyRule) bool { return r.Resources[0] == "secrets" }); i < 0 ||
		!slices.Equal(passwords[i].ResourceNames, []string{"far", "tor"}) ||
		!slices.Equal(passwords[i].Verbs, []string{"list", "watch"}) {
		t.Errorf("the speaker reads other Secrets than those of speaker.bgpSecrets: %+v", passwords)
	}
	// What a role allows follows the values alone: only the gossip key, and among the helpers what
	// flags say of the cluster, are taken from there.
	files, err := filepath.Glob("landfall/templates/*")
	if err != nil || len(files) == 0 {
		t.Fatalf("the templates: %v, %v", files, err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(string(text), "lookup ") && filepath.Base(file) != "gossip-key.yaml" &&
			filepath.Base(file) != "_helpers.tpl" {
			t.Errorf("%s depends on what is in the cluster", file)
		}
	}
	lease := rights(as[rbacv1.Role](t, objects, "Role landfall-controller").Rules)
	if diff := cmp.Diff([]string{"configmaps:list,watch,patch", "leases:create", "leases:get,update"}, lease); diff != "" {
		t.Errorf("the controller in its namespace (-want +got):\n%s", diff)
	}
}

// TestCleanupHook runs after the release is deleted, with an account of its own that goes with it.
func TestCleanupHook(t *testing.T) {
	t.Parallel()
	objects := render(t, `loadBalancerClass="example.com/x"`, "cleanup.clearAddresses=true",
		`kubernetesServiceHost="10.0.0.1"`, `apiServers=["192.0.2.1:6443"]`, `nameOverride="lf"`,
		`fullnameOverride="landfall"`)
	for _, kind := range []string{"ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding", "Job"} {
		meta := as[struct {
			metav1.TypeMeta
			metav1.ObjectMeta `json:"metadata"`
			Spec, Rules       any
			RoleRef, Subjects any
		}](t, objects, kind+" landfall-cleanup")
		if meta.Annotations["helm.sh/hook"] != "post-delete" ||
			meta.Annotations["helm.sh/hook-delete-policy"] != "before-hook-creation,hook-succeeded" {
			t.Errorf("%s: annotations %v", kind, meta.Annotations)
		}
	}
	role := as[rbacv1.ClusterRole](t, objects, "ClusterRole landfall-cleanup")
	if diff := cmp.Diff([]string{"services/status:patch", "services:list"}, rights(role.Rules)); diff != "" {
		t.Errorf("rights (-want +got):\n%s", diff)
	}
	own := as[rbacv1.Role](t, objects, "Role landfall-cleanup").Rules
	if diff := cmp.Diff([]string{"configmaps:delete", "leases:get,delete", "pods:list"}, rights(own)); diff != "" {
		t.Errorf("rights in the namespace (-want +got):\n%s", diff)
	}
	for _, rule := range own {
		if names := rule.ResourceNames; rule.Resources[0] != "pods" &&
			!slices.Equal(names, []string{"landfall-controller", "landfall-speaker"}) &&
			!slices.Equal(names, []string{"landfall-surroundings"}) {
			t.Errorf("it may delete %v %v", rule.Resources, names)
		}
	}
	job := as[batchv1.Job](t, objects, "Job landfall-cleanup").Spec
	c := container(t, job.Template.Spec, "cleanup")
	selector := "app.kubernetes.io/name=lf,app.kubernetes.io/instance=landfall," +
		"app.kubernetes.io/component in (controller,node,proxy,relay,speaker)"
	if want := []string{"cleanup", "--log-level=info", "--log-format=text", "--api-servers=192.0.2.1:6443",
		"--namespace=landfall-system",
		"--pod-selector=" + selector, "--load-balancer-class=example.com/x",
		"--clear-addresses=true"}; !slices.Equal(c.Args, want) || c.Command[0] != "landfall-controller" {
		t.Errorf("%v %v, want %v", c.Command, c.Args, want)
	}
	if len(c.Env) != 2 || job.ActiveDeadlineSeconds == nil || *job.ActiveDeadlineSeconds >= 300 ||
		job.Template.Spec.ServiceAccountName != "landfall-cleanup" || !*job.Template.Spec.SecurityContext.RunAsNonRoot {
		t.Errorf("the Job: %+v", job)
	}
}

// TestTestHook runs landfallctl verify in a pod to which the Service that it creates leads. Its account
// may create Services in its namespace, and read and delete that one.
func TestTestHook(t *testing.T) {
	t.Parallel()
	objects := render(t, `loadBalancerClass="example.com/x"`, `nameOverride="lf"`, `fullnameOverride="landfall"`,
		"test.port=9090")
	for _, kind := range []string{"ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding", "Pod"} {
		meta := as[struct {
			metav1.TypeMeta
			metav1.ObjectMeta `json:"metadata"`
			Spec, Rules       any
			RoleRef, Subjects any
		}](t, objects, kind+" landfall-test")
		if meta.Annotations["helm.sh/hook"] != "test" ||
			meta.Annotations["helm.sh/hook-delete-policy"] != "before-hook-creation,hook-succeeded" {
			t.Errorf("%s: annotations %v", kind, meta.Annotations)
		}
	}
	role := as[rbacv1.ClusterRole](t, objects, "ClusterRole landfall-test")
	if diff := cmp.Diff([]string{"bgpadvertisements:list", "ipaddresspools:list", "l2advertisements:list"},
		rights(role.Rules)); diff != "" {
		t.Errorf("rights (-want +got):\n%s", diff)
	}
	own := as[rbacv1.Role](t, objects, "Role landfall-test").Rules
	if diff := cmp.Diff([]string{"daemonsets:list", "deployments:list", "services:create", "services:get,delete"},
		rights(own)); diff != "" {
		t.Errorf("rights in the namespace (-want +got):\n%s", diff)
	}
	for _, rule := range own {
		if slices.Contains(rule.Verbs, "delete") && !slices.Equal(rule.ResourceNames, []string{"landfall-test"}) {
			t.Errorf("it may delete %v %v", rule.Resources, rule.ResourceNames)
		}
	}
	pod := as[corev1.Pod](t, objects, "Pod landfall-test")
	const labels = "app.kubernetes.io/name=lf,app.kubernetes.io/instance=landfall"
	c := container(t, pod.Spec, "test")
	if want := []string{"verify", "--landfall-namespace=landfall-system", "--landfall-selector=" + labels,
		"--load-balancer-class=example.com/x", "--pod-labels=" + labels + ",app.kubernetes.io/component=test",
		"--port=9090"}; !slices.Equal(c.Args, want) || c.Command[0] != "landfallctl" {
		t.Errorf("%v %v, want %v", c.Command, c.Args, want)
	}
	for pair := range strings.SplitSeq(labels+",app.kubernetes.io/component=test", ",") {
		if name, value, _ := strings.Cut(pair, "="); pod.Labels[name] != value {
			t.Errorf("the pod has no label %s", pair)
		}
	}
	if pod.Spec.RestartPolicy != corev1.RestartPolicyNever || pod.Spec.ServiceAccountName != "landfall-test" ||
		*pod.Spec.ActiveDeadlineSeconds >= 300 {
		t.Errorf("the pod: %+v", pod.Spec)
	}
}

// TestRestricted has the pods that need nothing of their node as Pod Security's level restricted
// demands.
func TestRestricted(t *testing.T) {
	t.Parallel()
	objects := render(t)
	for name, spec := range map[string]corev1.PodSpec{
		"controller": as[appsv1.Deployment](t, objects, "Deployment landfall-controller").Spec.Template.Spec,
		"cleanup":    as[batchv1.Job](t, objects, "Job landfall-cleanup").Spec.Template.Spec,
		"test":       as[corev1.Pod](t, objects, "Pod landfall-test").Spec,
	} {
		of, c := spec.SecurityContext, container(t, spec, name).SecurityContext
		if of == nil || of.RunAsNonRoot == nil || !*of.RunAsNonRoot || of.SeccompProfile == nil ||
			of.SeccompProfile.Type != corev1.SeccompProfileTypeRuntimeDefault || c.AllowPrivilegeEscalation == nil ||
			*c.AllowPrivilegeEscalation || len(c.Capabilities.Add) > 0 || !slices.Equal(c.Capabilities.Drop,
			[]corev1.Capability{"ALL"}) || spec.HostNetwork || len(spec.Volumes) > 0 && name == "test" {
			t.Errorf("%s is not restricted: %+v, %+v", name, of, c)
		}
	}
}

// TestCleanupWaitsForAllPods checks that the Job selects the pods of all programs, and not its own.
func TestCleanupWaitsForAllPods(t *testing.T) {
	t.Parallel()
	for _, separate := range []string{"true", "false"} {
		objects := render(t, "node.separatePods="+separate)
		var selector labels.Selector
		for _, arg := range container(t, as[batchv1.Job](t, objects, "Job landfall-cleanup").Spec.Template.Spec, "cleanup").Args {
			if text, ok := strings.CutPrefix(arg, "--pod-selector="); ok {
				var err error
				if selector, err = labels.Parse(text); err != nil {
					t.Fatal(err)
				}
			}
		}
		for _, id := range ids(objects) {
			kind, _, _ := strings.Cut(id, " ")
			var got labels.Set
			switch kind {
			case "DaemonSet":
				got = as[appsv1.DaemonSet](t, objects, id).Spec.Template.Labels
			case "Deployment":
				got = as[appsv1.Deployment](t, objects, id).Spec.Template.Labels
			case "Job":
				got = as[batchv1.Job](t, objects, id).Spec.Template.Labels
			default:
				continue
			}
			if selector.Matches(got) != (kind != "Job") {
				t.Errorf("separatePods=%s: the Job waits for the pods of %s: %v", separate, id, selector.Matches(got))
			}
		}
	}
}

func rights(rules []rbacv1.PolicyRule) []string {
	var all []string
	for _, rule := range rules {
		for _, resource := range rule.Resources {
			all = append(all, resource+":"+strings.Join(rule.Verbs, ","))
		}
	}
	slices.Sort(all)
	return all
}

// TestValuesReachThePrograms sets values and looks for the arguments that they are to become.
func TestValuesReachThePrograms(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		set     []string
		program string
		want    []string
		absent  []string
	}{
		{nil, "proxy", []string{"--mode=auto", "--feed-socket=/run/landfall/feed.sock", "--detect-local-mode=ClusterCIDR"},
			[]string{"--nodeport-addresses", "--pod-bridge-interface"}},
		{nil, "speaker", []string{"--gate=proxy", "--feed-socket=/run/landfall/feed.sock",
			"--gossip-key-file=/run/secrets/landfall/gossip/key", "--on-address-conflict=refuse"},
			[]string{"--exclude-interfaces"}},
		{[]string{`speaker.excludeInterfaces=["veth*","eno9"]`, `speaker.onAddressConflict="announce"`}, "speaker",
			[]string{"--exclude-interfaces=veth*,eno9", "--on-address-conflict=announce", "--probe-ahead-rate=5"}, nil},
		{[]string{"speaker.probeAheadRate=0.5"}, "speaker", []string{"--probe-ahead-rate=0.5", "--bfd-neighbors=2"}, nil},
		{[]string{"speaker.bfdNeighbors=0"}, "speaker", []string{"--bfd-neighbors=0"}, nil},
		{[]string{"speaker.excludeInterfaces=[]"}, "speaker", []string{"--exclude-interfaces="}, nil},
		{nil, "controller", []string{"--leader-elect=true", "--namespace=landfall-system", "--load-balancer-class="}, nil},
		{[]string{`loadBalancerClass="example.com/x"`}, "controller", []string{"--load-balancer-class=example.com/x"}, nil},
		{[]string{`loadBalancerClass="example.com/x"`}, "speaker", []string{"--load-balancer-class=example.com/x"}, nil},
		{[]string{`logLevel="warn"`, `proxy.logLevel="debug"`}, "proxy", []string{"--log-level=debug"}, nil},
		{[]string{`logFormat="json"`}, "speaker", []string{"--log-format=json"}, nil},
		{[]string{`logFormat="json"`}, "controller", []string{"--log-format=json"}, nil},
		{[]string{`logLevel="warn"`, `proxy.logLevel="debug"`}, "speaker", []string{"--log-level=warn"}, nil},
		{[]string{"proxy.enabled=false"}, "speaker", []string{"--gate=none"}, nil},
		{nil, "proxy", []string{"--namespace=landfall-system", "--daemonsets=landfall-node,landfall-proxy"}, nil},
		{[]string{"cleanup.enabled=false"}, "proxy", nil, []string{"--daemonsets"}},
		{nil, "speaker", []string{"--namespace=landfall-system", "--daemonset=landfall-node", "--bgp-convergence=3s"}, nil},
		{[]string{`speaker.bgpConvergence="10s"`}, "speaker", []string{"--bgp-convergence=10s"}, []string{"--bgp-listen"}},
		{[]string{"speaker.ignoreExcludeLB=true"}, "speaker", []string{"--ignore-exclude-lb=true"}, nil},
		{[]string{`speaker.bindAddress="$(NODE_IP)"`}, "speaker", []string{"--bind-address=$(NODE_IP)"}, nil},
		{[]string{`speaker.bgpListen="10.0.0.1:179"`}, "speaker", []string{"--bgp-listen=10.0.0.1:179"}, nil},
		{[]string{`speaker.gate="none"`, "speaker.gossip.encrypt=false"}, "speaker", []string{"--gate=none"},
			[]string{"--gossip-key-file"}},
		{[]string{`proxy.nodePortAddresses=["10.0.0.0/8","primary"]`, "proxy.masqueradeAll=true",
			`proxy.clusterCIDR="10.0.0.0/8,fd00::/48"`}, "proxy",
			[]string{"--nodeport-addresses=10.0.0.0/8,primary", "--masquerade-all=true", "--cluster-cidr=10.0.0.0/8,fd00::/48"},
			nil},
		{nil, "proxy", nil, []string{"--service-cidr"}},
		{[]string{`proxy.serviceCIDR="10.43.0.0/16,fd00:43::/112"`}, "proxy",
			[]string{"--service-cidr=10.43.0.0/16,fd00:43::/112"}, nil},
		{nil, "proxy", []string{"--rescue=true", "--rescue-ring=true", "--rescue-limit=20000"}, nil},
		{[]string{`proxy.serviceCounters="external"`}, "proxy", []string{"--service-counters=external"}, nil},
		{[]string{"proxy.rescueLimit=100000"}, "proxy", []string{"--rescue-limit=100000"}, nil},
		{nil, "proxy", []string{"--rescue-tunnel-port=7948"}, nil},
		{[]string{"proxy.namespaceLimit=0"}, "proxy", []string{"--namespace-limit=0"}, nil},
		{[]string{"proxy.rescueTunnelPort=0"}, "proxy", []string{"--rescue-tunnel-port=0"}, nil},
		{nil, "proxy", nil, []string{"--relay"}},
		{[]string{"relay.enabled=true"}, "proxy", []string{"--relay=true", "--relay-udp=true",
			"--relay-udp-rate=1000", "--relay-socket=/run/landfall/relay.sock"}, nil},
		{[]string{"relay.enabled=true", "relay.udp=false"}, "proxy", []string{"--relay-udp=false"}, nil},
		{[]string{"relay.enabled=true", "relay.udpRate=0"}, "proxy", []string{"--relay-udp-rate=0"}, nil},
		{[]string{"relay.enabled=true"}, "relay", []string{"--udp=true"}, nil},
		{[]string{"relay.enabled=true", "relay.udp=false"}, "relay", []string{"--udp=false"}, nil},
		{[]string{"relay.enabled=true", `relay.tryAfter="1s"`, "relay.accessLog=true"}, "relay", []string{"--port=7484",
			"--relay-socket=/run/landfall/relay.sock", "--metrics-bind-address=node:7483", "--try-after=1s", "--tries=3",
			"--access-log=true", "--connections=10000", "--client-connections=1000", "--udp-flows=10000",
			"--service-udp-flows=5000", "--client-udp-flows=1000", "--udp-idle-timeout=100s"}, nil},
		{[]string{"proxy.rescueRing=false"}, "proxy", []string{"--rescue=true", "--rescue-ring=false"}, nil},
		{nil, "proxy", []string{"--scheduler=random", "--conntrack-tcp-be-liberal=false", "--proc-sys-net=/run/proc-sys-net"},
			nil},
		{[]string{`proxy.scheduler="nq"`}, "proxy", []string{"--scheduler=nq"}, nil},
		{[]string{`proxy.scheduler="maglev"`, "proxy.conntrackTCPBeLiberal=true", "proxy.setKernelParameters=false"}, "proxy",
			[]string{"--scheduler=maglev", "--conntrack-tcp-be-liberal=true"}, []string{"--proc-sys-net"}},
		{[]string{"proxy.setIPForward=true"}, "proxy", []string{"--set-ip-forward=true"}, nil},
		{nil, "proxy", []string{"--flow-offload=false"}, nil},
		{[]string{"proxy.flowOffload=true"}, "proxy", []string{"--flow-offload=true"}, nil},
		{[]string{"proxy.acceptForwarded=true"}, "proxy", []string{"--accept-forwarded=true"}, nil},
		{nil, "proxy", []string{"--path-check=strict", "--probe-interval=100ms"}, nil},
		{[]string{`proxy.probeInterval="0s"`}, "proxy", []string{"--probe-interval=0s"}, nil},
		{[]string{`proxy.pathCheck="off"`}, "proxy", []string{"--path-check=off"}, nil},
		{[]string{`proxy.pathCheck="off"`}, "speaker", []string{"--check-forwarding=false"}, nil},
		{[]string{"speaker.requireReady=true", "speaker.ignoreNetworkUnavailable=true"}, "speaker",
			[]string{"--require-ready=true", "--ignore-network-unavailable=true", "--check-forwarding=true"}, nil},
		{[]string{`proxy.extraArgs=["--x=y"]`, "proxy.metricsPort=9000"}, "proxy",
			[]string{"--x=y", "--metrics-bind-address=node:9000"}, nil},
		{nil, "speaker", []string{"--metrics-bind-address=node:7481", "--metrics-secure=true"},
			[]string{"--metrics-cert-file", "--metrics-key-file"}},
		{nil, "controller", []string{"--metrics-bind-address=:7480", "--metrics-secure=true"}, nil},
		{[]string{`metrics.listen="localhost"`, "metrics.secure=false"}, "proxy",
			[]string{"--metrics-bind-address=localhost:7482", "--metrics-secure=false"}, nil},
		{[]string{`metrics.listen="localhost"`, `metrics.certSecret="tls"`}, "controller",
			[]string{"--metrics-bind-address=:7480", "--metrics-cert-file=/run/secrets/landfall/metrics/tls.crt",
				"--metrics-key-file=/run/secrets/landfall/metrics/tls.key"}, nil},
		{[]string{`metrics.listen="all"`}, "speaker", []string{"--metrics-bind-address=:7481"}, nil},
	} {
		objects := render(t, test.set...)
		pod := as[appsv1.DaemonSet](t, objects, "DaemonSet landfall-node").Spec.Template.Spec
		if test.program == "controller" {
			pod = as[appsv1.Deployment](t, objects, "Deployment landfall-controller").Spec.Template.Spec
		}
		args := container(t, pod, test.program).Args
		for _, want := range test.want {
			if !slices.Contains(args, want) {
				t.Errorf("%v: the %s is not started with %s: %v", test.set, test.program, want, args)
			}
		}
		for _, absent := range test.absent {
			if slices.ContainsFunc(args, func(arg string) bool { return strings.HasPrefix(arg, absent) }) {
				t.Errorf("%v: the %s is started with %s", test.set, test.program, absent)
			}
		}
	}
}

// TestAPIServerAddress must reach all pods, as the address of default/kubernetes works only once a
// proxy runs.
func TestAPIServerAddress(t *testing.T) {
	t.Parallel()
	objects := render(t, `kubernetesServiceHost="10.0.0.1"`, "kubernetesServicePort=443",
		`apiServers=["10.0.0.3:6443","[2001:db8::2]:6443","10.0.0.2:6443","10.0.0.3:6443"]`)
	node := as[appsv1.DaemonSet](t, objects, "DaemonSet landfall-node").Spec.Template.Spec
	controller := as[appsv1.Deployment](t, objects, "Deployment landfall-controller").Spec.Template.Spec
	for _, c := range slices.Concat(node.Containers, controller.Containers) {
		if !slices.Contains(c.Args, "--api-servers=10.0.0.3:6443,[2001:db8::2]:6443,10.0.0.2:6443") {
			t.Errorf("%s: no other API servers: %v", c.Name, c.Args)
		}
		for _, want := range []corev1.EnvVar{{Name: "KUBERNETES_SERVICE_HOST", Value: "10.0.0.1"},
			{Name: "KUBERNETES_SERVICE_PORT", Value: "443"}} {
			if !slices.Contains(c.Env, want) {
				t.Errorf("%s: no %v", c.Name, want)
			}
		}
	}
}

func TestOptionalParts(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		set             []string
		present, absent []string
	}{
		{[]string{"controller.replicas=1"}, nil, []string{"PodDisruptionBudget landfall-controller"}},
		{[]string{"speaker.enabled=false"}, []string{"DaemonSet landfall-node"},
			[]string{"ClusterRole landfall-speaker", "Secret landfall-gossip"}},
		{[]string{"proxy.enabled=false"}, []string{"DaemonSet landfall-node"}, []string{"ClusterRole landfall-proxy"}},
		{[]string{"proxy.enabled=false", "speaker.enabled=false"}, []string{"Deployment landfall-controller"},
			[]string{"DaemonSet landfall-node", "ServiceAccount landfall-node"}},
		{nil, []string{"Job landfall-cleanup", "ClusterRole landfall-cleanup"}, nil},
		{[]string{"cleanup.enabled=false"}, nil, []string{"Job landfall-cleanup", "ClusterRole landfall-cleanup",
			"Role landfall-cleanup", "RoleBinding landfall-cleanup", "Role landfall-proxy", "RoleBinding landfall-proxy",
			"ServiceAccount landfall-cleanup", "ClusterRoleBinding landfall-cleanup"}},
		{[]string{"test.enabled=false"}, nil, []string{"Pod landfall-test", "ServiceAccount landfall-test",
			"ClusterRole landfall-test", "ClusterRoleBinding landfall-test", "Role landfall-test",
			"RoleBinding landfall-test"}},
		{[]string{"rbac.create=false"}, nil, []string{"Pod landfall-test", "Job landfall-cleanup", "ServiceAccount landfall-node",
			"ClusterRole landfall-view",
			"Role landfall-controller"}},
		{[]string{"speaker.enabled=false"}, []string{"ValidatingAdmissionPolicy landfall-node-events",
			"ValidatingAdmissionPolicy landfall-node-services"}, []string{"ValidatingAdmissionPolicy landfall-node-peers"}},
		{[]string{"nodePolicies.enabled=false"}, nil, []string{"ValidatingAdmissionPolicy landfall-node-services",
			"ValidatingAdmissionPolicy landfall-node-events",
			"ValidatingAdmissionPolicyBinding landfall-node-services"}},
		{nil, []string{"ValidatingAdmissionPolicy landfall-service-conditions",
			"ValidatingAdmissionPolicyBinding landfall-service-conditions"}, nil},
		{[]string{"servicePolicy.enabled=false"}, nil, []string{"ValidatingAdmissionPolicy landfall-service-conditions",
			"ValidatingAdmissionPolicyBinding landfall-service-conditions"}},
		{[]string{"podMonitor.enabled=true"}, []string{"PodMonitor landfall-controller", "PodMonitor landfall-node"}, nil},
		{[]string{"podMonitor.enabled=true"}, []string{"Secret landfall-metrics-reader",
			"ServiceAccount landfall-metrics-reader", "ClusterRoleBinding landfall-metrics-reader"}, nil},
		{[]string{"podMonitor.enabled=true", `podMonitor.tokenSecret="mine"`}, []string{"PodMonitor landfall-node"},
			[]string{"Secret landfall-metrics-reader", "ServiceAccount landfall-metrics-reader"}},
		{[]string{"podMonitor.enabled=true", "metrics.secure=false"}, []string{"PodMonitor landfall-node"},
			[]string{"ClusterRole landfall-metrics-auth", "Secret landfall-metrics-reader"}},
		{[]string{`speaker.gossip.existingSecret="mine"`}, nil, []string{"Secret landfall-gossip"}},
		{[]string{`fullnameOverride="lf"`}, []string{"DaemonSet lf-node", "Secret lf-gossip", "ClusterRole lf-proxy"},
			[]string{"DaemonSet landfall-node"}},
	} {
		objects := render(t, test.set...)
		for _, id := range test.present {
			if _, ok := objects[id]; !ok {
				t.Errorf("%v: no %s", test.set, id)
			}
		}
		for _, id := range test.absent {
			if _, ok := objects[id]; ok {
				t.Errorf("%v: %s", test.set, id)
			}
		}
	}
}

// TestWrongValuesAreRefused shows that the schema is closed at every level.
func TestWrongValuesAreRefused(t *testing.T) {
	t.Parallel()
	for set, want := range map[string]string{
		"proxyy.mode=1":                                         "proxyy",
		"proxy.mod=1":                                           "mod",
		`proxy.mode="ipvs"`:                                     "/proxy/mode",
		`apiServers=["10.0.0.1"]`:                               "/apiServers/0",
		`proxy.scheduler="lblc"`:                                "/proxy/scheduler",
		`proxy.clusterCIDR="10.0.0.0"`:                          "/proxy/clusterCIDR",
		`proxy.serviceCIDR="10.43.0.0"`:                         "/proxy/serviceCIDR",
		"proxy.masqueradeBit=32":                                "/proxy/masqueradeBit",
		`speaker.gate="kube-proxy"`:                             "/speaker/gate",
		`speaker.hold="30"`:                                     "/speaker/hold",
		`speaker.bgpListen="179"`:                               "/speaker/bgpListen",
		"speaker.gossip.key=1":                                  "key",
		"controller.leaderElect.leaseSeconds=1":                 "leaseSeconds",
		`metrics.listen="10.0.0.1"`:                             "/metrics/listen",
		"metrics.tls=1":                                         "tls",
		`controller.replicas="two"`:                             "/controller/replicas",
		"node.hostNetwork=false":                                "hostNetwork",
		`image.digest="latest"`:                                 "/image/digest",
		"image.name=1":                                          "name",
		"crds.install=1":                                        "install",
		"podMonitor.namespace=1":                                "namespace",
		`logLevel="trace"`:                                      "/logLevel",
		`logFormat="xml"`:                                       "/logFormat",
		"rbac.clusterAdmin=true":                                "clusterAdmin",
		`fullnameOverride="a: b"`:                               "/fullnameOverride",
		`proxy.healthzBindAddress="10256"`:                      "/proxy/healthzBindAddress",
		`rbac.operators=[{"kind":"ServiceAccount","name":"a"}]`: "/rbac/operators/0",
		`node.podLabels={"app.kubernetes.io/component":"a"}`:    "app.kubernetes.io/component",
	} {
		if _, err := template(t, set); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want a refusal that names %s", set, err, want)
		}
	}
	if _, err := template(t, "podMonitor.enabled=true", `metrics.listen="localhost"`); err == nil ||
		!strings.Contains(err.Error(), "metrics.listen=node or all") {
		t.Errorf("a PodMonitor of a localhost: %v", err)
	}
	for _, refused := range [][]string{
		{"proxy.flowOffload needs proxy.serviceCounters=off", "proxy.flowOffload=true", `proxy.serviceCounters="all"`},
		{"relay.enabled needs proxy.enabled=true", "relay.enabled=true", "proxy.enabled=false"},
		{"is 30, shorter than speaker.bgpConvergence plus 7 s", `speaker.bgpConvergence="24s"`},
		{"is 30, shorter than relay.drainTime plus 5 s", "relay.enabled=true", `relay.drainTime="25001ms"`},
		{"proxy.metricsPort and speaker.metricsPort are both TCP port 7482", "speaker.metricsPort=7482"},
		{"speaker.bindPort and speaker.bgpListen are both TCP port 7947", `speaker.bgpListen="[::]:7947"`},
		{"proxy.rescueTunnelPort and speaker.bindPort are both UDP port 7947", "proxy.rescueTunnelPort=7947"},
		{"proxy.rescueTunnelPort and relay.port are both UDP port 7948", "relay.enabled=true", "relay.port=7948"},
		{"proxy.healthzBindAddress and relay.port are both TCP port 10256", "relay.enabled=true", "relay.port=10256"},
		{"renewDeadline must be shorter", `controller.leaderElect.renewDeadline="15s"`},
	} {
		if _, err := template(t, refused[1:]...); err == nil || !strings.Contains(err.Error(), refused[0]) {
			t.Errorf("%s: %v, want %q", refused[1:], err, refused[0])
		}
	}
	if _, err := template(t, "relay.enabled=true", `relay.drainTime="25s"`, `speaker.bgpConvergence="23s"`,
		`proxy.drainTime="1m"`, "relay.clientConnections=null", `proxy.mode="iptables"`); err != nil {
		t.Errorf("times that just fit: %v", err)
	}
	if _, err := template(t, "proxy.enabled=false", "speaker.metricsPort=7482", "proxy.healthzBindAddress=null",
		`speaker.bgpListen=":10256"`); err != nil {
		t.Errorf("ports that are free: %v", err)
	}
	for set, want := range map[string]string{
		`proxy.clusterCIDR=""`:                        "proxy.clusterCIDR is empty",
		`proxy.detectLocalMode="BridgeInterface"`:     "proxy.podBridgeInterface is empty",
		`proxy.detectLocalMode="InterfaceNamePrefix"`: "proxy.podInterfaceNamePrefix is empty",
	} {
		if _, err := template(t, set); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", set, err, want)
		}
		if _, err := template(t, set, "proxy.enabled=false"); err != nil {
			t.Errorf("%s without a proxy: %v", set, err)
		}
	}
	if _, err := template(t, `proxy.clusterCIDR=""`, `proxy.detectLocalMode="NodeCIDR"`); err != nil {
		t.Errorf("the nodes' own CIDRs: %v", err)
	}
	if _, err := template(t, "proxy.enabled=false", `speaker.gate="proxy"`); err == nil ||
		!strings.Contains(err.Error(), "speaker.gate=none") {
		t.Errorf("a gate that nothing opens: %v", err)
	}
}

// TestSchemaHasNothingThatValuesLack finds values that are no longer there, and levels that would
// take a misspelt one.
func TestSchemaHasNothingThatValuesLack(t *testing.T) {
	var values map[string]any
	var schema schemaNode
	for file, into := range map[string]any{"landfall/values.yaml": &values, "landfall/values.schema.json": &schema} {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if err := yaml.Unmarshal(text, into); err != nil {
			t.Fatal(err)
		}
	}
	schema.compare(t, "", values)
}

type schemaNode struct {
	Properties           map[string]schemaNode `json:"properties"`
	AdditionalProperties any                   `json:"additionalProperties"`
}

func (n schemaNode) compare(t *testing.T, path string, values map[string]any) {
	t.Helper()
	if n.AdditionalProperties != false {
		t.Errorf("%s/ is open", path)
	}
	for name, sub := range n.Properties {
		value, ok := values[name]
		if !ok && name != "global" { // helm's own
			t.Errorf("%s/%s is in the schema, not in the values", path, name)
		}
		if nested, ok := value.(map[string]any); ok && sub.Properties != nil {
			sub.compare(t, path+"/"+name, nested)
		}
	}
}

// TestMetricsPorts checks that probes ask where the programs listen, and PodMonitors how they
// answer.
func TestMetricsPorts(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		set                    []string
		scheme                 corev1.URIScheme
		node, controller, cert string
	}{
		{nil, corev1.URISchemeHTTPS, "", "", ""},
		{[]string{"metrics.secure=false", `metrics.certSecret="tls"`}, corev1.URISchemeHTTP, "", "", ""},
		{[]string{`metrics.listen="localhost"`, `metrics.certSecret="tls"`}, corev1.URISchemeHTTPS, "127.0.0.1", "", "tls"},
	} {
		objects := render(t, test.set...)
		node := as[appsv1.DaemonSet](t, objects, "DaemonSet landfall-node").Spec.Template.Spec
		controller := as[appsv1.Deployment](t, objects, "Deployment landfall-controller").Spec.Template.Spec
		for _, pod := range []corev1.PodSpec{node, controller} {
			host := map[bool]string{true: test.node, false: test.controller}[pod.HostNetwork]
			for _, c := range pod.Containers {
				if get := c.ReadinessProbe.HTTPGet; get.Scheme != test.scheme || get.Host != host {
					t.Errorf("%v: %s: probe %v", test.set, c.Name, get)
				}
				mounted := slices.ContainsFunc(c.VolumeMounts, func(m corev1.VolumeMount) bool {
					return m.MountPath == "/run/secrets/landfall/metrics" && m.ReadOnly
				})
				if mounted != (test.cert != "") {
					t.Errorf("%v: %s mounts %v", test.set, c.Name, c.VolumeMounts)
				}
				if pod.HostNetwork && !slices.ContainsFunc(c.Env, func(e corev1.EnvVar) bool {
					return e.Name == "NODE_IP" && e.ValueFrom.FieldRef.FieldPath == "status.podIP"
				}) {
					t.Errorf("%s does not know the node's address", c.Name)
				}
			}
		}
	}
	for secure, want := range map[string]string{
		"true": `"scheme":"https"`, "false": `"podMetricsEndpoints":[{"interval":"30s","port":"metrics","relabelings"`,
	} {
		monitor := render(t, "podMonitor.enabled=true", "metrics.secure="+secure)["PodMonitor landfall-controller"]
		if !strings.Contains(string(monitor), want) {
			t.Errorf("metrics.secure=%s: %s", secure, monitor)
		}
	}
}

// TestGracePeriod must leave the speaker time to hand over and the proxy time to drain.
func TestGracePeriod(t *testing.T) {
	t.Parallel()
	spec := as[appsv1.DaemonSet](t, render(t), "DaemonSet landfall-node").Spec
	if grace := spec.Template.Spec.TerminationGracePeriodSeconds; grace == nil || *grace < 15 {
		t.Errorf("grace period: %v", grace)
	}
	if spec.UpdateStrategy.RollingUpdate.MaxUnavailable.IntValue() != 1 {
		t.Errorf("update strategy: %+v", spec.UpdateStrategy)
	}
	for _, c := range spec.Template.Spec.Containers {
		if c.LivenessProbe.Exec == nil || c.ReadinessProbe.HTTPGet.Path != "/readyz" {
			t.Errorf("%s: probes %v, %v", c.Name, c.LivenessProbe, c.ReadinessProbe)
		}
	}
	if len(spec.Template.Spec.Tolerations) != 1 ||
		spec.Template.Spec.Tolerations[0] != (corev1.Toleration{Operator: corev1.TolerationOpExists}) {
		t.Errorf("tolerations: %v", spec.Template.Spec.Tolerations)
	}
}
