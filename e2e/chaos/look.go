package chaos

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"syscall"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/landfall-lb/landfall/e2e/chaos/contract"
	"github.com/landfall-lb/landfall/e2e/lab"
	"github.com/landfall-lb/landfall/internal/lb"
)

// speakerView is what is read of a speaker's status.
type speakerView struct {
	Members struct {
		Live []string `json:"live"`
	} `json:"members"`
	VIPs []struct {
		VIP       netip.Addr `json:"vip"`
		Answering []string   `json:"answering"`
	} `json:"vips"`
}

func (v speakerView) answering() []netip.Addr {
	var all []netip.Addr
	for _, vip := range v.VIPs {
		if len(vip.Answering) > 0 {
			all = append(all, vip.VIP)
		}
	}
	return all
}

func (r *runner) view(ctx context.Context, node string) (v speakerView, err error) {
	text, err := r.lab.Agent("speaker", node).Get(ctx, "/v1/status")
	if err == nil {
		err = json.Unmarshal([]byte(text), &v)
	}
	return v, err
}

// look takes a snapshot: the API server's objects, each speaker's status, answers on the LAN, the router's routes, and
// a request to each address.
func (r *runner) look(ctx context.Context) contract.Snapshot {
	s := contract.Snapshot{At: r.now(), Nodes: r.cast.Nodes, Expected: r.expected, Members: map[string][]string{},
		Answering: map[netip.Addr][]string{}, Asked: map[contract.Port]string{}}
	cannot := func(what string, err error) bool {
		if err != nil {
			s.Unknown = append(s.Unknown, fmt.Sprintf("%s: %v", what, err))
		}
		return err != nil
	}
	for _, node := range r.cast.Nodes {
		v, err := r.view(ctx, node)
		if cannot("speaker of "+node, err) {
			continue
		}
		s.Members[node] = v.Members.Live
		for _, a := range v.answering() {
			s.Answering[a] = append(s.Answering[a], node)
		}
	}
	services, err := r.readServices(ctx)
	if cannot("the API server", err) {
		return s
	}
	s.Services = services
	s.Heard, err = r.hear(poolAddresses(), slices.Collect(maps.Keys(s.Answering)))
	cannot("the LAN", err)
	s.Routed, err = r.routes(ctx)
	cannot("the router", err)
	r.askAll(ctx, &s)
	if len(contract.Unsettled(s)) == 0 {
		r.lookInside(ctx, &s)
	}
	return s
}

// hear returns the nodes that answer for addresses on the LAN. It waits for answers for those that are expected.
func (r *runner) hear(addrs, expected []netip.Addr) (map[netip.Addr][]string, error) {
	macs, err := r.wire.heard(addrs, expected)
	nodes := map[netip.Addr][]string{}
	for a, of := range macs {
		for _, mac := range of {
			nodes[a] = append(nodes[a], r.nodeOf(mac))
		}
		slices.Sort(nodes[a])
	}
	return nodes, err
}

func (r *runner) nodeOf(mac string) string {
	if node, known := r.macs[mac]; known {
		return node
	}
	return "?" + mac
}

// poolAddresses returns the addresses on the LAN that Services may get.
func poolAddresses() []netip.Addr {
	var all []netip.Addr
	for _, span := range []string{lanPool, lanMore, lanPool6} {
		first, last, _ := strings.Cut(span, "-")
		for a := netip.MustParseAddr(first); a.Compare(netip.MustParseAddr(last)) <= 0; a = a.Next() {
			all = append(all, a)
		}
	}
	return all
}

