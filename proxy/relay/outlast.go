package relay

import (
	"context"
	"fmt"
	"time"
)

// leftToKernel is how many bytes a socket may hold that is closed and left to the kernel. That is about what the kernel
// needs for the socket itself, of which it keeps up to net.ipv4.tcp_max_orphans.
const leftToKernel = 4 << 10

// outlast waits until the ends have taken all that was passed on, once both have ended what they send. A socket that is
// closed before goes on holding what a reader that does not read has left, up to 4 MiB (net.ipv4.tcp_wmem), and no
// descriptor is left by which that could be counted, or freed by a reset. Most ends have taken all by then, so this
// costs a system call for each socket. For the others the kernel tells when they have: nothing looks again and again.
//
// If an end takes nothing for idle, the connection is reset. Once ctx ends, it is left to the kernel, which goes on
// sending.
func (p *passage) outlast(ctx context.Context, idle time.Duration) {
	if p.client.held() <= leftToKernel && p.backend.held() <= leftToKernel {
		return
	}
	_, _ = p.client.closeWrite(), p.backend.closeWrite() // behind what they hold
	for _, c := range []*Conn{p.client, p.backend} {
		for before := c.held(); before > leftToKernel && p.mayWait(ctx, c, idle); {
			c.awaitTaken()
			left := c.held()
			if left >= before && ctx.Err() == nil {
				p.abort(fmt.Errorf("an end has taken nothing for %s, and both have ended what they send", idle))
			}
			before = left
		}
	}
}

// mayWait bounds a wait, and reports whether there is to be one.
func (p *passage) mayWait(ctx context.Context, c *Conn, d time.Duration) bool {
	p.mu.Lock() // of end, whose deadline is the last
	defer p.mu.Unlock()
	return ctx.Err() == nil && p.why == nil && c.file.SetReadDeadline(time.Now().Add(d)) == nil
}

// awaitTaken waits until the other end, which has ended what it sends, has taken all and the end of it, or until the
// socket is closed or its deadline. The socket is in state CLOSE then, of which the kernel tells whoever waits for it.
func (c *Conn) awaitTaken() {
	_ = c.raw.Read(func(fd uintptr) bool { return held(fd) <= leftToKernel })
}
