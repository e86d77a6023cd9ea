package lb

import (
	"net/netip"
	"slices"
	"strconv"
	"strings"
)

// A tenant who may write services/status can write any address there. What counts beside the status
// is the condition Assigned: it names the addresses that the controller confirmed.

// MaxAddresses is the most addresses of one Service's status that count: 16 of each family is also
// the most that a Service can request.
const MaxAddresses = 32

// Words of the condition Assigned around the addresses that the Service holds.
const (
	FromPool  = " from pool "
	Keeps     = "keeps "
	AlsoHolds = "it also holds "
	// HeldByAnother follows an address that the Service holds by mistake, and OthersHold comes before more such.
	HeldByAnother = " is held by "
	OthersHold    = "others also hold "
)

// Confirmed returns the addresses that the condition Assigned says the Service holds by right.
func Confirmed(assigned Condition) []netip.Addr {
	message := unquoted(assigned.Message)
	message, _, _ = strings.Cut(message, sharedBy)
	message, others, _ := strings.Cut(message, "; "+AlsoHolds)
	confirmed := addressItems(others, "")
	switch {
	case assigned.Status:
		return append(addressItems(message, FromPool), confirmed...)
	case assigned.Reason == ReasonDuplicate:
		return confirmed
	}
	_, kept, _ := strings.Cut(message, Keeps)
	return append(addressItems(kept, ""), confirmed...)
}

// Duplicated returns the addresses that the condition Assigned says the Service holds by mistake.
func Duplicated(assigned Condition) []netip.Addr {
	if assigned.Status || assigned.Reason != ReasonDuplicate {
		return nil
	}
	written, rest, _ := strings.Cut(assigned.Message, HeldByAnother)
	addr, err := netip.ParseAddr(written)
	if err != nil {
		return nil
	}
	_, others, _ := strings.Cut(unquoted(rest), "; "+OthersHold)
	return append([]netip.Addr{addr}, addressItems(others, "")...)
}

// addressItems returns those items of a list that are addresses, up to the first "; ". With after,
// only those that it follows.
func addressItems(list, after string) []netip.Addr {
	list, _, _ = strings.Cut(list, "; ")
	var addrs []netip.Addr
	for item := range strings.SplitSeq(list, ", ") {
		if after != "" {
			at := strings.Index(item, after)
			if at < 0 {
				continue
			}
			item = item[:at]
		}
		if addr, err := netip.ParseAddr(item); err == nil && len(addrs) < MaxAddresses {
			addrs = append(addrs, addr)
		}
	}
	return addrs
}

// unquoted returns a message without what is quoted in it, which tenants wrote.
func unquoted(message string) string {
	start := strings.IndexByte(message, '"')
	if start < 0 {
		return message
	}
	var b strings.Builder
	for start >= 0 {
		b.WriteString(message[:start])
		quoted, err := strconv.QuotedPrefix(message[start:])
		if err != nil {
			return b.String()
		}
		message = message[start+len(quoted):]
		start = strings.IndexByte(message, '"')
	}
	b.WriteString(message)
	return b.String()
}

// ReadIngress returns the addresses of a status that count, in their order: at most MaxAddresses,
// confirmed ones before others. The rest is dropped, so that a status costs and keeps from others
// only so much.
func ReadIngress(shown []Ingress, conditions []Condition) (read []Ingress, dropped int) {
	if len(shown) <= MaxAddresses {
		return shown, 0
	}
	confirmed := map[netip.Addr]bool{}
	for _, c := range conditions {
		if c.Type == ConditionAssigned {
			for _, addr := range Confirmed(c) {
				confirmed[addr] = true
			}
		}
	}
	counts := map[netip.Addr]bool{}
	for _, first := range []bool{true, false} {
		for _, in := range shown {
			if len(counts) < MaxAddresses && confirmed[in.Addr] == first {
				counts[in.Addr] = true
			}
		}
	}
	for _, in := range shown {
		if counts[in.Addr] && !slices.ContainsFunc(read, func(r Ingress) bool { return r.Addr == in.Addr }) {
			read = append(read, in)
		}
	}
	return read, len(shown) - len(read)
}
