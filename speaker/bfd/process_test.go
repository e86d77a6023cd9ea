package bfd

import (
	"errors"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestProcess(t *testing.T) {
	a, b := cable(t)
	us, pid := startProcess(t, a, Options{})
	them := start(t, b, Options{})
	them.Set(map[Key]Profile{toLeft: sturdy})
	us.Set(map[Key]Profile{toRight: sturdy, {}: {}})
	us.until(toRight, "settled", settled)
	them.until(toLeft, "settled", settled)
	if o := us.Outcomes()[Key{}]; o.Refused == nil || o.Refused.Reason != ReasonPeerInvalid {
		t.Errorf("a bad key: %+v", o)
	}
	if h := us.Health(); h.RealTime == (h.Problem != "") {
		t.Errorf("%+v", h)
	}

	slower := sturdy
	slower.ReceiveInterval = 60 * ms
	us.Set(map[Key]Profile{toRight: slower})
	them.until(toLeft, "slower", func(o Outcome) bool { return o.TransmitInterval == 60*ms })

	us.Set(nil)
	them.until(toLeft, "told", func(o Outcome) bool { return o.RemoteState == AdminDown })
	waitFor(t, "the session to be gone", func() bool { return len(us.Outcomes()) == 0 })
	us.Set(map[Key]Profile{toRight: sturdy})
	us.until(toRight, "settled again", settled)
	before := us.Outcomes()[toRight]

	first := pid()
	if err := syscall.Kill(first, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	us.until(toRight, "without a process", func(o Outcome) bool {
		return o.State == Down && strings.Contains(o.Problem, "signal: killed") || pid() != first
	})
	o := us.until(toRight, "up with another process",
		func(o Outcome) bool { return settled(o) && o.Ups > before.Ups && pid() != first })
	if o.Failures < before.Failures || o.Received < before.Received || o.Problem != "" {
		t.Errorf("before: %+v, with the next process: %+v", before, o)
	}
	them.until(toLeft, "settled", settled)

	failures := them.Outcomes()[toLeft].Failures
	us.stop()
	if o := them.until(toLeft, "told of the end",
		func(o Outcome) bool { return o.State != Up }); o.RemoteState != AdminDown || o.Failures != failures {
		t.Errorf("the end is seen as %+v", o)
	}
	waitFor(t, "the process to be gone", func() bool { return syscall.Kill(pid(), 0) != nil })
}

// TestProcessOutlivesNobody is for when the program is killed: the peers are told that it was on
// purpose, as BGP tells them the rest.
func TestProcessOutlivesNobody(t *testing.T) {
	a, b := cable(t)
	in, out, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	them := start(t, b, Options{})
	them.Set(map[Key]Profile{toLeft: sturdy})
	cmd := processCommand()
	cmd.Stdin = in
	a.Do(t, cmd.Start)
	in.Close()
	if _, err := out.WriteString(
		`{"Sessions":[{"Key":{"Peer":"192.0.2.2"},"Profile":{"DetectMultiplier":15}}]}`); err != nil {
		t.Fatal(err)
	}
	them.until(toLeft, "up", isUp)
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil { // of a group, which is meant for the program
		t.Fatal(err)
	}
	time.Sleep(50 * ms)
	if o := them.Outcomes()[toLeft]; o.State != Up {
		t.Errorf("a signal ends it: %+v", o)
	}
	out.Close() // as the kernel does when the program is gone
	if o := them.until(toLeft, "told", func(o Outcome) bool { return o.State != Up }); o.RemoteState != AdminDown ||
		o.Failures != 0 {
		t.Errorf("the end of the program is seen as %+v", o)
	}
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
}

// TestPunctuality asks the kernel what it has granted. Some systems, such as containers, refuse
// real-time priority even to root.
func TestPunctuality(t *testing.T) {
	ns, _ := cable(t)
	refused := askForPriority()
	p, pid := startProcess(t, ns, Options{})
	p.Set(map[Key]Profile{toRight: sturdy})
	p.until(toRight, "there", func(Outcome) bool {
		h := p.Health()
		return refused == nil && h.RealTime || refused != nil && strings.Contains(h.Problem, "real-time priority")
	})
	task := "/proc/" + strconv.Itoa(pid()) + "/task"
	threads, err := os.ReadDir(task)
	if err != nil {
		t.Fatal(err)
	}
	for _, thread := range threads {
		id, _ := strconv.Atoi(thread.Name())
		attr, err := unix.SchedGetAttr(id, 0)
		if errors.Is(err, unix.ESRCH) {
			continue // it has ended
		}
		if err != nil {
			t.Fatal(err)
		}
		if raised := attr.Policy == unix.SCHED_RR; raised != (refused == nil) {
			t.Errorf("thread %d: real-time priority %v, and a thread that asks by itself hears %v", id, raised, refused)
		}
	}
}

// TestPriorityFromTheFirst checks that a process has real-time priority before it does anything, as
// then no thread that it makes can lack it.
func TestPriorityFromTheFirst(t *testing.T) {
	in, out, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("cat")
	cmd.Stdin = in
	if err := onOwnThread(startRaised, cmd); err != nil {
		t.Fatal(err)
	}
	in.Close()
	attr, err := unix.SchedGetAttr(cmd.Process.Pid, 0)
	out.Close()
	if waited := cmd.Wait(); err != nil || waited != nil {
		t.Fatal(err, waited)
	}
	if refused := askForPriority(); (attr.Policy == unix.SCHED_RR) != (refused == nil) {
		t.Errorf("the process has %+v, and a thread that asks by itself hears %v", attr, refused)
	}
}

// askForPriority returns what a thread hears that asks for real-time priority.
func askForPriority() error {
	asked := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		asked <- raiseThread()
	}()
	return <-asked
}

// TestNothingIsGranted drops the capabilities of the engine's thread.
func TestNothingIsGranted(t *testing.T) {
	a, b := cable(t)
	// Were memory locked for the other one, it would count against the limit of the first one's thread.
	us, them := startWorker(t, a, workerOptions{}, dropCapabilities), start(t, b, Options{Normal: true})
	us.Set(map[Key]Profile{toRight: sturdy})
	them.Set(map[Key]Profile{toLeft: sturdy})
	us.until(toRight, "up", isUp)
	h := us.Health()
	if h.RealTime || !strings.Contains(h.Problem, "CAP_SYS_NICE") {
		t.Errorf("%+v", h)
	}
}

// dropCapabilities takes from the calling thread what it may do to others.
func dropCapabilities() error {
	// What an earlier test has locked would count against the limit that this thread gets now, and end
	// the process.
	if err := unix.Munlockall(); err != nil {
		return err
	}
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&header, &data[0]); err != nil {
		return err
	}
	for _, c := range []uint{unix.CAP_SYS_NICE, unix.CAP_IPC_LOCK, unix.CAP_NET_ADMIN} {
		data[c/32].Effective &^= 1 << (c % 32)
		data[c/32].Permitted &^= 1 << (c % 32)
	}
	return unix.Capset(&header, &data[0])
}
