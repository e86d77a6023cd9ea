package nfnetlink

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// Events is a netlink socket that hears of changes.
type Events struct{ file *os.File }

// Subscribe opens a socket in the network namespace of the calling thread that hears of the changes
// of a multicast group of netfilter, except those that the socket with the port except makes (none
// if 0).
func Subscribe(group int, except uint32) (*Events, error) {
	var filter []unix.SockFilter
	if except != 0 {
		filter = leaveOut(except)
	}
	return SubscribeTo(filter, group)
}

// Keep is what a filter returns for a datagram that it lets through.
const Keep = 1 << 18

// SubscribeTo opens a socket in the network namespace of the calling thread that hears of the changes
// of multicast groups of netfilter which the filter lets through, all of them without one.
func SubscribeTo(filter []unix.SockFilter, groups ...int) (*Events, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, fmt.Errorf("open a netlink socket for events: %w", err)
	}
	e := &Events{os.NewFile(uintptr(fd), "netfilter events")}
	growReceiveBuffer(fd)
	if len(filter) > 0 {
		err = attach(fd, filter)
	}
	err = errors.Join(err, unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}))
	for _, group := range groups {
		err = errors.Join(err, unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_ADD_MEMBERSHIP, group))
	}
	if err != nil {
		e.Close()
		return nil, fmt.Errorf("prepare a netlink socket for events: %w", err)
	}
	return e, nil
}

// leaveOut has the kernel drop the events of one sender. Its port is in the fourth word of each
// message, in this machine's byte order, which a filter reads as if it were the network's. All
// messages of a datagram are of one sender.
func leaveOut(port uint32) []unix.SockFilter {
	sender := binary.BigEndian.Uint32(binary.NativeEndian.AppendUint32(nil, port))
	return []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: 12},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: sender, Jf: 1},
		{Code: unix.BPF_RET | unix.BPF_K, K: 0},
		{Code: unix.BPF_RET | unix.BPF_K, K: Keep},
	}
}

func attach(fd int, filter []unix.SockFilter) error {
	return unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER,
		&unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]})
}

// Filter replaces what the socket hears of.
func (e *Events) Filter(filter []unix.SockFilter) error {
	raw, err := e.file.SyscallConn()
	if err != nil {
		return fmt.Errorf("filter events of netfilter: %w", err)
	}
	var attached error
	err = raw.Control(func(fd uintptr) { attached = attach(int(fd), filter) })
	if err = errors.Join(err, attached); err != nil {
		return fmt.Errorf("filter events of netfilter: %w", err)
	}
	return nil
}

// Close closes the socket. It must not be called before Watch has returned.
func (e *Events) Close() { e.file.Close() }

// Watch calls changed for each datagram that has a message of concern, and after events were lost,
// as something of concern may be among those. It returns when ctx ends.
func (e *Events) Watch(ctx context.Context, concerns func(Message) bool, changed func()) error {
	return e.read(ctx, func(b []byte) {
		found := false
		_ = split(b, func(m Message) error {
			found = found || concerns(m)
			return nil
		})
		if found {
			changed()
		}
	}, changed)
}

// Each passes on each message, and calls lost after events were lost. It returns when ctx ends.
func (e *Events) Each(ctx context.Context, each func(Message), lost func()) error {
	return e.read(ctx, func(b []byte) {
		_ = split(b, func(m Message) error {
			each(m)
			return nil
		})
	}, lost)
}

// read reads datagrams until ctx ends.
func (e *Events) read(ctx context.Context, read func([]byte), lost func()) error {
	stop := context.AfterFunc(ctx, func() { _ = e.file.SetReadDeadline(time.Now()) })
	defer stop()
	buf := make([]byte, datagram)
	for {
		size, err := e.file.Read(buf)
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, unix.ENOBUFS):
			lost()
		case err != nil:
			return fmt.Errorf("read events of netfilter: %w", err)
		default:
			read(buf[:size])
		}
	}
}
