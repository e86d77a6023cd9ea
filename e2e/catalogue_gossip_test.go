package e2e

import (
	"bytes"
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/landfall-lb/landfall/e2e/lab"
	"github.com/landfall-lb/landfall/speaker/members"
)

const gossipPort = 7947

// Types of memberlist's messages.
const (
	gossipUser     = 8
	gossipCompound = 7
	gossipCompress = 9
	gossipEncrypt  = 10
	gossipCRC      = 12
)

// label is what Landfall's gossip begins with.
func label(text string, b []byte) []byte {
	return append(append([]byte{244, byte(len(text))}, text...), b...)
}

// sealed encrypts a message as memberlist does.
func sealed(t *testing.T, key, message, data []byte) []byte {
	t.Helper()
	block, err := aes.NewCipher(key)
	if err != nil {
		t.Fatal(err)
	}
	gcm, err := cipher.NewGCM(block)
	if err != nil {
		t.Fatal(err)
	}
	nonce := make([]byte, 12)
	_, _ = rand.Read(nonce)
	return append(append([]byte{1}, nonce...), gcm.Seal(nil, nonce, message, data)...)
}

// gossipKey returns the key that the chart made.
func gossipKey(t *testing.T, l *lab.Lab) []byte {
	t.Helper()
	secrets, err := l.Kube().CoreV1().Secrets(lab.Namespace).List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range secrets.Items {
		if strings.HasSuffix(s.Name, "-gossip") {
			keys, err := members.ParseKeys(s.Data["key"])
			if err != nil {
				t.Fatal(err)
			}
			return keys[0]
		}
	}
	t.Fatal("there is no Secret with a gossip key")
	return nil
}

// gossipOverIPv6 starts all speakers anew with the other address of their nodes for gossip.
func gossipOverIPv6(t *testing.T, l *lab.Lab) {
	t.Helper()
	speakers := l.Agents("speaker")
	for _, a := range speakers {
		if err := a.Stop(); err != nil {
			t.Fatal(err)
		}
		a.SetFlag("bind-address", lab.Twin(nodeAddr(l, a.Node)).String())
	}
	for _, a := range speakers { // each is ready once it has met others
		if err := a.Start(); err != nil {
			t.Fatal(err)
		}
	}
	for _, a := range speakers {
		if err := a.WaitReady(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	wantCondition(t, l, "my-nginx", "landfall.dev/Announced", "True", "Announced", "172.26.236.180 is announced from ")
	for _, vip := range []netip.AddrPort{routedVIP, routedVIP6} {
		wantRouted(t, l, vip.Addr(), workers(l)...)
	}
}

// hostileGossip sends what no speaker would to the port of gossip at an address. Without the key, nothing is
// heard of it but a line in the log; with the key, a message that makes no sense is left out as a
// whole.
func hostileGossip(t *testing.T, l *lab.Lab, addr netip.Addr) {
	key, a := gossipKey(t, l), l.Agent("speaker", besieged)
	target := netip.AddrPortFrom(addr, gossipPort).String()
	live := counter(t, a, "landfall_speaker_members")
	wrong := make([]byte, len(key))
	t.Run("UDP", func(t *testing.T) {
		dial := func() net.Conn {
			conn, err := l.Dial(t.Context(), hostileHost, "udp", target)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { conn.Close() })
			return conn
		}
		unread, read, began := dial(), dial(), len(a.Log())
		for _, row := range unreadGossip() {
			if _, err := unread.Write(row.packet); err != nil {
				t.Fatalf("%s: %v", row.name, err)
			}
		}
		for _, row := range udpGossip(t, key, wrong) {
			t.Run(row.name, func(t *testing.T) {
				wantLogOf(t, a, func() error { _, err := read.Write(row.packet); return err }, row.logs...)
			})
		}
		for _, row := range unreadGossip() { // what came later is logged
			t.Run(row.name, func(t *testing.T) {
				if strings.Contains(a.Log()[began:], unread.LocalAddr().String()) {
					t.Errorf("the log names %s", unread.LocalAddr())
				}
			})
		}
		for _, conn := range []net.Conn{unread, read} {
			if err := conn.SetReadDeadline(time.Now().Add(10 * time.Millisecond)); err != nil {
				t.Fatal(err)
			}
			if n, err := conn.Read(make([]byte, 2000)); err == nil {
				t.Errorf("an answer of %d bytes", n)
			}
		}
		for i := range 20000 { // and a flood
			_, _ = read.Write(label("landfall", binary.BigEndian.AppendUint32(bytes.Repeat([]byte{1}, 60), uint32(i))))
		}
	})
	t.Run("TCP", func(t *testing.T) {
		silent, answered := tcpGossip(t, key, wrong)
		for i, row := range slices.Concat(silent, answered) {
			t.Run(row.name, func(t *testing.T) {
				wantLogOf(t, a, func() error {
					said, err := tellOnce(t, l, target, row.packet)
					if err == nil && (said > 0) != (i >= len(silent)) {
						err = fmt.Errorf("an answer of %d bytes", said)
					}
					return err
				}, row.logs...)
			})
		}
	})
	t.Run("200 connections that say nothing", func(t *testing.T) {
		for range 200 {
			conn, err := l.Dial(t.Context(), hostileHost, "tcp", target)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
		}
	})
	eventually(t, "the speakers are together", func() error {
		if now := counter(t, a, "landfall_speaker_members"); now != live {
			return fmt.Errorf("%v members, and there were %v", now, live)
		}
		return nil
	})
}

// tellOnce says something over a connection of its own, and returns how much the speaker has said
// when it ends it.
func tellOnce(t *testing.T, l *lab.Lab, target string, packet []byte) (said int, err error) {
	conn, err := l.Dial(t.Context(), hostileHost, "tcp", target)
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		return 0, err
	}
	if _, err := conn.Write(packet); err != nil {
		return 0, err
	}
	if err := conn.(*net.TCPConn).CloseWrite(); err != nil {
		return 0, err
	}
	answer, err := io.ReadAll(conn)
	if errors.Is(err, syscall.ECONNRESET) {
		err = nil // it has not read all
	}
	return len(answer), err
}

