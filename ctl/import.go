package main

import (
	"bufio"
	"fmt"
	"io"
	"strings"

	"github.com/landfall-lb/landfall/ctl/migrate"
	"github.com/landfall-lb/landfall/internal/lb"
)

// importList returns an IPAddressPool for a plain list. Each line has an address, CIDR or range,
// and optionally the Service (namespace/name) or the namespace (namespace/) to reserve it for. A
// comment begins with #.
func importList(name string, r io.Reader) (migrate.Manifest, error) {
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
			return migrate.Manifest{}, fmt.Errorf("line %d: %w, nor an address", n, err)
		}
		addresses = append(addresses, written)
		if len(words) == 1 {
			continue
		}
		namespace, service, ok := strings.Cut(words[1], "/")
		if !ok || namespace == "" || len(words) > 2 {
			return migrate.Manifest{}, fmt.Errorf("line %d: %q is not ADDRESS NAMESPACE/SERVICE", n, strings.TrimSpace(line))
		}
		reservation := map[string]any{"addresses": written, "namespace": namespace}
		if service != "" {
			reservation["name"] = service
		}
		reservations = append(reservations, reservation)
	}
	if err := lines.Err(); err != nil {
		return migrate.Manifest{}, err
	}
	if len(addresses) == 0 {
		return migrate.Manifest{}, fmt.Errorf("the list has no addresses")
	}
	spec := map[string]any{"addresses": addresses}
	if len(reservations) > 0 {
		spec["reservations"] = reservations
	}
	return migrate.NewManifest("IPAddressPool", name, nil, spec), nil
}
