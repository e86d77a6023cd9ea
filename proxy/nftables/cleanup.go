package nftables

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/nfnetlink"
	"github.com/landfall-lb/landfall/proxy/nft"
)

// Cleanup removes our tables of both families, and nothing else. Another proxy on the node, which
// serves the same Services, loses no connection by it.
func Cleanup(n *Netlink) error {
	var errs []error
	for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		k := netlinkKernel{family: family, socket: n.commands}
		// A table that takes no packets is removed in any case.
		if err := errors.Join(k.takeNoPackets(), k.remove()); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", family, err))
		}
	}
	return errors.Join(errs...)
}

// takeNoPackets empties the chains that choose backends, and waits until every packet has left
// them.
//
// A packet must not meet a table that is being removed. In the transaction that removes a chain,
// the kernel keeps the chain's rules for packets until it has unregistered the hook, but it has
// emptied the maps already: the rules would find no backend, and refuse. The chains behind the
// choice stay, for the packets that are on their way there: they masquerade.
func (k netlinkKernel) takeNoPackets() error {
	var chains map[string]nft.Chain
	err := nfnetlink.Complete(func() (err error) {
		chains, err = k.listing().Chains()
		return err
	})
	if err != nil {
		return fmt.Errorf("list the chains: %w", err)
	}
	b := nft.NewBatch(k.table())
	for name, c := range chains {
		if c.Hook.Number == unix.NF_INET_PRE_ROUTING && c.Hook != (nft.Hook{}) || c.Hook.Number == unix.NF_INET_LOCAL_OUT {
			b.RemoveRules(name)
		}
	}
	if err := b.Commit(k.socket); err != nil && !errors.Is(err, unix.ENOENT) {
		return err
	}
	if len(chains) > 0 {
		nfnetlink.WaitForPackets()
	}
	return nil
}

// remove removes the table.
func (k netlinkKernel) remove() error {
	b := nft.NewBatch(k.table())
	b.RemoveTable()
	if err := b.Commit(k.socket); err != nil && !errors.Is(err, unix.ENOENT) {
		return err
	}
	return nil
}
