package nftables

import (
	"maps"
	"slices"

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
// numbered sets Services need.
type ruleset struct {
	family lb.Family
	sets   []set
	chains []chain
	needs  needs
	// offload is set if the table has a flowtable.
	offload bool
}

// chain is a chain with its rules; hook is zero for one that is only jumped to.
type chain struct {
	name  string
	hook  nft.Hook
	rules []nft.Rule
}

// Chains.
const (
	chainDirect    = "direct"
	chainHand      = "hand-over"
	chainRound     = "hand-on"
	chainStay      = "stay"
	chainServices  = "services"
	chainCluster   = "cluster-ip"
	chainExternal  = "external"
	chainLocal     = "external-local"
	chainMarked    = "masqueraded"
	chainSources   = "source-ranges"
	chainPick      = "pick"
	chainPickLocal = "pick-local"
	chainRefuse    = "refuse"
	chainChoose    = "choose"
	chainKnown     = "known"
	chainAffinity  = "affinity"
	chainRemember  = "remember"
	// Those of connections that nobody has translated to addresses of Services.
	chainUnserved       = "unserved"
	chainUnservedOutput = "unserved-output"
	chainUnservedVIP    = "unserved-vip"
	chainOffload        = "offload"
	chainOffloadFlows   = "offload-flows"
)

// Where more than exactClasses backends are drawn from, a draw finds one with more than even
// chance: it is repeated as long as the chance to find none is below one in 2^(repeats*again).
const (
	repeats = 4
	again   = 8
)

// newRuleset renders the rules for one family.
func newRuleset(family lb.Family, config plan.Config, needs needs) ruleset {
	b := builder{family: family}
	r := ruleset{family: family, sets: newSets(needs, config.Relay), needs: needs}
	memories := needs.of(setRemember)
	services := []nft.Rule{
		b.rule("", b.in(setClusterIPs), expr.Goto(chainCluster)),
		b.rule("", b.in(setExternal), expr.Goto(chainExternal)),
	}
	if config.AnswerPing {
		services = append(services, b.rule("ping", b.isEchoRequest(), b.in(setEcho), redirect()))
	}
	r.add(chainServices, services...)
	r.add(chainCluster, b.cluster(config)...)
	external := []nft.Rule{b.rule("source ranges", b.in(setRestricted), expr.Jump(chainSources)),
		b.rule("", b.in(setLocal), expr.Goto(chainLocal))}
	if needs.direct() {
		external = append(external, b.rule("direct", b.grouped(setDirect), expr.Goto(chainDirect)))
		r.add(chainDirect, b.direct(config)...)
	}
	r.add(chainExternal, append(append(external, b.relay(config)...), b.rule("", expr.Goto(chainMarked)))...)
	if config.Relay {
		r.add(chainRelayUDP, b.relayUDP(config.RelayUDPRate)...)
	}
	r.add(chainSources, b.sourceRanges(needs.of(setSourceRanges))...)
	r.add(chainLocal, b.external(config)...)
	r.add(chainMarked, b.rule("", setMark(config.MasqueradeBit)), b.rule("", expr.Goto(chainPick)))
	r.picks(b, memories)
	r.add(chainRefuse,
		b.rule("", b.isProtocol(tcp), expr.Refuse(unix.NFT_REJECT_TCP_RST, 0)),
		b.rule("", b.unreachable()))
	r.hooks(b, config, memories)
	return r
}

func (r *ruleset) add(name string, rules ...nft.Rule) {
	r.chains = append(r.chains, chain{name: name, rules: rules})
}

// picks adds the chains that choose a backend. What they do not find has none, or is being changed
// at this very moment: a packet may meet sets from before and after a transaction, hence one more
// pass before it is refused.
func (r *ruleset) picks(b builder, memories []memory) {
	pick := func(name string, groups setID, last ...nft.Rule) {
		choose := b.rule("", b.grouped(groups), expr.Jump(chainChoose))
		r.add(name, append([]nft.Rule{choose, choose}, last...)...)
	}
	pick(chainPick, setGroups,
		b.rule("policy Local, endpoints only elsewhere", b.in(setSilent), expr.Drop()),
		b.rule("no endpoints, or a port or protocol that the Service does not have", expr.Goto(chainRefuse)))
	pick(chainPickLocal, setLocalGroups,
		b.rule("externalFailoverPolicy Passthrough", b.in(setPassed), expr.Accept()),
		b.rule("policy Local, endpoints only elsewhere", expr.Drop()))
	splits := map[uint32]bool{}
	for _, m := range memories {
		splits[splitOf(m)] = true
	}
	var choose []nft.Rule
	for _, split := range slices.Sorted(maps.Keys(splits)) {
		choose = append(choose, b.recall(split), b.forget(split))
	}
	if len(memories) > 0 {
		r.add(chainKnown, b.known()...)
	}
	r.add(chainChoose, append(choose, r.tries(b, "", setMany)...)...)
	r.add("mixed", r.tries(b, "mixed-", setMixed)...)
}

// tries adds the chains that draw backends, all of whose names begin with prefix, and returns the
// rules that call them. Those of groups in the set repeat are drawn again and again.
func (r *ruleset) tries(b builder, prefix string, repeat setID) []nft.Rule {
	draw, slot, more := prefix+"draw", prefix+"slot", prefix+"again"
	rules := []nft.Rule{b.rule("", expr.Jump(draw)), b.rule("", b.in(setScheduled), expr.Jump(slot))}
	for range repeats {
		rules = append(rules, b.rule("", b.in(repeat), expr.Jump(more)))
	}
	if prefix == "" {
		rules = append(rules, b.rule("", b.in(setMixed), expr.Jump("mixed")))
	}
	var repeated, draws, slots []nft.Rule
	for range again {
		repeated = append(repeated, b.rule("", expr.Jump(draw)))
	}
	for _, p := range protocols {
		draws = append(draws, b.rule("", b.isProtocol(p), expr.Goto(prefix+p.String()+"-draw")))
		slots = append(slots, b.rule("", b.isProtocol(p), expr.Goto(prefix+p.String()+"-slot")))
	}
	r.add(more, repeated...)
	r.add(draw, draws...)
	r.add(slot, slots...)
	for _, p := range protocols {
		c := chooser{b, p, prefix != ""}
		r.add(prefix+p.String()+"-draw", c.draws()...)
		r.add(prefix+p.String()+"-slot", c.slots()...)
	}
	return rules
}

// cluster renders what happens to connections to a cluster IP.
func (b builder) cluster(config plan.Config) []nft.Rule {
	pick, rules := b.rule("", expr.Goto(chainPick)), b.relay(config)
	if config.MasqueradeAll {
		return append(rules, b.rule("", expr.Goto(chainMarked)))
	}
	if match := b.fromPod(config.Pods, true); match != nil {
		rules = append(rules, b.rule("not from a pod", match, expr.Goto(chainMarked)))
	}
	return append(rules, pick)
}

// external renders what happens to connections to external frontends with policy Local: pods and
// the node itself reach all endpoints, others only those of this node.
func (b builder) external(config plan.Config) []nft.Rule {
	var rules []nft.Rule
	if match := b.fromPod(config.Pods, false); match != nil {
		rules = append(rules, b.rule("from a pod", match, expr.Goto(chainPick)))
	}
	rules = append(rules, b.rule("from the node itself", b.fromNode(), expr.Goto(chainMarked)))
	return append(append(rules, b.relay(config)...), b.rule("", expr.Goto(chainPickLocal)))
}

// chooser renders the choice among backends for a protocol, in groups where their ports differ or
// in the others.
type chooser struct {
	builder
	protocol protocol
	mixed    bool
}

// draws renders the draws at random.
func (c chooser) draws() []nft.Rule {
	var rules []nft.Rule
	for _, class := range drawClasses() {
		rules = append(rules, c.choose(c.random(class, numbers(plan.Random, class))))
	}
	return rules
}

// slots renders the draws of slots. Round-robin comes last, so that others do not move its
// counters.
func (c chooser) slots() []nft.Rule {
	var rules []nft.Rule
	for _, s := range []plan.Scheduler{plan.SourceHash, plan.DestinationHash, plan.Maglev, plan.RoundRobin} {
		for _, class := range plan.SlotSizes {
			first := numbers(s, class)
			switch s {
			case plan.SourceHash:
				rules = append(rules, c.choose(c.hashed(c.source(), class, first)))
			case plan.DestinationHash:
				rules = append(rules, c.choose(c.hashed([]field{fieldDestination}, class, first)))
			case plan.Maglev:
				rules = append(rules, c.choose(c.hashed(append(c.source(), fieldSourcePort), class, first)))
			case plan.RoundRobin:
				rules = append(rules, c.choose(c.turn(class, first)))
			}
		}
	}
	return rules
}

// choose renders "send to the backend with this number, if there is one".
func (c chooser) choose(number expr.List) nft.Rule {
	name, dnat := setNames[setBackends], c.dnat()
	if c.mixed {
		name, dnat = setNames[mixedOf(c.protocol)], c.dnatMixed()
	}
	return c.rule("", c.isProtocol(c.protocol), c.key(fieldGroup), number, expr.List{c.lookup(name, 0)}, dnat)
}

// hooks adds the chains that the kernel enters.
func (r *ruleset) hooks(b builder, config plan.Config, memories []memory) {
	if len(memories) > 0 { // without session affinity there are no hooks for it
		r.affinity(b, memories)
	}
	toServices := b.rule("", expr.Goto(chainServices))
	r.hook("prerouting", "nat", unix.NF_INET_PRE_ROUTING, priorityDestination, toServices)
	r.hook("output", "nat", unix.NF_INET_LOCAL_OUT, priorityDestination, toServices)
	post := []nft.Rule{b.rule("", isTranslated(), noPriority()),
		b.rule("", hasMark(config.MasqueradeBit), clearMark(config.MasqueradeBit), masquerade()),
		b.rule("hairpin", isTranslated(), b.in(setHairpin), masquerade())}
	if r.needs.direct() {
		r.handover(b, config)
		post = append(post, b.far()...)
	}
	r.hook("postrouting", "nat", unix.NF_INET_POST_ROUTING, prioritySource, post...)
	r.add(chainUnservedVIP, b.rule("ping", b.isEchoRequest(), expr.Accept()), b.rule("", expr.Goto(chainRefuse)))
	unserved := b.unserved(config.ServiceNetworks)
	r.hook(chainUnserved, "nat", unix.NF_INET_PRE_ROUTING, priorityUnserved, unserved...)
	r.hook(chainUnservedOutput, "nat", unix.NF_INET_LOCAL_OUT, priorityUnserved, unserved...)
	if config.Relay {
		r.hook(chainRelayInput, "filter", unix.NF_INET_LOCAL_IN, priorityFilter, b.relayInput())
	}
	var forward []nft.Rule
	if config.DropInvalid {
		forward = append(forward, b.rule("", isInvalid(), expr.Drop()))
	}
	if b.family == lb.IPv6 {
		forward = append(forward, b.untracked())
	}
	if len(forward) > 0 {
		r.hook("forward", "filter", unix.NF_INET_FORWARD, priorityFilter, forward...)
	}
	if config.Offload[b.family] {
		r.flows(b, config.OffloadUDP)
	}
}

func (r *ruleset) hook(name, kind string, number uint32, priority int32, rules ...nft.Rule) {
	r.chains = append(r.chains, chain{name: name, hook: nft.Hook{Kind: kind, Number: number, Priority: priority},
		rules: rules})
}

// affinity adds the chains that remember clients. Where the policy is Local, who comes from outside
// has another group than pods have. Each group remembers only what it may lead to, so it does not
// matter whose connection this is.
func (r *ruleset) affinity(b builder, memories []memory) {
	var remember, groups []nft.Rule
	for _, m := range memories {
		remember = append(remember, b.remember(m))
	}
	r.add(chainRemember, remember...)
	for _, p := range protocols {
		for _, id := range []setID{setGroups, setLocalGroups} {
			groups = append(groups, b.rule("", b.originalGroup(id, p), b.key(fieldGroup, fieldBackend),
				expr.In(setNames[setAffinity]), expr.Jump(chainRemember)))
		}
	}
	r.add(chainAffinity, append(groups, b.rule("", noPriority()))...)
	first := []nft.Rule{
		b.rule("", b.remembered(false), expr.Jump(chainAffinity)), b.rule("", b.remembered(true), expr.Jump(chainAffinity)),
	}
	r.hook("remember-input", "filter", unix.NF_INET_LOCAL_IN, prioritySource, first...)
	r.hook("remember-postrouting", "filter", unix.NF_INET_POST_ROUTING, prioritySource, first...)
}

// setName returns the name of the set that an element is in.
func (e element) setName() string {
	switch e.set {
	case setRemember:
		return rememberSet(e.number)
	case setSourceRanges:
		return rangesSet(e.number)
	}
	return setNames[e.set]
}

var setNames = [...]string{
	setBackends: "backends", setMixedTCP: "tcp-backends", setMixedUDP: "udp-backends", setMixedSCTP: "sctp-backends",
	setMany: "many", setScheduled: "scheduled", setMixed: "mixed-ports", setHairpin: "hairpin", setPorts: "ports",
	setSources: "sources", setRestricted: "restricted", setLocalGroups: "local-groups", setSilent: "silent",
	setPassed: "passed",
	setGroups: "groups", setLocal: "local", setAffinity: "affinity", setAffinityPorts: "affinity-ports",
	setExternal: "external", setEcho: "echo",
	setClusterIPs: "cluster-ips", setVIPs: "vips", setRelayed: "relayed", setRelayOwners: "relay-owners",
	setHanded: "handed", setNear: "near", setDirect: "direct", setNodes: "nodes",
}

// isState reports whether a set holds what packets or the proxy's lease of the relay write, which is not
// for the table to compare.
func isState(name string) bool {
	return slices.Contains([]string{stickyMap, relayMap, relayRates, relayPorts, relayLeased, devicesSet}, name)
}
