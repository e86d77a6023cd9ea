package kube

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/retry"

	"github.com/landfall-lb/landfall/api/v1beta1"
	"github.com/landfall-lb/landfall/internal/lb"
)

// Defaults of BGPPeers.
const (
	defaultHoldTime    = 90 * time.Second
	defaultConnectTime = 10 * time.Second
	bgpPort            = 179
)

// Defaults of BFDProfiles, as the schema has them.
const (
	defaultBFDInterval   = 300
	defaultBFDMultiplier = 3
	defaultBFDMinimumTTL = 254
)

// BGPPeers watches the BGPPeers. status is called in place of changed where only the status
// differs, which each node writes into.
func BGPPeers(c *Client, changed, status func(name string)) *Table[string, lb.Peer] {
	table := newStatusTable(func(p lb.Peer) lb.Peer {
		p.Status = nil
		return p
	}, changed, status)
	c.register(resource{client: c.landfall, name: "bgppeers", example: &v1beta1.BGPPeer{}},
		objects[string, lb.Peer, *v1beta1.BGPPeer]{table, convertBGPPeer})
	return table
}

// Routers watches which routers BGPPeers name. Where the API server does not have the resource, or
// we may not see it, the table is empty.
func Routers(c *Client, changed func(name string)) *Table[string, lb.Router] {
	table := newTable[string, lb.Router](nil, changed)
	c.register(resource{client: c.landfall, name: "bgppeers", example: &v1beta1.BGPPeer{}, optional: true},
		objects[string, lb.Router, *v1beta1.BGPPeer]{table, convertRouter})
	return table
}

func convertRouter(o *v1beta1.BGPPeer) (name string, router lb.Router) {
	name, peer := convertBGPPeer(o)
	return strings.Clone(name), lb.Router{Addr: peer.Addr.WithZone(""), VRF: strings.Clone(peer.VRF)}
}

// BGPPeerNodes watches which nodes are in the status of BGPPeers, in the order of their names.
func BGPPeerNodes(c *Client, changed func(name string)) *Table[string, []string] {
	table := newTable[string, []string](nil, changed)
	c.register(resource{client: c.landfall, name: "bgppeers", example: &v1beta1.BGPPeer{}},
		objects[string, []string, *v1beta1.BGPPeer]{table, func(o *v1beta1.BGPPeer) (string, []string) {
			var nodes []string
			for _, n := range o.Status.Nodes {
				nodes = append(nodes, strings.Clone(n.Name))
			}
			slices.Sort(nodes)
			return o.Name, nodes
		}})
	return table
}

// BGPPeerSessions watches what the speakers report of their sessions with BGPPeers, in the order of
// the nodes' names.
func BGPPeerSessions(c *Client, changed func(name string)) *Table[string, lb.PeerSessions] {
	table := newTable[string, lb.PeerSessions](nil, changed)
	c.register(resource{client: c.landfall, name: "bgppeers", example: &v1beta1.BGPPeer{}},
		objects[string, lb.PeerSessions, *v1beta1.BGPPeer]{table, convertSessions})
	return table
}

func convertSessions(o *v1beta1.BGPPeer) (string, lb.PeerSessions) {
	p := lb.PeerSessions{Name: o.Name, Interface: o.Spec.Interface, PeerASN: uint32(deref(o.Spec.PeerASN)),
		BFD: o.Spec.BFDProfile != ""}
	p.Addr, _ = lb.ParseAddr(o.Spec.PeerAddress) // what the API server let through is not shown
	for _, n := range o.Status.Nodes {
		p.Sessions = append(p.Sessions, lb.PeerSession{Node: n.Name, Since: n.Since.Time,
			PeerNode: lb.PeerNode{State: n.State, Reason: lb.Reason(n.Reason), Message: n.Message}})
	}
	slices.SortFunc(p.Sessions, func(a, b lb.PeerSession) int { return strings.Compare(a.Node, b.Node) })
	return o.Name, p
}

