package relay

import (
	"cmp"
	"errors"
	"net/netip"
	"os"
	"slices"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
)

// maxHandedClients is how many clients a letter has at most, each of 450 bytes at most.
const maxHandedClients = 128

// handedClient is a client that session affinity remembers.
type handedClient struct {
	Service  lb.Key         `json:"service"`
	Protocol lb.Protocol    `json:"protocol"`
	Choices  string         `json:"choices,omitempty"` // the name of their memory; of an earlier release, their own
	Client   netip.Addr     `json:"client"`
	Backend  netip.AddrPort `json:"backend"`
	// Last is when its newest connection began.
	Last time.Time `json:"last"`
}

func (h handedClient) isValid() bool {
	return (h.Protocol == lb.TCP || h.Protocol == lb.UDP) && h.Client.IsValid() && h.Backend.IsValid()
}

// handClients hands over the clients that session affinity remembers, and of those that were handed over before the
// ones that have come again. It awaits no answer: a client that is lost on the way may get another backend, and no
// connection ends. A successor of an earlier release does not ask for them. The sockets and the connections shall not
// wait for them: what was not handed over at a time is handed over the next time, and the clients of the Service at
// which the time was over then come last, so that they do not take that of all others again.
func (c *crew) handClients(p *courier, until time.Time) error {
	if !p.wantsClients || !time.Now().Before(until) {
		return nil
	}
	began := c.deps.Now().Add(-time.Second) // one may be noted a moment after its time was taken
	some, handed := make([]handedClient, 0, maxHandedClients), 0
	var whole []*service // those of which no client is left behind some
	send := func() error {
		if len(some) > 0 {
			defer c.pulses.Begin()()
			if err := p.sendUntil(until, letter{Clients: some}); err != nil {
				return err
			}
		}
		for _, s := range whole {
			p.clientsSince[s] = began
		}
		handed, some, whole = handed+len(some), some[:0], whole[:0]
		return nil
	}
	services := c.table.mostRememberedFirst()
	if i := slices.Index(services, p.clientsLeft); i >= 0 {
		services = append(slices.Delete(services, i, i+1), p.clientsLeft)
	}
	err := func() error {
		for _, s := range services {
			p.clientsLeft = s
			for _, one := range s.rememberedSince(p.clientsSince[s]) {
				if some = append(some, one); len(some) == maxHandedClients {
					if err := send(); err != nil {
						return err
					}
				}
			}
			whole = append(whole, s)
		}
		return send()
	}()
	if errors.Is(err, os.ErrDeadlineExceeded) {
		c.deps.Log.Warn("the successor takes the clients too slowly that session affinity remembers: going on without the "+
			"rest", "handed", handed)
		err = nil
	}
	return err
}

// mostRememberedFirst returns the Services, those first of whose namespace most clients are remembered, and of one
// namespace those that have most. In this order all of them find room again, as each namespace and each Service finds
// at least as much left as when it got what it has.
func (t *table) mostRememberedFirst() []*service {
	type counted struct {
		*service
		together, own int
	}
	t.mu.Lock()
	all := make([]counted, 0, len(t.services))
	for _, s := range t.services {
		all = append(all, counted{service: s})
	}
	t.mu.Unlock()
	for i, s := range all {
		s.mu.Lock()
		all[i].own = len(s.remembered)
		s.mu.Unlock()
	}
	t.remembered.mu.Lock()
	for i, s := range all {
		all[i].together = t.remembered.of[s.key.Namespace]
	}
	t.remembered.mu.Unlock()
	slices.SortFunc(all, func(a, b counted) int {
		return cmp.Or(cmp.Compare(b.together, a.together), cmp.Compare(a.key.Namespace, b.key.Namespace),
			cmp.Compare(b.own, a.own))
	})
	services := make([]*service, len(all))
	for i, s := range all {
		services[i] = s.service
	}
	return services
}

// rememberedSince returns the clients whose newest connection did not begin before a time.
func (s *service) rememberedSince(since time.Time) (all []handedClient) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for who, m := range s.remembered {
		if !m.last.Before(since) {
			all = append(all, handedClient{s.key, s.protocol, who.memory, who.client, m.backend, m.last})
		}
	}
	return all
}

// rememberHanded remembers clients of the relay's predecessor, as far as there is room for them: those of Services that
// the proxy has told of, for as long as the relay before would have known them.
func (t *table) rememberHanded(all []handedClient) {
	now := t.now()
	for _, h := range all {
		t.mu.Lock()
		s, affinity := t.services[id{h.Service, h.Protocol}], time.Duration(0)
		memory := h.Choices
		if s != nil {
			affinity, memory = s.Affinity, cmp.Or(s.memories[h.Choices], h.Choices)
		}
		t.mu.Unlock()
		last := h.Last
		if last.After(now) { // the clock was set back
			last = now
		}
		if affinity > 0 && now.Sub(last) < affinity+returnsWithin {
			w := way{service: s, choices: choices{memory: memory}, affinity: affinity}
			t.rememberSince(w, h.Client, h.Backend, last)
		}
	}
}
