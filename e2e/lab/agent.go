package lab

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Agent is one container of the chart on one node: a process in the node's network namespace, with
// the arguments, variables, volumes, capabilities, user and ServiceAccount that the chart gives it.
// Its methods may be called from several goroutines.
type Agent struct {
	// Program is the container's name: controller, speaker or proxy.
	Program string
	// Node is the name of the node that it runs on.
	Node string

	lab          *Lab
	spec         command
	grace        time.Duration
	ready        string            // URL of the readiness probe; "" if there is none
	readyCommand []string          // command of the readiness probe; nil if there is none
	mounts       map[string]string // what the container's paths are outside
	mu           sync.Mutex
	process      *process
}

// Agent returns an agent by the name of its container and its node, or nil.
func (l *Lab) Agent(program, node string) *Agent {
	for _, a := range l.agents {
		if a.Program == program && a.Node == node {
			return a
		}
	}
	return nil
}

// Agents returns all agents of a program, in the order of the nodes.
func (l *Lab) Agents(program string) []*Agent {
	var agents []*Agent
	for _, a := range l.agents {
		if a.Program == program {
			agents = append(agents, a)
		}
	}
	return agents
}

// Name returns the name of the agent's log: node and program.
func (a *Agent) Name() string { return a.Node + "-" + a.Program }

// Log returns what the agent has written, over all its starts.
func (a *Agent) Log() string {
	text, err := os.ReadFile(a.lab.logPath(a.Name()))
	if err != nil {
		return err.Error()
	}
	return string(text)
}

// Start starts the process. It does not wait until the agent is ready: see [Agent.WaitReady].
func (a *Agent) Start() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.process != nil && a.process.running() {
		return fmt.Errorf("%s runs already", a.Name())
	}
	p, err := a.lab.startProcess(a.Name(), a.spec)
	if err == nil {
		a.process = p
	}
	return err
}

// StartOnFullDisk starts the process where no file can be made in the folder of its sockets. What the other programs
// of the node made there is out of its sight too.
func (a *Agent) StartOnFullDisk() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.process != nil && a.process.running() {
		return fmt.Errorf("%s runs already", a.Name())
	}
	spec := a.spec
	spec.Mounts = append(slices.Clone(spec.Mounts), mount{From: fullDisk, To: "/run/landfall"})
	p, err := a.lab.startProcess(a.Name(), spec)
	if err == nil {
		a.process = p
	}
	return err
}

// FillDisk lets the running process make no file in the folder of its sockets, where it no longer sees what is there.
// What it has open stays open.
func (a *Agent) FillDisk(ctx context.Context) error {
	return a.inMounts(ctx, "mount", "-t", "tmpfs", "-o", "nr_inodes=1", "none", "/run/landfall")
}

// FreeDisk undoes [Agent.FillDisk].
func (a *Agent) FreeDisk(ctx context.Context) error {
	return a.inMounts(ctx, "umount", "-l", "/run/landfall")
}

// inMounts runs a program with the mounts that the process has.
func (a *Agent) inMounts(ctx context.Context, argv ...string) error {
	pid, err := a.PID()
	if err != nil {
		return err
	}
	out, err := exec.CommandContext(ctx, "nsenter",
		append([]string{"--target", strconv.Itoa(pid), "--mount", "--"}, argv...)...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s: %s: %w: %s", a.Name(), strings.Join(argv, " "), err, strings.TrimSpace(string(out)))
	}
	return nil
}

// Boot has the process see another boot of the kernel, with an ID of its own, from its next start on.
func (a *Agent) Boot() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	file, err := os.CreateTemp(filepath.Dir(a.lab.logPath(a.Name())), "boot-")
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(file, file.Name())
	if err = errors.Join(err, file.Chmod(0o644), file.Close()); err != nil {
		return err
	}
	const id = "/proc/sys/kernel/random/boot_id"
	mounts := slices.DeleteFunc(slices.Clone(a.spec.Mounts), func(m mount) bool { return m.To == id })
	a.spec.Mounts = append(mounts, mount{From: file.Name(), To: id})
	return nil
}

