package migrate

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// FuzzUndo checks that whatever the annotation of an earlier run holds, it is refused, or a further change keeps
// what it says: an object is given back what it was.
func FuzzUndo(f *testing.F) {
	f.Add(`{"spec":{"a":1}}`, `{"spec":{"a":2}}`)
	f.Add(`{"spec":{"a":null}}`, `{"spec":{"a":{"b":null}}}`)
	f.Add(`null`, `{}`)
	f.Add(`[]`, `{"spec":"x"}`)
	f.Add(`{"metadata":{"annotations":{"mine":null}}}`, `{"spec":{"a":1}}`)
	f.Add(``, `{"spec":{"a":1e400}}`)
	f.Fuzz(func(t *testing.T, annotation, change string) {
		var patch map[string]any
		if err := json.Unmarshal([]byte(change), &patch); err != nil || patch["metadata"] != nil {
			return
		}
		live := map[string]any{"metadata": map[string]any{"annotations": map[string]any{AnnotationUndo: annotation}}}
		was, err := Undo(live)
		if err != nil {
			if remembered, also := Remember(live, patch); also == nil && remembered != nil {
				t.Fatalf("%q cannot be undone: %v; but is added to: %v", annotation, err, remembered)
			}
			return
		}
		if was == nil {
			was = map[string]any{}
		}
		if text, _ := dig(was, "metadata", "annotations", AnnotationUndo).(string); text != "" {
			t.Fatalf("undone, the object is still annotated %q", text)
		}
		further, err := Remember(live, patch)
		if err != nil || further == nil {
			return
		}
		undo, err := Undo(Apply(live, further))
		if err != nil {
			t.Fatalf("%q, then %s: %v", annotation, change, err)
		}
		if delete(was, "metadata"); !has(undo, was) {
			t.Errorf("%q, then %s: undone by (-first +now)\n%s", annotation, change, cmp.Diff(was, undo))
		}
	})
}

// has reports whether an object has all fields of a part, null ones too.
func has(object, part map[string]any) bool {
	for key, value := range part {
		inner, isMap := value.(map[string]any)
		held, hasMap := object[key].(map[string]any)
		if _, ok := object[key]; !ok || isMap != hasMap || isMap && !has(held, inner) ||
			!isMap && !reflect.DeepEqual(object[key], value) {
			return false
		}
	}
	return true
}

// FuzzMigrate checks that whatever a file with MetalLB's objects holds is converted, or refused.
func FuzzMigrate(f *testing.F) {
	f.Add("apiVersion: metallb.io/v1beta1\nkind: IPAddressPool\nmetadata: {name: a, namespace: m}\n" +
		"spec: {addresses: [192.0.2.0/24]}\n---\nkind: BGPPeer\nmetadata: {name: b}\nspec: {myASN: 1, peerASN: 2}\n")
	f.Add(`{"kind":"List","items":[{"kind":"Service","metadata":{"name":"a"},"status":{"loadBalancer":{}}}]}`)
	f.Add("kind: CommunityList\nitems: [null, {spec: []}]\n")
	f.Fuzz(func(t *testing.T, text string) {
		objects, err := Decode(strings.NewReader(text))
		if err != nil {
			return
		}
		for _, o := range Convert(objects).Objects {
			if o.Kind == "" || o.Spec == nil {
				t.Errorf("an object without a kind or a specification: %+v", o)
			}
		}
	})
}

// FuzzReadKubeProxy checks that whatever kube-proxy's configuration holds, each field with a value is answered, and what
// is said to be taken is among the chart's values.
func FuzzReadKubeProxy(f *testing.F) {
	for _, seed := range []string{`{"mode":"ipvs","ipvs":{"scheduler":"sh","excludeCIDRs":["10.0.0.0/8"]}}`,
		`{"mode":"nftables","clusterCIDR":"10.244.0.0/16","nodePortAddresses":[],"conntrack":{"maxPerCore":null}}`,
		`{"mode":"userspace","iptables":{"masqueradeBit":0,"masqueradeAll":true},"winkernel":{"x":{"y":1}}}`,
		`{"mode":7,"proxy":1,"ipvs":[],"iptables":"x","detectLocal":{"bridgeInterface":{}},"future":{"a":{"b":"c"}}}`,
		`{"apiVersion":"x","kind":"y","ipvs.scheduler":"rr","":{"":1}}`} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		var config map[string]any
		if json.Unmarshal([]byte(text), &config) != nil {
			return
		}
		k := ReadKubeProxy(config)
		answered := map[string]bool{}
		for _, s := range k.Settings {
			answered[s.Field] = true
			if value := dig(k.Values, strings.Split(s.Chart, ".")...); s.Chart != "" && value == nil {
				t.Errorf("%s: %s is said to be taken as %s, which is not set", text, s.Field, s.Chart)
			}
		}
		for _, field := range k.Unknown {
			answered[field] = true
		}
		var leaves func(path string, of map[string]any)
		leaves = func(path string, of map[string]any) {
			for name, value := range of {
				field := path + name
				inner, isMap := value.(map[string]any)
				switch {
				case field == "apiVersion", field == "kind", answered[field], empty(value):
				case isMap:
					leaves(field+".", inner)
				default:
					t.Errorf("%s: nothing is said of %s", text, field)
				}
			}
		}
		leaves("", config)
		PlanKubeProxy(config, Workload{}, Choices{})
		k.NoteOldKernels(nil)
	})
}
