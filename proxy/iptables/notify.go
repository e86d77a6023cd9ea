package iptables

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// Watcher hears of changes that others make to our rules through the nf_tables variant of iptables.
// The legacy variant tells nobody.
type Watcher struct {
	conn *netlink.Conn

	mu sync.Mutex
	// own are the processes that wrote for us last.
	own []uint32
}

// NewWatcher listens in the network namespace of the calling thread.
func NewWatcher() (*Watcher, error) {
	conn, err := netlink.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		return nil, fmt.Errorf("watch iptables: %w", err)
	}
	if err := conn.JoinGroup(unix.NFNLGRP_NFTABLES); err != nil {
		conn.Close()
		return nil, fmt.Errorf("watch iptables: %w", err)
	}
	_ = conn.SetReadBuffer(watchBuffer) // less will do: what is lost counts as a change
	return &Watcher{conn: conn}, nil
}

const (
	watchBuffer = 4 << 20
	// remembered is how many of our processes are known: more than can have messages under way.
	remembered = 64
)

// Close ends listening. It must not be called before Watch has returned.
func (w *Watcher) Close() error { return w.conn.Close() }

// started notes a process that writes for us.
func (w *Watcher) started(pid int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.own = append(w.own, uint32(pid))
	if len(w.own) > remembered {
		w.own = slices.Delete(w.own, 0, len(w.own)-remembered)
	}
}

func (w *Watcher) isOwn(pid uint32) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Contains(w.own, pid)
}

// Watch calls disturbed after others have changed what is ours, until ctx ends.
func (w *Watcher) Watch(ctx context.Context, disturbed func()) error {
	stop := context.AfterFunc(ctx, func() { _ = w.conn.SetReadDeadline(time.Now()) })
	defer stop()
	for {
		messages, err := w.conn.Receive()
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, unix.ENOBUFS):
			disturbed() // something of ours may be among what was lost
			continue
		case err != nil:
			return fmt.Errorf("watch iptables: %w", err)
		}
		for _, m := range messages {
			if concerns(m) && !w.isOwn(m.Header.PID) { // a socket's number is its process's, as seen in that process's namespace
				disturbed()
				break
			}
		}
	}
}

// concerns tells whether a message is about our chains, or about the built-in ones from which they
// are reached.
func concerns(m netlink.Message) bool {
	if m.Header.Type>>8 != unix.NFNL_SUBSYS_NFTABLES || len(m.Data) < 4 {
		return false
	}
	if family := m.Data[0]; family != unix.NFPROTO_IPV4 && family != unix.NFPROTO_IPV6 {
		return false
	}
	chainAttribute := uint16(0)
	switch m.Header.Type & 0xff {
	case unix.NFT_MSG_NEWRULE, unix.NFT_MSG_DELRULE:
		chainAttribute = unix.NFTA_RULE_CHAIN
	case unix.NFT_MSG_NEWCHAIN, unix.NFT_MSG_DELCHAIN:
		chainAttribute = unix.NFTA_CHAIN_NAME
	case unix.NFT_MSG_DELTABLE:
	default:
		return false
	}
	attributes, err := netlink.NewAttributeDecoder(m.Data[4:])
	if err != nil {
		return true // not understood, so possible
	}
	attributes.ByteOrder = binary.BigEndian
	table, chain := "", ""
	for attributes.Next() {
		switch attributes.Type() {
		case unix.NFTA_RULE_TABLE: // the same number in all of these messages
			table = attributes.String()
		case chainAttribute:
			chain = attributes.String()
		}
	}
	return (table == "nat" || table == "filter") &&
		(chain == "" || strings.HasPrefix(chain, prefix) || slices.Contains(builtIn, chain))
}

// builtIn are the chains that hold our jumps.
var builtIn = []string{"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"}
