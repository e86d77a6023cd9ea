package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/landfall-lb/landfall/ctl/explain"
)

// run runs landfallctl.
func run(args ...string) (code int, stdout, stderr string) {
	var out, errs strings.Builder
	code = execute(append([]string{"landfallctl"}, args...), strings.NewReader(""), &out, &errs)
	return code, out.String(), errs.String()
}

// TestExitCodes holds what scripts rely on: 0 nothing is wrong, 1 something is, 2 landfallctl
// cannot tell, with one line that says why.
func TestExitCodes(t *testing.T) {
	well, none, denied := fakeWell(2), fakeWell(2), fakeWell(2)
	delete(none.objects, servicePath)
	denied.refused["/api/v1/namespaces/shop/services/web"] = true
	ok, missing, forbidden := well.serve(t), none.serve(t), denied.serve(t)
	away := filepath.Join(t.TempDir(), "config")
	writeKubeconfig(t, away, "away", "http://127.0.0.1:9")
	for _, test := range []struct {
		args []string
		code int
		want string // in stdout for 0 and 1, in stderr for 2
	}{
		{[]string{"status", "--kubeconfig", ok}, 0, "Nothing is wrong."},
		{[]string{"status", "-o", "json", "--kubeconfig", ok}, 0, `"vip": "192.0.2.10"`},
		{[]string{"status", "-o", "wide", "--kubeconfig", ok}, 0, "REASON"},
		{[]string{"explain", "svc", "web", "--kubeconfig", missing}, 1, "Service shop/web: there is no such Service\n"},
		{[]string{"explain", "svc", "other/web", "--kubeconfig", ok}, 1, "Service other/web: there is no such Service; there is shop/web\n"},
		{[]string{"explain", "svc", "web", "-n", "other", "--kubeconfig", ok}, 1, "Service other/web: there is no such"},
		{[]string{"explain", "pool", "lan", "-o", "yaml", "--kubeconfig", ok}, 0, "level: ok"},
		{[]string{"explain", "ip", "198.51.100.1", "--kubeconfig", ok}, 1, "IP 198.51.100.1: no pool contains it"},
		{[]string{"explain", "reason", "NoInterface"}, 0, "NoInterface: No interface"},
		{[]string{"explain", "reason/NoInterface"}, 0, "NoInterface: No interface"},
		{[]string{"explain", "pools/lan", "-o", "yaml", "--kubeconfig", ok}, 0, "level: ok"},
		{[]string{"explain", "services/other/web", "--kubeconfig", ok}, 1, "Service other/web: there is no such Service; there is shop/web\n"},
		{[]string{"explain", "pod/web", "--kubeconfig", ok}, 2, `"pod/web" is not KIND NAME or KIND/NAME`},
		{[]string{"explain", "pod", "web"}, 2, `"pod web" is not KIND NAME or KIND/NAME`},
		{[]string{"status", "--request-timeout", "30", "--kubeconfig", ok}, 0, "Nothing is wrong."},
		{[]string{"status", "--request-timeout", "0", "--kubeconfig", ok}, 0, "Nothing is wrong."},
		{[]string{"status", "--request-timeout", "soon"}, 2, `"soon" is no time such as 30s, 2m or 0`},
		{[]string{"status", "--user", "nobody", "--kubeconfig", ok}, 2, `auth info "nobody" does not exist`},
		{[]string{"status", "--cluster", "nowhere", "--kubeconfig", ok}, 2, `cluster "nowhere" does not exist`},
		{[]string{"version", "--client"}, 0, "landfallctl: "},
		{[]string{"version", "--kubeconfig", ok}, 0, "API server: v1.35.4"},
		{[]string{"explain", "svc", "web", "--kubeconfig", forbidden}, 2,
			`this rule allows it: {apiGroups: [""], resources: ["services"], verbs: ["get"]}`},
		{[]string{"explain", "reason", "Nonsense"}, 2, `"Nonsense" is none of Landfall's reasons`},
		{[]string{"status", "-o", "xml", "--kubeconfig", ok}, 2, `--output: "xml" is none of json, yaml, wide`},
		{[]string{"trace", "nowhere", "svc/web", "--kubeconfig", ok}, 2, `FROM: "nowhere" is neither an IP address`},
		{[]string{"trace", "203.0.113.7", "svc/other", "--kubeconfig", ok}, 2, "there is no Service shop/other"},
		{[]string{"trace", "203.0.113.7", "2001:db8::1:80/tcp", "--kubeconfig", ok}, 2, "needs a port"},
		{[]string{"flows", "other", "--kubeconfig", ok}, 2, "there is no Service shop/other"},
		{[]string{"flows", "web", "--limit=-1", "--kubeconfig", ok}, 2, "--limit: -1"},
		{[]string{"status", "--no-such-flag"}, 2, "unknown flag: --no-such-flag"},
		{[]string{"nonsense"}, 2, `unknown command "nonsense"`},
		{[]string{"help", "nonsense"}, 2, `"nonsense" is no command: landfallctl --help lists them`},
		{[]string{"help", "migrate", "metalb"}, 2, `"migrate metalb" is no command: landfallctl migrate --help lists them`},
		{[]string{"help"}, 0, "Exit codes: "},
		{[]string{"help", "explain", "svc"}, 0, "landfallctl explain svc [NAMESPACE/]NAME"},
		{[]string{"help", "drain", "n1"}, 0, "landfallctl drain"},
		{[]string{"status", "-n", "other", "--kubeconfig", ok}, 0, "(no Service of type LoadBalancer)"},
		{[]string{"status", "-n", "shop", "--kubeconfig", ok}, 0, "shop/web"},
		{[]string{"status", "-n", "other", "-A", "--kubeconfig", ok}, 0, "shop/web"},
		{[]string{"explain", "svc"}, 2, "0 arguments, not 1: usage: landfallctl explain svc [NAMESPACE/]NAME"},
		{[]string{"explain", "svc", "a/b/c", "--kubeconfig", ok}, 2, `"a/b/c" is not [NAMESPACE/]NAME of a Service: `},
		{[]string{"flows", "shop/", "--kubeconfig", ok}, 2, `"shop/" is not [NAMESPACE/]NAME of a Service: `},
		{[]string{"migrate", "metalb"}, 2, `"metalb" is none of kube-proxy, metallb`},
		{[]string{"migrate", "metallb", "-f", "x", "--apply"}, 2, "[filename apply]"},
		{[]string{"migrate", "metallb", "-f", "x", "-o", "values"}, 2, "-o values needs the cluster"},
		{[]string{"verify", "-o", "json", "--wait", "1ms", "--kubeconfig", ok}, 1, `"wrong": "after 1ms: `},
		{[]string{"import", "lan"}, 2, "one file is needed"},
		{[]string{"doctor", "--node", "n1", "--kubeconfig", ok}, 1, "Node n1: "},
		{[]string{"doctor", "--node", "n9", "--kubeconfig", ok}, 1, "Node n9: there is no such Node\n"},
		{[]string{"doctor", "--kubeconfig", away}, 2, "the API server http://127.0.0.1:9 does not answer: "},
		{[]string{"drain", "n1", "--kubeconfig", away}, 2, "the API server http://127.0.0.1:9 does not answer: "},
		{[]string{"watch", "--kubeconfig", away}, 2, "the API server http://127.0.0.1:9 does not answer: "},
		{[]string{"bundle", "-f", "-", "--kubeconfig", away}, 2, "the API server http://127.0.0.1:9 does not answer: "},
		{[]string{"status", "--kubeconfig", away}, 2, "the API server http://127.0.0.1:9 does not answer: "},
		{[]string{"explain", "svc", "web", "--kubeconfig", away}, 2, "the API server http://127.0.0.1:9 does not answer: "},
		{[]string{"status", "--kubeconfig", ok, "--context", "nowhere"}, 2, `context "nowhere" does not exist`},
	} {
		code, stdout, stderr := run(test.args...)
		said := stdout
		if test.code == 2 {
			said = stderr
			if strings.Count(strings.TrimSpace(stderr), "\n") > 0 {
				t.Errorf("%q: more than one line: %q", test.args, stderr)
			}
		}
		if code != test.code || !strings.Contains(said, test.want) {
			t.Errorf("%q: exit code %d, want %d; %q is not in %q %q", test.args, code, test.code, test.want, stdout, stderr)
		}
	}
}

