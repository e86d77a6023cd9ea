package migrate

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/landfall-lb/landfall/internal/lb"
)

// What a migration writes on objects, until it ends or is undone.
const (
	// LabelFrom is on each object of Landfall, and each copied Secret, that a migration created; its
	// value is the other product.
	LabelFrom = "landfall.dev/migrated-from"
	// LabelNode is on nodes that a migration has taken over; its value is the other product.
	LabelNode = "landfall.dev/migrated"
	// LabelOwner is on Services while their addresses are kept on the node that MetalLB announced them
	// from; its value is the node's label kubernetes.io/hostname.
	LabelOwner = "landfall.dev/metallb-owner"
	// AnnotationUndo has the merge patch that gives an object back what a migration changed.
	AnnotationUndo = "landfall.dev/migration-undo"

	// FromMetalLB and FromKubeProxy are the products.
	FromMetalLB   = "metallb"
	FromKubeProxy = "kube-proxy"
)

const labelHostname = "kubernetes.io/hostname"

// Choices are what the user decides.
type Choices struct {
	// Namespace is that of Landfall.
	Namespace string
	// MetalLBNamespace is that of MetalLB: see MetalLBNamespace.
	MetalLBNamespace string
	// CopySecrets consents to copies of the Secrets with passwords of BGP sessions.
	CopySecrets bool
	// AcceptLosses consents to what cannot be taken over.
	AcceptLosses bool
	// WithoutProxy leaves the forwarding to the service proxy that is there.
	WithoutProxy bool
	// ClusterCIDR is the pod network, where nothing in the cluster says it.
	ClusterCIDR string
	// Interfaces are those that answer for addresses outside the nodes' subnets.
	Interfaces []string
	// KeepersPaused says that what would put the other product's workloads back is paused.
	KeepersPaused bool
}

// Plan is how a cluster moves from MetalLB to Landfall.
type Plan struct {
	Conversion
	// Values are Helm values to install Landfall with.
	Values map[string]any
	// Blockers must be solved before anything is done.
	Blockers []string
	// Secrets are to be copied into Landfall's namespace.
	Secrets []SecretCopy
	// Speakers and Controllers are MetalLB's workloads.
	Speakers, Controllers []Workload
	// NodeByNode is set if speakers are swapped one node after another; else on all nodes at once.
	NodeByNode bool
	// Nodes are the names of the nodes with a speaker of MetalLB's, in the order of the swap.
	Nodes []string
	// L2 are MetalLB's L2Advertisements.
	L2 []Object
	// Pins keep addresses on their nodes while the speakers are swapped.
	Pins []Pin
	// Held are the addresses of the Services that MetalLB serves.
	Held map[lb.Key][]netip.Addr

	// namespace is that of MetalLB.
	namespace string
}

// SecretCopy is a Secret to copy under the same name.
type SecretCopy struct{ Namespace, Name string }

// Workload is a Deployment or DaemonSet.
type Workload struct {
	Kind, Namespace, Name string
	// Pods are the labels of its pods.
	Pods map[string]string
	// Keeper is what would put it back as it was; "" for nothing.
	Keeper string
	// template is the specification of its pods.
	template map[string]any
}

// String is kind, namespace and name.
func (w Workload) String() string { return fmt.Sprintf("%s %s/%s", w.Kind, w.Namespace, w.Name) }

// Pin keeps the addresses of a Service on a node.
type Pin struct {
	Service lb.Key
	// Hostname is the node's label kubernetes.io/hostname.
	Hostname string
}

