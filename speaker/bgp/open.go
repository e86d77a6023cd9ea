package bgp

import (
	"net/netip"
	"slices"
	"time"

	"github.com/osrg/gobgp/v3/pkg/packet/bgp"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/speaker/plan"
)

// restartTime is how long a peer keeps the routes of a speaker that restarts (RFC 4724); what a
// Deployment's image pull may take.
const restartTime = 120 * time.Second

// open returns our OPEN message. restarting is set for the first session since the speaker started:
// its peer must not wait for it.
func open(d plan.BGPSession, hostname string, restarting, v6 bool) []byte {
	capabilities := []bgp.ParameterCapabilityInterface{bgp.NewCapRouteRefresh(), bgp.NewCapFourOctetASNumber(d.LocalASN)}
	var preserved []*bgp.CapGracefulRestartTuple
	for _, f := range d.Families {
		capabilities = append(capabilities, bgp.NewCapMultiProtocol(routeFamily(f)))
		// The kernel forwards whether or not the speaker runs.
		preserved = append(preserved, bgp.NewCapGracefulRestartTuple(routeFamily(f), true))
	}
	if v6 && slices.Contains(d.Families, lb.IPv4) {
		capabilities = append(capabilities, bgp.NewCapExtendedNexthop(
			[]*bgp.CapExtendedNexthopTuple{bgp.NewCapExtendedNexthopTuple(bgp.RF_IPv4_UC, bgp.AFI_IP6)}))
	}
	if d.GracefulRestart {
		capabilities = append(capabilities, bgp.NewCapGracefulRestart(restarting, false, uint16(restartTime.Seconds()),
			preserved))
	}
	if hostname != "" {
		capabilities = append(capabilities, bgp.NewCapFQDN(hostname[:min(len(hostname), 64)], ""))
	}
	m := bgp.NewBGPOpenMessage(twoOctets(d.LocalASN), uint16(d.HoldTime.Seconds()), d.RouterID.String(),
		[]bgp.OptionParameterInterface{bgp.NewOptionParameterCapability(capabilities)})
	b, _ := m.Serialize()
	return b
}

// negotiate checks the peer's OPEN message (RFC 4271 section 6.2) and returns what both ends have
// agreed on.
func negotiate(d plan.BGPSession, body []byte, v6 bool) (Negotiated, *protocolError) {
	const code = bgp.BGP_ERROR_OPEN_MESSAGE_ERROR
	if body[0] != 4 {
		return Negotiated{},
			fault(code, bgp.BGP_ERROR_SUB_UNSUPPORTED_VERSION_NUMBER, []byte{0, 4}, "the peer speaks version %d", body[0])
	}
	m := &bgp.BGPOpen{}
	if err := decode(m, body); err != nil {
		return Negotiated{}, fault(code, 0, nil, "%v", err)
	}
	if read, sent := countCapabilities(m), sentCapabilities(body); read != sent {
		return Negotiated{}, fault(code, 0, nil, "a capability cannot be read")
	}
	offer, err := readOffer(m)
	if err != nil {
		return Negotiated{}, err
	}
	id, _ := netip.AddrFromSlice(m.ID.To4())
	switch {
	case m.HoldTime == 1 || m.HoldTime == 2:
		return Negotiated{},
			fault(code, bgp.BGP_ERROR_SUB_UNACCEPTABLE_HOLD_TIME, nil, "the peer offers a hold time of %d s", m.HoldTime)
	case !id.IsValid() || id.IsUnspecified() || id == d.RouterID && d.Internal(offer.asn): // RFC 6286
		return Negotiated{},
			fault(code, bgp.BGP_ERROR_SUB_BAD_BGP_IDENTIFIER, nil, "the peer's router ID is %v, ours %v", id, d.RouterID)
	}
	if err := checkASN(d, offer.asn); err != nil {
		return Negotiated{}, err
	}
	n := Negotiated{
		PeerASN: offer.asn, PeerID: id, FourOctetASN: offer.fourOctets, RouteRefresh: offer.refresh,
		HoldTime: min(d.HoldTime, time.Duration(m.HoldTime)*time.Second), ExtendedNextHop: v6 && offer.extendedNextHop,
		GracefulRestart: d.GracefulRestart && offer.gracefulRestart,
	}
	n.KeepaliveTime = keepaliveTime(d, n.HoldTime)
	if n.GracefulRestart {
		n.RestartTime = restartTime
	}
	for _, f := range d.Families {
		if slices.Contains(offer.families, f) {
			n.Families = append(n.Families, f)
		}
	}
	if len(n.Families) == 0 {
		return n, fault(code, bgp.BGP_ERROR_SUB_UNSUPPORTED_CAPABILITY, missingFamilies(d.Families),
			"we offer routes of %v, the peer of %v; no family is common", d.Families, offer.families)
	}
	return n, nil
}

