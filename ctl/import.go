package main

import (
	"bufio"
	"fmt"
	"io"
	"strings"

	"github.com/landfall-lb/landfall/internal/lb"
)

// importList makes a pool of a plain list: on each line an address, CIDR or range, and if wanted
// the Service (namespace/name) or the namespace (namespace/) that it is reserved for. What follows
// a # is a comment.
func importList(name string, r io.Reader) (manifest, error) {
	var addresses, reservations []any
	lines := bufio.NewScanner(r)
	for n := 1; lines.Scan(); n++ {
		line, _, _ := strings.Cut(lines.Text(), "#")
		line = strings.ReplaceAll(strings.ReplaceAll(line, " -", "-"), "- ", "-")
		words := strings.Fields(strings.ReplaceAll(line, ",", " "))
		if len(words) == 0 {
			continue
		}
		written := words[0]
		if addr, err := lb.ParseAddr(written); err == nil {
			written = fmt.Sprintf("%s/%d", addr, addr.BitLen())
		}
		if _, err := lb.ParseRange(written); err != nil {
			return manifest{}, fmt.Errorf("line %d: %w", n, err)
		}
		addresses = append(addresses, written)
		if len(words) == 1 {
			continue
		}
		namespace, service, ok := strings.Cut(words[1], "/")
		if !ok || namespace == "" || len(words) > 2 {
			return manifest{}, fmt.Errorf("line %d: %q is not ADDRESS NAMESPACE/SERVICE", n, strings.TrimSpace(line))
		}
		reservation := map[string]any{"addresses": written, "namespace": namespace}
		if service != "" {
			reservation["name"] = service
		}
		reservations = append(reservations, reservation)
	}
	if err := lines.Err(); err != nil {
		return manifest{}, err
	}
	if len(addresses) == 0 {
		return manifest{}, fmt.Errorf("there is no address in the list")
	}
	spec := map[string]any{"addresses": addresses}
	if len(reservations) > 0 {
		spec["reservations"] = reservations
	}
	return newManifest("IPAddressPool", name, nil, spec), nil
}
