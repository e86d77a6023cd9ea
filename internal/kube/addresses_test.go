package kube

import (
	"os"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/landfall-lb/landfall/api/v1beta1"
)

// TestParserAgreesWithTheAPIServer reads the table of values that is checked against a real API
// server: what that takes must be read, and what it refuses would not have been.
func TestParserAgreesWithTheAPIServer(t *testing.T) {
	file, err := os.ReadFile("../../api/v1beta1/testdata/addresses.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var rows []struct {
		Value   string `json:"value"`
		Refused string `json:"refused"`
	}
	if err := yaml.UnmarshalStrict(file, &rows); err != nil {
		t.Fatal(err)
	}
	for _, row := range rows {
		_, pool := convertPool(
			&v1beta1.IPAddressPool{
				Spec: v1beta1.IPAddressPoolSpec{Addresses: []v1beta1.AddressRange{v1beta1.AddressRange(row.Value)}}})
		if (pool.Problem != nil) != (row.Refused != "") {
			t.Errorf("%q: problem %v, while the API server's is %q", row.Value, pool.Problem, row.Refused)
		}
	}
}
