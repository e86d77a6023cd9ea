package chaos

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"syscall"

	"github.com/landfall-lb/landfall/e2e/chaos/contract"
	"github.com/landfall-lb/landfall/e2e/chaos/story"
	"github.com/landfall-lb/landfall/e2e/lab"
)

// deed is an event that is being done. What is found out about it goes into its span.
type deed struct {
	story.Event
	span *contract.Span
	calm bool
}

// way does an event, waits for as long as it lasts, and undoes it. Its arguments are in the order of a method's.
type way func(r *runner, ctx context.Context, d deed) error

// do does an event.
func (r *runner) do(ctx context.Context, d deed) error {
	do, known := ways[d.Kind]
	if !known {
		return fmt.Errorf("no way to do %q", d.Kind)
	}
	return do(r, ctx, d)
}

// ways has one for each kind of event.
var ways = map[story.Kind]way{
	// Planned changes, and what calm rounds and storms share.
	story.DrainLabel: func(r *runner, ctx context.Context, d deed) error {
		return r.during(d, r.patch(ctx, d.Node, excludeLabel(`""`)), r.patch(ctx, d.Node, excludeLabel("null")))
	},
	story.DrainTaint: (*runner).leaving,
	story.Stop:       (*runner).stop, story.StormStop: (*runner).stop, story.StopLong: (*runner).stopLong,
	story.Kill: (*runner).kill, story.StormKill: (*runner).kill, story.KillRelay: (*runner).kill,
	story.RollPod: (*runner).rollPod,
	story.StopAPI: (*runner).stopAPI, story.StormAPI: (*runner).stopAPI,
	story.FreezeAPI:  func(r *runner, _ context.Context, d deed) error { return r.frozen(d, r.lab.SignalAPI) },
	story.FreezeEtcd: (*runner).freezeEtcd, story.StormEtcd: (*runner).freezeEtcd,
	story.SlowAPI: (*runner).slowAPI, story.StormSlowAPI: (*runner).slowAPI,
	story.ShiftClock: (*runner).shiftClock, story.StormClock: (*runner).shiftClock,
	story.MalformedARP: func(r *runner, _ context.Context, d deed) error {
		return r.wire.malformed(r.seed+uint64(d.ID), badPackets)
	},
	story.HungProxy: (*runner).hungProxy,
	story.EditPool: func(r *runner, ctx context.Context, d deed) error {
		return r.during(d, func() error { return r.lab.ApplyYAML(ctx, pools(true)) },
			func() error { return r.lab.ApplyYAML(ctx, pools(false)) })
	},
	story.AddPeer: func(r *runner, ctx context.Context, d deed) error {
		return r.during(d, func() error { return r.lab.ApplyYAML(ctx, deadPeer(r.lab.Cluster())) },
			func() error { return r.removePeers(ctx, deadPeerName) })
	},
	story.ForeignRules: onNode("sh", "-c", foreignRules, "sh", foreignTable()),

	// Churn.
	story.AddService: func(r *runner, ctx context.Context, d deed) error {
		return r.addService(ctx, d.Service, d.calm)
	},
	story.RemoveService: (*runner).withdrawService,
	story.Unready:       (*runner).setIdle, story.Ready: (*runner).setIdle,
	story.Burst: (*runner).burst,
	story.Flood: (*runner).flood,

	// Faults of the control plane, the router and the LAN.
	story.SlowEtcd: func(r *runner, _ context.Context, d deed) error { return r.slow(d, r.lab.SignalEtcd) },
	story.KillEtcd: func(r *runner, _ context.Context, d deed) error {
		return r.during(d, r.lab.KillEtcd, r.lab.StartEtcd)
	},
	story.RestoreEtcd: (*runner).restoreEtcd,
	story.RemovePeer: func(r *runner, ctx context.Context, d deed) error {
		return r.during(d, func() error { return r.removePeers(ctx, peerNames...) }, func() error {
			return try(ctx, "apply the peers", func(ctx context.Context) error {
				return r.lab.ApplyYAML(ctx, peers(r.lab.Cluster()))
			})
		})
	},
	story.KillRouter: func(r *runner, ctx context.Context, d deed) error {
		router := r.lab.Routers()[0]
		return r.during(d, func() error { router.Kill("bgpd"); return nil }, func() error { return router.Launch(ctx) })
	},
	story.FreezeRouter: func(r *runner, ctx context.Context, d deed) error {
		return r.lab.Routers()[0].Freeze(ctx, d.For)
	},
	story.Spoof: func(r *runner, _ context.Context, d deed) error { return r.wire.spoof(r.expected[d.Service][:1]) },
	story.SpoofOn: func(r *runner, _ context.Context, d deed) error {
		return again(d.For, spoofEvery, func() error { return r.wire.spoof(r.expected[d.Service]) })
	},

	// Faults of one node.
	story.Cut: func(r *runner, ctx context.Context, d deed) error {
		return r.during(d, func() error { return r.lab.Cut(ctx, d.Node) }, func() error { return r.lab.Heal(ctx, d.Node) })
	},
	story.Unplug: func(r *runner, ctx context.Context, d deed) error {
		return r.during(d, func() error { return r.lab.Unplug(ctx, d.Node) },
			func() error { return r.lab.Heal(ctx, d.Node) })
	},
	story.Crash: func(r *runner, ctx context.Context, d deed) error {
		return r.during(d, func() error { return r.crash(ctx, d.Node) }, func() error {
			return errors.Join(r.lab.Heal(ctx, d.Node), r.each(d.Node, (*lab.Agent).Start))
		})
	},
	story.LeaveNode: func(r *runner, ctx context.Context, d deed) error {
		return r.during(d, func() error { return r.leave(ctx, d.Node) }, func() error { return r.join(ctx, d.Node) })
	},
	story.FreezeNode:    frozen("speaker", "proxy"),
	story.FreezeSpeaker: frozen("speaker"),
	story.FreezeRelay:   frozen("relay"),
	story.NoDescriptors: (*runner).noDescriptors,
	story.FullDisk:      (*runner).fullDisk,
	story.FillDisk:      (*runner).fillDisk,
	story.NetlinkErrors: func(r *runner, ctx context.Context, d deed) error {
		failed, err := r.agent(ctx, d.Event).FailNetlink(ctx, d.For)
		r.journal.add("netlink-errors: %d calls of %s failed", failed, d.Node)
		return err
	},
	story.ForeignElements: onNode("sh", "-c", foreignFlush),
	story.DeleteRules:     onNode("nft", "flush", "ruleset"),
	story.FlushConntrack:  onNode("conntrack", "-F"),
	// After conntrack, at -200, has looked a packet up: what the kernel drops then if it can make no entry.
	story.ConntrackFull: filter(-190, fixed("in ct state new drop", "out ct state new drop")),
	story.Lossy:         filter(early, fixed(`in iifname "eth0" numgen random mod 100 < 15 drop`)),
	story.DropGossipIn:  filter(early, fixed(gossip("in")...)),
	story.DropGossipOut: filter(early, fixed(gossip("out")...)),
	story.DropGossip:    filter(early, fixed(gossip("in", "out")...)),
	story.Deaf:          filter(early, func(r *runner, node string) []string { return r.others(node, "in", "saddr") }),
	story.Mute:          filter(early, func(r *runner, node string) []string { return r.others(node, "out", "daddr") }),
}

