//go:build vm

package vm

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/e2e/cases"
	"github.com/landfall-lb/landfall/internal/lb"
)

// traffic opens new connections all the time, one after the other from each client, with a pause that leaves an
// emulated processor to the programs under test.
type traffic struct {
	mu     sync.Mutex
	asked  int
	failed []string
	phase  string
	stop   context.CancelFunc
	done   sync.WaitGroup
}

const pause = 20 * time.Millisecond

// way is from whom to what, in the words of the table of cases.
type way struct {
	from, to string
	protocol lb.Protocol
}

var ways = []way{
	{"outside", "vip", lb.TCP}, {"outside", "vip2", lb.TCP}, {"outside", "nodeport", lb.TCP}, {"outside", "vip", lb.UDP},
	{"pod", "cluster", lb.TCP}, {"pod", "vip", lb.TCP}, {"node", "cluster", lb.TCP}, {"node", "vip", lb.TCP},
	{"local", "cluster", lb.TCP},
}

func (n *node) traffic(t *testing.T) *traffic {
	ctx, stop := context.WithCancel(context.Background())
	r := &traffic{stop: stop}
	for _, w := range ways {
		r.done.Go(func() {
			for ; ctx.Err() == nil; time.Sleep(pause) {
				backend, _, err := n.Ask(cases.Case{From: w.from, To: w.to, Protocol: w.protocol}, cases.Long)
				if err == nil && w.to == "vip2" && !strings.HasPrefix(backend, n.World.Local.String()) {
					err = fmt.Errorf("Local ends at %s", backend)
				}
				r.mu.Lock()
				r.asked++
				if err != nil {
					r.failed = append(r.failed, fmt.Sprintf("%s: %s %s to %s: %v", r.phase, w.protocol, w.from, w.to, err))
				}
				r.mu.Unlock()
			}
		})
	}
	t.Cleanup(func() { stop(); r.done.Wait() })
	return r
}

// next begins a phase, and says how the previous one went.
func (r *traffic) next(t *testing.T, phase string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.phase != "" {
		t.Logf("%s: %d new connections, %d failed", r.phase, r.asked, len(r.failed))
	}
	if len(r.failed) > 0 {
		t.Errorf("%s", strings.Join(r.failed, "\n"))
	}
	r.phase, r.asked, r.failed = phase, 0, nil
}

// some waits until as many connections were tried in this phase.
func (r *traffic) some(t *testing.T, count int) {
	eventually(t, "there is traffic", func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		return r.asked >= count
	})
}

// open opens connections through a VIP that stay.
func (n *node) open(t *testing.T) (all []net.Conn) {
	for range kept {
		n.At["outside"].Do(t, func() error {
			conn, err := net.DialTimeout("tcp", netip.AddrPortFrom(n.World.VIP, echoPort).String(), cases.Long)
			if err == nil {
				all = append(all, conn)
				t.Cleanup(func() { conn.Close() })
			}
			return err
		})
	}
	return all
}

// alive returns how many of the connections still echo.
func alive(all []net.Conn) (count int) {
	for _, conn := range all {
		answer := make([]byte, 5)
		err := conn.SetDeadline(time.Now().Add(cases.Long))
		if err == nil {
			_, err = conn.Write([]byte("hello"))
		}
		if err == nil {
			_, err = io.ReadFull(conn, answer)
		}
		if err == nil && bytes.Equal(answer, []byte("hello")) {
			count++
		}
	}
	return count
}
