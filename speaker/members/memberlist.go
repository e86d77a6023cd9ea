package members

import (
	"cmp"
	"context"
	"log"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/landfall-lb/landfall/internal/loop"
	"github.com/landfall-lb/landfall/speaker/plan"
)

// retransmitMult times log10(members+1) rounded up is how often a change is passed on by each node
// that learns of it.
const retransmitMult = 4

// config tunes memberlist for finding a crashed node in well under a second, and for not taking a
// busy one for crashed.
//
// With the profile LAN, each node probes one other every 100 ms, each of the n-1 others once in a
// round, from a random phase. So after a crash the first survivor probes the dead node after about
// 100 ms whatever n is: n-1 survivors with a period of (n-1)·100 ms each. In the worst case of 100
// this takes (n=3) 200 ms, (n=9) 350 ms. The probe fails 100 ms later: 50 ms for a direct answer,
// then 50 ms for answers over three others and over TCP. Then the node is suspected, which all are
// told, the suspect too; it has 3·max(1, log10 n)·100 ms = 300 ms to refute (600 ms at n=100) once
// a second node has seen the same, twice that otherwise. Crash to known: about 100+100+300 = 500
// ms, at worst of 100 some 800 ms, up to 100 nodes about 1 s.
//
// A false alarm takes a node that neither answers probes nor refutes for at least 100+300 ms. On a
// machine with 2 busy cores a runnable process waits some tens of milliseconds. Being suspected
// alone changes nothing: suspects count as live.
//
// Gossip also loses live nodes where nothing is lost on the way, for a tenth of a second: a node that
// was cut off has found the others dead meanwhile, and says so when it is back; and of nine nodes, as
// each passes a change on four times, one in fifty misses what refutes a suspicion. So gossip alone
// decides nothing: package liveness asks the kernel of whom it has lost.
func (m *Members) config(bind netip.Addr) *memberlist.Config {
	c := memberlist.DefaultLANConfig()
	c.Name = m.opts.Self
	c.Label = "landfall" // keeps other users of memberlist out, such as those of another load balancer on the same nodes
	c.BindAddr, c.BindPort = bind.String(), m.opts.Port
	c.AdvertiseAddr, c.AdvertisePort = c.BindAddr, c.BindPort
	c.Keyring = m.keys

	c.ProbeInterval, c.ProbeTimeout = m.opts.Profile.ProbeInterval, m.opts.Profile.ProbeTimeout
	c.SuspicionMult, c.SuspicionMaxTimeoutMult = 3, 2
	// a node that finds itself slow doubles its intervals, where the default would make them 8 times
	// as long
	c.AwarenessMaxMultiplier = 2
	c.GossipInterval, c.GossipNodes = m.opts.Profile.GossipInterval, 3
	c.RetransmitMult = retransmitMult
	c.PushPullInterval = 15 * time.Second
	// Compression has a table of its own made for each packet, of which there are some for each claim;
	// what is said is short.
	c.EnableCompression = false
	c.TCPTimeout = 2 * time.Second
	c.DeadNodeReclaimTime = time.Second // a node that comes back may have another address
	c.HandoffQueueDepth = 4096

	c.Delegate, c.Events, c.Alive = delegate{m}, events{m}, admission{m}
	c.Logger = log.New(&logBridge{log: m.opts.Log, refuted: m.refuted, empties: &m.empties}, "", 0)
	return c
}

// broadcast is a message that is passed on as it is.
type broadcast []byte

func (b broadcast) Invalidates(memberlist.Broadcast) bool { return false }
func (b broadcast) Message() []byte                       { return b }
func (b broadcast) Finished()                             {}
func (b broadcast) UniqueBroadcast()                      {}

// delegate is what memberlist asks and tells about claims. It calls from several goroutines.
type delegate struct{ m *Members }

// NodeMeta is what each member knows of this node from the first moment on.
func (d delegate) NodeMeta(limit int) []byte {
	defer d.m.pulses.Begin()()
	d.m.mu.Lock()
	defer d.m.mu.Unlock()
	own := meta{born: uint64(d.m.opts.Born.UnixNano()), boot: bootOf(d.m.opts.Boot), macs: d.m.ownMACs,
		wire: farewellVersion}
	return own.encode(limit)
}