// countCapabilities returns how many capabilities the packet library has read. It passes over what
// it cannot read.
func countCapabilities(m *bgp.BGPOpen) (n int) {
	for _, p := range m.OptParams {
		if capabilities, ok := p.(*bgp.OptionParameterCapability); ok {
			n += len(capabilities.Capability)
		}
	}
	return n
}

// sentCapabilities returns how many capabilities there are in an OPEN message whose parameters have
// right lengths (RFC 4271 section 4.2, RFC 5492 section 4); -1 if one does not end with its
// parameter.
func sentCapabilities(body []byte) (n int) {
	const before = 10
	for rest := body[before:][:body[before-1]]; len(rest) > 0; {
		parameter := rest[2:][:rest[1]]
		kind := rest[0]
		rest = rest[2+len(parameter):]
		for kind == bgp.BGP_OPT_CAPABILITY && len(parameter) > 0 {
			if len(parameter) < 2 || len(parameter) < 2+int(parameter[1]) {
				return -1
			}
			parameter = parameter[2+int(parameter[1]):]
			n++
		}
	}
	return n
}

// checkASN compares the peer's AS number with the one that is wanted.
func checkASN(d plan.BGPSession, asn uint32) *protocolError {
	const code, subcode = bgp.BGP_ERROR_OPEN_MESSAGE_ERROR, bgp.BGP_ERROR_SUB_BAD_PEER_AS
	switch {
	case d.Dynamic == lb.InternalASN && asn != d.LocalASN:
		return fault(code, subcode, nil, "the peer says AS %d, dynamicASN internal wants ours, %d", asn, d.LocalASN)
	case d.Dynamic == lb.ExternalASN && asn == d.LocalASN:
		return fault(code, subcode, nil, "the peer says AS %d, which is ours, and dynamicASN external wants another", asn)
	case d.Dynamic == "" && asn != d.PeerASN:
		return fault(code, subcode, nil, "the peer says AS %d, peerASN is %d", asn, d.PeerASN)
	case asn == 0:
		return fault(code, subcode, nil, "the peer says AS 0")
	}
	return nil
}

// keepaliveTime returns the time between keepalives; 0 for none.
func keepaliveTime(d plan.BGPSession, hold time.Duration) time.Duration {
	if hold == 0 {
		return 0
	}
	if d.KeepaliveTime > 0 && d.KeepaliveTime < hold {
		return d.KeepaliveTime
	}
	return hold / 3
}

// offer is what a peer's OPEN message says that it can do.
type offer struct {
	asn                                                   uint32
	families                                              []lb.Family
	fourOctets, refresh, extendedNextHop, gracefulRestart bool
}

func readOffer(m *bgp.BGPOpen) (offer, *protocolError) {
	o := offer{asn: uint32(m.MyAS)}
	multiprotocol := false
	for _, p := range m.OptParams {
		capabilities, ok := p.(*bgp.OptionParameterCapability)
		if !ok {
			return o,
				fault(bgp.BGP_ERROR_OPEN_MESSAGE_ERROR, bgp.BGP_ERROR_SUB_UNSUPPORTED_OPTIONAL_PARAMETER, nil,
					"an unknown optional parameter")
		}
		for _, c := range capabilities.Capability {
			multiprotocol = multiprotocol || c.Code() == bgp.BGP_CAP_MULTIPROTOCOL
			o.read(c)
		}
	}
	if !multiprotocol {
		o.families = []lb.Family{lb.IPv4} // RFC 4760 section 8
	}
	return o, nil
}

func (o *offer) read(c bgp.ParameterCapabilityInterface) {
	switch c := c.(type) {
	case *bgp.CapMultiProtocol:
		switch c.CapValue {
		case bgp.RF_IPv4_UC:
			o.families = append(o.families, lb.IPv4)
		case bgp.RF_IPv6_UC:
			o.families = append(o.families, lb.IPv6)
		}
	case *bgp.CapFourOctetASNumber:
		o.asn, o.fourOctets = c.CapValue, true
	case *bgp.CapRouteRefresh, *bgp.CapRouteRefreshCisco:
		o.refresh = true
	case *bgp.CapGracefulRestart:
		o.gracefulRestart = true
	case *bgp.CapExtendedNexthop:
		for _, t := range c.Tuples {
			if t.NLRIAFI == bgp.AFI_IP && t.NLRISAFI == bgp.SAFI_UNICAST && t.NexthopAFI == bgp.AFI_IP6 {
				o.extendedNextHop = true
			}
		}
	}
}

// missingFamilies is the data of an Unsupported Capability: the capabilities that are missing (RFC
// 5492 section 5).
func missingFamilies(families []lb.Family) []byte {
	var data []byte
	for _, f := range families {
		b, _ := bgp.NewCapMultiProtocol(routeFamily(f)).Serialize()
		data = append(data, b...)
	}
	return data
}
