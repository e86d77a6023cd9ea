package members

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strings"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/speaker/plan"
)

// A version opens every message. A node that meets a newer one leaves the message alone and says
// so. Changes go as wireVersion, which all speakers know; whole states as compactVersion, once all
// live speakers know it; alarms as alarmVersion and farewells as farewellVersion, to those who know these.
const (
	wireVersion     = 1
	compactVersion  = 2
	alarmVersion    = 3
	farewellVersion = 4
)

// update is what is known of one node's claims: changes to them, or all there are up to some point.
type update struct {
	node string
	// born tells a process from the one before it on the same node: nanoseconds since 1970 at its
	// start.
	born uint64
	// floor says up to which of the node's changes the row and the entries are complete: of what is
	// older and not in them, nothing is left.
	floor   uint64
	sheet   *sheet // what the row refers to
	row     row    // what the node had said up to floor
	entries []entry
}

// explicit returns the update without a row.
func (u update) explicit() update {
	if u.sheet == nil {
		return u
	}
	u.entries = slices.Clone(u.entries)
	named := make(map[netip.Addr]bool, len(u.entries))
	for _, e := range u.entries {
		named[e.vip] = true
	}
	for i, claim := range u.row.expand() {
		if vip := u.sheet.vips[i]; claim != 0 && !named[vip] {
			u.entries = append(u.entries, entry{vip: vip, seq: u.floor, claim: u.sheet.claim(claim)})
		}
	}
	sortEntries(u.entries)
	u.sheet, u.row = nil, row{}
	return u
}

// entry is one VIP's claim. Of two entries of the same birth, the one with the higher seq is the
// newer one.
type entry struct {
	vip   netip.Addr
	seq   uint64
	gone  bool // the node says nothing of the VIP any more
	claim plan.Claim
}

// The bits of an entry's flags. Unknown ones are ignored.
const (
	flagIPv6 = 1 << iota
	flagAnswering
	flagGone
	flagWeighted
	flagRouted
	flagParted
)

// appendUpdate encodes one update; a message is the version followed by any number of them:
//
//	string node, varint born, varint floor
//	varint count, strings: the reasons and lists of peers (plan.PeerNames) that occur
//	varint count, entries: byte flags, 4 or 16 bytes address, varint seq, varint reason (0 none, n
//	the nth of the strings); if the flags say so a varint weight; and if they say so varints for the
//	list of peers and the reason of its own that BGP has
//
// A string is its length as a varint and its bytes. Addresses that are claimed, the common case,
// take about 8 bytes.
func appendUpdate(b []byte, u update) []byte {
	b = appendString(b, u.node)
	b = binary.AppendUvarint(b, u.born)
	b = binary.AppendUvarint(b, u.floor)
	words := u.words()
	places := places(words)
	b = binary.AppendUvarint(b, uint64(len(words)))
	for _, w := range words {
		b = appendString(b, w)
	}
	b = binary.AppendUvarint(b, uint64(len(u.entries)))
	for _, e := range u.entries {
		b = append(b, e.flags())
		b = append(b, e.vip.AsSlice()...)
		b = binary.AppendUvarint(b, e.seq)
		b = appendClaim(b, e.claim, places)
	}
	return b
}

// places returns the numbers of words, from 1 on.
func places(words []string) map[string]uint64 {
	places := make(map[string]uint64, len(words))
	for i, w := range words {
		places[w] = uint64(i + 1)
	}
	return places
}

// appendClaim encodes a claim, of which the flags are encoded already.
func appendClaim(b []byte, claim plan.Claim, words map[string]uint64) []byte {
	b = binary.AppendUvarint(b, words[string(claim.Reason)])
	if claim.Weight > 0 {
		b = binary.AppendUvarint(b, uint64(claim.Weight))
	}
	if routed(claim) {
		b = binary.AppendUvarint(b, words[string(claim.Routes)])
		b = binary.AppendUvarint(b, words[string(claim.Unrouted)])
	}
	return b
}

// words are the strings that occur in the entries, each once.
func (u update) words() []string {
	var words []string
	known := map[string]bool{"": true}
	for _, e := range u.entries {
		for _, w := range [...]string{string(e.claim.Reason), string(e.claim.Routes), string(e.claim.Unrouted)} {
			if !known[w] {
				known[w] = true
				words = append(words, w)
			}
		}
	}
	return words
}

func routed(claim plan.Claim) bool { return claim.Routes != "" || claim.Unrouted != "" }

func (e entry) flags() byte {
	var flags byte
	if e.vip.Is6() {
		flags |= flagIPv6
	}
	if e.claim.Answering {
		flags |= flagAnswering
	}
	if e.gone {
		flags |= flagGone
	}
	if e.claim.Weight > 0 {
		flags |= flagWeighted
	}
	if routed(e.claim) {
		flags |= flagRouted
	}
	if e.claim.Parted {
		flags |= flagParted
	}
	return flags
}

func appendString(b []byte, s string) []byte {
	return append(binary.AppendUvarint(b, uint64(len(s))), s...)
}

// encode returns the message that carries the updates.
func encode(updates ...update) []byte {
	b := []byte{wireVersion}
	for _, u := range updates {
		b = appendUpdate(b, u.explicit())
	}
	return b
}

// decode reads a message. It believes nothing that is longer than the message itself.
func decode(b []byte) ([]update, error) {
	if len(b) == 0 {
		return nil, errors.New("empty message")
	}
	r := reader{rest: b[1:], size: len(b)}
	var updates []update
	switch b[0] {
	case wireVersion:
		for len(r.rest) > 0 && r.err == nil {
			if len(updates) == maxUpdates {
				return nil, fmt.Errorf("more than %d nodes", maxUpdates)
			}
			updates = append(updates, r.update())
		}
	case compactVersion:
		updates = r.compact()
	default:
		return nil, fmt.Errorf("message of version %d, this speaker knows versions up to %d", b[0], compactVersion)
	}
	if r.err != nil {
		return nil, r.err
	}
	return updates, nil
}

