package bfd

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/nstest"
)

const peerProcess = "LANDFALL_TEST_BFD_PEER"

// TestMain is the peer of BenchmarkFalseDowns where it is asked to: a process of its own, so that
// only we are under load.
func TestMain(m *testing.M) {
	ProcessMain()
	if os.Getenv(peerProcess) == "" {
		os.Exit(m.Run())
	}
	w := newWorker(workerOptions{})
	w.Set(map[Key]Profile{toLeft: fast})
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin) // until the benchmark is over
		cancel()
	}()
	if err := w.Run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Println(int64(w.Health().LatestWake))
}

// BenchmarkFalseDowns counts how often a session of 50 ms × 3 over a perfect cable is lost in a
// minute, on either side, while others compete for the processors: 8 processes, 8 goroutines of
// ours that make garbage, or both 8 processes and 2 goroutines. We are a worker on a thread of
// normal or of real-time priority, or an Actor; the peer is a process of its own. Run it with
// -benchtime 1x.
func BenchmarkFalseDowns(b *testing.B) {
	for _, load := range []struct {
		name string
		busy func(*testing.B) (rest func())
	}{{"idle", func(*testing.B) func() { return func() {} }}, {"processes", busyProcesses},
		{"goroutines", busyGoroutines(8)}, {"both", busyBoth}} {
		for _, kind := range []struct {
			name  string
			start func(testing.TB, *nstest.NS) *running
		}{
			{"normal", func(t testing.TB, ns *nstest.NS) *running { return start(t, ns, Options{Normal: true}) }},
			{"thread", func(t testing.TB, ns *nstest.NS) *running { return start(t, ns, Options{}) }},
			{"process", func(t testing.TB, ns *nstest.NS) *running { r, _ := startProcess(t, ns, Options{}); return r }},
		} {
			b.Run(load.name+"/"+kind.name, func(b *testing.B) {
				us, them := nstest.New(b), nstest.New(b)
				nstest.Veth(b, us, "eth0", left+"/24", them, "eth0", right+"/24")
				peer := exec.Command(os.Args[0])
				peer.Env = append(os.Environ(), peerProcess+"=1")
				stdin, err := peer.StdinPipe()
				if err != nil {
					b.Fatal(err)
				}
				var late strings.Builder
				peer.Stdout = &late
				them.Do(b, peer.Start)
				defer func() {
					stdin.Close()
					_ = peer.Wait()
					ns, _ := strconv.ParseFloat(strings.TrimSpace(late.String()), 64)
					b.ReportMetric(ns/float64(ms), "ms-peer-late")
				}()
				a := kind.start(b, us)
				a.Set(map[Key]Profile{toRight: fast})
				a.until(toRight, "settled", settled)
				defer load.busy(b)()
				downs := uint64(0)
				for b.Loop() {
					before := a.Outcomes()[toRight].Failures
					time.Sleep(time.Minute)
					downs += a.Outcomes()[toRight].Failures - before
				}
				b.ReportMetric(float64(downs)/float64(b.N), "downs/min")
				b.ReportMetric(float64(a.Health().LatestWake)/float64(ms), "ms-late")
			})
		}
	}
}

func busyProcesses(b *testing.B) (rest func()) {
	var ends []func()
	for range 8 {
		cmd := exec.Command("sh", "-c", "while :; do :; done")
		if err := cmd.Start(); err != nil {
			b.Fatal(err)
		}
		ends = append(ends, func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	}
	return func() {
		for _, end := range ends {
			end()
		}
	}
}

// busyBoth is a busy node on which this process has much to do, too.
func busyBoth(b *testing.B) (rest func()) {
	one, other := busyProcesses(b), busyGoroutines(2)(b)
	return func() { one(); other() }
}

func busyGoroutines(n int) func(*testing.B) (rest func()) {
	return func(*testing.B) func() { return burn(n) }
}

func burn(n int) (rest func()) {
	var over atomic.Bool
	for range n {
		go func() {
			for garbage := []byte(nil); !over.Load(); { // which the collector has to clear away
				garbage = make([]byte, 1024)
				for i := range garbage {
					garbage[i] = byte(i)
				}
			}
		}()
	}
	return func() { over.Store(true) }
}
