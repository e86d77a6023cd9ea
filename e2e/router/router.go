// Package router starts real routers in network namespaces, FRR or BIRD, and asks them what they
// see. It serves the tests of the BGP and BFD actors and the lab.
package router

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// startTime is how long a router may take until it answers.
const startTime = 20 * time.Second

// Options of a router.
type Options struct {
	// Namespace is the name of a network namespace under /run/netns.
	Namespace string
	// Dir is an empty folder for the router's files. Paths of sockets are limited to 108 bytes.
	Dir string
	// Config is the configuration of bgpd, or of BIRD.
	Config string
	// RealTime gives the program that speaks BFD real-time priority, where the system allows it: in a
	// real router that is hardware, or has a processor of its own.
	RealTime bool
	// Env are variables (NAME=VALUE) for the router's programs, besides those of this process.
	Env []string
	// NoListen keeps FRR's bgpd from listening: it opens all sessions by itself.
	NoListen bool
	// Recover has BIRD take over what it left in the kernel, as after a restart.
	Recover bool
	// Zebra and BFD are the configurations of FRR's zebra and bfdd. bfdd runs only if BFD is not
	// empty, and bgpd only if Config is not.
	Zebra, BFD string
}

// Router is a running router.
type Router struct {
	o       Options
	ask     func(command string) []string // the command line that asks the router
	probe   string                        // a command that it answers when all that it needs is there
	daemons []daemon
	running map[string]*exec.Cmd
}

type daemon struct {
	name string
	argv []string
}

// find looks where Debian puts daemons, which is not in everyone's path.
func find(program string) (string, error) {
	for _, dir := range []string{"/usr/lib/frr", "/usr/sbin", "/usr/bin", "/sbin", "/bin"} {
		path := filepath.Join(dir, program)
		if _, err := os.Stat(path); err == nil {
			return path, nil
		}
	}
	return "", fmt.Errorf("no %s: install the Debian packages frr and bird2, as landfall-lab prepare does", program)
}

// StartFRR starts zebra, and those of bgpd and bfdd that are wanted.
func StartFRR(ctx context.Context, o Options) (*Router, error) {
	vtysh, err := find("vtysh")
	if err != nil {
		return nil, err
	}
	if err := giveToFRR(o.Dir); err != nil {
		return nil, err
	}
	r := &Router{o: o, running: map[string]*exec.Cmd{}, probe: "show bgp summary"}
	if o.Config == "" {
		r.probe = "show bfd peers"
	}
	r.ask = func(command string) []string { return []string{vtysh, "--vty_socket", o.Dir, "-c", command} }
	configs := map[string]string{"zebra": o.Zebra, "bgpd": o.Config, "bfdd": o.BFD}
	for _, name := range []string{"zebra", "bfdd", "bgpd"} {
		if name != "zebra" && configs[name] == "" {
			continue
		}
		program, err := find(name)
		if err != nil {
			return nil, err
		}
		config := filepath.Join(o.Dir, name+".conf")
		// Not --log, whose lines have no fractions of seconds.
		text := fmt.Sprintf("log file %s\nlog timestamp precision 3\n%s\n", filepath.Join(o.Dir, name+".log"), configs[name])
		if err := os.WriteFile(config, []byte(text), 0o644); err != nil {
			return nil, err
		}
		argv := []string{program, "-f", config, "-i", filepath.Join(o.Dir, name+".pid"),
			"-z", filepath.Join(o.Dir, "zserv.api"), "--vty_socket", o.Dir, "-P", "0"}
		if name == "zebra" { // else a changed IPv6 route is deleted, and added again some 40 µs later
			argv = append(argv, "--v6-rr-semantics")
		}
		if name == "bgpd" && o.NoListen {
			argv = append(argv, "-p", "0")
		}
		if name == "bfdd" {
			argv = append(argv, "--bfdctl", filepath.Join(o.Dir, "bfdd.sock"))
		}
		r.daemons = append(r.daemons, daemon{name, argv})
	}
	return r, r.start(ctx)
}

// giveToFRR makes the user that FRR's daemons run as the owner of dir.
func giveToFRR(dir string) error {
	frr, err := user.Lookup("frr")
	if err != nil {
		return err
	}
	uid, errUID := strconv.Atoi(frr.Uid)
	gid, errGID := strconv.Atoi(frr.Gid)
	return errors.Join(errUID, errGID, os.Chown(dir, uid, gid), os.Chmod(dir, 0o755))
}

// StartBIRD starts BIRD 2.
func StartBIRD(ctx context.Context, o Options) (*Router, error) {
	bird, err := find("bird")
	if err != nil {
		return nil, err
	}
	birdc, err := find("birdc")
	if err != nil {
		return nil, err
	}
	config, socket := filepath.Join(o.Dir, "bird.conf"), filepath.Join(o.Dir, "bird.ctl")
	if err := os.WriteFile(config, []byte(o.Config), 0o644); err != nil {
		return nil, err
	}
	r := &Router{o: o, running: map[string]*exec.Cmd{}, probe: "show status"}
	r.ask = func(command string) []string {
		return append([]string{birdc, "-s", socket}, strings.Fields(command)...)
	}
	argv := []string{bird, "-f", "-c", config, "-s", socket, "-P", filepath.Join(o.Dir, "bird.pid")}
	if o.Recover {
		argv = append(argv, "-R")
	}
	r.daemons = []daemon{{"bird", argv}}
	return r, r.start(ctx)
}

