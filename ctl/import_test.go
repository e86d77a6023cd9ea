package main

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/landfall-lb/landfall/internal/lb"
)

func TestImport(t *testing.T) {
	pool, err := importList(
		"old",
		strings.NewReader("# from the sheet\n192.0.2.7\n192.0.2.10 - 192.0.2.12 web/front\n2001:db8::1, web/ # all of web\n"))
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]any{
		"addresses": []any{"192.0.2.7/32", "192.0.2.10-192.0.2.12", "2001:db8::1/128"},
		"reservations": []any{
			map[string]any{"addresses": "192.0.2.10-192.0.2.12", "namespace": "web", "name": "front"},
			map[string]any{"addresses": "2001:db8::1/128", "namespace": "web"},
		},
	}
	if diff := cmp.Diff(want, pool.Spec); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	for list, want := range map[string]string{
		"192.0.2.1\nnonsense\n": `line 2: "nonsense"`, "192.0.2.1 web\n": "line 1:", "192.0.2.1 a/b c\n": "line 1:",
		"# none\n": "no address",
	} {
		if _, err := importList("x", strings.NewReader(list)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", list, err, want)
		}
	}
}

func FuzzImportList(f *testing.F) {
	f.Add("192.0.2.1 shop/web # taken\n192.0.2.8 - 192.0.2.9, dev/\nfd00::/64\n")
	f.Fuzz(func(t *testing.T, list string) {
		pool, err := importList("x", strings.NewReader(list))
		if err != nil {
			return
		}
		for _, written := range pool.Spec["addresses"].([]any) {
			if _, err := lb.ParseRange(written.(string)); err != nil {
				t.Errorf("%q has addresses that no pool takes: %v", list, err)
			}
		}
	})
}
