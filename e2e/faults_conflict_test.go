package e2e

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/landfall-lb/landfall/e2e/lab"
)

// TestFaultAddressInUse gives a Service an address that a machine on the LAN uses: it keeps it, and
// the Service says with whom it collides. Once it has gone the address is announced; when it comes
// back, the address is defended, and that is said too.
func TestFaultAddressInUse(t *testing.T) {
	t.Parallel()
	l := labWith(t, lab.Options{Values: map[string]any{"speaker": map[string]any{"onAddressConflict": "service"}}})
	mac := strings.TrimSpace(mustExec(t, l, lab.ClientName, "cat", "/sys/class/net/eth0/address"))
	vip := seedVIP.Addr()
	take := func(verb string) {
		mustExec(t, l, lab.ClientName, "ip", "addr", verb, vip.String()+"/24", "dev", "eth0")
	}
	take("add")
	if err := l.AddService(t.Context(), lab.SeedService()); err != nil {
		t.Fatal(err)
	}
	who := fmt.Sprintf("%s is in use by %s on eth0", vip, mac)
	wantCondition(t, l, "my-nginx", "landfall.dev/Announced", "False", "AddressConflict", who)
	wantCondition(t, l, "my-nginx", "landfall.dev/Serving", "False", "AddressConflict", who)
	if nodes := answerers(t, l, vip); len(nodes) > 0 {
		t.Errorf("%v answer for an address that somebody else uses", nodes)
	}
	wantEvent(t, l, "my-nginx", "AddressConflict", mac)
	wantOnSpeakers(t, l, "/metrics", fmt.Sprintf(`landfall_speaker_address_conflict{interface="eth0",mac="%s",vip="%s"} 1`,
		mac, vip))
	wantOnSpeakers(t, l, "/v1/status", `"reason": "AddressConflict"`)

	setAnnotation := func(value string) {
		updateService(t, l, "my-nginx", func(s *corev1.Service) {
			if s.Annotations == nil {
				s.Annotations = map[string]string{}
			}
			s.Annotations["landfall.dev/on-address-conflict"] = value
		})
	}
	setAnnotation("announce")
	wantCondition(t, l, "my-nginx", "landfall.dev/Announced", "True", "Contested", mac)
	wantCondition(t, l, "my-nginx", "landfall.dev/Serving", "False", "Contested", mac)

	setAnnotation("refuse")
	take("del")
	waitAnnounced(t, l, "my-nginx", vip.String())
	take("add")
	// Whoever it asks for hears who asks.
	askUDP(t, l, netip.AddrPortFrom(vip, 0), netip.MustParseAddrPort("172.26.236.77:9"), "nobody", 1)
	wantCondition(t, l, "my-nginx", "landfall.dev/Announced", "True", "Contested", mac)
	wantEvent(t, l, "my-nginx", "Contested", mac)
	take("del")
	waitAnnounced(t, l, "my-nginx", vip.String())
	wantAnswers(t, l, lab.FarClientName, "tcp", seedVIP, "my-nginx-1", "my-nginx-2")
}

// wantOnSpeakers waits until some speaker shows a line that contains text at path.
func wantOnSpeakers(t *testing.T, l *lab.Lab, path, text string) {
	t.Helper()
	eventually(t, fmt.Sprintf("a speaker shows %s on %s", text, path), func() error {
		for _, a := range l.Agents("speaker") {
			if page, err := a.Get(t.Context(), path); err == nil && strings.Contains(page, text) {
				return nil
			}
		}
		return fmt.Errorf("none does")
	})
}
