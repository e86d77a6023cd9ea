package lb

import (
	"net/netip"
	"slices"
	"testing"
)

func TestUnassignable(t *testing.T) {
	all := []Unassignable{{netip.MustParseAddr("192.0.2.1"), "the gateway"},
		{netip.MustParseAddr("192.0.2.0"), "the network address"}}
	text := FormatUnassignable(all)
	if text != "192.0.2.0 the network address\n192.0.2.1 the gateway\n" {
		t.Errorf("%q", text)
	}
	slices.Reverse(all)
	if got := ParseUnassignable(text + "\nnonsense here\n"); !slices.Equal(got, all) {
		t.Errorf("%v", got)
	}
}

func FuzzParseUnassignable(f *testing.F) {
	f.Add("192.0.2.0 the network address\n192.0.2.1 the gateway\n")
	f.Add("::1\n\n 1.2.3.4  x")
	f.Fuzz(func(t *testing.T, text string) {
		read := ParseUnassignable(text)
		if again := ParseUnassignable(FormatUnassignable(read)); len(again) != len(read) {
			t.Errorf("%q is read as %v, and written and read again as %v", text, read, again)
		}
	})
}