// TestStatusSaysWhatItDidNotSee: who may not read pods does not know the class, and so not all Services.
func TestStatusSaysWhatItDidNotSee(t *testing.T) {
	noPods := fakeWell(1)
	noPods.refused[podsPath] = true
	kubeconfig := noPods.serve(t)
	code, stdout, stderr := run("status", "--kubeconfig", kubeconfig)
	if code != 2 || stderr != "" || !strings.Contains(stdout, "Services with a class are not shown") ||
		!strings.Contains(stdout, "Nothing is wrong in what could be read.") {
		t.Errorf("exit code %d: %s%s", code, stdout, stderr)
	}
	code, stdout, stderr = run("status", "--load-balancer-class", "", "--kubeconfig", kubeconfig)
	if code != 0 || !strings.Contains(stdout, "Nothing is wrong.") {
		t.Errorf("with a class: exit code %d: %s%s", code, stdout, stderr)
	}
}

// TestSeveralKubeconfigs merges the files of $KUBECONFIG, as kubectl does.
func TestSeveralKubeconfigs(t *testing.T) {
	ok, away := fakeWell(1).serve(t), filepath.Join(t.TempDir(), "away")
	writeKubeconfig(t, away, "away", "http://127.0.0.1:9")
	t.Setenv("KUBECONFIG", away+string(os.PathListSeparator)+ok)
	if code, _, _ := run("status"); code != 2 {
		t.Errorf("the current context is that of the first file: exit code %d", code)
	}
	if code, _, stderr := run("status", "--context", "fake"); code != 0 {
		t.Errorf("--context of the second file: exit code %d: %s", code, stderr)
	}
	if code, _, stderr := run("drain", "n0", "--force", "--no-wait", "--context", "nowhere"); code != 2 ||
		!strings.Contains(stderr, `context "nowhere" does not exist`) {
		t.Errorf("drain in another context: exit code %d: %s", code, stderr)
	}
	if code, stdout, _ := run("__complete", "status", "--context", ""); code != 0 || !strings.Contains(stdout, "fake\n") {
		t.Errorf("completion of --context: %q", stdout)
	}
	gone := filepath.Join(t.TempDir(), "gone")
	t.Setenv("KUBECONFIG", gone)
	code, stdout, stderr := run("version")
	if code != 2 || !strings.HasPrefix(stdout, "landfallctl: ") || !strings.Contains(stderr, gone) {
		t.Errorf("without the file that $KUBECONFIG names: exit code %d, %q, %q", code, stdout, stderr)
	}
}

