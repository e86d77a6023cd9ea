package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"sigs.k8s.io/yaml"

	"github.com/landfall-lb/landfall/e2e/lab"
)

// hostileNamespace is where the objects of the catalogue are.
const hostileNamespace = "hostile"

// badObject is a row of the catalogue: an object, and what becomes of it.
type badObject struct {
	Name string `json:"name"`
	Kind string `json:"kind"` // empty: that of the file
	// Object is merged into the base of its kind.
	Object map[string]any `json:"object"`
	// Change is merged into the object once it is there, and Status written into its status.
	Change map[string]any `json:"change"`
	Status map[string]any `json:"status"`
	// Refused is part of what the API server answers.
	Refused string `json:"refused"`
	// Taken has the API server take the object in a dry run.
	Taken bool `json:"taken"`
	// Says is what Landfall answers where the API server takes the object.
	Says *answer `json:"says"`
}

// answer is a condition, an entry in the status of a BGPPeer, or an Event.
type answer struct {
	Condition string `json:"condition"` // type
	Event     bool   `json:"event"`
	Status    string `json:"status"`
	State     string `json:"state"`
	Reason    string `json:"reason"`
	Message   string `json:"message"` // part of it
}

// kindOf is what the rows of a kind are merged into.
type kindOf struct {
	resource   schema.GroupVersionResource
	namespaced bool
	base       string
}

var landfallGroup = schema.GroupVersion{Group: "landfall.dev", Version: "v1beta1"}

var kinds = map[string]kindOf{
	"Service": {schema.GroupVersionResource{Version: "v1", Resource: "services"}, true,
		`{apiVersion: v1, spec: {type: LoadBalancer, ports: [{port: 80}]}}`},
	"EndpointSlice": {schema.GroupVersionResource{Group: "discovery.k8s.io", Version: "v1", Resource: "endpointslices"},
		true,
		`{apiVersion: discovery.k8s.io/v1, addressType: IPv4, ports: [{name: "", port: 80}],
		endpoints: [{addresses: [192.168.9.9]}]}`},
	"Node":   {schema.GroupVersionResource{Version: "v1", Resource: "nodes"}, false, `{apiVersion: v1}`},
	"Secret": {schema.GroupVersionResource{Version: "v1", Resource: "secrets"}, true, `{apiVersion: v1}`},
	"IPAddressPool": {landfallGroup.WithResource("ipaddresspools"), false,
		`{apiVersion: landfall.dev/v1beta1, spec: {addresses: [198.18.9.0/24]}}`},
	"L2Advertisement": {landfallGroup.WithResource("l2advertisements"), false,
		`{apiVersion: landfall.dev/v1beta1, spec: {}}`},
	"BGPAdvertisement": {landfallGroup.WithResource("bgpadvertisements"), false,
		`{apiVersion: landfall.dev/v1beta1, spec: {}}`},
	"BGPPeer": {landfallGroup.WithResource("bgppeers"), false,
		`{apiVersion: landfall.dev/v1beta1, spec: {myASN: 64500, peerASN: 64501, peerAddress: 192.0.2.1}}`},
	"BFDProfile": {landfallGroup.WithResource("bfdprofiles"), false, `{apiVersion: landfall.dev/v1beta1, spec: {}}`},
	"Community":  {landfallGroup.WithResource("communities"), false, `{apiVersion: landfall.dev/v1beta1, spec: {}}`},
}

// catalogueFiles are the files of the catalogue and the kinds of their rows.
var catalogueFiles = []struct{ file, kind string }{
	{"services", "Service"}, {"endpointslices", "EndpointSlice"}, {"nodes", "Node"}, {"secrets", "Secret"},
	{"pools", "IPAddressPool"}, {"advertisements", ""}, {"peers", "BGPPeer"},
}

// readCatalogue returns the rows of a file.
func readCatalogue(t *testing.T, path, kind string) []badObject {
	t.Helper()
	var rows []badObject
	data, err := os.ReadFile(path)
	if err == nil {
		err = yaml.UnmarshalStrict(data, &rows)
	}
	if err != nil {
		t.Fatalf("%s: %v", path, err)
	}
	for i := range rows {
		if rows[i].Kind == "" {
			rows[i].Kind = kind
		}
	}
	return rows
}

