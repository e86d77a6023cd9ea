package e2e

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/landfall-lb/landfall/e2e/lab"
	"github.com/landfall-lb/landfall/e2e/lab/labtest"
)

// BenchmarkFiveHundredServices creates 500 Services in a cluster of three workers. It reports how long
// after the API server took the last the last address was assigned, and a client heard it announced, the
// processor seconds that the agents of a node take from the first request until every Service is
// announced and 3 s more, what they take at rest, what programs take that only watch the same
// objects, how many changes of each kind those of the proxy hear of, and the load of the machine:
//
//	go test -run '^$' -bench FiveHundred -benchtime 1x -timeout 30m ./e2e
//
// With LANDFALL_PROFILES=folder it also writes profiles of the agents on one node there. With
// LANDFALL_OTHER=folder the second worker runs the programs from there, to compare both in one run.
func BenchmarkFiveHundredServices(b *testing.B) {
	for _, known := range []int{inFull(512), 16} { // all that are probed ahead, or only those that are first
		b.Run(fmt.Sprintf("known=%d", known), func(b *testing.B) { fiveHundred(b, known) })
	}
}

// fiveHundred begins each turn with a new pool, once each speaker knows of so many of the next addresses that nobody
// uses them.
func fiveHundred(b *testing.B, known int) {
	services := inFull(500)
	l := labtest.Start(b, clusterOf(3), profiled(lab.Options{Progress: func(string) {}}))
	others := runOthers(b, l)
	floor := startFloor(b, l, workers(l)[2])
	figures := series{}
	for b.Loop() {
		if err := l.ApplyYAML(b.Context(), manyPool); err != nil {
			b.Fatal(err)
		}
		waitAhead(b, l, float64(known))
		const rest = 10 * time.Second
		atRest := usedBy(b, l, others, floor)
		time.Sleep(rest)
		before, heard := usedBy(b, l, others, floor), heardBy(b, l, floor["proxy"])
		for name, used := range before {
			figures.add(1000*(used-atRest[name])/rest.Seconds(), name+"-at-rest-ms/s")
		}
		createTimedMany(b, l, services, figures)
		time.Sleep(3 * time.Second)
		for name, used := range usedBy(b, l, others, floor) {
			figures.add(used-before[name], name+"-s/node")
		}
		for resource, n := range heardBy(b, l, floor["proxy"]) {
			figures.add(n-heard[resource], "heard-"+resource)
		}
		for _, program := range []string{"speaker", "proxy"} {
			figures.add(metric(b, l.Agent(program, workers(l)[0]), "process_resident_memory_bytes")/(1<<20), program+"-MiB")
		}
		figures.add(load(b), "load")
		removeMany(b, l, services)
		removeManyPool(b, l)
	}
	figures.report(b)
}

// createTimedMany creates Services, and adds how long it took until all are created, assigned, answered for and
// announced.
func createTimedMany(b *testing.B, l *lab.Lab, services int, figures series) {
	b.Helper()
	var profiling errgroup.Group
	writeProfiles(b, l, &profiling)
	said := map[netip.Addr]bool{}
	answered := sniff(b, l, lab.ClientName, 10*time.Minute, func(frame []byte) bool {
		if _, addr, ok := arpOf(frame); ok && manyRange.Contains(addr) {
			said[addr] = true
		}
		return len(said) == services
	})
	began := time.Now()
	taken := addTimed(b, l, services, figures)
	figures.add((<-answered).Sub(taken).Seconds(), "s-last-answer")
	waitAllAnnounced(b, l, services)
	figures.add(time.Since(began).Seconds(), "s-until-announced")
	if err := profiling.Wait(); err != nil {
		b.Error(err)
	}
}

// addTimed creates Services, and adds how long the API server took, and how long it took until the last has an address:
// from the first request, and from the API server's answer to the last, which it returns.
func addTimed(b *testing.B, l *lab.Lab, services int, figures series) (taken time.Time) {
	b.Helper()
	began := time.Now()
	if err := addMany(b.Context(), l, services); err != nil {
		b.Fatal(err)
	}
	taken = time.Now()
	assigned := waitAssigned(b, l, services)
	figures.add(taken.Sub(began).Seconds(), "s-creating")
	figures.add(assigned.Sub(began).Seconds(), "s-until-assigned")
	figures.add(assigned.Sub(taken).Seconds(), "s-last-assigned")
	return taken
}

// waitAssigned waits until so many Services have addresses, and returns when it heard of the last. A busy
// API server ends a watch now and then.
func waitAssigned(b *testing.B, l *lab.Lab, n int) time.Time {
	b.Helper()
	have := map[string]bool{}
	for until := time.Now().Add(10 * time.Minute); time.Now().Before(until); {
		watch, err := l.Kube().CoreV1().Services("default").Watch(b.Context(), metav1.ListOptions{})
		if err != nil {
			b.Fatal(err)
		}
		for event := range watch.ResultChan() { // all that are there first
			s, ok := event.Object.(*corev1.Service)
			if ok && len(s.Status.LoadBalancer.Ingress) > 0 {
				have[s.Name] = true
			}
			if len(have) == n {
				watch.Stop()
				return time.Now()
			}
		}
	}
	b.Fatalf("%d of %d Services have addresses", len(have), n)
	return time.Time{}
}

