package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// What all nodes of the outside measurement share. Each is a network namespace of its own between a
// client and two pods of its own, and believes to be the same node of the cluster: so one Service of
// each policy serves all, and the paths differ in nothing but the rules.
const (
	outsideNode = "outside"
	clusterVIP  = "203.0.113.200"
	localVIP    = "203.0.113.201"
)

var outsidePods = []string{"192.168.250.10", "192.168.250.11"}

// references are nodes whose rules are written by hand: what the kernel takes for tracking connections
// and for translating them, whoever asks for it.
var references = []struct{ name, rules string }{
	{"connection tracking, no Services", `table ip reference {
		chain forward { type filter hook forward priority 0; ct state invalid drop; }
	}`},
	{"one rule each, by hand", `table ip reference {
		chain prerouting { type nat hook prerouting priority -100;
			ip daddr ` + clusterVIP + ` tcp dport 8080 meta mark set 0x4000 dnat to ` + outsidePods[0] + `
			ip daddr ` + localVIP + ` tcp dport 8080 dnat to ` + outsidePods[0] + `
		}
		chain postrouting { type nat hook postrouting priority 100; meta mark & 0x4000 == 0x4000 masquerade; }
		chain forward { type filter hook forward priority 0; ct state invalid drop; }
	}`},
}

// outsidePlan is a node of the outside measurement: with the rules that one proxy writes for a number of
// Services, with rules of a reference, or bare.
type outsidePlan struct {
	host      string
	label     string
	contender contender
	services  int
	rules     string
	vips      []netip.Addr
}

// outsidePlans returns the nodes to measure, the bare one first.
func (b *bench) outsidePlans() []outsidePlan {
	pod := []netip.Addr{netip.MustParseAddr(outsidePods[0])}
	both := []netip.Addr{netip.MustParseAddr(clusterVIP), netip.MustParseAddr(localVIP)}
	plans := []outsidePlan{{host: outsideNode, label: "bare", vips: pod}}
	add := func(p outsidePlan) {
		p.host = fmt.Sprintf("%s-%d", outsideNode, len(plans))
		plans = append(plans, p)
	}
	for i, r := range references {
		vips := both
		if i == 0 {
			vips = pod
		}
		add(outsidePlan{label: r.name, rules: r.rules, vips: vips})
	}
	for _, n := range b.outsideServices {
		for _, c := range b.contenders() {
			add(outsidePlan{label: c.name, contender: c, services: n, vips: both})
		}
	}
	return plans
}

// prepareOutside builds the nodes' surroundings, and creates the Services.
func (b *bench) prepareOutside(ctx context.Context) error {
	for _, plan := range b.outsidePlans() {
		p, err := newPath(plan, b.lab.Namespace(plan.host))
		if err != nil {
			return fmt.Errorf("%s: %w", plan.host, err)
		}
		b.paths = append(b.paths, p)
		if plan.rules == "" {
			continue
		}
		load := exec.CommandContext(ctx, "ip", "netns", "exec", b.lab.Namespace(plan.host), "nft", "-f", "-")
		load.Stdin = strings.NewReader(plan.rules)
		if out, err := load.CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w: %s", plan.label, err, out)
		}
	}
	for policy, vip := range map[corev1.ServiceExternalTrafficPolicy]string{
		corev1.ServiceExternalTrafficPolicyCluster: clusterVIP, corev1.ServiceExternalTrafficPolicyLocal: localVIP,
	} {
		err := b.fleet.createVIP(ctx, "outside-"+strings.ToLower(string(policy)), policy, netip.MustParseAddr(vip),
			endpoint(outsidePods[0], outsideNode), endpoint(outsidePods[1], outsideNode))
		if err != nil {
			return err
		}
	}
	return nil
}