// start starts the router, and ends it if it does not answer.
func (r *Router) start(ctx context.Context) error {
	err := r.Launch(ctx)
	if err != nil {
		err = fmt.Errorf("%w\n%s", err, r.Logs())
		r.Close()
	}
	return err
}

// launchAll starts the daemons that are not running. FRR's others look for zebra's socket once, and
// again only ten seconds later: they are started when it is there.
func (r *Router) launchAll(ctx context.Context) error {
	for _, d := range r.daemons {
		if r.running[d.name] != nil {
			continue
		}
		socket := filepath.Join(r.o.Dir, "zserv.api")
		if d.name == "zebra" {
			_ = os.Remove(socket) // of one that was killed
		}
		if err := r.launch(d); err != nil {
			return err
		}
		for deadline := time.Now().Add(startTime); d.name == "zebra"; time.Sleep(5 * time.Millisecond) {
			if _, err := os.Stat(socket); err == nil {
				break
			} else if time.Now().After(deadline) || ctx.Err() != nil {
				return fmt.Errorf("zebra has no socket: %w", err)
			}
		}
	}
	return nil
}

// launch starts a daemon in the namespace. nsenter becomes the daemon, so that its process ID is
// the daemon's.
func (r *Router) launch(d daemon) error {
	out, err := os.OpenFile(filepath.Join(r.o.Dir, d.name+".out"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer out.Close()
	cmd := exec.Command("nsenter", append([]string{"--net=/run/netns/" + r.o.Namespace, "--"}, d.argv...)...)
	cmd.Stdout, cmd.Stderr = out, out
	cmd.Env = append(os.Environ(), r.o.Env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: 0}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start %s: %w", d.name, err)
	}
	if r.o.RealTime && (d.name == "bfdd" || d.name == "bird") {
		_ = unix.SchedSetAttr(cmd.Process.Pid, &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_RR,
			Priority: 10}, 0)
	}
	r.running[d.name] = cmd
	return nil
}

// Ask gives the router a command and returns its answer.
func (r *Router) Ask(ctx context.Context, command string) (string, error) {
	argv := r.ask(command)
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("%s: %w: %s%s", command, err, out.String(), errs.String())
	}
	return out.String(), nil
}

// JSON gives FRR a command that answers in JSON, and decodes the answer.
func (r *Router) JSON(ctx context.Context, command string, into any) error {
	answer, err := r.Ask(ctx, command)
	if err != nil {
		return err
	}
	if err := json.Unmarshal([]byte(answer), into); err != nil {
		return fmt.Errorf("%s: %w: %s", command, err, answer)
	}
	return nil
}

// Configure gives FRR lines of configuration.
func (r *Router) Configure(ctx context.Context, lines ...string) error {
	argv := r.ask("configure terminal")
	for _, line := range lines {
		argv = append(argv, "-c", line)
	}
	if out, err := exec.CommandContext(ctx, argv[0], argv[1:]...).CombinedOutput(); err != nil {
		return fmt.Errorf("configure %q: %w: %s", lines, err, out)
	}
	return nil
}

// Signal sends a signal to all daemons: SIGSTOP freezes the router, SIGCONT thaws it.
func (r *Router) Signal(sig syscall.Signal) error {
	var errs []error
	for _, cmd := range r.running {
		errs = append(errs, cmd.Process.Signal(sig))
	}
	return errors.Join(errs...)
}

// Kill ends one daemon, or all if name is empty, at once, as a crash does.
func (r *Router) Kill(name string) {
	for n, cmd := range r.running {
		if name == "" || n == name {
			cmd.Process.Kill() //nolint:errcheck // one that is gone already is as good
			cmd.Wait()         //nolint:errcheck // how it ended is known
			delete(r.running, n)
		}
	}
}

// Launch starts the daemons that are not running, and waits until the router answers.
func (r *Router) Launch(ctx context.Context) error {
	if err := r.launchAll(ctx); err != nil {
		return err
	}
	for deadline := time.Now().Add(startTime); ; time.Sleep(20 * time.Millisecond) {
		_, err := r.Ask(ctx, r.probe)
		if err == nil {
			return nil
		}
		if time.Now().After(deadline) || ctx.Err() != nil {
			return fmt.Errorf("the router does not answer: %w", err)
		}
	}
}

// Close ends the router.
func (r *Router) Close() { r.Kill("") }

// Since returns the wanted lines that FRR's daemons have logged since then, of all of them together
// and in the order of time.
func (r *Router) Since(begin time.Time, wanted func(line string) bool) string {
	first := begin.Format("2006/01/02 15:04:05.000")
	var lines []string
	for line := range strings.Lines(r.Logs()) {
		if len(line) > len(first) && line[:2] == first[:2] && line >= first && wanted(line) {
			lines = append(lines, line)
		}
	}
	slices.SortStableFunc(lines, func(a, b string) int { return strings.Compare(a[:len(first)], b[:len(first)]) })
	return strings.Join(lines, "")
}

// Logs returns what the daemons have written.
func (r *Router) Logs() string {
	var all strings.Builder
	files, _ := filepath.Glob(filepath.Join(r.o.Dir, "*.[lo][ou][gt]"))
	slices.Sort(files)
	for _, f := range files {
		if b, err := os.ReadFile(f); err == nil && len(b) > 0 {
			fmt.Fprintf(&all, "%s:\n%s\n", filepath.Base(f), b)
		}
	}
	return all.String()
}