func (d delegate) GetBroadcasts(overhead, limit int) [][]byte {
	defer d.m.pulses.Begin()()
	d.m.beats()
	waiting := d.m.queue.NumQueued()
	if waiting == 0 || !d.m.rounds.passes(time.Now(), d.m.size(), waiting) {
		return nil
	}
	return d.m.queue.GetBroadcasts(overhead, limit)
}

// beats notes that gossip goes on.
func (m *Members) beats() {
	now := time.Now()
	m.beat.Store(&now)
}

// NotifyMsg gets what a node said. Changes that are news are passed on, as the one who said them
// tells only a few; a whole state goes to each newcomer.
func (d delegate) NotifyMsg(b []byte) {
	defer d.m.pulses.Begin()()
	if len(b) > 0 {
		switch b[0] {
		case alarmVersion:
			d.m.alarmed(b)
			return
		case farewellVersion:
			d.m.parted(b)
			return
		}
	}
	if news, _ := d.m.learn(b); news && b[0] == wireVersion {
		d.m.pass(slices.Clone(b))
	}
}

const (
	// maxPassed is the longest message that gossip passes on. A longer one would wait for ever, as no packet of
	// gossip has room for it: 1,400 bytes less headers and encryption.
	maxPassed = 1300
	// maxQueued is how many messages wait at most to be passed on: what 200 nodes say that begin to claim 10,000 VIPs
	// at once fits. Of more, those go first that were passed on most; who misses one asks for it.
	maxQueued = 1 << 15
)

// pass has gossip pass a message on.
func (m *Members) pass(message []byte) {
	if len(message) > maxPassed {
		return
	}
	m.queue.QueueBroadcast(broadcast(message))
	m.queue.Prune(maxQueued)
}

// LocalState is what this node says, what the live others have said, and what is reserved for those
// that are expected back. memberlist asks for the answer to one that joins before it tells of that
// one, which may know wireVersion only; so it gets that while it is small. So does everybody while
// it is unknown which nodes the cluster has, if some do not understand more: they may be made up.
func (d delegate) LocalState(join bool) []byte {
	defer d.m.pulses.Begin()()
	own, others, compact, unknown := d.m.snapshot()
	if compact && join || !compact && unknown {
		compact = explicitSize(append([]update{own}, others...)) > joinState
	}
	return state(own, others, compact, maxState)
}

// snapshot returns what this node and the others say, whether the others understand compact states,
// and whether it is unknown which nodes the cluster has. To encode a state of a large cluster takes
// long, and nothing may wait for it.
func (m *Members) snapshot() (own update, others []update, compact, unknown bool) {
	standings := m.opts.Liveness.Sight().Standings
	m.mu.Lock()
	own, others, compact, unknown = m.own.unsorted(), m.book.updates(standings), m.compacts(), m.peers == nil
	m.mu.Unlock()
	sortEntries(own.entries)
	for _, u := range others {
		sortEntries(u.entries)
	}
	return own, others, compact, unknown
}

func (d delegate) MergeRemoteState(b []byte, _ bool) {
	defer d.m.pulses.Begin()()
	if _, ok := d.m.learn(b); ok {
		d.m.understood.Add(1)
		d.m.told()
	}
}

// learn takes in a message. It reports whether there was news in it, and whether it could be read.
func (m *Members) learn(b []byte) (news, ok bool) {
	updates, err := decode(b)
	if err != nil {
		m.opts.Log.Warn("cannot read a gossip message", "error", err)
		return false, false
	}
	var recalled uint64
	again, ended := false, false
	times, strangers := make(map[string]int, len(updates)), map[string]bool{}
	var changed []netip.Addr
	latest := uint64(time.Now().Add(maxAhead).UnixNano())
	for _, some := range portions(updates) {
		var others []update
		m.mu.Lock()
		for _, u := range some {
			if times[u.node]++; times[u.node] > maxLives || u.born > latest {
				continue
			}
			if u.node == m.opts.Self {
				if m.recall(u) {
					recalled = u.born
				}
				again = m.own.outlive(u) || again
				continue
			}
			if !m.knows(u.node) {
				if m.peers != nil || !strangers[u.node] && len(m.book.pages)+len(strangers) >= maxUnknown {
					continue
				}
				strangers[u.node] = true
			}
			others = append(others, u)
		}
		vips, over := m.book.merge(others...)
		changed, ended = append(changed, vips...), ended || over
		clear(strangers) // the book has them
		m.mu.Unlock()
	}
	if recalled != 0 {
		m.opts.Liveness.Recalled(recalled)
	}
	if again {
		m.send.Poke()
	}
	if len(changed) > 0 {
		slices.SortFunc(changed, netip.Addr.Compare)
		changed = slices.Compact(changed)
		m.opts.Changed(changed)
	}
	if ended && m.opts.Ended != nil {
		m.opts.Ended()
	}
	return len(changed) > 0, true
}

