package migrate

import (
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
)

// Reverse returns the merge patch (RFC 7396) that gives an object back what a patch changes.
func Reverse(live, patch map[string]any) map[string]any {
	back := map[string]any{}
	for key, value := range patch {
		was, had := live[key]
		inner, isMap := value.(map[string]any)
		wasInner, wasMap := was.(map[string]any)
		switch {
		case !had:
			back[key] = nil
		case isMap && wasMap:
			back[key] = Reverse(wasInner, inner)
		default:
			back[key] = was
		}
	}
	return back
}

// Combine adds to a reverse patch that is remembered what a further patch needs to be reversed. What
// was remembered first is what was there before any of them. A field that is a map has to stay one.
func Combine(first, further map[string]any) map[string]any {
	both := maps.Clone(first)
	if both == nil {
		both = map[string]any{}
	}
	for key, value := range further {
		known, have := both[key]
		inner, isMap := value.(map[string]any)
		knownInner, knownMap := known.(map[string]any)
		switch {
		case !have:
			both[key] = value
		case isMap && knownMap:
			both[key] = Combine(knownInner, inner)
		}
	}
	return both
}

// Apply returns an object with a merge patch (RFC 7396). It changes neither.
func Apply(live, patch map[string]any) map[string]any {
	out := maps.Clone(live)
	if out == nil {
		out = map[string]any{}
	}
	for key, value := range patch {
		switch value := value.(type) {
		case nil:
			delete(out, key)
		case map[string]any:
			inner, _ := out[key].(map[string]any)
			out[key] = Apply(inner, value)
		default:
			out[key] = value
		}
	}
	return out
}

// selectAlso returns label selectors of which any selects a node (none: every node), so that each
// selects only objects that requirement selects too. requirement has matchLabels or
// matchExpressions, or both.
func selectAlso(selectors any, requirement map[string]any) []any {
	list, _ := selectors.([]any)
	if len(list) == 0 {
		return []any{requirement}
	}
	var all []any
	for _, s := range list {
		selector, _ := s.(map[string]any)
		both := maps.Clone(selector)
		if both == nil {
			both = map[string]any{}
		}
		if labels, ok := requirement["matchLabels"].(map[string]any); ok {
			had, _ := both["matchLabels"].(map[string]any)
			both["matchLabels"] = Apply(had, labels)
		}
		if expressions, ok := requirement["matchExpressions"].([]any); ok {
			had, _ := both["matchExpressions"].([]any)
			both["matchExpressions"] = append(append([]any{}, had...), expressions...)
		}
		all = append(all, both)
	}
	return all
}

// keepOff returns the nodeAffinity of a pod template that adds to affinity: no pod on nodes where
// the label has the value.
func keepOff(affinity any, label, value string) map[string]any {
	const required = "requiredDuringSchedulingIgnoredDuringExecution"
	unlabelled := map[string]any{"key": label, "operator": "NotIn", "values": []any{value}}
	terms, _ := dig(affinity, "nodeAffinity", required, "nodeSelectorTerms").([]any)
	if len(terms) == 0 {
		terms = []any{map[string]any{}}
	}
	var all []any
	for _, t := range terms {
		term, _ := t.(map[string]any)
		more := maps.Clone(term)
		if more == nil {
			more = map[string]any{}
		}
		expressions, _ := more["matchExpressions"].([]any)
		more["matchExpressions"] = append(append([]any{}, expressions...), unlabelled)
		all = append(all, more)
	}
	return map[string]any{"nodeAffinity": map[string]any{required: map[string]any{"nodeSelectorTerms": all}}}
}

// decodeUndo reads the annotation AnnotationUndo; nil without one.
func decodeUndo(text string) (map[string]any, error) {
	if text == "" {
		return nil, nil
	}
	var undo map[string]any
	if err := json.Unmarshal([]byte(text), &undo); err != nil {
		return nil, fmt.Errorf("annotation %s: %w", AnnotationUndo, err)
	}
	return undo, nil
}

// Remember returns a merge patch, of other parts than the metadata, with the annotation
// AnnotationUndo, by which Undo gives the object
// back what it was before this patch and those before it; nil if the object is as the patch
// wants it already.
func Remember(live, patch map[string]any) (map[string]any, error) {
	if reflect.DeepEqual(normal(Apply(live, patch)), normal(live)) {
		return nil, nil
	}
	text, _ := dig(live, "metadata", "annotations", AnnotationUndo).(string)
	before, err := decodeUndo(text)
	if err != nil {
		return nil, err
	}
	undo, err := json.Marshal(Combine(before, Reverse(live, patch)))
	if err != nil {
		return nil, err
	}
	patch = maps.Clone(patch)
	patch["metadata"] = map[string]any{"annotations": map[string]any{AnnotationUndo: string(undo)}}
	return patch, nil
}

// Undo returns the merge patch that gives an object back what it was; nil if nothing was changed.
func Undo(live map[string]any) (map[string]any, error) {
	text, _ := dig(live, "metadata", "annotations", AnnotationUndo).(string)
	patch, err := decodeUndo(text)
	if patch == nil || err != nil {
		return nil, err
	}
	patch["metadata"] = map[string]any{"annotations": map[string]any{AnnotationUndo: nil}}
	return patch, nil
}

// normal returns a value as JSON decodes it.
func normal(v any) any {
	text, err := json.Marshal(v)
	if err != nil {
		return v
	}
	var decoded any
	_ = json.Unmarshal(text, &decoded) // it was encoded above
	return decoded
}

// Within reports whether live has all that spec has; live may have more, such as defaults.
func Within(spec map[string]any, live any) bool {
	had, _ := normal(live).(map[string]any)
	wanted, _ := normal(spec).(map[string]any)
	return reflect.DeepEqual(Apply(had, wanted), Apply(had, nil))
}

// Mark returns an object with the label that says that a migration from MetalLB created it.
func Mark(o Manifest) Manifest {
	o.Metadata.Labels = maps.Clone(o.Metadata.Labels)
	if o.Metadata.Labels == nil {
		o.Metadata.Labels = map[string]string{}
	}
	o.Metadata.Labels[LabelFrom] = FromMetalLB
	return o
}
