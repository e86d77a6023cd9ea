package trace

import (
	"cmp"
	"slices"

	"github.com/landfall-lb/landfall/internal/lb"
)

const (
	// maxWays and maxEnds bound what is told of a packet.
	maxWays = 32
	maxEnds = 1024
	// unlikely is the probability below which a way is left out. Draws that are repeated may, in theory,
	// never find a backend.
	unlikely = 1e-8
)

// Report tells of the ways that a packet can take: those through the same rules as one.
func Report(ways []Way) (all []lb.TraceWay) {
	for _, w := range ways {
		if w.Chance < unlikely {
			continue
		}
		next := lb.TraceWay{Verdict: w.verdict(), Share: w.Chance, Steps: w.Steps()}
		switch next.Verdict {
		case lb.TraceDelivered:
			next.Masqueraded = w.Masqueraded
			next.Ends = []lb.TraceEnd{{Address: w.Destination, Share: w.Chance}}
		case lb.TraceUnroutable:
			next.Ends = []lb.TraceEnd{{Address: w.Destination, Share: w.Chance}}
		case lb.TraceDropped, lb.TraceRefused, lb.TraceUnknown:
			next.Why = w.Why()
		}
		i := slices.IndexFunc(all, func(other lb.TraceWay) bool { return same(other, next) })
		if i < 0 {
			all = append(all, next)
			continue
		}
		all[i].Share += next.Share
		all[i].Ends = append(all[i].Ends, next.Ends...)
	}
	for i, w := range all {
		slices.SortFunc(w.Ends, func(a, b lb.TraceEnd) int { return a.Address.Compare(b.Address) })
		if len(w.Ends) > maxEnds {
			all[i].Ends, all[i].MoreEnds = w.Ends[:maxEnds], len(w.Ends)-maxEnds
		}
	}
	slices.SortStableFunc(all, func(a, b lb.TraceWay) int { return cmp.Compare(b.Share, a.Share) })
	return all[:min(len(all), maxWays)]
}

// same reports whether two ways go through the same rules to the same end.
func same(a, b lb.TraceWay) bool {
	return a.Verdict == b.Verdict && a.Masqueraded == b.Masqueraded && slices.Equal(a.Steps, b.Steps)
}

func (w Way) verdict() lb.TraceVerdict {
	switch {
	case w.Verdict == Drop:
		return lb.TraceDropped
	case w.Verdict == Reject:
		return lb.TraceRefused
	case w.Verdict == Redirect:
		return lb.TraceAnswered
	case w.Verdict == Unroutable:
		return lb.TraceUnroutable
	case w.Verdict == Unknown:
		return lb.TraceUnknown
	case w.Translated:
		return lb.TraceDelivered
	}
	return lb.TraceUntouched
}
