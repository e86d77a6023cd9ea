package plan

import (
	"net/netip"
	"slices"
	"strings"

	"github.com/landfall-lb/landfall/internal/lb"
)

// ForwardChain is a base chain of any program that sees the packets that the node forwards, or those for
// the node itself.
type ForwardChain struct {
	Family, Table, Name string // as nft writes them
	// Legacy is set for chains of iptables-legacy, which nft does not show.
	Legacy bool
	// Drops is set if the policy of the chain is drop.
	Drops bool
	// Rules are those of the chain, and of each chain to which they lead, by name.
	Rules map[string][]ForwardRule
}

// ForwardRule is what a rule does with the packets that it matches.
type ForwardRule struct {
	Accept
	// Conditional is set unless the rule matches every packet.
	Conditional bool
	Verdict     Verdict
	// To is the chain that the rule jumps or goes to; Goto is set if packets do not come back.
	To   string
	Goto bool
}

// Verdict is what becomes of a packet.
type Verdict int

// The verdicts of rules. A verdict that the reader does not know counts as VerdictAccept: what is
// not certain is no finding.
const (
	VerdictContinue Verdict = iota
	VerdictAccept
	VerdictDrop
	VerdictReturn
)

// harmless are iptables' targets after which the packet meets the next rule.
var harmless = []string{"AUDIT", "CLASSIFY", "CONNMARK", "DSCP", "HL", "LOG", "MARK", "NFLOG", "SET", "TCPMSS",
	"TRACE", "TTL"}

// VerdictOf returns the verdict of one of iptables' targets.
func VerdictOf(target string) Verdict {
	switch {
	case target == "", slices.Contains(harmless, target):
		return VerdictContinue
	case target == "DROP", target == "REJECT":
		return VerdictDrop
	case target == "RETURN":
		return VerdictReturn
	}
	return VerdictAccept
}

// Accept is what must be true of packets that a rule accepts, as far as it is known.
type Accept struct {
	Chain string // that of the rule
	// Established is set if the rule accepts only packets of known connections, and ICMP if only
	// those.
	Established, ICMP bool
	// Interfaces are the names that packets must come in or go out at; a * stands for what may follow.
	Interfaces []string
	// Ports are those of which packets must have one as destination; none if that is unknown. NotTCP and
	// NotUDP are set if the rule accepts no TCP, and no UDP.
	Ports          []uint16
	NotTCP, NotUDP bool
}

// limits reports whether packets must fulfil what is known to leave some out.
func (a Accept) limits() bool {
	return a.Established || a.ICMP || len(a.Interfaces) > 0
}

// newTo reports whether the rule may accept new connections of others to a port of the node.
func (a Accept) newTo(protocol lb.Protocol, port uint16) bool {
	not := map[lb.Protocol]bool{lb.TCP: a.NotTCP, lb.UDP: a.NotUDP}
	return !a.Established && !a.ICMP && !not[protocol] && !slices.Contains(a.Interfaces, "lo") &&
		(len(a.Ports) == 0 || slices.Contains(a.Ports, port))
}

// DropsTo reports whether the chain, which sees packets for the node itself, certainly drops new
// connections to a port.
func (c ForwardChain) DropsTo(protocol lb.Protocol, port uint16) bool {
	p := c.walk()
	return (c.Drops || p.ends) && !slices.ContainsFunc(p.accepts, func(a Accept) bool { return a.newTo(protocol, port) })
}

// Of other programs: kube-proxy accepts in its chain only known connections and what it has marked
// itself, and Landfall in iptables mode does the same. Neither accepts a new connection of policy
// Local, or one that another node sends here.
const (
	chainKubeForward = "KUBE-FORWARD"
	chainOwnForward  = "LF-FORWARD"
)

// ChainAccept is the chain of table filter in which Landfall accepts what its Services forward. Its
// name does not begin like those of iptables mode, which removes what it does not know.
const ChainAccept = "LANDFALL-ACCEPT"

// otherNetworks begin the names of interfaces that Docker and libvirt make for their own networks.
var otherNetworks = []string{"docker", "br-", "virbr"}

// newOfPods reports whether the rule may accept new connections of pods: whatever it is not known
// to leave out.
func (a Accept) newOfPods() bool {
	return !a.Established && !a.ICMP && a.Chain != chainKubeForward && a.Chain != chainOwnForward &&
		!slices.ContainsFunc(a.Interfaces, func(name string) bool {
			return slices.ContainsFunc(otherNetworks, func(begin string) bool { return strings.HasPrefix(name, begin) })
		})
}

