package kube

import (
	"net/netip"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/fields"

	"github.com/landfall-lb/landfall/api/v1beta1"
	"github.com/landfall-lb/landfall/internal/lb"
)

// notHeadless selects what the label lb.LabelHeadless does not take down.
const notHeadless = "!" + lb.LabelHeadless

// Services watches the Services that match labelSelector (all if empty), as proxies read them:
// without those that the label lb.LabelHeadless takes down, as kube-proxy does. changed is called
// for each that differs in more than its version.
func Services(c *Client, labelSelector string, changed func(lb.Key)) *Table[lb.Key, lb.Service] {
	table := newTable(sameService, changed)
	if labelSelector != "" {
		labelSelector += ","
	}
	c.register(resource{client: c.rest.core, name: "services", example: &corev1.Service{},
		labelSelector: labelSelector + notHeadless},
		objects[lb.Key, lb.Service, *corev1.Service]{table, convertForwardedService})
	return table
}

// LabelledServices watches all Services, as speakers read them: with labels, and with what Landfall
// has written to them.
func LabelledServices(c *Client, changed func(lb.Key)) *Table[lb.Key, lb.Service] {
	table := newTable(sameService, changed)
	c.register(resource{client: c.rest.core, name: "services", example: &corev1.Service{}},
		objects[lb.Key, lb.Service, *corev1.Service]{table, convertLabelledService})
	return table
}

// RequestingServices watches all Services, as the controller reads them: with what they ask for,
// and with what Landfall has written to them. With metallb, MetalLB's annotations count where
// Landfall's own are not set.
func RequestingServices(c *Client, metallb bool, changed func(lb.Key)) *Table[lb.Key, lb.Service] {
	table := newTable(sameService, changed)
	c.register(resource{client: c.rest.core, name: "services", example: &corev1.Service{}},
		objects[lb.Key, lb.Service, *corev1.Service]{table,
			func(o *corev1.Service) (lb.Key, lb.Service) { return convertRequestingService(o, metallb) }})
	return table
}

// Namespaces watches the Namespaces.
func Namespaces(c *Client, changed func(name string)) *Table[string, lb.Namespace] {
	table := newTable[string, lb.Namespace](nil, changed)
	c.register(resource{client: c.rest.core, name: "namespaces", example: &corev1.Namespace{}},
		objects[string, lb.Namespace, *corev1.Namespace]{table, convertNamespace})
	return table
}

// Nodes watches the Node called name, or all Nodes if it is empty.
func Nodes(c *Client, name string, changed func(name string)) *Table[string, lb.Node] {
	table := newTable[string, lb.Node](nil, changed)
	r := resource{client: c.rest.core, name: "nodes", example: &corev1.Node{}}
	if name != "" {
		r.fieldSelector = fields.OneTermEqualSelector("metadata.name", name).String()
	} else {
		c.mu.Lock()
		c.nodes = table.count
		c.mu.Unlock()
	}
	c.register(r, objects[string, lb.Node, *corev1.Node]{table, convertNode})
	return table
}

// DaemonSet watches one DaemonSet. The table has it, by its name; how many of its pods are ready is
// not told as a change.
func DaemonSet(c *Client, namespace, name string, changed func(name string)) *Table[string, lb.DaemonSet] {
	table := newStatusTable(func(d lb.DaemonSet) lb.DaemonSet {
		d.Ready = 0
		return d
	}, changed, func(string) {})
	c.register(resource{
		client: c.rest.apps, name: "daemonsets", namespace: namespace, example: &appsv1.DaemonSet{},
		fieldSelector: fields.OneTermEqualSelector("metadata.name", name).String(),
	},
		objects[string, lb.DaemonSet, *appsv1.DaemonSet]{table, func(o *appsv1.DaemonSet) (string, lb.DaemonSet) {
			return o.Name, convertDaemonSet(o)
		}})
	return table
}

// ServiceNetworks watches the ServiceCIDRs (networking.k8s.io/v1, Kubernetes 1.33): the networks
// that cluster IPs are taken from, by the object's name. Where there are none, or we may not see
// them, the table is empty.
func ServiceNetworks(c *Client, changed func(name string)) *Table[string, []netip.Prefix] {
	table := newTable[string, []netip.Prefix](nil, changed)
	c.register(resource{client: c.rest.networking, name: "servicecidrs", example: &networkingv1.ServiceCIDR{},
		optional: true},
		objects[string, []netip.Prefix, *networkingv1.ServiceCIDR]{table,
			convertServiceNetworks})
	return table
}

func convertServiceNetworks(o *networkingv1.ServiceCIDR) (name string, networks []netip.Prefix) {
	return o.Name, parsePrefixes(o.Spec.CIDRs)
}

// Pools watches the IPAddressPools. status, unless nil, is called in place of changed where only
// the status differs, which the controller writes with each assignment.
func Pools(c *Client, changed, status func(name string)) *Table[string, lb.Pool] {
	table := newStatusTable(poolSpec, changed, status)
	c.register(resource{client: c.landfall, name: "ipaddresspools", example: &v1beta1.IPAddressPool{}},
		objects[string, lb.Pool, *v1beta1.IPAddressPool]{table, convertPool})
	return table
}

// AnnouncedPools watches the IPAddressPools, as speakers read them: of the status only with the addresses that are
// assigned next, of which next is told where nothing else differs.
func AnnouncedPools(c *Client, changed, next func(name string)) *Table[string, lb.Pool] {
	table := newStatusTable(poolSpec, changed, next)
	c.register(resource{client: c.landfall, name: "ipaddresspools", example: &v1beta1.IPAddressPool{}},
		objects[string, lb.Pool, *v1beta1.IPAddressPool]{table, convertAnnouncedPool})
	return table
}

// poolSpec returns a pool without its status.
func poolSpec(p lb.Pool) lb.Pool {
	p.Version, p.Status, p.Since = "", lb.PoolStatus{}, nil
	return p
}

// PoolRanges watches the addresses that IPAddressPools assign, by pool: without excluded ones.
// Where the API server does not have the resource, or we may not see it, the table is empty.
func PoolRanges(c *Client, changed func(name string)) *Table[string, []lb.Range] {
	table := newTable[string, []lb.Range](nil, changed)
	c.register(resource{client: c.landfall, name: "ipaddresspools", example: &v1beta1.IPAddressPool{}, optional: true},
		objects[string, []lb.Range, *v1beta1.IPAddressPool]{table, convertPoolRanges})
	return table
}

func convertPoolRanges(o *v1beta1.IPAddressPool) (name string, ranges []lb.Range) {
	name, pool := convertPoolSpec(o)
	return name, lb.Subtract(pool.Ranges, pool.Excluded)
}

// L2Advertisements watches the L2Advertisements. status is called in place of changed where only the
// conditions differ.
func L2Advertisements(c *Client, changed, status func(name string)) *Table[string, lb.L2Advertisement] {
	table := newStatusTable(func(a lb.L2Advertisement) lb.L2Advertisement {
		a.Conditions = nil
		return a
	}, changed, status)
	c.register(resource{client: c.landfall, name: "l2advertisements", example: &v1beta1.L2Advertisement{}},
		objects[string, lb.L2Advertisement, *v1beta1.L2Advertisement]{table, convertL2Advertisement})
	return table
}