// PlanMetalLB plans a move from MetalLB. objects are MetalLB's, and the cluster's Services, Nodes,
// Deployments, DaemonSets and ConfigMaps. proxy are the values of Landfall's proxy that kube-proxy's
// configuration asks for; nil if there is none.
func PlanMetalLB(objects []Object, proxy map[string]any, c Choices) Plan {
	for i, o := range objects {
		objects[i].Spec = original(o)
	}
	objects, others := inNamespace(objects, c.MetalLBNamespace)
	p := Plan{Conversion: Convert(objects), Values: map[string]any{}, Held: map[lb.Key][]netip.Addr{},
		namespace: c.MetalLBNamespace}
	if len(others) > 0 {
		p.note("objects of MetalLB's kinds in %s are left out: MetalLB reads only those in its own namespace, %s",
			atMostNamed(others, ", "), p.namespace)
	}
	p.findWorkloads(objects)
	if keepers := Paused(slices.Concat(p.Speakers, p.Controllers), c); keepers != "" {
		p.block("%s", keepers)
	}
	p.findSecrets(objects, c)
	p.restrict()
	p.setValues(proxy, c)
	p.L2 = sorted(objects, "L2Advertisement")
	p.NodeByNode = len(p.L2) == 0 && len(sorted(objects, "BGPAdvertisement")) > 0
	for _, o := range objects {
		if o.Kind == "Node" && o.APIVersion == "v1" {
			p.Nodes = append(p.Nodes, o.Metadata.Name)
		}
		if vips := o.vips(); len(vips) > 0 && p.serves(o) {
			p.Held[lb.Key{Namespace: o.Metadata.Namespace, Name: o.Metadata.Name}] = vips
		}
	}
	slices.Sort(p.Nodes)
	p.pin(objects)
	p.nameInterfaces(objects, c)
	p.noteGaps(objects, c)
	if len(p.Objects) == 0 {
		p.block("there are no objects of MetalLB that Landfall can take over")
	}
	if len(p.Losses) > 0 && !c.AcceptLosses {
		p.block("Landfall cannot take over everything (%d notes begin with \"lost\"): give --accept-losses to go on without",
			len(p.Losses))
	}
	return p
}

func (p *Plan) block(format string, args ...any) {
	p.Blockers = append(p.Blockers, fmt.Sprintf(format, args...))
}

// original returns an object's specification as it was before a migration changed it.
func original(o Object) map[string]any {
	undo, err := decodeUndo(o.Metadata.Annotations[AnnotationUndo])
	spec, _ := undo["spec"].(map[string]any)
	if err != nil || spec == nil {
		return o.Spec
	}
	return Apply(o.Spec, spec)
}

// serves reports whether MetalLB serves a Service: by type and class.
func (p *Plan) serves(o Object) bool {
	class, _ := o.Spec["loadBalancerClass"].(string)
	want, _ := p.Values["loadBalancerClass"].(string)
	return o.Spec["type"] == "LoadBalancer" && class == want
}

// runsFRR reports whether its pods have a container of FRR, as those of MetalLB's speakers in mode frr and of frr-k8s.
func (w Workload) runsFRR() bool {
	containers, _ := w.template["containers"].([]any)
	return slices.ContainsFunc(containers, func(container any) bool { return dig(container, "name") == "frr" })
}

// Paused says what has to be paused before workloads are changed; "" for nothing.
func Paused(workloads []Workload, c Choices) string {
	var kept []string
	for _, w := range workloads {
		if w.Keeper != "" {
			kept = append(kept, fmt.Sprintf("%s by %s", w, w.Keeper))
		}
	}
	if len(kept) == 0 || c.KeepersPaused {
		return ""
	}
	return fmt.Sprintf("something may put back what is changed here, and both products would act: %s is kept; pause it, "+
		"and give --keepers-paused", strings.Join(kept, ", "))
}

// Gone says why there is no MetalLB to go back to; "" if there is.
func (p *Plan) Gone() string {
	switch {
	case len(p.Controllers) == 0 || len(p.Speakers) == 0:
		return "its controller or its speaker is not in the namespace " + p.namespace + " any more"
	case len(p.Pools()) == 0:
		return "it has no IPAddressPool any more"
	case len(p.ofKinds("L2Advertisement", "BGPAdvertisement")) == 0:
		return "it has no advertisement any more"
	}
	return ""
}

// Flag returns the value of a flag of a container, "true" if it has none.
func (w Workload) Flag(name string) (value string, set bool) {
	containers, _ := w.template["containers"].([]any)
	for _, c := range containers {
		command, _ := dig(c, "command").([]any)
		args, _ := dig(c, "args").([]any)
		for _, a := range slices.Concat(command, args) {
			key, value, has := strings.Cut(strings.TrimLeft(fmt.Sprint(a), "-"), "=")
			if key == name && has {
				return value, true
			} else if key == name {
				return "true", true
			}
		}
	}
	return "", false
}