// Stop sends SIGTERM and waits until the process has ended. A process that outlives the pod's grace
// period is killed. That, and an exit status other than 0, is an error.
func (a *Agent) Stop() error {
	return a.end(func(p *process) error { return p.stop(a.grace) })
}

// Kill sends SIGKILL and waits until the process is gone.
func (a *Agent) Kill() error { return a.end((*process).kill) }

func (a *Agent) end(how func(*process) error) error {
	p := a.current()
	if p == nil || !p.running() {
		return fmt.Errorf("%s does not run", a.Name())
	}
	if err := how(p); err != nil {
		return fmt.Errorf("%s: %w", a.Name(), err)
	}
	return nil
}

// Restart stops the agent and starts it again, as a rolling update does, and waits until it is
// ready.
func (a *Agent) Restart(ctx context.Context) error {
	if err := a.Stop(); err != nil {
		return err
	}
	if err := a.Start(); err != nil {
		return err
	}
	return a.WaitReady(ctx)
}

// Surge starts the agent a second time beside the process that runs, in a pod of its own, and stops that one once the
// second is ready, as a rolling update with a surge does.
func (a *Agent) Surge(ctx context.Context) error {
	before, err := a.startBeside()
	if err != nil {
		return err
	}
	if err := a.WaitReady(ctx); err != nil {
		return errors.Join(err, before.stop(a.grace))
	}
	return before.stop(a.grace)
}

// startBeside starts the process again, and returns the one that runs.
func (a *Agent) startBeside() (before *process, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if before = a.process; before == nil || !before.running() {
		return nil, fmt.Errorf("%s does not run", a.Name())
	}
	spec, mounts := a.spec, maps.Clone(a.mounts)
	spec.Mounts = slices.Clone(spec.Mounts)
	for i, m := range spec.Mounts {
		if !m.PodsOwn {
			continue
		}
		own, err := os.MkdirTemp(filepath.Dir(m.From), filepath.Base(m.From)+"-")
		if err == nil {
			err = os.Chmod(own, 0o777)
		}
		if err != nil {
			return nil, err
		}
		spec.Mounts[i].From, mounts[m.To] = own, own
	}
	p, err := a.lab.startProcess(a.Name(), spec)
	if err != nil {
		return nil, err
	}
	a.spec, a.mounts, a.process = spec, mounts, p
	return before, nil
}

// Signal sends a signal, such as SIGSTOP.
func (a *Agent) Signal(sig syscall.Signal) error {
	p := a.current()
	if p == nil {
		return fmt.Errorf("%s does not run", a.Name())
	}
	return p.signal(sig)
}

// LimitFiles lets the running process open no file or socket whose descriptor would be so or higher, and returns the
// limit that it had. Those that are open stay so.
func (a *Agent) LimitFiles(descriptors uint64) (before uint64, err error) {
	p := a.current()
	if p == nil {
		return 0, fmt.Errorf("%s does not run", a.Name())
	}
	// The kernel lets a process limit others of its own user; and root those of others only with CAP_SYS_RESOURCE.
	pid := p.cmd.Process.Pid
	folder, err := os.Stat(fmt.Sprintf("/proc/%d", pid))
	if err != nil {
		return 0, fmt.Errorf("limit of %s: %w", a.Name(), err)
	}
	owner := folder.Sys().(*syscall.Stat_t)
	prlimit := func(args ...string) (string, error) {
		cmd := exec.Command("prlimit", append([]string{"--pid", strconv.Itoa(pid)}, args...)...)
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: owner.Uid, Gid: owner.Gid}}
		out, err := cmd.CombinedOutput()
		if err != nil {
			return "", fmt.Errorf("limit of %s: %w: %s", a.Name(), err, out)
		}
		return strings.TrimSpace(string(out)), nil
	}
	text, err := prlimit("--nofile", "--output=SOFT", "--noheadings", "--raw")
	if err != nil {
		return 0, err
	}
	if before, err = strconv.ParseUint(text, 10, 64); err != nil {
		return 0, fmt.Errorf("limit of %s: %w", a.Name(), err)
	}
	_, err = prlimit(fmt.Sprintf("--nofile=%d:", descriptors))
	return before, err
}

// tracerPackages says where the program comes from by which system calls fail.
var tracerPackages = map[string]string{"strace": "strace"}