// gossipRow is a packet, and what the speaker logs of it.
type gossipRow struct {
	name   string
	packet []byte
	logs   []string
}

// unreadGossip are packets that no speaker encrypts, which nothing reads.
func unreadGossip() []gossipRow {
	const ours = "landfall"
	return []gossipRow{
		{"one byte", []byte{0}, nil},
		{"HTTP", []byte("GET / HTTP/1.1\r\n\r\n"), nil},
		{"the beginning of a label", []byte{244}, nil},
		{"a label beyond the packet", []byte{244, 200, 'l', 'a'}, nil},
		{"nothing after the label", label(ours, nil), nil},
		{"a message in clear", label(ours, []byte{gossipUser, 1, 0}), nil},
		{"the old way to encrypt", label(ours, make([]byte, 61)), nil},
		{"an unknown way to encrypt", label(ours, []byte{99, 1, 2, 3}), nil},
	}
}

func udpGossip(t *testing.T, key, wrong []byte) []gossipRow {
	const ours = "landfall"
	with := func(message ...byte) []byte { return label(ours, sealed(t, key, message, []byte(ours))) }
	user := func(message ...byte) []byte { return with(append([]byte{gossipUser}, message...)...) }
	const unread = "cannot read a gossip message"
	return []gossipRow{
		{"an empty label", []byte{244, 0, 1, 2}, []string{"label header cannot be empty"}},
		{"the label of another cluster", label("metallb", []byte{1, 8}), []string{"unacceptable label", "metallb"}},
		{"a label that a terminal obeys", label("\x1b[2J", []byte{1, 8}), []string{"unacceptable label", `x1b[2J`}},
		{"too little to decrypt", label(ours, []byte{1, 2, 3}), []string{"payload is too small to decrypt"}},
		{"another key", label(ours, sealed(t, wrong, []byte{gossipUser, 1}, []byte(ours))),
			[]string{"no installed keys could decrypt the message"}},
		{"the key for another label", label(ours, sealed(t, key, []byte{gossipUser, 1}, []byte("x"))),
			[]string{"no installed keys could decrypt the message"}},
		{"60 kB of noise", label(ours, append([]byte{1}, make([]byte, 60000)...)),
			[]string{"no installed keys could decrypt the message"}},
		{"with the key: nothing", with(), []string{"missing message type byte"}},
		{"with the key: an unknown type", with(200, 1, 2, 3), []string{"msg type (200) not supported"}},
		{"with the key: a wrong sum", with(gossipCRC, 1, 2, 3, 4, gossipUser), []string{"invalid checksum"}},
		{"with the key: an empty row of messages", with(gossipCompound), []string{"Failed to decode compound request"}},
		{"with the key: a row that ends early", with(gossipCompound, 200, 0), []string{"Failed to decode compound request"}},
		{"with the key: what cannot be unpacked", with(gossipCompress, 0xff, 0xff),
			[]string{"Failed to decompress payload"}},
		{"with the key: a ping that makes no sense", with(0, 0xc1), []string{"Failed to decode ping request"}},
		{"with the key: an alive that makes no sense", with(4, 0xc1), []string{"Failed to decode alive message"}},
		{"with the key: an alive of other versions", with(append([]byte{4, 0x86}, "\xabIncarnation\x01\xa4Node\xa1n"+
			"\xa4Addr\xa4\x7f\x09\x00\x01\xa4Port\xcd\x1f\x0b\xa4Meta\xa0\xa3Vsn\xa6\x01\x05\x02\x01\x01\x01"...)...),
			[]string{"ignoring alive message for 'n': it speaks the versions 2, from 1 to 5, and 1, from 1 to 1"}},
		{"with the key: a dead that makes no sense", with(5, 0xc1), []string{"Failed to decode dead message"}},
		{"with the key: a suspect that makes no sense", with(3, 0xc1), []string{"Failed to decode suspect message"}},
		{"with the key: no claims", user(), []string{unread, "empty message"}},
		{"with the key: a newer version", user(9),
			[]string{unread, "message of version 9, this speaker knows versions up to 2"}},
		{"with the key: a name beyond the message", user(1, 0xff, 0xff, 0x03, 'n'), []string{unread, "message ends early"}},
		{"with the key: a number without an end",
			user(1, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80), []string{unread, "message ends early"}},
		{"with the key: claims of nobody", user(1, 0, 1, 0, 0, 0), []string{unread, "update without a node"}},
		{"with the key: more reasons than fit", user(1, 1, 'n', 1, 0, 0xff, 0xff, 0x03),
			[]string{unread, "message ends early"}},
		{"with the key: more claims than fit", user(1, 1, 'n', 1, 0, 0, 0xff, 0xff, 0x03),
			[]string{unread, "message ends early"}},
		{"with the key: a reason that is not there", user(1, 1, 'n', 1, 0, 0, 1, 0, 10, 0, 0, 1, 1, 7),
			[]string{unread, "word 7 of 0"}},
		{"with the key: a reason that a terminal obeys", user(1, 1, 'n', 1, 0, 1, 4, 'X', 0x1b, '[', 'm', 0),
			[]string{unread, "is neither a reason nor the name of a BGPPeer"}},
		{"with the key: a word of 5 kB", user(append([]byte{1, 1, 'n', 1, 0, 1, 0x88, 0x27},
			append(bytes.Repeat([]byte("tor\n"), 1250), 0)...)...), []string{unread, "a word of 5000 bytes, it may have 4096"}},
		{"with the key: a peer as the reason", user(1, 1, 'n', 1, 0, 1, 3, 't', 'o', 'r', 1, 0, 10, 0, 0, 1, 1, 1),
			[]string{unread, "is a list of BGPPeers, and no reason"}},
		{"with the key: a weight of 32 bits", user(1, 1, 'n', 1, 0, 0, 1, 8, 10, 0, 0, 1, 1, 0, 0xff, 0xff, 0xff, 0x0f),
			[]string{unread, "weight 33554431"}},
	}
}

