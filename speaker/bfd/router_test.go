package bfd

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/nstest"
)

// router is a router's program that has BFD sessions in a namespace.
type router interface {
	// peers returns the router's own view of its sessions.
	peers() []view
	// freeze and thaw stop the program and let it go on.
	freeze()
	thaw()
	// kill ends the program without a last word.
	kill()
}

// view is what a router shows of a session.
type view struct {
	Peer       string
	Up         bool
	Diagnostic string // of the peer, as the router has it from us
	// Transmit, Receive and Multiplier are ours as the router has them from us; of Interval and Timeout a router shows only what was agreed.
	Transmit, Receive, Multiplier int
	Interval, Timeout             time.Duration
}

// wanted is a session that a router shall have.
type wanted struct {
	peer, local, device string
	multihop            bool
}

// kinds of routers, with Debian's packages of that name: frr, bird2.
var kinds = map[string]func(*testing.T, *nstest.NS, []wanted) router{"FRR": startFRR, "BIRD": startBIRD}

// program returns the path of a program, or skips the test.
func program(t *testing.T, debian string, paths ...string) string {
	t.Helper()
	for _, path := range paths {
		if found, err := exec.LookPath(path); err == nil {
			return found
		}
	}
	t.Skipf("%s is not installed (Debian package %s)", filepath.Base(paths[0]), debian)
	return ""
}

// daemon is a program in a namespace.
type daemon struct{ cmd *exec.Cmd }

func (d *daemon) freeze() { _ = d.cmd.Process.Signal(unix.SIGSTOP) }
func (d *daemon) thaw()   { _ = d.cmd.Process.Signal(unix.SIGCONT) }

func (d *daemon) kill() {
	if d.cmd.ProcessState == nil {
		_ = d.cmd.Process.Kill()
		_ = d.cmd.Wait()
	}
}

// run starts a program in a namespace and ends it with the test.
func run(t *testing.T, ns *nstest.NS, args ...string) *daemon {
	t.Helper()
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Stdout, cmd.Stderr = t.Output(), t.Output()
	ns.Do(t, cmd.Start)
	// As punctual as we are, where that is allowed: else a busy machine makes it fail the test.
	_ = unix.SchedSetAttr(cmd.Process.Pid, &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_RR, Priority: 1}, 0)
	d := &daemon{cmd}
	t.Cleanup(d.kill)
	return d
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

type frr struct {
	*daemon
	t          *testing.T
	vtysh, dir string
	peer       string // as the configuration names the first
}

// startFRR starts zebra and bfdd with transmit interval 100 ms, receive interval 150 ms, multiplier 4.
func startFRR(t *testing.T, ns *nstest.NS, sessions []wanted) router {
	vtysh := program(t, "frr", "vtysh")
	zebra, bfdd := program(t, "frr", "/usr/lib/frr/zebra"), program(t, "frr", "/usr/lib/frr/bfdd")
	dir := directory(t, "frr")
	conf := "bfd\n profile fast\n  transmit-interval 100\n  receive-interval 150\n  detect-multiplier 4\n !\n"
	for _, s := range sessions {
		conf += " " + s.frr() + "\n  profile fast\n !\n"
	}
	path := func(name string) string { return filepath.Join(dir, name) }
	write(t, path("zebra.conf"), "")
	write(t, path("bfdd.conf"), conf+"!\n")
	common := func(name string) []string {
		return []string{"-z", path("zserv.api"), "--vty_socket", dir, "-i", path(name + ".pid"), "-f", path(name + ".conf"), "-P", "0", "--log", "stdout"}
	}
	run(t, ns, append([]string{zebra}, common("zebra")...)...)
	waitFor(t, "zebra's socket", func() bool { _, err := os.Stat(path("zserv.api")); return err == nil })
	d := run(t, ns, append([]string{bfdd, "--bfdctl", path("bfdd.sock")}, common("bfdd")...)...)
	r := &frr{daemon: d, t: t, vtysh: vtysh, dir: dir, peer: sessions[0].frr()}
	waitFor(t, "bfdd", func() bool { _, err := r.show(); return err == nil })
	return r
}

// directory returns a new one that belongs to a user.
func directory(t *testing.T, name string) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "lftest")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	u, err := user.Lookup(name)
	if err != nil {
		t.Skip(err)
	}
	uid, _ := strconv.Atoi(u.Uid)
	gid, _ := strconv.Atoi(u.Gid)
	if err := os.Chown(dir, uid, gid); err != nil {
		t.Fatal(err)
	}
	return dir
}

