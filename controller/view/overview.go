package view

import (
	"cmp"
	"fmt"
	"maps"
	"math/big"
	"slices"
	"strings"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
)

// Limits of an Overview: it is sent whenever something has changed.
const (
	maxProblems = 50
	maxSessions = 20 // of one peer
	// staleAfter is how long a finding holds that its program does not repeat: programs repeat them
	// every half an hour.
	staleAfter = 35 * time.Minute
)

// Overview is all but the rows.
type Overview struct {
	Services  int `json:"services"`
	Addresses int `json:"addresses"`
	// Wrong is how many problems there are; Problems has the first of them, those of Services last, and
	// of those the latest first. Reasons counts the ones of Services.
	Wrong    int               `json:"wrong"`
	Problems []Problem         `json:"problems"`
	Reasons  map[lb.Reason]int `json:"reasons"`
	Pools    []Pool            `json:"pools"`
	Nodes    []Node            `json:"nodes"`
	Peers    []Peer            `json:"peers"`
	// Unnamed is how many addresses more nodes announce than their Services name: the nodes' counts lack
	// them.
	Unnamed int `json:"unnamed"`
}

// Pool is an IPAddressPool.
type Pool struct {
	Name string `json:"name"`
	// Families has the counts of each family that the pool has.
	Families []Usage `json:"families"`
	// Ready is false if the pool hands out nothing; Reason says why.
	Ready  bool      `json:"ready"`
	Reason lb.Reason `json:"reason"`
}

// Usage counts the addresses of one family in a pool: decimal numbers, as IPv6 has more than fit
// into 64 bits.
type Usage struct {
	Family      lb.Family `json:"family"`
	Used        string    `json:"used"`
	Free        string    `json:"free"`
	Quarantined string    `json:"quarantined"`
	// UsedPart and QuarantinedPart are parts of the whole, 0 to 1.
	UsedPart        float64 `json:"usedPart"`
	QuarantinedPart float64 `json:"quarantinedPart"`
}

// Node is a node of the map.
type Node struct {
	Name string `json:"name"`
	// Owned is how many addresses the node answers for over ARP or NDP, Routed how many it announces
	// over BGP, as far as Services name it.
	Owned  int `json:"owned"`
	Routed int `json:"routed"`
	// Up of Sessions BGP sessions are established.
	Sessions int `json:"sessions"`
	Up       int `json:"up"`
	// Leaving says why the node announces nothing; "" if it does.
	Leaving  lb.Reason `json:"leaving,omitempty"`
	Cordoned bool      `json:"cordoned,omitempty"`
	Findings int       `json:"findings,omitempty"`
}

// Peer is a BGPPeer.
type Peer struct {
	Name string `json:"name"`
	// At is the peer's address or interface.
	At  string `json:"at"`
	ASN uint32 `json:"asn,omitempty"`
	BFD bool   `json:"bfd,omitempty"`
	// Up of Total sessions are established. Sessions has some of them, first those that are not.
	Up       int       `json:"up"`
	Total    int       `json:"total"`
	Sessions []Session `json:"sessions"`
}

// Session is one node's session with a peer.
type Session struct {
	Node    string    `json:"node"`
	State   string    `json:"state"`
	Reason  lb.Reason `json:"reason,omitempty"`
	Message string    `json:"message,omitempty"`
	Since   time.Time `json:"since,omitzero"`
}

const established = "Established"

// Overview returns what there is now.
func (s *State) Overview(now time.Time) Overview {
	o := Overview{Services: len(s.rows), Addresses: s.addresses, Unnamed: s.unnamed, Reasons: maps.Clone(s.reasons),
		Pools: []Pool{}, Nodes: []Node{}, Peers: []Peer{}}
	var problems []Problem
	for _, name := range slices.Sorted(maps.Keys(s.facts.Pools)) {
		pool := s.facts.Pools[name]
		o.Pools = append(o.Pools, newPool(pool))
		problems = append(problems, poolProblems(pool)...)
	}
	nodes := s.nodes()
	for _, name := range slices.Sorted(maps.Keys(s.facts.Peers)) {
		o.Peers = append(o.Peers, newPeer(s.facts.Peers[name]))
		for _, session := range s.facts.Peers[name].Sessions {
			if node := nodes[session.Node]; node != nil {
				node.count(session)
			}
		}
		problems = append(problems, peerProblems(s.facts.Peers[name])...)
	}
	for _, f := range latest(s.facts.Findings, now) {
		problems = append(problems, Problem{Kind: "Node", Name: f.Node, Reason: f.Reason, Message: f.Message, Since: f.Since})
		if node := nodes[f.Node]; node != nil {
			node.Findings++
		}
	}
	for _, name := range slices.Sorted(maps.Keys(nodes)) {
		o.Nodes = append(o.Nodes, *nodes[name])
	}
	o.Wrong = len(problems) + s.broken
	slices.SortStableFunc(problems, later)
	o.Problems = append(problems, s.latestProblems()...)
	o.Problems = append([]Problem{}, o.Problems[:min(len(o.Problems), maxProblems)]...)
	return o
}

// latestProblems returns the latest problems of Services, as many as an Overview has.
func (s *State) latestProblems() []Problem {
	if s.broken == 0 {
		return nil
	}
	all := make([]Problem, 0, s.broken)
	for _, key := range s.keys {
		if p := s.rows[key].Problem; p != nil {
			all = append(all, *p)
		}
	}
	slices.SortStableFunc(all, later)
	return all[:min(len(all), maxProblems)]
}

// later orders problems, the latest first; what has no time comes last.
func later(a, b Problem) int { return b.Since.Compare(a.Since) }

