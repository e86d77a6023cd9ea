package nft

import (
	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/proxy/nfnetlink"
)

// Flowtable defines a flowtable, which forwards packets of connections that rules have added to it, from where they
// come in at one of its devices. It begins without any, which Linux takes from 5.8 on.
type Flowtable struct {
	Name     string
	Priority int32 // at the hook ingress
	// Counted has conntrack count what the flowtable forwards, where it counts at all.
	Counted bool
}

// Attributes and a flag of linux/netfilter/nf_tables.h.
const (
	flowtableTable   = 1
	flowtableName    = 2
	flowtableHook    = 3
	flowtableFlags   = 7
	flowtableHookNum = 1
	flowtablePrio    = 2
	flowtableDevices = 3
	deviceName       = 1
	flowtableCounter = 2
)

// AddFlowtable adds a flowtable that is not there.
func (b *Batch) AddFlowtable(f Flowtable) {
	const ingress = 0 // NF_NETDEV_INGRESS
	b.flowtable(unix.NFT_MSG_NEWFLOWTABLE, unix.NLM_F_CREATE, "add", f.Name, func(a *nfnetlink.Attributes) {
		a.Nested(flowtableHook, func() {
			a.Number(flowtableHookNum, ingress)
			a.Number(flowtablePrio, uint32(f.Priority))
		})
		if f.Counted {
			a.Number(flowtableFlags, flowtableCounter)
		}
	})
}

// AddDevice has a flowtable take packets that come in at a device.
func (b *Batch) AddDevice(flowtable, device string) {
	b.flowtable(unix.NFT_MSG_NEWFLOWTABLE, unix.NLM_F_CREATE, "add "+device+" to", flowtable, hookOf(device))
}

// RemoveDevice has it take them no longer.
func (b *Batch) RemoveDevice(flowtable, device string) {
	b.flowtable(unix.NFT_MSG_DELFLOWTABLE, 0, "remove "+device+" from", flowtable, hookOf(device))
}

// RemoveFlowtable removes a flowtable that no rule uses. Its connections go on through the rules.
func (b *Batch) RemoveFlowtable(name string) {
	b.flowtable(unix.NFT_MSG_DELFLOWTABLE, 0, "remove", name, func(*nfnetlink.Attributes) {})
}

func (b *Batch) flowtable(kind, flags uint16, does, name string, more func(*nfnetlink.Attributes)) {
	b.add(kind, flags, does+" flowtable "+name, func(a *nfnetlink.Attributes) {
		a.Text(flowtableTable, b.table.Name)
		a.Text(flowtableName, name)
		more(a)
	})
}

func hookOf(device string) func(*nfnetlink.Attributes) {
	return func(a *nfnetlink.Attributes) {
		a.Nested(flowtableHook, func() {
			a.Nested(flowtableDevices, func() { a.Text(deviceName, device) })
		})
	}
}

// Flowtables returns the devices of each flowtable.
func (l Listing) Flowtables() (map[string][]string, error) {
	all := map[string][]string{}
	err := l.dump(unix.NFT_MSG_GETFLOWTABLE, nil, func(attributes []byte) {
		var devices []string
		for kind, name := range nfnetlink.All(nfnetlink.Get(attributes, flowtableHook, flowtableDevices)) {
			if kind == deviceName {
				devices = append(devices, unix.ByteSliceToString(name))
			}
		}
		all[nfnetlink.GetText(attributes, flowtableName)] = devices
	})
	return all, err
}
