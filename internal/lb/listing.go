package lb

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"
)

// Listing says since when a Service lists each of its external IPs and ports, in milliseconds since 1970,
// by the address or the port as in "443/TCP". The controller writes it as the message of
// ConditionExternalIPs, so that all nodes know who asked for an external IP first.
type Listing map[string]int64

const (
	listedSince = "since "
	listedAt    = "2006-01-02T15:04:05.000Z"
	// maxListing bounds the message of the condition. What does not fit is not told.
	maxListing = 32 << 10
	// maxListed is how many addresses a Service lists, and how many ports: no fewer than fit. A tenant can write
	// 80,000 addresses into one Service.
	maxListed = 4096
)

func (p ServicePort) listed() string {
	return string(appendPort(nil, p))
}

// Next returns what a Service lists: what it listed before since then, and what is new since now, of its first 4,096
// addresses and ports. It is nil for one that serves no external IP. A Service without a cluster IP serves none.
func (l Listing) Next(s *Service, now int64) Listing {
	if len(s.ExternalIPs) == 0 || len(s.ClusterIPs) == 0 || len(s.Ports) == 0 {
		return nil
	}
	addrs, ports := s.ExternalIPs[:min(len(s.ExternalIPs), maxListed)], s.Ports[:min(len(s.Ports), maxListed)]
	next := make(Listing, len(addrs)+len(ports))
	list := func(item string) { next[item] = cmp.Or(l[item], now) }
	for _, addr := range addrs {
		list(addr.String())
	}
	for _, p := range ports {
		list(p.listed())
	}
	return next
}

// Since returns since when the Service asks for an external IP at a port; 0 if that is unknown.
func (l Listing) Since(addr netip.Addr, protocol Protocol, port uint16) int64 {
	if len(l) == 0 {
		return 0
	}
	at, ok := l[addr.String()]
	since, also := l[ServicePort{Protocol: protocol, Port: port}.listed()]
	if !ok || !also {
		return 0
	}
	return max(at, since)
}

// Latest returns the latest of all times.
func (l Listing) Latest() (latest int64) {
	for _, since := range l {
		latest = max(latest, since)
	}
	return latest
}

// String returns the message of the condition, the earliest first.
func (l Listing) String() string {
	items := slices.SortedFunc(maps.Keys(l), func(a, b string) int {
		return cmp.Or(cmp.Compare(l[a], l[b]), cmp.Compare(a, b))
	})
	var b strings.Builder
	for i, item := range items {
		between := ", "
		if i == 0 || l[item] != l[items[i-1]] {
			between = listedSince + time.UnixMilli(l[item]).UTC().Format(listedAt) + ": "
			if i > 0 {
				between = "; " + between
			}
		}
		if b.Len()+len(between)+len(item) > maxListing {
			break
		}
		b.WriteString(between + item)
	}
	return b.String()
}

// ParseListing reads the message of the condition. What it cannot read is not listed.
func ParseListing(message string) Listing {
	if len(message) > maxListing {
		return nil
	}
	l := Listing{}
	for group := range strings.SplitSeq(message, "; ") {
		at, items, _ := strings.Cut(group, ": ")
		since, err := time.Parse(listedSince+listedAt, at)
		if err != nil || since.UnixMilli() <= 0 {
			continue
		}
		for item := range strings.SplitSeq(items, ", ") {
			l[item] = since.UnixMilli()
		}
	}
	return l
}
