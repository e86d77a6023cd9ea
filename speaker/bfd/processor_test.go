package bfd

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/nstest"
)

// BenchmarkProcessor tells what the process costs that keeps four sessions of 50 ms × 3, as one of each node does that
// watches its neighbors. Run it with -benchtime 1x.
func BenchmarkProcessor(b *testing.B) {
	us, them := nstest.New(b), nstest.New(b)
	nstest.Veth(b, us, "eth0", "198.51.100.1/24", them, "eth0", "198.51.100.2/24")
	ours, theirs := map[Key]Profile{}, map[Key]Profile{}
	for i := range 4 {
		local, peer := fmt.Sprintf("198.51.100.%d", 11+i), fmt.Sprintf("198.51.100.%d", 21+i)
		us.Run(b, "ip", "addr", "add", local+"/24", "dev", "eth0")
		them.Run(b, "ip", "addr", "add", peer+"/24", "dev", "eth0")
		ours[Key{Local: addr(local), Peer: addr(peer), Multihop: true}] = fast
		theirs[Key{Local: addr(peer), Peer: addr(local), Multihop: true}] = fast
	}
	a, pid := startProcess(b, us, Options{})
	other, _ := startProcess(b, them, Options{})
	a.Set(ours)
	other.Set(theirs)
	for key := range ours {
		a.until(key, "settled", settled)
	}
	var spent, slept time.Duration
	switches := 0
	for b.Loop() {
		began, before, many := time.Now(), processorTime(b, pid()), contextSwitches(b, pid())
		time.Sleep(10 * time.Second)
		spent += processorTime(b, pid()) - before
		slept += time.Since(began)
		switches += contextSwitches(b, pid()) - many
	}
	b.ReportMetric(100*spent.Seconds()/slept.Seconds(), "%cpu")
	b.ReportMetric(float64(switches)/slept.Seconds(), "switches/s")
	b.ReportMetric(float64(a.Health().LatestWake)/float64(ms), "ms-late")
}

// processorTime returns what a process has had of the processors.
func processorTime(t testing.TB, pid int) (sum time.Duration) {
	t.Helper()
	each(t, pid, "schedstat", func(text string) { // nanoseconds on a processor, first
		ns, err := strconv.ParseInt(strings.Fields(text)[0], 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		sum += time.Duration(ns)
	})
	return sum
}

// contextSwitches returns how often a process has had to wait, or was made to.
func contextSwitches(t testing.TB, pid int) (sum int) {
	t.Helper()
	each(t, pid, "status", func(text string) {
		for line := range strings.Lines(text) {
			if name, value, ok := strings.Cut(line, ":"); ok && strings.HasSuffix(name, "ctxt_switches") {
				n, err := strconv.Atoi(strings.TrimSpace(value))
				if err != nil {
					t.Fatal(err)
				}
				sum += n
			}
		}
	})
	return sum
}

// each calls do with a file of each thread.
func each(t testing.TB, pid int, file string, do func(text string)) {
	t.Helper()
	tasks := fmt.Sprintf("/proc/%d/task/", pid)
	threads, err := os.ReadDir(tasks)
	if err != nil {
		t.Fatal(err)
	}
	for _, thread := range threads {
		text, err := os.ReadFile(tasks + thread.Name() + "/" + file)
		if err != nil {
			t.Fatal(err)
		}
		do(string(text))
	}
}