// portion is how much of a message is merged at a time, in claims: all else that gossip does waits
// meanwhile. The whole state of a large cluster has millions.
const portion = maxVIPs

// portions cuts updates into parts of no more than portion each, as far as an update is no more.
func portions(updates []update) (parts [][]update) {
	from, size := 0, 0
	for i, u := range updates {
		n := len(u.entries)
		if u.sheet != nil {
			n += len(u.sheet.vips)
		}
		if i > from && size+n > portion {
			parts = append(parts, updates[from:i])
			from, size = i, 0
		}
		size += n
	}
	return append(parts, updates[from:])
}

// maxLives is of how many processes of a node a message may tell: of the one that is live and of
// the one for which addresses are reserved, and some more.
const maxLives = 4

// maxAhead is how far beyond this node's clock a process may begin for its words to count, so that a later process can
// outlive it: no number is beyond the greatest. A machine without a clock of its own may begin in 1970.
const maxAhead = 100 * 365 * 24 * time.Hour

// maxPast is how many earlier processes of this node are remembered at most, beside the one that
// announced. More than a few restarts within the time that the others hold its addresses do not
// matter, and a member may name any number of processes.
const maxPast = 8

// recall keeps what others know of the last process before this one that announced an address, in
// whatever order and parts they tell of those before, and reports whether that process is news. It
// needs mu.
func (m *Members) recall(u update) bool {
	if u.born >= m.own.born || m.previous != nil && u.born < m.previous.born {
		return false
	}
	u.node = strconv.FormatUint(u.born, 10)
	m.past.merge(u)
	p, past := m.past.pages[u.node], m.past.pages
	if m.previous != nil && past[strconv.FormatUint(m.previous.born, 10)] != m.previous {
		m.previous = nil // there was no room for it
	}
	m.forget()
	if p == nil || p == m.previous || !p.announces() {
		return false // if it announces nothing, the others wait for what a process before it announced
	}
	m.previous = p
	past[u.node] = p // unless it was the oldest of too many, it is there
	maps.DeleteFunc(past, func(_ string, other *page) bool { return other.born < p.born })
	return true
}

// forget drops the oldest of too many processes. It needs mu.
func (m *Members) forget() {
	past := slices.SortedFunc(maps.Values(m.past.pages), func(p, q *page) int { return cmp.Compare(p.born, q.born) })
	if m.previous != nil {
		past = past[1:] // it is the oldest, and stays
	}
	for _, oldest := range past[:max(0, len(past)-maxPast)] {
		delete(m.past.pages, strconv.FormatUint(oldest.born, 10))
	}
}

// events is what memberlist reports about nodes. It calls with its own lock held, so nothing here
// may call back.
type events struct{ m *Members }

func (e events) NotifyJoin(n *memberlist.Node) {
	defer e.m.pulses.Begin()()
	if n.Name == e.m.opts.Self {
		return
	}
	e.m.opts.Log.Info("node is live", "member", n.Name, "address", n.Address())
	e.m.welcome(n)
}

// NotifyUpdate gets a node whose speaker was restarted before a probe of gossip missed it, or whose
// MAC addresses have changed.
func (e events) NotifyUpdate(n *memberlist.Node) {
	defer e.m.pulses.Begin()()
	if n.Name != e.m.opts.Self {
		e.m.welcome(n)
	}
}

