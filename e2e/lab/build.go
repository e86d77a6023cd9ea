package lab

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/e2e/cache"
)

// progressEvery is how often a slow step says that it is still at work; one that takes minutes comes down to
// progressRarely.
const (
	progressEvery  = 3 * time.Second
	progressRarely = 30 * time.Second
)

// tool is a program that builds from a module of its own below e2e/, in the version that its go.mod
// pins.
type tool struct {
	Folder, Module, Package string
	Flags                   func(version string) string // linker flags
	// Static is set for a program that runs in containers with nothing beside it.
	Static bool
	// Test is set for the program of a package's tests.
	Test bool
	// Published says where the project publishes the program of a version for Linux on an
	// architecture; nil if it is always built.
	Published func(version, arch string) published
}

// kubernetesTool is a program of Kubernetes. The releases for setup-envtest lack most patch
// versions, so the project's own releases are used.
func kubernetesTool(name string) tool {
	return tool{
		Folder: "e2e/kubernetes", Module: "k8s.io/kubernetes", Package: "k8s.io/kubernetes/cmd/" + name,
		Flags: kubernetesFlags,
		Published: func(version, arch string) published {
			url := "https://dl.k8s.io/release/" + version + "/bin/linux/" + arch + "/" + name
			return published{URL: url, Sums: url + ".sha256"}
		},
	}
}

func kubernetesFlags(version string) string {
	return "-s -w -X k8s.io/component-base/version.gitVersion=" + version
}

// suiteImage is the program of an image that upstream's end-to-end suite runs.
func suiteImage(name string) tool {
	return tool{
		Folder: "e2e/kubernetes", Module: "k8s.io/kubernetes", Package: "k8s.io/kubernetes/test/images/" + name,
		Flags: func(string) string { return "-s -w" }, Static: true,
	}
}

// tools are the programs that the lab, the tests and "make" use, by name.
var tools = map[string]tool{
	"kube-apiserver": kubernetesTool("kube-apiserver"),
	"kube-proxy":     kubernetesTool("kube-proxy"),
	// For the cluster of e2e/cluster.
	"kube-controller-manager": kubernetesTool("kube-controller-manager"),
	"kube-scheduler":          kubernetesTool("kube-scheduler"),
	"kubelet":                 kubernetesTool("kubelet"),
	"kubectl":                 kubernetesTool("kubectl"),
	// Upstream's end-to-end suite, what runs its specs side by side, and two programs of its pods.
	"e2e.test": {
		Folder: "e2e/kubernetes", Module: "k8s.io/kubernetes", Package: "k8s.io/kubernetes/test/e2e", Test: true,
		Flags: kubernetesFlags,
	},
	"ginkgo": {
		Folder: "e2e/kubernetes", Module: "github.com/onsi/ginkgo/v2", Package: "github.com/onsi/ginkgo/v2/ginkgo",
		Flags: func(string) string { return "-s -w" },
	},
	"agnhost":                suiteImage("agnhost"),
	"regression-issue-74839": suiteImage("regression-issue-74839"),
	"coredns": {
		Folder: "e2e/tools/coredns", Module: "github.com/coredns/coredns", Package: ".", Static: true,
		Flags: func(string) string { return "-s -w" },
	},
	"flanneld": {
		Folder: "e2e/tools/flannel", Module: "github.com/flannel-io/flannel", Package: ".", Static: true,
		Flags: func(string) string { return "-s -w" },
	},
	"helm": {
		Folder: "e2e/tools/helm", Module: "helm.sh/helm/v3", Package: "helm.sh/helm/v3/cmd/helm",
		Flags: func(v string) string { return "-s -w -X helm.sh/helm/v3/internal/version.version=" + v },
		Published: func(version, arch string) published {
			url := "https://get.helm.sh/helm-" + version + "-linux-" + arch + ".tar.gz"
			return published{URL: url, Sums: url + ".sha256sum", Member: "linux-" + arch + "/helm"}
		},
	},
	"controller-gen": {
		Folder: "e2e/tools/controller-gen", Module: "sigs.k8s.io/controller-tools",
		Package: "sigs.k8s.io/controller-tools/cmd/controller-gen",
		Flags:   func(string) string { return "-s -w" },
	},
	"golangci-lint": {
		Folder: "e2e/tools/golangci-lint", Module: "github.com/golangci/golangci-lint/v2",
		Package: "github.com/golangci/golangci-lint/v2/cmd/golangci-lint",
		Flags:   func(v string) string { return "-s -w -X main.version=" + v },
		Published: func(version, arch string) published {
			number := strings.TrimPrefix(version, "v")
			folder := "https://github.com/golangci/golangci-lint/releases/download/" + version + "/"
			name := "golangci-lint-" + number + "-linux-" + arch
			return published{URL: folder + name + ".tar.gz", Sums: folder + "golangci-lint-" + number + "-checksums.txt",
				Member: name + "/golangci-lint"}
		},
	},
}

