// Package migrate plans moves to Landfall from other products: which objects and settings it takes over,
// which it cannot, and what to do in which order. It only computes.
package migrate

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"reflect"
	"regexp"
	"slices"
	"strings"

	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/yaml"

	"github.com/landfall-lb/landfall/api/v1beta1"
	"github.com/landfall-lb/landfall/internal/lb"
)

// Object is any Kubernetes object, with the fields that a migration reads.
type Object struct {
	APIVersion string         `json:"apiVersion"`
	Kind       string         `json:"kind"`
	Metadata   Metadata       `json:"metadata"`
	Spec       map[string]any `json:"spec,omitempty"`
	// Data is that of a ConfigMap.
	Data   map[string]string `json:"data,omitempty"`
	Items  []Object          `json:"items,omitempty"`
	Status map[string]any    `json:"status,omitempty"`
}

// Metadata are the parts of an object's metadata that a migration reads.
type Metadata struct {
	Namespace       string            `json:"namespace"`
	Name            string            `json:"name"`
	Labels          map[string]string `json:"labels"`
	Annotations     map[string]string `json:"annotations"`
	OwnerReferences []OwnerReference  `json:"ownerReferences"`
}

// OwnerReference is an object that another one belongs to.
type OwnerReference struct {
	Kind       string `json:"kind"`
	Name       string `json:"name"`
	Controller bool   `json:"controller"`
}

// vips returns the addresses in the status of a Service; none for other kinds.
func (o Object) vips() []netip.Addr {
	if o.Kind != "Service" || o.APIVersion != "v1" {
		return nil
	}
	var addrs []netip.Addr
	ingress, _ := dig(o.Status, "loadBalancer", "ingress").([]any)
	for _, in := range ingress {
		entry, _ := in.(map[string]any)
		written, _ := entry["ip"].(string)
		if addr, err := lb.ParseAddr(written); err == nil {
			addrs = append(addrs, addr)
		}
	}
	return addrs
}

// dig returns what is below these keys, nil if there is nothing.
func dig(from any, keys ...string) any {
	for _, key := range keys {
		m, _ := from.(map[string]any)
		from = m[key]
	}
	return from
}

// Decode reads YAML or JSON documents. It returns the items of a list in place of the list.
func Decode(r io.Reader) ([]Object, error) {
	decoder := utilyaml.NewYAMLOrJSONDecoder(r, 4096)
	var objects []Object
	for {
		var o Object
		switch err := decoder.Decode(&o); {
		case errors.Is(err, io.EOF):
			return objects, nil
		case err != nil:
			return nil, err
		case strings.HasSuffix(o.Kind, "List"):
			for _, item := range o.Items {
				item.Kind = cmp.Or(item.Kind, strings.TrimSuffix(o.Kind, "List"))
				item.APIVersion = cmp.Or(item.APIVersion, o.APIVersion)
				objects = append(objects, item)
			}
		case o.Kind != "":
			objects = append(objects, o)
		}
	}
}

// kinds are the kinds that both projects have, with Landfall's specification, in the order of the
// output. Most of Landfall's fields have MetalLB's names on purpose.
var kinds = []struct {
	name string
	spec any
}{
	{"IPAddressPool", v1beta1.IPAddressPoolSpec{}},
	{"L2Advertisement", v1beta1.L2AdvertisementSpec{}},
	{"Community", v1beta1.CommunitySpec{}},
	{"BFDProfile", v1beta1.BFDProfileSpec{}},
	{"BGPPeer", v1beta1.BGPPeerSpec{}},
	{"BGPAdvertisement", v1beta1.BGPAdvertisementSpec{}},
}

// Conversion is the result of converting MetalLB's objects.
type Conversion struct {
	Objects []Manifest
	// Notes list what has no equivalent, and what else the reader must know.
	Notes []string
	// Losses are those of the notes that change what the cluster announces, and how.
	Losses []string
}

// Manifest is an object of Landfall to create.
type Manifest struct {
	APIVersion string           `json:"apiVersion"`
	Kind       string           `json:"kind"`
	Metadata   ManifestMetadata `json:"metadata"`
	Spec       map[string]any   `json:"spec"`
}

