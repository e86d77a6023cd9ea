package plan

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"

	"github.com/landfall-lb/landfall/internal/lb"
)

// maxPerFamily is the most addresses of one family that a Service can request.
const maxPerFamily = 16

// quoted quotes what a tenant wrote, as much of it as a condition has room for.
func quoted(written string) string {
	const most = 80
	return fmt.Sprintf("%.*q", most, written)
}

// want is what a Service asks for, parsed.
type want struct {
	families []lb.Family
	// all is set when an address of each family is a must.
	all  bool
	addr map[lb.Family][]netip.Addr // asked for by name
	// count is how many addresses of each family it asks for; 0 when it does not say.
	count int
	pool  string // asked for by name; "" for any
	mode  lb.IPMode
	// move is set when an address that is in no pool is to be given up for another.
	move bool
}

// asks returns all addresses asked for by name.
func (w want) asks() []netip.Addr {
	var all []netip.Addr
	for _, family := range w.families {
		all = append(all, w.addr[family]...)
	}
	return all
}

// parse reads what the Service asks for. A want that comes with a refusal has the families, too.
func parse(s *lb.Service) (want, *lb.Refusal) {
	w := want{families: s.Families, all: s.FamilyPolicy != lb.PreferDualStack, pool: s.Request.Pool,
		mode: lb.IPMode(s.Request.Mode)}
	if len(w.families) == 0 {
		for _, ip := range s.ClusterIPs {
			w.families = append(w.families, lb.FamilyOf(ip))
		}
	}
	if len(w.families) == 0 {
		return w,
			lb.Refuse(
				lb.ReasonNoClusterIP,
				"waits for the API server to give the Service a cluster IP, which determines its address families")
	}
	if s.Request.Disagreement != "" {
		return w, lb.Refuse(lb.ReasonRequestsDisagree, "%s; remove one, or let them say the same", s.Request.Disagreement)
	}
	if refusal := w.parseAnnotations(s.Request); refusal != nil {
		return w, refusal
	}
	return w, w.parseAddresses(s.Request)
}

func (w *want) parseAnnotations(r lb.Request) *lb.Refusal {
	switch w.mode {
	case "", lb.IPModeVIP, lb.IPModeProxy:
	default:
		w.mode = ""
		return lb.Refuse(lb.ReasonRequestInvalid, "annotation %s is %s; it can be VIP or Proxy", lb.AnnotationMode,
			quoted(r.Mode))
	}
	switch r.WhenOutside {
	case "", "keep", "move":
		w.move = r.WhenOutside == "move"
	default:
		return lb.Refuse(lb.ReasonRequestInvalid, "annotation %s is %s; it can be keep or move", lb.AnnotationWhenOutside,
			quoted(r.WhenOutside))
	}
	if r.PerFamily != "" {
		n, err := strconv.Atoi(r.PerFamily)
		if err != nil || n < 1 || n > maxPerFamily {
			return lb.Refuse(lb.ReasonRequestInvalid, "annotation %s is %s; it can be a number from 1 to %d",
				lb.AnnotationPerFamily, quoted(r.PerFamily), maxPerFamily)
		}
		w.count = n
	}
	return nil
}

func (w *want) parseAddresses(r lb.Request) *lb.Refusal {
	for _, written := range r.Addresses {
		addr, err := lb.ParseAddr(written)
		if err != nil {
			return lb.Refuse(lb.ReasonAddressInvalid, "asks for %s, which is not an IP address", quoted(written))
		}
		family := lb.FamilyOf(addr)
		asked := w.addr[family]
		switch {
		case !slices.Contains(w.families, family):
			return lb.Refuse(lb.ReasonAddressInvalid, "asks for %s, but its spec.ipFamilies has no %s", addr, family)
		case slices.Contains(asked, addr):
			continue
		case len(asked) == 1 && w.count == 0:
			return lb.Refuse(lb.ReasonAddressInvalid,
				"asks for both %s and %s; it can have one address of each family, unless annotation %s asks for more",
				asked[0], addr, lb.AnnotationPerFamily)
		case w.count > 0 && len(asked) == w.count:
			return lb.Refuse(lb.ReasonAddressInvalid,
				"asks for more %s addresses by name than the %d that annotation %s asks for", family, w.count,
				lb.AnnotationPerFamily)
		}
		if w.addr == nil {
			w.addr = map[lb.Family][]netip.Addr{}
		}
		w.addr[family] = append(asked, addr)
	}
	return nil
}

// need is what a Service has and lacks of one family.
type need struct {
	family lb.Family
	have   []netip.Addr // held, and as it asks for
	wrong  []netip.Addr // held, but not as it asks for
	asked  []netip.Addr // lacking, asked for by name
	open   int          // lacking, any will do
}

// need compares what is held with what is wanted of a family. ok reports whether an address will do that is asked for
// by name, or where none is.
func (w want) need(family lb.Family, held []netip.Addr, ok func(addr netip.Addr, asked bool) bool) need {
	n := need{family: family}
	asked, total := w.addr[family], max(w.count, 1)
	for _, addr := range held {
		switch {
		case lb.FamilyOf(addr) != family:
		case slices.Contains(asked, addr) && ok(addr, true):
			n.have = append(n.have, addr)
		case !slices.Contains(asked, addr) && len(asked) < total && ok(addr, false) && (w.count == 0 || len(n.have) < total):
			n.have = append(n.have, addr)
		default:
			n.wrong = append(n.wrong, addr)
		}
	}
	for _, addr := range asked {
		if !slices.Contains(n.have, addr) {
			n.asked = append(n.asked, addr)
		}
	}
	n.open = max(0, total-len(n.have)-len(n.asked))
	return n
}
