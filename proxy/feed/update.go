package feed

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
)

// Bounds of what a speaker may say: more than any cluster has.
const (
	maxLine   = 32 << 20
	maxDead   = 10000
	maxName   = 253 // of a Node (RFC 1123)
	maxVIPs   = 65536
	maxOwners = lb.MaxRing // nodes for each VIP
)

// Heard returns what the speaker says now: the last update of all that are connected; false if
// there is none.
func (a *Actor) Heard() (lb.FeedUpdate, bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	var last *subscriber
	for r := range a.readers {
		if r.update != nil && (last == nil || r.number > last.number) {
			last = r
		}
	}
	if last == nil {
		return lb.FeedUpdate{}, false
	}
	return *last.update, true
}

// take notes what a reader says; nil when nothing of what it said counts any more.
func (a *Actor) take(r *subscriber, n *lb.FeedUpdate) {
	a.mu.Lock()
	changed := r.update != n
	if changed {
		a.updates++
		r.update, r.number = n, a.updates
	}
	a.mu.Unlock()
	if changed {
		a.changed()
	}
}

// hear takes in updates until the connection ends, or a reader that has promised to speak is silent
// for too long. Once something makes no sense, it listens no more, but the reader is told on what
// the kernel delivers.
func (a *Actor) hear(conn net.Conn, r *subscriber) error {
	lines := bufio.NewScanner(conn)
	lines.Buffer(nil, maxLine)
	silence := time.Duration(0)
	for lines.Scan() {
		n, err := decode(lines.Bytes())
		if err != nil {
			a.ignore(conn, r, err)
			return nil
		}
		if n.Beat > 0 {
			silence = lb.FeedSilence(n.Beat)
		}
		if silence > 0 {
			if err := conn.SetReadDeadline(time.Now().Add(silence)); err != nil {
				return err
			}
		}
		if !n.Same {
			a.take(r, &n)
		}
	}
	switch err := lines.Err(); {
	case errors.Is(err, bufio.ErrTooLong):
		a.ignore(conn, r, err)
	case errors.Is(err, os.ErrDeadlineExceeded):
		return fmt.Errorf("no message for %s", silence)
	}
	return nil
}

// ignore forgets what a reader has said, and waits for its end.
func (a *Actor) ignore(conn net.Conn, r *subscriber, reason error) {
	a.log.Warn("ignoring an invalid message from a reader of the feed", "error", reason)
	a.take(r, nil)
	if conn.SetReadDeadline(time.Time{}) == nil {
		_, _ = io.Copy(io.Discard, conn)
	}
}

// decode reads one line.
func decode(line []byte) (lb.FeedUpdate, error) {
	var n lb.FeedUpdate
	if err := json.Unmarshal(line, &n); err != nil {
		return lb.FeedUpdate{}, fmt.Errorf("read an update: %w", err)
	}
	if n.Beat < 0 || n.Beat > int(time.Hour.Milliseconds()) {
		return lb.FeedUpdate{}, fmt.Errorf("read an update: a beat of %d ms", n.Beat)
	}
	if len(n.Dead) > maxDead || len(n.Gone) > maxDead || len(n.Previous) > maxVIPs || len(n.Ring) > maxVIPs {
		return lb.FeedUpdate{},
			fmt.Errorf("read an update: %d dead nodes and %d moved addresses are too many", len(n.Dead),
				max(len(n.Previous), len(n.Ring)))
	}
	for _, node := range n.Dead {
		if node == "" || len(node) > maxName {
			return lb.FeedUpdate{}, fmt.Errorf("read an update: %q is not a name of a node", node)
		}
	}
	for _, addr := range n.Gone {
		if !addr.IsValid() {
			return lb.FeedUpdate{}, errors.New("read an update: an empty address")
		}
	}
	return n, errors.Join(checkNodes(n.Previous), checkNodes(n.Ring))
}

// checkNodes says what is wrong with the nodes that are named for VIPs.
func checkNodes(of map[netip.Addr][]netip.Addr) error {
	for vip, nodes := range of {
		if len(nodes) > maxOwners {
			return fmt.Errorf("read an update: %d nodes for %s are too many", len(nodes), vip)
		}
		for _, addr := range append([]netip.Addr{vip}, nodes...) {
			if !addr.IsValid() || addr.Zone() != "" || addr.Is4In6() || addr.Is4() != vip.Is4() {
				return fmt.Errorf("read an update: %q cannot be an address for %s", addr, vip)
			}
		}
	}
	return nil
}