// NotifyLeave gets a node that has left, or that has stopped answering: memberlist does not say which.
func (e events) NotifyLeave(n *memberlist.Node) {
	defer e.m.pulses.Begin()()
	if n.Name == e.m.opts.Self {
		return
	}
	e.m.mu.Lock()
	process, ending := e.m.process(n), e.m.stopped
	delete(e.m.live, n.Name)
	delete(e.m.greet, n.Name)
	delete(e.m.former, n.Name)
	e.m.mu.Unlock()
	switch {
	case ending: // this node's own end makes it deaf
	case e.m.opts.Liveness.Lost(process):
		e.m.opts.Log.Info("node has left", "member", n.Name, "address", n.Address())
	default:
		e.m.opts.Log.Info("node is suspect", "member", n.Name, "address", n.Address())
	}
}

// welcome notes a live member, which is then told everything.
func (m *Members) welcome(n *memberlist.Node) {
	node := *n
	m.mu.Lock()
	process := m.process(n)
	if len(m.live) == 0 {
		m.beats() // nothing was asked for while this node was alone
	}
	m.live[n.Name], m.greet[n.Name] = &node, true
	m.macs[n.Name] = metaOf(n).macs
	m.mu.Unlock()
	m.opts.Liveness.Joined(process)
	m.send.Poke()
}

// process describes the process behind a member. It needs mu.
func (m *Members) process(n *memberlist.Node) plan.Process {
	said := metaOf(n)
	p := plan.Process{Node: n.Name, Born: said.born, Boot: said.boot}
	if addr, ok := netip.AddrFromSlice(n.Addr); ok {
		p.Addr = netip.AddrPortFrom(addr.Unmap(), n.Port)
	}
	if page := m.book.pages[n.Name]; page != nil {
		p.Heard, p.Announces = page.newest(), page.announces()
	}
	return p
}

// maxLines is how many of memberlist's lines of one second are logged: everybody who reaches the
// port makes it write one for each packet.
const maxLines = 50

// logBridge passes memberlist's log lines on. Its levels say how bad something is for the library:
// a node that does not answer is its daily work.
type logBridge struct {
	log     *slog.Logger
	refuted func()   // called when this node has refuted a suspicion
	empties *empties // nil for none
	lines   loop.Lines
}

// Write takes one line. The logger calls it with its own lock held.
func (b *logBridge) Write(line []byte) (int, error) {
	text := strings.TrimSpace(string(line))
	level := slog.LevelInfo
	for _, l := range []struct {
		prefix string
		level  slog.Level
	}{{"[DEBUG] ", slog.LevelDebug}, {"[INFO] ", slog.LevelInfo}, {"[WARN] ", slog.LevelWarn}, {"[ERR] ", slog.LevelWarn},
		{"[ERROR] ", slog.LevelWarn}} {
		if rest, ok := strings.CutPrefix(text, l.prefix); ok {
			text, level = rest, l.level
			break
		}
	}
	text = strings.TrimPrefix(text, "memberlist: ")
	if strings.HasPrefix(text, refutation) && b.refuted != nil {
		b.refuted()
	}
	if strings.HasPrefix(text, "ignoring alive message") {
		level = slog.LevelInfo // a speaker may be heard of before its Node
	}
	for _, daily := range []string{"Failed fallback TCP ping", "Failed to send", "Push/Pull with", "Refuting", "Suspect",
		"Marking"} {
		if strings.HasPrefix(text, daily) {
			level = slog.LevelDebug // what comes of it is logged as a node that is gone or live
		}
	}
	if level == slog.LevelWarn && b.empties.about(text) {
		level = slog.LevelDebug
		b.empties.tell(func(n uint64) {
			b.log.Info("gossip: nodes have closed connections without a message, as those do that look whether this one "+
				"answers", "connections", n)
		})
	}
	if !b.log.Enabled(context.Background(), level) {
		return len(line), nil
	}
	leftOut, ok := b.lines.Admit(time.Now(), maxLines)
	switch {
	case !ok:
	case leftOut > 0:
		b.log.Log(context.Background(), level, "gossip: "+text, "leftOut", leftOut)
	default:
		b.log.Log(context.Background(), level, "gossip: "+text)
	}
	return len(line), nil
}
