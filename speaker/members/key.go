package members

import (
	"encoding/base64"
	"fmt"
	"strings"

	"github.com/hashicorp/memberlist"
)

// ParseKey reads an encryption key from the contents of a file: base64 or the bare bytes, 16, 24 or
// 32 of them.
func ParseKey(b []byte) ([]byte, error) {
	text := strings.TrimSpace(string(b))
	if decoded, err := base64.StdEncoding.DecodeString(text); err == nil && memberlist.ValidateKey(decoded) == nil {
		return decoded, nil
	}
	for _, key := range [][]byte{b, []byte(text)} {
		if memberlist.ValidateKey(key) == nil {
			return key, nil
		}
	}
	return nil, fmt.Errorf("a gossip key is 16, 24 or 32 bytes, bare or in base64; this has %d bytes", len(b))
}
