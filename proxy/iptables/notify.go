package iptables

import (
	"context"
	"os/exec"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/proxy/nfnetlink"
)

// Watcher hears of changes that others make to our rules through the nf_tables variant of iptables.
// The kernel does not report changes of the legacy variant.
type Watcher struct {
	events *nfnetlink.Events

	mu sync.Mutex
	// own are the processes that wrote for us last.
	own []uint32
}

// NewWatcher listens in the network namespace of the calling thread.
func NewWatcher() (*Watcher, error) {
	events, err := nfnetlink.Subscribe(unix.NFNLGRP_NFTABLES, 0)
	if err != nil {
		return nil, err
	}
	return &Watcher{events: events}, nil
}

// remembered is how many of our processes are known: more than can have messages under way.
const remembered = 64

// Close ends listening. It must not be called before Watch has returned.
func (w *Watcher) Close() error { w.events.Close(); return nil }

// start starts a process that writes for us, and notes it. Until then nobody asks whose changes are
// ours, as the process may be faster than we are.
func (w *Watcher) start(cmd *exec.Cmd) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if err := cmd.Start(); err != nil {
		return err
	}
	w.own = append(w.own, uint32(cmd.Process.Pid))
	if len(w.own) > remembered {
		w.own = slices.Delete(w.own, 0, len(w.own)-remembered)
	}
	return nil
}

func (w *Watcher) isOwn(pid uint32) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Contains(w.own, pid)
}

// Watch calls disturbed after others have changed what is ours, until ctx ends.
func (w *Watcher) Watch(ctx context.Context, disturbed func()) error {
	return w.events.Watch(ctx, func(m nfnetlink.Message) bool {
		return concerns(m) && !w.isOwn(m.Port) // a socket's number is its process's, as seen in that process's namespace
	}, disturbed)
}

// concerns reports whether a message is about our chains, or about the built-in ones from which
// they are reached.
func concerns(m nfnetlink.Message) bool {
	if !m.Is(unix.NFNL_SUBSYS_NFTABLES) {
		return false
	}
	if family := m.Family(); family != unix.NFPROTO_IPV4 && family != unix.NFPROTO_IPV6 {
		return false
	}
	chain := ""
	switch m.Kind & 0xff {
	case unix.NFT_MSG_NEWRULE, unix.NFT_MSG_DELRULE:
		chain = nfnetlink.GetText(m.Attributes(), unix.NFTA_RULE_CHAIN)
	case unix.NFT_MSG_NEWCHAIN, unix.NFT_MSG_DELCHAIN:
		chain = nfnetlink.GetText(m.Attributes(), unix.NFTA_CHAIN_NAME)
	case unix.NFT_MSG_DELTABLE:
	default:
		return false
	}
	table := nfnetlink.GetText(m.Attributes(), unix.NFTA_RULE_TABLE) // the same number in all of these messages
	return (table == "nat" || table == "filter") &&
		(chain == "" || strings.HasPrefix(chain, prefix) || slices.Contains(builtIn, chain))
}

// builtIn are the chains that hold our jumps.
var builtIn = []string{"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"}
