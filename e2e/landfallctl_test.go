package e2e

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/yaml"

	"github.com/landfall-lb/landfall/e2e/lab"
)

// grantRule gives a user one rule more.
func grantRule(t *testing.T, l *lab.Lab, user string, n int, rule string) {
	t.Helper()
	name := fmt.Sprintf("%s-%d", user, n)
	applied(fmt.Sprintf(`
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: %[1]s}
rules: [%[2]s]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: %[1]s}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: %[1]s}
subjects: [{kind: User, apiGroup: rbac.authorization.k8s.io, name: %[3]s}]
`, name, rule, user))(t, l)
}

// namedRule is the rule in what landfallctl writes about a missing permission.
var namedRule = regexp.MustCompile(`\{apiGroups: \[[^]]*\], resources: \[[^]]*\], verbs: \[[^]]*\]\}`)

// TestLandfallctlNamesRules begins each command as a user who may do nothing, and grants the rule that
// it names until the command does what it does for an administrator.
func TestLandfallctlNamesRules(t *testing.T) {
	t.Parallel()
	l := startProduct(t)
	if err := l.ServeExec(t.Context()); err != nil {
		t.Fatal(err)
	}
	waitAnnounced(t, l, "my-nginx", "172.26.236.180")
	node := workers(l)[0]
	for i, command := range []string{
		"status", "doctor", "doctor --node " + node, "explain svc my-nginx", "explain ip 172.26.236.180",
		"explain node " + node, "explain pool vmware", "explain peer tor-1", "trace 198.51.100.20 svc/my-nginx",
		"flows my-nginx", "drain " + node + " --timeout 20s", "undrain " + node, "version", "bundle -f -",
	} {
		t.Run(command, func(t *testing.T) {
			user := fmt.Sprintf("eve-%d", i)
			is, err := l.Credentials(user, nil)
			if err != nil {
				t.Fatal(err)
			}
			args := strings.Fields(command)
			var want int
			eventually(t, "an administrator gets an answer", func() error {
				var out string
				if want, out = landfallctl(t, l, args...); want == 2 || namedRule.MatchString(out) {
					return fmt.Errorf("it ends with %d: %s", want, out)
				}
				return nil
			})
			var rules []string
			for {
				code, out := landfallctlAs(t, l, is.Kubeconfig, args...)
				missing := ""
				for _, rule := range append(bundleRules(t, command, out), namedRule.FindAllString(out, -1)...) {
					if !slices.Contains(rules, rule) {
						missing = rule
						break
					}
				}
				if missing == "" {
					if code != want {
						t.Fatalf("with the rules %q it ends with %d, want %d, and names no other:\n%s", rules, code, want, out)
					}
					break
				}
				if len(rules) == 0 && code == 0 && !strings.HasPrefix(command, "bundle") && command != "version" {
					t.Errorf("without any rule it ends with 0:\n%s", out)
				}
				grantRule(t, l, user, len(rules), missing)
				if rules = append(rules, missing); len(rules) > 40 {
					t.Fatalf("it names one rule after the other: %q", rules)
				}
				eventually(t, "the API server has the rule", func() error {
					_, out := landfallctlAs(t, l, is.Kubeconfig, args...)
					if slices.Contains(append(bundleRules(t, command, out), namedRule.FindAllString(out, -1)...), missing) {
						return fmt.Errorf("%s is still missing", missing)
					}
					return nil
				})
			}
			if len(rules) == 0 {
				t.Error("it needs no rule")
			}
			t.Logf("needs %d rules", len(rules))
		})
	}
}