// excludeLabel is a patch of the label that excludes a node from external load balancing.
func excludeLabel(value string) string {
	return `{"metadata":{"labels":{"node.kubernetes.io/exclude-from-external-load-balancers":` + value + `}}}`
}

func (r *runner) stop(ctx context.Context, d deed) error {
	if r.without.Sudden {
		return r.restart(ctx, d, (*lab.Agent).Kill)
	}
	return r.restart(ctx, d, (*lab.Agent).Stop)
}

// stopLong has clients ask for the way again and again meanwhile, which only a node that took the addresses answers.
func (r *runner) stopLong(ctx context.Context, d deed) error {
	var g lab.Group
	g.Run(func() error { return r.stop(ctx, d) })
	g.Run(func() error {
		return again(d.For, forgetEvery, func() error { return r.forget(ctx, d.span.OwnedBefore) })
	})
	return g.Wait()
}

func (r *runner) kill(ctx context.Context, d deed) error { return r.restart(ctx, d, (*lab.Agent).Kill) }

func (r *runner) stopAPI(ctx context.Context, d deed) error {
	return r.during(d, r.lab.StopAPI, func() error { return r.lab.StartAPI(ctx) })
}

func (r *runner) freezeEtcd(_ context.Context, d deed) error { return r.frozen(d, r.lab.SignalEtcd) }

func (r *runner) slowAPI(_ context.Context, d deed) error { return r.slow(d, r.lab.SignalAPI) }

// onNode runs a program on the event's node.
func onNode(argv ...string) way {
	return func(r *runner, ctx context.Context, d deed) error {
		_, err := r.lab.Exec(ctx, d.Node, argv...)
		return err
	}
}

// frozen stops programs of the event's node for a while.
func frozen(programs ...string) way {
	return func(r *runner, _ context.Context, d deed) error {
		return r.frozen(d, func(sig syscall.Signal) (err error) {
			for _, program := range programs {
				err = errors.Join(err, r.lab.Agent(program, d.Node).Signal(sig))
			}
			return err
		})
	}
}

// early is the priority of rules that drop packets before anything else sees them.
const early = -400

// filter adds rules to a node for a while, in the chains "in" and "out" of that priority.
func filter(priority int, rules func(r *runner, node string) []string) way {
	return func(r *runner, ctx context.Context, d deed) error {
		text := []string{"add table inet chaos",
			fmt.Sprintf("add chain inet chaos in { type filter hook prerouting priority %d; }", priority),
			fmt.Sprintf("add chain inet chaos out { type filter hook output priority %d; }", priority)}
		for _, rule := range rules(r, d.Node) {
			text = append(text, "add rule inet chaos "+rule)
		}
		nft := func(argument string) func() error {
			return func() error { return onNode("nft", argument)(r, ctx, d) }
		}
		return r.during(d, nft(strings.Join(text, "; ")), nft("delete table inet chaos"))
	}
}

// fixed are rules that are the same on each node.
func fixed(rules ...string) func(*runner, string) []string {
	return func(*runner, string) []string { return rules }
}

// gossip returns rules that drop the speakers' gossip in some chains.
func gossip(chains ...string) (rules []string) {
	for _, chain := range chains {
		for _, port := range []string{"sport", "dport"} {
			rules = append(rules, chain+" meta l4proto { tcp, udp } th "+port+" 7947 drop")
		}
	}
	return rules
}

// others returns rules that drop what the other nodes send to a node, or it to them.
func (r *runner) others(node, chain, field string) []string {
	var v4, v6 []string
	for _, n := range r.lab.Cluster().Nodes {
		if n.Name != node {
			v4, v6 = append(v4, n.Addr.String()), append(v6, lab.Twin(n.Addr).String())
		}
	}
	return []string{fmt.Sprintf("%s ip %s { %s } drop", chain, field, strings.Join(v4, ", ")),
		fmt.Sprintf("%s ip6 %s { %s } drop", chain, field, strings.Join(v6, ", "))}
}
