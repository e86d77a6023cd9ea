package vm

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/landfall-lb/landfall/release/image"
)

// Machine is a virtual machine that has not been started.
type Machine struct {
	// Files are those of Debian packages; see [System].
	Files []image.File
	// Programs are files of the virtual machine beside them.
	Programs []image.File
	// Init is the path of a program, linked without libraries, that calls [Guest] as process 1.
	Init string
	Plan []Program
	// Folder gets what the machine is started from, and the kernel's log.
	Folder string
	// CPUs and Memory (MiB) of the machine.
	CPUs, Memory int
	// Accelerator is qemu's; see [Accelerator].
	Accelerator string
	// Heard is called for each line that a program prints.
	Heard func(program, line string)
}

// System returns the files of Debian packages that the virtual machine consists of. The kernel and
// the tools come each from a suite of Debian, or where it is "" from what this machine's apt is
// configured for. The packages are kept in folders below folder, one for each use of a suite.
func System(ctx context.Context, folder, kernel, tools string) ([]image.File, error) {
	root := func(use, suite string, names ...string) ([]image.File, error) {
		return image.Root(ctx, "amd64", filepath.Join(folder, use+suite), suite, names...)
	}
	if kernel == tools {
		return root("vm-", kernel, append([]string{kernelPackage}, packages...)...)
	}
	files, err := root("vm-tools-", tools, packages...)
	if err != nil {
		return nil, err
	}
	others, err := root("vm-kernel-", kernel, kernelPackage)
	if err != nil {
		return nil, err
	}
	return append(files, slices.DeleteFunc(others, func(f image.File) bool {
		return !strings.HasPrefix(f.Path, "boot/") && !strings.HasPrefix(merged(f.Path), modulesDir)
	})...), nil
}

// Times that the machine may take.
const (
	bootTime = 5 * time.Minute // until it says that it is up
	restTime = 2 * time.Minute // for all else that is not in the plan
	// emulated is how many times these, and the times of the plan, an emulated machine may take: its clock is not ours.
	emulated = 8
)

// Run starts the machine and waits until it has switched itself off, or its time is over: that of
// all programs together, and some for the start.
func (m Machine) Run(ctx context.Context) (Results, error) {
	files, err := m.write(ctx)
	if err != nil {
		return Results{}, err
	}
	up, limit := bootTime, bootTime+restTime
	for _, p := range m.Plan {
		limit += p.Timeout
	}
	if m.emulated() {
		up, limit = emulated*up, emulated*limit
	}
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("the virtual machine has not ended after %s", limit))
	defer cancel()
	cmd := exec.CommandContext(ctx, "qemu-system-x86_64", m.arguments(files)...)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		return Results{}, err
	}
	if err := cmd.Start(); err != nil {
		return Results{}, err
	}
	boot := time.AfterFunc(up, cancel)
	results, err := collect(out, m.Plan, func() { boot.Stop() }, m.Heard)
	if err != nil {
		cancel() // nobody reads any more
	}
	ended := cmd.Wait()
	switch {
	case err != nil:
		return results, err
	case results.Kernel == "" && ctx.Err() != nil:
		return results, fmt.Errorf("the virtual machine is not up after %s; its console: %s", up, files.console)
	case ctx.Err() != nil:
		return results, fmt.Errorf("%w; its console: %s", context.Cause(ctx), files.console)
	case ended != nil:
		return results, fmt.Errorf("qemu: %w: %s", ended, stderr.String())
	}
	return results, nil
}

// files are those that qemu is given.
type files struct{ kernel, initramfs, console string }

// write puts what the machine is started from into its folder.
func (m Machine) write(ctx context.Context) (files, error) {
	in := func(name string) string { return filepath.Join(m.Folder, name) }
	f := files{in("vmlinuz"), in("initramfs"), in("console")}
	chosen, kernel, _, err := system(m.Files)
	if err == nil {
		chosen, err = unpackModules(ctx, chosen)
	}
	if err != nil {
		return f, err
	}
	init, err := os.ReadFile(m.Init)
	if err != nil {
		return f, err
	}
	if err := errors.Join(os.MkdirAll(m.Folder, 0o755), os.WriteFile(f.kernel, kernel, 0o644)); err != nil {
		return f, err
	}
	to, err := os.Create(f.initramfs)
	if err != nil {
		return f, err
	}
	buffered := bufio.NewWriterSize(to, 1<<20)
	err = writeInitramfs(buffered, append(chosen, m.Programs...), init, m.Plan)
	return f, errors.Join(err, buffered.Flush(), to.Close())
}

// arguments returns those of qemu. A kernel that panics ends the machine.
func (m Machine) arguments(f files) []string {
	argv := []string{
		"-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-nic", "none", "-machine", "q35",
		"-m", fmt.Sprint(m.Memory), "-smp", fmt.Sprint(m.CPUs), "-accel", m.Accelerator, "-cpu", "max",
		"-kernel", f.kernel, "-initrd", f.initramfs,
		"-append", "console=ttyS0 panic=-1 loglevel=4 mitigations=off",
		"-serial", "file:" + f.console, "-serial", "stdio",
	}
	if m.emulated() {
		// The clock of the machine counts instructions, a nanosecond each, and goes on at once while there are none to
		// run. So to programs the machine is as fast as others, however slow or busy this one is: no time limit of
		// theirs ends early.
		argv = append(argv, "-icount", "shift=0,sleep=off", "-rtc", "clock=vm")
	}
	return argv
}

// emulated reports whether the processor of the machine is emulated.
func (m Machine) emulated() bool { return strings.HasPrefix(m.Accelerator, "tcg") }

// Accelerators of qemu.
const (
	KVM = "kvm"
	// TCG emulates every instruction, those of all processors in one thread, so that they can be counted.
	TCG = "tcg,thread=single"
)

// Accelerator returns the fastest accelerator that this machine has. Where the processor itself has
// no instructions for virtual machines, /dev/kvm may be there all the same, and a machine hangs.
func Accelerator() string {
	device, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0)
	if err != nil {
		return TCG
	}
	device.Close()
	text, err := os.ReadFile("/proc/cpuinfo")
	if err != nil || !virtualizes(string(text)) {
		return TCG
	}
	return KVM
}

// virtualizes reports whether the text of /proc/cpuinfo is of a processor that runs virtual machines.
func virtualizes(cpuinfo string) bool {
	for line := range strings.Lines(cpuinfo) {
		if name, flags, _ := strings.Cut(line, ":"); strings.TrimSpace(name) == "flags" {
			return slices.ContainsFunc(strings.Fields(flags), func(flag string) bool { return flag == "vmx" || flag == "svm" })
		}
	}
	return false
}
