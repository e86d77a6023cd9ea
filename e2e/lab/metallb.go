package lab

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/landfall-lb/landfall/e2e/cache"
)

// metallbVersion is the release of MetalLB that migrations are tested with.
const metallbVersion = "v0.14.9"

const metallbModule = "go.universe.tf/metallb"

// MetalLBManifest is the file beside MetalLB's programs that installs it, without FRR.
const MetalLBManifest = "metallb-native.yaml"

// Files of MetalLB's modes with FRR, in the folder that [MetalLBFRR] returns: manifests, and the program that gives
// FRR a new configuration.
const (
	MetalLBFRRManifest    = "metallb-frr.yaml"
	MetalLBFRRK8sManifest = "metallb-frr-k8s.yaml"
	MetalLBReloader       = "frr-reloader.sh"
)

// MetalLB returns the folder with MetalLB's programs, controller and speaker, and the folder of its
// custom resource definitions. They are built from its module, in a module of its own outside the
// source tree, if the cache folder does not have them.
func MetalLB(ctx context.Context, progress func(line string)) (programs, definitions string, err error) {
	kept, err := cache.Folder()
	if err != nil {
		return "", "", err
	}
	programs = filepath.Join(kept, "metallb-"+metallbVersion)
	definitions = filepath.Join(programs, "crds")
	complete := filepath.Join(programs, MetalLBManifest) // the last file that is written
	if _, err := os.Stat(complete); err == nil {
		return programs, definitions, nil
	}
	if err := os.MkdirAll(definitions, 0o755); err != nil {
		return "", "", err
	}
	unlock, err := waitForFile(ctx, filepath.Join(programs, "lock"), progress)
	if err != nil {
		return "", "", err
	}
	defer unlock()
	if _, err := os.Stat(complete); err == nil { // another process has built it meanwhile
		return programs, definitions, nil
	}
	if err := buildMetalLB(ctx, programs, definitions, complete, progress); err != nil {
		return "", "", fmt.Errorf("build MetalLB %s: %w", metallbVersion, err)
	}
	return programs, definitions, nil
}

// MetalLBFRR adds to MetalLB's programs what its modes with FRR need, and returns the folder: manifests, the
// reloader, the daemon of frr-k8s, and its custom resource definitions in a folder frr-k8s. It installs
// what Debian has of FRR.
func MetalLBFRR(ctx context.Context, progress func(line string)) (folder string, err error) {
	folder, _, err = MetalLB(ctx, progress)
	if err == nil {
		err = ensurePrograms(ctx, reloadPackages, progress)
	}
	if err != nil {
		return "", err
	}
	unlock, err := waitForFile(ctx, filepath.Join(folder, "lock"), progress)
	if err != nil {
		return "", err
	}
	defer unlock()
	definitions := filepath.Join(folder, "frr-k8s-crds")
	if _, err := os.Stat(definitions); err == nil { // the last that is written
		return folder, nil
	}
	if err := buildFRRK8s(ctx, folder, definitions, progress); err != nil {
		return "", fmt.Errorf("build frr-k8s: %w", err)
	}
	return folder, nil
}

// buildFRRK8s builds the daemon of frr-k8s in the version that MetalLB is built with.
func buildFRRK8s(ctx context.Context, folder, definitions string, progress func(string)) error {
	const frrk8s = "github.com/metallb/frr-k8s"
	module, err := newMetalLBModule()
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(module) }()
	metallb, err := moduleFolder(ctx, module, metallbModule)
	if err != nil {
		return err
	}
	for _, file := range []string{"config/manifests/" + MetalLBFRRManifest, "config/manifests/" + MetalLBFRRK8sManifest,
		"frr-tools/reloader/" + MetalLBReloader} {
		if err := copyFile(filepath.Join(metallb, file), filepath.Join(folder, filepath.Base(file))); err != nil {
			return err
		}
	}
	if err := buildOf(ctx, module, "frr-k8s", frrk8s+"/cmd", folder, progress); err != nil {
		return err
	}
	dir, err := moduleFolder(ctx, module, frrk8s)
	if err != nil {
		return err
	}
	files, err := filepath.Glob(filepath.Join(dir, "config/crd/bases/*.yaml"))
	if err != nil || len(files) == 0 {
		return fmt.Errorf("no definitions in %s: %w", dir, err)
	}
	whole, err := os.MkdirTemp(folder, "crds-")
	if err != nil {
		return err
	}
	for _, file := range files {
		if err := copyFile(file, filepath.Join(whole, filepath.Base(file))); err != nil {
			return err
		}
	}
	return os.Rename(whole, definitions)
}

