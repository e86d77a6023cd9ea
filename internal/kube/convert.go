package kube

import (
	"bytes"
	"cmp"
	"fmt"
	"math"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"time"
	"unique"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/landfall-lb/landfall/api/v1beta1"
	"github.com/landfall-lb/landfall/internal/lb"
)

// The API server validates what it stores, so what cannot be parsed here comes from an older
// server's laxer rules and is left out.

// Taints of a node that is about to go: set by the cluster autoscaler, and by an administrator for
// a node that has failed.
const (
	taintAutoscaler   = "ToBeDeletedByClusterAutoscaler"
	taintOutOfService = corev1.TaintNodeOutOfService
)

// keyOf returns the key of a namespaced object.
func keyOf(o metav1.Object) lb.Key {
	return lb.Key{Namespace: common(o.GetNamespace()), Name: o.GetName()}
}

// common returns the one copy of a string that many objects have.
func common[S ~string](s S) S { return S(unique.Make(string(s)).Value()) }

func sameService(a, b lb.Service) bool {
	a.Version, b.Version = "", ""
	return reflect.DeepEqual(a, b)
}

// convertService fills what every program reads of a Service.
func convertService(o *corev1.Service) (lb.Key, lb.Service) {
	s := lb.Service{
		Key:            keyOf(o),
		UID:            string(o.UID),
		Version:        o.ResourceVersion,
		Created:        o.CreationTimestamp.Time,
		Type:           lb.ServiceType(common(o.Spec.Type)),
		Class:          common(deref(o.Spec.LoadBalancerClass)),
		ClusterIPs:     parseAddrs(o.Spec.ClusterIPs),
		ExternalIPs:    parseAddrs(o.Spec.ExternalIPs[:min(len(o.Spec.ExternalIPs), maxKeptExternalIPs)]),
		ExternalPolicy: cmp.Or(lb.TrafficPolicy(common(o.Spec.ExternalTrafficPolicy)), lb.Cluster),
	}
	s.Unkept.Ports = max(0, len(o.Spec.Ports)-maxKeptPorts)
	s.Unkept.ExternalIPs = max(0, len(o.Spec.ExternalIPs)-maxKeptExternalIPs)
	for _, p := range o.Spec.Ports[:len(o.Spec.Ports)-s.Unkept.Ports] {
		s.Ports = append(s.Ports, lb.ServicePort{
			Name: common(p.Name), Protocol: cmp.Or(lb.Protocol(common(p.Protocol)), lb.TCP), Port: uint16(p.Port),
			NodePort: uint16(p.NodePort),
		})
	}
	for _, in := range o.Status.LoadBalancer.Ingress {
		if addr, err := lb.ParseAddr(in.IP); err == nil {
			s.Ingress = append(s.Ingress, lb.Ingress{Addr: addr, Mode: lb.IPMode(common(deref(in.IPMode)))})
		} else {
			s.Hostnames++
		}
	}
	if len(s.Ingress) > lb.MaxAddresses {
		s.Ingress, s.Unread = lb.ReadIngress(s.Ingress, convertConditions(o.Status.Conditions, lb.ConditionAssigned))
	}
	return s.Key, s
}

