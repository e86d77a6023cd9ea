package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/landfall-lb/landfall/internal/lb"
)

// unpack returns the files of a bundle by name, without its folder.
func unpack(t *testing.T, archive io.Reader) map[string]string {
	t.Helper()
	unzipped, err := gzip.NewReader(archive)
	if err != nil {
		t.Fatal(err)
	}
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
		files[name] = string(content)
	}
}

// planted begins each secret of the cluster of which a bundle is made.
const planted = "planted-secret"

func plantedCluster() fakeCluster {
	f := fakeWell(2)
	last := fmt.Sprintf(`"kubectl.kubernetes.io/last-applied-configuration":"{\"spec\":{\"password\":\"%s-1\"}}"`, planted)
	f.objects[lists+"bgppeers"] = fmt.Sprintf(`{"items":[{"metadata":{"name":"tor","annotations":{%s}},
		"spec":{"peerASN":64513,"password":"%s-1"}}]}`, last, planted)
	f.objects["/api/v1/services"] = strings.Replace(f.objects["/api/v1/services"], `"annotations":{`, fmt.Sprintf(
		`"managedFields":[{"manager":"x"}],"annotations":{"example.com/token":"%s-2",`, planted), 1)
	f.objects[podsPath] = strings.Replace(f.objects[podsPath], `{"items":[`, fmt.Sprintf(`{"items":[{"metadata":{"name":"p"},
		"spec":{"containers":[{"name":"c","env":[{"name":"A","value":"%[1]s-3"},
		{"name":"B","valueFrom":{"secretKeyRef":{"name":"s","key":"k"}}}],
		"command":["x"],"args":["--api-token=%[1]s-4","--gossip-key-file=/keys/key"]}]}},`, planted), 1)
	f.objects["/api/v1/namespaces/landfall-system/configmaps"] = fmt.Sprintf(`{"items":[{"metadata":{"name":"settings"},
		"data":{"the-key":"%s-5"}}]}`, planted)
	f.objects["/api/v1/events"] = fmt.Sprintf(`{"items":[
		{"metadata":{"name":"a"},"involvedObject":{"kind":"Node","name":"n0"},"message":"peer says %s-1"},
		{"metadata":{"name":"other-event"},"involvedObject":{"kind":"Pod","name":"shop"},"message":"x"}]}`, planted)
	f.refused["/apis/coordination.k8s.io/v1/namespaces/landfall-system/leases"] = true
	return f
}