func TestCompletion(t *testing.T) {
	ok := fakeWell(2).serve(t)
	for _, test := range []struct {
		args []string
		want string
	}{
		{[]string{"explain", "svc", ""}, "web\n"},
		{[]string{"explain", "node", ""}, "n1\n"},
		{[]string{"explain", "pool", ""}, "lan\n"},
		{[]string{"doctor", "--node", ""}, "n1\n"},
		{[]string{"drain", ""}, "n1\n"},
		{[]string{"explain", "reason", "NoI"}, "NoInterface\n"},
		{[]string{"explain", ""}, "svc\t"},
		{[]string{"trace", "203.0.113.7", ""}, "svc/web\n"},
		{[]string{"trace", "203.0.113.7", "svc/web", "--node", ""}, "n1\n"},
		{[]string{"flows", ""}, "web\n"},
		{[]string{"status", "-o", ""}, "yaml\n"},
	} {
		args := append([]string{"__complete", "--kubeconfig", ok}, test.args...)
		if code, stdout, stderr := run(args...); code != 0 || !strings.Contains(stdout, test.want) {
			t.Errorf("%q: %q is not in %q %s", test.args, test.want, stdout, stderr)
		}
	}
}

// TestPluginName has help and errors call the program what the user has called it.
func TestPluginName(t *testing.T) {
	var out, errs strings.Builder
	for _, command := range []string{"status", "drain", "watch", "bundle"} {
		out.Reset()
		if code := execute([]string{"/usr/local/bin/kubectl-landfall", command, "--help"}, nil, &out, &errs); code != 0 ||
			!strings.Contains(out.String(), "kubectl landfall "+command) {
			t.Errorf("%d %s", code, out.String())
		}
	}
}