// convertForwardedService also fills what proxies read.
func convertForwardedService(o *corev1.Service) (lb.Key, lb.Service) {
	key, s := convertService(o)
	var assigned lb.Condition
	for _, c := range convertConditions(o.Status.Conditions, lb.ConditionAssigned) {
		assigned = c
	}
	s.Intruding = lb.Intrudes(assigned, s.Ports, s.Ingress)
	s.Listed, s.AsRequested = listed(o), asRequested(o)
	s.InternalPolicy = cmp.Or(lb.TrafficPolicy(common(deref(o.Spec.InternalTrafficPolicy))), lb.Cluster)
	ranges := keptRanges(o.Spec.LoadBalancerSourceRanges)
	s.Unkept.SourceRanges = len(o.Spec.LoadBalancerSourceRanges) - len(ranges)
	s.SourceRanges, s.InvalidRange = sourceRanges(ranges)
	s.HealthCheckNodePort = uint16(o.Spec.HealthCheckNodePort)
	annotation := func(name string) string { return kept(strings.TrimSpace(o.Annotations[name])) }
	s.Scheduler, s.Failover = annotation(lb.AnnotationScheduler), annotation(lb.AnnotationFailover)
	s.Relay, s.RelayProxyProtocol = annotation(lb.AnnotationRelay), annotation(lb.AnnotationRelayProxyProtocol)
	s.Forwarding = annotation(lb.AnnotationForwarding)
	if selector := labels.Set(o.Spec.Selector).String(); len(selector) <= maxKept {
		s.Selector = selector
	}
	var err error
	if s.Weights, err = lb.ParseWeights(o.Annotations[lb.AnnotationWeights]); err != nil {
		s.InvalidWeights = err.Error()
	}
	fillProbe(&s, o)
	if o.Spec.SessionAffinity == corev1.ServiceAffinityClientIP {
		seconds := int32(corev1.DefaultClientIPServiceAffinitySeconds)
		if c := o.Spec.SessionAffinityConfig; c != nil && c.ClientIP != nil && c.ClientIP.TimeoutSeconds != nil {
			seconds = *c.ClientIP.TimeoutSeconds
		}
		s.AffinityTimeout = time.Duration(seconds) * time.Second
	}
	return key, s
}

// convertLabelledService also fills what speakers read.
func convertLabelledService(o *corev1.Service) (lb.Key, lb.Service) {
	key, s := convertService(o)
	s.OnConflict = kept(o.Annotations[lb.AnnotationOnConflict])
	fillProbe(&s, o)
	fillShown(&s, o)
	return key, s
}

// fillProbe fills what proxies and speakers read: how to ask the backends.
func fillProbe(s *lb.Service, o *corev1.Service) {
	var err error
	if s.Probe, err = lb.ParseProbe(o.Annotations[lb.AnnotationProbe]); err != nil {
		s.InvalidProbe = err.Error()
	}
}

// convertRequestingService also fills what only the assignment of addresses needs. With metallb,
// MetalLB's annotations count where Landfall's own are not set.
func convertRequestingService(o *corev1.Service, metallb bool) (lb.Key, lb.Service) {
	key, s := convertService(o)
	fillShown(&s, o)
	s.Listed, s.AsRequested = listed(o), asRequested(o)
	for _, family := range o.Spec.IPFamilies {
		s.Families = append(s.Families, lb.Family(common(family)))
	}
	if policy := o.Spec.IPFamilyPolicy; policy != nil {
		s.FamilyPolicy = lb.FamilyPolicy(common(*policy))
	}
	of := requestsOf(o, metallb)
	addresses, pool, share := of.addresses(o.Spec.LoadBalancerIP), of.annotation(lb.AnnotationPool),
		of.annotation(lb.AnnotationShare)
	s.Request = lb.Request{
		Addresses: splitAddresses(addresses), Pool: kept(pool),
		Share:     common(keptKey(share)), // compared with those of all sharers
		PerFamily: kept(o.Annotations[lb.AnnotationPerFamily]), Mode: kept(o.Annotations[lb.AnnotationMode]),
		WhenOutside: kept(o.Annotations[lb.AnnotationWhenOutside]), Disagreement: of.disagreement,
	}
	for _, name := range []string{lb.AnnotationAllocatedFrom, lb.AnnotationAllocatedFromOld} {
		if pool, ok := o.Annotations[name]; ok {
			if s.AllocatedFrom == nil {
				s.AllocatedFrom = map[string]string{}
			}
			s.AllocatedFrom[name] = kept(pool)
		}
	}
	if s.Request.Share != "" {
		s.Request.Selector = common(keptKey(labels.Set(o.Spec.Selector).String()))
	}
	if len(s.Ingress)+s.Hostnames > 0 {
		s.StatusWriter = statusWriter(o.ManagedFields)
	}
	for _, c := range o.Status.Conditions {
		if strings.HasPrefix(c.Type, lb.DriverName+"/") && c.Status != metav1.ConditionTrue {
			if s.FalseSince == nil {
				s.FalseSince = map[string]time.Time{}
			}
			s.FalseSince[c.Type] = c.LastTransitionTime.Time
		}
	}
	return key, s
}