// readServices reads the Services of the run, with their ready pods.
func (r *runner) readServices(ctx context.Context) ([]contract.Service, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	all, err := r.listServices(ctx)
	if err != nil {
		return nil, err
	}
	slicesOf, err := r.lab.Kube().DiscoveryV1().EndpointSlices(namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	for i, s := range all {
		for _, slice := range slicesOf.Items {
			if slice.Labels[discoveryv1.LabelServiceName] != s.Name {
				continue
			}
			for _, e := range slice.Endpoints {
				if a, err := netip.ParseAddr(e.Addresses[0]); err == nil {
					all[i].Endpoints = append(all[i].Endpoints, a)
				}
				ready := e.Conditions.Ready != nil && *e.Conditions.Ready && e.NodeName != nil
				if ready && slice.AddressType == discoveryv1.AddressTypeIPv4 {
					s.Ready[*e.NodeName]++
				}
			}
		}
		if s.HealthPort == 0 {
			continue
		}
		all[i].Health = map[string]int{}
		for _, n := range workers(r.lab.Cluster()) {
			all[i].Health[n.Name] = r.health(ctx, n, s)
		}
	}
	return all, nil
}

// health returns what the health port of a Service says on a node; 0 without an answer.
func (r *runner) health(ctx context.Context, n lab.Node, s contract.Service) int {
	code, _, _ := r.lab.Get(ctx, lab.ClientName,
		fmt.Sprintf("http://%s/healthz", netip.AddrPortFrom(n.Addr, s.HealthPort)))
	return code
}

// listServices reads them without what else is known of them.
func (r *runner) listServices(ctx context.Context) ([]contract.Service, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	list, err := r.lab.Kube().CoreV1().Services(namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	var all []contract.Service
	for _, object := range list.Items {
		all = append(all, toService(object))
	}
	return all, nil
}

// toService reads what the API server shows of one Service.
func toService(object corev1.Service) contract.Service {
	s := contract.Service{Name: object.Name, App: object.Spec.Selector["run"],
		Share:      object.Annotations[lb.AnnotationShare],
		Local:      object.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal,
		BGP:        object.Annotations[lb.AnnotationPool] == "routed",
		HealthPort: uint16(object.Spec.HealthCheckNodePort),
		Ready:      map[string]int{}, Owners: map[netip.Addr]string{}}
	for _, p := range object.Spec.Ports {
		switch p.Protocol {
		case corev1.ProtocolTCP:
			s.TCP = uint16(p.Port)
		case corev1.ProtocolUDP:
			s.UDP = uint16(p.Port)
		}
	}
	for _, ingress := range object.Status.LoadBalancer.Ingress {
		if a, err := netip.ParseAddr(ingress.IP); err == nil {
			s.Addresses = append(s.Addresses, a)
		}
	}
	if c := meta.FindStatusCondition(object.Status.Conditions, lb.ConditionAnnounced); c != nil {
		s.Announced, s.Reason, s.Message = c.Status == metav1.ConditionTrue, c.Reason, c.Message
	}
	if told, err := lb.DecodeAnnouncements(object.Annotations[lb.AnnotationAnnouncements]); err == nil {
		for _, a := range told {
			s.Owners[a.VIP] = a.Owner
		}
	}
	return s
}

// askAll sends a request to each port at each address. What has no pods is asked from a node, and over UDP from a pod
// there: a node's own programs are told nothing but that they may not send, as if the packet were dropped.
func (r *runner) askAll(ctx context.Context, s *contract.Snapshot) {
	var mu sync.Mutex
	var g lab.Group
	pods := map[string]string{} // one on each node
	for _, p := range r.lab.Pods(churnApp) {
		pods[p.Node] = p.Name
	}
	for _, svc := range s.Services {
		for i, a := range svc.Addresses {
			for _, p := range svc.Ports(a) {
				from, node := lab.ClientName, r.cast.Nodes[i%len(r.cast.Nodes)]
				switch {
				case !svc.HasReady() && p.Network == "udp":
					from = pods[node]
				case !svc.HasReady():
					from = node
				case svc.BGP:
					from = lab.FarClientName
				}
				g.Run(func() error {
					_, err := r.lab.Ask(ctx, from, p.Network, p.To)
					mu.Lock()
					defer mu.Unlock()
					s.Asked[p] = ending(err)
					return nil
				})
			}
		}
	}
	_ = g.Wait() // they return no errors
}

// ending says how a request ended.
func ending(err error) string {
	switch {
	case err == nil:
		return ""
	case errors.Is(err, syscall.ECONNREFUSED):
		return contract.Refused
	default:
		return err.Error()
	}
}

// routes returns the nodes that the router's kernel leads each address of the pools to.
func (r *runner) routes(ctx context.Context) (map[netip.Addr][]string, error) {
	nodes := map[netip.Addr]string{}
	for _, n := range r.lab.Cluster().Nodes {
		nodes[n.Addr], nodes[lab.Twin(n.Addr)] = n.Name, n.Name
	}
	found := map[netip.Addr][]string{}
	for _, family := range []string{"-4", "-6"} {
		out, err := r.lab.Exec(ctx, r.lab.Routers()[0].Name, "ip", family, "-json", "route", "show", "proto", "bgp")
		if err != nil {
			return nil, err
		}
		type hop struct {
			Gateway netip.Addr `json:"gateway"`
		}
		var routes []struct {
			hop
			To       string `json:"dst"`
			NextHops []hop  `json:"nexthops"`
		}
		if err := json.Unmarshal([]byte(out), &routes); err != nil {
			return nil, fmt.Errorf("%s: %w", out, err)
		}
		for _, route := range routes {
			a, err := netip.ParseAddr(route.To)
			if err != nil {
				continue
			}
			for _, h := range append(route.NextHops, route.hop) {
				if h.Gateway.IsValid() {
					found[a] = append(found[a], nodes[h.Gateway])
				}
			}
			slices.Sort(found[a])
		}
	}
	return found, nil
}

// findMACs notes the addresses of the nodes' interfaces on the LAN.
func (r *runner) findMACs() error {
	for _, n := range r.lab.Cluster().Nodes {
		if err := r.lab.In(n.Name, func() error {
			i, err := net.InterfaceByName("eth0")
			if err == nil {
				r.macs[i.HardwareAddr.String()] = n.Name
			}
			return err
		}); err != nil {
			return err
		}
	}
	return nil
}