// refusedObjects returns the rows that the API server refuses by itself, by the kind of object that
// they are about.
func refusedObjects(t *testing.T) map[string][]badObject {
	t.Helper()
	all := map[string][]badObject{}
	for _, f := range catalogueFiles {
		all[f.file] = readCatalogue(t, filepath.Join("catalogue", f.file+".yaml"), f.kind)
	}
	return all
}

// schemaRows are the rows that stand beside the schema: values of addresses, and whole
// specifications. Those that are right are among them.
func schemaRows(t *testing.T) map[string][]badObject {
	t.Helper()
	var addresses []struct{ Value, Refused string }
	var specs []struct {
		Kind    string         `json:"kind"`
		Spec    map[string]any `json:"spec"`
		Refused string         `json:"refused"`
	}
	for file, to := range map[string]any{"addresses": &addresses, "bgp": &specs} {
		data, err := os.ReadFile("../api/v1beta1/testdata/" + file + ".yaml")
		if err == nil {
			err = yaml.UnmarshalStrict(data, to)
		}
		if err != nil {
			t.Fatalf("%s: %v", file, err)
		}
	}
	all := map[string][]badObject{}
	for _, a := range addresses {
		all["addresses of pools"] = append(all["addresses of pools"], badObject{Name: strconv.Quote(a.Value),
			Kind: "IPAddressPool", Object: map[string]any{"spec": map[string]any{"addresses": []any{a.Value}}},
			Refused: a.Refused, Taken: a.Refused == ""})
	}
	for _, s := range specs {
		object := map[string]any{"spec": s.Spec}
		for field := range baseOf(t, s.Kind)["spec"].(map[string]any) {
			if _, set := s.Spec[field]; !set {
				s.Spec[field] = nil // the rows are whole
			}
		}
		text, _ := json.Marshal(s.Spec)
		all["specifications of BGP"] = append(all["specifications of BGP"], badObject{Name: s.Kind + " " + string(text),
			Kind: s.Kind, Object: object, Refused: s.Refused, Taken: s.Refused == ""})
	}
	return all
}

func baseOf(t *testing.T, kind string) map[string]any {
	t.Helper()
	var base map[string]any
	if err := yaml.Unmarshal([]byte(kinds[kind].base), &base); err != nil {
		t.Fatalf("%s: %v", kind, err)
	}
	return base
}

// object returns the object of a row, named after its place in the catalogue.
func (b badObject) object(t *testing.T, name string) *unstructured.Unstructured {
	t.Helper()
	metadata := map[string]any{"name": name}
	if kinds[b.Kind].namespaced {
		metadata["namespace"] = hostileNamespace
	}
	object := baseOf(t, b.Kind)
	object["kind"], object["metadata"] = b.Kind, metadata
	merged := mergeObjects(object, expand(b.Object).(map[string]any))
	return &unstructured.Unstructured{Object: merged}
}

// mergeObjects merges maps; nil takes a field away.
func mergeObjects(into, from map[string]any) map[string]any {
	for key, value := range from {
		sub, isMap := value.(map[string]any)
		base, hasMap := into[key].(map[string]any)
		switch {
		case value == nil:
			delete(into, key)
		case isMap && hasMap:
			into[key] = mergeObjects(base, sub)
		default:
			into[key] = value
		}
	}
	return into
}

// expand writes out what is too long for the table: "(9)x" is x nine times, "(list 9)x" a list of
// nine, and "(names 9)" a list of nine names.
func expand(value any) any {
	switch v := value.(type) {
	case map[string]any:
		for key := range v {
			v[key] = expand(v[key])
		}
	case []any:
		for i := range v {
			v[i] = expand(v[i])
		}
	case string:
		what, rest, ok := strings.Cut(strings.TrimPrefix(v, "("), ")")
		if !ok || v[0] != '(' {
			return v
		}
		kind, count, isList := strings.Cut(what, " ")
		if !isList {
			count = what
		}
		n, err := strconv.Atoi(count)
		if err != nil {
			return v
		}
		if !isList {
			return strings.Repeat(rest, n)
		}
		var list []any
		for i := range n {
			if kind == "names" {
				list = append(list, fmt.Sprintf("n%d", i))
			} else {
				list = append(list, listed(rest, i))
			}
		}
		return list
	}
	return value
}