// controllerManager is the name by which the API server knows Landfall's controller.
const controllerManager = "landfall-controller"

// statusWriter returns which other program last wrote addresses into a Service's status.
func statusWriter(managed []metav1.ManagedFieldsEntry) (name string) {
	var at metav1.Time
	for _, m := range managed {
		wrote := m.Subresource == "status" && m.FieldsV1 != nil && bytes.Contains(m.FieldsV1.Raw, []byte(`"f:loadBalancer"`))
		if wrote && m.Manager != controllerManager && (name == "" || m.Time != nil && at.Before(m.Time)) {
			name = m.Manager
			if m.Time != nil {
				at = *m.Time
			}
		}
	}
	return name
}

func convertNamespace(o *corev1.Namespace) (string, lb.Namespace) {
	return o.Name, lb.Namespace{Name: o.Name, Labels: o.Labels}
}

// fillShown fills what controller and speakers read: labels, and what Landfall has written to the
// Service.
func fillShown(s *lb.Service, o *corev1.Service) {
	s.Deleting, s.Labels = o.DeletionTimestamp != nil, keptLabels(o.Labels)
	s.Finalizer = slices.Contains(o.Finalizers, lb.FinalizerCleanup)
	_, s.Headless = o.Labels[lb.LabelHeadless]
	s.Conditions = slices.DeleteFunc(convertConditions(o.Status.Conditions, lb.DriverName+"/"),
		func(c lb.Condition) bool {
			return c.Type == lb.ConditionExternalIPs || c.Type == lb.ConditionAsRequested
		})
	s.Announcements = lb.KeptAnnouncements(s.Type, o.Annotations[lb.AnnotationAnnouncements])
}

// listed returns since when a Service lists its external IPs, as the controller wrote it.
func listed(o *corev1.Service) lb.Listing {
	for _, c := range o.Status.Conditions {
		if c.Type == lb.ConditionExternalIPs {
			return lb.ParseListing(c.Message)
		}
	}
	return nil
}

// asRequested returns lb.ConditionAsRequested of a Service; zero without it.
func asRequested(o *corev1.Service) lb.Condition {
	for _, c := range convertConditions(o.Status.Conditions, lb.ConditionAsRequested) {
		return c
	}
	return lb.Condition{}
}

func convertConditions(conditions []metav1.Condition, prefix string) []lb.Condition {
	var converted []lb.Condition
	for _, c := range conditions {
		if strings.HasPrefix(c.Type, prefix) {
			converted = append(converted, lb.Condition{
				Type: c.Type, Status: c.Status == metav1.ConditionTrue, Reason: lb.Reason(c.Reason), Message: c.Message,
				Generation: c.ObservedGeneration,
			})
		}
	}
	return converted
}

// maxNodeAddresses is how many addresses of each type count of one node. A kubelet writes its own: one that was taken
// over shall neither keep pools from being assigned nor have all speakers probe whole networks.
const maxNodeAddresses = 32

func convertNode(o *corev1.Node) (string, lb.Node) {
	n := lb.Node{Name: o.Name, Labels: o.Labels, PodCIDRs: parsePrefixes(o.Spec.PodCIDRs)}
	for _, a := range o.Status.Addresses {
		switch {
		case a.Type == corev1.NodeInternalIP && len(n.Addresses) < maxNodeAddresses:
			n.Addresses = append(n.Addresses, parseAddrs([]string{a.Address})...)
		case a.Type == corev1.NodeExternalIP && len(n.ExternalAddresses) < maxNodeAddresses:
			n.ExternalAddresses = append(n.ExternalAddresses, parseAddrs([]string{a.Address})...)
		}
	}
	if _, drained := o.Labels[lb.LabelDrain]; drained {
		n.Leaving = lb.ReasonNodeDrained
	}
	if o.DeletionTimestamp != nil {
		n.Leaving = lb.ReasonNodeLeaving
	}
	for _, taint := range o.Spec.Taints {
		if taint.Key == taintAutoscaler || taint.Key == taintOutOfService {
			n.Leaving = lb.ReasonNodeLeaving
		}
	}
	n.Cordoned = o.Spec.Unschedulable
	for _, c := range o.Status.Conditions {
		switch c.Type {
		case corev1.NodeNetworkUnavailable:
			n.NetworkUnavailable = c.Status == corev1.ConditionTrue
		case corev1.NodeReady:
			n.NotReady = c.Status != corev1.ConditionTrue
		}
	}
	return n.Name, n
}

