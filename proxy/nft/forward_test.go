package nft

import (
	"cmp"
	"slices"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/landfall-lb/landfall/internal/nstest"
)

// TestForwardChains reads what other programs do with forwarded packets.
func TestForwardChains(t *testing.T) {
	ns := nstest.New(t)
	c := open(t, ns)
	if chains, err := ForwardChains(c); err != nil || len(chains) > 0 {
		t.Errorf("%v, %v in an empty namespace", chains, err)
	}
	ns.Run(t, "nft", `
table ip filter {
	chain FLANNEL-FWD { ip saddr 10.0.0.0/8 accept; }
	chain OTHER { accept; }
	chain BRIDGE { accept; }
	chain KNOWN { accept; }
	chain INPUT { type filter hook input priority 0; policy drop; }
	chain FORWARD {
		type filter hook forward priority 0; policy drop;
		ct state established,related counter accept
		ct state established accept
		ct state new tcp dport 1 accept
		oifname "docker0" iifname != "docker0" accept
		iifname "cali*" accept
		iifname != "eth0" accept
		meta l4proto icmp accept
		ip protocol icmp icmp type echo-request accept
		oifname "docker0" jump BRIDGE
		ct state related jump KNOWN
		counter jump FLANNEL-FWD
		log
		drop
		tcp dport 2 goto OTHER
	}
}
table inet firewalld {
	chain filter_FORWARD { type filter hook forward priority 10; reject; }
}
table ip6 mine {
	chain a { accept; }
	chain fw {
		type filter hook forward priority 5; policy drop;
		tcp dport vmap { 1 : goto a }
	}
	chain none { type filter hook forward priority 6; policy drop; jump mutual; }
	chain mutual { drop; }
}
table arp mine {
	chain fw { type filter hook input priority 5; policy drop; }
}`)
	chains, err := ForwardChains(c)
	if err != nil {
		t.Fatal(err)
	}
	slices.SortFunc(chains, func(a, b ForwardChain) int {
		return cmp.Or(cmp.Compare(a.Family, b.Family), cmp.Compare(a.Name, b.Name))
	})
	const in = "FORWARD"
	want := []ForwardChain{
		{Family: "inet", Table: "firewalld", Name: "filter_FORWARD"},
		{Family: "ip", Table: "filter", Name: in, Drops: true, Accepts: []Accept{
			{Chain: in, Established: true}, {Chain: in, Established: true}, {Chain: in},
			{Chain: in, Interfaces: []string{"docker0"}}, {Chain: in, Interfaces: []string{"cali*"}}, {Chain: in},
			{Chain: in, ICMP: true}, {Chain: in, ICMP: true}, {Chain: in, Interfaces: []string{"docker0"}},
			{Chain: in, Established: true}, {Chain: "FLANNEL-FWD"}, {Chain: "OTHER"}}},
		{Family: "ip6", Table: "mine", Name: "fw", Drops: true, Accepts: []Accept{{Chain: "fw"}}},
		{Family: "ip6", Table: "mine", Name: "none", Drops: true},
	}
	if diff := gocmp.Diff(want, chains); diff != "" {
		t.Errorf("chains (-want +got):\n%s", diff)
	}
}

// TestForwardChainsOfIptables reads what iptables-nft writes, with matches and targets of its own.
func TestForwardChainsOfIptables(t *testing.T) {
	ns := nstest.New(t)
	c := open(t, ns)
	for _, rule := range []string{
		"-P FORWARD DROP", "-N DOCKER-USER", "-A FORWARD -j DOCKER-USER",
		"-A FORWARD -o docker0 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT",
		"-A FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT",
		"-A FORWARD -m conntrack ! --ctstate RELATED,ESTABLISHED -m comment --comment x -j ACCEPT",
		"-A FORWARD -m conntrack --ctstate NEW,RELATED -j ACCEPT", "-A FORWARD -i docker0 ! -o docker0 -j ACCEPT",
		"-A FORWARD -i virbr+ -j ACCEPT", "-A FORWARD -p icmp --icmp-type 3 -j ACCEPT",
		"-A FORWARD -p tcp -j REJECT --reject-with tcp-reset", "-A FORWARD -m comment --comment x -j MARK --set-mark 1",
		"-A DOCKER-USER -s 10.0.0.0/8 -j ACCEPT", "-A DOCKER-USER -j RETURN",
	} {
		ns.Run(t, "iptables-nft", strings.Fields(rule)...)
	}
	chains, err := ForwardChains(c)
	if err != nil {
		t.Fatal(err)
	}
	const in = "FORWARD"
	want := []ForwardChain{{Family: "ip", Table: "filter", Name: in, Drops: true, Accepts: []Accept{
		{Chain: in, Established: true, Interfaces: []string{"docker0"}}, {Chain: in, Established: true}, {Chain: in},
		{Chain: in}, {Chain: in, Interfaces: []string{"docker0"}}, {Chain: in, Interfaces: []string{"virbr*"}},
		{Chain: in, ICMP: true}, {Chain: "DOCKER-USER"}}}}
	if diff := gocmp.Diff(want, chains); diff != "" {
		t.Errorf("chains (-want +got):\n%s", diff)
	}
}
