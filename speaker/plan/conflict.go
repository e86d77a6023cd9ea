package plan

import (
	"fmt"
	"slices"

	"github.com/landfall-lb/landfall/internal/lb"
)

// A VIP that no node of ours has answered for is looked for before it is announced: its owner asks,
// and so does each other node that could be the owner once one has found somebody. One that was
// probed ahead is announced at once and asked for side by side: an owner that finds somebody now
// withdraws it (RFC 5227 section 2.4, case a). What one of ours
// has answered for is taken over without a question, as that would lengthen a failure, and is
// defended against whoever comes later.

// conflict returns why this node does not claim a VIP that it could deliver: a conflicting host has
// it.
func conflict(f Facts, in Input) *lb.Refusal {
	if in.Served || len(in.ConflictingHosts) == 0 {
		return nil
	}
	policy, advice := onConflict(f, in.Holders)
	if policy == AnnounceOnConflict {
		return nil
	}
	return lb.Refuse(lb.ReasonAddressConflict, "%s is in use by %s, a conflicting host%s%s", in.VIP,
		in.ConflictingHosts[0], others(in.ConflictingHosts, ", and by others"), advice)
}

// onConflict is what the Services that held the VIP first ask for, of which one that insists is
// enough if Services may, or else what holds for all. A host that uses an address of a pool is a mistake of
// the administrator, who says whether tenants may take the address from it.
func onConflict(f Facts, holders []Holder) (policy OnConflict, advice string) {
	policy = f.OnConflict
	holders, _ = first(holders)
	for _, h := range holders {
		if h.OnConflict == "" {
			continue
		}
		asked, err := ParseOnConflict(h.OnConflict)
		if err != nil {
			advice = fmt.Sprintf("; annotation %s of %s: %s", lb.AnnotationOnConflict, h.Service, err)
			continue
		}
		switch {
		case asked == AnnounceOnConflict && f.OnConflict != ServiceOnConflict && f.OnConflict != AnnounceOnConflict:
			advice = fmt.Sprintf("; annotation %s of %s: announce needs --on-address-conflict=service of the speakers",
				lb.AnnotationOnConflict, h.Service)
		case asked == AnnounceOnConflict:
			return asked, ""
		default:
			policy = asked
		}
	}
	return policy, advice
}

// probes reports whether this node looks for other holders of the VIP.
func probes(f Facts, in Input, d Decision) bool {
	switch {
	case in.Served:
		return false
	case d.Refusal != nil:
		return d.Refusal.Reason == lb.ReasonAddressConflict // to learn of its end
	case d.Owner == f.Self:
		return !in.Probed
	}
	return reportsConflict(in.Claims)
}

// clear reports whether the VIP was probed ahead where this node announces it, and nobody is known to
// use it.
func (in Input) clear(interfaces []string) bool {
	if len(in.ConflictingHosts) > 0 || reportsConflict(in.Claims) {
		return false
	}
	return !slices.ContainsFunc(interfaces, func(name string) bool { return !slices.Contains(in.Clear, name) })
}

// reportsConflict reports whether another node knows of a conflicting host and so does not announce
// the VIP.
func reportsConflict(claims map[string]Claim) bool {
	for _, claim := range claims {
		if claim.Reason == lb.ReasonAddressConflict {
			return true
		}
	}
	return false
}

// Ceded reports whether one of ours that began to answer for a VIP has found a conflicting host, and
// nobody else of ours answers: whoever is next has to ask.
func Ceded(in Input) bool {
	if len(in.Answering) > 0 || in.Restarted || !reportsConflict(in.Claims) {
		return false
	}
	for _, claim := range in.Claims {
		if claim.Answering && claim.Reason != lb.ReasonAddressConflict { // who has found one withdraws
			return false
		}
	}
	return true
}

// reporters are the nodes one of which reports on a VIP that has no owner: those who know of a
// conflict, as only they know with whom, else all.
func reporters(f Facts, in Input, d Decision) []string {
	var knowing []string
	for _, node := range f.Live {
		reason := in.Claims[node].Reason
		if node == f.Self {
			reason = d.Claim(false).Reason
		}
		if reason == lb.ReasonAddressConflict {
			knowing = append(knowing, node)
		}
	}
	if len(knowing) > 0 {
		return knowing
	}
	return f.Live
}

// others returns words about conflicting hosts but the first, if there are any. Sentences name the first: a device
// may make up more and more MAC addresses, and each change of a sentence is written to the Service.
func others(hosts []ConflictingHost, words string) string {
	if len(hosts) > 1 {
		return words
	}
	return ""
}

// Uses returns what the sentences about a VIP say of its conflicting hosts; "" if there are none.
func (d Decision) Uses() string {
	if len(d.ConflictingHosts) == 0 {
		return ""
	}
	return d.ConflictingHosts[0].String() + others(d.ConflictingHosts, " and others")
}
