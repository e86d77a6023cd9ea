package plan

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
)

// FuzzPeerNames checks that a list of names that is taken is the list that was written.
func FuzzPeerNames(f *testing.F) {
	for _, seed := range []string{`null`, `[]`, `["tor-1"]`, `["tor-1","tor-2.rack"]`, `[""]`, `[null]`, `["a\nb"]`, `{}`} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var p PeerNames
		if err := p.UnmarshalJSON(data); err != nil {
			return
		}
		var want []string
		if err := json.Unmarshal(data, &want); err != nil || !slices.Equal(p.List(), want) {
			t.Fatalf("%s is read as %q: %v", data, p.List(), err)
		}
		again, err := p.MarshalJSON()
		if err != nil {
			t.Fatal(err)
		}
		var back PeerNames
		if err := back.UnmarshalJSON(again); err != nil || back != p {
			t.Errorf("%q is written as %s, and read back as %q: %v", p, again, back, err)
		}
	})
}

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

// A node that announces routes to very many peers is still heard: of a list that others would not read, it
// says the beginning.
func TestALongListOfPeersIsCut(t *testing.T) {
	var names []string
	for i := range 40 {
		names = append(names, fmt.Sprintf("%0253d", i))
	}
	p := NewPeerNames(names...)
	if got := p.List(); !slices.Equal(got, names[:len(got)]) || len(got) != 16 || len(p) > MaxPeerNames {
		t.Errorf("%d names with %d bytes are left", len(got), len(p))
	}
	if exact := NewPeerNames(strings.Repeat("x", MaxPeerNames-2), "y"); len(exact) != MaxPeerNames {
		t.Errorf("a list of the greatest length has %d bytes", len(exact))
	}
}
