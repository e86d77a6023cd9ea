package l2

import (
	"encoding/binary"
	"net"
	"net/netip"
	"slices"
	"testing"

	"github.com/mdlayher/arp"
	"github.com/mdlayher/ethernet"
	"github.com/mdlayher/packet"

	"github.com/landfall-lb/landfall/internal/nstest"
	"github.com/landfall-lb/landfall/speaker/plan"
)

// tagged returns a frame with the tag of a VLAN (IEEE 802.1Q), 0 for one that says its priority only.
func tagged(frame []byte, vlan uint16) []byte {
	return slices.Insert(slices.Clone(frame), 12, 0x81, 0, byte(vlan>>8), byte(vlan))
}

// to returns a frame with another destination.
func to(mac net.HardwareAddr, frame []byte) []byte {
	frame = slices.Clone(frame)
	copy(frame, mac)
	return frame
}

// transmit sends frames as they are.
func transmit(t *testing.T, ns *nstest.NS, frames ...[]byte) {
	t.Helper()
	ns.Do(t, func() error {
		i, err := net.InterfaceByName("eth0")
		if err != nil {
			return err
		}
		conn, err := packet.Listen(i, packet.Raw, int(ethernet.EtherTypeARP), nil)
		if err != nil {
			return err
		}
		defer conn.Close()
		for _, frame := range frames {
			addr := &packet.Addr{HardwareAddr: net.HardwareAddr(frame[:6])}
			if _, err := conn.WriteTo(frame, addr); err != nil {
				return err
			}
		}
		return nil
	})
}

// The kernel takes the tag of a VLAN off before a socket sees a frame. What is said there is said on another LAN,
// which may use the same addresses.
func TestOtherVLANsAreNotHeard(t *testing.T) {
	l := newLAN(t)
	n := l.node(t, "172.26.236.178/24")
	n.ns.Run(t, "ip", "link", "add", "link", "eth0", "name", "mv0", "type", "macvlan")
	n.ns.Run(t, "ip", "link", "set", "mv0", "address", "02:00:00:00:00:55", "up")
	n.answerFor(vip, vip6)
	eventually(t, "the node answers for both", func() bool { return len(n.actor.Outcome().Answering) == 2 })
	for vip, announce := range map[netip.Addr]func(mac net.HardwareAddr) []byte{
		vip: func(mac net.HardwareAddr) []byte {
			frame, err := encodeARP(arp.OperationReply, mac, vip, ethernet.Broadcast, vip, ethernet.Broadcast)
			if err != nil {
				t.Fatal(err)
			}
			return frame
		},
		vip6: func(mac net.HardwareAddr) []byte {
			frame, err := advertise(mac, vip6, false, allNodes, multicastMAC(allNodes))
			if err != nil {
				t.Fatal(err)
			}
			return frame
		},
	} {
		var devices [][]byte
		for i := range 6 {
			mac := binary.BigEndian.AppendUint32([]byte{2, 0xdd}, uint32(i))
			devices = append(devices, announce(mac))
		}
		transmit(t, l.client,
			tagged(devices[0], 200), tagged(to(n.i.MAC, devices[1]), 200), to([]byte{2, 0, 0, 0, 0, 0x55}, devices[2]),
			tagged(devices[3], 0), to(n.i.MAC, devices[4]), devices[5])
		want := []plan.ConflictingHost{{Interface: "eth0", MAC: "02:dd:00:00:00:03"},
			{Interface: "eth0", MAC: "02:dd:00:00:00:04"}, {Interface: "eth0", MAC: "02:dd:00:00:00:05"}}
		eventually(t, "the node hears the devices of its LAN", func() bool {
			got := n.actor.Outcome().ConflictingHosts[vip]
			return !slices.ContainsFunc(want, func(host plan.ConflictingHost) bool { return !slices.Contains(got, host) })
		})
		if got := n.actor.Outcome().ConflictingHosts[vip]; !slices.Equal(got, want) {
			t.Errorf("conflicting hosts %v, want %v", got, want)
		}
	}
}
