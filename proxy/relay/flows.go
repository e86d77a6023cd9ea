package relay

import (
	"container/list"
	"net/netip"
	"sync"

	"github.com/landfall-lb/landfall/proxy/relayfeed/wire"
)

const (
	// maxAsking is how many flows wait at once for the proxy's word on them, maxClientAsking how many of one
	// client.
	maxAsking, maxClientAsking = 4 * wire.MaxFlows, 2 * wire.MaxFlows
)

// flows are the flows of UDP. It is safe for concurrent use.
//
// A flow of UDP has no end, so a limit has no end of its own either: beyond it, the flow ends whose client has
// been silent for longest. Who asks once from each port, as resolvers do, so never runs into a limit.
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
}

// serviceFlows are those of a Service, the one first whose client has been silent for longest.
type serviceFlows struct {
	flows   *list.List
	clients map[netip.Addr]*list.List
}

func newFlows(most, ofService, ofClient int) *flows {
	return &flows{most: most, ofService: ofService, ofClient: ofClient, all: map[wire.Flow]*flow{},
		asking: map[netip.Addr]int{}, of: map[*service]*serviceFlows{}}
}

// find returns the flow of a datagram of a client. One that is not there is made with made, unless too many
// are being asked about.
func (a *flows) find(key wire.Flow, made func() *flow) *flow {
	a.mu.Lock()
	defer a.mu.Unlock()
	if f := a.all[key]; f != nil {
		a.touch(f)
		return f
	}
	client := clientOf(key.Client.Addr())
	if a.asked == maxAsking || a.asking[client] == maxClientAsking {
		return nil
	}
	f := made()
	a.all[key] = f
	a.asked++
	a.asking[client]++
	return f
}

// touch notes that the client of a flow is not silent.
func (a *flows) touch(f *flow) {
	if f.inService != nil {
		of := a.of[f.service]
		of.flows.MoveToBack(f.inService)
		of.clients[clientOf(f.key.Client.Addr())].MoveToBack(f.inClient)
	}
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
	case of != nil && of.clients[client] != nil && of.clients[client].Len() >= a.ofClient:
		victim, beyond = of.clients[client].Front().Value.(*flow), Counts{ClientRefused: 1}
	case of != nil && of.flows.Len() >= a.ofService:
		victim, beyond = of.flows.Front().Value.(*flow), Counts{Refused: 1}
	case a.open >= a.most:
		victim, beyond = a.largest().flows.Front().Value.(*flow), Counts{Refused: 1}
	}
	if victim != nil {
		a.remove(victim)
	}
	if of = a.of[s]; of == nil {
		of = &serviceFlows{flows: list.New(), clients: map[netip.Addr]*list.List{}}
		a.of[s] = of
	}
	if of.clients[client] == nil {
		of.clients[client] = list.New()
	}
	f.service, f.inService, f.inClient = s, of.flows.PushBack(f), of.clients[client].PushBack(f)
	a.open++
	return victim, beyond
}

// largest returns the flows of the Service that has most.
func (a *flows) largest() (most *serviceFlows) {
	for _, of := range a.of {
		if most == nil || of.flows.Len() > most.flows.Len() {
			most = of
		}
	}
	return most
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
	of.flows.Remove(f.inService)
	of.clients[client].Remove(f.inClient)
	if of.clients[client].Len() == 0 {
		delete(of.clients, client)
	}
	if of.flows.Len() == 0 {
		delete(a.of, f.service)
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