// findSecrets finds the Secrets to copy.
func (p *Plan) findSecrets(objects []Object, c Choices) {
	seen := map[SecretCopy]bool{}
	for _, o := range sorted(objects, "BGPPeer") {
		name, _ := dig(o.Spec, "passwordSecret", "name").(string)
		namespace, _ := dig(o.Spec, "passwordSecret", "namespace").(string)
		s := SecretCopy{cmp.Or(namespace, o.Metadata.Namespace), name}
		if name == "" || seen[s] {
			continue
		}
		seen[s] = true
		for other := range seen {
			if other.Name == name && other != s {
				p.block("Secrets %s/%s and %s/%s have one name, and go to one namespace: rename one", s.Namespace, name,
					other.Namespace, name)
			}
		}
		p.Secrets = append(p.Secrets, s)
	}
	if len(p.Secrets) > 0 && !c.CopySecrets {
		p.block("BGP sessions have passwords in %d Secrets: give --copy-secrets to have them copied to the namespace %s",
			len(p.Secrets), c.Namespace)
	}
}

// restrict has only those nodes announce that MetalLB's speakers may run on.
func (p *Plan) restrict() {
	for _, w := range p.Speakers {
		selector, _ := w.template["nodeSelector"].(map[string]any)
		labels := map[string]any{}
		for key, value := range selector {
			if key != "kubernetes.io/os" {
				labels[key] = value
			}
		}
		if w.template["affinity"] != nil && p.NodeByNode {
			p.note("%s has an affinity, which is not taken over: give the advertisements nodeSelectors if it keeps "+
				"speakers off nodes", w)
		}
		if len(labels) == 0 {
			continue
		}
		for _, o := range p.Objects {
			if o.Kind == "L2Advertisement" || o.Kind == "BGPAdvertisement" || o.Kind == "BGPPeer" {
				o.Spec["nodeSelectors"] = selectAlso(o.Spec["nodeSelectors"], map[string]any{"matchLabels": labels})
			}
		}
		p.note("%s runs only on nodes with %s; Landfall runs on all nodes, so its advertisements and peers select "+
			"these nodes", w, joinLabels(labels))
	}
}

func joinLabels(labels map[string]any) string {
	var all []string
	for _, key := range slices.Sorted(maps.Keys(labels)) {
		all = append(all, fmt.Sprintf("%s=%v", key, labels[key]))
	}
	return strings.Join(all, ",")
}

// setValues sets the Helm values.
func (p *Plan) setValues(proxy map[string]any, c Choices) {
	speaker := map[string]any{}
	for _, w := range p.Speakers {
		if class, set := w.Flag("lb-class"); set && class != "" {
			p.Values["loadBalancerClass"] = class
		}
		if ignore, _ := w.Flag("ignore-exclude-lb"); ignore == "true" {
			speaker["ignoreExcludeLB"] = true
		}
	}
	var secrets []any
	for _, s := range p.Secrets {
		secrets = append(secrets, s.Name)
	}
	if len(secrets) > 0 {
		speaker["bgpSecrets"] = secrets
	}
	switch {
	case c.WithoutProxy:
		p.Values["proxy"] = map[string]any{"enabled": false}
		speaker["gate"] = "none"
		p.note("Landfall's proxy is not installed: speakers announce as soon as endpoints are usable, without knowing what " +
			"the nodes' kernels deliver, and established connections do not survive a move of their address")
	default:
		values := maps.Clone(proxy)
		if values == nil {
			values = map[string]any{}
		}
		if c.ClusterCIDR != "" {
			values["clusterCIDR"] = c.ClusterCIDR
		}
		mode, _ := values["detectLocalMode"].(string)
		if cidr, _ := values["clusterCIDR"].(string); cidr == "" && (mode == "" || mode == "ClusterCIDR") {
			p.block("nothing in the cluster says the pod network, without which Landfall's proxy does not start: give " +
				"--cluster-cidr, or --without-proxy to keep the service proxy alone")
		}
		p.Values["proxy"] = values
	}
	if len(speaker) > 0 {
		p.Values["speaker"] = speaker
	}
}

// owner is what MetalLB says of the node that announces a Service.
type owner struct {
	service    lb.Key
	node       string
	interfaces []string
}

