package plan

import (
	"encoding/json"
	"slices"
	"testing"
)

func TestPeerNames(t *testing.T) {
	for _, test := range []struct {
		names      []string
		text, data string
	}{
		{nil, "", "null"},
		{[]string{"tor-1"}, "tor-1", `["tor-1"]`},
		{[]string{"tor-1", "tor-2.rack"}, "tor-1, tor-2.rack", `["tor-1","tor-2.rack"]`},
		{[]string{"a, b", "c"}, "a, b, c", `["a, b","c"]`}, // what reads well is not what is compared
	} {
		p := NewPeerNames(test.names...)
		if got := p.List(); !slices.Equal(got, test.names) {
			t.Errorf("names %q became %q", test.names, got)
		}
		data, err := json.Marshal(p)
		if err != nil || p.String() != test.text || string(data) != test.data {
			t.Errorf("names %q read %q and %s, %v", test.names, p, data, err)
		}
		var back PeerNames
		if err := json.Unmarshal(data, &back); err != nil || back != p {
			t.Errorf("%s became %q, %v", data, back, err)
		}
	}
}
