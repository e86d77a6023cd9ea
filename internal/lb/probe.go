package lb

import (
	"fmt"
	"net/url"
	"slices"
	"strings"
)

// ProbeKind is a way of asking a backend.
type ProbeKind string

// The kinds of probes.
const (
	ProbeTCP  ProbeKind = "tcp"  // a connection
	ProbeHTTP ProbeKind = "http" // a GET that is answered with a status from 200 to 399
)

// Probe is how nodes ask the backends of a Service. The zero value asks nothing.
type Probe struct {
	Kind ProbeKind
	// Path is what a probe of kind http requests, with its query: it begins with a slash.
	Path string
}

// maxProbePath is the longest path of a probe, in bytes.
const maxProbePath = 1024

// ParseProbe reads the annotation [AnnotationProbe]: tcp, or http: and a path. The empty text asks for
// no probe. An error says what would be right.
func ParseProbe(text string) (Probe, error) {
	const want = "want tcp, or http: and a path, as in http:/healthz"
	switch path, isHTTP := strings.CutPrefix(text, string(ProbeHTTP)+":"); {
	case text == "":
		return Probe{}, nil
	case text == string(ProbeTCP):
		return Probe{Kind: ProbeTCP}, nil
	case !isHTTP || !strings.HasPrefix(path, "/"):
		return Probe{}, fmt.Errorf("%.80q: %s", text, want)
	case strings.HasPrefix(path, "//"):
		return Probe{}, fmt.Errorf("%.80q names a host, and nodes ask the endpoints: %s", text, want)
	case len(path) > maxProbePath:
		return Probe{}, fmt.Errorf("%.80q: the path has %d bytes, at most %d", text, len(path), maxProbePath)
	case strings.ContainsFunc(path, func(r rune) bool { return r <= ' ' || r > '~' || r == '#' }):
		return Probe{}, fmt.Errorf("%.80q: write signs that are not for paths as %%XX: %s", text, want)
	default:
		if _, err := url.ParseRequestURI(path); err != nil {
			return Probe{}, fmt.Errorf("%.80q: the path cannot be requested: %s", text, want)
		}
		return Probe{Kind: ProbeHTTP, Path: path}, nil
	}
}

// RefuseProbe returns why nodes do not probe the endpoints of a Service as it asks for, whatever these
// are; nil if they do, or it does not ask.
func (s *Service) RefuseProbe() *Refusal {
	why := ""
	switch {
	case s.InvalidProbe != "":
		why = s.InvalidProbe
	case s.Probe == Probe{}:
		return nil
	case s.Type != LoadBalancer:
		why = fmt.Sprintf("%.80q is for Services of type %s, and this one is of type %s", s.Probe.String(), LoadBalancer,
			s.Type)
	case !slices.ContainsFunc(s.Ports, func(p ServicePort) bool { return p.Protocol == TCP }):
		why = fmt.Sprintf("%.80q needs a port of protocol TCP, and the Service has none", s.Probe.String())
	default:
		return nil
	}
	return Refuse(ReasonProbeInvalid, "annotation %s: %s; nodes do not probe its endpoints", AnnotationProbe, why)
}

// String writes the probe as ParseProbe reads it.
func (p Probe) String() string {
	if p.Kind == ProbeHTTP {
		return string(ProbeHTTP) + ":" + p.Path
	}
	return string(p.Kind)
}