// TestServiceAsksFewNodes asks the owner, and one node for each other reason.
func TestServiceAsksFewNodes(t *testing.T) {
	programs := &agents{nodes: 100}
	g := fakeWell(100).connected(t, programs)
	v, err := explainService(t.Context(), g, "shop/web")
	if err != nil || v.Level != explain.OK {
		t.Fatalf("%v %v", v, err)
	}
	// The owner's proxy is asked twice: it also tries what clients meet.
	if asked := programs.asked.Load(); asked != 5 {
		t.Errorf("programs were asked %d times, want those of 2 nodes, and what clients meet", asked)
	}
	nodes := 0
	for _, c := range v.Checks {
		if strings.HasPrefix(c.What, "node ") {
			nodes++
		}
	}
	if nodes != 100 {
		t.Errorf("%d nodes in the checklist, want 100", nodes)
	}
}

// TestServiceWithoutExec says which rule is missing, and what it knows from the API server.
func TestServiceWithoutExec(t *testing.T) {
	code, stdout, stderr := run("explain", "svc", "web", "-o", "json", "--kubeconfig", fakeWell(2).serve(t))
	var v explain.Verdict
	if err := json.Unmarshal([]byte(stdout), &v); err != nil || code != 0 || v.Level != explain.OK {
		t.Fatalf("%d %v %s %s", code, err, stdout, stderr)
	}
	if !slices.ContainsFunc(v.Checks, func(c explain.Check) bool { return c.What == "address" && c.Text == "192.0.2.10" }) {
		t.Errorf("the checklist lacks the address: %s", stdout)
	}
}

// TestIPAsksSpeakers finds the Service of an address without a list of all Services, unless the
// speakers are wrong or do not answer.
func TestIPAsksSpeakers(t *testing.T) {
	const list = "/api/v1/services"
	for name, test := range map[string]struct {
		nodes  int
		change func(fakeCluster)
		want   string
	}{
		"speakers know": {2, func(f fakeCluster) { f.refused[list] = true }, "IP 192.0.2.10 is of Service shop/web: "},
		"no speaker":    {0, func(fakeCluster) {}, "IP 192.0.2.10 is of Service shop/web: "},
		"speakers know no more": {2, func(f fakeCluster) {
			f.objects["/api/v1/namespaces/shop/services/old"] = f.objects[servicePath]
			f.objects[servicePath] = strings.ReplaceAll(f.objects[servicePath], "192.0.2.10", "192.0.2.11")
			f.objects[list] = `{"items":[` + strings.ReplaceAll(f.objects["/api/v1/namespaces/shop/services/old"], `"web"`,
				`"old"`) + `]}`
		}, "IP 192.0.2.10 is of Service shop/old: "},
	} {
		t.Run(name, func(t *testing.T) {
			f := fakeWell(test.nodes)
			test.change(f)
			v, err := explainIP(t.Context(), f.connected(t, &agents{nodes: test.nodes}), "192.0.2.10")
			if err != nil || !strings.HasPrefix(v.Line, test.want) {
				t.Errorf("%v: %q does not begin with %q", err, v.Line, test.want)
			}
		})
	}
}