// owners returns what MetalLB says of who announces which Service. A speaker that has not met the others yet takes
// all Services for its own: when it withdraws before it has written the status of a ServiceL2Status, it leaves
// the object behind, with its node in the labels.
func owners(objects []Object) []owner {
	var all []owner
	for _, o := range sorted(objects, "ServiceL2Status") {
		text := func(key, label string) string {
			value, _ := o.Status[key].(string)
			return cmp.Or(value, o.Metadata.Labels["metallb.io/"+label])
		}
		node, _ := o.Status["node"].(string)
		w := owner{node: node, service: lb.Key{Namespace: text("serviceNamespace", "service-namespace"),
			Name: text("serviceName", "service-name")}}
		interfaces, _ := o.Status["interfaces"].([]any)
		for _, i := range interfaces {
			if name, _ := dig(i, "name").(string); name != "" {
				w.interfaces = append(w.interfaces, name)
			}
		}
		if w.node != "" && w.service.Name != "" {
			all = append(all, w)
		}
	}
	return all
}

// pin keeps the Services where MetalLB announces them, so that no address moves to another node when
// the speakers are swapped.
func (p *Plan) pin(objects []Object) {
	hostnames := map[string]string{}
	for _, o := range objects {
		if o.Kind == "Node" {
			hostnames[o.Metadata.Name] = o.Metadata.Labels[labelHostname]
		}
	}
	pinned := map[lb.Key]bool{}
	for _, w := range owners(objects) {
		if hostname := hostnames[w.node]; hostname != "" && len(p.Held[w.service]) > 0 && !pinned[w.service] {
			pinned[w.service] = true
			p.Pins = append(p.Pins, Pin{w.service, hostname})
		}
	}
	slices.SortFunc(p.Pins, func(a, b Pin) int { return a.Service.Compare(b.Service) })
	known := slices.Collect(maps.Values(hostnames))
	for _, o := range objects { // those of a run that was interrupted: others have the label from their owners
		key := lb.Key{Namespace: o.Metadata.Namespace, Name: o.Metadata.Name}
		if hostname := o.Metadata.Labels[LabelOwner]; o.Kind == "Service" && hostname != "" && !pinned[key] &&
			len(p.Held[key]) > 0 && slices.Contains(known, hostname) {
			p.Pins = append(p.Pins, Pin{key, hostname})
		}
	}
	if missing := len(p.Held) - len(p.Pins); len(p.L2) > 0 && missing > 0 {
		p.note("MetalLB does not say which node announces %d of %d Services on Layer 2 (ServiceL2Status): Landfall may "+
			"choose another node for these, and connections to them that are established break", missing, len(p.Held))
	}
}

// nameInterfaces has advertisements name the interfaces that answer, where MetalLB announces
// addresses outside the nodes' subnets: Landfall answers there only on interfaces that are named.
func (p *Plan) nameInterfaces(objects []Object, c Choices) {
	var nodes []netip.Prefix
	for _, o := range objects {
		addresses, _ := o.Status["addresses"].([]any)
		for _, a := range addresses {
			written, _ := dig(a, "address").(string)
			if addr, err := lb.ParseAddr(written); err == nil && o.Kind == "Node" {
				bits := 24 // the API server does not know the length of the nodes' prefixes
				if addr.Is6() {
					bits = 64
				}
				nodes = append(nodes, netip.PrefixFrom(addr, bits).Masked())
			}
		}
	}
	if len(p.L2) == 0 || len(nodes) == 0 {
		return
	}
	used := map[lb.Key][]string{}
	for _, w := range owners(objects) {
		used[w.service] = append(used[w.service], w.interfaces...)
	}
	for _, o := range p.Objects {
		if given, _ := o.Spec["interfaces"].([]any); o.Kind != "L2Advertisement" || len(given) > 0 {
			continue
		}
		var names []string
		var outside []netip.Addr
		for key, vips := range p.Held {
			for _, vip := range vips {
				in := func(n netip.Prefix) bool { return n.Contains(vip) }
				if !slices.ContainsFunc(nodes, in) && p.advertises(o, vip) {
					outside = append(outside, vip)
					names = append(names, used[key]...)
				}
			}
		}
		if len(outside) == 0 {
			continue
		}
		slices.SortFunc(outside, netip.Addr.Compare)
		if len(c.Interfaces) > 0 {
			names = c.Interfaces
		}
		slices.Sort(names)
		names = slices.Compact(names)
		if len(names) == 0 {
			p.block("%s seems to be in no subnet of the nodes, where Landfall answers only on interfaces that the "+
				"L2Advertisement %s names: give --l2-interfaces", outside[0], o.Metadata.Name)
			return
		}
		var list []any
		for _, name := range names {
			list = append(list, name)
		}
		o.Spec["interfaces"] = list
		p.note("L2Advertisement %s: spec.interfaces is %s, because %s seems to be in no subnet of the nodes: there Landfall "+
			"answers only on interfaces that are named", o.Metadata.Name, strings.Join(names, ", "), outside[0])
	}
}

