package ops

import (
	"fmt"
	"testing"
	"time"
)

func TestFlagChecks(t *testing.T) {
	for _, test := range []struct {
		err  error
		want string
	}{
		{OneOf("gate", "none", "proxy", "none"), "<nil>"},
		{OneOf("gate", "", "proxy", "none"), `--gate: "" is neither proxy nor none`},
		{OneOf("mode", "ipvs", "auto", "iptables", "nftables"), `--mode: "ipvs" is none of auto, iptables, nftables`},
		{NotNegative("hold", 0), "<nil>"},
		{NotNegative("hold", -time.Second), "--hold: -1s is negative"},
	} {
		if got := fmt.Sprint(test.err); got != test.want {
			t.Errorf("%s, want %s", got, test.want)
		}
	}
}