// TestWatchNamesRules has a user who may do nothing watch: each kind is named with its rule, and once
// they are granted all is watched.
func TestWatchNamesRules(t *testing.T) {
	t.Parallel()
	l := startProduct(t)
	is, err := l.Credentials("eve", nil)
	if err != nil {
		t.Fatal(err)
	}
	line := "echo pid $$; exec " + filepath.Join(programFolder(t), "landfallctl") + " --kubeconfig " + is.Kubeconfig + " watch"
	if err := l.Run("eve", l.Cluster().Master().Name, "sh", "-c", line); err != nil {
		t.Fatal(err)
	}
	watch := follower{l, "eve"}
	kinds := []string{"services", "ipaddresspools", "bgppeers", "nodes", "events"}
	for i, kind := range kinds {
		watch.wait(t, kind+" are not shown: ", "; this rule allows it: ", `resources: ["`+kind+`"], verbs: ["list", "watch"]}`)
		for line := range strings.Lines(watch.text()) {
			if strings.HasPrefix(line, kind+" are not shown: ") {
				grantRule(t, l, "eve", i, namedRule.FindString(line))
			}
		}
	}
	for _, kind := range kinds {
		watch.wait(t, kind+" are shown")
	}
	watch.wait(t, "watching", "findings on Nodes")
}

// bundleRules are the rules that the manifest in a bundle names; none of what is no bundle.
func bundleRules(t *testing.T, command, out string) []string {
	t.Helper()
	if !strings.HasPrefix(command, "bundle") {
		return nil
	}
	return namedRule.FindAllString(unpackBundle(t, []byte(out))["manifest.txt"], -1)
}

// unpackBundle returns the files of an archive by name, without its folder. What follows the archive
// is of no interest.
func unpackBundle(t *testing.T, archive []byte) map[string]string {
	t.Helper()
	unzipped, err := gzip.NewReader(bytes.NewReader(archive))
	if err != nil {
		t.Fatalf("%v: %s", err, archive)
	}
	unzipped.Multistream(false)
	files := map[string]string{}
	for all := tar.NewReader(unzipped); ; {
		header, err := all.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		if err != nil {
			t.Fatal(err)
		}
		content, err := io.ReadAll(all)
		if err != nil {
			t.Fatal(err)
		}
		_, name, _ := strings.Cut(header.Name, "/")
		if _, twice := files[name]; twice {
			t.Errorf("%s is there twice", name)
		}
		files[name] = string(content)
	}
}

// TestDayTwoBundle makes a bundle of a cluster with secrets of every kind, and reads all of it.
func TestDayTwoBundle(t *testing.T) {
	t.Parallel()
	const password = "swordfish-of-the-router"
	l := startBGP(t, lab.ToR{Kind: lab.FRR, Count: 1, ASN: 64513, NodeASN: 64512, Password: password}, false,
		", password: "+password)
	if err := l.ServeExec(t.Context()); err != nil {
		t.Fatal(err)
	}
	kept := filepath.Join(t.TempDir(), "bundle.tar.gz")
	code, out := landfallctl(t, l, "bundle", "-f", kept)
	if code != 0 || !strings.Contains(out, "everything was read") {
		t.Errorf("bundle ends with %d: %s", code, out)
	}
	archive, err := os.ReadFile(kept)
	if err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(kept); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("who may read it: %v, %v", info.Mode(), err)
	}
	files := unpackBundle(t, archive)
	for name, content := range files {
		if name != "manifest.txt" && !strings.Contains(files["manifest.txt"], fmt.Sprintf("%10d  %s\n", len(content), name)) {
			t.Errorf("the manifest lacks %s with %d bytes:\n%s", name, len(content), files["manifest.txt"])
		}
		if strings.HasSuffix(name, ".json") && !json.Valid([]byte(content)) {
			t.Errorf("%s is not JSON", name)
		}
	}
	for name, part := range map[string]string{
		"objects/bgppeers.json": `"peerASN":64513`, "objects/ipaddresspools.json": `"routed"`,
		"objects/bgpadvertisements.json": `"routed"`, "objects/l2advertisements.json": `"items"`,
		"objects/bfdprofiles.json": `"fast"`, "objects/communities.json": `"items"`,
		"objects/services.json": `"my-nginx"`, "objects/endpointslices.json": `192.168.189.131`,
		"objects/nodes.json": `"k8s-worker-179"`, "objects/daemonsets.json": `"landfall-node"`,
		"objects/deployments.json": `"landfall-controller"`, "objects/pods.json": `"landfall-node-k8s-worker-177-0"`,
		"objects/leases.json": `"landfall-controller"`, "objects/events.json": `"items"`,
		"objects/configmaps.json": `"items"`, "version.txt": "API server: v1.", "doctor.txt": "Cluster: ",
	} {
		if !strings.Contains(files[name], part) {
			t.Errorf("%s lacks %s: %.300s", name, part, files[name])
		}
	}
	for _, a := range slices.Concat(l.Agents("controller"), l.Agents("speaker"), l.Agents("proxy")) {
		pod := "landfall-node-" + a.Node + "-0"
		if a.Program == "controller" {
			pod = "landfall-controller-" + a.Node + "-0"
		}
		at := "programs/" + pod + "/" + a.Program
		if log := files[at+".log"]; !strings.Contains(log, "level=INFO") {
			t.Errorf("%s.log is no log: %.200s", at, log)
		}
		if a.Program == "controller" {
			continue // it has no socket
		}
		if status := files[at+".status.json"]; !strings.Contains(status, `"node": "`+a.Node+`"`) {
			t.Errorf("%s.status.json: %.200s", at, status)
		}
		if metrics := files[at+".metrics.txt"]; !strings.Contains(metrics, "landfall_build_info{") {
			t.Errorf("%s.metrics.txt: %.200s", at, metrics)
		}
	}
	for what, secret := range secretsOf(t, l, password) {
		for name, content := range files {
			if strings.Contains(content, secret) {
				t.Errorf("%s has %s", name, what)
			}
		}
	}
}

