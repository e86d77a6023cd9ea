package lb

import (
	"net/netip"
	"testing"
)

func TestSubnet(t *testing.T) {
	i := Interface{Addresses: []netip.Prefix{netip.MustParsePrefix("172.26.236.178/24"),
		netip.MustParsePrefix("10.0.0.1/32")}}
	if p, ok := i.Subnet(netip.MustParseAddr("172.26.236.180")); !ok || p.String() != "172.26.236.0/24" {
		t.Errorf("got %v %v", p, ok)
	}
	if p, ok := i.Subnet(netip.MustParseAddr("172.26.237.1")); ok {
		t.Errorf("172.26.237.1 is in %v", p)
	}
}
