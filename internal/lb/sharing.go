package lb

import (
	"cmp"
	"crypto/sha256"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"
)

// The condition Assigned of a Service with a sharing key ends with how it shares its addresses:
//
//	192.0.2.7 from pool lan (shared by key "web" on 80/TCP, 443/TCP; 192.0.2.7 after default/first)
//
// Tenants cannot write conditions, so this is also the memory of what was agreed: which Service
// changed its ports since, and which Service held an address first. A Service goes on to name the one
// that it joined when that is gone; the next one that is first names none.
const sharedBy = " (shared by key "

// andMore comes before the number of ports that the Service has beyond those that are kept. Proxies do not serve them.
const andMore = " and "

// maxTerms bounds each part of the terms, since they go into a condition.
const maxTerms = 96

// SharingTerms returns all that decides with which others a Service can share an address; "" if it
// has no sharing key.
func SharingTerms(s *Service) string {
	if s.Request.Share == "" {
		return ""
	}
	terms := strconv.Quote(shorten(s.Request.Share)) + " on " + shorten(sharedPorts(s.Ports))
	if s.Unkept.Ports > 0 {
		terms += fmt.Sprintf("%s%d more", andMore, s.Unkept.Ports)
	}
	if s.ExternalPolicy == Local {
		terms += ", policy Local, selector " + strconv.Quote(shorten(s.Request.Selector))
	}
	return terms
}

// sharedPorts lists ports in an order of its own.
func sharedPorts(all []ServicePort) string {
	ports := slices.SortedFunc(slices.Values(all), func(a, b ServicePort) int {
		return cmp.Or(cmp.Compare(a.Port, b.Port), strings.Compare(string(a.Protocol), string(b.Protocol)))
	})
	const each = len("65535/SCTP, ")
	list := make([]byte, 0, each*len(ports))
	for i, p := range ports {
		if i > 0 {
			list = append(list, ", "...)
		}
		list = appendPort(list, p)
	}
	return string(list)
}

// appendPort appends a port as in "443/TCP".
func appendPort(to []byte, p ServicePort) []byte {
	return append(append(strconv.AppendUint(to, uint64(p.Port), 10), '/'), p.Protocol...)
}

// Intrusion is how far what a Service asks for at its VIPs is from what the controller confirmed. Of Services that
// collide the one with less comes first, although it may be younger.
type Intrusion uint8

// The intrusions.
const (
	IntrudesNot Intrusion = iota
	// Changed is that of a Service with other ports than the condition Assigned names: it changed them, and the
	// controller has not said yet whether they collide.
	Changed
	// ChangedAfterOthers is the same of a Service that joined another one.
	ChangedAfterOthers
	// Unconfirmed is that of a Service that holds an address by mistake, or whose status shows one that the condition
	// does not name: somebody wrote that there.
	Unconfirmed
)

// Intrudes tells how a Service intrudes upon others.
func Intrudes(assigned Condition, ports []ServicePort, shown []Ingress) Intrusion {
	if assigned.Reason == ReasonDuplicate {
		return Unconfirmed
	}
	confirmed := Confirmed(assigned)
	for _, in := range shown {
		if !slices.Contains(confirmed, in.Addr) {
			return Unconfirmed
		}
	}
	terms, after := ParseSharing(assigned.Message)
	key, err := strconv.QuotedPrefix(terms)
	if err != nil {
		return IntrudesNot // it shares nothing
	}
	agreed, _, _ := strings.Cut(strings.TrimPrefix(terms[len(key):], " on "), ", policy ")
	agreed, _, _ = strings.Cut(agreed, andMore)
	switch {
	case agreed == shorten(sharedPorts(ports)):
		return IntrudesNot
	case len(after) == 0:
		return Changed
	}
	return ChangedAfterOthers
}

// shorten bounds a text and keeps different ones apart, also where a tenant looks for two that are not.
func shorten(s string) string {
	if len(s) <= maxTerms {
		return s
	}
	sum := sha256.Sum256([]byte(s))
	return fmt.Sprintf("%s... %x", strings.ToValidUTF8(s[:maxTerms/2], ""), sum[:16])
}

