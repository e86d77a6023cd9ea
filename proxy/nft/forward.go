package nft

import (
	"encoding/binary"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/proxy/nfnetlink"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// families with a forward hook through which IP packets go, as nft writes them.
var forwardFamilies = map[byte]string{unix.NFPROTO_IPV4: "ip", unix.NFPROTO_IPV6: "ip6", unix.NFPROTO_INET: "inet"}

// ForwardChains returns the chains of all tables that hook into forward, those of iptables-nft
// among them. It may return nfnetlink.ErrInterrupted.
func ForwardChains(c *nfnetlink.Conn) ([]plan.ForwardChain, error) {
	return hookChains(c, unix.NF_INET_FORWARD)
}

// InputChains returns those that hook into input, as ForwardChains does.
func InputChains(c *nfnetlink.Conn) ([]plan.ForwardChain, error) {
	return hookChains(c, unix.NF_INET_LOCAL_IN)
}

func hookChains(c *nfnetlink.Conn, at uint32) ([]plan.ForwardChain, error) {
	var m nfnetlink.Messages
	m.Add(subsystem<<8|unix.NFT_MSG_GETCHAIN, unix.NLM_F_DUMP, unix.NFPROTO_UNSPEC, "list chains", func() {})
	var chains []plan.ForwardChain
	var families []byte
	err := c.Dump(&m, func(msg nfnetlink.Message) error {
		b := msg.Attributes()
		name, known := forwardFamilies[msg.Family()]
		hook, ok := nfnetlink.GetNumber(b, unix.NFTA_CHAIN_HOOK, unix.NFTA_HOOK_HOOKNUM)
		if !ok || hook != at || !known {
			return nil
		}
		policy, set := nfnetlink.GetNumber(b, unix.NFTA_CHAIN_POLICY)
		chains = append(chains, plan.ForwardChain{Family: name, Table: nfnetlink.GetText(b, unix.NFTA_CHAIN_TABLE),
			Name: nfnetlink.GetText(b, unix.NFTA_CHAIN_NAME), Drops: set && policy == dropVerdict})
		families = append(families, msg.Family())
		return nil
	})
	for i := range chains {
		if err == nil {
			err = listForward(c, families[i], &chains[i])
		}
	}
	return chains, err
}

// maxChains bounds for how many chains the rules are listed. A chain beyond may accept anything.
const maxChains = 100

// listForward lists what decides whether a chain drops: the rules that all packets meet, and those
// behind conditions only if it may, as these can be many.
func listForward(c *nfnetlink.Conn, family byte, chain *plan.ForwardChain) error {
	chain.Rules = map[string][]plan.ForwardRule{}
	var later []string
	list := func(todo []string, all bool) error {
		for ; len(todo) > 0; todo = todo[1:] {
			name := todo[0]
			if _, listed := chain.Rules[name]; listed {
				continue
			}
			if len(chain.Rules) == maxChains {
				chain.Rules[name] = []plan.ForwardRule{{Conditional: true, Verdict: plan.VerdictAccept}}
				continue
			}
			chain.Rules[name] = nil
			sets := map[int]string{}
			err := listRules(c, family, chain.Table, name, func(expressions []byte) {
				r := readRule(expressions)
				if r.portSet != "" {
					sets[len(chain.Rules[name])] = r.portSet
				}
				chain.Rules[name] = append(chain.Rules[name], r.ForwardRule)
				switch {
				case r.To == "":
				case all || !r.Conditional:
					todo = append(todo, r.To)
				default:
					later = append(later, r.To)
				}
			})
			for i, set := range sets {
				if err == nil {
					chain.Rules[name][i].Ports, err = listPorts(c, family, chain.Table, set)
				}
			}
			if err != nil {
				return err
			}
		}
		return nil
	}
	err := list([]string{chain.Name}, false)
	if err == nil && (chain.Drops || chain.Ends()) {
		err = list(later, true)
	}
	return err
}

// listPorts returns the ports that are the elements of a set; none if it has others, or too many.
func listPorts(c *nfnetlink.Conn, family byte, table, set string) (ports []uint16, err error) {
	const most = 1000
	known := true
	var m nfnetlink.Messages
	m.Add(subsystem<<8|unix.NFT_MSG_GETSETELEM, unix.NLM_F_DUMP, family, "list ports", func() {
		m.Text(unix.NFTA_SET_ELEM_LIST_TABLE, table)
		m.Text(unix.NFTA_SET_ELEM_LIST_SET, set)
	})
	err = c.Dump(&m, func(msg nfnetlink.Message) error {
		for _, elem := range nfnetlink.All(nfnetlink.Get(msg.Attributes(), unix.NFTA_SET_ELEM_LIST_ELEMENTS)) {
			key := nfnetlink.Get(elem, unix.NFTA_SET_ELEM_KEY, unix.NFTA_DATA_VALUE)
			// The end of an interval has a flag, and its beginning has none.
			if len(key) != 2 || has(elem, unix.NFTA_SET_ELEM_FLAGS) || len(ports) == most {
				known = false
				continue
			}
			ports = append(ports, binary.BigEndian.Uint16(key))
		}
		return nil
	})
	if !known {
		return nil, err
	}
	return ports, err
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
