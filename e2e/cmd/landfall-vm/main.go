// Landfall-vm runs tests on the kernel of Debian in a virtual machine: those that need what this
// machine's kernel does not have. See docs/design/kernels.md.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/landfall-lb/landfall/e2e/cache"
	"github.com/landfall-lb/landfall/e2e/vm"
	"github.com/landfall-lb/landfall/release/image"
)

const usage = `usage:
  landfall-vm [--only NAMES] [--run PATTERN] [--programs DIR] [--kube-proxy FILE] [--suite NAME]
              [--tools NAME] [--output DIR] [--accelerator NAME] [--cpus N]

Runs the suites below in a virtual machine with Debian's kernel; qemu-system-x86_64 must be there.
  --only NAMES    only these suites, separated by commas, in this order
  --run PATTERN   only tests that match the pattern of "go test", instead of the suites' own
  --programs DIR  where Landfall's programs are; bin by default
  --kube-proxy FILE
                  kube-proxy, which the suite ipvs starts
  --suite NAME    the suite of Debian whose kernel and tools it is, such as bullseye or trixie-backports; by default
                  what apt is configured for
  --tools NAME    the suite of Debian whose tools it is, if not the kernel's
  --output DIR    where the outputs go; bin/vm by default
  --accelerator NAME
                  qemu's; kvm by default where the processor can, else tcg,thread=single, which emulates the processor
  --cpus N        how many processors the machine has; by default 2 with kvm, else 1
suites:
`

// suite is a package whose tests run in the machine.
type suite struct {
	name, folder, pattern string
	// tags are build tags of the package's tests.
	tags    string
	timeout time.Duration
	// starts are programs that the tests start.
	starts []string
}

// suites are what runs when nothing else is said.
var suites = []suite{
	{name: "iptables", folder: "proxy/iptables", pattern: "^TestPackets$", timeout: 30 * time.Minute},
	{name: "nftables", folder: "proxy/nftables", pattern: "^TestPackets$", timeout: 30 * time.Minute},
	{name: "iptables-ipip", folder: "proxy/iptables", pattern: "^TestVM", tags: "vm", timeout: 20 * time.Minute},
	{name: "nftables-ipip", folder: "proxy/nftables", pattern: "^TestVM", tags: "vm", timeout: 20 * time.Minute},
	{name: "auto", folder: "proxy", pattern: "^TestVM", tags: "vm", timeout: 5 * time.Minute},
	{name: "l2", folder: "speaker/l2", pattern: "^TestVM", tags: "vm", timeout: 10 * time.Minute},
	{name: "rescue", folder: "proxy/rescue", pattern: "^TestContract5", timeout: 30 * time.Minute},
	{name: "direct", folder: "proxy", pattern: "^TestDirectForwarding", timeout: 30 * time.Minute},
	{name: "offload", folder: "proxy", pattern: "^TestOffload", tags: "vm", timeout: 20 * time.Minute},
	{name: "ipvs", folder: "e2e/vm", pattern: "^TestIPVS", tags: "vm", timeout: 60 * time.Minute,
		starts: []string{"kube-proxy", "landfall-proxy", "landfallctl"}},
	{name: "vrf", folder: "e2e/vm", pattern: "^TestVRF$", tags: "vm", timeout: 60 * time.Minute,
		starts: []string{"landfall-proxy", "landfall-speaker"}},
}

