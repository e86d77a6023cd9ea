package relay

import (
	"context"
	"fmt"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// leftToKernel is how many bytes a socket may have to send that is closed and left to the kernel. That is about what
// the kernel needs for the socket itself, of which it keeps up to net.ipv4.tcp_max_orphans.
const leftToKernel = 4 << 10

// outlast waits until the ends have taken all that was passed on, once both have ended what they send. A socket that is
// closed before goes on holding what a reader that does not read has left, up to 4 MiB (net.ipv4.tcp_wmem), and no
// descriptor is left by which that could be counted, or freed by a reset. Most ends have taken all by then, so this
// costs a system call for each socket. For the others the kernel tells when they have: nothing looks again and again.
//
// If an end takes nothing for idle, the connection is reset. Once ctx ends, it is left to the kernel, which goes on
// sending.
func (p *passage) outlast(ctx context.Context, idle time.Duration) {
	ends := [2]*Conn{p.client, p.backend}
	left := [2]uint64{p.client.unsent(), p.backend.unsent()}
	if max(left[0], left[1]) <= leftToKernel {
		return
	}
	_, _ = p.client.closeWrite(), p.backend.closeWrite() // behind what they have to send
	for max(left[0], left[1]) > leftToKernel && p.mayWait(ctx, idle) {
		for i, c := range ends {
			before := left[i]
			c.awaitTaken()
			if left[i] = c.unsent(); left[i] > leftToKernel && left[i] >= before && ctx.Err() == nil {
				p.abort(fmt.Errorf("an end has taken nothing for %s, and both have ended what they send", idle))
			}
		}
	}
	for _, c := range ends {
		if err := c.failure(); err != nil {
			p.abort(fmt.Errorf("both ends have ended what they send, and one does not take it: %w", err))
		}
	}
}

// mayWait bounds a wait, and reports whether there is to be one.
func (p *passage) mayWait(ctx context.Context, d time.Duration) bool {
	p.mu.Lock() // of end, whose deadline is the last
	defer p.mu.Unlock()
	until := time.Now().Add(d)
	return ctx.Err() == nil && p.why == nil && p.client.file.SetReadDeadline(until) == nil &&
		p.backend.file.SetReadDeadline(until) == nil
}

// awaitTaken waits until the other end, which has ended what it sends, has taken all and the end of it, or until the
// socket is closed or its deadline. The socket is in state CLOSE then, of which the kernel tells whoever waits for it.
func (c *Conn) awaitTaken() {
	_ = c.raw.Read(func(fd uintptr) bool {
		_, unsent := socketMemory(fd)
		return unsent <= leftToKernel
	})
}

// unsent returns how many bytes the kernel holds that the other end has not taken yet. What it holds of those received
// stays so until the socket is closed: at least the end of them, in as large a buffer as the driver chose.
func (c *Conn) unsent() (n uint64) {
	_ = c.control(func(fd int) error { _, n = socketMemory(uintptr(fd)); return nil })
	return n
}

// failure returns why the kernel has given the connection up, if it has, once.
func (c *Conn) failure() error {
	return c.control(func(fd int) error {
		if n, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR); err == nil && n != 0 {
			return unix.Errno(n)
		}
		return nil
	})
}

// socketMemory returns how many bytes the kernel holds of what a socket has received, and has to send; 0 if it does not
// say.
func socketMemory(fd uintptr) (received, unsent uint64) {
	const soMeminfo, rmemAlloc, wmemQueued = 55, 0, 5 // of linux/sock_diag.h
	var info [wmemQueued + 1]uint32
	_ = getsockopt(fd, unix.SOL_SOCKET, soMeminfo, unsafe.Pointer(&info), unsafe.Sizeof(info))
	return uint64(info[rmemAlloc]), uint64(info[wmemQueued])
}
