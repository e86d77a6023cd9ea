package iptables

import (
	"bytes"
	"net/netip"
	"strings"
	"testing"
)

// FuzzParseChain checks that of whatever iptables prints only rules of the chain are taken, each as it was printed.
func FuzzParseChain(f *testing.F) {
	f.Add("-N KUBE-SVC-X\n-A KUBE-SVC-X -m comment --comment \"a b\" -j KUBE-SEP-Y\n-A KUBE-SVC-X -j DROP\n", "KUBE-SVC-X")
	f.Add("-P INPUT ACCEPT\n-A INPUT-2 -j DROP\n-A INPUT\n", "INPUT")
	f.Add("# Warning: iptables-legacy tables present\r\n-A  -j X", "")
	f.Fuzz(func(t *testing.T, printed, chain string) {
		rules, err := parseChain(strings.NewReader(printed), chain)
		if len(rules) > maxWalkedRules || len(rules) > strings.Count(printed, "-A ") {
			t.Errorf("%d rules from %d bytes", len(rules), len(printed))
		}
		for _, rule := range rules {
			if !strings.Contains(printed, "-A "+chain+" "+rule) || strings.Contains(rule, "\n") {
				t.Errorf("%q is no rule of %q in %q", rule, chain, printed)
			}
		}
		if err != nil || rules == nil || strings.ContainsAny(chain, "\r\n") {
			return
		}
		var again strings.Builder
		for _, rule := range rules {
			again.WriteString("-A " + chain + " " + rule + "\r\n")
		}
		if got, err := parseChain(strings.NewReader(again.String()), chain); err != nil || len(got) != len(rules) {
			t.Errorf("%q: %d rules, and again %d, %v", printed, len(rules), len(got), err)
		}
	})
}

// FuzzIsListed checks that a client is found in a list of the match recent only if that has it, whatever else it has.
func FuzzIsListed(f *testing.F) {
	f.Add([]byte("src=192.0.2.1 ttl: 64 last_seen: 4294 oldest_pkt: 1 4294\n"), []byte{192, 0, 2, 1})
	f.Add([]byte("src=2001:0db8:0000:0000:0000:0000:0000:0001 ttl: 64\n"), netip.MustParseAddr("2001:db8::1").AsSlice())
	f.Add([]byte("src="), []byte{0, 0, 0, 0})
	f.Fuzz(func(t *testing.T, file, address []byte) {
		client, ok := netip.AddrFromSlice(address)
		if !ok {
			return
		}
		if isListed(file, client) && client.Is4() && !bytes.Contains(file, []byte(client.String())) {
			t.Errorf("%s is found in %q", client, file)
		}
		with := append(bytes.TrimSuffix(bytes.Clone(file), []byte("\n")),
			"\nsrc="+client.StringExpanded()+" ttl: 64 last_seen: 1 oldest_pkt: 1 1\n"...)
		if !isListed(with, client) {
			t.Errorf("%s is not found in %q", client, with)
		}
	})
}
