package bfd

import (
	"errors"
	"fmt"
	"math"
	"os/exec"

	"golang.org/x/sys/unix"
)

// priority is that of the engine's process under SCHED_RR: the least but some, as any is more than
// that of normal threads, and the kernel's own real-time threads must not wait for us.
const priority = 5

// startRaised starts a process with real-time priority where the system grants it, and without it
// where not. The calling goroutine must be locked to its thread, and end with it.
//
// All threads of the process inherit the priority from its first one. Raising them one by one would
// miss a thread that is being made meanwhile: it is not listed yet, and has the priority that its
// maker had before.
func startRaised(cmd *exec.Cmd) error {
	_ = raiseThread() // the process asks again, and reports why it was refused
	return cmd.Start()
}

// raiseThread gives the calling thread real-time priority.
func raiseThread() error {
	err := unix.SchedSetAttr(0, &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_RR,
		Priority: priority}, 0)
	if errors.Is(err, unix.EPERM) {
		// Kernels with CONFIG_RT_GROUP_SCHED refuse it in control groups without a share of that time,
		// as containers' are with cgroup v1.
		return fmt.Errorf("real-time priority: %w (needs CAP_SYS_NICE, and cpu.rt_runtime_us above 0 with cgroup v1)", err)
	} else if err != nil {
		return fmt.Errorf("real-time priority: %w", err)
	}
	return nil
}

// lockMemory keeps every page that the process has touched in memory, so that the engine never
// waits for a disk.
//
// Only with CAP_IPC_LOCK or without limit: else the limit would make the process run out of memory.
func lockMemory() error {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &limit); err != nil {
		return fmt.Errorf("lock memory: %w", err)
	}
	if limit.Cur != math.MaxUint64 && !capable(unix.CAP_IPC_LOCK) {
		return fmt.Errorf("lock memory: only %d bytes are allowed (needs CAP_IPC_LOCK)", limit.Cur)
	}
	// On fault: Go reserves far more address space than it uses.
	if err := unix.Mlockall(unix.MCL_CURRENT | unix.MCL_FUTURE | unix.MCL_ONFAULT); err != nil {
		return fmt.Errorf("lock memory: %w", err)
	}
	return nil
}

// capable reports whether the calling thread has a capability.
func capable(capability uint) bool {
	var data [2]unix.CapUserData
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	if unix.Capget(&header, &data[0]) != nil {
		return false
	}
	return data[capability/32].Effective&(1<<(capability%32)) != 0
}