func main() {
	if os.Getpid() == 1 {
		vm.Guest()
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	err := run(ctx, os.Args[1:], os.Stdout)
	switch {
	case errors.Is(err, flag.ErrHelp):
		fmt.Print(usage)
		for _, s := range suites {
			fmt.Printf("  %-13s %s of ./%s\n", s.name, s.pattern, s.folder)
		}
	case err != nil:
		fmt.Fprintln(os.Stderr, "landfall-vm:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, out io.Writer) error {
	flags := flag.NewFlagSet("landfall-vm", flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	only := flags.String("only", "", "")
	pattern := flags.String("run", "", "")
	programs := flags.String("programs", "bin", "")
	kubeProxy := flags.String("kube-proxy", "", "")
	output := flags.String("output", "bin/vm", "")
	suite := flags.String("suite", "", "")
	tools := flags.String("tools", "", "")
	accelerator := flags.String("accelerator", vm.Accelerator(), "")
	cpus := flags.Int("cpus", 0, "")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if *cpus == 0 {
		if *cpus = 1; *accelerator == vm.KVM {
			*cpus = 2
		}
	}
	begun := time.Now()
	chosen, err := choose(*only, *pattern)
	if err != nil {
		return err
	}
	if _, err := exec.LookPath("qemu-system-x86_64"); err != nil {
		return fmt.Errorf("%w: install the package qemu-system-x86", err)
	}
	kept, err := cache.Folder()
	if err != nil {
		return err
	}
	m := vm.Machine{Folder: *output, CPUs: *cpus, Memory: 3072, Accelerator: *accelerator}
	if m.Init, err = os.Executable(); err != nil {
		return err
	}
	if m.Files, err = vm.System(ctx, kept, *suite, cmp.Or(*tools, *suite)); err != nil {
		return err
	}
	if err := os.MkdirAll(*output, 0o755); err != nil {
		return err
	}
	for _, s := range chosen {
		fmt.Fprintf(out, "building the tests of %s\n", s.folder)
		file, err := s.build(ctx, *output)
		if err != nil {
			return err
		}
		m.Programs, m.Plan = append(m.Programs, file), append(m.Plan, s.program())
	}
	for _, name := range started(chosen) {
		path := filepath.Join(*programs, name)
		if name == "kube-proxy" {
			path = *kubeProxy
		}
		content, err := os.ReadFile(path)
		if err != nil {
			return fmt.Errorf("the tests start %s: %w", name, err)
		}
		m.Programs = append(m.Programs, image.File{Path: "landfall/" + name, Mode: 0o755, Content: content})
	}
	logs := map[string]io.Writer{}
	for _, s := range chosen {
		log, err := os.Create(filepath.Join(*output, s.name+".log"))
		if err != nil {
			return err
		}
		defer log.Close()
		logs[s.name] = log
	}
	m.Heard = func(program, line string) {
		fmt.Fprintln(logs[program], line)
		if strings.HasPrefix(line, "--- ") || strings.HasPrefix(line, "=== RUN") {
			fmt.Fprintf(out, "%s: %s\n", program, line)
		}
	}
	results, err := m.Run(ctx)
	return errors.Join(err, tell(out, *output, results, time.Since(begun)))
}

// choose returns the suites of these names, in their order, or all.
func choose(names, pattern string) ([]suite, error) {
	chosen := slices.Clone(suites)
	if names != "" {
		chosen = nil
		for name := range strings.SplitSeq(names, ",") {
			i := slices.IndexFunc(suites, func(s suite) bool { return s.name == name })
			if i < 0 {
				return nil, fmt.Errorf("--only=%s: want some of the suites that --help lists", names)
			}
			chosen = append(chosen, suites[i])
		}
	}
	if pattern != "" {
		for i := range chosen {
			chosen[i].pattern = pattern
		}
	}
	return chosen, nil
}

// started returns the names of the programs that the tests of some suites start, each once.
func started(by []suite) (names []string) {
	for _, s := range by {
		names = append(names, s.starts...)
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// at is the suite's file in the machine, without the slash.
func (s suite) at() string { return "landfall/" + s.name + ".test" }

// build compiles the suite's tests.
func (s suite) build(ctx context.Context, folder string) (image.File, error) {
	to, err := filepath.Abs(filepath.Join(folder, s.name+".test"))
	if err != nil {
		return image.File{}, err
	}
	cmd := exec.CommandContext(ctx, "go", "test", "-c", "-trimpath", "-vet=off", "-ldflags=-s -w", "-tags="+s.tags,
		"-o", to, "./"+s.folder)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if text, err := cmd.CombinedOutput(); err != nil {
		return image.File{}, fmt.Errorf("build the tests of %s: %w\n%s", s.folder, err, text)
	}
	content, err := os.ReadFile(to)
	return image.File{Path: s.at(), Mode: 0o755, Content: content}, err
}

// program is how the suite is started.
func (s suite) program() vm.Program {
	// Test functions that run at the same time take each other's time where the processor is emulated.
	return vm.Program{Name: s.name, Dir: "/landfall", Timeout: s.timeout + time.Minute, Argv: []string{
		"/" + s.at(), "-test.v", "-test.run=" + s.pattern, "-test.timeout=" + s.timeout.String(), "-test.parallel=2"}}
}

// tell prints how the suites ended, and how long all took: packages, builds and the start of the machine too.
func tell(out io.Writer, folder string, results vm.Results, elapsed time.Duration) error {
	var errs []error
	const row = "%-13s %6v %6v %7v  %v\n"
	fmt.Fprintf(out, "\nLinux %s\n"+row, results.Kernel, "suite", "passed", "failed", "skipped", "time")
	var all [3]int
	for _, r := range results.Programs {
		var counts [3]int
		for i, mark := range []string{"--- PASS", "--- FAIL", "--- SKIP"} {
			counts[i] = strings.Count(r.Output, mark)
			all[i] += counts[i]
		}
		passed := counts[0]
		fmt.Fprintf(out, row, r.Program, passed, counts[1], counts[2], r.Elapsed.Round(time.Second))
		switch {
		case r.Err != nil:
			errs = append(errs, fmt.Errorf("%s: %w: see %s", r.Program, r.Err, filepath.Join(folder, r.Program+".log")))
		case passed == 0:
			errs = append(errs, fmt.Errorf("%s: no test ran", r.Program))
		}
	}
	fmt.Fprintf(out, row, "total", all[0], all[1], all[2], elapsed.Round(time.Second))
	return errors.Join(errs...)
}
