package nft

import (
	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/proxy/nfnetlink"
)

// ForwardChain is a chain, of whatever table, that sees the packets that the host forwards.
type ForwardChain struct {
	Family, Table, Name string // as nft writes them
	// Drops is set if the chain's policy is drop. Jumps are the chains that its rules jump or go to.
	Drops bool
	Jumps []string
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
			chains[i].Jumps, err = jumps(c, families[i], chains[i].Table, chains[i].Name)
		}
	}
	return chains, err
}

// dropVerdict is NF_DROP.
const dropVerdict = 0

// jumps returns the chains that the rules of a chain jump or go to, in their order.
func jumps(c *nfnetlink.Conn, family byte, table, chain string) (names []string, err error) {
	var m nfnetlink.Messages
	m.Add(subsystem<<8|unix.NFT_MSG_GETRULE, unix.NLM_F_DUMP, family, "list rules", func() {
		m.Text(unix.NFTA_RULE_TABLE, table)
		m.Text(unix.NFTA_RULE_CHAIN, chain)
	})
	err = c.Dump(&m, func(msg nfnetlink.Message) error {
		b := msg.Attributes()
		if nfnetlink.GetText(b, unix.NFTA_RULE_TABLE) != table || nfnetlink.GetText(b, unix.NFTA_RULE_CHAIN) != chain {
			return nil // older kernels list more than they were asked for
		}
		for _, e := range nfnetlink.All(nfnetlink.Get(b, unix.NFTA_RULE_EXPRESSIONS)) {
			to := nfnetlink.GetText(e, unix.NFTA_EXPR_DATA, unix.NFTA_IMMEDIATE_DATA, unix.NFTA_DATA_VERDICT,
				unix.NFTA_VERDICT_CHAIN)
			if nfnetlink.GetText(e, unix.NFTA_EXPR_NAME) == "immediate" && to != "" {
				names = append(names, to)
			}
		}
		return nil
	})
	return names, err
}