func convertSlice(o *discoveryv1.EndpointSlice) lb.Slice {
	s := lb.Slice{
		Key:     keyOf(o),
		Service: lb.Key{Namespace: o.Namespace, Name: o.Labels[discoveryv1.LabelServiceName]},
		Family:  lb.Family(common(o.AddressType)),
	}
	if at, err := time.Parse(time.RFC3339Nano, o.Annotations[corev1.EndpointsLastChangeTriggerTime]); err == nil {
		s.Triggered = at
	}
	if text, set := o.Annotations[lb.AnnotationWeight]; set {
		var err error
		if s.Weight, err = lb.ParseWeight(text); err != nil {
			s.InvalidWeight = err.Error()
		}
	}
	if o.AddressType == discoveryv1.AddressTypeFQDN {
		return s // nothing to deliver to
	}
	for _, p := range o.Ports {
		// The API server takes any number here.
		if p.Name != nil && p.Port != nil && *p.Port > 0 && *p.Port <= math.MaxUint16 {
			protocol := cmp.Or(lb.Protocol(common(deref(p.Protocol))), lb.TCP)
			s.Ports = append(s.Ports, lb.SlicePort{Name: common(*p.Name), Protocol: protocol, Port: uint16(*p.Port)})
		}
	}
	for _, ep := range o.Endpoints {
		if len(ep.Addresses) == 0 {
			continue
		}
		addr, err := lb.ParseAddr(ep.Addresses[0]) // the others were never used by anyone (KEP-752)
		if err != nil {
			continue
		}
		endpoint := lb.Endpoint{
			Addr:        addr,
			Node:        common(deref(ep.NodeName)),
			Ready:       ep.Conditions.Ready == nil || *ep.Conditions.Ready,
			Serving:     ep.Conditions.Serving == nil || *ep.Conditions.Serving,
			Terminating: deref(ep.Conditions.Terminating),
		}
		if ref := ep.TargetRef; ref != nil && ref.Kind == "Pod" && !endpoint.Ready && !endpoint.Terminating {
			endpoint.Pod = ref.Name
		}
		if hints := ep.Hints; hints != nil {
			for _, zone := range hints.ForZones {
				endpoint.ForZones = append(endpoint.ForZones, common(zone.Name))
			}
			for _, node := range hints.ForNodes {
				endpoint.ForNodes = append(endpoint.ForNodes, common(node.Name))
			}
		}
		s.Endpoints = append(s.Endpoints, endpoint)
	}
	return s
}

func convertPool(o *v1beta1.IPAddressPool) (string, lb.Pool) {
	name, p := convertPoolSpec(o)
	p.Version = o.ResourceVersion
	p.Status = lb.PoolStatus{
		AssignedIPv4: o.Status.AssignedIPv4, AssignedIPv6: o.Status.AssignedIPv6,
		AvailableIPv4: o.Status.AvailableIPv4, AvailableIPv6: o.Status.AvailableIPv6,
		QuarantinedIPv4: o.Status.QuarantinedIPv4, QuarantinedIPv6: o.Status.QuarantinedIPv6,
		Released:   convertReleased(o.Status.Released),
		Pending:    convertPending(o.Status.Claims),
		Writer:     o.Status.Writer,
		Next:       convertNext(o.Status.Next),
		Conditions: convertConditions(o.Status.Conditions, ""),
	}
	for _, c := range o.Status.Conditions {
		if p.Since == nil {
			p.Since = map[string]time.Time{}
		}
		p.Since[c.Type] = c.LastTransitionTime.Time
	}
	return name, p
}

