package main

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/nstest"
	"github.com/landfall-lb/landfall/proxy/plan"
)

const (
	benchRound   = 500 * time.Millisecond
	benchThreads = 16 // that open connections
	benchStreams = 4  // connections that receive all the time
)

// What a client asks of a backend of the benchmark.
const (
	askOnce = 'o' // for a byte, and the end of the connection
	askMuch = 'm' // for bytes without end
)

// BenchmarkRelayBesideHAProxy measures the relay beside HAProxy in TCP mode, with and without splicing,
// between the same client and the same three backends in network namespaces: how many connections a
// second, each with a byte there and back, and how many bytes a second over 4 connections. The three take
// turns of 500 ms, in an order at random, so that what else the machine does hits all alike. A connection to
// the relay is led there by the rules; to HAProxy it is the node's own. It needs root, a kernel with nftables,
// and haproxy.
func BenchmarkRelayBesideHAProxy(b *testing.B) {
	if _, err := exec.LookPath("haproxy"); err != nil {
		b.Skip("haproxy is not installed")
	}
	s := newRelaySite(b)
	s.node.Run(b, "sysctl", "-qw", "net.netfilter.nf_conntrack_tcp_timeout_time_wait=1")
	for _, ns := range s.backends {
		serveBench(b, ns)
	}
	svc, endpoints := s.objects()
	for i := range endpoints {
		endpoints[i].Ports[0].Port = 8081
	}
	planned := plan.New(svc, endpoints, plan.Node{Name: "node", Relay: true})
	s.write(b, planned)
	feed, socket := s.feed(b, planned)
	program := filepath.Join(b.TempDir(), "landfall-proxy")
	if out, err := exec.Command("go", "build", "-o", program, ".").CombinedOutput(); err != nil {
		b.Fatalf("%v: %s", err, out)
	}
	relay := s.start(b, program, "relay", "--relay-socket="+socket, "--status-socket=", "--metrics-bind-address=0",
		"--client-connections=10000", "--pprof-address="+os.Getenv("LANDFALL_BENCH_PPROF"))
	haproxy := s.start(b, "haproxy", "-f", haproxyConfig(b))
	for len(feed.State().Leads) < 2 {
		time.Sleep(time.Millisecond)
	}
	contenders := []contender{{"relay", netip.AddrPortFrom(s.vips[lb.IPv4], 80), relay},
		{"haproxy", netip.MustParseAddrPort("10.0.0.1:7001"), haproxy},
		{"haproxy-splice", netip.MustParseAddrPort("10.0.0.1:7002"), haproxy}}
	for _, c := range contenders {
		s.reach(b, c.at)
	}
	b.Run("connections", func(b *testing.B) {
		beside(b, contenders, "conns/s", "µs-CPU/conn", func(at netip.AddrPort) float64 { return s.connections(b, at) })
	})
	b.Run("throughput", func(b *testing.B) {
		beside(b, contenders, "MB/s", "µs-CPU/MB", func(at netip.AddrPort) float64 { return s.throughput(b, at) / 1e6 })
	})
}

// contender is what a client connects to, and the process that answers.
type contender struct {
	name string
	at   netip.AddrPort
	pid  int
}

// cpu returns how long the process has run on a processor.
func (c contender) cpu(b *testing.B) time.Duration {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", c.pid))
	if err != nil {
		b.Fatal(err)
	}
	fields := strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:]))
	ticks := 0
	for _, field := range fields[11:13] { // utime and stime, in hundredths of a second
		n, err := strconv.Atoi(field)
		if err != nil {
			b.Fatal(err)
		}
		ticks += n
	}
	return time.Duration(ticks) * 10 * time.Millisecond
}

// beside measures contenders in turn, and reports the median of each, and of its ratio to the first's: how
// much a second, and how much time on a processor each takes.
func beside(b *testing.B, contenders []contender, unit, cpuUnit string,
	measure func(netip.AddrPort) float64) {
	figures := map[string][]float64{}
	order := rand.New(rand.NewPCG(1, 1)) // what one does may cost the next
	for range b.N {
		got := map[string]float64{}
		for _, i := range order.Perm(len(contenders)) {
			c := contenders[i]
			before, began := c.cpu(b), time.Now()
			got[c.name] = measure(c.at)
			done := got[c.name] * time.Since(began).Seconds()
			figures[c.name+cpuUnit] = append(figures[c.name+cpuUnit], (c.cpu(b)-before).Seconds()*1e6/done)
		}
		for name, figure := range got {
			figures[name] = append(figures[name], figure)
			figures["relay/"+name] = append(figures["relay/"+name], got[contenders[0].name]/figure)
		}
	}
	b.ReportMetric(0, "ns/op")
	for _, c := range contenders {
		b.ReportMetric(median(figures[c.name]), c.name+"-"+unit)
		b.ReportMetric(median(figures[c.name+cpuUnit]), c.name+"-"+cpuUnit)
		if c.name != contenders[0].name {
			b.ReportMetric(median(figures["relay/"+c.name]), "relay/"+c.name)
		}
	}
}

