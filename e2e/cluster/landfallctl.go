package cluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/landfall-lb/landfall/e2e/lab"
)

// reader is the user who has nothing but the ClusterRole of docs/guide/landfallctl.md.
const reader = "reader"

// question is one call of landfallctl, and the exit code that is right.
type question struct {
	line string
	code int
}

// questions are asked of a cluster in which all is well, but for a Service without pods.
var questions = []question{
	{"status", 0},
	{"doctor", 0},
	{"explain svc l2-cluster -n web", 0},
	{"explain svc web/l2-local", 0},
	{"explain svc web/bgp-cluster -o wide", 0},
	{"explain svc web/bgp-local", 0},
	{"explain ip 172.30.0.201", 0},
	{"explain ip 203.0.113.2", 0},
	{"explain ip 172.30.0.229", 0}, // free
	{"explain node node-1", 0},
	{"explain node node-3 -o json", 0},
	{"explain pool lan", 0},
	{"explain peer tor-1", 0},
	{"trace 172.31.0.100 svc/web/bgp-local:80", 0},
	{"trace 172.30.0.100 172.30.0.201:81/udp -o json", 0},
	{"flows l2-cluster -n web", 0},
	{"flows 203.0.113.1 -o wide", 0},
	{"version", 0},
}

// empty is a Service that has no pods, which no node announces.
const empty = `apiVersion: v1
kind: Service
metadata: {name: empty, namespace: web, annotations: {landfall.dev/loadBalancerIPs: 172.30.0.228}}
spec: {type: LoadBalancer, selector: {app: none}, ports: [{port: 80}]}
`

// documentedRoles returns the manifest of the ClusterRole and the Role that landfallctl's page has.
func documentedRoles(repository string) (string, error) {
	role := step{"docs/guide/landfallctl.md", "apiVersion: rbac.authorization.k8s.io/v1\nkind: ClusterRole"}
	markdown, err := os.ReadFile(filepath.Join(repository, role.file))
	if err != nil {
		return "", err
	}
	return role.find(string(markdown))
}

// Explains asks landfallctl, which asks Landfall's programs in the pods of real kubelets: as an
// administrator, and as a user with the documented ClusterRole. Both get right answers, from all
// that they ask about. A user without a role is told which rule is missing.
func (c *Cluster) Explains(ctx context.Context, say func(format string, args ...any)) error {
	role, err := documentedRoles(c.Repository())
	if err != nil {
		return err
	}
	for kind, metadata := range map[string]string{"ClusterRole": "", "Role": ", namespace: landfall-system"} {
		role += fmt.Sprintf("---\napiVersion: rbac.authorization.k8s.io/v1\nkind: %[1]sBinding\n"+
			"metadata: {name: %[2]s%[3]s}\n"+
			"roleRef: {apiGroup: rbac.authorization.k8s.io, kind: %[1]s, name: landfall-explain}\n"+
			"subjects: [{kind: User, apiGroup: rbac.authorization.k8s.io, name: %[2]s}]\n", kind, reader, metadata)
	}
	if err := c.ApplyYAML(ctx, role); err != nil {
		return err
	}
	users := map[string]string{"an administrator": c.Kubeconfig()}
	for name, user := range map[string]string{"a user with the ClusterRole": reader, "nobody": "nobody"} {
		is, err := c.Credentials(user, nil)
		if err != nil {
			return err
		}
		users[name] = is.Kubeconfig
	}
	code, out, err := c.landfallctl(ctx, users["nobody"], "explain svc web/l2-cluster")
	if err != nil {
		return err
	}
	if rule := `resources: ["services"], verbs: ["get"]`; code != 2 || !strings.Contains(out, rule) {
		return fmt.Errorf("without a role landfallctl ends with %d, and does not name the rule %s: %s", code, rule, out)
	}
	delete(users, "nobody")
	asked := 0
	began := time.Now()
	for _, all := range []struct {
		manifest  string
		questions []question
	}{{"", questions}, {empty, []question{{"explain svc web/empty", 1}, {"doctor", 1}}}} {
		if all.manifest != "" {
			if err := c.ApplyYAML(ctx, all.manifest); err != nil {
				return err
			}
		}
		for _, q := range all.questions {
			for name, kubeconfig := range users {
				if err := c.answers(ctx, kubeconfig, q); err != nil {
					return fmt.Errorf("%s: %w", name, err)
				}
				asked++
			}
		}
	}
	say("landfallctl: %d answers are right, for an administrator and with the ClusterRole of its page, %.1f s each",
		asked, time.Since(began).Seconds()/float64(asked))
	return nil
}

// answers asks until the answer is right: what it says takes a moment to become true.
func (c *Cluster) answers(ctx context.Context, kubeconfig string, q question) error {
	return lab.WaitFor(ctx, c.options.Progress, "landfallctl "+q.line, time.Minute, func(ctx context.Context) error {
		code, out, err := c.landfallctl(ctx, kubeconfig, q.line)
		if err == nil && (code != q.code || strings.Contains(out, "this rule allows it")) {
			err = fmt.Errorf("it ends with %d: %s", code, out)
		}
		return err
	})
}

func landfallctlPath() string { return filepath.Join(os.Getenv(programsVariable), "landfallctl") }

// landfallctl runs landfallctl on the client of the nodes' LAN, and returns its exit code and output.
func (c *Cluster) landfallctl(ctx context.Context, kubeconfig, line string) (code int, out string, err error) {
	argv := append([]string{landfallctlPath(), "--kubeconfig", kubeconfig}, strings.Fields(line)...)
	out, err = c.Exec(ctx, lab.ClientName, argv...)
	if ended, ok := errors.AsType[*exec.ExitError](err); ok && ended.Exited() {
		return ended.ExitCode(), out, nil
	}
	return 0, out, err
}
