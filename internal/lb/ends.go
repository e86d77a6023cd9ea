package lb

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"
)

// ParseEnd reads an address with a port or without, which is port 0 then. IPv6 needs brackets before a
// port.
func ParseEnd(s string) (netip.AddrPort, error) {
	if addr, err := netip.ParseAddr(strings.TrimSuffix(strings.TrimPrefix(s, "["), "]")); err == nil {
		return plainEnd(netip.AddrPortFrom(addr, 0), s)
	}
	end, err := netip.ParseAddrPort(s)
	if err != nil {
		return netip.AddrPort{}, fmt.Errorf("%q is neither an IP address nor one with a port", s)
	}
	return plainEnd(end, s)
}

// plainEnd refuses zones, and makes IPv4 of what is mapped into IPv6.
func plainEnd(end netip.AddrPort, s string) (netip.AddrPort, error) {
	if end.Addr().Zone() != "" {
		return netip.AddrPort{}, fmt.Errorf("%q has a zone: name the interface instead", s)
	}
	return netip.AddrPortFrom(end.Addr().Unmap(), end.Port()), nil
}

// Check returns what keeps the packet from being one.
func (p TracePacket) Check() error {
	switch {
	case FamilyOf(p.Source.Addr()) != FamilyOf(p.Destination.Addr()):
		return fmt.Errorf("%s and %s are of different address families", p.Source.Addr(), p.Destination.Addr())
	case p.Protocol == TraceICMP && p.Destination.Port() != 0:
		return fmt.Errorf("ICMP has no ports")
	case p.Protocol == TraceICMP:
		return nil
	case p.Protocol != TCP && p.Protocol != UDP && p.Protocol != SCTP:
		return fmt.Errorf("protocol %q is none of TCP, UDP, SCTP and ICMP", p.Protocol)
	case p.Destination.Port() == 0:
		return fmt.Errorf("%s has no port", p.Destination.Addr())
	}
	return nil
}

// CutProtocol cuts the protocol from what is written before a slash; "" if there is none.
func CutProtocol(s string) (rest string, p Protocol, err error) {
	rest, name, found := strings.Cut(s, "/")
	if !found {
		return s, "", nil
	}
	switch p = Protocol(strings.ToUpper(name)); p {
	case TCP, UDP, SCTP, TraceICMP:
		return rest, p, nil
	}
	return s, "", fmt.Errorf("protocol %q is none of TCP, UDP, SCTP and ICMP", name)
}

// String writes the target as ParseFlowTarget reads it.
func (t FlowTarget) String() string {
	s := ""
	switch {
	case t.Addr.IsValid() && t.Port != 0:
		s = netip.AddrPortFrom(t.Addr, t.Port).String()
	case t.Addr.IsValid():
		s = t.Addr.String()
	default:
		s = fmt.Sprintf(":%d", t.Port)
	}
	if t.Protocol != "" {
		s += "/" + string(t.Protocol)
	}
	return s
}

// ParseFlowTarget reads [ADDRESS][:PORT][/PROTOCOL], of which an address or a port has to be there.
func ParseFlowTarget(s string) (t FlowTarget, err error) {
	rest, protocol, err := CutProtocol(s)
	if err != nil {
		return t, err
	}
	t.Protocol = protocol
	if port, only := strings.CutPrefix(rest, ":"); only && !strings.Contains(port, ":") {
		n, err := strconv.ParseUint(port, 10, 16)
		if err != nil || n == 0 {
			return FlowTarget{}, fmt.Errorf("%q is no port", port)
		}
		t.Port = uint16(n)
		return t, nil
	}
	end, err := ParseEnd(rest)
	if err != nil {
		return FlowTarget{}, err
	}
	t.Addr, t.Port = end.Addr(), end.Port()
	return t, nil
}

// EndText writes an address and port as ParseEnd reads it: without the port if that is 0.
func EndText(end netip.AddrPort) string {
	if end.Port() == 0 {
		return end.Addr().String()
	}
	return end.String()
}
