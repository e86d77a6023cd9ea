package lb

import (
	"strings"
	"testing"
)

func TestParseProbe(t *testing.T) {
	for _, text := range []string{"", "tcp", "http:/", "http:/healthz", "http:/ready?full=1&x=%20"} {
		p, err := ParseProbe(text)
		if err != nil || p.String() != text {
			t.Errorf("%q: %v, %v", text, p, err)
		}
	}
	for text, want := range map[string]string{
		"TCP":                      `"TCP": want tcp, or http: and a path, as in http:/healthz`,
		" tcp":                     `" tcp": want tcp`,
		"udp":                      `"udp": want tcp`,
		"http":                     `"http": want tcp`,
		"http:healthz":             "want tcp",
		"https:/healthz":           "want tcp",
		"http://10.0.0.1/healthz":  "names a host",
		"http:/a b":                "%XX",
		"http:/a\r\nHost: other":   "%XX",
		"http:/%zz":                "cannot be requested",
		"http:/ü":                  "%XX",
		"http:/a#b":                "%XX",
		strings.Repeat("a", 200e3): "want tcp",
		"http:/" + strings.Repeat("a", maxProbePath): "at most 1024",
	} {
		p, err := ParseProbe(text)
		if err == nil || !strings.Contains(err.Error(), want) || len(err.Error()) > 300 {
			t.Errorf("%.80q: %v, %v, want %q", text, p, err, want)
		}
	}
}

func TestRefuseProbe(t *testing.T) {
	tcp, udp := []ServicePort{{Protocol: UDP}, {Protocol: TCP}}, []ServicePort{{Protocol: UDP}, {Protocol: SCTP}}
	for _, tt := range []struct {
		name string
		s    Service
		want string
	}{
		{"no annotation", Service{Type: ClusterIP, Ports: udp}, ""},
		{"well", Service{Type: LoadBalancer, Ports: tcp, Probe: Probe{Kind: ProbeTCP}}, ""},
		{"unread", Service{Type: LoadBalancer, Ports: tcp, InvalidProbe: `"x": want tcp`}, `landfall.dev/probe: "x": want tcp`},
		{"another type", Service{Type: ClusterIP, Ports: tcp, Probe: Probe{Kind: ProbeTCP}},
			`"tcp" is for Services of type LoadBalancer, and this one is of type ClusterIP`},
		{"no TCP", Service{Type: LoadBalancer, Ports: udp, Probe: Probe{Kind: ProbeHTTP, Path: "/a"}},
			`"http:/a" needs a port of protocol TCP`},
	} {
		why := tt.s.RefuseProbe()
		if (why == nil) != (tt.want == "") || why != nil && (why.Reason != ReasonProbeInvalid ||
			!strings.Contains(why.Message, tt.want)) {
			t.Errorf("%s: %v, want %q", tt.name, why, tt.want)
		}
	}
}

// FuzzParseProbe checks that what is taken has one form, and cannot add a line to a request.
func FuzzParseProbe(f *testing.F) {
	for _, text := range []string{"", "tcp", "http:/healthz", "http://x", "http:/\r\n"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		p, err := ParseProbe(text)
		if err == nil && (p.String() != text || strings.ContainsAny(p.Path, " \r\n")) {
			t.Errorf("%q was read as %q", text, p)
		}
	})
}
