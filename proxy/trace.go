package main

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/links"
	"github.com/landfall-lb/landfall/proxy/iptables"
	"github.com/landfall-lb/landfall/proxy/nfnetlink"
	"github.com/landfall-lb/landfall/proxy/nft"
	"github.com/landfall-lb/landfall/proxy/nft/walk"
	"github.com/landfall-lb/landfall/proxy/nftables"
	"github.com/landfall-lb/landfall/proxy/plan"
	"github.com/landfall-lb/landfall/proxy/rescue"
	"github.com/landfall-lb/landfall/proxy/trace"
)

// ruleset are the rules for a family in the kernel of the calling thread's network namespace: read once, and
// walked for any number of packets.
type ruleset struct {
	family lb.Family
	conn   *nfnetlink.Conn
	own    []ownTable
	// others are the chains of other programs that the kernel enters. Their tables are read when a packet
	// meets them; nil is one that is gone.
	others []nft.BaseChain
	tables map[nft.Table]*walk.Kernel
	// iptables are Landfall's rules of iptables mode, nil if there are none; inNft is set if nftables has them.
	iptables *iptables.KernelRules
	inNft    bool
	forward  []plan.ForwardChain
	paths    map[netip.Addr]pathTo
}

// ownTable is a table of Landfall.
type ownTable struct {
	name  string
	rules *walk.Kernel
}

// pathTo is what the routing tables say of an address.
type pathTo struct {
	route trace.Route
	err   error
}

