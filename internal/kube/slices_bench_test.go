package kube

import (
	"fmt"
	"testing"

	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/landfall-lb/landfall/internal/lb"
)

// BenchmarkSliceEvents changes one slice after the other of a Service with many, each with one endpoint.
func BenchmarkSliceEvents(b *testing.B) {
	for _, n := range []int{1, 100, 1_000, 10_000} {
		b.Run(fmt.Sprintf("slices=%d", n), func(b *testing.B) {
			told := 0
			store := newSliceStore(lb.MaxSlices, func(lb.Key) { told++ })
			_ = store.Replace(numberedList(n), "1")
			i := 0
			for b.Loop() {
				_ = store.Update(numbered(i*31%n, 1+i/n))
				i++
			}
			b.ReportMetric(float64(told)/float64(i), "told/op")
		})
	}
}

// numbered returns one of many slices of the Service web, which differ in their endpoint, and each in its port from one
// version to the next.
func numbered(i, version int) *discoveryv1.EndpointSlice {
	s := slice(fmt.Sprintf("web-%05d", i), "web", fmt.Sprintf("10.1.%d.%d", i>>8, i&255))
	s.Ports[0].Port = new(int32(8080 + version%1000))
	return s
}

// numberedList returns the first n of them, as a list of the API server.
func numberedList(n int) []any {
	list := make([]any, n)
	for i := range list {
		list[i] = numbered(i, 0)
	}
	return list
}
