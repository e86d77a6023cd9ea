package e2e

import (
	"fmt"
	"os"
	"strings"
	"testing"
)

// leastRows is how many rows the catalogue has to have.
const leastRows = 300

// TestCatalogueIsListed compares docs/bad-input.md with the catalogue.
func TestCatalogueIsListed(t *testing.T) {
	t.Parallel()
	var table strings.Builder
	total := 0
	add := func(kind string, rows int, answer string) {
		fmt.Fprintf(&table, "| %s | %d | %s |\n", kind, rows, answer)
		total += rows
	}
	const refusal = "the API server names the field and the value"
	names := map[string]string{"services": "Services", "endpointslices": "EndpointSlices", "nodes": "Nodes",
		"secrets": "Secrets", "pools": "IPAddressPools", "peers": "BGPPeers",
		"advertisements": "advertisements, profiles, communities"}
	refused := refusedObjects(t)
	for _, file := range sortedKeys(refused) {
		add(names[file], len(refused[file]), refusal)
	}
	schema := schemaRows(t)
	for _, file := range sortedKeys(schema) {
		n := 0
		for _, row := range schema[file] {
			if !row.Taken {
				n++
			}
		}
		add(file, n, refusal)
	}
	add("**all**", total, "")
	page, err := os.ReadFile("../docs/bad-input.md")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(page), table.String()) {
		t.Errorf("docs/bad-input.md does not have this table:\n%s", table.String())
	}
	if total/2 < leastRows { // with the line of all of them
		t.Errorf("%d rows, want %d", total/2, leastRows)
	}
}