// nodes returns the nodes of the map.
func (s *State) nodes() map[string]*Node {
	nodes := make(map[string]*Node, len(s.facts.Nodes))
	for name, node := range s.facts.Nodes {
		nodes[name] = &Node{Name: name, Owned: s.owned[name], Routed: s.routed[name], Leaving: node.Leaving,
			Cordoned: node.Cordoned}
	}
	return nodes
}

// count counts a session of the node.
func (n *Node) count(session lb.PeerSession) {
	n.Sessions++
	if session.State == established {
		n.Up++
	}
}

func newPeer(p lb.PeerSessions) Peer {
	peer := Peer{Name: p.Name, At: p.Interface, ASN: p.PeerASN, BFD: p.BFD, Total: len(p.Sessions), Sessions: []Session{}}
	if p.Addr.IsValid() {
		peer.At = p.Addr.String()
	}
	var up []Session
	for _, s := range p.Sessions {
		session := Session{Node: s.Node, State: s.State, Reason: s.Reason, Message: s.Message, Since: s.Since}
		if s.State == established {
			peer.Up++
		}
		if s.State == established && s.Reason == "" {
			up = append(up, session)
		} else {
			peer.Sessions = append(peer.Sessions, session)
		}
	}
	peer.Sessions = append(peer.Sessions, up...)
	peer.Sessions = peer.Sessions[:min(len(peer.Sessions), maxSessions)]
	return peer
}

// peerProblems returns what is wrong with the sessions of a peer, once for all nodes that say the same.
func peerProblems(p lb.PeerSessions) []Problem {
	var problems []Problem
	at := map[lb.PeerNode]int{}
	for _, session := range p.Sessions {
		if session.Reason == "" {
			continue
		}
		if i, ok := at[session.PeerNode]; ok {
			problems[i].MoreNodes++
			if session.Since.Before(problems[i].Since) {
				problems[i].Since = session.Since
			}
			continue
		}
		at[session.PeerNode] = len(problems)
		problems = append(problems, Problem{Kind: "BGPPeer", Name: p.Name, Node: session.Node, Reason: session.Reason,
			Message: fmt.Sprintf("%s: %s", session.State, cmp.Or(session.Message, "not up yet")), Since: session.Since})
	}
	return problems
}

func newPool(p lb.Pool) Pool {
	pool := Pool{Name: p.Name, Families: []Usage{}, Reason: lb.ReasonUnheard}
	if c, ok := lb.FindCondition(p.Status.Conditions, lb.ConditionReady); ok {
		pool.Ready, pool.Reason = c.Status, c.Reason
	}
	for _, of := range []struct {
		family           lb.Family
		used, kept, free string
	}{
		{lb.IPv4, p.Status.AssignedIPv4, p.Status.QuarantinedIPv4, p.Status.AvailableIPv4},
		{lb.IPv6, p.Status.AssignedIPv6, p.Status.QuarantinedIPv6, p.Status.AvailableIPv6},
	} {
		if slices.ContainsFunc(p.Ranges, func(r lb.Range) bool { return r.Family() == of.family }) {
			pool.Families = append(pool.Families, newUsage(of.family, of.used, of.kept, of.free))
		}
	}
	return pool
}

func newUsage(family lb.Family, used, kept, free string) Usage {
	u := Usage{Family: family, Used: cmp.Or(used, "0"), Free: cmp.Or(free, "0"), Quarantined: cmp.Or(kept, "0")}
	quarantined, whole := number(u.Quarantined), new(big.Float)
	for _, n := range []*big.Float{number(u.Used), number(u.Free), quarantined} {
		whole.Add(whole, n)
	}
	if whole.Sign() > 0 {
		u.UsedPart, _ = new(big.Float).Quo(number(u.Used), whole).Float64()
		u.QuarantinedPart, _ = new(big.Float).Quo(quarantined, whole).Float64()
	}
	return u
}

// number reads a count; what is none is 0.
func number(s string) *big.Float {
	n, ok := new(big.Float).SetString(s)
	if !ok || n.Sign() < 0 || n.IsInf() {
		return new(big.Float)
	}
	return n
}

// conditionExhausted is that of a pool that has no free address of some family.
const conditionExhausted = "Exhausted"

// poolProblems returns what is wrong with a pool.
func poolProblems(p lb.Pool) []Problem {
	if len(p.Status.Conditions) == 0 {
		return []Problem{{Kind: "IPAddressPool", Name: p.Name, Reason: lb.ReasonUnheard, Since: p.Created,
			Message: "the controller has not processed it yet"}}
	}
	var problems []Problem
	for _, c := range p.Status.Conditions {
		if c.Type == lb.ConditionReady && !c.Status || c.Type == conditionExhausted && c.Status {
			problems = append(problems, Problem{Kind: "IPAddressPool", Name: p.Name, Reason: c.Reason, Message: c.Message,
				Since: p.Since[c.Type]})
		}
	}
	return problems
}

// latest returns the findings that hold: of several with the same text the last one says whether,
// and of those of one second the later one in the list.
func latest(findings []Finding, now time.Time) []Finding {
	last := map[string]Finding{}
	for _, f := range findings {
		about := strings.Join([]string{f.Node, string(f.Reason), f.Message}, " ")
		if before, ok := last[about]; f.Node != "" && (!ok || !f.Last.Before(before.Last)) {
			last[about] = f
		}
	}
	var hold []Finding
	for _, about := range slices.Sorted(maps.Keys(last)) {
		if f := last[about]; !f.Gone && !f.Note && now.Sub(f.Last) < staleAfter {
			hold = append(hold, f)
		}
	}
	return hold
}