// BGPAdvertisements watches the BGPAdvertisements. status is called in place of changed where only
// the conditions differ.
func BGPAdvertisements(c *Client, changed, status func(name string)) *Table[string, lb.BGPAdvertisement] {
	table := newStatusTable(func(a lb.BGPAdvertisement) lb.BGPAdvertisement {
		a.Conditions = nil
		return a
	}, changed, status)
	c.register(resource{client: c.landfall, name: "bgpadvertisements", example: &v1beta1.BGPAdvertisement{}},
		objects[string, lb.BGPAdvertisement, *v1beta1.BGPAdvertisement]{table, convertBGPAdvertisement})
	return table
}

// BFDProfiles watches the BFDProfiles.
func BFDProfiles(c *Client, changed func(name string)) *Table[string, lb.BFDProfile] {
	table := newTable[string, lb.BFDProfile](nil, changed)
	c.register(resource{client: c.landfall, name: "bfdprofiles", example: &v1beta1.BFDProfile{}},
		objects[string, lb.BFDProfile, *v1beta1.BFDProfile]{table, convertBFDProfile})
	return table
}

// Communities watches the Communities.
func Communities(c *Client, changed func(name string)) *Table[string, lb.CommunityNames] {
	table := newTable[string, lb.CommunityNames](nil, changed)
	c.register(resource{client: c.landfall, name: "communities", example: &v1beta1.Community{}},
		objects[string, lb.CommunityNames, *v1beta1.Community]{table, convertCommunity})
	return table
}

func convertBGPPeer(o *v1beta1.BGPPeer) (string, lb.Peer) {
	s := o.Spec
	p := lb.Peer{
		Name: o.Name, UID: string(o.UID), Created: o.CreationTimestamp.Time,
		LocalASN: uint32(s.MyASN), PeerASN: uint32(deref(s.PeerASN)), Dynamic: lb.DynamicASN(s.DynamicASN),
		Interface: s.Interface, VRF: s.VRF, Port: uint16(cmp.Or(s.PeerPort, bgpPort)),
		ConnectTime:   cmp.Or(duration(s.ConnectTime), defaultConnectTime),
		KeepaliveTime: duration(s.KeepaliveTime), Password: s.Password, BFDProfile: s.BFDProfile,
		MultiHop: s.EBGPMultiHop, GracefulRestart: s.EnableGracefulRestart, DualStack: s.DualStackAddressFamily,
		AcceptRoutes: s.AcceptRoutes,
	}
	p.NodeSelectors = convertSelectors("nodeSelectors", s.NodeSelectors, &p.BadSelector)
	if s.LocalASN != nil {
		p.LocalASN = uint32(*s.LocalASN)
	}
	switch {
	case s.HoldTime != nil:
		p.HoldTime = s.HoldTime.Duration
	case p.KeepaliveTime > 0:
		p.HoldTime = min(3*p.KeepaliveTime, 65535*time.Second)
	default:
		p.HoldTime = defaultHoldTime
	}
	if s.PasswordSecret != nil {
		p.PasswordSecret = &lb.Key{Namespace: s.PasswordSecret.Namespace, Name: s.PasswordSecret.Name}
	}
	for _, field := range []struct {
		name, value string
		parsed      interface{ UnmarshalText([]byte) error }
	}{{"peerAddress", s.PeerAddress, &p.Addr}, {"sourceAddress", s.SourceAddress, &p.Source},
		{"routerID", s.RouterID, &p.RouterID}} {
		if field.value == "" {
			continue
		}
		if err := field.parsed.UnmarshalText([]byte(field.value)); err != nil {
			p.Problem = lb.Refuse(lb.ReasonPeerInvalid, "spec.%s: %q is not an IP address", field.name, field.value)
		}
	}
	p.Addr, p.Source = p.Addr.Unmap(), p.Source.Unmap()
	if what := noHost(p.Addr); what != "" {
		p.Problem = lb.Refuse(lb.ReasonPeerInvalid, "spec.peerAddress: %s is %s; it must be an address of the router", p.Addr,
			what)
	}
	for _, n := range o.Status.Nodes {
		if p.Status == nil {
			p.Status = map[string]lb.PeerNode{}
		}
		p.Status[n.Name] = lb.PeerNode{State: n.State, Reason: lb.Reason(n.Reason), Message: n.Message}
	}
	return p.Name, p
}

