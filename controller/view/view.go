// Package view makes what the dashboard shows of what the controller's tables hold: pools, who
// announces which address, sessions, and what is wrong since when.
//
// A State is told of each Service that has changed, and keeps counts, so that an Overview costs
// what there is of pools, nodes and sessions, and not of Services. It has no clock and does no I/O.
package view

import (
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
)

// Facts are all that is no Service.
type Facts struct {
	Pools    map[string]lb.Pool
	Nodes    map[string]lb.Node
	Peers    map[string]lb.PeerSessions
	Findings []Finding
}

// Finding is what a program reports of a Node.
type Finding struct {
	Node string
	lb.Finding
	Gone        bool // it is no longer found
	Since, Last time.Time
}

// Row is one Service of type LoadBalancer.
type Row struct {
	Namespace string           `json:"namespace"`
	Name      string           `json:"name"`
	Policy    lb.TrafficPolicy `json:"policy"`
	Addresses []Address        `json:"addresses,omitempty"`
	// Problem says why the Service has no address, or why no node announces it; nil if nothing is wrong.
	Problem *Problem `json:"problem,omitempty"`
}

// Address is one external address of a Service, and who announces it.
type Address struct {
	lb.Announcement
	// Pool is the pool that contains the address; "" if none does.
	Pool string `json:"pool,omitempty"`
	// Mode is the ipMode where it is not VIP: nodes do not announce the address then.
	Mode lb.IPMode `json:"mode,omitempty"`
}

// Problem is something that is wrong.
type Problem struct {
	// Kind, Namespace and Name are of the object, as Service, IPAddressPool, BGPPeer or Node.
	Kind      string `json:"kind"`
	Namespace string `json:"namespace,omitempty"`
	Name      string `json:"name"`
	// Node is the first one that has it, of a BGPPeer, and MoreNodes is how many others have the same.
	Node      string    `json:"node,omitempty"`
	MoreNodes int       `json:"moreNodes,omitempty"`
	Reason    lb.Reason `json:"reason"`
	Message   string    `json:"message"`
	// Since is when it began; zero if unknown.
	Since time.Time `json:"since,omitzero"`
}

// row is a Row with what is counted of it.
type row struct {
	Row
	owned, routed []string // nodes, each once for each address
	unnamed       int      // addresses that more nodes announce than the Service names
	text          string   // what a search looks at, in lower case
}

// State holds a row for each Service of type LoadBalancer, and what is counted of them.
type State struct {
	class string
	facts Facts
	rows  map[lb.Key]*row
	keys  []lb.Key // of rows, in order
	// What follows sums up rows.
	owned, routed     map[string]int // by node
	addresses, broken int
	unnamed           int
	reasons           map[lb.Reason]int
}

// New returns a State for the Services of a loadBalancerClass, "" for those without one.
func New(class string) *State {
	return &State{class: class, rows: map[lb.Key]*row{}, owned: map[string]int{}, routed: map[string]int{},
		reasons: map[lb.Reason]int{}}
}

// SetFacts says what there is beside Services.
func (s *State) SetFacts(f Facts) { s.facts = f }

// SetService says how a Service is now; ok is false if it is gone.
func (s *State) SetService(key lb.Key, service lb.Service, ok bool) {
	before := s.rows[key]
	if before != nil {
		s.count(before, -1)
	}
	if !ok || service.Type != lb.LoadBalancer || service.Class != s.class {
		if before != nil {
			delete(s.rows, key)
			at, _ := slices.BinarySearchFunc(s.keys, key, lb.Key.Compare)
			s.keys = slices.Delete(s.keys, at, at+1)
		}
		return
	}
	now := newRow(service)
	s.rows[key] = now
	s.count(now, 1)
	if before == nil {
		at, _ := slices.BinarySearchFunc(s.keys, key, lb.Key.Compare)
		s.keys = slices.Insert(s.keys, at, key)
	}
}

// SetServices says how all Services are now.
func (s *State) SetServices(all map[lb.Key]lb.Service) {
	facts := s.facts
	*s = *New(s.class)
	s.facts = facts
	for key, service := range all {
		if service.Type == lb.LoadBalancer && service.Class == s.class {
			r := newRow(service)
			s.rows[key], s.keys = r, append(s.keys, key)
			s.count(r, 1)
		}
	}
	slices.SortFunc(s.keys, lb.Key.Compare)
}

// count adds a row to the sums, or with -1 takes it away.
func (s *State) count(r *row, sign int) {
	s.addresses += sign * len(r.Addresses)
	s.unnamed += sign * r.unnamed
	for _, node := range r.owned {
		add(s.owned, node, sign)
	}
	for _, node := range r.routed {
		add(s.routed, node, sign)
	}
	if r.Problem != nil {
		s.broken += sign
		add(s.reasons, r.Problem.Reason, sign)
	}
}

// add changes a count, and forgets one that is 0.
func add[K comparable](counts map[K]int, key K, n int) {
	if counts[key] += n; counts[key] == 0 {
		delete(counts, key)
	}
}

// maxText bounds what a search looks at in one Service: tenants write into its annotations.
const maxText = 1 << 10

