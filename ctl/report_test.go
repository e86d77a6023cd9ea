package main

import (
	"bytes"
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/landfall-lb/landfall/internal/lb"
)

func pool(name, addresses string, ready lb.Condition) lb.Pool {
	r, err := lb.ParseRange(addresses)
	if err != nil {
		panic(err)
	}
	return lb.Pool{Name: name, Ranges: []lb.Range{r},
		Status: lb.PoolStatus{AssignedIPv4: "1", AvailableIPv4: "19", AssignedIPv6: "0", AvailableIPv6: "0",
			Conditions: []lb.Condition{ready}}}
}

func service(name, vip string, conditions ...lb.Condition) lb.Service {
	s := lb.Service{Key: lb.Key{Namespace: "default", Name: name}, Type: lb.LoadBalancer, ExternalPolicy: lb.Cluster,
		Conditions: conditions}
	if vip != "" {
		s.Ingress = []lb.Ingress{{Addr: netip.MustParseAddr(vip)}}
	}
	return s
}

var (
	ready    = lb.Condition{Type: lb.ConditionReady, Status: true, Reason: lb.ReasonPoolReady}
	assigned = lb.Condition{Type: lb.ConditionAssigned, Status: true, Reason: lb.ReasonAssigned}

	announced = lb.Condition{Type: lb.ConditionAnnounced, Status: true, Reason: lb.ReasonAnnounced}
)

// byOwner says that a node answers.
var byOwner = lb.Announcement{Reason: lb.ReasonParting, Owner: "k8s-worker-178", Protocol: "ARP"}

// announcedBy has the Service say so, for its only address.
func announcedBy(s lb.Service, a lb.Announcement) lb.Service {
	a.VIP = s.Ingress[0].Addr
	s.Announcements = lb.EncodeAnnouncements([]lb.Announcement{a})
	return s
}

// nonsense has a tenant write into the annotation.
func nonsense(s lb.Service) lb.Service {
	s.Announcements = "k8s-worker-666"
	return s
}

func worldOf(services []lb.Service, pools ...lb.Pool) world {
	w := world{services: map[lb.Key]lb.Service{}, pools: map[string]lb.Pool{},
		advertisements: map[string]lb.L2Advertisement{
			"lan": {Name: "lan", Pools: []string{"vmware"}},
		}}
	for _, s := range services {
		w.services[s.Key] = s
	}
	for _, p := range pools {
		w.pools[p.Name] = p
	}
	return w
}