// ManifestMetadata is the metadata of a Manifest.
type ManifestMetadata struct {
	Name   string            `json:"name"`
	Labels map[string]string `json:"labels,omitempty"`
}

// NewManifest returns an object of Landfall's API group.
func NewManifest(kind, name string, labels map[string]string, spec map[string]any) Manifest {
	return Manifest{APIVersion: v1beta1.GroupVersion.String(), Kind: kind, Metadata: ManifestMetadata{name, labels},
		Spec: spec}
}

// Convert converts MetalLB's objects into Landfall's. It only reads the Services among the objects:
// they keep their addresses.
func Convert(objects []Object) Conversion {
	var m Conversion
	names := map[string]string{}
	for _, kind := range kinds {
		for _, o := range sorted(objects, kind.name) {
			if namespace, twice := names[kind.name+o.Metadata.Name]; twice {
				m.note(
					"%s %s is in namespaces %s and %s; Landfall's objects are cluster-scoped, so only the first is converted: "+
						"rename one",
					kind.name, o.Metadata.Name, namespace, o.Metadata.Namespace)
				continue
			}
			names[kind.name+o.Metadata.Name] = o.Metadata.Namespace
			spec := m.known(kind.name+" "+o.Metadata.Name, "spec", reflect.TypeOf(kind.spec), m.adapt(o))
			m.Objects = append(m.Objects, NewManifest(kind.name, o.Metadata.Name, o.Metadata.Labels, spec))
		}
	}
	for _, o := range objects {
		if o.Kind == "ConfigMap" && o.Metadata.Name == "bgpextras" && o.Data["extras"] != "" {
			m.lose("ConfigMap %s/bgpextras is not taken over: it has raw configuration of FRR, which Landfall does not run: %q",
				o.Metadata.Namespace, frrSecrets.ReplaceAllString(o.Data["extras"], "$1 (left out)"))
		}
		m.checkFRR(o)
		if foreign(o) {
			m.note("%s %s has no equivalent", o.Kind, o.Metadata.Name)
		}
	}
	m.listSecrets()
	m.checkServices(objects)
	m.keepSharing(objects)
	return m
}

// checkFRR names what a configuration of frr-k8s has that is not MetalLB's own: frr-k8s stops with MetalLB.
func (m *Conversion) checkFRR(o Object) {
	selector, _ := dig(o.Spec, "nodeSelector", "matchLabels").(map[string]any)
	host, _ := selector[labelHostname].(string)
	if o.Kind != "FRRConfiguration" || host != "" && o.Metadata.Name == "metallb-"+host {
		return // MetalLB writes one for each node
	}
	var has []string
	routers, _ := dig(o.Spec, "bgp", "routers").([]any)
	for _, r := range routers {
		neighbors, _ := dig(r, "neighbors").([]any)
		for _, n := range neighbors {
			session := fmt.Sprintf("a session with %v", cmp.Or(dig(n, "address"), dig(n, "interface")))
			if dig(n, "toReceive") != nil {
				session += ", whose routes it installs on the nodes (toReceive)"
			}
			has = append(has, session)
		}
		if prefixes, _ := dig(r, "prefixes").([]any); len(prefixes) > 0 {
			has = append(has, fmt.Sprintf("the prefixes %v", prefixes))
		}
		if imports, _ := dig(r, "imports").([]any); len(imports) > 0 {
			has = append(has, "imports of VRFs")
		}
	}
	if raw, _ := dig(o.Spec, "raw", "rawConfig").(string); raw != "" {
		has = append(has, fmt.Sprintf("raw configuration of FRR: %q", frrSecrets.ReplaceAllString(raw, "$1 (left out)")))
	}
	if len(has) == 0 {
		has = append(has, "nothing that is announced")
	}
	m.lose("FRRConfiguration %s/%s is not taken over, and frr-k8s stops with MetalLB; it has %s", o.Metadata.Namespace,
		o.Metadata.Name, strings.Join(has, "; "))
}

// frrSecrets are the words of FRR's configuration behind which secrets are. Plans are shown to others.
var frrSecrets = regexp.MustCompile(`(?i)\b(password(?:\s+\d)?|key-string|key|md5)\s+\S+`)