// Filter reports whether iptables manages the chain, so that its programs can add rules to it.
func (c ForwardChain) Filter() bool {
	return c.Table == "filter" && c.Name == "FORWARD" && c.Family != "inet"
}

// String names the chain for people.
func (c ForwardChain) String() string {
	name := c.Family + " " + c.Table + " " + c.Name
	if c.Legacy {
		name += " (iptables-legacy)"
	}
	return name
}

// passage is what happens to packets on their way through a chain.
type passage struct {
	accepts []Accept
	// own is set if each packet that no rule with conditions has taken meets ChainAccept.
	own bool
	// ends is set if no packet reaches the chain's end, and so not its policy.
	ends bool
}

// walk goes through the rules in their order. Rules behind one that takes all packets count for
// nothing.
func (c ForwardChain) walk() passage {
	var p passage
	seen := map[string]bool{}
	p.ends = c.through(&p, c.Name, true, seen)
	return p
}

// through walks one chain, to which all packets come if always is set, and reports whether none
// returns from it. seen holds the chains that were walked, and whether packets return from them.
func (c ForwardChain) through(p *passage, chain string, always bool, seen map[string]bool) (ends bool) {
	seen[chain] = false
	defer func() { seen[chain] = ends }()
	for _, r := range c.Rules[chain] {
		r.Chain = chain
		switch {
		case r.To == ChainAccept:
			p.own = p.own || always && !r.Conditional
		case r.To != "" && r.limits(): // what is accepted there is for such packets only
			p.accepts = append(p.accepts, r.Accept)
		case r.To != "":
			took, walked := seen[r.To]
			if !walked {
				took = c.through(p, r.To, always && !r.Conditional, seen)
			}
			if !r.Conditional && (took || r.Goto) {
				return took
			}
		case r.Verdict == VerdictAccept:
			p.accepts = append(p.accepts, r.Accept)
			if !r.Conditional {
				return true
			}
		case r.Verdict == VerdictDrop && !r.Conditional:
			return true
		case r.Verdict == VerdictReturn && !r.Conditional:
			return false
		}
	}
	return false
}

// Dropping reports whether the chain certainly drops new connections of pods, if Landfall's own rule
// is left aside, and whether that rule accepts them: no rule before it takes all packets.
func (c ForwardChain) Dropping() (drops, accepted bool) {
	p := c.walk()
	drops = (c.Drops || p.ends) && !slices.ContainsFunc(p.accepts, Accept.newOfPods)
	return drops, p.own
}

// Ends reports whether the chain has a rule that takes all packets before the policy does. It needs
// only the rules that all packets meet.
func (c ForwardChain) Ends() bool { return c.walk().ends }

// HasOwn reports whether a rule of the chain leads to ChainAccept.
func (c ForwardChain) HasOwn() bool {
	return slices.ContainsFunc(c.Rules[c.Name], func(r ForwardRule) bool { return r.To == ChainAccept })
}

// Acceptance is what Landfall accepts in the chain FORWARD of table filter that would drop it.
type Acceptance struct {
	// Networks are those of pods, and Nodes the addresses from which other nodes send connections to
	// pods of this one, sorted. Without networks the chain accepts nothing, and is to go.
	Networks []netip.Prefix
	Nodes    []netip.Addr
}

// Acceptances returns what to accept in each chain that iptables manages, in the order of
// h.Chains. Where another program accepts connections of pods, or nothing drops them, Landfall has
// no rule: it would go before the rules of whoever enforces policies there.
func Acceptances(h Host) []Acceptance {
	all := make([]Acceptance, len(h.Chains))
	for i, c := range h.Chains {
		if drops, _ := c.Dropping(); !h.AcceptForwarded || !c.Filter() || !drops || !h.passes(c) {
			continue
		}
		family := c.family()
		for _, p := range h.PodNetworks {
			if lb.FamilyOf(p.Addr()) == family {
				all[i].Networks = append(all[i].Networks, p)
			}
		}
		for _, addr := range h.Nodes {
			if lb.FamilyOf(addr) == family {
				all[i].Nodes = append(all[i].Nodes, addr)
			}
		}
	}
	return all
}

func (c ForwardChain) family() lb.Family {
	if c.Family == "ip6" {
		return lb.IPv6
	}
	return lb.IPv4
}
