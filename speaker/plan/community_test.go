package plan

import "testing"

func TestWellKnownCommunity(t *testing.T) {
	c, refusal := resolveOne("graceful-shutdown", nil)
	if refusal != nil || c != GracefulShutdown || c.String() != "65535:0" {
		t.Errorf("graceful-shutdown is %v, refusal %v", c, refusal)
	}
}
