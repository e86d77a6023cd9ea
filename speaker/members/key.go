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
// bytes, 16, 24 or 32 of them. The first one encrypts; all of them decrypt.
func ParseKeys(b []byte) ([][]byte, error) {
	if key, err := parseKey(b); err == nil {
		return [][]byte{key}, nil // bare bytes may have line breaks among them
	}
	var keys [][]byte
	for i, line := range bytes.Split(bytes.TrimSpace(b), []byte("\n")) {
		key, err := parseKey(line)
		if err != nil {
			return nil, fmt.Errorf("line %d: %w", i+1, err)
		}
		keys = append(keys, key)
	}
	return keys, nil
}

func parseKey(b []byte) ([]byte, error) {
	text := bytes.TrimSpace(b)
	if decoded, err := base64.StdEncoding.DecodeString(string(text)); err == nil &&
		memberlist.ValidateKey(decoded) == nil {
		return decoded, nil
	}
	for _, key := range [][]byte{b, text} {
		if memberlist.ValidateKey(key) == nil {
			return key, nil
		}
	}
	return nil, fmt.Errorf("a gossip key is 16, 24 or 32 bytes, bare or in base64; this has %d bytes", len(b))
}

// Fingerprint names a key without telling it.
func Fingerprint(key []byte) string {
	sum := sha256.Sum256(append([]byte("landfall gossip key "), key...))
	return fmt.Sprintf("%x", sum[:4])
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

// SetKeys replaces the keys that encrypt gossip while it goes on. Gossip that is not encrypted
// stays so, as nodes that begin one by one would not understand one another.
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
		if slices.ContainsFunc(keys, func(key []byte) bool { return bytes.Equal(key, old) }) {
			continue
		}
		if err := m.keys.RemoveKey(old); err != nil {
			return err
		}
	}
	return nil
}
