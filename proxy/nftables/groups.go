package nftables

import (
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"maps"
	"math"
	"slices"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// group is a list of backends from which frontends of a Service choose. Ports whose lists have the
// same addresses share one.
type group struct {
	// name tells it from the Service's other groups, whatever the list: that of the first of its
	// ports by name, so that clients are remembered over changes of the list.
	name string
	id   uint32
	// mixed is the protocol of the only port if its backends' ports differ; else 0, and targets have
	// no port.
	mixed     protocol
	backends  []target
	weights   []uint8 // nil if all are the same
	scheduler plan.Scheduler
	// counted is for a scheduler that counts.
	counted *counted
	// class is the size of the table of a scheduler with slots.
	class uint32
	// direct is set if frontends that are forwarded directly choose from it.
	direct bool
	// byAddress is set if clients are not remembered although they shall be: their addresses choose.
	byAddress bool
}

// counted is what is known of the connections of a group's backends. Groups that follow each other and whose backends
// are alike in that share one, and so a table: where ports' numbers differ, there are hundreds.
type counted struct {
	burdens []plan.Burden
	soon    uint32 // how many new connections are expected
	table   []uint16
}

// choice is what the frontends of one port choose from; nil for what no frontend uses.
type choice struct {
	cluster, local *group
	// port is that of all backends; 0 if their ports differ.
	port uint16
}

// MaxElements is how many elements a Service may have in the kernel.
const MaxElements = 1 << 17

// maxMixedPorts is how many backends whose ports differ may have session affinity in a Service: each takes three
// elements.
const maxMixedPorts = MaxElements / 4

// choices returns what each port of a Service chooses from, in groups with numbers that are not
// taken yet.
func (r renderer) choices(key lb.Key, s plan.Service, taken map[uint32]bool) []choice {
	cluster, local := newLists("cluster "), newLists("local ")
	choices := make([]choice, len(s.Ports))
	for i, p := range s.Ports {
		protocol, ok := protocolOf(p.Protocol)
		if !ok {
			continue
		}
		usesCluster, usesLocal := p.Uses()
		port, same := onePort(p)
		if same {
			choices[i].port, protocol = port, 0
		}
		name := p.Name + "/" + string(p.Protocol)
		if usesCluster {
			choices[i].cluster = cluster.share(name, protocol, p.Backends.Cluster)
			if g := choices[i].cluster; g != nil && slices.ContainsFunc(p.Frontends, func(f plan.Frontend) bool {
				return s.IsDirect(p, f)
			}) {
				g.direct = true
			}
		}
		if usesLocal {
			choices[i].local = local.share(name, protocol, p.Backends.Local)
		}
	}
	all := slices.AppendSeq(slices.Collect(maps.Values(cluster.groups)), maps.Values(local.groups))
	slices.SortFunc(all, func(a, b *group) int { return compareNames(a.name, b.name) })
	for _, g := range all {
		g.id = r.number(key, s.UID, g.name, taken)
	}
	remember := func(ports bool) {
		last := &counted{}
		for _, g := range all {
			g.scheduler, g.class = s.Scheduler, 0
			g.byAddress = s.AffinityTimeout > 0 && (s.Places == plan.NoPlaces || g.mixed != 0 && !ports)
			// The relay remembers its clients by itself: who comes to the rules while it is away shall have the backend that
			// the relay has chosen, and the other way round.
			if g.byAddress || s.AffinityTimeout > 0 && s.Relay && method(g.scheduler) == 0 {
				g.scheduler = plan.SourceHash
			}
			if g.scheduler.Counts() {
				last = g.weigh(r.family, r.loads[key], last)
			}
		}
		limitSlots(all)
	}
	remember(hasRoomForPorts(all))
	// A Service that has room only without this is served without it.
	if s.AffinityTimeout > 0 && slices.ContainsFunc(all, func(g *group) bool { return g.mixed != 0 && !g.byAddress }) &&
		r.count(s, choices, r.sourceLists(key, s, map[uint32]bool{})) > MaxElements {
		remember(false)
	}
	return choices
}

// hasRoomForPorts reports whether clients can be remembered where ports differ.
func hasRoomForPorts(groups []*group) bool {
	n := 0
	for _, g := range groups {
		if g.mixed != 0 {
			n += len(g.backends)
		}
	}
	return n <= maxMixedPorts
}

func compareNames(a, b string) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}

// lists are the groups of a Service for one kind of lists of backends.
type lists struct {
	kind   string
	groups map[string]*group // by their backends
	// last was found last, for backends: most ports have the same as the one before.
	last     *group
	backends []lb.Backend
}