// reader takes a message apart. After the first error it returns zero values.
type reader struct {
	rest []byte
	err  error
	size int // of the message
}

var errShort = errors.New("message ends early")

func (r *reader) update() update {
	u := update{node: r.string(), born: r.varint(), floor: r.varint()}
	words := r.words()
	u.entries = make([]entry, 0, r.entries())
	for range cap(u.entries) {
		u.entries = append(u.entries, r.entry(words))
	}
	if r.err == nil && u.node == "" {
		r.err = errors.New("update without a node")
	}
	return u
}

// entries reads how many entries follow.
func (r *reader) entries() int {
	return r.few(7, maxVIPs) // flags, address, seq and reason or claim take at least 7 bytes
}

func (r *reader) entry(words []string) entry {
	flags := r.flags()
	e := entry{vip: r.vip(flags), seq: r.varint(), gone: flags&flagGone != 0}
	e.claim = r.claim(flags, words)
	return e
}

func (r *reader) flags() byte {
	if b := r.bytes(1); r.err == nil {
		return b[0]
	}
	return 0
}

func (r *reader) vip(flags byte) netip.Addr {
	size := 4
	if flags&flagIPv6 != 0 {
		size = 16
	}
	vip, _ := netip.AddrFromSlice(r.bytes(size))
	return vip
}

func (r *reader) claim(flags byte, words []string) plan.Claim {
	claim := plan.Claim{Answering: flags&flagAnswering != 0, Parted: flags&flagParted != 0}
	claim.Reason = r.reason(words)
	if flags&flagWeighted != 0 {
		weight := r.varint()
		if weight > math.MaxUint16 {
			r.fail(fmt.Errorf("weight %d", weight))
		}
		claim.Weight = uint16(weight)
	}
	if flags&flagRouted != 0 {
		claim.Routes = plan.PeerNames(r.word(words))
		claim.Unrouted = r.reason(words)
		if lb.Reason(claim.Routes).IsWord() {
			r.fail(fmt.Errorf("%q is a reason, and no list of BGPPeers", claim.Routes))
		}
	}
	return claim
}

// words reads the reasons and lists of peers that occur. Nodes write them into the conditions of Services and into
// logs, so a node that was taken over shall not choose what others write there, or how much.
func (r *reader) words() []string {
	words := make([]string, 0, r.few(1, maxStrings))
	for range cap(words) {
		w := r.string()
		if len(w) > plan.MaxPeerNames {
			r.fail(fmt.Errorf("a word of %d bytes, it may have %d", len(w), plan.MaxPeerNames))
		}
		if r.err == nil && !lb.Reason(w).IsWord() {
			peers, err := readPeers(w)
			if err != nil {
				r.fail(err)
			}
			w = string(peers)
		}
		words = append(words, w)
	}
	return words
}

// readPeers reads a list of peers, also as earlier builds wrote it: with a comma and a blank in between, or as JSON.
func readPeers(word string) (peers plan.PeerNames, err error) {
	if peers = plan.PeerNames(strings.ReplaceAll(word, ", ", "\n")); strings.HasPrefix(word, "[") {
		if err := peers.UnmarshalJSON([]byte(word)); err != nil {
			return "", fmt.Errorf("%.80q is no list of BGPPeers", word)
		}
	}
	if peers == "" {
		return "", errors.New("an empty word")
	}
	for _, name := range peers.List() {
		if !lb.IsName(name) {
			return "", fmt.Errorf("%.80q is neither a reason nor the name of a BGPPeer", name)
		}
	}
	return peers, nil
}

// reason reads which of the words is meant, which has to be a reason.
func (r *reader) reason(words []string) lb.Reason {
	reason := lb.Reason(r.word(words))
	if reason != "" && !reason.IsWord() {
		r.fail(fmt.Errorf("%.80q is a list of BGPPeers, and no reason", reason))
	}
	return reason
}

// word reads which of the words is meant; 0 is none.
func (r *reader) word(words []string) string {
	switch index := r.varint(); {
	case index == 0:
	case index <= uint64(len(words)):
		return words[index-1]
	case r.err == nil:
		r.err = fmt.Errorf("word %d of %d", index, len(words))
	}
	return ""
}

// count reads the number of items that each take at least size bytes.
func (r *reader) count(size int) int {
	n := r.varint()
	if n > uint64(len(r.rest)/size) {
		r.fail(errShort)
		return 0
	}
	return int(n)
}

// few reads the number of items of which there may be so many.
func (r *reader) few(size, most int) int {
	n := r.count(size)
	if n > most {
		r.fail(fmt.Errorf("%d items, there may be %d", n, most))
		return 0
	}
	return n
}

func (r *reader) string() string {
	n := r.varint()
	if n > uint64(len(r.rest)) {
		r.fail(errShort)
		return ""
	}
	return string(r.bytes(int(n)))
}

func (r *reader) varint() uint64 {
	v, n := binary.Uvarint(r.rest)
	if n <= 0 {
		r.fail(errShort)
		return 0
	}
	r.rest = r.rest[n:]
	return v
}

func (r *reader) bytes(n int) []byte {
	if n > len(r.rest) {
		r.fail(errShort)
		return nil
	}
	b := r.rest[:n]
	r.rest = r.rest[n:]
	return b
}

func (r *reader) fail(err error) {
	if r.err == nil {
		r.err, r.rest = err, nil
	}
}
