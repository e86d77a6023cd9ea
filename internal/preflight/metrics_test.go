package preflight

import (
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/landfall-lb/landfall/internal/lb"
)

func TestCollector(t *testing.T) {
	note := lb.Find(lb.ReasonNodeExcluded, "on purpose")
	note.Note = true
	found := []lb.Finding{lb.Find(lb.ReasonForwardDropped, "here"), note, lb.Find(lb.ReasonForwardDropped, "there")}
	const want = `
# HELP landfall_x What keeps traffic from this node, outside of Landfall, by reason; Events on the Node name it.
# TYPE landfall_x gauge
landfall_x{reason="ForwardDropped"} 2
`
	if err := testutil.CollectAndCompare(Collector("landfall_x", func() []lb.Finding { return found }),
		strings.NewReader(want)); err != nil {
		t.Error(err)
	}
}
