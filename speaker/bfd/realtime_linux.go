package bfd

import (
	"errors"
	"fmt"
	"math"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// priority is that of the engine's process under SCHED_RR: the least but some, as any is more than
// that of normal threads, and the kernel's own real-time threads must not wait for us.
const priority = 5

// raiseProcess gives all threads of this process real-time priority, those that it will start
// included: for one that does nothing else.
func raiseProcess() error {
	threads, err := os.ReadDir("/proc/self/task")
	if err != nil {
		return fmt.Errorf("real-time priority: %w", err)
	}
	for _, thread := range threads {
		id, err := strconv.Atoi(thread.Name())
		if err != nil {
			continue
		}
		if err := raise(id); err != nil && !errors.Is(err, unix.ESRCH) { // it may have ended meanwhile
			return err
		}
	}
	return nil
}

func raise(thread int) error {
	err := unix.SchedSetAttr(thread, &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_RR,
		Priority: priority}, 0)
	if errors.Is(err, unix.EPERM) {
		return fmt.Errorf("real-time priority: %w (needs CAP_SYS_NICE)", err)
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
