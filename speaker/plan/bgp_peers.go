package plan

import (
	"cmp"
	"hash/fnv"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/landfall-lb/landfall/internal/lb"
)

// maxPassword is the longest key of TCP MD5 signatures that Linux takes.
const maxPassword = 80

// sessions decides which sessions a node has, without routes.
func sessions(f Facts, b BGPFacts) (map[string]BGPSession, map[string]PeerDecision) {
	found := map[string]BGPSession{}
	decisions := map[string]PeerDecision{}
	type target struct {
		addr  netip.Addr
		port  uint16
		iface string
		vrf   string
	}
	taken := map[target]string{}
	at := map[target][]listened{} // without the port
	for _, p := range peersByAge(b.Peers) {
		if !peerSelects(p, f.Node) {
			if p.BadSelector != nil { // it may be meant for this node
				decisions[p.Name] = PeerDecision{Refusal: p.BadSelector}
			}
			continue
		}
		to := target{p.Addr, p.Port, p.Interface, p.VRF}
		if first, ok := taken[to]; ok {
			decisions[p.Name] = PeerDecision{Refusal: lb.Refuse(lb.ReasonPeerDuplicate,
				"BGPPeer %s is for the same router on %s; delete one of them, or give them nodeSelectors that select different "+
					"nodes", first, f.Self)}
			continue
		}
		taken[to] = p.Name
		password, refusal := passwordOf(p, b)
		if b.Listening {
			to.port = 0
			mine := listened{p, password}
			if i := slices.IndexFunc(at[to], mine.mistaken); i >= 0 {
				first := at[to][i].peer
				decisions[p.Name] = PeerDecision{Refusal: lb.Refuse(lb.ReasonPeerDuplicate,
					"BGPPeer %s (port %d) and %s (port %d) have one address, and with --bgp-listen %s cannot tell connections of the "+
						"one from those of the other; give each a sourceAddress of its own and both one password, or do without "+
						"--bgp-listen", first.Name, first.Port, p.Name, p.Port, f.Self)}
				continue
			}
			at[to] = append(at[to], mine)
		}
		if refusal == nil {
			refusal = refuseVRF(f, p)
		}
		if p.Problem != nil {
			refusal = p.Problem
		}
		if refusal != nil {
			decisions[p.Name] = PeerDecision{Refusal: refusal}
			continue
		}
		d := PeerDecision{}
		if p.BFDProfile != "" {
			if profile, ok := b.Profiles[p.BFDProfile]; ok {
				d.Profile = &profile
			} else {
				d.Warning = lb.Refuse(lb.ReasonProfileMissing,
					"BFDProfile %s does not exist, so only the hold time monitors the path", p.BFDProfile)
			}
		}
		s := sessionOf(f, p)
		s.Password = password
		s.BFDDown = d.Profile != nil && b.BFDDown[p.Name]
		found[p.Name], decisions[p.Name] = s, d
	}
	return found, decisions
}

// listened is a peer that may open connections, which come from any port.
type listened struct {
	peer     lb.Peer
	password string
}

// mistaken reports whether connections of one of two peers with one address may be taken for the other's: both come to
// one address of the node, or the kernel, which knows one password for each address, refuses one of them.
func (l listened) mistaken(other listened) bool {
	apart := l.peer.Source.IsValid() && other.peer.Source.IsValid() && l.peer.Source != other.peer.Source
	return !apart || l.password != other.password
}

// refuseVRF says why there is no session in the peer's VRF. A session outside of it would reach another
// router of the same address.
func refuseVRF(f Facts, p lb.Peer) *lb.Refusal {
	if p.VRF == "" {
		return nil
	}
	if _, found := lb.FindVRF(f.Interfaces, p.VRF); !found {
		return lb.Refuse(lb.ReasonVRFMissing,
			"%s has no VRF %s; create it and its ports, or give the peer nodeSelectors that leave the node out", f.Self, p.VRF)
	}
	for _, i := range f.Interfaces {
		if p.Interface != "" && i.Name == p.Interface && i.VRF != p.VRF {
			return lb.Refuse(lb.ReasonInterfaceMissing, "interface %s of %s is not in VRF %s", i.Name, f.Self, p.VRF)
		}
	}
	return nil
}

// peersByAge sorts so that of two peers for one router the older one has the session.
func peersByAge(peers map[string]lb.Peer) []lb.Peer {
	return slices.SortedFunc(maps.Values(peers), func(a, b lb.Peer) int {
		return cmp.Or(a.Created.Compare(b.Created), strings.Compare(a.Name, b.Name))
	})
}

