package plan

import (
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/labels"

	"github.com/landfall-lb/landfall/internal/lb"
)

// badSelector is what is said of a selector that cannot be read.
var badSelector = lb.Refuse(lb.ReasonSelectorInvalid, "spec.nodeSelectors[1] selects nothing")

func TestCheckL2(t *testing.T) {
	selector := func(s string) []labels.Selector {
		parsed, err := labels.Parse(s)
		if err != nil {
			t.Fatal(err)
		}
		return []labels.Selector{parsed}
	}
	pools := map[string]lb.Pool{"lan": {Name: "lan", Labels: labels.Set{"zone": "a"}}, "dmz": {Name: "dmz"}}
	nodes := map[string]lb.Node{"n1": {Name: "n1", Labels: labels.Set{"rack": "1"}}, "n2": {Name: "n2"}}
	for name, test := range map[string]struct {
		ad     lb.L2Advertisement
		pools  map[string]lb.Pool
		reason lb.Reason // Ready if ""
		says   string
	}{
		"everything":     {lb.L2Advertisement{}, pools, "", "selects pools and nodes"},
		"by name":        {lb.L2Advertisement{Pools: []string{"lan"}}, pools, "", ""},
		"by label":       {lb.L2Advertisement{PoolSelectors: selector("zone=a")}, pools, "", ""},
		"nodes":          {lb.L2Advertisement{NodeSelectors: selector("rack=1")}, pools, "", ""},
		"one of two":     {lb.L2Advertisement{NodeSelectors: append(selector("rack=9"), selector("rack=1")...)}, pools, "", ""},
		"unknown pool":   {lb.L2Advertisement{Pools: []string{"lan", "old"}}, pools, lb.ReasonUnknownPool, "IPAddressPool old"},
		"no label":       {lb.L2Advertisement{PoolSelectors: selector("zone=b")}, pools, lb.ReasonSelectsNoPool, "match no"},
		"no pool at all": {lb.L2Advertisement{}, nil, lb.ReasonSelectsNoPool, "there is no IPAddressPool yet"},
		"no node":        {lb.L2Advertisement{NodeSelectors: selector("rack=9")}, pools, lb.ReasonSelectsNoNode, "none of the"},
		"a selector that cannot be read": {lb.L2Advertisement{BadSelector: badSelector,
			NodeSelectors: append(selector("rack=1"), labels.Nothing())}, pools, lb.ReasonSelectorInvalid, badSelector.Message},
		"no selector that can be read": {lb.L2Advertisement{BadSelector: badSelector,
			NodeSelectors: []labels.Selector{labels.Nothing()}}, pools, lb.ReasonSelectorInvalid,
			badSelector.Message + "; nodeSelectors match none"},
		"neither of both": {lb.L2Advertisement{Pools: []string{"old"}, NodeSelectors: selector("rack=9")}, pools,
			lb.ReasonUnknownPool, "IPAddressPool old; nodeSelectors match none"},
	} {
		t.Run(name, func(t *testing.T) {
			test.ad.Name, test.ad.Generation = "ad", 7
			c := CheckL2(map[string]lb.L2Advertisement{"ad": test.ad}, test.pools, nodes)["ad"]
			want := test.reason
			if want == "" {
				want = lb.ReasonAdvertisementReady
			}
			if c.Type != lb.ConditionReady || c.Status != (test.reason == "") || c.Reason != want || c.Generation != 7 ||
				!strings.Contains(c.Message, test.says) {
				t.Errorf("%+v, want %s: %q", c, want, test.says)
			}
		})
	}
}