// manyRange are the addresses of manyPool.
var manyRange = netip.MustParsePrefix("172.26.240.0/22")

// usedBy returns the seconds of a processor that each program has taken so far, on average of the
// nodes; those of the other programs apart.
func usedBy(b *testing.B, l *lab.Lab, others, floor map[string]string) map[string]float64 {
	b.Helper()
	sums, nodes := map[string]float64{}, map[string]float64{}
	for _, program := range []string{"speaker", "proxy"} {
		for _, node := range workers(l) {
			name := others[node] + program
			sums[name] += metric(b, l.Agent(program, node), "process_cpu_seconds_total")
			nodes[name]++
		}
	}
	for name := range sums {
		sums[name] /= nodes[name]
	}
	for program, url := range floor {
		_, text, err := l.Get(b.Context(), workers(l)[2], url)
		if err != nil {
			b.Fatal(err)
		}
		var used float64
		if _, err := fmt.Sscanf(text, "process_cpu_seconds_total %g", &used); err != nil {
			b.Fatalf("%q: %v", text, err)
		}
		sums["floor-"+program] = used
	}
	return sums
}

// heardBy returns how many objects of each kind the floor of a program has heard of so far.
func heardBy(b *testing.B, l *lab.Lab, url string) map[string]float64 {
	b.Helper()
	_, text, err := l.Get(b.Context(), workers(l)[2], url)
	if err != nil {
		b.Fatal(err)
	}
	heard := map[string]float64{}
	for line := range strings.Lines(text) {
		var resource string
		var n float64
		if _, err := fmt.Sscanf(line, "heard_total{resource=%q} %g", &resource, &n); err == nil {
			heard[resource] = n
		}
	}
	return heard
}

// runOthers has the second worker run other programs, if there are some, and returns by what name
// their figures differ.
func runOthers(b *testing.B, l *lab.Lab) map[string]string {
	b.Helper()
	folder := os.Getenv("LANDFALL_OTHER")
	if folder == "" {
		return nil
	}
	node := workers(l)[1]
	for _, program := range []string{"proxy", "speaker"} {
		a := l.Agent(program, node)
		a.SetProgram(filepath.Join(folder, "landfall-"+program))
		if err := a.Restart(b.Context()); err != nil {
			b.Fatal(err)
		}
	}
	return map[string]string{node: "other-"}
}

// startFloor runs the programs on a node that only watch, and returns where each says what it has
// taken.
func startFloor(b *testing.B, l *lab.Lab, node string) map[string]string {
	b.Helper()
	program := filepath.Join(b.TempDir(), "floor")
	build := exec.CommandContext(b.Context(), "go", "build", "-trimpath", "-o", program, "./bench/floor")
	if out, err := build.CombinedOutput(); err != nil {
		b.Fatalf("%v: %s", err, out)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(b.Context()))
	var running errgroup.Group
	b.Cleanup(func() {
		cancel()
		_ = running.Wait() // they were killed
	})
	urls := map[string]string{}
	for name, address := range map[string]string{"speaker": "127.0.0.1:6063", "proxy": "127.0.0.1:6064"} {
		running.Go(func() error {
			out, err := l.Exec(ctx, node, program, l.Kubeconfig(), name, address)
			if ctx.Err() == nil {
				b.Errorf("the floor has ended: %v: %s", err, out)
			}
			return nil
		})
		urls[name] = "http://" + address + "/"
		if err := lab.WaitFor(ctx, func(string) {}, "a program that only watches", time.Minute, func(ctx context.Context) error {
			_, text, err := l.Get(ctx, node, urls[name])
			if err == nil && !strings.HasPrefix(text, "process_cpu") {
				err = fmt.Errorf("it says %q", text)
			}
			return err
		}); err != nil {
			b.Fatal(err)
		}
	}
	return urls
}

// profileAt is where the agents serve profiles.
var profileAt = map[string]string{"speaker": "localhost:6061", "proxy": "localhost:6062"}

// profiled has the agents serve profiles, if some are to be written.
func profiled(o lab.Options) lab.Options {
	o.Args = map[string][]string{}
	if os.Getenv("LANDFALL_PROFILES") != "" {
		for program, address := range profileAt {
			o.Args[program] = []string{"--pprof-address=" + address}
		}
	}
	return o
}

// writeProfiles begins to write profiles of the agents on one node.
func writeProfiles(b *testing.B, l *lab.Lab, profiling *errgroup.Group) {
	folder := os.Getenv("LANDFALL_PROFILES")
	if folder == "" {
		return
	}
	for program, address := range profileAt {
		profiling.Go(func() error {
			_, err := l.Exec(b.Context(), workers(l)[0], "curl", "-sS", "-o", filepath.Join(folder, program+".pprof"),
				"http://"+address+"/debug/pprof/profile?seconds=20")
			return err
		})
	}
}
