package conntrack

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/nfnetlink"
)

// Attributes of a flow (linux/netfilter/nfnetlink_conntrack.h).
const (
	attrStatus, attrTimeout         = 3, 7
	countersOriginal, countersReply = 9, 10
	counterPackets, counterBytes    = 1, 2
	infoSCTP                        = 3

	statusReplied, statusAssured = 1 << 1, 1 << 2
	statusOffloaded              = 1 << 14 // IPS_OFFLOAD
)

// The states by their numbers (linux/netfilter/nf_conntrack_tcp.h and nf_conntrack_sctp.h).
var (
	statesTCP = []string{"NONE", "SYN_SENT", "SYN_RECV", "ESTABLISHED", "FIN_WAIT", "CLOSE_WAIT", "LAST_ACK", "TIME_WAIT",
		"CLOSE", "SYN_SENT2"}
	statesSCTP = []string{"NONE", "CLOSED", "COOKIE_WAIT", "COOKIE_ECHOED", "ESTABLISHED", "SHUTDOWN_SENT",
		"SHUTDOWN_RECD", "SHUTDOWN_ACK_SENT", "HEARTBEAT_SENT"}
)

// maxCounts bounds how many pairs of backend and state are told apart.
const maxCounts = 4096

// List returns the flows to the targets, at most limit of them, and counts all. Its memory does not
// grow with the table. In a small table the kernel looks for the flows of a single address of IPv4;
// else it lists all, so that it never searches for long with soft interrupts off.
func (n Netlink) List(targets []lb.FlowTarget, limit int, local func(netip.Addr) bool) (flows lb.Flows, err error) {
	size, err := n.size()
	if err != nil {
		return flows, err
	}
	var filter nfnetlink.Attributes
	inet := uint8(unix.AF_UNSPEC)
	if len(targets) == 1 && targets[0].Addr.Is4() && size <= smallTable {
		filter, inet = toAddress(targets[0].Addr), unix.AF_INET
	}
	counts := map[lb.FlowCount]int{}
	err = n.conn.Dump(request(inet, getFlow, unix.NLM_F_DUMP, filter), func(m nfnetlink.Message) error {
		f, ok := decodeFlow(m.Attributes())
		if !ok || !slices.ContainsFunc(targets, func(t lb.FlowTarget) bool { return t.Covers(f.Protocol, f.To, local) }) {
			return nil
		}
		flows.Accounted = flows.Accounted || nfnetlink.Get(m.Attributes(), countersOriginal) != nil
		if flows.Total++; len(flows.Flows) < limit {
			flows.Flows = append(flows.Flows, f)
		}
		if key := (lb.FlowCount{Backend: f.Backend, State: f.State}); len(counts) < maxCounts || counts[key] > 0 {
			counts[key]++
		}
		return nil
	})
	if err != nil {
		return lb.Flows{}, fmt.Errorf("list flows: %w", err)
	}
	for c, count := range counts {
		c.Count = count
		flows.Counts = append(flows.Counts, c)
	}
	slices.SortFunc(flows.Counts, func(a, b lb.FlowCount) int {
		return cmp.Or(a.Backend.Compare(b.Backend), cmp.Compare(a.State, b.State))
	})
	slices.SortFunc(flows.Flows, func(a, b lb.Flow) int {
		return cmp.Or(a.Client.Compare(b.Client), a.To.Compare(b.To), a.Backend.Compare(b.Backend))
	})
	return flows, nil
}

// toAddress has the kernel look for flows to an address of IPv4; see About.filter.
func toAddress(addr netip.Addr) (all nfnetlink.Attributes) {
	all.Nested(tupleOriginal, func() {
		all.Nested(tupleIP, func() { all.Bytes(destIPv4, addr.AsSlice()) })
	})
	all.Nested(attrFilter, func() { all.Bytes(filterOrig, binary.NativeEndian.AppendUint32(nil, byDestination)) })
	return all
}

var protocolsByNumber = map[uint8]lb.Protocol{unix.IPPROTO_TCP: lb.TCP, unix.IPPROTO_UDP: lb.UDP,
	unix.IPPROTO_SCTP: lb.SCTP}

// decodeFlow reads a flow from the attributes of a message; ok is false for one of another protocol
// than Services have.
func decodeFlow(b []byte) (f lb.Flow, ok bool) {
	protocol, client, to := tuple(nfnetlink.Get(b, tupleOriginal))
	_, backend, back := tuple(nfnetlink.Get(b, tupleReply))
	f = lb.Flow{Protocol: protocolsByNumber[protocol], Client: client, To: to, Backend: backend,
		Masqueraded: back.Addr() != client.Addr()}
	f.Expires, _ = nfnetlink.GetNumber(b, attrTimeout)
	status, _ := nfnetlink.GetNumber(b, attrStatus)
	f.State = state(b, status)
	for _, direction := range []uint16{countersOriginal, countersReply} {
		f.Packets += number64(nfnetlink.Get(b, direction, counterPackets))
		f.Bytes += number64(nfnetlink.Get(b, direction, counterBytes))
	}
	return f, f.Protocol != "" && client.IsValid() && to.IsValid() && backend.IsValid()
}

func number64(b []byte) uint64 {
	if len(b) != 8 {
		return 0
	}
	return binary.BigEndian.Uint64(b)
}

func state(b []byte, status uint32) string {
	for kind, names := range map[uint16][]string{infoTCP: statesTCP, infoSCTP: statesSCTP} {
		if n := nfnetlink.Get(b, protocolInfo, kind, infoState); len(n) == 1 && int(n[0]) < len(names) {
			return names[n[0]]
		}
	}
	switch {
	case status&statusOffloaded != 0:
		return "OFFLOAD" // as conntrack has it
	case status&statusAssured != 0:
		return "ASSURED"
	case status&statusReplied != 0:
		return "REPLIED"
	}
	return "UNREPLIED"
}