// programOutside has the proxies write their rules for the number of Services that there are. The rules
// stay when the proxies end. Where a proxy does not get so far, nothing is measured.
func (b *bench) programOutside(ctx context.Context, services int) (failed error) {
	for _, path := range b.paths {
		if path.services != services || path.contender.name == "" {
			continue
		}
		progress(fmt.Sprintf("outside: %s at %d Services", path.label, services))
		err := b.programPath(ctx, path)
		b.programmed[path.host] = err == nil
		if isOver(err) {
			b.report.Outside = append(b.report.Outside, outsideRow{Path: path.label, Services: services, Over: true})
		}
		if err != nil {
			failed = errors.Join(failed, unlessOver(fmt.Errorf("%s at %d Services: %w", path.label, services, err)))
		}
	}
	return failed
}

func (b *bench) programPath(ctx context.Context, path *path) error {
	p, err := b.startProxy(path.contender, path.host, outsideNode)
	if err != nil {
		return err
	}
	return p.use(ctx, func(ctx context.Context) error { return errors.Join(path.await(ctx), settle(ctx, p)) })
}

// await waits until the path delivers to all its addresses.
func (p *path) await(ctx context.Context) error {
	return p.inside(func() (err error) {
		for until := time.Now().Add(limit); time.Now().Before(until) && ctx.Err() == nil; {
			for _, vip := range p.vips {
				if err = p.connections(vip, 1); err != nil {
					break
				}
			}
			if err == nil {
				return nil
			}
			p.drain()
		}
		return overLimit(ctx, err)
	})
}

// outsideSeries are the figures of one path to one address.
type outsideSeries struct {
	path *path
	vip  netip.Addr
	got  [measures][]sample
}

// outside measures all paths in turn, each between two measurements of the bare node, by one thread that
// is client and pod at once: nothing is scheduled between a packet and its answer, so the thread's
// processor time is what the way there and back takes, also while others use the machine.
func (b *bench) outside(ctx context.Context) error {
	var all []*outsideSeries
	for _, p := range b.paths[1:] {
		if p.contender.name != "" && !b.programmed[p.host] {
			continue
		}
		for _, vip := range p.vips {
			all = append(all, &outsideSeries{path: p, vip: vip})
		}
	}
	err := b.paths[0].inside(func() error { return b.compare(ctx, b.paths[0], all) })
	for _, s := range all {
		if len(s.got[measures-1]) > 0 {
			b.report.Outside = append(b.report.Outside, s.row())
		}
	}
	slices.SortFunc(b.report.Outside, func(a, b outsideRow) int { return strings.Compare(a.order(), b.order()) })
	return errors.Join(err, b.write())
}

// compare measures all beside the bare node, with the thread.
func (b *bench) compare(ctx context.Context, bare *path, all []*outsideSeries) error {
	if err := pin(); err != nil {
		return err
	}
	for round := range b.outsideRounds + 1 {
		if round%20 == 1 {
			progress(fmt.Sprintf("outside, round %d of %d", round, b.outsideRounds))
		}
		rand.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
		for m := range measures {
			before, err := bare.measure(m, bare.vips[0])
			if err != nil {
				return fmt.Errorf("bare: %w", err)
			}
			for _, s := range all {
				if err := ctx.Err(); err != nil {
					return err
				}
				own, err := s.path.measure(m, s.vip)
				if err != nil {
					return fmt.Errorf("%s to %s: %w", s.path.label, s.vip, err)
				}
				after, err := bare.measure(m, bare.vips[0])
				if err != nil {
					return fmt.Errorf("bare: %w", err)
				}
				if round > 0 { // the first one fills caches
					s.got[m] = append(s.got[m], sample{timing: own,
						share:     (before.cpu + after.cpu) / 2 / own.cpu,
						shareWall: (before.wall + after.wall) / 2 / own.wall})
				}
				before = after
			}
		}
	}
	return nil
}

func (s *outsideSeries) row() outsideRow {
	row := outsideRow{Path: s.path.label, Services: s.path.services}
	switch s.vip.String() {
	case clusterVIP:
		row.Policy = string(corev1.ServiceExternalTrafficPolicyCluster)
	case localVIP:
		row.Policy = string(corev1.ServiceExternalTrafficPolicyLocal)
	}
	for m, figure := range []*share{&row.First, &row.Connection, &row.RoundTrip, &row.Bulk} {
		*figure = newShare(s.got[m])
	}
	return row
}