// netlinkErrors are the system calls of a process that fail: each third that sends to the kernel, which then has not
// seen the messages, and each seventh that receives, as when its buffer was too small. Sockets of other kinds use other
// calls, save those without a connection.
var netlinkErrors = []string{"-e", "trace=sendto,sendmsg,recvfrom,recvmsg",
	"-e", "inject=sendto,sendmsg:error=ENOBUFS:when=2+3", "-e", "inject=recvfrom,recvmsg:error=ENOBUFS:when=3+7"}

// FailNetlink has some system calls of the running process fail for a while, by which it speaks with the kernel over
// netlink, and returns how many did.
func (a *Agent) FailNetlink(ctx context.Context, while time.Duration) (failed int, err error) {
	pid, err := a.PID()
	if err != nil {
		return 0, err
	}
	if err := ensurePrograms(ctx, tracerPackages, a.lab.progress); err != nil {
		return 0, err
	}
	trace := a.lab.logPath(a.Name() + "-netlink")
	defer func() { _ = os.Remove(trace) }()
	ctx, cancel := context.WithTimeout(ctx, while)
	defer cancel()
	cmd := exec.CommandContext(ctx, "strace",
		append([]string{"-f", "-q", "-o", trace, "-p", strconv.Itoa(pid)}, netlinkErrors...)...)
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGINT) } // it lets the process go on
	out, err := cmd.CombinedOutput()
	if err != nil && ctx.Err() == nil {
		return 0, fmt.Errorf("%s: strace: %w: %s", a.Name(), err, strings.TrimSpace(string(out)))
	}
	text, err := os.ReadFile(trace)
	return strings.Count(string(text), "(INJECTED)"), err
}

// Running reports whether the process is there.
func (a *Agent) Running() bool {
	p := a.current()
	return p != nil && p.running()
}

// PID returns the number of the process that was started last.
func (a *Agent) PID() (int, error) {
	p := a.current()
	if p == nil || !p.running() {
		return 0, fmt.Errorf("%s does not run", a.Name())
	}
	return p.cmd.Process.Pid, nil
}

// Metrics returns the agent's metrics as text, from where its readiness is asked for. The chart must serve them to
// everybody, by its value metrics.secure.
func (a *Agent) Metrics(ctx context.Context) (string, error) {
	url := strings.TrimSuffix(a.ready, "/readyz") + "/metrics"
	code, text, err := a.lab.Get(ctx, a.Node, url)
	if err == nil && code != http.StatusOK {
		err = fmt.Errorf("%d %s", code, strings.TrimSpace(text))
	}
	if err != nil {
		return "", fmt.Errorf("%s: %s: %w", a.Name(), url, err)
	}
	return text, nil
}

func (a *Agent) current() *process {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.process
}

// WaitReady waits until the chart's readiness probe succeeds, at most a minute and a half.
func (a *Agent) WaitReady(ctx context.Context) error {
	return a.lab.waitReady(ctx, a.Program+" on "+a.Node, []*Agent{a})
}

// waitReady waits until all agents are ready. The error is about the first that is not, with the
// end of its log.
func (l *Lab) waitReady(ctx context.Context, what string, agents []*Agent) error {
	ready := 0
	err := WaitFor(ctx, l.progress, what, 90*time.Second, func(ctx context.Context) error {
		for ready < len(agents) {
			if err := agents[ready].probe(ctx); err != nil {
				return err
			}
			ready++
		}
		return nil
	})
	if err != nil && ready < len(agents) {
		return fmt.Errorf("%w\n%s", err, tail(l.logPath(agents[ready].Name()), 12))
	}
	return err
}

// probe does once what the kubelet does every few seconds.
func (a *Agent) probe(ctx context.Context) error {
	if !a.Running() {
		return permanent{fmt.Errorf("%s has ended", a.Name())}
	}
	if len(a.readyCommand) > 0 {
		_, err := a.Run(ctx, a.readyCommand[1:]...)
		return err
	}
	if a.ready == "" {
		return nil
	}
	code, body, err := a.lab.Get(ctx, a.Node, a.ready)
	if err == nil && code != http.StatusOK {
		err = fmt.Errorf("%s on %s: %d %s", a.Program, a.Node, code, strings.TrimSpace(body))
	}
	return err
}

