package nft

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/nstest"
	"github.com/landfall-lb/landfall/proxy/plan"
)

type rules = map[string][]plan.ForwardRule

var (
	unknown, established, icmp = plan.Accept{}, plan.Accept{Established: true}, plan.Accept{ICMP: true}
	all, reject                = plan.ForwardRule{Verdict: plan.VerdictAccept}, plan.ForwardRule{Verdict: plan.VerdictDrop}
)

func on(name string) plan.Accept { return plan.Accept{Interfaces: []string{name}} }

func to(ports ...uint16) plan.Accept { return plan.Accept{Ports: ports, NotUDP: true} }

// accept is a rule that accepts packets of which something is known.
func accept(what plan.Accept) plan.ForwardRule {
	return plan.ForwardRule{Accept: what, Conditional: true, Verdict: plan.VerdictAccept}
}

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
	chain jumped { reject; }
	chain few { }
	chain passes {
		type filter hook forward priority 7;
		tcp dport 1 jump jumped
		jump few
		return
	}
}
table arp mine {
	chain fw { type filter hook input priority 5; policy drop; }
}`)
	chains, err := ForwardChains(c)
	if err != nil {
		t.Fatal(err)
	}
	slices.SortFunc(chains, func(a, b plan.ForwardChain) int {
		return cmp.Or(cmp.Compare(a.Family, b.Family), cmp.Compare(a.Name, b.Name))
	})
	const in = "FORWARD"
	want := []plan.ForwardChain{
		{Family: "inet", Table: "firewalld", Name: "filter_FORWARD", Rules: rules{"filter_FORWARD": {reject}}},
		{Family: "ip", Table: "filter", Name: in, Drops: true, Rules: rules{
			in: {accept(established), accept(established), accept(to(1)), accept(on("docker0")), accept(on("cali*")),
				accept(unknown), accept(icmp), accept(icmp), {Accept: on("docker0"), Conditional: true, To: "BRIDGE"},
				{Accept: established, Conditional: true, To: "KNOWN"}, {To: "FLANNEL-FWD"}, {}, reject,
				{Accept: to(2), Conditional: true, To: "OTHER", Goto: true}},
			"FLANNEL-FWD": {accept(unknown)}, "OTHER": {all}, "BRIDGE": {all}, "KNOWN": {all}}},
		{Family: "ip6", Table: "mine", Name: "fw", Drops: true, Rules: rules{"fw": {accept(to())}}},
		{Family: "ip6", Table: "mine", Name: "none", Drops: true, Rules: rules{"none": {{To: "mutual"}}, "mutual": {reject}}},
		{Family: "ip6", Table: "mine", Name: "passes", Rules: rules{"passes": {
			{Accept: to(1), Conditional: true, To: "jumped"}, {To: "few"}, {Verdict: plan.VerdictReturn}}, "few": nil}},
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
		"-A FORWARD -m comment --comment x -j REJECT",
		"-A DOCKER-USER -s 10.0.0.0/8 -j ACCEPT", "-A DOCKER-USER -j RETURN",
	} {
		ns.Run(t, "iptables-nft", strings.Fields(rule)...)
	}
	chains, err := ForwardChains(c)
	if err != nil {
		t.Fatal(err)
	}
	const in = "FORWARD"
	both := on("docker0")
	both.Established = true
	want := []plan.ForwardChain{{Family: "ip", Table: "filter", Name: in, Drops: true, Rules: rules{
		in: {{To: "DOCKER-USER"}, accept(both), accept(established), accept(unknown), accept(unknown), accept(on("docker0")),
			accept(on("virbr*")), accept(icmp), {Accept: to(), Conditional: true, Verdict: plan.VerdictDrop}, {}, reject},
		"DOCKER-USER": {accept(unknown), {Verdict: plan.VerdictReturn}}}}}
	if diff := gocmp.Diff(want, chains); diff != "" {
		t.Errorf("chains (-want +got):\n%s", diff)
	}
}

// Of chains that see what is for the node, it is known which ports they accept: as nft writes that, in sets
// too, and as iptables does. What is not certain counts as accepted.
func TestInputChains(t *testing.T) {
	ns := nstest.New(t)
	c := open(t, ns)
	ns.Run(t, "nft", `
table inet mine {
	set named { type inet_service; elements = { 53, 443 }; }
	chain plain {
		type filter hook input priority 0; policy drop;
		iifname lo accept
		ct state established,related accept
		meta l4proto icmp accept
		meta l4proto udp accept
		tcp dport 22 accept
		tcp dport { 80, 8080 } accept
		tcp dport @named jump more
	}
	chain more { }
	chain range { type filter hook input priority 1; policy drop; tcp dport 8000-9000 accept; }
	chain ranges { type filter hook input priority 2; policy drop; tcp dport { 22, 8000-9000 } accept; }
	chain others { type filter hook input priority 3; policy drop; tcp dport != { 22, 23 } accept; }
	chain except { type filter hook input priority 4; policy drop; tcp dport != 22 accept; }
	chain source { type filter hook input priority 5; policy drop; tcp sport 22 accept; }
	chain open { type filter hook input priority 6; tcp dport 22 drop; }
	chain last { type filter hook input priority 7; tcp dport 22 accept; reject; }
	chain forward { type filter hook forward priority 0; policy drop; }
}`)
	for _, rule := range []string{"-P INPUT DROP", "-A INPUT -i lo -j ACCEPT",
		"-A INPUT -p tcp -m tcp --dport 22 -j ACCEPT",
		"-A INPUT -p tcp -m multiport --dports 80,443 -j ACCEPT", "-A INPUT -p udp -m udp --dport 7484 -j ACCEPT",
		"-A INPUT -p icmp -j ACCEPT"} {
		ns.Run(t, "iptables-nft", strings.Fields(rule)...)
	}
	ns.Run(t, "ip6tables-nft", "-P", "INPUT", "DROP")
	ns.Run(t, "ip6tables-nft", "-A", "INPUT", "-p", "tcp", "-m", "multiport", "--dports", "22,7000:8000", "-j", "ACCEPT")
	chains, err := InputChains(c)
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]string{}
	for _, chain := range chains {
		for _, protocol := range []lb.Protocol{lb.TCP, lb.UDP} {
			for _, port := range []uint16{22, 443, 7484, 8080} {
				if chain.DropsTo(protocol, port) {
					got[chain.String()] += fmt.Sprint(protocol, " ", port, " ")
				}
			}
		}
	}
	none := "UDP 22 UDP 443 UDP 7484 UDP 8080 "
	want := map[string]string{"inet mine plain": "TCP 443 TCP 7484 ", "inet mine last": "TCP 443 TCP 7484 TCP 8080 " +
		none, "ip filter INPUT": "TCP 7484 TCP 8080 UDP 22 UDP 443 UDP 8080 ", "inet mine range": none,
		"inet mine ranges": none, "inet mine others": none, "inet mine except": none, "inet mine source": none,
		"ip6 filter INPUT": none}
	if diff := gocmp.Diff(want, got); diff != "" {
		t.Errorf("ports that are dropped (-want +got):\n%s", diff)
	}
}