// bundleOf makes a bundle whose programs answer with a secret that a BGPPeer has too.
func bundleOf(t *testing.T, f fakeCluster, most int) map[string]string {
	t.Helper()
	o := options{}
	o.user.Kubeconfig, o.timeout = f.serve(t), 30e9
	client, server, err := o.connect(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	b := newBundle(client, server, o, "bundle", &out)
	b.most = most
	b.exec = (&agents{nodes: 2}).exec
	b.execUpTo = func(_ context.Context, most int, pod lb.Key, container string, command ...string) ([]byte, error) {
		if pod.Name == "landfall-node-1" && container == "proxy" {
			return nil, errors.New("no answer")
		}
		if pod.Name == "landfall-node-1" {
			return make([]byte, most), nil
		}
		return fmt.Appendf(nil, "%q with %s-1", command, planted), nil
	}
	b.log = func(_ context.Context, _ lb.Key, container string, previous bool) ([]byte, bool, error) {
		return fmt.Appendf(nil, "log of %s (previous: %v): password %s-1", container, previous, planted), true, nil
	}
	if err := b.write(t.Context()); err != nil {
		t.Fatal(err)
	}
	return unpack(t, &out)
}

// TestBundleHasNoSecrets plants secrets where objects, logs and statuses may have them.
func TestBundleHasNoSecrets(t *testing.T) {
	files := bundleOf(t, plantedCluster(), maxBundle)
	for name, content := range files {
		if strings.Contains(content, planted) {
			t.Errorf("%s has a secret: %s", name, content)
		}
		if strings.HasPrefix(name, "objects/") && !json.Valid([]byte(content)) {
			t.Errorf("%s is not JSON: %s", name, content)
		}
	}
	for name, want := range map[string]string{
		"version.txt":                                  "API server: v1.35.4",
		"doctor.txt":                                   "Cluster: ",
		"objects/bgppeers.json":                        `"password":"(left out)"`,
		"objects/services.json":                        `"example.com/token":"(left out) 16 bytes"`,
		"objects/pods.json":                            `{"name":"B","valueFrom":{"secretKeyRef":{"key":"k","name":"s"}}}`,
		"objects/configmaps.json":                      `"data":["the-key"]`,
		"objects/events.json":                          "peer says (left out)",
		"programs/landfall-node-0/speaker.status.json": `"--status-only="] with (left out)`,
		"programs/landfall-node-0/proxy.metrics.txt":   `["landfall-proxy" "status" "--status-only=metrics"]`,
		"programs/landfall-node-0/relay.metrics.txt":   `["landfall-proxy" "relay" "status" "--status-only=metrics"]`,
		"programs/landfall-node-0/proxy.log":           "log of proxy (previous: false): password (left out)",
		"manifest.txt":                                 "proxy.status.json: no answer",
	} {
		if !strings.Contains(files[name], want) {
			t.Errorf("%s lacks %q: %s", name, want, files[name])
		}
	}
	if !strings.Contains(files["objects/pods.json"], "--gossip-key-file=/keys/key") {
		t.Errorf("the name of a file is left out: %s", files["objects/pods.json"])
	}
	for _, unwanted := range []string{"managedFields", "other-event"} {
		if strings.Contains(files["objects/services.json"]+files["objects/events.json"], unwanted) {
			t.Errorf("%s is in the bundle", unwanted)
		}
	}
	if !strings.Contains(files["objects/services.json"], "landfall.dev/announcements") {
		t.Error("Landfall's own annotation is left out")
	}
	manifest := files["manifest.txt"]
	for _, want := range []string{"leases", "(the first 4194304 bytes)", "(the end)", "objects/services.json"} {
		if !strings.Contains(manifest, want) {
			t.Errorf("manifest.txt lacks %q:\n%s", want, manifest)
		}
	}
}

// TestBundleIsBounded leaves out files, and says so, rather than grow.
func TestBundleIsBounded(t *testing.T) {
	files := bundleOf(t, plantedCluster(), 3000)
	size := 0
	for name, content := range files {
		if name != "manifest.txt" {
			size += len(content)
		}
	}
	if size > 3000 || !strings.Contains(files["manifest.txt"], "the bundle is full") {
		t.Errorf("%d bytes:\n%s", size, files["manifest.txt"])
	}
}

// TestBundleFile writes a file that only its owner may read, and never over another.
func TestBundleFile(t *testing.T) {
	config, path := plantedCluster().serve(t), filepath.Join(t.TempDir(), "bundle.tar.gz")
	code, stdout, stderr := run("bundle", "-f", path, "--kubeconfig", config)
	if code != 0 || stdout != "" || !strings.Contains(stderr, "see manifest.txt") {
		t.Fatalf("exit code %d: %s%s", code, stdout, stderr)
	}
	info, err := os.Stat(path)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v %v", info, err)
	}
	if code, _, stderr := run("bundle", "-f", path, "--kubeconfig", config); code != 2 || !strings.Contains(stderr, "exists") {
		t.Errorf("exit code %d: %s", code, stderr)
	}
	code, stdout, stderr = run("bundle", "-f", "-", "--kubeconfig", config)
	if files := unpack(t, strings.NewReader(stdout)); code != 0 || files["manifest.txt"] == "" {
		t.Errorf("exit code %d: %s", code, stderr)
	}
}

// TestBundleSaysWhatIsInIt prints the files of a bundle as data, beside the archive.
func TestBundleSaysWhatIsInIt(t *testing.T) {
	f := fakeWell(2)
	f.refused["/api/v1/events"] = true
	path := filepath.Join(t.TempDir(), "bundle.tar.gz")
	code, stdout, stderr := run("bundle", "-f", path, "-o", "json", "--kubeconfig", f.serve(t))
	var said bundled
	if err := json.Unmarshal([]byte(stdout), &said); err != nil || code != 0 || stderr != "" {
		t.Fatalf("%d %v %s %s", code, err, stdout, stderr)
	}
	archive, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer archive.Close()
	files := unpack(t, archive)
	if said.Archive != path || len(said.Files) != len(files) {
		t.Errorf("it names %s with %d files, want %s with %d", said.Archive, len(said.Files), path, len(files))
	}
	for _, one := range said.Files {
		if len(files[one.Name]) != one.Bytes {
			t.Errorf("%s has %d bytes, not %d", one.Name, len(files[one.Name]), one.Bytes)
		}
	}
	refused := func(line string) bool { return strings.HasPrefix(line, "events: ") }
	if !slices.ContainsFunc(said.NotRead, refused) {
		t.Errorf("what could not be read is not named: %q", said.NotRead)
	}
	code, _, stderr = run("bundle", "-f", "-", "-o", "json", "--kubeconfig", f.serve(t))
	if code != 2 || !strings.Contains(stderr, "both write to standard output") {
		t.Errorf("%d %s", code, stderr)
	}
}
