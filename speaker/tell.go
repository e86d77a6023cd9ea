package main

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/speaker/ownership"
	"github.com/landfall-lb/landfall/speaker/partition"
	"github.com/landfall-lb/landfall/speaker/plan"
	"github.com/landfall-lb/landfall/speaker/report"
	"github.com/landfall-lb/landfall/speaker/routes"
)

// What people are told: the log, the status of objects, and Events.

// tell logs what was decided, and reports on the Services that it concerns and on those without any
// VIP.
func (s *speaker) tell(now time.Time, facts plan.Facts, without []lb.Key, decided map[netip.Addr]ownership.Decided) {
	touched := map[lb.Key]bool{}
	for _, key := range without {
		touched[key] = true
	}
	for _, d := range decided {
		for _, key := range slices.Concat(d.Before.Services, d.After.Services) {
			touched[key] = true
		}
		if !d.Gone {
			logChange(s.log, s.self, d.Before, d.After)
			s.logConflict(now, d.Before, d.After)
		}
	}
	reports := make(map[lb.Key]*lb.AnnouncedStatus, len(touched))
	for key := range touched {
		reports[key] = s.announced(facts, key)
	}
	if len(reports) > 0 {
		s.to.report.Update(reports)
	}
}

// logEstranged logs that the node may have been cut off, or has heard the others again.
func logEstranged(log *slog.Logger, estranged bool, f partition.Facts) {
	if estranged {
		log.Warn("this node may have been cut off; it takes no address before it has heard another speaker", "interfaces",
			f.Carrier, "live", f.Speakers.Live, "missing", f.Speakers.Missing)
		return
	}
	log.Info("this node takes addresses again", "live", f.Speakers.Live, "missing", f.Speakers.Missing)
}

// logChange logs that a decision differs, not each time that it is made.
func logChange(log *slog.Logger, self string, before, now plan.Decision) {
	was, is := before.Obstacle(), now.Obstacle()
	switch {
	case before.Owner != now.Owner && (now.Owner == self || before.Owner == self):
		log.Info("owner changes", "vip", now.VIP, "from", before.Owner, "to", now.Owner, "interfaces", now.Answer,
			"handover", now.Handover, "reason", is)
	case before.Owner != now.Owner || was != is:
		log.Debug("decision changes", "vip", now.VIP, "owner", now.Owner, "reason", is)
	}
}

// maxConflictLines is how many lines of one second say who uses addresses: whoever can send packets can make up
// devices for thousands of them.
const maxConflictLines = 10

// logConflict logs that something else is to be said of the conflicting hosts of a VIP.
func (s *speaker) logConflict(now time.Time, before, after plan.Decision) {
	if before.Uses() == after.Uses() {
		return
	}
	leftOut, ok := s.conflictLines.Admit(now, maxConflictLines)
	if !ok {
		return
	}
	log := s.log
	if leftOut > 0 {
		log = log.With("leftOut", leftOut)
	}
	if after.Uses() == "" {
		log.Info("the conflicting host no longer uses the address", "vip", after.VIP)
		return
	}
	log.Warn("a conflicting host uses the address", "vip", after.VIP, "hosts", after.ConflictingHosts, "announced",
		len(after.Answer) > 0)
}

// announced is what is to be written to a Service; nil if it is not for this node to say.
func (s *speaker) announced(facts plan.Facts, key lb.Key) *lb.AnnouncedStatus {
	vips, surplus := s.rooms.holders.VIPs(key), s.rooms.holders.Surplus(key)
	switch {
	case len(vips) == 0 && len(surplus) > 0:
		return plan.SurplusStatus(facts, surplus)
	case len(vips) == 0:
		service, _ := s.from.services.Get(key)
		return plan.Farewell(facts, s.opts.class, service)
	case facts.Stopping:
		return nil // the heir reports
	}
	decisions := make([]plan.Decision, len(vips))
	for i, vip := range vips {
		decisions[i], _ = s.rooms.ownership.Decision(vip)
	}
	r, ok := plan.Summarize(s.self, decisions)
	if !ok {
		return nil
	}
	r = r.For(key, s.self, decisions)
	service, _ := s.from.services.Get(key)
	for i, vip := range vips {
		d := s.delivery(service, key, vip)
		if d != nil && d.Deliverable() == lb.ReasonFrontendInUse && decisions[i].Undelivered[key] == nil {
			r = r.Refused(d.Refusal) // the address is announced for another Service
		}
	}
	if len(surplus) > 0 {
		r = r.Refused(plan.Surplus(surplus))
	}
	if why := service.RefuseProbe(); why != nil {
		r = r.Noting(why)
	}
	status := r.Status()
	return &status
}

// announceSessions sends Events for sessions that are up or were lost.
func (s *speaker) announceSessions(news []routes.News) {
	for _, n := range news {
		p, ok := s.from.routes.peers.Get(n.Peer)
		switch {
		case !ok:
		case n.Up:
			s.to.writers.event(p, true, lb.ReasonEstablished, "the session with "+s.self+" is established")
		default:
			s.to.writers.event(p, false, n.Reason, fmt.Sprintf("the session with %s is lost: %s", s.self, n.LastError))
		}
	}
}

// jobs are what is to be written into the status of BGPPeers and advertisements.
func (s *speaker) jobs(f routes.Facts, writes routes.Writes) map[string]report.Job {
	jobs := map[string]report.Job{}
	for name, said := range writes.Peers {
		jobs["BGPPeer "+name] = report.Job{Content: fmt.Sprint(said), Do: func(ctx context.Context) error {
			return s.to.writers.peerNode(ctx, name, s.self, said)
		}}
	}
	for name, c := range writes.Conditions {
		ad := f.BGP.Advertisements[name]
		jobs["BGPAdvertisement "+name] = report.Job{Content: fmt.Sprint(c), Do: func(ctx context.Context) error {
			_, err := s.to.writers.advertisement(ctx, ad, c)
			return err
		}}
	}
	for name, c := range s.rooms.advertised {
		ad, ok := f.Node.Advertisements[name]
		if ok && !f.Node.Stopping && !slices.Contains(ad.Conditions, c) {
			jobs["L2Advertisement "+name] = report.Job{Content: fmt.Sprint(c), Do: func(ctx context.Context) error {
				_, err := s.to.writers.l2Advertisement(ctx, ad, c)
				return err
			}}
		}
	}
	return jobs
}
