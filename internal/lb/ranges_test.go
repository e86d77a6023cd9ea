package lb

import (
	"fmt"
	"math/big"
	"net/netip"
	"strings"
	"testing"
)

func TestParseRange(t *testing.T) {
	for _, test := range []struct {
		in, want, err string
		size          string
	}{
		{in: "192.0.2.0/30", want: "192.0.2.0-192.0.2.3", size: "4"},
		{in: "192.0.2.7/30", want: "192.0.2.4-192.0.2.7", size: "4"},
		{in: " 192.0.2.10 - 192.0.2.19 ", want: "192.0.2.10-192.0.2.19", size: "10"},
		{in: "192.0.2.1/32", want: "192.0.2.1", size: "1"},
		{in: "192.0.2.1-192.0.2.1", want: "192.0.2.1", size: "1"},
		{in: "2001:db8::/64", want: "2001:db8::-2001:db8::ffff:ffff:ffff:ffff", size: "18446744073709551616"},
		{in: "::ffff:192.0.2.1-::ffff:192.0.2.2", want: "192.0.2.1-192.0.2.2", size: "2"},
		{in: "0.0.0.0/0", want: "0.0.0.0-255.255.255.255", size: "4294967296"},
		{in: "192.0.2.1", err: `"192.0.2.1" is neither a CIDR nor a range`},
		{in: "", err: `"" is neither a CIDR nor a range`},
		{in: "192.0.2.9-192.0.2.1", err: "ends before it starts"},
		{in: "192.0.2.1-2001:db8::1", err: "mixes IPv4 and IPv6"},
		{in: "192.0.2.x-192.0.2.9", err: `start of range "192.0.2.x-192.0.2.9": "192.0.2.x" is not an IP address`},
		{in: "192.0.2.1-", err: `end of range`},
		{in: "fe80::1%eth0-fe80::2%eth0", err: "is not an IP address"},
		{in: "::ffff:192.0.2.0/120", err: "write it as IPv4"},
	} {
		got, err := ParseRange(test.in)
		switch {
		case test.err != "":
			if err == nil || !strings.Contains(err.Error(), test.err) {
				t.Errorf("ParseRange(%q): error %v, want %q", test.in, err, test.err)
			}
		case err != nil:
			t.Errorf("ParseRange(%q): %v", test.in, err)
		case got.String() != test.want || got.Size().String() != test.size:
			t.Errorf("ParseRange(%q) = %s with %s addresses, want %s with %s", test.in, got, got.Size(), test.want, test.size)
		}
	}
}

func FuzzParseRange(f *testing.F) {
	for _, s := range []string{"10.0.0.0/8", "10.0.0.1-10.0.0.9", "::/0", "2001:db8::1-2001:db8::2", "a-b-c", "%/-"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		r, err := ParseRange(s)
		if err != nil {
			return
		}
		if !r.Contains(r.From) || !r.Contains(r.To) || r.Size().Cmp(big.NewInt(1)) < 0 || r.From.Is4() != r.To.Is4() {
			t.Errorf("ParseRange(%q) = %s is no range", s, r)
		}
		if r.From != r.To {
			if again, err := ParseRange(r.String()); err != nil || again != r {
				t.Errorf("ParseRange(%q) = %s does not read back: %s, %v", s, r, again, err)
			}
		}
	})
}

func TestContainsAndOverlaps(t *testing.T) {
	r := Range{From: netip.MustParseAddr("192.0.2.10"), To: netip.MustParseAddr("192.0.2.20")}
	for addr, want := range map[string]bool{"192.0.2.9": false, "192.0.2.10": true, "192.0.2.20": true,
		"192.0.2.21": false, "::c000:20f": false} {
		if got := r.Contains(netip.MustParseAddr(addr)); got != want {
			t.Errorf("%s contains %s: %v", r, addr, got)
		}
	}
	for other, want := range map[string]bool{
		"192.0.2.0-192.0.2.9": false, "192.0.2.0-192.0.2.10": true, "192.0.2.12-192.0.2.13": true,
		"192.0.2.20-192.0.2.30": true,
		"192.0.2.21-192.0.2.30": false, "::-ffff::": false, "0.0.0.0/0": true,
	} {
		parsed, err := ParseRange(other)
		if err != nil {
			t.Fatal(err)
		}
		if got := r.Overlaps(parsed); got != want || parsed.Overlaps(r) != want {
			t.Errorf("%s overlaps %s: %v, want %v both ways", r, other, got, want)
		}
	}
}

func TestSubtract(t *testing.T) {
	ranges := func(text string) (all []Range) {
		for word := range strings.FieldsSeq(text) {
			r, err := ParseRange(word)
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, r)
		}
		return all
	}
	for _, tt := range []struct{ from, cut, want string }{
		{"10.0.0.0/24", "", "[10.0.0.0-10.0.0.255]"},
		{"10.0.0.0/24", "10.0.1.0/24 2001:db8::/64", "[10.0.0.0-10.0.0.255]"},
		{"10.0.0.0/24", "10.0.0.0/32", "[10.0.0.1-10.0.0.255]"},
		{"10.0.0.0/24", "10.0.0.255/32", "[10.0.0.0-10.0.0.254]"},
		{"10.0.0.0/24", "10.0.0.10-10.0.0.19", "[10.0.0.0-10.0.0.9 10.0.0.20-10.0.0.255]"},
		{"10.0.0.0/24", "10.0.0.0/16", "[]"},
		{"10.0.0.0/30 10.0.0.8/30", "10.0.0.2-10.0.0.9 10.0.0.11/32", "[10.0.0.0-10.0.0.1 10.0.0.10]"},
		{"2001:db8::/126", "2001:db8::1/128", "[2001:db8:: 2001:db8::2-2001:db8::3]"},
		{"0.0.0.0/0 ::/0", "0.0.0.0/0 ::/0", "[]"},
	} {
		if got := fmt.Sprint(Subtract(ranges(tt.from), ranges(tt.cut))); got != tt.want {
			t.Errorf("%s without %s: %s, want %s", tt.from, tt.cut, got, tt.want)
		}
	}
}
