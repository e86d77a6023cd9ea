package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/util/yaml"

	"github.com/landfall-lb/landfall/api/v1beta1"
	"github.com/landfall-lb/landfall/internal/lb"
)

// object is any Kubernetes object, with the fields that a migration reads.
type object struct {
	APIVersion string         `json:"apiVersion"`
	Kind       string         `json:"kind"`
	Metadata   metadata       `json:"metadata"`
	Spec       map[string]any `json:"spec,omitempty"`
	Items      []object       `json:"items,omitempty"`
	Status     struct {
		LoadBalancer struct {
			Ingress []struct {
				IP string `json:"ip"`
			} `json:"ingress"`
		} `json:"loadBalancer"`
	} `json:"status"`
}

type metadata struct {
	Namespace string            `json:"namespace"`
	Name      string            `json:"name"`
	Labels    map[string]string `json:"labels"`
	// Annotations are those of Services only.
	Annotations map[string]string `json:"annotations"`
}

// decodeObjects reads YAML or JSON documents. It returns the items of a list in place of the list.
func decodeObjects(r io.Reader) ([]object, error) {
	decoder := yaml.NewYAMLOrJSONDecoder(r, 4096)
	var objects []object
	for {
		var o object
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

// migration is the result of converting MetalLB's objects.
type migration struct {
	objects []manifest
	// notes list what has no equivalent, and what else the reader must know.
	notes []string
}

type manifest struct {
	APIVersion string           `json:"apiVersion"`
	Kind       string           `json:"kind"`
	Metadata   manifestMetadata `json:"metadata"`
	Spec       map[string]any   `json:"spec"`
}

type manifestMetadata struct {
	Name   string            `json:"name"`
	Labels map[string]string `json:"labels,omitempty"`
}

func newManifest(kind, name string, labels map[string]string, spec map[string]any) manifest {
	return manifest{APIVersion: v1beta1.GroupVersion.String(), Kind: kind, Metadata: manifestMetadata{name, labels},
		Spec: spec}
}

// migrate converts MetalLB's objects into Landfall's. It only reads the Services among the objects:
// they keep their addresses.
func migrate(objects []object) migration {
	var m migration
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
			spec := m.known(kind.name+" "+o.Metadata.Name, "spec", reflect.TypeOf(kind.spec), o.Spec)
			m.objects = append(m.objects, newManifest(kind.name, o.Metadata.Name, o.Metadata.Labels, spec))
		}
	}
	for _, o := range objects {
		if foreign(o) {
			m.note("%s %s has no equivalent", o.Kind, o.Metadata.Name)
		}
	}
	m.listSecrets()
	m.checkServices(objects)
	m.keepSharing(objects)
	return m
}

func (m *migration) note(format string, args ...any) {
	m.notes = append(m.notes, fmt.Sprintf(format, args...))
}

// listSecrets names the Secrets with passwords of BGP sessions, which a speaker does not read by
// itself.
func (m *migration) listSecrets() {
	var names []string
	for _, o := range m.objects {
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

func isMetalLB(o object) bool { return strings.HasPrefix(o.APIVersion, "metallb.io/") }

// sorted returns MetalLB's objects of a kind, by name.
func sorted(objects []object, kind string) []object {
	var of []object
	for _, o := range objects {
		if isMetalLB(o) && o.Kind == kind {
			of = append(of, o)
		}
	}
	slices.SortStableFunc(of, func(a, b object) int {
		return cmp.Or(strings.Compare(a.Metadata.Name, b.Metadata.Name),
			strings.Compare(a.Metadata.Namespace, b.Metadata.Namespace))
	})
	return of
}

// foreign reports whether o configures MetalLB with a kind that Landfall does not have. MetalLB
// itself writes the status kinds, so they do not count.
func foreign(o object) bool {
	for _, kind := range kinds {
		if o.Kind == kind.name {
			return false
		}
	}
	return isMetalLB(o) && !strings.HasSuffix(o.Kind, "Status") && o.Kind != "ConfigurationState"
}

// known returns the fields that Landfall's type has too, and notes the others.
func (m *migration) known(what, path string, t reflect.Type, given map[string]any) map[string]any {
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
func (m *migration) checkServices(objects []object) {
	var ranges []lb.Range
	for _, o := range m.objects {
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
		for _, in := range o.Status.LoadBalancer.Ingress {
			addr, err := lb.ParseAddr(in.IP)
			if o.Kind != "Service" || o.APIVersion != "v1" || err != nil {
				continue
			}
			if !slices.ContainsFunc(ranges, func(r lb.Range) bool { return r.Contains(addr) }) {
				m.note("Service %s/%s holds %s, which no pool contains: it keeps the address, but no node will announce it",
					o.Metadata.Namespace, o.Metadata.Name, addr)
			}
		}
	}
}

// keepSharing sets spec.sharing of the pools in which Services of different namespaces share an
// address, which MetalLB lets everybody do who knows the key.
func (m *migration) keepSharing(objects []object) {
	holders := map[netip.Addr]map[string]bool{} // the namespaces that share the address
	for _, o := range objects {
		key := cmp.Or(o.Metadata.Annotations["metallb.io/allow-shared-ip"],
			o.Metadata.Annotations["metallb.universe.tf/allow-shared-ip"], o.Metadata.Annotations[lb.AnnotationShare])
		for _, in := range o.Status.LoadBalancer.Ingress {
			addr, err := lb.ParseAddr(in.IP)
			if o.Kind != "Service" || o.APIVersion != "v1" || key == "" || err != nil {
				continue
			}
			if holders[addr] == nil {
				holders[addr] = map[string]bool{}
			}
			holders[addr][o.Metadata.Namespace] = true
		}
	}
	for _, addr := range slices.SortedFunc(maps.Keys(holders), netip.Addr.Compare) {
		for _, o := range m.objects {
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
func contains(pool manifest, addr netip.Addr) bool {
	written, _ := pool.Spec["addresses"].([]any)
	return slices.ContainsFunc(written, func(w any) bool {
		r, err := lb.ParseRange(fmt.Sprint(w))
		return err == nil && r.Contains(addr)
	})
}