// tcpGossip returns what ends a connection without a word, and what is answered with an error,
// which is encrypted.
func tcpGossip(t *testing.T, key, wrong []byte) (silent, answered []gossipRow) {
	const ours = "landfall"
	long := func(n uint32) []byte { return binary.BigEndian.AppendUint32([]byte{gossipEncrypt}, n) }
	state, empty := sealed(t, wrong, []byte{6, 1}, nil), sealed(t, key, nil, append(long(29), ours...))
	silent = []gossipRow{
		{"nothing", nil, []string{`discarding stream with unacceptable label \"\"`}},
		{"HTTP", []byte("GET / HTTP/1.1\r\n\r\n"), []string{"discarding stream with unacceptable label"}},
		{"the beginning of a label", []byte{244}, []string{"failed to receive and remove the stream label header"}},
		{"an empty label", []byte{244, 0}, []string{"label header cannot be empty"}},
		{"the label of another cluster", label("metallb", []byte{6}), []string{"discarding stream", "metallb"}},
		{"with the key: an empty state", label(ours, append(long(uint32(len(empty))), empty...)),
			[]string{"an encrypted stream without a text"}},
		{"a state that ends early", label(ours, append(long(1<<20), 1, 2, 3)), nil},
	}
	return silent, []gossipRow{
		{"a state in clear", label(ours, []byte{6, 0x83}), []string{"remote state is not encrypted"}},
		{"a state of 4 GiB", label(ours, long(1<<32-1)), []string{"remote node state is larger than limit (4294967295)"}},
		{"another key", label(ours, append(long(uint32(len(state))), state...)),
			[]string{"no installed keys could decrypt the message"}},
	}
}
