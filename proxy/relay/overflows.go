package relay

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
)

// overflows counts the datagrams of UDP for which sockets of the node had no room, in their buffers or in all memory
// for UDP.
func overflows() (uint64, error) {
	v4, err := os.ReadFile("/proc/thread-self/net/snmp")
	if err != nil {
		return 0, err
	}
	n, err := overflows4(string(v4))
	if err != nil {
		return 0, fmt.Errorf("/proc/thread-self/net/snmp: %w", err)
	}
	v6, err := os.ReadFile("/proc/thread-self/net/snmp6")
	if os.IsNotExist(err) { // a kernel without IPv6
		return n, nil
	}
	return n + overflows6(string(v6)), err
}

// overflows4 reads the line of values below that of names, both of which begin with "Udp:".
func overflows4(snmp string) (n uint64, err error) {
	var names []string
	for line := range strings.Lines(snmp) {
		fields := strings.Fields(line)
		switch {
		case len(fields) == 0 || fields[0] != "Udp:":
		case names == nil:
			names = fields
		case len(fields) == len(names):
			for _, name := range []string{"RcvbufErrors", "MemErrors"} { // some kernels do not have the second
				if i := slices.Index(names, name); i > 0 {
					count, err := strconv.ParseUint(fields[i], 10, 64)
					if err != nil {
						return 0, fmt.Errorf("%s: %w", name, err)
					}
					n += count
				}
			}
			return n, nil
		}
	}
	return 0, fmt.Errorf("no line of UDP: %.80q", snmp)
}

// overflows6 reads one name and value a line.
func overflows6(snmp6 string) (n uint64) {
	for line := range strings.Lines(snmp6) {
		var name string
		var count uint64
		_, err := fmt.Sscan(line, &name, &count)
		if err == nil && (name == "Udp6RcvbufErrors" || name == "Udp6MemErrors") {
			n += count
		}
	}
	return n
}