func newRow(s lb.Service) *row {
	r := &row{Row: Row{Namespace: s.Key.Namespace, Name: s.Key.Name, Policy: s.ExternalPolicy}}
	announcements, err := lb.DecodeAnnouncements(s.Announcements)
	if !s.Deleting && !s.Headless {
		for _, in := range s.Ingress {
			r.Addresses = append(r.Addresses, addressOf(in, announcements))
		}
	}
	r.Problem = problemOf(s, err)
	var text strings.Builder
	text.WriteString(s.Key.String())
	if r.Problem != nil {
		text.WriteString(" " + string(r.Problem.Reason))
	}
	for _, a := range r.Addresses {
		nodes := map[string]bool{}
		text.WriteString(" " + a.VIP.String() + " " + a.Owner)
		if a.Owner != "" {
			r.owned = append(r.owned, a.Owner)
		}
		more := a.OtherNodes
		for _, route := range a.Routes {
			more += route.OtherNodes
			for _, node := range route.Nodes {
				nodes[node] = true
			}
			text.WriteString(" " + strings.Join(route.Peers, " "))
		}
		for node := range nodes {
			r.routed = append(r.routed, node)
		}
		r.unnamed += min(more, 1)
	}
	r.text = strings.ToLower(text.String()[:min(text.Len(), maxText)])
	return r
}

// addressOf returns an address of a Service with what the speakers say of it.
func addressOf(in lb.Ingress, announcements []lb.Announcement) Address {
	if in.Mode == lb.IPModeProxy {
		return Address{Announcement: lb.Announcement{VIP: in.Addr}, Mode: in.Mode}
	}
	for _, a := range announcements {
		if a.VIP == in.Addr {
			return Address{Announcement: a}
		}
	}
	return Address{Announcement: lb.Announcement{VIP: in.Addr}}
}

// conditionServing is false while no node that delivers it announces an address of a Service.
const conditionServing = "landfall.dev/Serving"

// problemOf returns what is wrong with a Service, the earliest cause of all; broken is why its
// announcements cannot be read.
func problemOf(s lb.Service, broken error) *Problem {
	if s.Deleting || s.Headless {
		return nil
	}
	p := &Problem{Kind: "Service", Namespace: s.Key.Namespace, Name: s.Key.Name}
	assigned, known := lb.FindCondition(s.Conditions, lb.ConditionAssigned)
	announced, told := lb.FindCondition(s.Conditions, lb.ConditionAnnounced)
	switch {
	case !known:
		p.Reason, p.Message, p.Since = lb.ReasonUnheard, "the controller has not processed it yet", s.Created
	case !assigned.Status:
		p.Reason, p.Message, p.Since = assigned.Reason, assigned.Message, s.FalseSince[assigned.Type]
	case len(s.VIPs()) == 0:
		return nil // of ipMode Proxy
	case !told:
		p.Reason, p.Message, p.Since = lb.ReasonUnheard, "no speaker has reported on it yet", s.Created
	case !announced.Status:
		p.Reason, p.Message, p.Since = announced.Reason, announced.Message, s.FalseSince[announced.Type]
	case announced.Reason != lb.ReasonAnnounced:
		p.Reason, p.Message, p.Since = announced.Reason, announced.Message, s.FalseSince[conditionServing]
	case broken != nil:
		p.Reason, p.Message = lb.ReasonUnheard, broken.Error()+"; the speaker that reports on the Service writes it anew"
	default:
		return nil
	}
	return p
}

// Query selects rows.
type Query struct {
	// Text is in the namespace, name, address, owner, peer or reason; "" for all.
	Text string
	// Node is one that announces an address; "" for any.
	Node string
	// Wrong selects only Services with a problem.
	Wrong bool
	// Offset is how many of those that are selected to leave out; Limit is how many to return at most.
	Offset, Limit int
}

// Page is a part of the rows that a Query selects.
type Page struct {
	// Total is how many rows the Query selects, Offset how many of them come before Rows.
	Total  int   `json:"total"`
	Offset int   `json:"offset"`
	Rows   []Row `json:"rows"`
}

// Page returns rows in the order of their keys. Where there are none so far on, it returns the last
// ones.
func (s *State) Page(q Query) Page {
	text := strings.ToLower(strings.TrimSpace(q.Text))
	selected := make([]*row, 0, len(s.keys))
	for _, key := range s.keys {
		if r := s.rows[key]; r.matches(q, text) {
			selected = append(selected, r)
		}
	}
	page := Page{Total: len(selected), Offset: max(q.Offset, 0), Rows: []Row{}}
	if page.Offset >= page.Total && q.Limit > 0 {
		page.Offset = max(page.Total-1, 0) / q.Limit * q.Limit
	}
	for _, r := range selected[page.Offset:min(page.Offset+q.Limit, page.Total)] {
		shown := r.Row
		shown.Addresses = slices.Clone(r.Addresses)
		for i := range shown.Addresses {
			shown.Addresses[i].Pool = s.poolOf(shown.Addresses[i].VIP)
		}
		page.Rows = append(page.Rows, shown)
	}
	return page
}

func (r *row) matches(q Query, text string) bool {
	return (!q.Wrong || r.Problem != nil) && strings.Contains(r.text, text) &&
		(q.Node == "" || slices.Contains(r.owned, q.Node) || slices.Contains(r.routed, q.Node))
}

// poolOf names the first pool, by name, that contains an address.
func (s *State) poolOf(addr netip.Addr) (first string) {
	for name, pool := range s.facts.Pools {
		if (first == "" || name < first) &&
			slices.ContainsFunc(pool.Ranges, func(r lb.Range) bool { return r.Contains(addr) }) {
			first = name
		}
	}
	return first
}