// FormatSharing returns the end of a condition's message. after has, for each address that another
// Service held first, that Service.
func FormatSharing(terms string, after map[netip.Addr]Key) string {
	if terms == "" {
		return ""
	}
	var b strings.Builder
	b.WriteString(sharedBy + terms)
	for _, addr := range slices.SortedFunc(maps.Keys(after), netip.Addr.Compare) {
		fmt.Fprintf(&b, "; %s after %s", addr, after[addr])
	}
	b.WriteString(")")
	return b.String()
}

// ParseSharing reads the end of a condition's message; terms is "" if it says nothing of sharing.
func ParseSharing(message string) (terms string, after map[netip.Addr]Key) {
	start := indexUnquoted(message, sharedBy)
	if start < 0 || !strings.HasSuffix(message, ")") {
		return "", nil
	}
	rest := strings.TrimSuffix(message[start+len(sharedBy):], ")")
	for {
		i := strings.LastIndex(rest, "; ")
		if i < 0 {
			return rest, after
		}
		addr, key, ok := parseAfter(rest[i+2:])
		if !ok {
			return rest, after
		}
		if after == nil {
			after = map[netip.Addr]Key{}
		}
		after[addr], rest = key, rest[:i]
	}
}

// indexUnquoted returns where a message has text that is not in quotes, in which tenants wrote; -1 if it has none.
func indexUnquoted(message, text string) int {
	for at := 0; ; {
		rest := message[at:]
		found, quote := strings.Index(rest, text), strings.IndexByte(rest, '"')
		if found < 0 || quote < 0 || found < quote {
			if found < 0 {
				return -1
			}
			return at + found
		}
		quoted, err := strconv.QuotedPrefix(rest[quote:])
		if err != nil {
			return -1
		}
		at += quote + len(quoted)
	}
}

func parseAfter(written string) (netip.Addr, Key, bool) {
	address, name, _ := strings.Cut(written, " after ")
	addr, err := netip.ParseAddr(address)
	namespace, name, ok := strings.Cut(name, "/")
	return addr, Key{Namespace: namespace, Name: name}, err == nil && ok && !strings.ContainsAny(name, `" `)
}

// Assigned is what the condition Assigned of a Service says of the addresses that it holds.
type Assigned struct {
	// Duplicate is set if it holds one by mistake.
	Duplicate bool
	// Confirmed are those that it holds by right, After the Services that held some of them first.
	Confirmed []netip.Addr
	After     map[netip.Addr]Key
}

// ReadAssigned reads the condition Assigned. That of a Service that shares many addresses is long.
func ReadAssigned(c Condition) Assigned {
	_, after := ParseSharing(c.Message)
	return Assigned{Duplicate: c.Reason == ReasonDuplicate, Confirmed: Confirmed(c), After: after}
}

// Joined reports, for each of the Services that show addr, by what their conditions Assigned say,
// whether it joined the others: the condition names another of them that held addr first, or any one if
// there is another that names none, or says that the Service holds addr by mistake, or does not name addr, while that
// of another Service does.
func Joined(addr netip.Addr, holders []Key, assigned []Assigned) []bool {
	joined := make([]bool, len(holders))
	if len(holders) < 2 {
		return joined
	}
	holds := make(map[Key]bool, len(holders))
	for _, key := range holders {
		holds[key] = true
	}
	confirmed, first := make([]bool, len(holders)), false
	for i, a := range assigned {
		confirmed[i] = slices.Contains(a.Confirmed, addr)
		_, after := a.After[addr]
		first = first || confirmed[i] && !after && !a.Duplicate
	}
	for i, a := range assigned {
		after, ok := a.After[addr]
		joined[i] = a.Duplicate || ok && (first || holds[after])
	}
	if slices.Contains(confirmed, true) {
		for i := range joined {
			joined[i] = joined[i] || !confirmed[i]
		}
	}
	return joined
}