// noHost says what an address is that no router has; "" if one may have it.
func noHost(addr netip.Addr) string {
	switch {
	case !addr.IsValid():
		return ""
	case addr.IsUnspecified():
		return "the unspecified address"
	case addr.IsMulticast():
		return "a multicast address"
	case addr == netip.AddrFrom4([4]byte{255, 255, 255, 255}):
		return "the broadcast address"
	}
	return ""
}

func duration(d *metav1.Duration) time.Duration {
	if d == nil {
		return 0
	}
	return d.Duration
}

func convertBGPAdvertisement(o *v1beta1.BGPAdvertisement) (string, lb.BGPAdvertisement) {
	s := o.Spec
	a := lb.BGPAdvertisement{
		Name: o.Name, Generation: o.Generation, Created: o.CreationTimestamp.Time,
		Pools: s.IPAddressPools, Peers: s.Peers,
		AggregationLength: 32, AggregationLengthV6: 128, LocalPref: number(s.LocalPref), MED: number(s.MED),
		Prepend:    int(s.ASPathPrepend),
		Conditions: convertConditions(o.Status.Conditions, ""),
	}
	a.PoolSelectors = convertSelectors("ipAddressPoolSelectors", s.IPAddressPoolSelectors, &a.BadSelector)
	a.ServiceSelectors = convertSelectors("serviceSelectors", s.ServiceSelectors, &a.BadSelector)
	a.NodeSelectors = convertSelectors("nodeSelectors", s.NodeSelectors, &a.BadSelector)
	if s.AggregationLength != nil {
		a.AggregationLength = int(*s.AggregationLength)
	}
	if s.AggregationLengthV6 != nil {
		a.AggregationLengthV6 = int(*s.AggregationLengthV6)
	}
	for _, c := range s.Communities {
		a.Communities = append(a.Communities, string(c))
	}
	return a.Name, a
}

func number(v *int64) *uint32 {
	if v == nil {
		return nil
	}
	n := uint32(*v)
	return &n
}

func convertBFDProfile(o *v1beta1.BFDProfile) (string, lb.BFDProfile) {
	s := o.Spec
	milliseconds := func(v *int32) time.Duration {
		return time.Duration(cmp.Or(deref(v), defaultBFDInterval)) * time.Millisecond
	}
	return o.Name, lb.BFDProfile{
		Name: o.Name, Receive: milliseconds(s.ReceiveInterval), Transmit: milliseconds(s.TransmitInterval),
		Multiplier: uint8(cmp.Or(deref(s.DetectMultiplier), defaultBFDMultiplier)), Passive: s.PassiveMode,
		MinimumTTL: uint8(cmp.Or(deref(s.MinimumTTL), defaultBFDMinimumTTL)),
	}
}

func convertCommunity(o *v1beta1.Community) (string, lb.CommunityNames) {
	names := lb.CommunityNames{Name: o.Name, Values: map[string]lb.Community{}}
	for i, alias := range o.Spec.Communities {
		c, err := lb.ParseCommunity(alias.Value)
		if err != nil {
			names.Problem = lb.Refuse(lb.ReasonUnknownCommunity, "spec.communities[%d]: %v", i, err)
			continue
		}
		names.Values[alias.Name] = c
	}
	return names.Name, names
}

// PeerNode writes the status of a node's session into the status of a BGPPeer, or removes it if
// status is nil. Each node owns its entry (server-side apply), so that nodes never overwrite one
// another.
func (s *Status) PeerNode(ctx context.Context, peer, node string, status *lb.PeerNode) error {
	object := map[string]any{
		"apiVersion": v1beta1.GroupVersion.String(), "kind": "BGPPeer", "metadata": map[string]any{"name": peer},
		"status": map[string]any{},
	}
	if status != nil {
		object["status"] = v1beta1.BGPPeerStatus{Nodes: []v1beta1.BGPPeerNode{{
			Name: node, State: status.State, Since: metav1.NewTime(s.now()), Reason: string(status.Reason),
			Message: status.Message,
		}}}
	}
	body, err := json.Marshal(object)
	if err != nil {
		return fmt.Errorf("encode status of BGPPeer %s: %w", peer, err)
	}
	err = s.landfall.Patch(types.ApplyPatchType).Resource("bgppeers").Name(peer).SubResource("status").
		Param("fieldManager", peerManager(node)).Param("force", "true").Body(body).Do(ctx).Error()
	if err != nil {
		return fmt.Errorf("write status of BGPPeer %s: %w", peer, err)
	}
	return nil
}