// advertises reports whether an advertisement selects the pool that an address is from. An address that
// is in no pool may be of any.
func (p *Plan) advertises(advertisement Manifest, addr netip.Addr) bool {
	names, _ := advertisement.Spec["ipAddressPools"].([]any)
	selectors, _ := advertisement.Spec["ipAddressPoolSelectors"].([]any)
	if len(names)+len(selectors) == 0 {
		return true
	}
	pooled := false
	for _, pool := range p.Pools() {
		if !poolHas(pool, addr) {
			continue
		}
		pooled = true
		labels := map[string]any{}
		for key, value := range pool.Metadata.Labels {
			labels[key] = value
		}
		if slices.Contains(names, any(pool.Metadata.Name)) || len(selectors) > 0 &&
			Selects(selectors, map[string]any{"metadata": map[string]any{"labels": labels}}) {
			return true
		}
	}
	return !pooled
}

// poolHas reports whether a pool has an address.
func poolHas(pool Manifest, addr netip.Addr) bool {
	written, _ := pool.Spec["addresses"].([]any)
	return slices.ContainsFunc(written, func(text any) bool {
		r, err := lb.ParseRange(fmt.Sprint(text))
		return err == nil && r.Contains(addr)
	})
}

// noteGaps says for what clients may wait.
func (p *Plan) noteGaps(objects []Object, c Choices) {
	bgp := len(sorted(objects, "BGPAdvertisement")) > 0
	if len(p.L2) > 0 && bgp {
		p.note("MetalLB announces over Layer 2 and BGP, so all nodes are swapped at once: routers have no route until " +
			"Landfall's sessions are up, which takes seconds")
	}
	if len(p.L2) > 0 {
		p.note("between MetalLB's last speaker and Landfall's first answer, clients that do not know an address's MAC yet " +
			"wait; those that know it notice nothing, because nodes go on forwarding")
	}
	if slices.ContainsFunc(p.Speakers, Workload.runsFRR) {
		p.note("MetalLB runs FRR, whose BFD daemon ends at its start where another program has UDP port 3784 or 4784, as " +
			"Landfall's speakers do: if pods of MetalLB's may restart meanwhile, set speaker.bfdNeighbors=0 in Landfall's " +
			"chart until MetalLB is gone")
	}
	if !p.NodeByNode {
		return
	}
	if c.WithoutProxy {
		p.note("routers spread connections anew each time that a node's routes go or come: established connections that " +
			"they move to another node break, as they do when a speaker of MetalLB restarts")
	} else if len(p.Nodes) > lb.MaxRing+1 {
		p.note("routers spread connections anew each time that a node's routes go or come. Landfall's proxies pass packets "+
			"on to the next %d nodes at most: of established connections that only others of the %d nodes know, some break",
			lb.MaxRing, len(p.Nodes))
	}
	for _, o := range objects {
		key := lb.Key{Namespace: o.Metadata.Namespace, Name: o.Metadata.Name}
		if o.Kind == "Service" && o.Spec["externalTrafficPolicy"] == "Local" && len(p.Held[key]) > 0 {
			p.note("Service %s has externalTrafficPolicy Local: if all its pods are on one node, routers have no route to it "+
				"for the seconds in which that node is swapped", key)
		}
	}
}

// ofKinds returns the objects of some kinds.
func (p *Plan) ofKinds(kinds ...string) []Manifest {
	var all []Manifest
	for _, o := range p.Objects {
		if slices.Contains(kinds, o.Kind) {
			all = append(all, o)
		}
	}
	return all
}

