package main

import (
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// niceness is the speaker's: ahead of the node's other processes, because a speaker that gets no
// CPU time for half a second looks dead to its peers, and well behind real-time ones.
const niceness = -15

// prefer raises the priority of all threads of this process, and so of those that they will start.
// It needs CAP_SYS_NICE.
func prefer() error {
	for range 2 { // a thread may start another while they are listed
		threads, err := os.ReadDir("/proc/self/task")
		if err != nil {
			return fmt.Errorf("raise the priority: %w", err)
		}
		for _, thread := range threads {
			id, err := strconv.Atoi(thread.Name())
			if err != nil {
				continue
			}
			if err := unix.Setpriority(unix.PRIO_PROCESS, id, niceness); err != nil && err != unix.ESRCH {
				return fmt.Errorf("raise the priority: %w (needs CAP_SYS_NICE)", err)
			}
		}
	}
	return nil
}
