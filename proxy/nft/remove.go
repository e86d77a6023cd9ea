package nft

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/nfnetlink"
)

// Remove removes the tables with a name, of both families, and nothing else. No packet meets a
// table that is being removed.
func Remove(c *nfnetlink.Conn, name string) error {
	var errs []error
	for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		t := Table{Family: family, Name: name}
		// A table is removed even if the kernel refused to empty it first.
		if err := errors.Join(t.takeNoPackets(c), t.remove(c)); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", family, err))
		}
	}
	return errors.Join(errs...)
}

// takeNoPackets empties the chains that decide where a packet goes, and waits until every packet
// has left them.
//
// In the transaction that removes a chain, the kernel keeps the chain's rules for packets until it
// has unregistered the hook, but it has emptied the sets and maps already. Rules that find no
// backend in their map refuse the packet. The chains behind these stay for the packets that are on
// their way there, such as those that masquerade.
func (t Table) takeNoPackets(c *nfnetlink.Conn) error {
	var chains map[string]Chain
	err := nfnetlink.Complete(func() (err error) {
		chains, err = Listing{Conn: c, Table: t}.Chains()
		return err
	})
	if err != nil {
		return fmt.Errorf("list the chains: %w", err)
	}
	b := NewBatch(t)
	for name, chain := range chains {
		if h := chain.Hook; h != (Hook{}) && (h.Number == unix.NF_INET_PRE_ROUTING || h.Number == unix.NF_INET_LOCAL_OUT) {
			b.RemoveRules(name)
		}
	}
	if err := b.Commit(c); err != nil && !errors.Is(err, unix.ENOENT) {
		return err
	}
	if len(chains) > 0 {
		nfnetlink.WaitForPackets()
	}
	return nil
}

// remove removes the table if it is there.
func (t Table) remove(c *nfnetlink.Conn) error {
	b := NewBatch(t)
	b.RemoveTable()
	if err := b.Commit(c); err != nil && !errors.Is(err, unix.ENOENT) {
		return err
	}
	return nil
}
