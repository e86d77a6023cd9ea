package nftables

import (
	"fmt"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/nft"
	"github.com/landfall-lb/landfall/proxy/nft/expr"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// TableName is the name of our tables, one in the family ip and one in ip6.
const TableName = "landfall"

// Hook priorities, just ahead of kube-proxy's, which are those of iptables: dstnat, srcnat and
// filter (linux/netfilter_ipv4.h).
const (
	priorityDestination = -101
	prioritySource      = 99
	priorityFilter      = -1
	// priorityUnserved is behind everybody's translation. A chain of type nat is not entered once a
	// connection has been translated.
	priorityUnserved = -90
)

// A ruleset is all of a table but the elements. It depends on the configuration and on which
// affinity timeouts there are.
type ruleset struct {
	family lb.Family
	sets   []set
	chains []chain
	// timeouts are those of session affinity, in seconds and in order.
	timeouts []uint32
}

// chain is a chain with its rules; hook is zero for one that is only jumped to.
type chain struct {
	name  string
	hook  nft.Hook
	rules []nft.Rule
}

// Chains.
const (
	chainServices  = "services"
	chainCluster   = "cluster-ip"
	chainExternal  = "external"
	chainLocal     = "external-local"
	chainMarked    = "masqueraded"
	chainPick      = "pick"
	chainPickLocal = "pick-local"
	chainRefuse    = "refuse"
	chainAffinity  = "affinity"
	// Those of connections to cluster IPs that no Service has.
	chainUnserved       = "unserved"
	chainUnservedOutput = "unserved-output"
)

// Where more than exactClasses backends are drawn from, a draw finds one with more than even
// chance: it is repeated as long as the chance to find none is below one in 2^(repeats*again).
const (
	repeats = 4
	again   = 8
)

// newRuleset renders the rules for one family. Timeouts are those of the affinity sets, in seconds.
func newRuleset(family lb.Family, config plan.Config, timeouts []uint32) ruleset {
	b := builder{family: family}
	r := ruleset{family: family, sets: newSets(family, timeouts), timeouts: timeouts}
	services := []nft.Rule{
		b.rule("", b.in(setClusterIPs), expr.Goto(chainCluster)),
		b.rule("", b.in(setExternal), expr.Goto(chainExternal)),
	}
	if config.AnswerPing {
		services = append(services, b.rule("ping", b.isEchoRequest(), b.in(setEcho), redirect()))
	}
	r.add(chainServices, services...)
	r.add(chainCluster, b.cluster(config)...)
	r.add(chainExternal,
		b.rule("source ranges", b.in(setRestricted), b.notFromRange(), expr.Drop()),
		b.rule("", b.in(setLocal), expr.Goto(chainLocal)),
		b.rule("", expr.Goto(chainMarked)))
	r.add(chainLocal, b.external(config)...)
	r.add(chainMarked, b.rule("", setMark(config.MasqueradeBit)), b.rule("", expr.Goto(chainPick)))
	r.picks(b, len(timeouts) > 0)
	r.add(chainRefuse,
		b.rule("", b.isProtocol(tcp), expr.Refuse(unix.NFT_REJECT_TCP_RST, 0)),
		b.rule("", b.unreachable()))
	r.hooks(b, config, timeouts)
	return r
}

func (r *ruleset) add(name string, rules ...nft.Rule) {
	r.chains = append(r.chains, chain{name: name, rules: rules})
}

// picks adds the chains that choose a backend. What they do not find has none, or is being changed
// at this very moment: a packet may meet sets from before and after a transaction, hence one more
// pass before it is refused.
func (r *ruleset) picks(b builder, sticky bool) {
	for _, local := range []bool{false, true} {
		suffix, many, last := "", setMany, []nft.Rule{
			b.rule("policy Local, endpoints only elsewhere", b.in(setSilent), expr.Drop()),
			b.rule("", expr.Goto(chainRefuse)),
		}
		if local {
			suffix, many, last = "-local", setManyLocal,
				[]nft.Rule{b.rule("policy Local, endpoints only elsewhere", expr.Drop())}
		}
		pass, draw, slot, more := "pass"+suffix, "draw"+suffix, "slot"+suffix, "again"+suffix
		pick := []nft.Rule{b.rule("", expr.Jump(pass))}
		for range repeats {
			pick = append(pick, b.rule("", b.in(many), expr.Jump(more)))
		}
		pick = append(pick, b.rule("", expr.Jump(pass)))
		r.add("pick"+suffix, append(pick, last...)...)
		r.add(pass,
			b.rule("", expr.Jump(draw)),
			b.rule("", b.in(setScheduled), expr.Jump(slot)))
		var repeat, draws, slots []nft.Rule
		for range again {
			repeat = append(repeat, b.rule("", expr.Jump(draw)))
		}
		for _, p := range protocols {
			draws = append(draws, b.rule("", b.isProtocol(p), expr.Goto(p.String()+"-"+draw)))
			slots = append(slots, b.rule("", b.isProtocol(p), expr.Goto(p.String()+"-"+slot)))
		}
		r.add(more, repeat...)
		r.add(draw, draws...)
		r.add(slot, slots...)
		for _, p := range protocols {
			r.add(p.String()+"-"+draw, b.draws(p, local, sticky)...)
			r.add(p.String()+"-"+slot, b.slots(p, local)...)
		}
	}
}

// cluster renders what happens to connections to a cluster IP.
func (b builder) cluster(config plan.Config) []nft.Rule {
	pick := b.rule("", expr.Goto(chainPick))
	if config.MasqueradeAll {
		return []nft.Rule{b.rule("", expr.Goto(chainMarked))}
	}
	if match := b.fromPod(config.Pods, true); match != nil {
		return []nft.Rule{b.rule("not from a pod", match, expr.Goto(chainMarked)), pick}
	}
	return []nft.Rule{pick}
}

// external renders what happens to connections to external frontends with policy Local: pods and
// the node itself reach all endpoints, others only those of this node.
func (b builder) external(config plan.Config) []nft.Rule {
	var rules []nft.Rule
	if match := b.fromPod(config.Pods, false); match != nil {
		rules = append(rules, b.rule("from a pod", match, expr.Goto(chainPick)))
	}
	return append(rules,
		b.rule("from the node itself", b.fromNode(), expr.Goto(chainMarked)),
		b.rule("", expr.Goto(chainPickLocal)))
}

// draws renders the draws at random, after the look at who has been here before if anybody is
// remembered (sticky).
func (b builder) draws(p protocol, local, sticky bool) []nft.Rule {
	var rules []nft.Rule
	if sticky {
		rules = append(rules, b.knownClient(p))
	}
	for _, class := range drawClasses() {
		rules = append(rules, b.choose(p, b.random(class, numbers(plan.Random, local, class))))
	}
	return rules
}

// slots renders the draws of slots. Round-robin comes last, so that others do not move its
// counters.
func (b builder) slots(p protocol, local bool) []nft.Rule {
	var rules []nft.Rule
	for _, s := range []plan.Scheduler{plan.SourceHash, plan.Maglev, plan.RoundRobin} {
		for _, class := range slotClasses {
			first := numbers(s, local, class)
			switch s {
			case plan.SourceHash:
				rules = append(rules, b.choose(p, b.hashed(b.source(), class, first)))
			case plan.Maglev:
				rules = append(rules, b.choose(p, b.hashed(append(b.source(), fieldSourcePort), class, first)))
			case plan.RoundRobin:
				rules = append(rules, b.choose(p, b.turn(class, first)))
			}
		}
	}
	return rules
}

// choose renders "send to the backend with this number, if there is one".
func (b builder) choose(p protocol, number expr.List) nft.Rule {
	return b.rule("", b.isProtocol(p), b.key(fieldDestination, fieldPort), number,
		expr.List{b.lookup(p.String()+"-backends", 0)}, b.dnat())
}

// hooks adds the chains that the kernel enters.
func (r *ruleset) hooks(b builder, config plan.Config, timeouts []uint32) {
	var affinity []nft.Rule
	for _, seconds := range timeouts {
		for _, p := range protocols {
			affinity = append(affinity, b.remember(p, seconds))
		}
	}
	// Without session affinity there is no hook for it.
	var remember []nft.Rule
	if len(timeouts) > 0 {
		r.add(chainAffinity, affinity...)
		remember = []nft.Rule{b.rule("", isTranslated(), expr.Jump(chainAffinity))}
		r.hook("input", "nat", unix.NF_INET_LOCAL_IN, prioritySource, remember...)
	}
	toServices := b.rule("", expr.Goto(chainServices))
	r.hook("prerouting", "nat", unix.NF_INET_PRE_ROUTING, priorityDestination, toServices)
	r.hook("output", "nat", unix.NF_INET_LOCAL_OUT, priorityDestination, toServices)
	r.hook("postrouting", "nat", unix.NF_INET_POST_ROUTING, prioritySource, append(remember,
		b.rule("", hasMark(config.MasqueradeBit), clearMark(config.MasqueradeBit), masquerade()),
		b.rule("hairpin", isTranslated(), b.in(setHairpin), masquerade()))...)
	if unserved := b.unserved(config.ServiceNetworks); len(unserved) > 0 {
		r.hook(chainUnserved, "nat", unix.NF_INET_PRE_ROUTING, priorityUnserved, unserved...)
		r.hook(chainUnservedOutput, "nat", unix.NF_INET_LOCAL_OUT, priorityUnserved, unserved...)
	}
	if config.DropInvalid {
		r.hook("forward", "filter", unix.NF_INET_FORWARD, priorityFilter, b.rule("", isInvalid(), expr.Drop()))
	}
}

func (r *ruleset) hook(name, kind string, number uint32, priority int32, rules ...nft.Rule) {
	r.chains = append(r.chains, chain{name: name, hook: nft.Hook{Kind: kind, Number: number, Priority: priority},
		rules: rules})
}

// affinitySet is the name of the set of frontends of a protocol with an affinity timeout.
func affinitySet(p protocol, seconds uint32) string { return fmt.Sprintf("%s-affinity-%d", p, seconds) }

// stickyMap is the name of the map from client and frontend to target.
func stickyMap(p protocol) string { return p.String() + "-sticky" }

// setName returns the name of the set that an element is in.
func (e element) setName() string {
	switch e.set {
	case setBackends:
		return e.protocol.String() + "-backends"
	case setPorts:
		return e.protocol.String() + "-ports"
	case setAffinity:
		return affinitySet(e.protocol, e.number)
	}
	return plainSets[e.set]
}

var plainSets = [...]string{
	setClusterIPs: "cluster-ips", setExternal: "external", setLocal: "local", setRestricted: "restricted",
	setSourceRanges: "source-ranges",
	setSilent:       "silent", setMany: "many", setManyLocal: "many-local", setScheduled: "scheduled", setEcho: "echo",
	setHairpin: "hairpin",
}

// isState reports whether a set holds what packets write, which is not for us to compare.
func isState(name string) bool { return strings.HasSuffix(name, "-sticky") }
