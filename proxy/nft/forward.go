package nft

import (
	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/proxy/nfnetlink"
)

// ForwardChain is a chain, of whatever table, that sees the packets that the host forwards.
type ForwardChain struct {
	Family, Table, Name string // as nft writes them
	// Drops is set if the chain's policy is drop. Accepts are the rules that may accept a packet then,
	// in the chain or in those to which it leads.
	Drops   bool
	Accepts []Accept
}

// Accept is what must be true of packets that a rule accepts, as far as it is known.
type Accept struct {
	Chain string // that of the rule
	// Established is set if the rule accepts only packets of known connections, and ICMP if only
	// those.
	Established, ICMP bool
	// Interfaces are the names that packets must come in or go out at, with a * for what may follow.
	Interfaces []string
}

// families with a forward hook through which IP packets go, as nft writes them.
var forwardFamilies = map[byte]string{unix.NFPROTO_IPV4: "ip", unix.NFPROTO_IPV6: "ip6", unix.NFPROTO_INET: "inet"}

// ForwardChains returns the chains of all tables that hook into forward, those of iptables-nft
// among them. It may return nfnetlink.ErrInterrupted.
func ForwardChains(c *nfnetlink.Conn) ([]ForwardChain, error) {
	var m nfnetlink.Messages
	m.Add(subsystem<<8|unix.NFT_MSG_GETCHAIN, unix.NLM_F_DUMP, unix.NFPROTO_UNSPEC, "list chains", func() {})
	var chains []ForwardChain
	var families []byte
	err := c.Dump(&m, func(msg nfnetlink.Message) error {
		b := msg.Attributes()
		name, known := forwardFamilies[msg.Family()]
		hook, ok := nfnetlink.GetNumber(b, unix.NFTA_CHAIN_HOOK, unix.NFTA_HOOK_HOOKNUM)
		if !ok || hook != unix.NF_INET_FORWARD || !known {
			return nil
		}
		policy, set := nfnetlink.GetNumber(b, unix.NFTA_CHAIN_POLICY)
		chains = append(chains, ForwardChain{Family: name, Table: nfnetlink.GetText(b, unix.NFTA_CHAIN_TABLE),
			Name: nfnetlink.GetText(b, unix.NFTA_CHAIN_NAME), Drops: set && policy == dropVerdict})
		families = append(families, msg.Family())
		return nil
	})
	for i := range chains {
		if err == nil && chains[i].Drops {
			chains[i].Accepts, err = accepts(c, families[i], chains[i].Table, chains[i].Name)
		}
	}
	return chains, err
}

// dropVerdict is NF_DROP.
const dropVerdict = 0

// maxChains bounds for how many chains the rules are listed. A chain beyond may accept anything.
const maxChains = 100

// accepts returns what rules of a chain, and of all chains to which it leads, accept.
func accepts(c *nfnetlink.Conn, family byte, table, chain string) (all []Accept, err error) {
	todo, seen := []string{chain}, map[string]bool{chain: true}
	for i := 0; i < len(todo); i++ {
		if i == maxChains {
			return append(all, Accept{Chain: todo[i]}), nil
		}
		err := listRules(c, family, table, todo[i], func(expressions []byte) {
			r := readRule(expressions)
			r.accept.Chain = todo[i]
			if r.accepts {
				all = append(all, r.accept)
			}
			// What a chain accepts is for connections and interfaces of the rule that leads there.
			if r.to != "" && !seen[r.to] {
				if r.accept.Established || r.accept.ICMP || len(r.accept.Interfaces) > 0 {
					all = append(all, r.accept)
					return
				}
				seen[r.to] = true
				todo = append(todo, r.to)
			}
		})
		if err != nil {
			return nil, err
		}
	}
	return all, nil
}

// listRules calls each with the expressions of each rule of a chain.
func listRules(c *nfnetlink.Conn, family byte, table, chain string, each func(expressions []byte)) error {
	var m nfnetlink.Messages
	m.Add(subsystem<<8|unix.NFT_MSG_GETRULE, unix.NLM_F_DUMP, family, "list rules", func() {
		m.Text(unix.NFTA_RULE_TABLE, table)
		m.Text(unix.NFTA_RULE_CHAIN, chain)
	})
	return c.Dump(&m, func(msg nfnetlink.Message) error {
		b := msg.Attributes()
		// Older kernels list more than they were asked for.
		if nfnetlink.GetText(b, unix.NFTA_RULE_TABLE) == table && nfnetlink.GetText(b, unix.NFTA_RULE_CHAIN) == chain {
			each(nfnetlink.Get(b, unix.NFTA_RULE_EXPRESSIONS))
		}
		return nil
	})
}
