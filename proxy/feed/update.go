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
	"slices"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
)

// Bounds of what a speaker may say: more than any cluster has.
const (
	maxLine   = 64 << 20
	maxDead   = 10000
	maxName   = 253 // of a Node (RFC 1123)
	maxReason = 64
	maxVIPs   = 65536
	maxOwners = lb.MaxRing // nodes for each VIP
)

// Heard returns the nodes that the speaker reports as dead, and its updates about VIPs since the
// last call. Their Number is for Rescued. It returns false while no speaker is connected, or the
// speaker has sent nothing yet. Only one goroutine may call it.
func (a *Actor) Heard() (news lb.FeedUpdate, ok bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.speaker == nil {
		return news, false
	}
	news, a.heard = a.heard, lb.FeedUpdate{Changes: true}
	news.Number, news.Dead, news.Gone, news.CutOff = a.taken, a.said.Dead, a.said.Gone, a.said.CutOff
	news.Gates = a.said.Gates
	return news, true
}

// Rescued takes that the kernel has what follows from all updates up to the one that Heard returned
// with this number. It never blocks.
func (a *Actor) Rescued(number uint64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.rescued = number
	if a.speaker != nil {
		a.speaker.poke()
	}
}

// answer returns the number that a reader is to be answered with; 0 for none.
func (a *Actor) answer(r *subscriber) uint64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.speaker != r || a.rescued < r.taken {
		return 0
	}
	return r.number
}

// take applies an update from a reader. The reader that last sent a whole state is the speaker.
func (a *Actor) take(r *subscriber, update lb.FeedUpdate) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	news := update
	if !update.Changes {
		a.speaker = r
		news = update.Since(a.said)
	} else if a.speaker != r {
		return errors.New("changes from a speaker that has not said all, or that another one has followed")
	}
	a.taken++
	r.number, r.taken = update.Number, a.taken
	a.said.Apply(update)
	a.heard.Apply(news)
	if len(a.said.Previous) > maxVIPs || len(a.heard.Ended) > maxVIPs {
		return fmt.Errorf("more than %d addresses", maxVIPs)
	}
	a.changed()
	return nil
}

// leave forgets that a reader is the speaker. Its updates about VIPs stay known, so that the next
// speaker's state is compared with them.
func (a *Actor) leave(r *subscriber) {
	a.mu.Lock()
	spoke := a.speaker == r
	if spoke {
		a.speaker = nil
	}
	a.mu.Unlock()
	if spoke {
		a.changed()
	}
}

// hear takes in updates until the connection ends, or a reader that has promised to speak is silent
// for too long. After an update that makes no sense it takes in no more, but goes on to send the
// reader what the kernel delivers.
func (a *Actor) hear(conn net.Conn, r *subscriber) error {
	lines := bufio.NewScanner(conn)
	lines.Buffer(nil, maxLine)
	silence, gates := time.Duration(0), false
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
		if n.Same {
			continue
		}
		gates = gates || n.Gates || len(n.Unannounced) > 0 // one of an earlier release does not say Gates
		n.Gates = gates
		end := a.pulses.Begin()
		err = a.take(r, n)
		end()
		if err != nil {
			return err
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
	a.leave(r)
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
	vips := max(len(n.Previous), len(n.Ring), len(n.Ended))
	if len(n.Dead) > maxDead || len(n.Gone) > maxDead || vips > maxVIPs {
		return lb.FeedUpdate{},
			fmt.Errorf("read an update: %d dead nodes and %d moved addresses are too many", len(n.Dead), vips)
	}
	for _, node := range n.Dead {
		if node == "" || len(node) > maxName {
			return lb.FeedUpdate{}, fmt.Errorf("read an update: %q is not a name of a node", node)
		}
	}
	for _, addr := range slices.Concat(n.Gone, n.Ended) {
		if !addr.IsValid() {
			return lb.FeedUpdate{}, errors.New("read an update: an empty address")
		}
	}
	for vip, why := range n.Unannounced {
		if _, named := n.Previous[vip]; !named || why.Reason == "" || len(why.Reason) > maxReason {
			return lb.FeedUpdate{}, fmt.Errorf("read an update: %s is unannounced for the reason %.64q", vip, why.Reason)
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