// readRules reads what the kernel has.
func readRules(ctx context.Context, conn *nfnetlink.Conn, family lb.Family) (*ruleset, error) {
	r := &ruleset{family: family, conn: conn, tables: map[nft.Table]*walk.Kernel{}, paths: map[netip.Addr]pathTo{}}
	for _, name := range []string{nftables.TableName, rescue.TableName} {
		rules, there, err := walk.Read(conn, nft.Table{Family: family, Name: name})
		if err != nil {
			return nil, err
		}
		if there {
			r.own = append(r.own, ownTable{name, rules})
		}
	}
	var there []string
	services := iptables.ServicesChain(family)
	err := nfnetlink.Complete(func() (err error) {
		r.others, there, err = nft.BaseChains(conn, services)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list the chains of other programs: %w", err)
	}
	r.inNft = len(there) > 0
	if r.iptables, err = iptables.Walkable(ctx, family, r.inNft); err != nil {
		return nil, fmt.Errorf("read the rules of iptables mode: %w", err)
	}
	r.forward, err = forwardChains(ctx)
	return r, err
}

// table returns the rules of a table of another program; nil if it is gone by now.
func (r *ruleset) table(t nft.Table) (*walk.Kernel, error) {
	rules, known := r.tables[t]
	if known {
		return rules, nil
	}
	rules, there, err := walk.Read(r.conn, t)
	if err != nil {
		return nil, err
	}
	if !there {
		rules = nil
	}
	r.tables[t] = rules
	return rules, nil
}

// tracer walks a packet through a ruleset.
type tracer struct {
	*ruleset
	host   trace.Host
	result lb.Trace

	walkers []*walk.Walker
	walker  *iptables.Walker
	kernel  *iptables.KernelRules
	// passed are the chains of other programs that the walk leaves out, with their rules.
	passed map[string]int
}

// assumedPort is the source port of a packet for which none is given: the first that clients take
// for themselves (RFC 6335 section 6).
const assumedPort = 49152

// unknownInterface stands for where a packet comes in whose source the node has no route to.
const unknownInterface = "unknown"

// traceKernel reads the rules and walks the packet.
func traceKernel(ctx context.Context, node string, p lb.TracePacket, givenInterface bool) (traced lb.Trace, err error) {
	err = tracePackets(ctx, node, []lb.TracePacket{p}, givenInterface, func(t lb.Trace) { traced = t })
	return traced, err
}

// tracePackets reads the rules of each family once, walks all packets, and hands over each trace. Without an
// interface a packet comes in where the route to its source leads.
func tracePackets(ctx context.Context, node string, packets []lb.TracePacket, givenInterface bool,
	each func(lb.Trace)) error {
	conn, err := nfnetlink.Open()
	if err != nil {
		return err
	}
	defer conn.Close()
	rules := map[lb.Family]*ruleset{}
	for _, p := range packets {
		family := lb.FamilyOf(p.Destination.Addr())
		if rules[family] == nil {
			if rules[family], err = readRules(ctx, conn, family); err != nil {
				return err
			}
		}
		traced, err := rules[family].trace(node, p, givenInterface)
		if err != nil {
			return err
		}
		each(traced)
	}
	return nil
}

// trace walks a packet.
func (r *ruleset) trace(node string, p lb.TracePacket, givenInterface bool) (lb.Trace, error) {
	t := tracer{ruleset: r, result: lb.Trace{Node: node}, passed: map[string]int{}}
	assumed := p.Source.Port() == 0 && p.Protocol != lb.TraceICMP
	if assumed {
		p.Source = netip.AddrPortFrom(p.Source.Addr(), assumedPort)
	}
	if !givenInterface {
		path, found, err := links.PathTo(p.Source.Addr())
		if err != nil {
			return lb.Trace{}, err
		}
		switch {
		case !found:
			t.note("the node has no route to %s: no reply would reach it", p.Source.Addr())
			p.Interface = unknownInterface
		case !path.Local:
			p.Interface = path.Interface
		}
	}
	t.result.Packet = p
	t.host.Route = t.route
	if err := t.chains(); err != nil {
		return lb.Trace{}, err
	}
	t.result.Ways = trace.Report(t.host.Walk(trace.Packet{Source: p.Source, Destination: p.Destination,
		Interface: p.Interface, Protocol: protocolNumber(p.Protocol, t.family)}))
	relayedWays(t.result.Ways)
	t.foreign(t.passed)
	for _, w := range t.walkers {
		if assumed && w.SourcePort {
			t.note("a rule draws by the source port, for which the walk took %d", p.Source.Port())
			break
		}
	}
	if t.walker != nil {
		t.result.Notes = append(t.result.Notes, t.kernel.Notes...)
		t.foreign(t.walker.Foreign)
	}
	return t.result, nil
}

// relayedWays tells the ways that end at the node's relay from those to backends: by the comment of the rule
// that leads there, or its chain.
func relayedWays(ways []lb.TraceWay) {
	for i, way := range ways {
		if way.Verdict == lb.TraceDelivered && slices.ContainsFunc(way.Steps, func(s lb.TraceStep) bool {
			return s.Comment == nftables.CommentRelay && strings.HasSuffix(s.Table, " "+nftables.TableName) ||
				s.Chain == iptables.ChainRelay
		}) {
			ways[i].Verdict = lb.TraceRelayed
		}
	}
}

func (t *tracer) note(format string, args ...any) {
	t.result.Notes = append(t.result.Notes, fmt.Sprintf(format, args...))
}

// protocolNumber returns the IANA protocol number.
func protocolNumber(p lb.Protocol, family lb.Family) uint8 {
	switch {
	case p == lb.UDP:
		return unix.IPPROTO_UDP
	case p == lb.SCTP:
		return unix.IPPROTO_SCTP
	case p == lb.TraceICMP && family == lb.IPv6:
		return unix.IPPROTO_ICMPV6
	case p == lb.TraceICMP:
		return unix.IPPROTO_ICMP
	}
	return unix.IPPROTO_TCP
}

// route asks the routing tables. What they do not tell counts as a route.
func (t *tracer) route(addr netip.Addr) trace.Route {
	to, known := t.paths[addr]
	if !known {
		path, found, err := links.PathTo(addr)
		switch to.err = err; {
		case err != nil:
		case !found:
			to.route = trace.RouteNone
		case path.Local:
			to.route = trace.RouteLocal
		}
		t.paths[addr] = to
	}
	if to.err != nil && !slices.Contains(t.result.Notes, to.err.Error()) {
		t.note("%v", to.err)
	}
	return to.route
}

func (t *tracer) isLocal(addr netip.Addr) bool { return t.route(addr) == trace.RouteLocal }

// chains sets up the chains that the kernel enters, for one packet.
func (t *tracer) chains() error {
	for _, own := range t.own {
		table := own.rules.Untouched()
		w := &walk.Walker{Family: t.family, Name: own.name, Table: table, Local: t.isLocal}
		t.walkers = append(t.walkers, w)
		t.result.Rules = append(t.result.Rules, map[lb.Family]string{lb.IPv4: "ip ", lb.IPv6: "ip6 "}[t.family]+own.name)
		for chain, hook := range table.Hooks() {
			t.host.Chains = append(t.host.Chains, trace.Chain{Hook: hook.Number, Priority: hook.Priority,
				NAT:  hook.Kind == "nat",
				Walk: func(p trace.Way) []trace.Way { return w.Hook(hook.Number, chain, p) }})
		}
	}
	if t.iptables != nil {
		t.kernel = t.iptables.Untouched()
		t.result.Rules = append(t.result.Rules, t.kernel.Variant)
		t.walker = &iptables.Walker{Family: t.family, Rules: t.kernel, Local: t.isLocal, Foreign: map[string]int{}}
		t.host.Chains = append(t.host.Chains, t.walker.Hooks()...)
	}
	if len(t.result.Rules) == 0 {
		t.note("this node has no rules of Landfall for %s", t.family)
	}
	if err := t.filters(); err != nil {
		return err
	}
	t.dropping()
	return nil
}

// filters adds the chains of other programs that filter, and notes those that the walk leaves out. Those of
// iptables-nft are walked with Landfall's, where those are.
func (t *tracer) filters() error {
	walkers := map[nft.Table]*walk.Walker{}
	for _, c := range t.others {
		hooks := []uint32{unix.NF_INET_PRE_ROUTING, unix.NF_INET_LOCAL_IN, unix.NF_INET_FORWARD, unix.NF_INET_POST_ROUTING}
		if t.result.Packet.Interface == "" {
			hooks = []uint32{unix.NF_INET_LOCAL_OUT, unix.NF_INET_LOCAL_IN, unix.NF_INET_POST_ROUTING}
		}
		family := c.FamilyName()
		walked := t.inNft && (c.Table == "nat" || c.Table == "filter") && c.Name == strings.ToUpper(c.Name)
		if strings.HasPrefix(c.Table, nftables.TableName) || walked || !slices.Contains(hooks, c.Hook.Number) ||
			c.Rules == 0 && !c.Drops || family != "inet" && (family == "ip6") != (t.family == lb.IPv6) || family == "" {
			continue
		}
		if c.Hook.Kind != "filter" {
			t.passed[c.String()] = c.Rules
			continue
		}
		table := nft.Table{Family: t.family, Name: c.Table, Inet: family == "inet"}
		if walkers[table] == nil {
			rules, err := t.table(table)
			if err != nil {
				return err
			} else if rules == nil {
				continue
			}
			walkers[table] = &walk.Walker{Family: t.family, Name: c.Table, Inet: table.Inet, Table: rules.Untouched(),
				Local: t.isLocal, Link: linkNumber(t.result.Packet.Interface)}
		}
		t.filter(walkers[table], c)
	}
	return nil
}

// filter adds a chain of another program. Where the walk cannot tell what it does, it is left out.
func (t *tracer) filter(w *walk.Walker, c nft.BaseChain) {
	t.host.Chains = append(t.host.Chains, trace.Chain{Hook: c.Hook.Number, Priority: c.Hook.Priority,
		Walk: func(p trace.Way) []trace.Way {
			ways, why := w.Foreign(c.Hook.Number, c.Hook.Priority, c.Drops, c.Name, p)
			if why != "" {
				t.passed[c.String()] = c.Rules
			}
			return ways
		}})
}

// linkNumber returns the number of an interface; 0 for one that is not there.
func linkNumber(name string) uint32 {
	link, err := net.InterfaceByName(name)
	if err != nil {
		return 0
	}
	return uint32(link.Index)
}

// maxForeign bounds how many chains of others are named.
const maxForeign = 12

// foreign notes the rules of others that the packet passes.
func (t *tracer) foreign(passed map[string]int) {
	var names []string
	for name, rules := range passed {
		names = append(names, fmt.Sprintf("%s (%d)", name, rules))
	}
	slices.Sort(names)
	if more := len(names) - maxForeign; more > 0 {
		names = append(names[:maxForeign], fmt.Sprintf("%d more chains", more))
	}
	if len(names) > 0 {
		t.note("not walked: rules of other programs in %s", strings.Join(names, ", "))
	}
}

// dropping adds the chains of other programs that certainly drop what the node forwards to pods.
func (t *tracer) dropping() {
	for _, c := range t.forward {
		drops, accepted := c.Dropping()
		if !drops || accepted || c.Family != "inet" && (c.Family == "ip6") != (t.family == lb.IPv6) {
			continue
		}
		dropping := trace.Chain{Hook: unix.NF_INET_FORWARD,
			Walk: func(p trace.Way) []trace.Way { return dropForwarded(c, p) }}
		if own := t.ownForward(); own != nil && c.Filter() {
			walked := own.Walk
			own.Walk = func(p trace.Way) (out []trace.Way) {
				for _, w := range walked(p) {
					if w.Verdict != trace.Undecided {
						out = append(out, w)
					} else {
						out = append(out, dropForwarded(c, w)...)
					}
				}
				return out
			}
			continue
		}
		t.host.Chains = append(t.host.Chains, dropping)
	}
}

// ownForward returns the chain FORWARD of table filter where iptables mode has rules in it.
func (t *tracer) ownForward() *trace.Chain {
	if t.walker == nil {
		return nil
	}
	i := slices.IndexFunc(t.host.Chains, func(c trace.Chain) bool {
		return c.Hook == unix.NF_INET_FORWARD && c.Priority == 0
	})
	return &t.host.Chains[i]
}

// dropForwarded drops what Services forward, as another program's chain does. What it does with other
// packets is not known, and not ours.
func dropForwarded(c plan.ForwardChain, p trace.Way) []trace.Way {
	if p.Translated {
		p.Verdict = trace.Drop
		p.Step(lb.TraceStep{Hook: "forward", Table: c.Family + " " + c.Table, Chain: c.Name,
			Comment: "the chain " + c.String() + " drops what the node forwards to pods", Text: "drop", Foreign: true})
	}
	return []trace.Way{p}
}