func newLists(kind string) lists { return lists{kind: kind, groups: map[string]*group{}} }

// share returns the group for a list of backends, one that is there already if it has the same.
func (l *lists) share(name string, mixed protocol, backends []lb.Backend) *group {
	if len(backends) == 0 {
		return nil
	}
	backends = backends[:min(len(backends), maxBackends)]
	g := l.last
	if mixed != 0 || g == nil || g.mixed != 0 ||
		!isOne(backends, l.backends) && !slices.EqualFunc(backends, l.backends, sameTarget) {
		g = l.find(name, mixed, backends)
		l.last, l.backends = g, backends
	}
	g.name = min(g.name, l.kind+name)
	return g
}

// isOne reports whether two lists are one: ports share theirs.
func isOne(a, b []lb.Backend) bool { return len(a) == len(b) && (len(a) == 0 || &a[0] == &b[0]) }

func sameTarget(a, b lb.Backend) bool { return a.Addr.Addr() == b.Addr.Addr() && a.Weight == b.Weight }

func (l *lists) find(name string, mixed protocol, backends []lb.Backend) *group {
	targets := make([]target, len(backends))
	weights := weightsOf(backends)
	list := make([]byte, 0, len(name)+16*len(backends)+len(weights))
	if mixed != 0 {
		list = append(list, name...)
	}
	if weights != nil {
		list = append(append(list, 'w'), weights...) // what follows has another length
	}
	for i, b := range backends {
		targets[i].addr = addressOf(b.Addr.Addr())
		if mixed != 0 {
			targets[i].port = b.Addr.Port()
		} else {
			list = append(list, targets[i].addr[:]...)
		}
	}
	g := l.groups[string(list)]
	if g == nil {
		g = &group{name: l.kind + name, mixed: mixed, backends: targets, weights: weights}
		l.groups[string(list)] = g
	}
	return g
}

// weightsOf returns the weights of backends, nil if all are the same.
func weightsOf(backends []lb.Backend) []uint8 {
	same := func(b lb.Backend) bool { return b.Weight == backends[0].Weight }
	if !slices.ContainsFunc(backends, func(b lb.Backend) bool { return !same(b) }) {
		return nil
	}
	weights := make([]uint8, len(backends))
	for i, b := range backends {
		weights[i] = max(b.Weight, 1)
	}
	return weights
}

// number returns the number of a group, which is the same after each start: a hash, or the next that is not another's.
// The hash is of the Service's UID too: names are what tenants choose, and one who searches finds some that have the
// number of another's group.
func (r renderer) number(key lb.Key, uid, name string, taken map[uint32]bool) uint32 {
	for try := uint64(0); ; try++ {
		h := fnv.New64a()
		fmt.Fprintf(h, "%s\x00%s\x00%s\x00", key, uid, name)
		h.Write(binary.BigEndian.AppendUint64(nil, try))
		id := uint32(plan.Mix(h.Sum64()) >> 32)
		if id == 0 || id == math.MaxUint32 || taken[id] || r.taken != nil && r.taken(id) { // the two mean something
			continue
		}
		taken[id] = true
		return id
	}
}

// limitSlots chooses the sizes of the tables of groups whose scheduler needs one. A group whose table would have fewer
// slots than backends draws at random, so that each backend gets connections.
func limitSlots(groups []*group) {
	groups = slices.DeleteFunc(slices.Clone(groups), func(g *group) bool {
		return method(g.scheduler) == 0 || len(g.backends) == 1
	})
	largest := plan.LargestSlots(func(largest uint32) (total int) {
		for _, g := range groups {
			n := int(min(g.wantedClass(), largest))
			if total += n; g.direct { // to nodes as well as to backends
				total += n
			}
		}
		return total
	})
	for _, g := range groups {
		if g.class = min(g.wantedClass(), largest); len(g.backends) > int(g.class) {
			g.scheduler, g.class = plan.Random, 0
		}
	}
}

// wantedClass returns the size of the group's table, as long as others leave it that.
func (g *group) wantedClass() uint32 {
	class := plan.SlotSize(g.shares())
	if g.scheduler.Counts() {
		class = plan.CountedSize(len(g.backends))
	}
	if g.direct { // where the size of a table changes, most connections move
		class = max(class, plan.SlotSizes[1])
	}
	return class
}

// weigh takes in what is known of the backends' connections, and returns it. last is that of the group before.
func (g *group) weigh(family lb.Family, load plan.Load, last *counted) *counted {
	burdens := make([]plan.Burden, len(g.backends))
	for i, b := range g.backends {
		burdens[i].Open = load.Open[b.addr.ip(family)]
		if g.weights != nil {
			burdens[i].Weight = g.weights[i]
		}
	}
	if g.counted = last; !slices.Equal(burdens, last.burdens) {
		g.counted = &counted{burdens: burdens, soon: load.Soon}
	}
	return g.counted
}

