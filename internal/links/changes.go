package links

import (
	"errors"
	"fmt"
	"syscall"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// RouteChanges has what the kernel tells of routes, for who reads it now and then. It is not safe for concurrent use.
type RouteChanges struct {
	socket int
	buffer [nl.RECEIVE_BUFFER_SIZE]byte
}

// OpenRouteChanges begins to listen in the calling thread's network namespace.
func OpenRouteChanges() (*RouteChanges, error) {
	socket, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open netlink for changes of routes: %w", err)
	}
	err = unix.Bind(socket, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
	for _, group := range groups {
		if err == nil {
			err = unix.SetsockoptInt(socket, unix.SOL_NETLINK, unix.NETLINK_ADD_MEMBERSHIP, int(group))
		}
	}
	if err != nil {
		_ = unix.Close(socket)
		return nil, fmt.Errorf("subscribe to routes: %w", err)
	}
	return &RouteChanges{socket: socket}, nil
}

// Close closes it.
func (c *RouteChanges) Close() { _ = unix.Close(c.socket) }

// Read returns the changes since the last call, and All where the kernel had to drop messages. It never blocks.
func (c *RouteChanges) Read() (changes []RouteChange, err error) {
	for {
		n, from, err := unix.Recvfrom(c.socket, c.buffer[:], 0)
		switch {
		case errors.Is(err, unix.EAGAIN):
			return changes, nil
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.ENOBUFS):
			changes = append(changes, RouteChange{All: true})
			continue
		case err != nil:
			return changes, fmt.Errorf("receive changes of routes: %w", err)
		}
		if sender, ok := from.(*unix.SockaddrNetlink); !ok || sender.Pid != nl.PidKernel {
			continue
		}
		messages, err := syscall.ParseNetlinkMessage(c.buffer[:n])
		if err != nil {
			changes = append(changes, RouteChange{All: true})
			continue
		}
		changes = append(changes, changesOf(messages)...)
	}
}
