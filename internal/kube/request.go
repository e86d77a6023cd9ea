package kube

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/landfall-lb/landfall/internal/lb"
)

// requests reads what a Service requests, of which it may say the same in several places.
type requests struct {
	annotations map[string]string
	// prefixes are those of the annotations that count, ours first.
	prefixes []string
	// disagreement tells the first two places that do not say the same.
	disagreement string
}

func requestsOf(o *corev1.Service, metallb bool) *requests {
	r := &requests{annotations: o.Annotations, prefixes: []string{lb.DriverName}}
	if metallb {
		r.prefixes = append(r.prefixes, "metallb.io", "metallb.universe.tf")
	}
	return r
}

// annotation returns the value of an annotation under the first prefix that has one.
func (r *requests) annotation(name string) string {
	_, value := r.read(name, func(a, b string) bool { return a == b })
	return value
}

// read also returns the full name of the annotation, and notes one under another prefix that does
// not agree.
func (r *requests) read(name string, agree func(a, b string) bool) (first, value string) {
	for _, prefix := range r.prefixes {
		full := prefix + strings.TrimPrefix(name, lb.DriverName)
		switch other := strings.TrimSpace(r.annotations[full]); {
		case other == "":
		case first == "":
			first, value = full, other
		case !agree(value, other):
			r.disagree("annotation "+first, value, "annotation "+full, other)
		}
	}
	return first, value
}

// addresses returns the addresses requested by annotation, else by the field spec.loadBalancerIP,
// which has room for one of them.
func (r *requests) addresses(field string) string {
	name, value := r.read(lb.AnnotationAddresses, func(a, b string) bool {
		return slices.Equal(sortedAddresses(a), sortedAddresses(b))
	})
	switch field = strings.TrimSpace(field); {
	case name == "":
		return field
	case field != "" && !slices.Contains(sortedAddresses(value), sortedAddresses(field)[0]):
		r.disagree("spec.loadBalancerIP", field, "annotation "+name, value)
	}
	return value
}

func (r *requests) disagree(a, one, b, other string) {
	const most = 80 // what a tenant writes goes into a condition
	if r.disagreement == "" {
		r.disagreement = fmt.Sprintf("%s is %.*q and %s is %.*q", a, most, one, b, most, other)
	}
}

// sortedAddresses returns a list of addresses in an order and spelling of their own.
func sortedAddresses(list string) []string {
	addresses := splitAddresses(list)
	for i, written := range addresses {
		if addr, err := lb.ParseAddr(written); err == nil {
			addresses[i] = addr.String()
		}
	}
	slices.Sort(addresses)
	return addresses
}

// splitAddresses returns the entries of a list, each once.
func splitAddresses(list string) []string {
	if strings.TrimSpace(list) == "" {
		return nil
	}
	var addresses []string
	for a := range strings.SplitSeq(list, ",") {
		if a = kept(strings.TrimSpace(a)); !slices.Contains(addresses, a) {
			addresses = append(addresses, strings.Clone(a))
		}
		if len(addresses) == maxKeptAddresses {
			break
		}
	}
	return addresses
}