// peerManager returns the name under which a node applies its entry. The API server takes no longer ones. The chart's
// policy for nodes has the same rule.
func peerManager(node string) string {
	const most = 128
	name := "landfall-speaker/" + node
	return name[:min(len(name), most)]
}

// DropPeerNodes removes the entries of nodes that are gone from the status of a BGPPeer. It fails
// with a conflict if other writers come in between again and again. A peer that is gone is no
// failure.
func (s *Status) DropPeerNodes(ctx context.Context, peer string, nodes []string) error {
	return retry.RetryOnConflict(retry.DefaultBackoff, func() error { return s.dropPeerNodes(ctx, peer, nodes) })
}

func (s *Status) dropPeerNodes(ctx context.Context, peer string, nodes []string) error {
	var o v1beta1.BGPPeer
	err := s.landfall.Get().Resource("bgppeers").Name(peer).Do(ctx).Into(&o)
	switch {
	case IsNotFound(err):
		return nil
	case err != nil:
		return fmt.Errorf("read BGPPeer %s: %w", peer, err)
	}
	before := len(o.Status.Nodes)
	o.Status.Nodes = slices.DeleteFunc(o.Status.Nodes,
		func(n v1beta1.BGPPeerNode) bool { return slices.Contains(nodes, n.Name) })
	if len(o.Status.Nodes) == before {
		return nil
	}
	if err := s.landfall.Put().Resource("bgppeers").Name(peer).SubResource("status").Body(&o).Do(ctx).Error(); err != nil {
		return fmt.Errorf("write status of BGPPeer %s: %w", peer, err)
	}
	return nil
}

// BGPAdvertisement writes a condition of a BGPAdvertisement, unless have shows it already, and
// reports whether it wrote. Conditions of other types are kept. It fails with a conflict if another
// writer comes in between.
func (s *Status) BGPAdvertisement(ctx context.Context, have lb.BGPAdvertisement,
	c lb.Condition) (wrote bool, err error) {
	var o v1beta1.BGPAdvertisement
	return s.condition(ctx, target{"BGPAdvertisement", "bgpadvertisements", have.Name, &o, &o.Status.Conditions},
		have.Conditions, c)
}

// L2Advertisement is BGPAdvertisement for an L2Advertisement.
func (s *Status) L2Advertisement(ctx context.Context, have lb.L2Advertisement,
	c lb.Condition) (wrote bool, err error) {
	var o v1beta1.L2Advertisement
	return s.condition(ctx, target{"L2Advertisement", "l2advertisements", have.Name, &o, &o.Status.Conditions},
		have.Conditions, c)
}

// target is an object whose conditions are written, and where it is read into.
type target struct {
	kind, resource, name string
	object               runtime.Object
	conditions           *[]metav1.Condition
}

func (s *Status) condition(ctx context.Context, at target, have []lb.Condition, c lb.Condition) (
	wrote bool, err error) {
	if hasCondition(have, c) {
		return false, nil
	}
	if err := s.landfall.Get().Resource(at.resource).Name(at.name).Do(ctx).Into(at.object); err != nil {
		return false, fmt.Errorf("read %s %s: %w", at.kind, at.name, err)
	}
	meta.SetStatusCondition(at.conditions, metav1.Condition{
		Type: c.Type, Status: conditionStatus(c.Status), Reason: string(c.Reason), Message: c.Message,
		ObservedGeneration: c.Generation, LastTransitionTime: metav1.NewTime(s.now()),
	})
	put := s.landfall.Put().Resource(at.resource).Name(at.name).SubResource("status").Body(at.object)
	if err := put.Do(ctx).Error(); err != nil {
		return false, fmt.Errorf("write status of %s %s: %w", at.kind, at.name, err)
	}
	return true, nil
}