func TestReport(t *testing.T) {
	vmware := pool("vmware", "172.26.236.180-172.26.236.199", ready)
	for _, test := range []struct {
		name string
		w    world
		want string
	}{
		{
			name: "all is well",
			w: worldOf([]lb.Service{
				announcedBy(service("my-nginx", "172.26.236.180", assigned, announced), lb.Announcement{
					Reason: lb.ReasonAnnounced, Owner: "k8s-worker-178", Protocol: "ARP", Interfaces: []string{"eth0"}}),
				{Key: lb.Key{Namespace: "default", Name: "kubernetes"}, Type: lb.ClusterIP},
			}, vmware),
			want: `POOL    ADDRESSES                      ASSIGNED  FREE  READY  ADVERTISED BY
vmware  172.26.236.180-172.26.236.199  1         19    yes    lan

VIP             SERVICE           POLICY   OWNER
172.26.236.180  default/my-nginx  Cluster  k8s-worker-178 (ARP on eth0)

Nothing is wrong.
`,
		},
		{
			name: "routers",
			w: func() world {
				w := worldOf([]lb.Service{
					announcedBy(service("my-nginx", "172.26.236.180", assigned, announced), lb.Announcement{
						Reason: lb.ReasonAnnounced, Owner: "k8s-worker-178", Protocol: "ARP", Interfaces: []string{"eth0"},
						Routes: []lb.RouteAnnouncement{
							{Peers: []string{"tor-1"}, Nodes: []string{"k8s-worker-177", "k8s-worker-178"}, OtherNodes: 40}},
						OtherNodes: 958}),
				}, vmware)
				w.routed = map[string]lb.BGPAdvertisement{"all": {Name: "all", Conditions: []lb.Condition{
					{Type: lb.ConditionReady, Reason: lb.ReasonUnknownPeer, Message: "there is no BGPPeer tor-9"},
				}}}
				w.peers = map[string]lb.Peer{
					"tor-1": {Name: "tor-1", Addr: netip.MustParseAddr("172.26.236.2"), Port: 179, PeerASN: 64501,
						Status: map[string]lb.PeerNode{
							"k8s-worker-177": {State: "Established"}, "k8s-worker-178": {State: "Established", Message: "BFD is Up"},
							"k8s-worker-179": {State: "Idle", Reason: lb.ReasonNotEstablished, Message: "connection refused"},
						}},
					"tor-2": {Name: "tor-2", Interface: "eth1", Dynamic: lb.ExternalASN},
				}
				return w
			}(),
			want: `POOL    ADDRESSES                      ASSIGNED  FREE  READY  ADVERTISED BY
vmware  172.26.236.180-172.26.236.199  1         19    yes    lan, all (BGP)

VIP             SERVICE           POLICY   OWNER
172.26.236.180  default/my-nginx  Cluster  k8s-worker-178 (ARP on eth0); k8s-worker-177, k8s-worker-178 and 40 more (BGP to tor-1); 958 more nodes (BGP)

BGP PEER  ADDRESS           ASN       SESSIONS UP
tor-1     172.26.236.2:179  64501     2 of 3
tor-2     on eth1           external  0 of 0

PROBLEMS
- BGPPeer tor-1 on k8s-worker-179 is Idle: connection refused (NotEstablished)
- BGPPeer tor-2: no speaker has reported on it yet; do its nodeSelectors select a node, and are the speakers running?
- BGPAdvertisement all: there is no BGPPeer tor-9 (UnknownPeer)
`,
		},
		{
			name: "nothing there",
			w:    worldOf(nil),
			want: `POOL  ADDRESSES  ASSIGNED  FREE  READY  ADVERTISED BY
(none)

VIP  SERVICE  POLICY  OWNER
(no Service of type LoadBalancer)

PROBLEMS
- there is no IPAddressPool, so no Service gets an address: create one
`,
		},
		{
			name: "everything wrong",
			w: worldOf([]lb.Service{
				service("nobody", "172.26.236.9", assigned,
					lb.Condition{Type: lb.ConditionAnnounced, Reason: lb.ReasonNoBackends,
						Message: "no endpoint is usable on any node"}),
				service("pending", "", lb.Condition{Type: lb.ConditionAssigned, Reason: lb.ReasonPoolExhausted,
					Message: "all pools are full"}),
				service("unseen", "172.26.236.10"),
				service("older", "172.26.236.11", assigned, announced),
				nonsense(service("tenant", "172.26.236.12", assigned, announced)),
				announcedBy(service("terminal", "172.26.236.13", assigned, announced), lb.Announcement{
					Reason: lb.ReasonAnnounced, Owner: "\x1b[2Jk8s-worker-178", Protocol: "ARP"}),
				announcedBy(service("lie", "172.26.236.14", assigned,
					lb.Condition{Type: lb.ConditionAnnounced, Reason: lb.ReasonNoBackends,
						Message: "no endpoint is usable on any node"}), byOwner),
				announcedBy(service("made-up", "172.26.236.15", assigned), byOwner),
				announcedBy(service("parting", "172.26.236.16", assigned,
					lb.Condition{Type: lb.ConditionAnnounced, Status: true, Reason: lb.ReasonParting,
						Message: "no other node can take it over"}), byOwner),
			}, vmware,
				pool("younger", "172.26.236.190/32", lb.Condition{Type: lb.ConditionReady, Reason: lb.ReasonPoolOverlaps,
					Message: "overlaps with pool vmware"})),
			want: `POOL     ADDRESSES                      ASSIGNED  FREE  READY            ADVERTISED BY
vmware   172.26.236.180-172.26.236.199  1         19    yes              lan
younger  172.26.236.190                 1         19    no: Overlapping  -

VIP            SERVICE           POLICY   OWNER
172.26.236.9   default/nobody    Cluster  none
172.26.236.10  default/unseen    Cluster  none
172.26.236.11  default/older     Cluster  none
172.26.236.12  default/tenant    Cluster  none
172.26.236.13  default/terminal  Cluster  none
172.26.236.14  default/lie       Cluster  none
172.26.236.15  default/made-up   Cluster  none
172.26.236.16  default/parting   Cluster  k8s-worker-178 (ARP)
pending        default/pending   Cluster  -

PROBLEMS
- pool younger: overlaps with pool vmware (Overlapping)
- pool younger: no L2Advertisement or BGPAdvertisement selects it, so its addresses are not announced (NoAdvertisement)
- service default/lie: no endpoint is usable on any node (NoBackends)
- service default/made-up: no speaker has reported on it yet; are the speakers running?
- service default/nobody: no endpoint is usable on any node (NoBackends)
- service default/older: its annotation landfall.dev/announcements is missing; the speaker that reports on the Service writes it, is it running, and of this version?
- service default/parting: no other node can take it over (Parting)
- service default/pending: all pools are full (PoolExhausted)
- service default/tenant: annotation landfall.dev/announcements was not written by a speaker of this version: invalid character 'k' looking for beginning of value; the speaker that reports on the Service writes it anew, is it running?
- service default/terminal: annotation landfall.dev/announcements was not written by a speaker of this version: vips[0].owner "\x1b[2Jk8s-worker-178" is not the name of a node; the speaker that reports on the Service writes it anew, is it running?
- service default/unseen: the controller has not processed it yet; is the controller running?
- service default/unseen: no speaker has reported on it yet; are the speakers running?
`,
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			var out bytes.Buffer
			if err := newReport(test.w).write(&out, ""); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(test.want, out.String()); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// TestReportHasWarningsOfNodes shows what speakers and proxies have found on their nodes.
func TestReportHasWarningsOfNodes(t *testing.T) {
	r := newReport(world{warnings: []lb.Refusal{*lb.Refuse(lb.ReasonForwardingOff, "Node a: a has net.ipv4.ip_forward=0")}})
	if want := "Node a: a has net.ipv4.ip_forward=0 (ForwardingOff)"; !slices.Contains(r.problems, want) {
		t.Errorf("%q is missing: %q", want, r.problems)
	}
}
