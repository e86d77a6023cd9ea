package nftables

import (
	"fmt"
	"strings"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
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

// chain is a chain with its rules; hook is nil for one that is only jumped to.
type chain struct {
	name  string
	hook  *hook
	rules []rule
}

// hook is where the kernel enters a chain.
type hook struct {
	kind     string // nat or filter
	number   uint32
	priority int32
}

// rule is what nft would show on one line.
type rule struct {
	comment string
	exprs   []expr.Any
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
	services := []rule{
		b.rule("", b.in(setClusterIPs), jumpTo(expr.VerdictGoto, chainCluster)),
		b.rule("", b.in(setExternal), jumpTo(expr.VerdictGoto, chainExternal)),
	}
	if config.AnswerPing {
		services = append(services, b.rule("ping", b.isEchoRequest(), b.in(setEcho), redirect()))
	}
	r.add(chainServices, services...)
	r.add(chainCluster, b.cluster(config)...)
	r.add(chainExternal,
		b.rule("source ranges", b.in(setRestricted), b.notFromRange(), drop()),
		b.rule("", b.in(setLocal), jumpTo(expr.VerdictGoto, chainLocal)),
		b.rule("", jumpTo(expr.VerdictGoto, chainMarked)))
	r.add(chainLocal, b.external(config)...)
	r.add(chainMarked, b.rule("", setMark(config.MasqueradeBit)), b.rule("", jumpTo(expr.VerdictGoto, chainPick)))
	r.picks(b, len(timeouts) > 0)
	r.add(chainRefuse,
		b.rule("", b.isProtocol(tcp), reject(unix.NFT_REJECT_TCP_RST, 0)),
		b.rule("", b.unreachable()))
	r.hooks(b, config, timeouts)
	return r
}

func (r *ruleset) add(name string, rules ...rule) {
	r.chains = append(r.chains, chain{name: name, rules: rules})
}

// picks adds the chains that choose a backend. What they do not find has none, or is being changed
// at this very moment: a packet may meet sets from before and after a transaction, hence one more
// pass before it is refused.
func (r *ruleset) picks(b builder, sticky bool) {
	for _, local := range []bool{false, true} {
		suffix, many, last := "", setMany, []rule{
			b.rule("policy Local, endpoints only elsewhere", b.in(setSilent), drop()),
			b.rule("", jumpTo(expr.VerdictGoto, chainRefuse)),
		}
		if local {
			suffix, many, last = "-local", setManyLocal, []rule{b.rule("policy Local, endpoints only elsewhere", drop())}
		}
		pass, draw, slot, more := "pass"+suffix, "draw"+suffix, "slot"+suffix, "again"+suffix
		pick := []rule{b.rule("", jumpTo(expr.VerdictJump, pass))}
		for range repeats {
			pick = append(pick, b.rule("", b.in(many), jumpTo(expr.VerdictJump, more)))
		}
		pick = append(pick, b.rule("", jumpTo(expr.VerdictJump, pass)))
		r.add("pick"+suffix, append(pick, last...)...)
		r.add(pass,
			b.rule("", jumpTo(expr.VerdictJump, draw)),
			b.rule("", b.in(setScheduled), jumpTo(expr.VerdictJump, slot)))
		var repeat, draws, slots []rule
		for range again {
			repeat = append(repeat, b.rule("", jumpTo(expr.VerdictJump, draw)))
		}
		for _, p := range protocols {
			draws = append(draws, b.rule("", b.isProtocol(p), jumpTo(expr.VerdictGoto, p.String()+"-"+draw)))
			slots = append(slots, b.rule("", b.isProtocol(p), jumpTo(expr.VerdictGoto, p.String()+"-"+slot)))
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
func (b builder) cluster(config plan.Config) []rule {
	pick := b.rule("", jumpTo(expr.VerdictGoto, chainPick))
	if config.MasqueradeAll {
		return []rule{b.rule("", jumpTo(expr.VerdictGoto, chainMarked))}
	}
	if match := b.fromPod(config.Pods, true); match != nil {
		return []rule{b.rule("not from a pod", match, jumpTo(expr.VerdictGoto, chainMarked)), pick}
	}
	return []rule{pick}
}

// external renders what happens to connections to external frontends with policy Local: pods and
// the node itself reach all endpoints, others only those of this node.
func (b builder) external(config plan.Config) []rule {
	var rules []rule
	if match := b.fromPod(config.Pods, false); match != nil {
		rules = append(rules, b.rule("from a pod", match, jumpTo(expr.VerdictGoto, chainPick)))
	}
	return append(rules,
		b.rule("from the node itself", b.fromNode(), jumpTo(expr.VerdictGoto, chainMarked)),
		b.rule("", jumpTo(expr.VerdictGoto, chainPickLocal)))
}

// draws renders the draws at random, after the look at who has been here before if anybody is
// remembered (sticky).
func (b builder) draws(p protocol, local, sticky bool) []rule {
	var rules []rule
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
func (b builder) slots(p protocol, local bool) []rule {
	var rules []rule
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
func (b builder) choose(p protocol, number exprs) rule {
	return b.rule("", b.isProtocol(p), b.key(fieldDestination, fieldPort), number,
		exprs{b.lookup(p.String()+"-backends", 0)}, b.dnat())
}

// hooks adds the chains that the kernel enters.
func (r *ruleset) hooks(b builder, config plan.Config, timeouts []uint32) {
	var affinity []rule
	for _, seconds := range timeouts {
		for _, p := range protocols {
			affinity = append(affinity, b.remember(p, seconds))
		}
	}
	// Without session affinity there is no hook for it.
	var remember []rule
	if len(timeouts) > 0 {
		r.add(chainAffinity, affinity...)
		remember = []rule{b.rule("", isTranslated(), jumpTo(expr.VerdictJump, chainAffinity))}
		r.hook("input", "nat", unix.NF_INET_LOCAL_IN, prioritySource, remember...)
	}
	toServices := b.rule("", jumpTo(expr.VerdictGoto, chainServices))
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
		r.hook("forward", "filter", unix.NF_INET_FORWARD, priorityFilter, b.rule("", isInvalid(), drop()))
	}
}

func (r *ruleset) hook(name, kind string, number uint32, priority int32, rules ...rule) {
	r.chains = append(r.chains, chain{name: name, hook: &hook{kind: kind, number: number, priority: priority},
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

// isState tells whether a set holds what packets write, which is not for us to compare.
func isState(name string) bool { return strings.HasSuffix(name, "-sticky") }
