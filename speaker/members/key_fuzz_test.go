package members

import (
	"bytes"
	"testing"

	"github.com/hashicorp/memberlist"
)

// FuzzParseKeys checks that each key that is read can encrypt, that two lines are one key only as
// the bare bytes that they are, and that an error tells none.
func FuzzParseKeys(f *testing.F) {
	f.Add([]byte("0123456789abcdef"))
	f.Add([]byte("MDEyMzQ1Njc4OWFiY2RlZg==\nMTEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=\n"))
	f.Add([]byte("0123456789abcdef\nfedcba9876543210"))
	f.Add([]byte("0123456789abcde\xff\nfedcba987654321"))
	f.Add([]byte("\n\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		keys, err := ParseKeys(b)
		if err != nil {
			if len(b) >= 16 && bytes.Contains([]byte(err.Error()), b) {
				t.Errorf("the error tells the key: %v", err)
			}
			return
		}
		if len(keys) == 0 {
			t.Fatal("no key, and no error")
		}
		for _, key := range keys {
			if memberlist.ValidateKey(key) != nil || len(Fingerprint(key)) != 8 {
				t.Errorf("a key of %d bytes", len(key))
			}
		}
		text := bytes.TrimSpace(b)
		whole := len(keys) == 1 && (bytes.Equal(keys[0], b) || bytes.Equal(keys[0], text))
		if lines := 1 + bytes.Count(text, []byte("\n")); len(keys) != lines && !whole {
			t.Errorf("%d lines have %d keys", lines, len(keys))
		}
		newKeyring(keys)
	})
}
