package chaos

import (
	"maps"
	"net/netip"
	"slices"
	"testing"

	"github.com/landfall-lb/landfall/e2e/chaos/contract"
)

func port(network, to string) contract.Port {
	return contract.Port{Network: network, To: netip.MustParseAddrPort(to)}
}

func wantKernel(t *testing.T, got contract.Kernel, named, delivered []contract.Port) {
	t.Helper()
	if !slices.Equal(got.Named, named) {
		t.Errorf("rules name %v, want %v", got.Named, named)
	}
	want := map[contract.Port]bool{}
	for _, p := range delivered {
		want[p] = true
	}
	if !maps.Equal(got.Delivered, want) {
		t.Errorf("%v are delivered, want %v", got.Delivered, want)
	}
}

// TestReadNftables: a Service of each family, one without endpoints, an address that is pinged, and what the kernel
// forgets by itself or is not Landfall's.
func TestReadNftables(t *testing.T) {
	k := contract.Kernel{Delivered: map[contract.Port]bool{}}
	if err := readNftables(`{"nftables": [
{"metainfo": {"json_schema_version": 1}},
{"map": {"family": "ip", "name": "groups", "table": "landfall", "type": ["ipv4_addr", "inet_proto", "inet_service"], "elem": [
  [{"concat": ["172.26.236.177", "tcp", 30229]}, "a11a:6761"], [{"concat": ["172.26.236.180", "udp", 80]}, "a11a:6761"]]}},
{"map": {"family": "ip6", "name": "local-groups", "table": "landfall", "elem": [
  [{"concat": ["fd00:203:0:113::181", "tcp", 81]}, "3f3c:d32a"]]}},
{"set": {"family": "ip", "name": "external", "table": "landfall", "elem": [{"concat": ["172.26.236.185", "tcp", 80]}]}},
{"set": {"family": "ip", "name": "echo", "table": "landfall", "elem": ["172.26.236.182", "192.168.177.20"]}},
{"map": {"family": "ip", "name": "backends", "table": "landfall", "elem": [[{"concat": ["3f3c:d32a", 10000]}, "192.168.177.40"]]}},
{"set": {"family": "ip6", "name": "flows-1", "table": "landfall-rescue", "flags": "timeout", "elem": [
  {"elem": {"val": {"concat": ["fd00:198:51:100::20", 18620, "fd00:172:26:236::183", 80]}, "expires": 5358}}]}},
{"set": {"family": "ip", "name": "shares", "table": "landfall-rescue", "flags": ["timeout"], "elem": ["172.26.236.183"]}},
{"set": {"family": "ip", "name": "vips", "table": "another", "elem": ["172.26.236.184"]}},
{"rule": {"family": "ip", "table": "landfall", "chain": "services", "handle": 4, "expr": []}}]}`, &k); err != nil {
		t.Fatal(err)
	}
	web, local := port("udp", "172.26.236.180:80"), port("tcp", "[fd00:203:0:113::181]:81")
	wantKernel(t, k, []contract.Port{web, local, port("tcp", "172.26.236.185:80"), port("", "172.26.236.182:0")},
		[]contract.Port{web, local})
	if readNftables("no list", &k) == nil {
		t.Error("what is no list is read")
	}
}

func TestReadIptables(t *testing.T) {
	k := contract.Kernel{Delivered: map[contract.Port]bool{}}
	if err := readIptables(`*nat
-A LF-SERVICES -d 0.0.0.10/0.0.0.127 -j LF-SERVICES-0A
-A LF-SERVICES-0A -d 10.96.0.10/32 -p udp -m comment --comment "kube-system/kube-dns:dns cluster IP" -m udp --dport 53 -j LF-SVC-TCOU7JCQXEZGVUNU
-A LF-SERVICES-34 -d 172.26.236.180/32 -p tcp -m comment --comment "default/my-nginx loadbalancer IP" -m tcp --dport 80 -j LF-EXT-L65ENXXZWWSAPRCR
-A LF-SEP-ABCDEFGHIJKLMNOP -d 192.168.177.20/32 -p tcp -m tcp -j DNAT --to-destination 192.168.177.20:80
-A KUBE-SERVICES -d 172.26.236.181/32 -p tcp -m tcp --dport 80 -j KUBE-EXT-X
COMMIT
*filter
-A LF-EXTERNAL-SERVICES -d fd00:172:26:236::185/128 -p tcp -m comment --comment "a/b has no endpoints" -m tcp --dport 80 -j REJECT --reject-with tcp-reset
-A LF-ECHO -d 203.0.113.182/32 -p icmp -j ACCEPT
COMMIT
`, &k); err != nil {
		t.Fatal(err)
	}
	dns, web := port("udp", "10.96.0.10:53"), port("tcp", "172.26.236.180:80")
	wantKernel(t, k, []contract.Port{dns, web, port("tcp", "[fd00:172:26:236::185]:80"), port("", "203.0.113.182:0")},
		[]contract.Port{dns, web})
}

func TestReadFlows(t *testing.T) {
	var k contract.Kernel
	if err := readFlows(`udp      17 15 src=172.26.236.20 dst=172.26.236.180 sport=11818 dport=80 src=192.168.177.20 dst=172.26.236.20 sport=80 dport=11818 mark=0 use=1
udp      17 27 src=172.26.236.177 dst=172.26.236.178 sport=7947 dport=7946 [UNREPLIED] src=172.26.236.178 dst=172.26.236.177 sport=7946 dport=7947 mark=0 use=1
udp      17 5 src=fd00:172:26:236::20 dst=fd00:172:26:236::180 sport=10778 dport=80 src=fd00:192:168:177::20 dst=fd00:172:26:236::20 sport=80 dport=10778 [ASSURED] mark=0 use=1
`, &k); err != nil {
		t.Fatal(err)
	}
	want := []contract.UDPFlow{
		{To: netip.MustParseAddrPort("172.26.236.180:80"), Backend: netip.MustParseAddr("192.168.177.20")},
		{To: netip.MustParseAddrPort("[fd00:172:26:236::180]:80"), Backend: netip.MustParseAddr("fd00:192:168:177::20")}}
	if !slices.Equal(k.UDP, want) {
		t.Errorf("%v, want %v", k.UDP, want)
	}
	if readFlows("udp 17 src=172.26.236.20\n", &k) == nil {
		t.Error("half a connection is read")
	}
}

// A node whose proxy has not written rules for a Service has not lost them either.
func TestProgrammed(t *testing.T) {
	p := programmed{}
	p.note("hung", false)
	p.note("quick", true)
	if p.gone("hung") || p.gone("quick") {
		t.Errorf("before any rules are removed some are gone: %v", p)
	}
	p.note("hung", true)
	p.note("quick", false)
	if p.gone("hung") || !p.gone("quick") {
		t.Errorf("the rules of one node are gone: %v", p)
	}
	p.note("hung", false)
	if !p.gone("hung") {
		t.Errorf("rules that came late and went are there: %v", p)
	}
}
