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
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, fmt.Errorf("open a netlink socket for events: %w", err)
	}
	e := &Events{os.NewFile(uintptr(fd), "netfilter events")}
	growReceiveBuffer(fd)
	if except != 0 {
		err = leaveOut(fd, except)
	}
	err = errors.Join(err, unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}),
		unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_ADD_MEMBERSHIP, group))
	if err != nil {
		e.Close()
		return nil, fmt.Errorf("prepare a netlink socket for events: %w", err)
	}
	return e, nil
}

// leaveOut has the kernel drop the events of one sender. Its port is in the fourth word of each
// message, in this machine's byte order, which a filter reads as if it were the network's. All
// messages of a datagram are of one sender.
func leaveOut(fd int, port uint32) error {
	sender := binary.BigEndian.Uint32(binary.NativeEndian.AppendUint32(nil, port))
	filter := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: 12},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: sender, Jf: 1},
		{Code: unix.BPF_RET | unix.BPF_K, K: 0},
		{Code: unix.BPF_RET | unix.BPF_K, K: 1 << 18},
	}
	return unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER,
		&unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]})
}

// Close closes the socket. It must not be called before Watch has returned.
func (e *Events) Close() { e.file.Close() }

// Watch calls changed for each datagram that has a message of concern, and after events were lost,
// as something of concern may be among those. It returns when ctx ends.
func (e *Events) Watch(ctx context.Context, concerns func(Message) bool, changed func()) error {
	stop := context.AfterFunc(ctx, func() { _ = e.file.SetReadDeadline(time.Now()) })
	defer stop()
	buf := make([]byte, datagram)
	for {
		size, err := e.file.Read(buf)
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, unix.ENOBUFS):
			changed()
			continue
		case err != nil:
			return fmt.Errorf("read events of netfilter: %w", err)
		}
		found := false
		_ = split(buf[:size], func(m Message) error {
			found = found || concerns(m)
			return nil
		})
		if found {
			changed()
		}
	}
}
