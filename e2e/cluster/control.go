package cluster

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"slices"
	"time"

	"github.com/landfall-lb/landfall/e2e/lab"
	"github.com/landfall-lb/landfall/e2e/lab/podserver"
)

// maxUnjudged is the part of a story's time that may be without a judgement.
const maxUnjudged = 0.05

// controlServer is where the control clients connect to: on the control plane, which has neither
// pods nor a service proxy.
var controlServer = netip.AddrPortFrom(controlPlane.Addr, 8090)

// startControlServer starts the server of the control clients.
func (c *Cluster) startControlServer() error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	config, err := json.Marshal(podserver.Config{Pod: "control", Addrs: []netip.Addr{controlServer.Addr()},
		TCP: []uint16{controlServer.Port()}})
	if err != nil {
		return err
	}
	return c.Run("control", controlPlane.Name, self, podserver.Command, string(config))
}

// control are clients that connect, from the hosts of a story and as often as its own clients, to a
// server without a Service in front. While these connections time out too, or are served late, the machine
// is too busy to tell a connection that Landfall lost from one that was served too late.
type control struct {
	began  time.Time
	probes map[string]*lab.Probe // by host
}

// startControl starts the control clients.
func (c *Cluster) startControl(ctx context.Context, hosts []string) control {
	k := control{began: time.Now(), probes: map[string]*lab.Probe{}}
	for _, host := range hosts {
		if k.probes[host] == nil {
			k.probes[host] = c.StartProbe(ctx, host, "tcp", controlServer, newEvery)
		}
	}
	return k
}

// judge ends the control clients, and takes out of an outcome what cannot be judged.
func (k control) judge(o Outcome) Outcome {
	length := time.Since(k.began)
	for _, host := range slices.Sorted(maps.Keys(k.probes)) {
		report := k.probes[host].Stop()
		if o.judge(host, length, outages(report.Lost, report.Late)); o.Broken+o.Failed > 0 {
			o.Why = append(o.Why, fmt.Sprintf("for comparison, %s to a server without a Service: %s", host, report))
		}
	}
	return o
}

// span is a stretch of time.
type span struct {
	from, to time.Time
	late     bool // requests were late in it, and none timed out
}

// overlap is for how long a connection waited within a span.
func (s span) overlap(l lab.Loss) time.Duration {
	from, to := s.from, s.to
	if l.Began.After(from) {
		from = l.Began
	}
	if l.Ended.Before(to) {
		to = l.Ended
	}
	return max(0, to.Sub(from))
}

// outages returns when requests timed out, and when they were late. Of each, those that overlap are one.
func outages(lost, late []lab.Loss) []span { return append(merge(lost, false), merge(late, true)...) }

func merge(lost []lab.Loss, late bool) (all []span) {
	lost = slices.DeleteFunc(slices.Clone(lost), func(l lab.Loss) bool { return !l.TimedOut })
	slices.SortFunc(lost, func(a, b lab.Loss) int { return a.Began.Compare(b.Began) })
	for _, l := range lost {
		if last := len(all) - 1; last >= 0 && !l.Began.After(all[last].to) {
			if l.Ended.After(all[last].to) {
				all[last].to = l.Ended
			}
			continue
		}
		all = append(all, span{l.Began, l.Ended, late})
	}
	return all
}

// excused reports whether at least half of the time that a lost connection waited lies in outages of the
// control client, of one kind. A connection that was refused or reset has not waited.
func excused(l lab.Loss, outages []span) bool {
	for _, late := range []bool{false, true} {
		var waited time.Duration
		for _, o := range outages {
			if o.late == late {
				waited += o.overlap(l)
			}
		}
		if l.TimedOut && waited > 0 && 2*waited >= l.Ended.Sub(l.Began) {
			return true
		}
	}
	return false
}

// judge takes the connections of a host that are excused by the outages of its control client, which
// watched for that long, out of the lost ones. While answers were late only, what was not lost is judged.
func (o *Outcome) judge(host string, watched time.Duration, outages []span) {
	o.Watched += watched
	var out []loss
	o.lost = slices.DeleteFunc(o.lost, func(l loss) bool {
		if l.host != host || !excused(l.Loss, outages) {
			return false
		}
		out = append(out, l)
		o.NotJudged++
		if l.long {
			o.Broken--
		} else {
			o.Failed--
		}
		return true
	})
	for _, s := range outages {
		if s.late && !slices.ContainsFunc(out, func(l loss) bool { return s.overlap(l.Loss) > 0 }) {
			continue
		}
		o.Unjudged += s.to.Sub(s.from)
		o.Why = append(o.Why, fmt.Sprintf("not judged: %s from %s to %s", host, s.from.Format("15:04:05.000"),
			s.to.Format("15:04:05.000")))
	}
}