func (m *Conversion) note(format string, args ...any) {
	m.Notes = append(m.Notes, fmt.Sprintf(format, args...))
}

func (m *Conversion) lose(format string, args ...any) {
	m.note(format, args...)
	m.Losses = append(m.Losses, m.Notes[len(m.Notes)-1])
}

// adapt returns the specification of one of MetalLB's objects in Landfall's words.
func (m *Conversion) adapt(o Object) map[string]any {
	spec := maps.Clone(o.Spec)
	switch name := o.Metadata.Name; o.Kind {
	case "L2Advertisement":
		terms, _ := spec["preferredNodeSelectors"].([]any)
		var preferred []any
		for _, term := range terms {
			nodes := dig(term, "preference")
			if nodes == nil {
				nodes = map[string]any{} // every node
			}
			preferred = append(preferred, map[string]any{"weight": dig(term, "weight"), "nodeSelector": nodes})
		}
		if delete(spec, "preferredNodeSelectors"); preferred != nil {
			spec["preferredNodes"] = preferred
		}
	case "BGPPeer":
		if single, _ := spec["disableMP"].(bool); single {
			also := ""
			if dual, _ := spec["dualStackAddressFamily"].(bool); dual {
				also = "; that contradicts disableMP here, and is left out too"
			}
			m.note("BGPPeer %s: spec.disableMP is left out, as Landfall has no such field and needs none: a session "+
				"carries routes of the family of its addresses only, unless dualStackAddressFamily is true%s", name, also)
			delete(spec, "dualStackAddressFamily")
		}
		delete(spec, "disableMP")
		if secret, named := spec["passwordSecret"].(map[string]any); named {
			spec["passwordSecret"] = map[string]any{"name": secret["name"]} // in Landfall's own namespace
			if secret["name"] == nil || secret["name"] == "" {
				delete(spec, "passwordSecret")
			}
		}
	case "BFDProfile":
		if echo, _ := spec["echoMode"].(bool); echo {
			m.lose("BFDProfile %s: spec.echoMode is left out: Landfall has no echo mode, and detects failures by control "+
				"packets alone, after detectMultiplier x receiveInterval", name)
		}
		delete(spec, "echoMode")
		delete(spec, "echoInterval")
	}
	return spec
}

// listSecrets names the Secrets with passwords of BGP sessions, which a speaker does not read by
// itself.
func (m *Conversion) listSecrets() {
	var names []string
	for _, o := range m.Objects {
		secret, _ := o.Spec["passwordSecret"].(map[string]any)
		if name, ok := secret["name"].(string); ok && o.Kind == "BGPPeer" {
			names = append(names, name)
		}
	}
	if slices.Sort(names); len(names) > 0 {
		m.note("copy the Secrets of BGP passwords to Landfall's namespace, and list them in the Helm value: "+
			"--set 'speaker.bgpSecrets={%s}'", strings.Join(slices.Compact(names), ","))
	}
}

func isMetalLB(o Object) bool { return strings.HasPrefix(o.APIVersion, "metallb.io/") }

// sorted returns MetalLB's objects of a kind, by name.
func sorted(objects []Object, kind string) []Object {
	var of []Object
	for _, o := range objects {
		if isMetalLB(o) && o.Kind == kind {
			of = append(of, o)
		}
	}
	slices.SortStableFunc(of, func(a, b Object) int {
		return cmp.Or(strings.Compare(a.Metadata.Name, b.Metadata.Name),
			strings.Compare(a.Metadata.Namespace, b.Metadata.Namespace))
	})
	return of
}

// foreign reports whether o configures MetalLB with a kind that Landfall does not have. MetalLB
// itself writes the status kinds, so they do not count.
func foreign(o Object) bool {
	for _, kind := range kinds {
		if o.Kind == kind.name {
			return false
		}
	}
	return isMetalLB(o) && !strings.HasSuffix(o.Kind, "Status") && o.Kind != "ConfigurationState"
}

