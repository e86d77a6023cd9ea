package kube

import (
	"fmt"
	"syscall"

	"golang.org/x/sys/unix"
)

// patience has the kernel end a connection over which the other side's kernel has not confirmed for lostAfter what was
// sent. Without that, it sends for a quarter of an hour, ever more rarely.
func patience(_, _ string, c syscall.RawConn) error {
	var failed error
	if err := c.Control(func(fd uintptr) {
		failed = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(lostAfter.Milliseconds()))
	}); err != nil {
		return err
	}
	if failed != nil {
		return fmt.Errorf("set the user timeout: %w", failed)
	}
	return nil
}
