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
	if err := buildMetalLB(ctx, programs, definitions, progress); err != nil {
		return "", "", fmt.Errorf("build MetalLB %s: %w", metallbVersion, err)
	}
	return programs, definitions, nil
}

func buildMetalLB(ctx context.Context, programs, definitions string, progress func(string)) error {
	module, err := os.MkdirTemp("", "landfall-metallb-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(module) }()
	text := "module metallb\n\ngo 1.24\n\nrequire " + metallbModule + " " + metallbVersion + "\n"
	if err := os.WriteFile(filepath.Join(module, "go.mod"), []byte(text), 0o600); err != nil {
		return err
	}
	for _, program := range []string{"controller", "speaker"} {
		cmd := exec.CommandContext(ctx, "go", "build", "-C", module, "-mod=mod", "-v", "-trimpath", "-ldflags", "-s -w",
			"-o", filepath.Join(programs, program), metallbModule+"/"+program)
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOWORK=off")
		what := fmt.Sprintf("building the %s of MetalLB %s, once", program, metallbVersion)
		if err := watched(ctx, progress, what, cmd); err != nil {
			return err
		}
	}
	cmd := exec.CommandContext(ctx, "go", "list", "-C", module, "-mod=mod", "-m", "-json", metallbModule)
	cmd.Env = append(os.Environ(), "GOWORK=off")
	out, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("go list: %w", err)
	}
	var listed struct{ Dir string }
	if err := json.Unmarshal(out, &listed); err != nil {
		return err
	}
	files, err := filepath.Glob(filepath.Join(listed.Dir, "config/crd/bases/*.yaml"))
	if err != nil || len(files) == 0 {
		return fmt.Errorf("no definitions in %s: %w", listed.Dir, err)
	}
	manifest := filepath.Join(listed.Dir, "config/manifests", MetalLBManifest)
	for _, file := range append(files, manifest) {
		text, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		to := definitions
		if file == manifest {
			to = programs
		}
		if err := os.WriteFile(filepath.Join(to, filepath.Base(file)), text, 0o600); err != nil {
			return err
		}
	}
	return nil
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
