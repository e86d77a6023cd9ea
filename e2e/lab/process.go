package lab

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"
)

// mount binds From over To, for one process only. From may be [fullDisk]. It is a pod's own folder if each pod has
// another one.
type mount struct {
	From, To string
	PodsOwn  bool
}

// fullDisk is a file system that has no room for another file.
const fullDisk = "full"

// command is a program to run on a host.
type command struct {
	Host   string
	Argv   []string
	Env    []string // added to a minimal environment
	Mounts []mount
	// Privileges are arguments for setpriv; none leaves the process root with all capabilities.
	Privileges []string
}

const (
	minimalPath = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
	mountScript = `while [ "$1" != -- ]; do
case "$1" in
` + fullDisk + `) mount -t tmpfs -o nr_inodes=1 none "$2" || exit 125 ;;
*) mount --bind "$1" "$2" || exit 125 ;;
esac
shift 2; done; shift; exec "$@"`
)

// argv returns the command line that runs c in a network namespace and a mount namespace of its
// own, where runDir, unless empty, stands for /run. Each link of the chain replaces itself by the
// next, so that the process ID stays that of the program.
func (c command) argv(namespace, runDir string) []string {
	argv := []string{"ip", "netns", "exec", namespace}
	mounts := c.Mounts
	if runDir != "" {
		mounts = append([]mount{{From: runDir, To: "/run"}}, mounts...)
	}
	if len(mounts) > 0 {
		argv = append(argv, "sh", "-c", mountScript, "sh")
		for _, m := range mounts {
			argv = append(argv, m.From, m.To)
		}
		argv = append(argv, "--")
	}
	if len(c.Privileges) > 0 {
		argv = append(append(argv, "setpriv"), c.Privileges...)
	}
	return append(argv, c.Argv...)
}

func (l *Lab) prepare(ctx context.Context, c command) *exec.Cmd {
	argv := c.argv(l.state.namespace(c.Host), l.runDir(c.Host))
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Env = append([]string{minimalPath, "HOME=/root", l.state.mark}, c.Env...)
	cmd.Dir = "/"
	// A group of its own, so that ^C at the terminal reaches the lab's owner only.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	return cmd
}

// runDir returns the folder that processes on a host see as /run. Nodes have one each, as on
// machines of their own: the lock of iptables and the sockets between agents are there.
func (l *Lab) runDir(host string) string {
	if _, ok := l.nodes[host]; ok {
		return l.state.path("run", host)
	}
	return ""
}

// process is a program that runs, or ran, on a host.
type process struct {
	cmd  *exec.Cmd
	done chan struct{}
	err  error // how it ended; read after done
}

// startProcess starts c with its output appended to the log file of that name.
func (l *Lab) startProcess(name string, c command) (*process, error) {
	log, err := os.OpenFile(l.logPath(name), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	cmd := l.prepare(context.Background(), c)
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	p := &process{cmd: cmd, done: make(chan struct{})}
	go func() {
		p.err = cmd.Wait()
		close(p.done)
	}()
	return p, nil
}

func (p *process) running() bool {
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}

func (p *process) signal(sig os.Signal) error {
	if err := p.cmd.Process.Signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	return nil
}

// stop asks the process to end and waits; after grace it is killed, which is an error.
func (p *process) stop(grace time.Duration) error {
	if err := p.signal(syscall.SIGTERM); err != nil {
		return err
	}
	select {
	case <-p.done:
		return p.err
	case <-time.After(grace):
		return errors.Join(fmt.Errorf("still there %v after SIGTERM", grace), p.kill())
	}
}

// kill ends the process at once and waits until it is gone.
func (p *process) kill() error {
	if err := p.signal(syscall.SIGKILL); err != nil {
		return err
	}
	<-p.done
	return nil
}

func (l *Lab) logPath(name string) string { return l.state.path("logs", name+".log") }

// Logs returns the last n lines that each process wrote, by the name of its log.
func (l *Lab) Logs(n int) map[string]string {
	logs := map[string]string{}
	paths, _ := filepath.Glob(l.logPath("*"))
	for _, path := range paths {
		logs[strings.TrimSuffix(filepath.Base(path), ".log")] = tail(path, n)
	}
	return logs
}

// tail returns the last n lines of a file.
func tail(path string, n int) string {
	text, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimRight(string(text), "\n"), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}

// Exec runs a program on a host (a node, a pod, or one of [ClientName], [FarClientName],
// [RouterName]) and returns its output.
func (l *Lab) Exec(ctx context.Context, host string, argv ...string) (string, error) {
	out, err := l.prepare(ctx, command{Host: host, Argv: argv}).CombinedOutput()
	if err != nil {
		return string(out), fmt.Errorf("%s: %s: %w: %s", host, strings.Join(argv, " "), err, strings.TrimSpace(string(out)))
	}
	return string(out), nil
}

// Group runs functions side by side and joins what failed.
type Group struct {
	wg   sync.WaitGroup
	mu   sync.Mutex
	errs []error
}

// Run starts one.
func (g *Group) Run(f func() error) {
	g.wg.Go(func() {
		if err := f(); err != nil {
			g.mu.Lock()
			defer g.mu.Unlock()
			g.errs = append(g.errs, err)
		}
	})
}

// Wait waits for all, and returns what failed.
func (g *Group) Wait() error {
	g.wg.Wait()
	return errors.Join(g.errs...)
}

// LogFolder returns the folder with a log file for each process.
func (l *Lab) LogFolder() string { return l.state.path("logs") }