// Quiet returns the objects that announce nothing and assign nothing by themselves.
func (p *Plan) Quiet() []Manifest { return p.ofKinds("Community", "BFDProfile") }

// Pools returns the objects with addresses.
func (p *Plan) Pools() []Manifest { return p.ofKinds("IPAddressPool") }

// Announcing returns the objects that have speakers announce, as they are in the end.
func (p *Plan) Announcing() []Manifest {
	return p.ofKinds("BGPPeer", "BGPAdvertisement", "L2Advertisement")
}

// Interim returns the objects to announce with while speakers are swapped: peers only for nodes that
// are swapped, and advertisements that keep addresses on their nodes.
func (p *Plan) Interim() []Manifest {
	var all []Manifest
	for _, o := range p.Announcing() {
		if o.Kind == "BGPPeer" && p.NodeByNode {
			o.Spec = maps.Clone(o.Spec)
			o.Spec["nodeSelectors"] = selectAlso(o.Spec["nodeSelectors"],
				map[string]any{"matchLabels": map[string]any{LabelNode: FromMetalLB}})
		}
		all = append(all, o)
	}
	return append(all, p.pinning()...)
}

// pinning returns advertisements for one node each, with a weight that no other has. Those are created
// first: with another node's claim alone, a speaker that hears of an advertisement before that of the
// node would announce the address until the node claims it too.
func (p *Plan) pinning() []Manifest {
	hosts := map[string]bool{}
	for _, pin := range p.Pins {
		hosts[pin.Hostname] = true
	}
	var all []Manifest
	for i, host := range slices.Sorted(maps.Keys(hosts)) {
		for j, ad := range p.ofKinds("L2Advertisement") {
			spec := maps.Clone(ad.Spec)
			spec["serviceSelectors"] = selectAlso(spec["serviceSelectors"],
				map[string]any{"matchLabels": map[string]any{LabelOwner: host}})
			heavy := map[string]any{"weight": 100, "nodeSelector": map[string]any{"matchLabels": map[string]any{
				labelHostname: host}}}
			spec["nodeSelectors"] = selectAlso(spec["nodeSelectors"],
				map[string]any{"matchLabels": map[string]any{labelHostname: host}})
			preferred, _ := spec["preferredNodes"].([]any)
			spec["preferredNodes"] = append(slices.Clone(preferred[:min(len(preferred), 54)]),
				slices.Repeat([]any{heavy}, 10)...)
			o := NewManifest("L2Advertisement", fmt.Sprintf("metallb-owner-%d-%d", i, j), nil, spec)
			all = append(all, o)
		}
	}
	return all
}

// Temporary are the objects of Interim that are not there in the end.
func (p *Plan) Temporary() []Manifest { return p.pinning() }

// Mute returns the merge patch with which an L2Advertisement of MetalLB's selects no node.
func Mute() map[string]any {
	return map[string]any{"spec": map[string]any{"nodeSelectors": []any{map[string]any{
		"matchLabels": map[string]any{LabelNode: "never"}}}}}
}

// Stop returns the merge patch with which a DaemonSet has no pods.
func Stop() map[string]any {
	return map[string]any{"spec": map[string]any{"template": map[string]any{"spec": map[string]any{
		"nodeSelector": map[string]any{LabelNode: "never"}}}}}
}

// StopWhere returns the merge patch with which a DaemonSet has no pods on nodes with LabelNode, and
// restarts none on others.
func StopWhere(w Workload, product string) map[string]any {
	return map[string]any{"spec": map[string]any{
		"updateStrategy": map[string]any{"type": "OnDelete", "rollingUpdate": nil},
		"template": map[string]any{"spec": map[string]any{
			"affinity": keepOff(w.template["affinity"], LabelNode, product)}},
	}}
}

// StartElsewhere returns the merge patch with which a DaemonSet that Stop has stopped has pods on nodes
// without LabelNode.
func StartElsewhere(w Workload, product string) map[string]any {
	patch := StopWhere(w, product)
	pods, _ := dig(patch, "spec", "template", "spec").(map[string]any)
	pods["nodeSelector"] = map[string]any{LabelNode: nil}
	return patch
}

// Scale returns the merge patch for a number of replicas.
func Scale(replicas int) map[string]any {
	return map[string]any{"spec": map[string]any{"replicas": replicas}}
}