// newMetalLBModule makes a folder with a module that requires MetalLB.
func newMetalLBModule() (folder string, err error) {
	if folder, err = os.MkdirTemp("", "landfall-metallb-"); err != nil {
		return "", err
	}
	text := "module metallb\n\ngo 1.24\n\nrequire " + metallbModule + " " + metallbVersion + "\n"
	return folder, os.WriteFile(filepath.Join(folder, "go.mod"), []byte(text), 0o600)
}

// buildOf builds a program of a package that the module requires, directly or not.
func buildOf(ctx context.Context, module, program, of, to string, progress func(string)) error {
	cmd := exec.CommandContext(ctx, "go", "build", "-C", module, "-mod=mod", "-v", "-trimpath", "-ldflags", "-s -w",
		"-o", filepath.Join(to, program), of)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOWORK=off")
	return watched(ctx, progress, fmt.Sprintf("building the %s of MetalLB %s, once", program, metallbVersion), cmd)
}

// moduleFolder returns where the sources of a module are that another requires.
func moduleFolder(ctx context.Context, module, of string) (string, error) {
	cmd := exec.CommandContext(ctx, "go", "list", "-C", module, "-mod=mod", "-m", "-json", of)
	cmd.Env = append(os.Environ(), "GOWORK=off")
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("go list: %w", err)
	}
	var listed struct{ Dir string }
	err = json.Unmarshal(out, &listed)
	return listed.Dir, err
}

func buildMetalLB(ctx context.Context, programs, definitions, complete string, progress func(string)) error {
	module, err := newMetalLBModule()
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(module) }()
	for _, program := range []string{"controller", "speaker"} {
		if err := buildOf(ctx, module, program, metallbModule+"/"+program, programs, progress); err != nil {
			return err
		}
	}
	dir, err := moduleFolder(ctx, module, metallbModule)
	if err != nil {
		return err
	}
	files, err := filepath.Glob(filepath.Join(dir, "config/crd/bases/*.yaml"))
	if err != nil || len(files) == 0 {
		return fmt.Errorf("no definitions in %s: %w", dir, err)
	}
	for _, file := range files {
		if err := copyFile(file, filepath.Join(definitions, filepath.Base(file))); err != nil {
			return err
		}
	}
	return copyFile(filepath.Join(dir, "config/manifests", MetalLBManifest), complete)
}

// Program is another project's program on a host. See [Lab.StartProgram].
type Program struct{ process *process }

// StartProgram starts a program on a host, as root, with the administrator's kubeconfig in
// $KUBECONFIG and these variables (NAME=VALUE). name is that of its log.
func (l *Lab) StartProgram(name, host string, argv []string, env ...string) (*Program, error) {
	p, err := l.startProcess(name, command{Host: host, Argv: argv, Env: append(env, "KUBECONFIG="+l.Kubeconfig())})
	if err != nil {
		return nil, err
	}
	return &Program{p}, nil
}

// Running reports whether the program has not ended.
func (p *Program) Running() bool { return p.process.running() }

// Stop sends SIGTERM, and SIGKILL after grace, and waits until the program has ended.
func (p *Program) Stop(grace time.Duration) {
	if p.process.running() {
		_ = p.process.stop(grace) // how it ends is its own affair
	}
}

// ApplyFolder applies the manifests in a folder.
func (l *Lab) ApplyFolder(ctx context.Context, folder string) error {
	files, err := filepath.Glob(filepath.Join(folder, "*.yaml"))
	if err != nil {
		return err
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		if err := l.ApplyYAML(ctx, string(text)); err != nil {
			return fmt.Errorf("%s: %w", filepath.Base(file), err)
		}
	}
	return nil
}
