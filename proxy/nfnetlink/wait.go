package nfnetlink

import (
	"time"

	"golang.org/x/sys/unix"
)

// WaitForPackets returns when every packet has left the kernel's rules that was inside them when it
// was called. Packets that come later meet the rules of the last transaction.
func WaitForPackets() {
	// Rules run in RCU read-side critical sections, and this command of membarrier(2) waits for the
	// end of all of those (synchronize_rcu). Kernels with CPUs of their own for a process (nohz_full)
	// refuse it.
	const global = 1 // MEMBARRIER_CMD_GLOBAL of linux/membarrier.h
	if _, _, errno := unix.Syscall(unix.SYS_MEMBARRIER, global, 0, 0); errno != 0 {
		time.Sleep(longestPacket)
	}
}

// longestPacket is far longer than a packet takes.
const longestPacket = 200 * time.Millisecond