// frr is the session in the words of FRR's configuration.
func (s wanted) frr() string {
	text := "peer " + s.peer
	if s.multihop {
		text += " multihop"
	}
	if s.local != "" {
		text += " local-address " + s.local
	}
	if s.device != "" {
		text += " interface " + s.device
	}
	return text
}

// shutDown takes the session down administratively. BIRD 2.0 cannot: it falls silent when it is told to end.
func (r *frr) shutDown() {
	out, err := exec.Command(r.vtysh, "--vty_socket", r.dir, "-d", "bfdd", "-c", "configure", "-c", "bfd", "-c", r.peer, "-c", "shutdown").CombinedOutput()
	if err != nil || len(out) > 0 {
		r.t.Errorf("vtysh: %v: %s", err, out)
	}
}

func (r *frr) show() ([]map[string]any, error) {
	out, err := exec.Command(r.vtysh, "--vty_socket", r.dir, "-d", "bfdd", "-c", "show bfd peers json").CombinedOutput()
	if err != nil {
		return nil, fmt.Errorf("vtysh: %w: %s", err, out)
	}
	var peers []map[string]any
	return peers, json.Unmarshal(out, &peers)
}

func (r *frr) peers() []view {
	peers, err := r.show()
	if err != nil {
		r.t.Error(err)
	}
	var views []view
	for _, p := range peers {
		number := func(key string) int { n, _ := p[key].(float64); return int(n) }
		text := func(key string) string { s, _ := p[key].(string); return s }
		views = append(views, view{
			Peer: text("peer"), Up: p["status"] == "up", Diagnostic: text("remote-diagnostic"),
			Transmit: number("remote-transmit-interval"), Receive: number("remote-receive-interval"), Multiplier: number("remote-detect-multiplier"),
		})
	}
	return views
}

type bird struct {
	*daemon
	t           *testing.T
	birdc, sock string
}

// startBIRD starts BIRD with transmit interval 100 ms, receive interval 150 ms, multiplier 4.
func startBIRD(t *testing.T, ns *nstest.NS, sessions []wanted) router {
	program(t, "bird2", "bird")
	dir := directory(t, "bird")
	r := &bird{t: t, birdc: program(t, "bird2", "birdc"), sock: filepath.Join(dir, "ctl")}
	const timers = "{ min tx interval 100 ms; min rx interval 150 ms; idle tx interval 1 s; multiplier 4; };"
	conf := "router id 203.0.113.9;\nlog stderr all;\nprotocol device {}\nprotocol bfd {\n interface \"*\" " + timers + "\n multihop " + timers + "\n"
	for _, s := range sessions {
		conf += " neighbor " + s.peer
		if s.device != "" {
			conf += " dev \"" + s.device + "\""
		}
		if s.local != "" {
			conf += " local " + s.local
		}
		if s.multihop {
			conf += " multihop yes"
		}
		conf += ";\n"
	}
	write(t, filepath.Join(dir, "bird.conf"), conf+"}\n")
	r.daemon = run(t, ns, program(t, "bird2", "bird"), "-f", "-c", filepath.Join(dir, "bird.conf"), "-s", r.sock)
	waitFor(t, "BIRD", func() bool { return exec.Command(r.birdc, "-s", r.sock, "show", "status").Run() == nil })
	return r
}

// peers reads lines as `192.0.2.1   eth0   Up   2026-01-02   0.060   0.180`.
func (r *bird) peers() []view {
	out, err := exec.Command(r.birdc, "-s", r.sock, "show", "bfd", "sessions").CombinedOutput()
	if err != nil {
		r.t.Errorf("birdc: %v: %s", err, out)
	}
	var views []view
	for line := range strings.Lines(string(out)) {
		fields := strings.Fields(line)
		if len(fields) < 6 || !strings.ContainsAny(fields[0], ".:") {
			continue
		}
		seconds := func(s string) time.Duration {
			f, _ := strconv.ParseFloat(s, 64)
			return time.Duration(f * float64(time.Second))
		}
		n := len(fields)
		views = append(views, view{Peer: fields[0], Up: fields[2] == "Up", Interval: seconds(fields[n-2]), Timeout: seconds(fields[n-1])})
	}
	return views
}

// waitFor waits until it is so.
func waitFor(t *testing.T, what string, so func() bool) {
	t.Helper()
	for began := time.Now(); !so(); time.Sleep(20 * time.Millisecond) {
		if time.Since(began) > 20*time.Second {
			t.Fatalf("waited in vain for %s", what)
		}
	}
}