func median(all []float64) float64 {
	slices.Sort(all)
	return all[len(all)/2]
}

// haproxyConfig writes HAProxy's configuration, and returns its path.
func haproxyConfig(b *testing.B) string {
	config := "global\n maxconn 4000\ndefaults\n mode tcp\n balance random\n timeout connect 10s\n timeout client 1h\n" +
		" timeout server 1h\n"
	for port, option := range map[int]string{7001: "", 7002: " option splice-auto\n"} {
		config += fmt.Sprintf("listen port-%d\n%s bind :%d\n", port, option, port)
		for i := 1; i <= 3; i++ {
			config += fmt.Sprintf(" server s%d 10.0.%d.2:8081\n", i, i)
		}
	}
	path := filepath.Join(b.TempDir(), "haproxy.cfg")
	if err := os.WriteFile(path, []byte(config), 0o600); err != nil {
		b.Fatal(err)
	}
	return path
}

// start runs a program on the node until the benchmark ends, and returns the number of its process.
func (s relaySite) start(b *testing.B, name string, args ...string) (pid int) {
	b.Helper()
	cmd := exec.Command(name, args...)
	cmd.Stderr = os.Stderr
	s.node.Do(b, cmd.Start)
	b.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	return cmd.Process.Pid
}

// reach waits until something answers.
func (s relaySite) reach(b *testing.B, at netip.AddrPort) {
	b.Helper()
	deadline := time.Now().Add(time.Minute)
	s.client.Do(b, func() error {
		for {
			err := once(at)
			if err == nil || time.Now().After(deadline) {
				return err
			}
			time.Sleep(10 * time.Millisecond)
		}
	})
}

// connections returns how many connections a second are opened, answered and closed.
func (s relaySite) connections(b *testing.B, at netip.AddrPort) float64 {
	var answered, failed atomic.Int64
	began := time.Now()
	s.threads(b, benchThreads, func() error {
		for time.Since(began) < benchRound {
			if err := once(at); err != nil {
				failed.Add(1)
			} else {
				answered.Add(1)
			}
		}
		return nil
	})
	if failed.Load() > 0 {
		b.Errorf("%d connections to %s failed", failed.Load(), at)
	}
	return float64(answered.Load()) / time.Since(began).Seconds()
}

// throughput returns how many bytes a second are received.
func (s relaySite) throughput(b *testing.B, at netip.AddrPort) float64 {
	var received atomic.Int64
	began := time.Now()
	s.threads(b, benchStreams, func() error {
		fd, err := ask(at, askMuch)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		buffer := make([]byte, 1<<18)
		for time.Since(began) < benchRound {
			n, err := unix.Read(fd, buffer)
			if err != nil || n == 0 {
				return fmt.Errorf("read %d bytes: %w", n, err)
			}
			received.Add(int64(n))
		}
		return nil
	})
	return float64(received.Load()) / time.Since(began).Seconds()
}

// threads runs a function on that many threads of the client.
func (s relaySite) threads(b *testing.B, n int, f func() error) {
	var all sync.WaitGroup
	for range n {
		all.Go(func() { s.client.Do(b, f) })
	}
	all.Wait()
}

// ask connects, and asks for something.
func ask(at netip.AddrPort, what byte) (fd int, err error) {
	if fd, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0); err != nil {
		return -1, err
	}
	if err = unix.Connect(fd, &unix.SockaddrInet4{Addr: at.Addr().As4(), Port: int(at.Port())}); err == nil {
		_, err = unix.Write(fd, []byte{what})
	}
	if err != nil {
		unix.Close(fd)
	}
	return fd, err
}

// once asks for a byte, and waits for the end of the connection.
func once(at netip.AddrPort) error {
	fd, err := ask(at, askOnce)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	p := make([]byte, 2)
	for _, want := range []int{1, 0} {
		if n, err := unix.Read(fd, p); n != want || err != nil {
			return errors.Join(fmt.Errorf("read %d bytes, not %d", n, want), err)
		}
	}
	return nil
}

// serveBench answers clients of the benchmark in a namespace, on threads of its own.
func serveBench(b *testing.B, ns *nstest.NS) {
	var l *net.TCPListener
	ns.Do(b, func() (err error) {
		l, err = net.ListenTCP("tcp4", &net.TCPAddr{Port: 8081})
		return err
	})
	file, err := l.File()
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { l.Close(); file.Close() })
	fd := int(file.Fd()) // blocks from now on
	for range benchThreads {
		go func() {
			runtime.LockOSThread()
			for {
				conn, _, err := unix.Accept4(fd, unix.SOCK_CLOEXEC)
				if err != nil {
					return
				}
				serveOne(conn)
			}
		}()
	}
}

func serveOne(fd int) {
	defer unix.Close(fd)
	p := make([]byte, 1)
	if n, err := unix.Read(fd, p); n != 1 || err != nil {
		return
	}
	if p[0] == askMuch {
		p = make([]byte, 1<<18)
	}
	for {
		if _, err := unix.Write(fd, p); err != nil || len(p) == 1 {
			return
		}
	}
}
