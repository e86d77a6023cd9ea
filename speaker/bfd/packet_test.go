package bfd

import (
	"bytes"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// sample is a packet as it is on the wire, each field with another value.
var sample = []byte{
	1<<5 | 3, 2<<6 | bitPoll | bitControl, 5, 24,
	0x11, 0x22, 0x33, 0x44,
	0x55, 0x66, 0x77, 0x88,
	0, 0x0f, 0x42, 0x40, // 1 s
	0, 0x04, 0x93, 0xe0, // 300 ms
	0, 0, 0xc3, 0x50, // 50 ms
}

var sampled = Packet{
	Diagnostic: NeighborSignaledDown, State: Init, Poll: true, ControlPlane: true, DetectMultiplier: 5,
	MyDiscriminator: 0x11223344, YourDiscriminator: 0x55667788,
	DesiredMinTx: time.Second, RequiredMinRx: 300 * time.Millisecond, EchoRx: 50 * time.Millisecond,
}

func TestDecode(t *testing.T) {
	got, drop := decode(sample)
	if diff := cmp.Diff(sampled, got); diff != "" || drop != dropNone {
		t.Errorf("dropped: %v; (-want +got):\n%s", drop, diff)
	}
	if got := sampled.append(nil); !bytes.Equal(got, sample) {
		t.Errorf("append: % x, want % x", got, sample)
	}
	padded, drop := decode(append(slices.Clone(sample), 0, 0, 0))
	if padded != sampled || drop != dropNone {
		t.Errorf("bytes behind the packet make it %v, dropped: %v", padded, drop)
	}
}

// TestDecodeDrops breaks the sample in one place, and in that and all that are checked later: the
// reason is always that of the first.
func TestDecodeDrops(t *testing.T) {
	with := func(i int, value byte) func([]byte) []byte {
		return func(b []byte) []byte { b[i] = value; return b }
	}
	steps := []struct {
		name  string
		spoil func([]byte) []byte
		want  Drop
	}{
		{"version 0", with(0, 0<<5|3), dropVersion},
		{"version 2", with(0, 2<<5|3), dropVersion},
		{"length 23", with(3, 23), dropShort},
		{"length 25 with authentication", func(b []byte) []byte { b[1] |= bitAuth; b[3] = 25; return append(b, 0) },
			dropShort},
		{"length 25", with(3, 25), dropTruncated},
		{"length 255", with(3, 255), dropTruncated},
		{"multiplier", with(2, 0), dropMultiplier},
		{"multipoint", func(b []byte) []byte { b[1] |= bitMultipoint; return b }, dropMultipoint},
		{"my discriminator", func(b []byte) []byte { clear(b[4:8]); return b }, dropMyDiscriminator},
	}
	for i, step := range steps {
		if p, drop := decode(step.spoil(slices.Clone(sample))); drop != step.want || p != (Packet{}) {
			t.Errorf("%s: dropped because of %v, want %v; packet %v", step.name, drop, step.want, p)
		}
		b := slices.Clone(sample)
		for _, later := range slices.Backward(steps[i:]) {
			b = later.spoil(b)
		}
		if _, drop := decode(b); drop != step.want {
			t.Errorf("%s and all that follow: dropped because of %v, want %v", step.name, drop, step.want)
		}
	}
	for n := range packetLen {
		if _, drop := decode(sample[:n]); drop != dropShort {
			t.Errorf("%d bytes: dropped because of %v", n, drop)
		}
	}
}

func TestAuthenticatedIsDecodedButMarked(t *testing.T) {
	b := append(slices.Clone(sample), 1, 4, 1, 'x') // simple password
	b[1] |= bitAuth
	b[3] = 28
	want := sampled
	want.Authenticated = true
	if got, drop := decode(b); got != want || drop != dropNone {
		t.Errorf("got %v, dropped: %v", got, drop)
	}
}

func TestNames(t *testing.T) {
	for want, got := range map[string]string{
		"Up": Up.String(), "unknown (9)": State(9).String(), "Control Detection Time Expired": DetectionExpired.String(),
		"unknown (31)": Diagnostic(31).String(), "ttl": dropTTL.String(), "authentication": dropAuthentication.String(),
	} {
		if got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

func FuzzDecode(f *testing.F) {
	f.Add(sample)
	f.Add(append(slices.Clone(sample), 1, 4, 1, 'x'))
	f.Fuzz(func(t *testing.T, b []byte) {
		p, drop := decode(b)
		if drop != dropNone {
			if p != (Packet{}) {
				t.Errorf("dropped because of %v with %v", drop, p)
			}
			return
		}
		if p.MyDiscriminator == 0 || p.DetectMultiplier == 0 || p.State > Up {
			t.Errorf("accepted %v", p)
		}
		if p.Authenticated {
			return // written without
		}
		again, drop := decode(p.append(nil))
		if again != p || drop != dropNone {
			t.Errorf("%v became %v, dropped: %v", p, again, drop)
		}
	})
}
