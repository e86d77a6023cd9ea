package members

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"slices"

	"github.com/hashicorp/memberlist"
)

// ParseKeys reads encryption keys from the contents of a file, one a line: base64 or the bare
// bytes, 16, 24 or 32 of them. The first one encrypts; all of them decrypt. A single key of bare
// bytes may have line breaks among them.
func ParseKeys(b []byte) ([][]byte, error) {
	lines := bytes.Split(bytes.TrimSpace(b), []byte("\n"))
	if len(lines) == 1 {
		lines[0] = b // blanks at its ends may belong to a key of bare bytes
	}
	var keys [][]byte
	var failed error
	for i, line := range lines {
		key, err := parseKey(line)
		switch {
		case err == nil:
			keys = append(keys, key)
		case failed == nil:
			failed = fmt.Errorf("line %d: %w", i+1, err)
		}
	}
	if failed == nil {
		return keys, nil
	}
	// Text with a key on one of its lines has a mistake on another one, and is no key as a whole.
	if key := bareKey(b); key != nil && (len(keys) == 0 || !isText(b)) {
		return [][]byte{key}, nil
	}
	return nil, failed
}

// parseKey reads one key.
func parseKey(b []byte) ([]byte, error) {
	if decoded, err := base64.StdEncoding.DecodeString(string(bytes.TrimSpace(b))); err == nil &&
		memberlist.ValidateKey(decoded) == nil {
		return decoded, nil
	}
	if key := bareKey(b); key != nil {
		return key, nil
	}
	return nil, fmt.Errorf("a gossip key is 16, 24 or 32 bytes, bare or in base64; this has %d bytes", len(b))
}

// bareKey returns the bytes that are a key as they are, with or without the blanks at their ends; nil
// if they are none.
func bareKey(b []byte) []byte {
	for _, key := range [][]byte{b, bytes.TrimSpace(b)} {
		if memberlist.ValidateKey(key) == nil {
			return key
		}
	}
	return nil
}

// isText reports whether b is ASCII that can be printed.
func isText(b []byte) bool {
	return !slices.ContainsFunc(b, func(c byte) bool { return c > '~' || c < ' ' && c != '\t' && c != '\r' && c != '\n' })
}

// Fingerprint names a key without telling it.
func Fingerprint(key []byte) string {
	sum := sha256.Sum256(append([]byte("landfall gossip key "), key...))
	return fmt.Sprintf("%x", sum[:4])
}

func hasKey(keys [][]byte, key []byte) bool {
	return slices.ContainsFunc(keys, func(k []byte) bool { return bytes.Equal(k, key) })
}

// newKeyring returns the keys as memberlist takes them; nil for none.
func newKeyring(keys [][]byte) *memberlist.Keyring {
	if len(keys) == 0 {
		return nil
	}
	ring, err := memberlist.NewKeyring(keys, keys[0])
	if err != nil {
		panic(err) // ParseKeys has checked them
	}
	return ring
}

// SetKeys replaces the keys of gossip at once, while it goes on: see Rotation. Gossip that is not
// encrypted stays so, as nodes that begin one by one would not understand one another.
func (m *Members) SetKeys(keys [][]byte) error {
	if m.keys == nil || len(keys) == 0 {
		return errors.New("encryption of gossip begins and ends with a restart only")
	}
	for _, key := range keys {
		if err := m.keys.AddKey(key); err != nil {
			return err
		}
	}
	if err := m.keys.UseKey(keys[0]); err != nil {
		return err
	}
	for _, old := range slices.Clone(m.keys.GetKeys()) {
		if hasKey(keys, old) {
			continue
		}
		if err := m.keys.RemoveKey(old); err != nil {
			return err
		}
	}
	return nil
}
