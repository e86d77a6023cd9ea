package lab

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"testing"
	"time"
)

// clockVariable has this test's program say the time again and again.
const clockVariable = "LANDFALL_LAB_TEST_CLOCK"

// TestShiftClock sets the wall clock of a process that reads it all the time, in many goroutines.
func TestShiftClock(t *testing.T) {
	if os.Getenv(clockVariable) != "" {
		sayTheTime()
	}
	if runtime.GOARCH != "amd64" {
		t.Skip("the lab shifts clocks on amd64 alone")
	}
	cmd := exec.Command(os.Args[0], "-test.run=^TestShiftClock$")
	cmd.Env = append(os.Environ(), clockVariable+"=1")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	p := &process{cmd: cmd, done: make(chan struct{})}
	defer func() { _ = cmd.Process.Kill() }()
	lines := bufio.NewScanner(out)
	says := func(want time.Duration) {
		t.Helper()
		for lines.Scan() {
			var unix int64
			var elapsed time.Duration
			if _, err := fmt.Sscan(lines.Text(), &unix, &elapsed); err != nil {
				t.Fatalf("%q: %v", lines.Text(), err)
			}
			if elapsed < 0 || elapsed > time.Minute {
				t.Fatalf("the monotonic clock jumped by %v", elapsed)
			}
			if off := time.Until(time.Unix(unix, 0)) - want; off.Abs() < time.Minute {
				return
			}
		}
		t.Fatalf("the process ended before its clock was off by %v: %v", want, lines.Err())
	}
	says(0)
	for _, by := range []time.Duration{48 * time.Hour, -48 * time.Hour, time.Hour, 0} {
		if err := (&Agent{Program: "test", process: p}).ShiftClock(by); err != nil {
			t.Fatal(err)
		}
		says(by)
	}
	if err := (&Agent{Program: "test", process: p}).ShiftClock(100 * 365 * 24 * time.Hour); err == nil {
		t.Error("a century was taken")
	}
}

// sayTheTime prints the wall clock, and what passed on the monotonic clock since the line before, until it is killed.
func sayTheTime() {
	for range 4 {
		go func() {
			for {
				_ = time.Now()
			}
		}()
	}
	for last := time.Now(); ; time.Sleep(time.Millisecond) {
		now := time.Now()
		fmt.Println(now.Unix(), int64(now.Sub(last)))
		last = now
	}
}
