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
func Probe(n *Netlink, family lb.Family) error { return try(n, trial(family)) }

// ProbeDirect does the same for the rules that forward Services directly, which need expressions of the
// kernel that others do not.
func ProbeDirect(n *Netlink, family lb.Family) error { return try(n, trialDirect(family)) }

// ProbeRelayRate does the same for the rules that limit how much UDP goes to the relay, which alone need the
// expression limit.
func ProbeRelayRate(n *Netlink, family lb.Family) error { return try(n, trialRelayRate(family)) }

// usual is what the kernel has to have for all of our rules.
var usual = plan.Config{DropInvalid: true, AnswerPing: true, Relay: true}

func trial(family lb.Family) ruleset {
	return newRuleset(family, usual, needs{{setRemember, 1}, {setSourceRanges, 8}})
}

func trialDirect(family lb.Family) ruleset { return newRuleset(family, usual, needs{{set: setDirect}}) }

func trialRelayRate(family lb.Family) ruleset {
	limited := usual
	limited.RelayUDPRate = 1
	return newRuleset(family, limited, nil)
}

func try(n *Netlink, rules ruleset) error {
	b := nft.NewBatch(nft.Table{Family: rules.family, Name: TableName + "-probe"})
	change{rules: &rules}.install(b)
	b.RemoveTable()
	if err := b.Commit(n.commands); err != nil {
		return fmt.Errorf("this kernel does not support the nftables rules for %s: %w", rules.family, err)
	}
	return nil
}
