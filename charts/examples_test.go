package charts

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
)

// TestExamples renders the chart with the values of each example, which the schema then checks too.
func TestExamples(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("examples/*.yaml")
	if err != nil || len(files) < 9 {
		t.Fatalf("examples: %v, %v", files, err)
	}
	docs, err := os.ReadFile("../docs/guide/install.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			if !strings.Contains(string(docs), "(../../charts/"+file+")") {
				t.Errorf("docs/guide/install.md does not link it")
			}
			text, err := run(t, "template", "landfall", "landfall", "--namespace", "landfall-system",
				"--kube-version", kubeVersion, "--values", file)
			if err != nil {
				t.Fatal(err)
			}
			objects := decode(t, text)
			as[appsv1.Deployment](t, objects, "Deployment landfall-controller")
			as[appsv1.DaemonSet](t, objects, "DaemonSet landfall-node")
		})
	}
}
