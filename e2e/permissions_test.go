package e2e

import (
	"archive/tar"
	"compress/gzip"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/landfall-lb/landfall/e2e/lab"
	"github.com/landfall-lb/landfall/e2e/lab/labtest"
)

// The roles that rbac.operators binds suffice for each command of landfallctl but those that create or
// change workloads, and for no more than they say.
func TestOperatorsMayDoWhatTheyNeed(t *testing.T) {
	t.Parallel()
	l := labtest.Start(t, lab.SeedCluster(), lab.Options{Values: map[string]any{"rbac": map[string]any{
		"operators": []any{map[string]any{"kind": "Group", "name": "sre", "apiGroup": "rbac.authorization.k8s.io"}}}}})
	if err := l.ServeExec(t.Context()); err != nil {
		t.Fatal(err)
	}
	applied(explainPools)(t, l)
	if err := l.AddService(t.Context(), lab.SeedService()); err != nil {
		t.Fatal(err)
	}
	waitAnnounced(t, l, "my-nginx", "172.26.236.180")
	node := workers(l)[0]
	archive := filepath.Join(t.TempDir(), "bundle.tar.gz")
	for _, command := range [][]string{
		{"status"}, {"status", "-o", "wide"}, {"version"}, {"doctor"}, {"doctor", "--node", node}, svc("my-nginx"),
		{"explain", "svc", "my-nginx", "-o", "wide"}, {"explain", "ip", "172.26.236.180"}, {"explain", "node", node},
		{"explain", "pool", "lan"}, {"explain", "peer", "none"}, {"flows", "my-nginx"},
		{"trace", "172.26.236.200", "svc/my-nginx"}, {"drain", node, "--no-wait"}, {"undrain", node}, {"drain", node},
		{"undrain", node}, {"bundle", "-f", archive},
	} {
		out, denied := asOperator(t, l, command...)
		if denied != "" {
			t.Errorf("landfallctl %s: %s\n%s", strings.Join(command, " "), denied, out)
		}
	}
	if out, err := l.Exec(t.Context(), l.Cluster().Master().Name, filepath.Join(programFolder(t), "landfallctl"),
		"--kubeconfig", l.Kubeconfig(), "--as", "mallory", "status"); err == nil || deniedIn(out+err.Error()) == "" {
		t.Errorf("a user without these roles: %v\n%s", err, out)
	}
	out, err := l.Exec(t.Context(), l.Cluster().Master().Name, append([]string{"timeout", "--preserve-status", "5"},
		operatorCommand(t, l, "watch")...)...)
	if denied := deniedIn(out); denied != "" || strings.Count(out, "watching ") < 5 {
		t.Errorf("landfallctl watch: %v %s\n%s", err, denied, out)
	}
	if denied := deniedIn(bundled(t, archive, "manifest.txt")); denied != "" {
		t.Errorf("the bundle says: %s", denied)
	}
	for _, forbidden := range []authorizationv1.ResourceAttributes{
		{Verb: "get", Resource: "secrets", Namespace: lab.Namespace},
		{Verb: "list", Resource: "secrets"},
		{Verb: "get", Resource: "configmaps", Namespace: "default"},
		{Verb: "create", Resource: "pods", Subresource: "exec", Namespace: "default"},
		{Verb: "create", Resource: "pods", Subresource: "exec", Namespace: "kube-system"},
		{Verb: "create", Resource: "pods", Namespace: lab.Namespace},
		{Verb: "create", Resource: "serviceaccounts", Subresource: "token", Namespace: lab.Namespace},
		{Verb: "patch", Resource: "services", Namespace: "default"},
		{Verb: "patch", Resource: "services", Subresource: "status", Namespace: "default"},
		{Verb: "patch", Group: "apps", Resource: "daemonsets", Namespace: lab.Namespace},
		{Verb: "patch", Group: "landfall.dev", Resource: "ipaddresspools"},
		{Verb: "delete", Resource: "nodes"},
		{Verb: "create", Resource: "events", Namespace: "default"},
	} {
		review, err := l.Kube().AuthorizationV1().SubjectAccessReviews().Create(t.Context(),
			&authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
				ResourceAttributes: &forbidden, User: "eve", Groups: []string{"sre", "system:authenticated"}}},
			metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if review.Status.Allowed {
			t.Errorf("operators may %+v: %s", forbidden, review.Status.Reason)
		}
	}
}

// asOperator runs landfallctl as a user with the operators' roles. denied is what it may not do.
func asOperator(t *testing.T, l *lab.Lab, args ...string) (out, denied string) {
	t.Helper()
	out, err := l.Exec(t.Context(), l.Cluster().Master().Name, operatorCommand(t, l, args...)...)
	if err != nil {
		out += err.Error() // with what it wrote to standard error
	}
	return out, deniedIn(out)
}

func operatorCommand(t *testing.T, l *lab.Lab, args ...string) []string {
	t.Helper()
	return append([]string{filepath.Join(programFolder(t), "landfallctl"), "--kubeconfig", l.Kubeconfig(), "--as", "eve",
		"--as-group", "sre", "--as-group", "system:authenticated", "--request-timeout", "30s"}, args...)
}

// deniedIn returns the line that says that a permission is missing.
func deniedIn(text string) string {
	for line := range strings.Lines(text) {
		if strings.Contains(line, "forbidden") || strings.Contains(line, "may not") || strings.Contains(line, "apiGroups") {
			return strings.TrimSpace(line)
		}
	}
	return ""
}

// bundled returns a file of a bundle.
func bundled(t *testing.T, archive, name string) string {
	t.Helper()
	file, err := os.Open(archive)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	unzipped, err := gzip.NewReader(file)
	if err != nil {
		t.Fatal(err)
	}
	for files := tar.NewReader(unzipped); ; {
		header, err := files.Next()
		if errors.Is(err, io.EOF) {
			t.Fatalf("%s is not in the bundle", name)
		}
		if err != nil {
			t.Fatal(err)
		}
		if strings.HasSuffix(header.Name, "/"+name) {
			text, err := io.ReadAll(files)
			if err != nil {
				t.Fatal(err)
			}
			return string(text)
		}
	}
}
