package lb

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
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

func TestHostless(t *testing.T) {
	for subnet, want := range map[string]string{
		"192.0.2.9/24": "192.0.2.0 192.0.2.255", "192.0.2.9/30": "192.0.2.8 192.0.2.11", "192.0.2.9/31": "",
		"192.0.2.9/32": "", "192.0.2.9/0": "0.0.0.0 255.255.255.255", "10.1.2.3/13": "10.0.0.0 10.7.255.255",
		"2001:db8::1/64": "",
	} {
		var got []string
		for _, u := range HostlessOf(netip.MustParsePrefix(subnet)) {
			got = append(got, u.Addr.String())
		}
		if strings.Join(got, " ") != want {
			t.Errorf("%s: %v, want %q", subnet, got, want)
		}
	}
}

// A node decides what it writes: neither how many addresses count nor the text about them is its choice.
func TestUnassignableIsBounded(t *testing.T) {
	var text strings.Builder
	for i := range 100 {
		fmt.Fprintf(&text, "10.0.0.%d %s\n", i, strings.Repeat("x", 40_000))
	}
	got := ParseUnassignable(text.String())
	if len(got) != maxUnassignable {
		t.Errorf("%d addresses", len(got))
	}
	if lines := strings.Count(FormatUnassignable(slices.Concat(got, got)), "\n"); lines != maxUnassignable {
		t.Errorf("a node writes %d lines", lines)
	}
	for _, u := range got {
		if u.What != otherAddress {
			t.Fatalf("it keeps %d bytes of a node's text", len(u.What))
		}
	}
}

// Of many addresses a node writes the same ones in whatever order it finds them, and the gateways first.
func TestUnassignableInAnyOrder(t *testing.T) {
	var all []Unassignable
	addr := netip.MustParseAddr("192.0.2.0")
	for range 100 {
		all = append(all, Unassignable{addr, TheNetwork})
		addr = addr.Next()
	}
	all = append(all, Unassignable{addr, TheGateway})
	text := FormatUnassignable(all)
	if !strings.Contains(text, addr.String()+" "+TheGateway) {
		t.Errorf("the gateway is not in %q", text)
	}
	if slices.Reverse(all); FormatUnassignable(all) != text {
		t.Error("another order makes another text")
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