// Tool returns the path of kube-apiserver, kube-proxy, helm, controller-gen or golangci-lint, in
// the version that the go.mod of its folder below e2e/ pins: from the folder KUBEBUILDER_ASSETS,
// else from the cache folder, else downloaded from where its project publishes it, else built.
// repository is the root of the source tree. progress
// gets a line every few seconds while it builds.
func Tool(ctx context.Context, repository, name string, progress func(line string)) (string, error) {
	t, ok := tools[name]
	if !ok {
		return "", fmt.Errorf("no tool %q; there are %s", name, strings.Join(slices.Sorted(maps.Keys(tools)), ", "))
	}
	return t.ensure(ctx, name, repository, progress)
}

// Prepare fetches and builds what tests and the lab need and this machine does not have: Debian
// packages, kube-apiserver, kube-proxy, helm, controller-gen, MetalLB. Later it has nothing to do.
func Prepare(ctx context.Context, repository string, progress func(line string)) error {
	var errs []error
	for _, packages := range []map[string]string{debianPackages, routerPackages, balancerPackages,
		modulePackages} {
		errs = append(errs, ensurePrograms(ctx, packages, progress))
	}
	for _, name := range []string{"kube-apiserver", "kube-proxy", "helm", "controller-gen"} {
		_, err := Tool(ctx, repository, name, progress)
		errs = append(errs, err)
	}
	if _, _, err := MetalLB(ctx, progress); err != nil { // its tests are skipped
		progress(err.Error())
	}
	if err := ensurePrograms(ctx, browserPackages, progress); err != nil { // its test is skipped
		progress(err.Error())
	}
	return errors.Join(errs...)
}

// built has what this process has built: a second lab of a test's process starts from the same
// sources.
var built struct {
	mu    sync.Mutex
	paths map[string]bool
}

// buildOnce runs a command that builds path, unless this process has done so. Processes wait for
// one another.
func buildOnce(ctx context.Context, path, what string, cmd *exec.Cmd, progress func(string)) error {
	built.mu.Lock()
	defer built.mu.Unlock()
	if built.paths[path] {
		return nil
	}
	unlock, err := waitForFile(ctx, path+".lock", progress)
	if err != nil {
		return err
	}
	defer unlock()
	if err := watched(ctx, progress, what, cmd); err != nil {
		return err
	}
	if built.paths == nil {
		built.paths = map[string]bool{}
	}
	built.paths[path] = true
	return nil
}

// assetFromEnvironment returns the path of a program in the folder KUBEBUILDER_ASSETS, or "".
func assetFromEnvironment(program string) string {
	path := filepath.Join(os.Getenv("KUBEBUILDER_ASSETS"), program)
	if info, err := os.Stat(path); os.Getenv("KUBEBUILDER_ASSETS") == "" || err != nil || info.IsDir() {
		return ""
	}
	return path
}