// convertAnnouncedPool converts what a node that announces has to know of a pool. The rest changes with each
// assignment.
func convertAnnouncedPool(o *v1beta1.IPAddressPool) (string, lb.Pool) {
	name, p := convertPoolSpec(o)
	p.Status.Next = convertNext(o.Status.Next)
	return name, p
}

func convertPoolSpec(o *v1beta1.IPAddressPool) (string, lb.Pool) {
	p := lb.Pool{
		Name: o.Name, UID: string(o.UID), Created: o.CreationTimestamp.Time, Generation: o.Generation, Labels: o.Labels,
		AutoAssign: o.Spec.AutoAssign == nil || *o.Spec.AutoAssign, AvoidBuggy: o.Spec.AvoidBuggyIPs,
		PerNamespace: int(o.Spec.AddressesPerNamespace), ShareAcross: o.Spec.Sharing == "cluster",
		ProbeAhead: defaultProbeAhead,
	}
	if o.Spec.ProbeAhead != nil {
		p.ProbeAhead = int(*o.Spec.ProbeAhead)
	}
	parse := func(field string, written v1beta1.AddressRange) (lb.Range, bool) {
		r, err := lb.ParseRange(string(written))
		if err != nil {
			p.Problem = lb.Refuse(lb.ReasonPoolInvalid, "spec.%s: %v", field, err)
		}
		return r, err == nil
	}
	for i, written := range o.Spec.Addresses {
		if r, ok := parse(fmt.Sprintf("addresses[%d]", i), written); ok {
			p.Ranges = append(p.Ranges, r)
		}
	}
	for i, written := range o.Spec.ExcludedAddresses {
		if r, ok := parse(fmt.Sprintf("excludedAddresses[%d]", i), written); ok {
			p.Excluded = append(p.Excluded, r)
		}
	}
	for i, reserved := range o.Spec.Reservations {
		if r, ok := parse(fmt.Sprintf("reservations[%d].addresses", i), reserved.Addresses); ok {
			p.Reservations = append(p.Reservations, lb.Reservation{Range: r, Namespace: reserved.Namespace, Name: reserved.Name})
		}
	}
	if a := o.Spec.ServiceAllocation; a != nil {
		p.Allocation = &lb.Allocation{
			Priority: int(a.Priority), Namespaces: a.Namespaces,
			NamespaceSelectors: convertSelectors("serviceAllocation.namespaceSelectors", a.NamespaceSelectors, &p.BadSelector),
			ServiceSelectors:   convertSelectors("serviceAllocation.serviceSelectors", a.ServiceSelectors, &p.BadSelector),
		}
	}
	var err error
	if p.Quarantine, err = parseQuarantine(o.Spec.Quarantine); err != nil {
		p.Problem = lb.Refuse(lb.ReasonPoolInvalid, "spec.quarantine: %v", err)
	}
	return p.Name, p
}

// What the API server fills in, and holds for objects that were stored before it did.
const (
	defaultQuarantine = time.Minute
	defaultProbeAhead = 16
)

func parseQuarantine(written string) (time.Duration, error) {
	switch written {
	case "":
		return defaultQuarantine, nil
	case "forever":
		return -1, nil
	}
	d, err := time.ParseDuration(written)
	if d < 0 {
		return 0, fmt.Errorf("%q is negative", written)
	}
	return d, err
}

func convertReleased(released []v1beta1.ReleasedAddress) []lb.Released {
	var converted []lb.Released
	for _, r := range released {
		if addr, err := lb.ParseAddr(r.Address); err == nil {
			converted = append(converted, lb.Released{Addr: addr, Service: lb.Key{Namespace: r.Namespace, Name: r.Name},
				At: r.At.UTC()})
		}
	}
	return converted
}

func convertNext(next []string) []lb.Range {
	var converted []lb.Range
	for _, written := range next {
		if r, err := lb.ParseRange(written); err == nil {
			converted = append(converted, r)
		}
	}
	return converted
}

