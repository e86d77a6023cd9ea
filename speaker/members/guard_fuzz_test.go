package members

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"testing"
	"testing/iotest"

	"github.com/hashicorp/memberlist"
)

// heads are the beginnings of what comes in without a key.
func heads(f *testing.F) {
	label := append([]byte{typeLabel, 8}, "landfall"...)
	encrypted := append([]byte{typeEncrypted, 0, 0, 0, encryptedEmpty + 1, encryptionVersion},
		bytes.Repeat([]byte{7}, 29)...)
	for _, b := range [][]byte{nil, {typeLabel}, {typeLabel, 0}, {typeLabel, 255, 1}, {typeEncrypted}, {6, 1}, label,
		append(bytes.Clone(label), 6, 1), append(bytes.Clone(label), encrypted...), encrypted, encrypted[:6],
		{typeEncrypted, 0, 0, 0, 1, 0}, {typeEncrypted, 255, 255, 255, 255, 1}} {
		f.Add(b)
	}
}

// FuzzPacket checks that a packet that is let through has the version that memberlist takes, where
// memberlist looks for it.
func FuzzPacket(f *testing.F) {
	heads(f)
	f.Fuzz(func(t *testing.T, b []byte) {
		packet := bytes.Clone(b)
		if versionOf(packet) != encryptionVersion {
			return
		}
		rest, _, err := memberlist.RemoveLabelHeaderFromPacket(packet)
		if err == nil && (len(rest) == 0 || rest[0] != encryptionVersion) {
			t.Errorf("% x is let through, of which memberlist reads % x", b, rest)
		}
		if !bytes.Equal(packet, b) {
			t.Errorf("% x has become % x", b, packet)
		}
	})
}

// incoming is a connection over which some bytes come.
type incoming struct {
	net.Conn
	io.Reader
}

func (c incoming) Read(b []byte) (int, error) { return c.Reader.Read(b) }

// FuzzStream checks that memberlist gets a stream as it came, in whatever pieces, or none of what
// it must not see.
func FuzzStream(f *testing.F) {
	heads(f)
	f.Fuzz(func(t *testing.T, b []byte) {
		whole, err := io.ReadAll(&stream{Conn: incoming{Reader: bytes.NewReader(b)}})
		pieces, again := io.ReadAll(
			iotest.OneByteReader(&stream{Conn: incoming{Reader: iotest.OneByteReader(bytes.NewReader(b))}}))
		switch {
		case !errors.Is(again, err) || !bytes.Equal(whole, pieces):
			t.Errorf("% x is read as % x, %v; in pieces as % x, %v", b, whole, err, pieces, again)
		case err == nil && !bytes.Equal(whole, b):
			t.Errorf("% x is read as % x", b, whole)
		case err != nil && (!errors.Is(err, errNoText) || len(whole) > 0):
			t.Errorf("% x is read as % x, %v", b, whole, err)
		}
		if err != nil || len(b) == 0 {
			return
		}
		if b[0] == typeLabel {
			if len(b) < 2 || len(b) < 2+int(b[1]) {
				return
			}
			b = b[2+int(b[1]):]
		}
		if len(b) > 5 && b[0] == typeEncrypted &&
			(binary.BigEndian.Uint32(b[1:]) <= encryptedEmpty || b[5] != encryptionVersion) {
			t.Errorf("% x is let through", b)
		}
	})
}
