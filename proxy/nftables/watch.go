package nftables

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/plan"
)

// Netlink is the way to the tables of one network namespace. Its methods must not be called at the
// same time, but for watch.
type Netlink struct {
	commands *socket
	events   *os.File
}

// Dial opens the way to the network namespace of the calling thread.
func Dial() (*Netlink, error) {
	commands, err := open()
	if err != nil {
		return nil, err
	}
	events, err := subscribe(commands.port)
	if err != nil {
		commands.close()
		return nil, fmt.Errorf("subscribe to changes of nftables: %w", err)
	}
	return &Netlink{commands: commands, events: events}, nil
}

// Close closes the sockets. It must not be called before Run has returned.
func (n *Netlink) Close() {
	n.commands.close()
	n.events.Close()
}

// subscribe opens a socket that hears of every change, except those that the socket with the given
// port made.
func subscribe(port uint32) (*os.File, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, err
	}
	events := os.NewFile(uintptr(fd), "nftables events")
	if unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, receiveBuffer) != nil {
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, receiveBuffer)
	}
	// The sender's port is in the fourth word of each message, in this machine's byte order, which a
	// filter reads as if it were the network's. All messages of a datagram are of one sender.
	sender := binary.BigEndian.Uint32(binary.NativeEndian.AppendUint32(nil, port))
	filter := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: 12},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: sender, Jf: 1},
		{Code: unix.BPF_RET | unix.BPF_K, K: 0},
		{Code: unix.BPF_RET | unix.BPF_K, K: 1 << 18},
	}
	err = errors.Join(
		unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER,
			&unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}),
		unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}),
		unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_ADD_MEMBERSHIP, unix.NFNLGRP_NFTABLES))
	if err != nil {
		events.Close()
		return nil, err
	}
	return events, nil
}

// settle is how long a burst of changes may go on before it is looked at.
const settle = 50 * time.Millisecond

// watch calls disturbed after somebody else has changed one of our tables, until ctx ends.
func (n *Netlink) watch(ctx context.Context, log *slog.Logger, disturbed func()) error {
	stop := context.AfterFunc(ctx, func() { _ = n.events.SetReadDeadline(time.Now()) })
	defer stop()
	buf := make([]byte, datagram)
	for ctx.Err() == nil {
		size, err := n.events.Read(buf)
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, unix.ENOBUFS):
			// More happened than could be kept: something of ours may be among it.
		case err != nil:
			return fmt.Errorf("read changes of nftables: %w", err)
		case !disturbing(buf[:size]):
			continue
		}
		log.Debug("somebody else has changed our nftables")
		select {
		case <-ctx.Done():
		case <-time.After(settle):
			disturbed()
		}
	}
	return nil
}

// disturbing tells whether a datagram is about a change of ours tables, other than of who is
// remembered.
func disturbing(b []byte) bool {
	found := false
	_ = split(b, func(m netlinkMessage) error {
		if m.kind>>8 != unix.NFNL_SUBSYS_NFTABLES || len(m.data) < 4 || text(attribute(m.data[4:], 1)) != TableName {
			return nil
		}
		if family := m.data[0]; family != unix.NFPROTO_IPV4 && family != unix.NFPROTO_IPV6 {
			return nil
		}
		switch m.kind & 0xff {
		case unix.NFT_MSG_NEWGEN, unix.NFT_MSG_NEWOBJ, unix.NFT_MSG_DELOBJ:
			return nil
		case unix.NFT_MSG_NEWSETELEM, unix.NFT_MSG_DELSETELEM:
			if isState(text(attribute(m.data[4:], unix.NFTA_SET_ELEM_LIST_SET))) {
				return nil
			}
		}
		found = true
		return nil
	})
	return found
}

// Cleanup removes our tables of both families, and nothing else.
func Cleanup(n *Netlink) error {
	var errs []error
	for _, family := range []lb.Family{lb.IPv4, lb.IPv6} {
		m := messages{family: family, table: TableName}
		m.begin()
		m.removeTable()
		m.end()
		if err := n.commands.transact(&m); err != nil && !errors.Is(err, unix.ENOENT) {
			errs = append(errs, fmt.Errorf("%s: %w", family, err))
		}
	}
	return errors.Join(errs...)
}

// Probe tells whether the kernel takes our rules, nil if so. It changes nothing: what the
// transaction adds it also removes.
func Probe(n *Netlink, family lb.Family) error {
	m := messages{family: family, table: TableName + "-probe"}
	m.begin()
	rules := newRuleset(family, plan.Config{DropInvalid: true, AnswerPing: true}, []uint32{1})
	if err := m.install(change{rules: &rules}); err != nil {
		return err
	}
	m.removeTable()
	m.end()
	if err := n.commands.transact(&m); err != nil {
		return fmt.Errorf("this kernel does not take our nftables for %s: %w", family, err)
	}
	return nil
}