// known returns the fields that Landfall's type has too, and notes the others.
func (m *Conversion) known(what, path string, t reflect.Type, given map[string]any) map[string]any {
	kept := map[string]any{}
	for _, name := range slices.Sorted(maps.Keys(given)) {
		field, ok := fieldByJSON(t, name)
		if !ok {
			text, _ := json.Marshal(given[name]) // it came from JSON
			m.note("%s: %s.%s (%s) has no equivalent and is left out", what, path, name, text)
			continue
		}
		for field.Kind() == reflect.Pointer {
			field = field.Elem()
		}
		if nested, isMap := given[name].(map[string]any); isMap && field.Kind() == reflect.Struct &&
			strings.HasSuffix(field.PkgPath(), "landfall/api/v1beta1") {
			kept[name] = m.known(what, path+"."+name, field, nested)
		} else {
			kept[name] = given[name]
		}
	}
	return kept
}

func fieldByJSON(t reflect.Type, name string) (reflect.Type, bool) {
	for field := range t.Fields() {
		if tag, _, _ := strings.Cut(field.Tag.Get("json"), ","); tag == name {
			return field.Type, true
		}
	}
	return nil, false
}

// checkServices notes addresses that Services hold and that no pool contains.
func (m *Conversion) checkServices(objects []Object) {
	var ranges []lb.Range
	for _, o := range m.Objects {
		written, _ := o.Spec["addresses"].([]any)
		for _, w := range written {
			if r, err := lb.ParseRange(fmt.Sprint(w)); err == nil && o.Kind == "IPAddressPool" {
				ranges = append(ranges, r)
			} else if err != nil {
				m.note("%s %s: %v", o.Kind, o.Metadata.Name, err)
			}
		}
	}
	for _, o := range objects {
		for _, addr := range o.vips() {
			if !slices.ContainsFunc(ranges, func(r lb.Range) bool { return r.Contains(addr) }) {
				m.note("Service %s/%s holds %s, which no pool contains: it keeps the address, but no node will announce it",
					o.Metadata.Namespace, o.Metadata.Name, addr)
			}
		}
	}
}

// keepSharing sets spec.sharing of the pools in which Services of different namespaces share an
// address, which MetalLB lets everybody do who knows the key.
func (m *Conversion) keepSharing(objects []Object) {
	holders := map[netip.Addr]map[string]bool{} // the namespaces that share the address
	for _, o := range objects {
		key := cmp.Or(o.Metadata.Annotations["metallb.io/allow-shared-ip"],
			o.Metadata.Annotations["metallb.universe.tf/allow-shared-ip"], o.Metadata.Annotations[lb.AnnotationShare])
		for _, addr := range o.vips() {
			if key == "" {
				continue
			}
			if holders[addr] == nil {
				holders[addr] = map[string]bool{}
			}
			holders[addr][o.Metadata.Namespace] = true
		}
	}
	for _, addr := range slices.SortedFunc(maps.Keys(holders), netip.Addr.Compare) {
		for _, o := range m.Objects {
			if len(holders[addr]) < 2 || o.Kind != "IPAddressPool" || o.Spec["sharing"] != nil || !contains(o, addr) {
				continue
			}
			o.Spec["sharing"] = "cluster"
			m.note("IPAddressPool %s: Services of the namespaces %s share %s, so spec.sharing is cluster: everybody who knows "+
				"a sharing key can join an address of this pool", o.Metadata.Name,
				strings.Join(slices.Sorted(maps.Keys(holders[addr])), ", "), addr)
		}
	}
}

// contains reports whether a pool contains addr.
func contains(pool Manifest, addr netip.Addr) bool {
	written, _ := pool.Spec["addresses"].([]any)
	return slices.ContainsFunc(written, func(w any) bool {
		r, err := lb.ParseRange(fmt.Sprint(w))
		return err == nil && r.Contains(addr)
	})
}

// Print writes the notes as comments, then the objects, ready for kubectl apply.
func (m Conversion) Print(w io.Writer) error {
	var out bytes.Buffer
	for _, note := range m.Notes {
		fmt.Fprintf(&out, "# %s\n", note)
	}
	for _, o := range m.Objects {
		text, err := yaml.Marshal(o)
		if err != nil {
			return err
		}
		out.WriteString("---\n")
		out.Write(text)
	}
	_, err := w.Write(out.Bytes())
	return err
}