// peerSelects reports whether the node is to have a session. A node without an object has those
// that all nodes have.
func peerSelects(p lb.Peer, node *lb.Node) bool {
	if node == nil {
		return len(p.NodeSelectors) == 0
	}
	return anyMatches(p.NodeSelectors, node.Labels)
}

// passwordOf finds the password. Without the one that is asked for there is no session, as one
// without it would not be refused by everyone who can answer in the router's place.
func passwordOf(p lb.Peer, b BGPFacts) (string, *lb.Refusal) {
	ref := p.PasswordSecret
	if ref == nil {
		return p.Password, nil
	}
	if ref.Namespace != "" && ref.Namespace != b.Namespace {
		return "", lb.Refuse(lb.ReasonSecretElsewhere,
			"spec.passwordSecret is in namespace %s, and speakers read Secrets in %s only; create it there and leave the "+
				"namespace out", ref.Namespace, b.Namespace)
	}
	password, ok := b.Passwords[ref.Name]
	switch {
	case !ok:
		return "",
			lb.Refuse(lb.ReasonSecretMissing, "Secret %s/%s of type kubernetes.io/basic-auth does not exist, or the speaker "+
				"may not read it: the chart's value speaker.bgpSecrets lists those that it may", b.Namespace, ref.Name)
	case password == "" || len(password) > maxPassword:
		return "",
			lb.Refuse(lb.ReasonSecretMissing, "the key password of Secret %s/%s has %d bytes, and a password has 1 to %d",
				b.Namespace, ref.Name, len(password), maxPassword)
	}
	return password, nil
}

func sessionOf(f Facts, p lb.Peer) BGPSession {
	s := BGPSession{
		LocalASN: p.LocalASN, PeerASN: p.PeerASN, Dynamic: p.Dynamic, Addr: p.Addr, Interface: p.Interface, VRF: p.VRF,
		Port:     p.Port,
		Source:   p.Source,
		RouterID: routerID(f, p), HoldTime: p.HoldTime, KeepaliveTime: p.KeepaliveTime, ConnectTime: p.ConnectTime,
		MultiHop: p.MultiHop, GracefulRestart: p.GracefulRestart, AcceptRoutes: p.AcceptRoutes,
	}
	if vrf, found := lb.FindVRF(f.Interfaces, p.VRF); found {
		s.VRFIndex = vrf.Index
	}
	switch {
	case p.Interface != "" || p.DualStack:
		s.Families = []lb.Family{lb.IPv4, lb.IPv6}
	case p.Addr.Is4():
		s.Families = []lb.Family{lb.IPv4}
	default:
		s.Families = []lb.Family{lb.IPv6}
	}
	if len(s.Families) == 1 {
		return s
	}
	if p.Addr.Is4() {
		s.NextHop6 = nextHop(f, p, lb.IPv6)
	} else {
		s.NextHop4 = nextHop(f, p, lb.IPv4)
	}
	return s
}

// routerID takes the one that is asked for, the node's first IPv4 address, or a number made of its
// name (RFC 6286 asks for nothing more than that it differs within the AS).
func routerID(f Facts, p lb.Peer) netip.Addr {
	if p.RouterID.IsValid() {
		return p.RouterID
	}
	if f.Node != nil {
		for _, a := range f.Node.Addresses {
			if a.Is4() {
				return a
			}
		}
	}
	h := fnv.New32a()
	h.Write([]byte(f.Self))
	n := max(h.Sum32(), 1)
	return netip.AddrFrom4([4]byte{byte(n >> 24), byte(n >> 16), byte(n >> 8), byte(n)})
}

// nextHop finds the node's address of a family that the peer can send to: on the link to the peer,
// or else the node's InternalIP; in a VRF, which knows nothing of that, an address of the VRF itself
// or of a port.
func nextHop(f Facts, p lb.Peer, family lb.Family) netip.Addr {
	var others []netip.Addr
	for _, i := range f.Interfaces {
		if i.VRF != p.VRF {
			continue
		}
		_, direct := i.Subnet(p.Addr)
		direct = direct || p.Interface != "" && i.Name == p.Interface
		for _, a := range i.Addresses {
			switch {
			case lb.FamilyOf(a.Addr()) != family || !a.Addr().IsGlobalUnicast():
			case direct:
				return a.Addr()
			case i.Table != 0: // first, as the VRF's own address does not go with a link
				others = slices.Insert(others, 0, a.Addr())
			default:
				others = append(others, a.Addr())
			}
		}
	}
	if p.VRF != "" {
		if len(others) > 0 {
			return others[0]
		}
		return netip.Addr{}
	}
	if f.Node != nil {
		for _, a := range f.Node.Addresses {
			if lb.FamilyOf(a) == family {
				return a
			}
		}
	}
	return netip.Addr{}
}
