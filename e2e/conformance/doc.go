// Package conformance runs the part of upstream's end-to-end suite (k8s.io/kubernetes/test/e2e) that
// tests Services, on the cluster of e2e/cluster, and keeps the results in conformance.json and
// conformance.md in docs/design. The latter says how to use it.
package conformance