// secretsOf returns all that a bundle must not have.
func secretsOf(t *testing.T, l *lab.Lab, password string) map[string]string {
	t.Helper()
	found := map[string]string{"the password of a router": password, "a private key": "PRIVATE KEY"}
	all, err := l.Kube().CoreV1().Secrets("").List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range all.Items {
		for key, value := range s.Data {
			what := "the key " + key + " of the Secret " + s.Name
			found[what], found[what+" in base 64"] = string(value), base64.StdEncoding.EncodeToString(value)
		}
	}
	if len(found) < 4 {
		t.Fatal("the cluster has no Secret: the chart makes one for gossip")
	}
	for _, a := range l.Agents("speaker") {
		token, err := os.ReadFile(a.Path("/run/secrets/kubernetes.io/serviceaccount/token"))
		if err != nil {
			t.Fatal(err)
		}
		found["the token of the speaker on "+a.Node] = string(token)
	}
	return found
}

// TestLandfallctlIsLikeKubectl has what users of kubectl expect: contexts of several files, output
// formats, completion of names, and the name of a plugin.
func TestLandfallctlIsLikeKubectl(t *testing.T) {
	t.Parallel()
	l := startProduct(t)
	if err := l.ServeExec(t.Context()); err != nil {
		t.Fatal(err)
	}
	waitAnnounced(t, l, "my-nginx", "172.26.236.180")
	master, node := l.Cluster().Master().Name, workers(l)[0]
	ctl := filepath.Join(programFolder(t), "landfallctl")

	t.Run("kubeconfig", func(t *testing.T) {
		config, err := clientcmd.LoadFromFile(l.Kubeconfig())
		if err != nil {
			t.Fatal(err)
		}
		folder := t.TempDir()
		clusters, users := filepath.Join(folder, "clusters"), filepath.Join(folder, "users")
		first, second := clientcmdapi.NewConfig(), clientcmdapi.NewConfig()
		first.Clusters = config.Clusters
		first.Clusters["away"] = &clientcmdapi.Cluster{Server: "https://127.0.0.1:9"}
		first.Contexts["away"] = &clientcmdapi.Context{Cluster: "away", AuthInfo: "lab"}
		first.CurrentContext = "away"
		second.AuthInfos = config.AuthInfos
		second.Contexts["here"] = &clientcmdapi.Context{Cluster: "lab", AuthInfo: "lab", Namespace: "kube-system"}
		for file, c := range map[string]*clientcmdapi.Config{clusters: first, users: second} {
			if err := clientcmd.WriteToFile(*c, file); err != nil {
				t.Fatal(err)
			}
		}
		env := "KUBECONFIG=" + clusters + ":" + users
		if out, err := l.Exec(t.Context(), master, "env", env, ctl, "status"); err == nil ||
			!strings.Contains(out, "https://127.0.0.1:9 does not answer") {
			t.Errorf("the current context is that of the first file: %v %s", err, out)
		}
		mustExec(t, l, master, "env", env, ctl, "--context", "here", "status")
		// The context's namespace is that of names without one.
		if out, err := l.Exec(t.Context(), master, "env", env, ctl, "--context", "here", "explain", "svc",
			"my-nginx"); err == nil || !strings.Contains(out, "Service kube-system/my-nginx: there is no such Service") {
			t.Errorf("%v %s", err, out)
		}
		mustExec(t, l, master, "env", env, ctl, "--context", "here", "-n", "default", "explain", "svc", "my-nginx")
	})

	t.Run("output", func(t *testing.T) {
		for _, command := range []string{"status", "doctor", "explain svc my-nginx", "explain ip 172.26.236.180",
			"explain node " + node, "explain pool vmware", "trace 198.51.100.20 svc/my-nginx", "flows my-nginx", "version",
			"explain reason NoInterface"} {
			text := mustExec(t, l, master, append([]string{ctl, "--kubeconfig", l.Kubeconfig()}, strings.Fields(command)...)...)
			for _, format := range []string{"json", "yaml", "wide"} {
				code, out := landfallctl(t, l, append(strings.Fields(command), "-o", format)...)
				var value map[string]any
				switch format {
				case "json":
					if err := json.Unmarshal([]byte(out), &value); err != nil || len(value) == 0 {
						t.Errorf("%s -o json: %v: %s", command, err, out)
					}
				case "yaml":
					if err := yaml.UnmarshalStrict([]byte(out), &value); err != nil || len(value) == 0 {
						t.Errorf("%s -o yaml: %v: %s", command, err, out)
					}
				case "wide":
					if strings.HasPrefix(command, "version") || strings.HasPrefix(command, "explain reason") {
						if code != 2 || !strings.Contains(out, `--output: "wide" is none of json, yaml`) {
							t.Errorf("%s -o wide: %s", command, out)
						}
						continue
					}
					if len(out) < len(text) {
						t.Errorf("%s: wide has %d characters, and the text %d", command, len(out), len(text))
					}
				}
				if code != 0 {
					t.Errorf("%s -o %s ends with %d: %s", command, format, code, out)
				}
			}
		}
	})

	t.Run("completion", func(t *testing.T) {
		for _, shell := range []string{"bash", "zsh", "fish", "powershell"} {
			code, script := landfallctl(t, l, "completion", shell)
			if code != 0 || !strings.Contains(script, "__complete") {
				t.Errorf("%s ends with %d: %.200s", shell, code, script)
			}
			if shell != "bash" {
				continue
			}
			file := filepath.Join(t.TempDir(), "completion")
			if err := os.WriteFile(file, []byte(script), 0o600); err != nil {
				t.Fatal(err)
			}
			mustExec(t, l, master, "bash", "-n", file)
		}
		for args, want := range map[string]string{"explain svc": "my-nginx", "explain node": node, "explain pool": "vmware",
			"drain": node, "undrain": node, "flows": "my-nginx", "trace 198.51.100.20": "svc/my-nginx", "doctor --node": node} {
			if code, out := landfallctl(t, l, append(append([]string{"__complete"}, strings.Fields(args)...), "")...); code != 0 ||
				!slices.Contains(strings.Split(out, "\n"), want) {
				t.Errorf("completion of %s: %d, no %s in %s", args, code, want, out)
			}
		}
	})

	t.Run("plugin", func(t *testing.T) {
		plugin := filepath.Join(t.TempDir(), "kubectl-landfall")
		if err := os.Symlink(ctl, plugin); err != nil {
			t.Fatal(err)
		}
		if out := mustExec(t, l, master, plugin, "explain", "--help"); !strings.Contains(out, "kubectl landfall explain") {
			t.Errorf("help of the plugin: %s", out)
		}
		mustExec(t, l, master, plugin, "--kubeconfig", l.Kubeconfig(), "status")
		if out, err := l.Exec(t.Context(), master, plugin, "nonsense"); err == nil ||
			!strings.Contains(out, "kubectl landfall: unknown command") {
			t.Errorf("%v %s", err, out)
		}
	})
}
