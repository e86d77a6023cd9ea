package plan

import (
	"net/netip"
	"testing"

	"github.com/landfall-lb/landfall/internal/lb"
)

// FuzzParseExternalIPs checks that what is read of the flag is what it says, or an error.
func FuzzParseExternalIPs(f *testing.F) {
	for _, text := range []string{"allow", "deny", "192.0.2.0/24, 2001:db8::/64", "", ",", "::ffff:0.0.0.0/96",
		"0.0.0.0/0"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		e, err := ParseExternalIPs(text)
		switch {
		case err != nil && !e.Deny:
			t.Errorf("%q: %v, and everything is allowed", text, err)
		case err == nil && text != "allow" && !e.Deny:
			t.Errorf("%q allows everything", text)
		}
		for _, p := range e.Allowed {
			if !p.IsValid() || p != p.Masked() || p.Addr().IsGlobalUnicast() && e.Refuse(p.Addr()) != nil {
				t.Errorf("%q allows %v", text, p)
			}
		}
		_ = e.Refuse(netip.Addr{})
	})
}

// FuzzParseScheduler checks that others than the known names are refused, in short words.
func FuzzParseScheduler(f *testing.F) {
	f.Add("maglev")
	f.Add("")
	f.Add("Maglev\x00")
	f.Fuzz(func(t *testing.T, name string) {
		scheduler, ok := ParseScheduler(name)
		said := SchedulerIgnored(lb.Service{Scheduler: name}, nil, Service{Scheduler: Random}, false)
		if ok != (said == "") || !ok && scheduler != "" {
			t.Errorf("%q: %q, %v", name, scheduler, ok)
		}
		if said = SchedulerIgnored(lb.Service{Scheduler: name}, nil, Service{Scheduler: Random}, true); len(said) > 1024 {
			t.Errorf("%d bytes for an Event", len(said))
		}
	})
}