// listed returns an element of a long list.
func listed(what string, i int) any {
	name := fmt.Sprintf("n%d", i)
	switch what {
	case "endpoint":
		return map[string]any{"addresses": []any{fmt.Sprintf("192.168.%d.%d", 8+i/250, 1+i%250)}}
	case "reservation":
		return map[string]any{"addresses": "198.18.9.0/24", "namespace": name}
	case "selector":
		return map[string]any{"matchLabels": map[string]any{"a": name}}
	case "port":
		return map[string]any{"name": name, "port": 1000 + i}
	case "range":
		return fmt.Sprintf("10.%d.%d.0/24", i/250, i%250)
	case "externalIP":
		return fmt.Sprintf("198.18.0.%d", i)
	case "community":
		return map[string]any{"name": name, "value": "1:2"}
	}
	return what
}

// client returns what creates objects of the row's kind.
func (b badObject) client(l *lab.Lab, object *unstructured.Unstructured) dynamic.ResourceInterface {
	if ns := object.GetNamespace(); ns != "" {
		return l.Dynamic().Resource(kinds[b.Kind].resource).Namespace(ns)
	}
	return l.Dynamic().Resource(kinds[b.Kind].resource)
}

// send does what the row says, and returns the API server's answer to the part that it is to
// refuse.
func (b badObject) send(ctx context.Context, t *testing.T, l *lab.Lab, name string) error {
	t.Helper()
	object := b.object(t, name)
	client := b.client(l, object)
	options := metav1.CreateOptions{FieldValidation: metav1.FieldValidationStrict}
	if b.Taken {
		options.DryRun = []string{metav1.DryRunAll}
	}
	_, err := client.Create(ctx, object, options)
	if b.Change == nil && b.Status == nil {
		if err == nil && !b.Taken && b.Says == nil {
			_ = client.Delete(ctx, object.GetName(), metav1.DeleteOptions{}) // the test fails anyway
		}
		return err
	}
	if err != nil {
		t.Fatalf("cannot create what is to be changed: %v", err)
	}
	if b.Says == nil {
		defer func() {
			if err := client.Delete(ctx, object.GetName(), metav1.DeleteOptions{}); err != nil {
				t.Error(err)
			}
		}()
	}
	change, part := expand(b.Change), []string(nil)
	if b.Status != nil {
		change, part = map[string]any{"status": expand(b.Status)}, []string{"status"}
	}
	patch, err := json.Marshal(change)
	if err != nil {
		t.Fatal(err)
	}
	_, err = client.Patch(ctx, object.GetName(), types.MergePatchType, patch,
		metav1.PatchOptions{FieldValidation: metav1.FieldValidationStrict}, part...)
	return err
}

// refuseObjects sends the rows that the API server is to refuse, and checks its words.
func refuseObjects(t *testing.T, l *lab.Lab, file string, rows []badObject) {
	for i, row := range rows {
		t.Run(row.Name, func(t *testing.T) {
			err := row.send(t.Context(), t, l, fmt.Sprintf("%s-%d", strings.ToLower(strings.ReplaceAll(file, " ", "-")), i))
			switch {
			case row.Taken && err != nil:
				t.Errorf("it is right, and is refused: %v", err)
			case !row.Taken && row.Refused == "":
				t.Error("the row does not say how it is refused")
			case !row.Taken && (err == nil || !strings.Contains(err.Error(), row.Refused)):
				t.Errorf("%v, want a refusal that says %q", err, row.Refused)
			}
		})
	}
}

// sortedKeys returns the keys of the files of the catalogue in order.
func sortedKeys(rows map[string][]badObject) []string {
	var keys []string
	for key := range rows {
		keys = append(keys, key)
	}
	slices.Sort(keys)
	return keys
}
