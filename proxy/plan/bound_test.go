package plan

import (
	"errors"
	"strings"
	"testing"

	"github.com/landfall-lb/landfall/internal/lb"
)

// Contract clause 10: a Service that is too large says so, and how large it may be.
func TestContract10TooLarge(t *testing.T) {
	desired := New(service(), slice("1 here"), here)
	failure := errors.Join(TooLarge{Elements: 200_000, Limit: 131_072})
	d := Report(desired, Service{Key: web}, failure)[0]
	if d.Refusal == nil || d.Refusal.Reason != lb.ReasonNotProgrammed ||
		!strings.HasPrefix(d.Refusal.Message, "the Service is too large: ") ||
		!strings.Contains(d.Refusal.Message, "200000") || !strings.Contains(d.Refusal.Message, "131072") {
		t.Errorf("refusal %+v", d.Refusal)
	}
}