// slots returns the group's table.
func (g *group) slots() []uint16 {
	if !g.scheduler.Counts() {
		return slots(g.scheduler, g.backends, g.weights, g.class)
	}
	c := g.counted
	if len(c.table) != int(g.class) {
		c.table = countedSlots(g.scheduler, c.burdens, c.soon, g.class)
	}
	return c.table
}

// shares returns how many shares a table has at least, each backend's in proportion to its weight.
func (g *group) shares() int {
	if g.weights == nil {
		return len(g.backends)
	}
	total := 0
	for _, weight := range g.weights {
		total += int(weight)
	}
	return total
}

// SchedulerIgnored says why this mode does not choose a Service's backends by its scheduler, or does not keep a client
// at its backend, "" if it does. Of the configuration it goes by where node ports are served.
func SchedulerIgnored(s plan.Service, config plan.Config) string {
	asks := fmt.Sprintf("scheduler %s", s.Scheduler)
	switch {
	case method(s.Scheduler) != 0:
	case s.AffinityTimeout > 0: // where clients are not remembered, the address chooses
		asks = "spec.sessionAffinity: ClientIP"
	default:
		return ""
	}
	for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		r := newRenderer(family, config)
		for _, c := range r.choices(s.Key, s.Only(family), map[uint32]bool{}) {
			for _, g := range []*group{c.cluster, c.local} {
				switch {
				case g == nil:
				case g.byAddress && method(g.scheduler) != 0 && s.Places != plan.NoPlaces:
					return fmt.Sprintf("%s: clients are remembered for up to %d endpoints whose target ports have different numbers, "+
						"fewer beside many ports, addresses or other endpoints, and the Service has more; the client's address "+
						"chooses, also after timeoutSeconds", asks, maxMixedPorts)
				case method(g.scheduler) == 0 && (method(s.Scheduler) != 0 || g.byAddress):
					return fmt.Sprintf("%s: of the %d places that a Service's tables may have, a list of %d endpoints gets fewer "+
						"than that, so connections are spread at random; a Service with fewer named target ports has fewer lists",
						asks, plan.MaxSlots, len(g.backends))
				}
			}
		}
	}
	return ""
}

// remembering returns how many groups can remember clients.
func remembering(choices []choice) int {
	groups := map[*group]bool{}
	for _, c := range choices {
		for _, g := range []*group{c.cluster, c.local} {
			if g != nil && !g.byAddress {
				groups[g] = true
			}
		}
	}
	return len(groups)
}

// size returns how many elements a group needs at most.
func (g *group) size(affinity bool) int {
	n := max(int(g.class), len(g.backends)) + 2
	if affinity && !g.byAddress {
		n += len(g.backends) + 1
		if g.mixed != 0 {
			n += len(g.backends)
		}
	}
	if g.direct {
		n += int(g.class) + len(g.backends) + 1
	}
	return n
}

// part renders a group.
func (g *group) part(m memory) part {
	w := writer{at: frontend{group: g.id}}
	w.entries = make([]entry, 0, g.size(m > 0))
	to := setBackends
	if g.mixed != 0 {
		w.add(setMixed)
		to = mixedOf(g.mixed)
	}
	if g.class == 0 {
		class := drawClass(len(g.backends))
		if class > exactClasses && g.mixed == 0 {
			w.add(setMany)
		}
		for i, b := range g.backends {
			w.number(to, numbers(plan.Random, class)+uint32(i), b)
		}
	} else {
		w.add(setScheduled)
		for i, place := range g.slots() {
			w.number(to, numbers(g.scheduler, g.class)+uint32(i), g.backends[place])
		}
	}
	if m > 0 && !g.byAddress {
		w.number(setRemember, m, target{})
		w.remembers(g)
	}
	return part{frontend: w.at, entries: w.entries}
}

// remembers adds the backends to which remembered clients may come back. One address with several ports, as only
// hand-made EndpointSlices have it, keeps the first.
func (w *writer) remembers(g *group) {
	for i, b := range g.backends {
		if i > 0 && g.backends[i-1].addr == b.addr {
			continue
		}
		at := element{set: setAffinity, frontend: w.at, source: b.addr}
		w.entries = append(w.entries, entry{element: at})
		if g.mixed != 0 {
			at.set = setAffinityPorts
			w.entries = append(w.entries, entry{element: at, to: target{port: b.port}})
		}
	}
}
