package main

import (
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/across"
)

// BenchmarkDirectAcrossRouters shows the throughput of connections that come in at one node and end at pods of nodes
// behind routers: masqueraded, and forwarded directly through the tunnel, the one after the other in one run. Clients
// send in one part, and pods in the other:
// go test -run '^$' -bench DirectAcrossRouters -benchtime 9x ./proxy
func BenchmarkDirectAcrossRouters(b *testing.B) {
	s := newHandingSite(b)
	plans := map[bool]func(){
		true:  func() { s.program(b, 1, s.planRack(1)) },
		false: func() { s.program(b, 1, s.planFor(1, 2, 3)) },
	}
	for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		for _, part := range []struct {
			name string
			move func(f flow) error
		}{{"to-pods", send}, {"from-pods", receive}} {
			b.Run(fmt.Sprintf("%s/%s", family, part.name), func(b *testing.B) {
				rates := map[bool][]float64{}
				for b.Loop() {
					for direct, write := range plans {
						write()
						rates[direct] = append(rates[direct], s.rate(b, s.vips[family], direct, part.move))
					}
				}
				slices.Sort(rates[true])
				slices.Sort(rates[false])
				at := len(rates[true]) / 2
				b.ReportMetric(rates[true][at], "MB/s-direct")
				b.ReportMetric(rates[false][at], "MB/s-masqueraded")
				b.ReportMetric(rates[true][at]/rates[false][at], "ratio")
			})
		}
	}
}

// BenchmarkDirectWaysStayOpen shows how often a way to another node is closed although nothing is lost, as on a machine
// that is busy with other work:
// go test -run '^$' -bench DirectWaysStayOpen -benchtime 60s ./proxy
func BenchmarkDirectWaysStayOpen(b *testing.B) {
	s := newHandingSite(b)
	var before [3]map[netip.Addr]across.State
	closed := 0
	for b.Loop() {
		for i, asking := range s.asking {
			states := asking.States()
			for node, state := range states {
				if state != across.Answers && before[i][node] == across.Answers {
					closed++
				}
			}
			before[i] = states
		}
		time.Sleep(10 * time.Millisecond)
	}
	b.ReportMetric(float64(closed), "closed")
}

const (
	streams = 4
	moved   = 20 * much // by each
)

// rate returns how much streams to pods of other nodes move in a second, in megabytes.
func (s rackSite) rate(b *testing.B, vip netip.Addr, direct bool, move func(flow) error) float64 {
	b.Helper()
	var flows []flow
	for len(flows) < streams {
		f := s.open(b, "tcp", vip)
		pod, seen := f.ask(b)
		if pod == "1" {
			f.conn.Close()
			continue
		}
		if own := seen == f.conn.LocalAddr().String(); own != direct {
			b.Fatalf("pod %s sees %s as %s, direct %v", pod, f.conn.LocalAddr(), seen, direct)
		}
		flows = append(flows, f)
	}
	var group sync.WaitGroup
	began := time.Now()
	for _, f := range flows {
		_ = f.conn.SetDeadline(began.Add(time.Minute))
		group.Go(func() {
			if err := move(f); err != nil {
				b.Error(err)
			}
		})
	}
	group.Wait()
	took := time.Since(began)
	for _, f := range flows {
		f.conn.Close()
	}
	return streams * moved / 1e6 / took.Seconds()
}

// send has a pod read lines, which it answers with shorter ones.
func send(f flow) error {
	line := strings.Repeat("x", much/2-1) + "\n"
	const lines = moved / (much / 2)
	done := make(chan error)
	go func() {
		var err error
		for range lines {
			if _, err = f.in.ReadString('\n'); err != nil {
				break
			}
		}
		done <- err
	}()
	for range lines {
		if _, err := io.WriteString(f.conn, line); err != nil {
			return err
		}
	}
	return <-done
}

// receive has a pod send.
func receive(f flow) error {
	if _, err := io.WriteString(f.conn, strings.Repeat("much\n", moved/much)); err != nil {
		return err
	}
	_, err := io.CopyN(io.Discard, f.in, moved)
	return err
}