func convertPending(claims []v1beta1.AddressClaim) []lb.PendingReservation {
	var converted []lb.PendingReservation
	for _, c := range claims {
		converted = append(converted, lb.PendingReservation{
			Service: lb.Key{Namespace: c.Namespace, Name: c.Name}, UID: c.UID, Version: c.ResourceVersion,
			Addresses: parseAddrs(c.Addresses),
		})
	}
	return converted
}

func convertL2Advertisement(o *v1beta1.L2Advertisement) (string, lb.L2Advertisement) {
	ad := lb.L2Advertisement{
		Name:       o.Name,
		Generation: o.Generation,
		Conditions: convertConditions(o.Status.Conditions, ""),
		Pools:      o.Spec.IPAddressPools,
		Interfaces: o.Spec.Interfaces,
	}
	ad.PoolSelectors = convertSelectors("ipAddressPoolSelectors", o.Spec.IPAddressPoolSelectors, &ad.BadSelector)
	ad.ServiceSelectors = convertSelectors("serviceSelectors", o.Spec.ServiceSelectors, &ad.BadSelector)
	ad.NodeSelectors = convertSelectors("nodeSelectors", o.Spec.NodeSelectors, &ad.BadSelector)
	for i, p := range o.Spec.PreferredNodes {
		selector := convertSelector(fmt.Sprintf("preferredNodes[%d].nodeSelector", i), p.NodeSelector, &ad.BadSelector)
		ad.Preferred = append(ad.Preferred, lb.Preference{Weight: uint16(p.Weight), Nodes: selector})
	}
	return o.Name, ad
}

// convertSelectors keeps the number of selectors of a field: one that cannot be read selects nothing, where
// leaving it out could select everything. bad gets the reason, unless it has one.
func convertSelectors(field string, selectors []metav1.LabelSelector, bad **lb.Refusal) []labels.Selector {
	var converted []labels.Selector
	for i, s := range selectors {
		converted = append(converted, convertSelector(fmt.Sprintf("%s[%d]", field, i), s, bad))
	}
	return converted
}

func convertSelector(field string, s metav1.LabelSelector, bad **lb.Refusal) labels.Selector {
	selector, err := metav1.LabelSelectorAsSelector(&s)
	if err == nil {
		return selector
	}
	if *bad == nil {
		const most = 160
		*bad = lb.Refuse(lb.ReasonSelectorInvalid, "spec.%s selects nothing: %.*s; "+
			"operators are In and NotIn with values, Exists and DoesNotExist without", field, most, err)
	}
	return labels.Nothing()
}

func parseAddrs(list []string) []netip.Addr {
	var addrs []netip.Addr
	for _, s := range list {
		if addr, err := lb.ParseAddr(s); err == nil { // also leaves out "None"
			addrs = append(addrs, addr)
		}
	}
	return addrs
}

func parsePrefixes(list []string) []netip.Prefix {
	var prefixes []netip.Prefix
	for _, s := range list {
		if prefix, err := netip.ParsePrefix(strings.TrimSpace(s)); err == nil {
			prefixes = append(prefixes, prefix.Masked())
		}
	}
	return prefixes
}

// sourceRanges reads who may connect, and returns the first range that cannot be read; "" if all
// can. Such a range admits nobody, where leaving it out could admit everybody. An IPv4 network in the
// form of an IPv6 one (::ffff:10.0.0.0/104) is such a range: it would be of neither family.
func sourceRanges(list []string) (ranges []netip.Prefix, invalid string) {
	for _, s := range list {
		prefix, err := netip.ParsePrefix(strings.TrimSpace(s))
		switch {
		case err == nil && !prefix.Addr().Is4In6():
			ranges = append(ranges, prefix.Masked())
		case invalid == "":
			invalid = fmt.Sprintf("%.80q", s)
		}
	}
	if invalid == "" {
		return ranges, ""
	}
	for _, nobody := range []netip.Addr{netip.IPv4Unspecified(), netip.IPv6Unspecified()} {
		ranges = append(ranges, netip.PrefixFrom(nobody, nobody.BitLen()))
	}
	return ranges, invalid
}

// deref returns what p points at, or the zero value.
func deref[T any](p *T) T {
	if p == nil {
		var zero T
		return zero
	}
	return *p
}
