package relay

import (
	"container/list"
	"net/netip"
	"sync"

	"github.com/landfall-lb/landfall/proxy/relayfeed/wire"
)

const (
	// maxAsking is how many flows wait at once for the proxy's word on them, maxClientAsking how many of one
	// client. From behindAt on, the relay is behind: more than the standard rate lets through in one burst.
	maxAsking, maxClientAsking, behindAt = 32 * wire.MaxFlows, 2 * wire.MaxFlows, 8 * wire.MaxFlows
)

// flows are the flows of UDP. It is safe for concurrent use.
//
// A flow of UDP has no end, so a limit has no end of its own either: beyond it, the flow ends whose client has
// been silent for longest. Who asks once from each port, as resolvers do, so never runs into a limit. A flow whose
// client has sent again after an answer has proved itself: it ends after all that have not, as anybody can send a
// first datagram with an address that is another's.
type flows struct {
	// most is how many there are at once, ofService how many of one Service, ofClient how many of one client to
	// one Service.
	most, ofService, ofClient int

	mu     sync.Mutex
	all    map[wire.Flow]*flow
	asking map[netip.Addr]int // by client
	asked  int                // the sum of asking
	open   int
	of     map[*service]*serviceFlows
	// namespaces are those of the Services of each.
	namespaces map[string]*namespaceFlows
}

// namespaceFlows are those of the Services of a namespace, and how many they are.
type namespaceFlows struct {
	of         map[*service]*serviceFlows
	young, all int
}

func (n *namespaceFlows) size() (young, all int) { return n.young, n.all }

// serviceFlows are those of a Service.
type serviceFlows struct {
	namespace *namespaceFlows
	flows     queue
	clients   map[netip.Addr]*queue
}

func (s *serviceFlows) size() (young, all int) { return s.flows.young.Len(), s.flows.len() }

// queue has flows in the order in which they end: those of young first, and of each the one whose client has
// been silent for longest.
type queue struct{ young, proven list.List }

func (q *queue) of(f *flow) *list.List {
	if f.proven {
		return &q.proven
	}
	return &q.young
}

func (q *queue) len() int { return q.young.Len() + q.proven.Len() }

func (q *queue) first() *flow {
	if q.young.Len() > 0 {
		return q.young.Front().Value.(*flow)
	}
	return q.proven.Front().Value.(*flow)
}

func newFlows(most, ofService, ofClient int) *flows {
	return &flows{most: most, ofService: ofService, ofClient: ofClient, all: map[wire.Flow]*flow{},
		asking: map[netip.Addr]int{}, of: map[*service]*serviceFlows{}, namespaces: map[string]*namespaceFlows{}}
}

// find returns the flow of a datagram of a client. One that is not there is made with made, unless too many
// are being asked about; behind is set if that are many.
func (a *flows) find(key wire.Flow, made func() *flow) (f *flow, behind bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if f := a.all[key]; f != nil {
		a.touch(f)
		return f, false
	}
	client := clientOf(key.Client.Addr())
	if a.asked == maxAsking || a.asking[client] == maxClientAsking {
		return nil, a.asked >= behindAt
	}
	f = made()
	a.all[key] = f
	a.asked++
	a.asking[client]++
	return f, a.asked >= behindAt
}

// touch notes that the client of a flow is not silent.
func (a *flows) touch(f *flow) {
	if f.inService == nil {
		return
	}
	of, client := a.of[f.service], a.of[f.service].clients[clientOf(f.key.Client.Addr())]
	if f.proven || !f.answered.Load() {
		of.flows.of(f).MoveToBack(f.inService)
		client.of(f).MoveToBack(f.inClient)
		return
	}
	of.flows.young.Remove(f.inService)
	client.young.Remove(f.inClient)
	f.proven = true
	of.namespace.young--
	f.inService, f.inClient = of.flows.proven.PushBack(f), client.proven.PushBack(f)
}

// answered notes that a flow is not asked about any more.
func (a *flows) answered(f *flow) {
	a.mu.Lock()
	defer a.mu.Unlock()
	client := clientOf(f.key.Client.Addr())
	a.asked--
	if a.asking[client]--; a.asking[client] == 0 {
		delete(a.asking, client)
	}
}

// admit counts a flow to a Service, and returns the one that has to end for it, and as what that counts for its
// Service; nil if none has.
func (a *flows) admit(f *flow, s *service) (victim *flow, beyond Counts) {
	a.mu.Lock()
	defer a.mu.Unlock()
	client := clientOf(f.key.Client.Addr())
	of := a.of[s]
	switch {
	case of != nil && of.clients[client] != nil && of.clients[client].len() >= a.ofClient:
		victim, beyond = of.clients[client].first(), Counts{ClientRefused: 1}
	case of != nil && of.flows.len() >= a.ofService:
		victim, beyond = of.flows.first(), Counts{Refused: 1}
	case a.open >= a.most:
		namespace := largest(a.namespaces, a.most)
		victim, beyond = largest(namespace.of, namespace.all).flows.first(), Counts{Refused: 1}
	}
	if victim != nil {
		a.remove(victim)
	}
	if of = a.of[s]; of == nil {
		of = a.begin(s)
	}
	if of.clients[client] == nil {
		of.clients[client] = &queue{}
	}
	f.service, f.inService, f.inClient = s, of.flows.young.PushBack(f), of.clients[client].young.PushBack(f)
	of.namespace.young++
	of.namespace.all++
	a.open++
	return victim, beyond
}

// begin makes room for the flows of a Service that has none.
func (a *flows) begin(s *service) *serviceFlows {
	n := a.namespaces[s.key.Namespace]
	if n == nil {
		n = &namespaceFlows{of: map[*service]*serviceFlows{}}
		a.namespaces[s.key.Namespace] = n
	}
	of := &serviceFlows{namespace: n, clients: map[netip.Addr]*queue{}}
	a.of[s], n.of[s] = of, of
	return of
}

// largest returns which of those that have so many flows together has to end one: of those with more than an equal
// share the one with most that have not proved themselves, or, without such, the one with most.
func largest[K comparable, F interface{ size() (young, all int) }](of map[K]F, together int) (largest F) {
	share, mostYoung, most := together/len(of), 0, 0
	for _, one := range of {
		young, all := one.size()
		if all <= share {
			young = 0
		}
		if young > mostYoung || young == mostYoung && all > most {
			largest, mostYoung, most = one, young, all
		}
	}
	return largest
}

// end forgets a flow.
func (a *flows) end(f *flow) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.remove(f)
}

func (a *flows) remove(f *flow) {
	if a.all[f.key] == f {
		delete(a.all, f.key)
	}
	if f.inService == nil {
		return
	}
	of, client := a.of[f.service], clientOf(f.key.Client.Addr())
	of.flows.of(f).Remove(f.inService)
	of.clients[client].of(f).Remove(f.inClient)
	if of.clients[client].len() == 0 {
		delete(of.clients, client)
	}
	if of.namespace.all--; !f.proven {
		of.namespace.young--
	}
	if of.flows.len() == 0 {
		delete(a.of, f.service)
		if delete(of.namespace.of, f.service); len(of.namespace.of) == 0 {
			delete(a.namespaces, f.service.key.Namespace)
		}
	}
	f.inService, f.inClient = nil, nil
	a.open--
}

// list returns all.
func (a *flows) list() (all []*flow) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, f := range a.all {
		all = append(all, f)
	}
	return all
}
