package vm

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// nftModules are what the rules of the proxy need beside nf_tables. For each one that is missing, the kernel starts
// modprobe in the middle of a transaction and begins the transaction anew. On an emulated processor that takes minutes,
// which the programs under test would wait for.
var nftModules = []string{
	"nf_conntrack_netlink", "nft_chain_nat", "nft_ct", "nft_dup_ipv4", "nft_dup_ipv6", "nft_fib_ipv4", "nft_fib_ipv6",
	"nft_hash", "nft_limit", "nft_masq", "nft_nat", "nft_numgen", "nft_redir", "nft_reject_ipv4", "nft_reject_ipv6",
}

// reportPort is where the virtual machine reports; the kernel has the first serial port.
const reportPort = "/dev/ttyS1"

// Guest is what the first process of the virtual machine does: it runs the plan, reports, and
// switches the machine off. It does not return.
func Guest() {
	if err := follow(); err != nil {
		fmt.Println("landfall-vm:", err) // on the console
	}
	unix.Sync()
	err := unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)
	fmt.Println("landfall-vm: switch off:", err)
	select {}
}

// follow prepares the machine and runs the plan.
func follow() error {
	if err := mountAll(); err != nil {
		return err
	}
	port, err := openPort(reportPort)
	if err != nil {
		return err
	}
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		return err
	}
	reports := &reporter{to: json.NewEncoder(port)}
	reports.say(report{Kernel: unix.ByteSliceToString(name.Release[:])})
	text, err := os.ReadFile("/" + planFile)
	if err != nil {
		return err
	}
	var plan []Program
	if err := json.Unmarshal(text, &plan); err != nil {
		return err
	}
	if err := errors.Join(os.Setenv("PATH", "/usr/sbin:/usr/bin:/sbin:/bin"), os.Setenv("HOME", "/root"),
		command("depmod", "-a"), loadModules(),
		command("ip", "link", "set", "lo", "up")); err != nil {
		return err
	}
	for _, p := range plan {
		started := time.Now()
		err := reports.run(p)
		ended := report{Program: p.Name, Ended: true, Elapsed: time.Since(started)}
		if err != nil {
			ended.Error = err.Error()
		}
		reports.say(ended)
	}
	return nil
}

// loadModules loads those of nftables, and says on the console how long that took.
func loadModules() error {
	started := time.Now()
	err := command(append([]string{"modprobe", "-a"}, nftModules...)...)
	fmt.Println("landfall-vm: loaded the modules of nftables in", time.Since(started).Round(time.Millisecond))
	return err
}

func mountAll() error {
	for _, m := range []struct{ kind, at string }{
		{"proc", "/proc"}, {"sysfs", "/sys"}, {"devtmpfs", "/dev"}, {"tmpfs", "/run"}, {"tmpfs", "/tmp"},
		{"bpf", "/sys/fs/bpf"},
	} {
		if err := os.MkdirAll(m.at, 0o755); err != nil {
			return err
		}
		if err := unix.Mount(m.kind, m.at, m.kind, 0, ""); err != nil {
			return fmt.Errorf("mount %s: %w", m.at, err)
		}
	}
	return nil
}

// openPort opens a serial port that passes on every byte as it is.
func openPort(path string) (*os.File, error) {
	port, err := os.OpenFile(path, os.O_WRONLY|unix.O_NOCTTY, 0)
	if err != nil {
		return nil, err
	}
	settings, err := unix.IoctlGetTermios(int(port.Fd()), unix.TCGETS)
	if err == nil {
		settings.Oflag &^= unix.OPOST
		err = unix.IoctlSetTermios(int(port.Fd()), unix.TCSETS, settings)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return port, nil
}

// command runs a program that is not under test.
func command(argv ...string) error {
	out, err := exec.Command(argv[0], argv[1:]...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s: %w: %s", filepath.Base(argv[0]), err, out)
	}
	return nil
}

// reporter writes reports. It is safe for concurrent use.
type reporter struct {
	mu sync.Mutex
	to *json.Encoder
}

func (r *reporter) say(what report) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.to.Encode(what); err != nil {
		fmt.Println("landfall-vm: report:", err)
	}
}

// output passes on what a program prints.
type output struct {
	reports *reporter
	program string
}

var _ io.Writer = output{}

func (o output) Write(text []byte) (int, error) {
	o.reports.say(report{Program: o.program, Output: string(text)})
	return len(text), nil
}

// run runs a program to its end, or to the end of its time.
func (r *reporter) run(p Program) error {
	ctx, cancel := context.WithTimeoutCause(context.Background(), p.Timeout,
		fmt.Errorf("not done after %s", p.Timeout))
	defer cancel()
	cmd := exec.CommandContext(ctx, p.Argv[0], p.Argv[1:]...)
	cmd.Dir, cmd.Env = p.Dir, append(os.Environ(), p.Env...)
	cmd.Stdout, cmd.WaitDelay = output{r, p.Name}, 10*time.Second
	cmd.Stderr = cmd.Stdout
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	err := cmd.Run()
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}