// Get asks a speaker, a proxy or a relay for a path, such as /v1/status or /metrics, on its status
// socket: what root can do in the pod.
func (a *Agent) Get(ctx context.Context, path string) (string, error) {
	socket := a.StatusSocket()
	client := &http.Client{Timeout: requestTimeout, Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", socket)
		},
	}}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://agent"+path, nil)
	if err != nil {
		return "", err
	}
	resp, err := client.Do(req)
	if err != nil {
		return "", fmt.Errorf("%s: %w", a.Name(), err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s: %s %s", a.Name(), path, resp.Status, strings.TrimSpace(string(body)))
	}
	return string(body), err
}

// StatusSocket returns the path of the socket at which the agent tells its status, outside its container.
func (a *Agent) StatusSocket() string {
	name := a.Program
	if name == "relay" { // relay.sock is the proxy's
		name = "relay-status"
	}
	return a.Path("/run/landfall/" + name + ".sock")
}

// Path returns where a path below one of the container's mounts is outside, for a test to look at.
func (a *Agent) Path(inside string) string {
	a.mu.Lock()
	defer a.mu.Unlock()
	for to, from := range a.mounts {
		if rest, ok := strings.CutPrefix(inside, to); ok && (rest == "" || rest[0] == '/') {
			return from + rest
		}
	}
	return inside
}

// SetProgram lets later starts use another executable, as an upgrade does.
func (a *Agent) SetProgram(path string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.spec.Argv = append([]string{path}, a.spec.Argv[1:]...)
}

// SetFlag lets later starts have a flag with another value, as an upgrade with other values does.
func (a *Agent) SetFlag(name, value string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	argv := slices.DeleteFunc(slices.Clone(a.spec.Argv),
		func(arg string) bool { return strings.HasPrefix(arg, "--"+name+"=") })
	a.spec.Argv = append(argv, "--"+name+"="+value)
}

// Run runs the agent's program with other arguments in a container like the agent's, until it ends,
// and returns what it wrote: what "kubectl exec" does.
func (a *Agent) Run(ctx context.Context, args ...string) (string, error) {
	a.mu.Lock()
	c := a.spec
	a.mu.Unlock()
	c.Argv = append([]string{c.Argv[0]}, args...)
	out, err := a.lab.prepare(ctx, c).CombinedOutput()
	if err != nil {
		return string(out),
			fmt.Errorf("%s %s: %w: %s", a.Name(), strings.Join(args, " "), err, strings.TrimSpace(string(out)))
	}
	return string(out), nil
}

// program copies a program into the lab, as an image would hold it, and returns its path there: a
// later build does not touch a running lab, and programs that do not run as root can read it.
func (l *Lab) program(name string) (string, error) {
	path := l.state.path("bin", name)
	if _, err := os.Stat(path); err == nil {
		return path, nil
	}
	return path, copyFile(filepath.Join(l.options.Programs, name), path)
}

func copyFile(from, to string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_CREATE|os.O_WRONLY, 0o755)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	return errors.Join(err, out.Close())
}

// programsVariable names the folder with all programs of this source tree, landfall-lab included,
// that were built before: make sets it for the tests, so that they are built once for all of them.
const programsVariable = "LANDFALL_PROGRAMS"

// Programs returns the folder with Landfall's programs: the one that LANDFALL_PROGRAMS names, or
// else bin/ below repo, after "make build".
func Programs(ctx context.Context, repo string, progress func(line string)) (string, error) {
	if dir := os.Getenv(programsVariable); dir != "" {
		return dir, nil
	}
	cmd := exec.CommandContext(ctx, "make", "-C", repo, "--no-print-directory", "build")
	// "make demo" runs the lab: what it hands down is not for this make.
	cmd.Env = slices.DeleteFunc(os.Environ(),
		func(e string) bool { return strings.HasPrefix(e, "MAKE") || strings.HasPrefix(e, "MFLAGS=") })
	bin := filepath.Join(repo, "bin")
	if err := os.MkdirAll(bin, 0o755); err != nil {
		return "", err
	}
	return bin, buildOnce(ctx, filepath.Join(bin, "programs"), "building Landfall's programs", cmd, progress)
}
