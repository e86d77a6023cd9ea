package members

import (
	"bytes"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/landfall-lb/landfall/speaker/plan"
)

// tape is a cable that records what is sent.
type tape struct {
	*cable
	mu      sync.Mutex
	packets [][]byte
	streams []*bytes.Buffer
}

func (c *tape) WriteTo(b []byte, addr string) (time.Time, error) {
	return c.WriteToAddress(b, memberlist.Address{Addr: addr})
}

func (c *tape) WriteToAddress(b []byte, to memberlist.Address) (time.Time, error) {
	c.mu.Lock()
	c.packets = append(c.packets, bytes.Clone(b))
	c.mu.Unlock()
	return c.cable.WriteToAddress(b, to)
}

func (c *tape) DialAddressTimeout(to memberlist.Address, timeout time.Duration) (net.Conn, error) {
	conn, err := c.cable.DialAddressTimeout(to, timeout)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.streams = append(c.streams, &bytes.Buffer{})
	return &taped{conn, c, c.streams[len(c.streams)-1]}, nil
}

type taped struct {
	net.Conn
	tape *tape
	said *bytes.Buffer
}

func (c *taped) Write(b []byte) (int, error) {
	c.tape.mu.Lock()
	c.said.Write(b)
	c.tape.mu.Unlock()
	return c.Conn.Write(b)
}

// recorded returns what was sent, in parts that can be sent again.
func (c *tape) recorded() (packets, streams [][]byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, s := range c.streams {
		streams = append(streams, bytes.Clone(s.Bytes()))
	}
	return append([][]byte(nil), c.packets...), streams
}

// onTape has a member's words recorded.
func onTape(rec **tape) func(*setup) {
	return func(s *setup) {
		*rec = &tape{cable: s.transport.(*cable)}
		s.transport = *rec
	}
}

func bornAt(at time.Time) func(*setup) { return func(s *setup) { s.Born = at } }

// lines is a log that can be read meanwhile.
type lines struct {
	mu sync.Mutex
	strings.Builder
}

func (l *lines) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.Builder.Write(b)
}

func (l *lines) text() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.String()
}

func logTo(l *lines) func(*setup) {
	return func(s *setup) { s.Log = slog.New(slog.NewTextHandler(l, nil)) }
}

// replay sends packets to a member once more, from another port.
func (r *rig) replay(packets [][]byte, to string) {
	r.t.Helper()
	conn, err := net.Dial("udp", netip.AddrPortFrom(r.peers[to][0], uint16(testPort())).String())
	if err != nil {
		r.t.Fatal(err)
	}
	defer conn.Close()
	for _, p := range packets {
		if _, err := conn.Write(p); err != nil {
			r.t.Fatal(err)
		}
		time.Sleep(100 * time.Microsecond) // the buffer is small
	}
}

// Whoever recorded what an earlier process of a node said, its leave included, cannot end the next process with it.
// Nobody remembers the earlier one.
func TestContract11ARecordedLeaveEndsNobody(t *testing.T) {
	for _, key := range [][]byte{nil, bytes.Repeat([]byte{7}, 32)} {
		name := "in clear"
		var keys [][]byte
		if key != nil {
			name, keys = "encrypted", [][]byte{key}
		}
		t.Run(name, func(t *testing.T) {
			r := newRig(t, "a", "b")
			var rec *tape
			var log lines
			with := func(s *setup) { s.Keys = keys }
			earlier := time.Now().Add(-time.Hour)
			r.start("a", with, bornAt(earlier), onTape(&rec))
			r.start("b", with, bornAt(earlier))
			r.introduce("a")
			r.introduce("b")
			r.members["a"].say(map[netip.Addr]plan.Claim{vip1: {Answering: true}})
			r.wantClaims("b", vip1, map[string]plan.Claim{"a": {Answering: true}})
			r.eventually("a has sent a packet", func() bool { packets, _ := rec.recorded(); return len(packets) > 0 })
			r.members["a"].stop()
			r.members["b"].stop()

			r.start("b", with, logTo(&log))
			r.start("a", with)
			r.introduce("a")
			r.introduce("b")
			r.members["a"].say(map[netip.Addr]plan.Claim{vip2: {Answering: true}})
			r.wantClaims("b", vip2, map[string]plan.Claim{"a": {Answering: true}})
			packets, _ := rec.recorded()
			if len(packets) == 0 {
				t.Fatal("nothing was recorded")
			}
			for range 3 {
				r.replay(packets, "b")
			}
			r.members["a"].say(map[netip.Addr]plan.Claim{vip2: {}})
			r.wantClaims("b", vip2, map[string]plan.Claim{"a": {}})
			r.wantClaims("b", vip1, nil)
			if text := log.text(); strings.Contains(text, "has left") || strings.Contains(text, "suspect") {
				t.Errorf("b believes it: %s", text)
			}
		})
	}
}

// A recorded exchange of states is no answer: a speaker that starts takes part once one that it has asked tells it
// what is so now.
func TestContract11ARecordedExchangeIsNoAnswer(t *testing.T) {
	r := newRig(t, "a", "b", "c")
	var rec *tape
	r.start("a", bornAt(time.Now().Add(-time.Hour)), onTape(&rec))
	r.start("b")
	r.introduce("a")
	r.eventually("a has called b", func() bool { return r.members["a"].Joined() })
	r.members["a"].say(map[netip.Addr]plan.Claim{vip1: {Answering: true}})
	r.wantClaims("b", vip1, map[string]plan.Claim{"a": {Answering: true}})
	r.members["a"].Seek(time.Now()) // and calls once more, with what it says now
	r.eventually("a has told all", func() bool {
		_, streams := rec.recorded()
		return len(streams) > 1
	})
	r.members["a"].cable.hangs.Store(true)
	r.members["b"].stop()
	_, streams := rec.recorded()

	b := r.start("b", func(s *setup) { s.pace.alone, s.pace.silent = time.Minute, time.Minute })
	r.introduce("b")
	read := b.understood.Load()
	for _, said := range streams {
		conn, err := net.Dial("tcp", netip.AddrPortFrom(r.peers["b"][0], uint16(testPort())).String())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if _, err := conn.Write(said); err != nil {
			t.Fatal(err)
		}
	}
	r.eventually("b has read it", func() bool { return b.understood.Load() > read })
	if b.Joined() {
		t.Error("b counts as joined")
	}
	r.members["a"].cable.hangs.Store(false)
	r.eventually("b has joined", b.Joined)
}