func (t tool) ensure(ctx context.Context, name, repo string, progress func(string)) (string, error) {
	if path := assetFromEnvironment(name); path != "" {
		return path, nil
	}
	version, err := t.version(repo)
	if err != nil {
		return "", err
	}
	kept, err := cache.Folder()
	if err != nil {
		return "", err
	}
	dir := filepath.Join(kept, filepath.Base(t.Folder)+"-"+version)
	path := filepath.Join(dir, name)
	if _, err := os.Stat(path); err == nil {
		return path, nil
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	unlock, err := waitForFile(ctx, filepath.Join(dir, "lock"), progress)
	if err != nil {
		return "", err
	}
	defer unlock()
	if _, err := os.Stat(path); err == nil { // another process put it there meanwhile
		return path, nil
	}
	partial := path + ".partial"
	if t.downloaded(ctx, name, version, partial, progress) {
		return path, os.Rename(partial, path)
	}
	argv := []string{"build", "-C", filepath.Join(repo, t.Folder), "-v"}
	if t.Test {
		argv = []string{"test", "-C", filepath.Join(repo, t.Folder), "-c", "-vet=off"}
	}
	argv = append(argv, "-trimpath", "-ldflags", t.Flags(version), "-o", partial, t.Package)
	cmd := exec.CommandContext(ctx, "go", argv...)
	if t.Static {
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	}
	what := fmt.Sprintf("building %s %s, once", name, version)
	if err := watched(ctx, progress, what, cmd); err != nil {
		return "", err
	}
	return path, os.Rename(partial, path)
}

// downloaded downloads the program, and reports whether that succeeded. It says why not.
func (t tool) downloaded(ctx context.Context, name, version, to string, progress func(string)) bool {
	if t.Published == nil || os.Getenv(offlineVariable) != "" {
		return false
	}
	what := fmt.Sprintf("downloading %s %s, once", name, version)
	progress(what)
	if err := t.Published(version, runtime.GOARCH).download(ctx, to, what, progress); err != nil {
		progress(fmt.Sprintf("cannot download %s (%v); building it instead", name, err))
		return false
	}
	return true
}

// version reads the pinned version of the tool from its go.mod.
func (t tool) version(repo string) (string, error) {
	path := filepath.Join(repo, t.Folder, "go.mod")
	text, err := os.ReadFile(path)
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(text)) {
		if fields := strings.Fields(strings.TrimPrefix(line, "require ")); len(fields) >= 2 && fields[0] == t.Module {
			return fields[1], nil
		}
	}
	return "", fmt.Errorf("%s does not require %s", path, t.Module)
}

// waitForFile locks path, waiting for whoever holds it.
func waitForFile(ctx context.Context, path string, progress func(string)) (unlock func(), err error) {
	for start := time.Now(); ; {
		f, err := lockFile(path)
		if err == nil {
			return func() { f.Close() }, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) {
			return nil, err
		}
		progress(fmt.Sprintf("waiting for another build of the same, %s", seconds(time.Since(start))))
		select {
		case <-time.After(progressEvery):
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// watched runs a slow command and says, ever more rarely, that it is still running, and how many lines
// it has written ("go build -v" writes one a package). Its output is shown only if it fails.
func watched(ctx context.Context, progress func(string), what string, cmd *exec.Cmd) error {
	progress(what)
	var out outputCounter
	cmd.Stdout, cmd.Stderr = &out, &out
	start := time.Now()
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	wait := progressEvery
	tick := time.NewTimer(wait)
	defer tick.Stop()
	for {
		select {
		case err := <-done:
			if err != nil {
				return fmt.Errorf("%s: %w\n%s", what, errors.Join(err, ctx.Err()), out.tail())
			}
			return nil
		case <-tick.C:
			progress(fmt.Sprintf("%s: %s%s", what, seconds(time.Since(start)), out.String()))
			wait = min(2*wait, progressRarely)
			tick.Reset(wait)
		}
	}
}

// outputCounter keeps what a command writes and counts its lines.
type outputCounter struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (o *outputCounter) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.Write(p)
}

// String says how many lines there are.
func (o *outputCounter) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	if n := bytes.Count(o.text.Bytes(), []byte("\n")); n > 0 {
		return fmt.Sprintf(" (%d lines of output)", n)
	}
	return ""
}

// tail returns the last lines.
func (o *outputCounter) tail() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	var lines []string
	for s := bufio.NewScanner(io.Reader(&o.text)); s.Scan(); {
		lines = append(lines, s.Text())
	}
	var b bytes.Buffer
	for _, line := range lines[max(0, len(lines)-30):] {
		fmt.Fprintln(&b, "  "+line)
	}
	return b.String()
}

func seconds(d time.Duration) string { return fmt.Sprintf("%.0f s", d.Seconds()) }

// FindRepository returns the root of the source tree that contains dir: where the module of
// Landfall has its go.mod.
func FindRepository(dir string) (string, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return "", err
	}
	for start := dir; ; dir = filepath.Dir(dir) {
		text, err := os.ReadFile(filepath.Join(dir, "go.mod"))
		if err == nil && strings.HasPrefix(string(text), "module "+modulePath+"\n") {
			return dir, nil
		}
		if dir == filepath.Dir(dir) {
			return "", fmt.Errorf("%s is not inside the source tree of %s", start, modulePath)
		}
	}
}

const modulePath = "github.com/landfall-lb/landfall"
