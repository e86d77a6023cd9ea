package e2e

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/landfall-lb/landfall/e2e/lab"
	"github.com/landfall-lb/landfall/e2e/lab/labtest"
)

var (
	yamlBlock  = regexp.MustCompile("(?ms)^```yaml\n(.*?)^```$")
	hereDoc    = regexp.MustCompile(`(?ms)^kubectl apply -f - <<EOF\n(.*?)^EOF$`)
	mergePatch = regexp.MustCompile(`(?s)kubectl -n ([a-z-]+) patch daemonset ([a-z-]+) --type merge -p '(.*?)'`)
	// A helm command may go on behind a backslash at the end of a line; a value that ends in … stands
	// for any.
	helmCommand = regexp.MustCompile("helm (?:install|upgrade) landfall (?:[^\n`\\\\]|\\\\\n)*")
	helmValue   = regexp.MustCompile("--set ([A-Za-z0-9.]+=[^ `\n…]+)")
)

// reused stands for the values that a release has, which there is not here: those that everybody
// must set.
const reused = "--reset-then-reuse-values"

// What the guides have their readers type does not rot: manifests are taken by the API server,
// values by the chart, patches by what they are for.
func TestGuides(t *testing.T) {
	t.Parallel()
	repository, err := lab.FindRepository(".")
	if err != nil {
		t.Fatal(err)
	}
	cluster := lab.SeedCluster()
	cluster.Nodes, cluster.Pods, cluster.Services = cluster.Nodes[:1], nil, nil
	l := labtest.Start(t, cluster, lab.Options{Stopped: true})
	helm, err := lab.Tool(t.Context(), repository, "helm", func(line string) { t.Log(line) })
	if err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob(filepath.Join(repository, "docs", "*", "*.md"))
	if err != nil {
		t.Fatal(err)
	}
	files = append(files, filepath.Join(repository, "README.md"),
		filepath.Join(repository, "charts/landfall/templates/NOTES.txt"))
	counts := map[string]int{}
	for _, file := range files {
		content, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		text, name := rendered.Replace(string(content)), filepath.Base(file)
		for _, expression := range []*regexp.Regexp{yamlBlock, hereDoc} {
			for _, found := range expression.FindAllStringSubmatch(text, -1) {
				counts["manifests"]++
				if err := l.ApplyYAML(t.Context(), found[1]); err != nil {
					t.Errorf("%s: %v in\n%s", name, err, found[1])
				}
			}
		}
		for _, command := range helmCommand.FindAllString(text, -1) {
			counts["helm commands"]++
			checkHelm(t, name, helm, repository, strings.Fields(strings.ReplaceAll(command, "\\\n", " "))[3:])
		}
		for _, found := range helmValue.FindAllStringSubmatch(text, -1) {
			counts["values"]++
			checkHelm(t, name, helm, repository, []string{"charts/landfall", reused, "--set", found[1]})
		}
		for _, found := range mergePatch.FindAllStringSubmatch(text, -1) {
			counts["patches"]++
			checkPatch(t, l, found[1], found[2], found[3])
		}
	}
	for what, least := range map[string]int{"manifests": 6, "helm commands": 4, "values": 8, "patches": 1} {
		if counts[what] < least {
			t.Errorf("found %d %s, less than there were: %v", counts[what], what, counts)
		}
	}
	t.Log(counts)
}

// rendered fills in what a manifest in the notes of the chart takes from the release.
var rendered = strings.NewReplacer("{{ .Release.Namespace }}", lab.Namespace,
	`{{ include "landfall.image" . | quote }}`, "landfall")

// checkHelm renders the chart as a command line would install it.
func checkHelm(t *testing.T, guide, helm, repository string, args []string) {
	t.Helper()
	line := []string{"template", "landfall", "--kube-version", "v1.35.4"}
	for _, arg := range args {
		switch {
		case arg == reused:
			line = append(line, "--set", "proxy.clusterCIDR=192.168.0.0/16")
		case strings.HasPrefix(arg, "oci://"): // the same chart, where somebody has pushed it
			line = append(line, "charts/landfall")
		default:
			line = append(line, arg)
		}
	}
	if guide == "kubeadm.md" { // where helm finds it
		line = append(line, "--set", "proxy.clusterCIDR=192.168.0.0/16")
	}
	cmd := exec.CommandContext(t.Context(), helm, line...)
	cmd.Dir = repository
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%s: helm %s: %v\n%s", guide, strings.Join(line, " "), err, out)
	}
}

// checkPatch patches a DaemonSet as kubeadm makes it for kube-proxy, and looks that it asks for
// other nodes than before.
func checkPatch(t *testing.T, l *lab.Lab, namespace, name, patch string) {
	t.Helper()
	labels := map[string]string{"k8s-app": name}
	sets := l.Kube().AppsV1().DaemonSets(namespace)
	_, err := sets.Create(t.Context(), &appsv1.DaemonSet{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels},
		Spec: appsv1.DaemonSetSpec{
			Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Labels: labels},
				Spec: corev1.PodSpec{
					HostNetwork: true, NodeSelector: map[string]string{corev1.LabelOSStable: "linux"},
					Tolerations: []corev1.Toleration{{Operator: corev1.TolerationOpExists}},
					Containers:  []corev1.Container{{Name: name, Image: "registry.k8s.io/kube-proxy:v1.35.4"}},
				},
			},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	patched, err := sets.Patch(t.Context(), name, types.MergePatchType, []byte(patch),
		metav1.PatchOptions{FieldValidation: metav1.FieldValidationStrict})
	if err != nil {
		t.Fatalf("patch %s: %v", patch, err)
	}
	spec := patched.Spec.Template.Spec
	if spec.Affinity == nil || spec.Affinity.NodeAffinity == nil ||
		spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution == nil || len(spec.Containers) != 1 {
		t.Errorf("%s after the patch: %+v", name, spec)
	}
}
