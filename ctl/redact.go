package main

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
)

// leftOut stands where something was that may be secret.
const leftOut = "(left out)"

// shortestSecret is the length from which a secret is looked for in other files: what is shorter is
// in many words.
const shortestSecret = 4

// redactor leaves out of objects what may be secret, and remembers it, so that it is left out of
// logs too.
type redactor struct{ secrets map[string]bool }

// object redacts an object as the API server shows it.
func (r *redactor) object(o map[string]any) {
	if meta, ok := o["metadata"].(map[string]any); ok {
		delete(meta, "managedFields")
		if annotations, ok := meta["annotations"].(map[string]any); ok {
			for key, value := range annotations {
				if !shownAnnotation(key) {
					annotations[key] = fmt.Sprintf("%s %d bytes", leftOut, len(fmt.Sprint(value)))
				}
			}
		}
	}
	if status, ok := o["status"].(map[string]any); ok {
		delete(status, "images") // of a Node: a long list
	}
	r.walk(o)
}

// shownAnnotation reports whether an annotation is one that Landfall or Kubernetes reads. Others may
// repeat the whole object, as kubectl's last-applied-configuration does, or hold anything.
func shownAnnotation(key string) bool {
	domain, name, _ := strings.Cut(key, "/")
	switch domain {
	case "landfall.dev", "metallb.io", "metallb.universe.tf", "service.kubernetes.io", "endpoints.kubernetes.io",
		"node.alpha.kubernetes.io", "deployment.kubernetes.io", "deprecated.daemonset.template.generation":
		return true
	}
	return domain == "projectcalico.org" && strings.HasSuffix(name, "Address")
}

func (r *redactor) walk(value any) {
	switch v := value.(type) {
	case map[string]any:
		for key, inner := range v {
			text, isText := inner.(string)
			switch {
			case isText && secretKey(key):
				v[key] = r.leave(text)
			case key == "env":
				r.environment(inner)
			case key == "args" || key == "command":
				r.arguments(inner)
			default:
				r.walk(inner)
			}
		}
	case []any:
		for _, inner := range v {
			r.walk(inner)
		}
	}
}

// secretKey reports whether a field of this name holds a secret. Names of Secrets are none.
func secretKey(key string) bool {
	return slices.Contains([]string{"password", "passphrase", "token", "secret", "apikey", "privatekey", "secretkey"},
		strings.ToLower(key))
}

func (r *redactor) leave(text string) string {
	if len(text) >= shortestSecret {
		r.secrets[text] = true
	}
	return leftOut
}

// environment leaves out values, and shows where others come from.
func (r *redactor) environment(list any) {
	all, _ := list.([]any)
	for _, one := range all {
		if variable, ok := one.(map[string]any); ok {
			if _, has := variable["value"].(string); has {
				variable["value"] = leftOut // most are no secrets: they are not looked for elsewhere
			}
		}
	}
}

// arguments leaves out the values of flags that are named like secrets, but for names of files.
func (r *redactor) arguments(list any) {
	all, _ := list.([]any)
	for i, one := range all {
		text, _ := one.(string)
		flag, value, has := strings.Cut(text, "=")
		if !has || strings.HasSuffix(flag, "file") {
			continue
		}
		for _, word := range []string{"password", "token", "secret", "key"} {
			if strings.Contains(strings.ToLower(flag), word) {
				all[i] = flag + "=" + r.leave(value)
				break
			}
		}
	}
}

// text leaves known secrets out of a text.
func (r *redactor) text(b []byte) []byte {
	// The longest first: one may be in another.
	secrets := make([]string, 0, len(r.secrets))
	for secret := range r.secrets {
		secrets = append(secrets, secret)
	}
	slices.SortFunc(secrets, func(a, b string) int { return len(b) - len(a) })
	for _, secret := range secrets {
		b = bytes.ReplaceAll(b, []byte(secret), []byte(leftOut))
	}
	return b
}
