package nftables

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/nfnetlink"
	"github.com/landfall-lb/landfall/proxy/nft"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// Netlink is the way to the tables of one network namespace. Its methods are not safe for
// concurrent use, except for watch.
type Netlink struct {
	commands *nfnetlink.Conn
	events   *nfnetlink.Events
}

// Dial opens the way to the network namespace of the calling thread.
func Dial() (*Netlink, error) {
	commands, err := nfnetlink.Open()
	if err != nil {
		return nil, err
	}
	events, err := nfnetlink.Subscribe(unix.NFNLGRP_NFTABLES, commands.Port())
	if err != nil {
		commands.Close()
		return nil, fmt.Errorf("subscribe to changes of nftables: %w", err)
	}
	return &Netlink{commands: commands, events: events}, nil
}

// Close closes the sockets. It must not be called before the actor that uses them has returned.
func (n *Netlink) Close() {
	n.commands.Close()
	n.events.Close()
}

// settle is how long watch waits for the end of a burst of changes.
const settle = 50 * time.Millisecond

// watch calls disturbed after another process has changed one of our tables, until ctx ends.
func (n *Netlink) watch(ctx context.Context, log *slog.Logger, disturbed func()) error {
	return n.events.Watch(ctx, disturbing, func() {
		log.Debug("another process has changed our nftables")
		select {
		case <-ctx.Done():
		case <-time.After(settle):
			disturbed()
		}
	})
}

// disturbing reports whether an event is about a change of one of our tables, other than of the
// clients that packets make them remember.
func disturbing(m nfnetlink.Message) bool {
	table, set, ok := nft.Changed(m)
	return ok && table.Name == TableName && !isState(set)
}

// Probe returns nil if the kernel takes our rules, and otherwise why it does not. It changes
// nothing: what the transaction adds it also removes.
func Probe(n *Netlink, family lb.Family) error {
	return probe(n, family, needs{{setRemember, 1}, {setSourceRanges, 8}})
}

// ProbeDirect does the same for the rules that forward Services directly, which need expressions of the
// kernel that others do not.
func ProbeDirect(n *Netlink, family lb.Family) error {
	return probe(n, family, needs{{set: setDirect}})
}

func probe(n *Netlink, family lb.Family, needs needs) error {
	b := nft.NewBatch(nft.Table{Family: family, Name: TableName + "-probe"})
	rules := newRuleset(family, plan.Config{DropInvalid: true, AnswerPing: true, Relay: true, RelayUDPRate: 1}, needs)
	change{rules: &rules}.install(b)
	b.RemoveTable()
	if err := b.Commit(n.commands); err != nil {
		return fmt.Errorf("this kernel does not support the nftables rules for %s: %w", family, err)
	}
	return nil
}
