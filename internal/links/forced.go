package links

import (
	"encoding/binary"
	"fmt"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Of linux/if_link.h and linux/ipv6.h.
const (
	inet6Conf       = 2  // IFLA_INET6_CONF
	forceForwarding = 59 // DEVCONF_FORCE_FORWARDING, from Linux 6.17 on
)

// listForced returns the indexes of the interfaces with net.ipv6.conf.*.force_forwarding. Linux tells of changes as of
// other parameters (NETCONFA_FORCE_FORWARDING), but the value is among the parameters of the interface alone.
func listForced(ns netns.NsHandle) (map[int]bool, error) {
	messages, err := dump(ns, unix.AF_INET6, unix.RTM_GETLINK, unix.RTM_NEWLINK)
	if err != nil {
		return nil, fmt.Errorf("list force_forwarding: %w", err)
	}
	forced := map[int]bool{}
	for _, m := range messages {
		if index, on := parseForced(m); on {
			forced[index] = true
		}
	}
	return forced, nil
}

// parseForced reads a struct ifinfomsg of IPv6 and its attributes, down to the array of parameters.
func parseForced(message []byte) (index int, on bool) {
	if len(message) < unix.SizeofIfInfomsg || message[0] != unix.AF_INET6 {
		return 0, false
	}
	index = int(int32(binary.NativeEndian.Uint32(message[4:])))
	parameters := inside(inside(message[unix.SizeofIfInfomsg:], unix.IFLA_PROTINFO), inet6Conf)
	const at = 4 * forceForwarding
	return index, len(parameters) >= at+4 && binary.NativeEndian.Uint32(parameters[at:]) != 0
}

// inside returns the value of the attribute of a kind; nil if there is none.
func inside(b []byte, kind uint16) []byte {
	attrs, err := attributes(b)
	if err != nil {
		return nil
	}
	for _, a := range attrs {
		if a.kind == kind {
			return a.value
		}
	}
	return nil
}
