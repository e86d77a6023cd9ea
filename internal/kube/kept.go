package kube

import (
	"crypto/sha256"
	"fmt"
	"strings"
)

const (
	// maxKept is how many bytes of what a tenant writes into one annotation are kept: more than any value that
	// means something, and than any message quotes. Every node keeps all Services, and an object has room for
	// 256 KiB of annotations.
	maxKept = 256
	// maxKeptAddresses is how many different entries of a list of addresses are kept: more than a Service can
	// ask for.
	maxKeptAddresses = 64
)

// kept returns a value as it is kept. What is too long to mean anything is cut.
func kept(value string) string {
	if len(value) <= maxKept {
		return value
	}
	return strings.Clone(value[:maxKept])
}

// keptKey is kept for values that may be anything, and are compared with one another: those that differ still
// do.
func keptKey(value string) string {
	if len(value) <= maxKept {
		return value
	}
	return fmt.Sprintf("%s...%x", value[:maxKept], sha256.Sum256([]byte(value)))
}
