package plan

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/landfall-lb/landfall/internal/lb"
)

// maxMessage is the longest message of a condition that the API server takes.
const maxMessage = 32768

// What a tenant writes goes into the message of a condition, which must stay short: one that is too
// long is never written.
func TestLongRequestsMakeShortMessages(t *testing.T) {
	long := strings.Repeat("x", 200_000)
	for name, r := range map[string]lb.Request{
		"address":    {Addresses: []string{long}},
		"per family": {PerFamily: long},
		"mode":       {Mode: long},
		"outside":    {WhenOutside: long},
		"pool":       {Pool: long},
		"share":      {Share: long},
	} {
		s := lb.Service{Families: []lb.Family{lb.IPv4}, Request: r}
		w, refusal := parse(&s)
		if refusal == nil && w.pool != "" {
			refusal = refuseUnknown(w.pool)
		}
		if refusal != nil && len(refusal.Message) > 500 {
			t.Errorf("%s: a message of %d bytes", name, len(refusal.Message))
		}
	}
	if got := refuseUnknown("a\x1b[2Jb").Message; got != `asks for pool "a\x1b[2Jb", which does not exist` {
		t.Errorf("a name that a terminal obeys: %s", got)
	}
}

// FuzzParse checks that whatever a Service asks for is taken in within its bounds, or refused in a
// few words.
func FuzzParse(f *testing.F) {
	f.Add("192.0.2.1", "2001:db8::1", "", "", "")
	f.Add("::ffff:192.0.2.1", " 192.0.2.1 ", "2", "VIP", "move")
	f.Add("192.0.2.300", "", "17", "vip", "drop")
	f.Fuzz(func(t *testing.T, first, second, perFamily, mode, outside string) {
		s := lb.Service{Families: []lb.Family{lb.IPv4, lb.IPv6}, Request: lb.Request{
			Addresses: []string{first, second}, PerFamily: perFamily, Mode: mode, WhenOutside: outside}}
		w, refusal := parse(&s)
		if refusal != nil {
			if refusal.Reason == "" || len(refusal.Message) > maxMessage/8 {
				t.Errorf("%s: a message of %d bytes", refusal.Reason, len(refusal.Message))
			}
			return
		}
		if w.count < 0 || w.count > maxPerFamily || len(w.asks()) > 2 ||
			slices.ContainsFunc(w.asks(), func(a netip.Addr) bool { return !a.IsValid() || a.Zone() != "" || a.Is4In6() }) {
			t.Errorf("it asks for %d, %v", w.count, w.asks())
		}
	})
}
