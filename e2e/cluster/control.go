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
// server without a Service in front. While these connections time out too, the machine is too busy to
// tell a connection that Landfall lost from one that was served too late.
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
		if o.judge(host, length, outages(report.Lost)); o.Broken+o.Failed > 0 {
			o.Why = append(o.Why, fmt.Sprintf("for comparison, %s to a server without a Service: %s", host, report))
		}
	}
	return o
}

// span is a stretch of time.
type span struct{ from, to time.Time }

// outages returns when requests timed out. Those that overlap are one.
func outages(lost []lab.Loss) (all []span) {
	lost = slices.DeleteFunc(slices.Clone(lost), func(l lab.Loss) bool { return !l.TimedOut })
	slices.SortFunc(lost, func(a, b lab.Loss) int { return a.Began.Compare(b.Began) })
	for _, l := range lost {
		if last := len(all) - 1; last >= 0 && !l.Began.After(all[last].to) {
			if l.Ended.After(all[last].to) {
				all[last].to = l.Ended
			}
			continue
		}
		all = append(all, span{l.Began, l.Ended})
	}
	return all
}

// excused reports whether at least half of the time that a lost connection waited lies in outages of
// the control client. A connection that was refused or reset has not waited.
func excused(l lab.Loss, outages []span) bool {
	var waited time.Duration
	for _, o := range outages {
		from, to := o.from, o.to
		if l.Began.After(from) {
			from = l.Began
		}
		if l.Ended.Before(to) {
			to = l.Ended
		}
		waited += max(0, to.Sub(from))
	}
	return l.TimedOut && waited > 0 && 2*waited >= l.Ended.Sub(l.Began)
}

// judge takes the connections of a host that are excused by the outages of its control client, which
// watched for that long, out of the lost ones.
func (o *Outcome) judge(host string, watched time.Duration, outages []span) {
	o.Watched += watched
	for _, s := range outages {
		o.Unjudged += s.to.Sub(s.from)
		o.Why = append(o.Why, fmt.Sprintf("not judged: %s from %s to %s", host, s.from.Format("15:04:05.000"),
			s.to.Format("15:04:05.000")))
	}
	o.lost = slices.DeleteFunc(o.lost, func(l loss) bool {
		if l.host != host || !excused(l.Loss, outages) {
			return false
		}
		o.NotJudged++
		if l.long {
			o.Broken--
		} else {
			o.Failed--
		}
		return true
	})
}
