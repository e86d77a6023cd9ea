package members

import (
	"bytes"
	"encoding/binary"
	"io"
	"net"
	"net/netip"
	"testing"

	"github.com/landfall-lb/landfall/speaker/plan"
)

// sealed returns a text as memberlist encrypts it, under a version, which is not encrypted.
func sealed(t *testing.T, key []byte, version byte, text, data []byte) []byte {
	message, err := seal(key, text, data)
	if err != nil {
		t.Fatal(err)
	}
	message[0] = version
	return message
}

// Messages that memberlist cannot take, sent by somebody who has the key, end no speaker.
func TestNoMessageEndsASpeaker(t *testing.T) {
	key := bytes.Repeat([]byte{7}, 32)
	r := newRig(t, "a", "b")
	r.cluster(func(s *setup) {
		if err := s.transport.Shutdown(); err != nil {
			t.Error(err)
		}
		s.Keys, s.transport = [][]byte{key}, nil
	})
	a := netip.AddrPortFrom(r.peers["a"][0], uint16(testPort())).String()
	label := append([]byte{typeLabel, byte(len("landfall"))}, "landfall"...)

	padded := bytes.Repeat([]byte{200}, 16) // more padding than there is text
	for _, version := range []byte{0, 1} {
		for _, text := range [][]byte{nil, padded} {
			size := 1 + 12 + len(text) + 16
			head := binary.BigEndian.AppendUint32([]byte{typeEncrypted}, uint32(size))
			conn, err := net.Dial("tcp", a)
			if err != nil {
				t.Fatal(err)
			}
			message := sealed(t, key, version, text, append(bytes.Clone(head), "landfall"...))
			if _, err := conn.Write(append(append(bytes.Clone(label), head...), message...)); err != nil {
				t.Fatal(err)
			}
			_, _ = io.Copy(io.Discard, conn) // until the speaker has closed it
			conn.Close()

			conn, err = net.Dial("udp", a)
			if err != nil {
				t.Fatal(err)
			}
			packet := append(bytes.Clone(label), sealed(t, key, version, text, []byte("landfall"))...)
			if _, err := conn.Write(packet); err != nil {
				t.Fatal(err)
			}
			conn.Close()
		}
	}
	r.members["b"].say(map[netip.Addr]plan.Claim{vip1: {Answering: true}})
	r.wantClaims("a", vip1, map[string]plan.Claim{"b": {Answering: true}})
}

// pipe is a connection that has what it reads, and nothing else.
type pipe struct {
	net.Conn
	io.Reader
}

func (p pipe) Read(b []byte) (int, error) { return p.Reader.Read(b) }

// What the guard looks at is read all the same, wherever the stream ends.
func TestGuardPassesStreams(t *testing.T) {
	label := append([]byte{typeLabel, 3}, "abc"...)
	for name, whole := range map[string][]byte{
		"plain":     {6, 1, 2, 3},
		"labelled":  append(bytes.Clone(label), 6, 1, 2, 3, 4, 5, 6, 7, 8),
		"encrypted": append([]byte{typeEncrypted, 0, 0, 0, 40, encryptionVersion}, make([]byte, 39)...),
		"labelled, encrypted": append(append(bytes.Clone(label), typeEncrypted, 0, 0, 0, 40, encryptionVersion),
			make([]byte, 39)...),
	} {
		for n := range len(whole) + 1 {
			got, err := io.ReadAll(&stream{Conn: pipe{Reader: bytes.NewReader(whole[:n])}})
			if err != nil || !bytes.Equal(got, whole[:n]) {
				t.Fatalf("%s, %d bytes: got %v (%v)", name, n, got, err)
			}
		}
	}
	for name, bad := range map[string][]byte{
		"empty":        {typeEncrypted, 0, 0, 0, encryptedEmpty, encryptionVersion, 1, 2},
		"of version 0": append(bytes.Clone(label), typeEncrypted, 0, 0, 1, 0, 0),
	} {
		if got, err := io.ReadAll(&stream{Conn: pipe{Reader: bytes.NewReader(bad)}}); err == nil || len(got) > 0 {
			t.Errorf("%s: got %v (%v)", name, got, err)
		}
	}
}
