package offload

import (
	"cmp"
	"slices"

	"github.com/landfall-lb/landfall/internal/lb"
)

// maxDevices bounds the flowtable. It has room for the interfaces of as many pods as the kubelet takes by default, and
// as many again.
const maxDevices = 256

const ethernetBytes = 6

// Devices returns the names of the interfaces through which connections are offloaded, and how many are left out as
// there are too many. They are those whose frames have MAC addresses, outside of VRFs. A port's packets belong to its
// bridge or bond, but later kernels, as 7.3, look for the port through which a pod is reached. Interfaces of pods come
// last, so that many pods keep no uplink out.
func Devices(interfaces []lb.Interface) (names []string, left int) {
	var fit []lb.Interface
	for _, i := range interfaces {
		if !i.Disabled && !i.Loopback && (!i.Enslaved || i.Guest) && !i.NoARP && i.VRF == "" && len(i.MAC) == ethernetBytes &&
			!lb.IsTunnel(i.Name) {
			fit = append(fit, i)
		}
	}
	slices.SortFunc(fit, func(a, b lb.Interface) int {
		if a.Guest != b.Guest {
			if a.Guest {
				return 1
			}
			return -1
		}
		return cmp.Compare(a.Index, b.Index)
	})
	for _, i := range fit[:min(len(fit), maxDevices)] {
		names = append(names, i.Name)
	}
	return names, len(fit) - len(names)
}
