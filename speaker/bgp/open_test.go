package bgp

import (
	"testing"

	"github.com/osrg/gobgp/v3/pkg/packet/bgp"
)

// A capability that cannot be read is not passed over: what the peer wanted to say is unknown.
func TestBrokenCapabilitiesAreRefused(t *testing.T) {
	for name, test := range map[string]struct {
		parameters []byte
		taken      bool
	}{
		"IPv4":                         {[]byte{2, 6, 1, 4, 0, 1, 0, 1}, true},
		"IPv4 and one that is unknown": {[]byte{2, 9, 1, 4, 0, 1, 0, 1, 99, 1, 7}, true},
		"two parameters":               {[]byte{2, 6, 1, 4, 0, 1, 0, 1, 2, 2, 2, 0}, true},
		"none":                         {nil, true},
		"longer than its parameter":    {[]byte{2, 4, 1, 99, 0, 1}, false},
		"half a header":                {[]byte{2, 7, 1, 4, 0, 1, 0, 1, 2}, false},
		"multiprotocol of two bytes":   {[]byte{2, 4, 1, 2, 0, 1}, false},
		"an AS number of three bytes":  {[]byte{2, 5, 65, 3, 0, 0, 1}, false},
	} {
		d := external(nil)
		body := []byte{4, byte(d.PeerASN >> 8), byte(d.PeerASN), 0, 90, 10, 0, 0, 2, byte(len(test.parameters))}
		_, refusal := negotiate(d, append(body, test.parameters...), false)
		switch {
		case test.taken && refusal != nil:
			t.Errorf("%s: %v", name, refusal)
		case !test.taken && (refusal == nil || refusal.code != bgp.BGP_ERROR_OPEN_MESSAGE_ERROR || refusal.subcode != 0):
			t.Errorf("%s: %v, want an OPEN Message Error", name, refusal)
		}
	}
}
