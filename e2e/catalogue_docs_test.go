package e2e

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// leastRows is how many rows the catalogue has to have.
const leastRows = 300

// TestCatalogueIsListed compares docs/reference/bad-input.md with the catalogue.
func TestCatalogueIsListed(t *testing.T) {
	t.Parallel()
	var table strings.Builder
	total := 0
	add := func(kind string, rows int, answer string) {
		fmt.Fprintf(&table, "| %s | %d | %s |\n", kind, rows, answer)
		total += rows
	}
	const refusal = "the API server names the field and the value"
	names := map[string]string{"services": "Services", "endpointslices": "EndpointSlices", "nodes": "Nodes",
		"secrets": "Secrets", "pools": "IPAddressPools", "peers": "BGPPeers",
		"advertisements": "advertisements, profiles, communities"}
	refused := refusedObjects(t)
	for _, file := range sortedKeys(refused) {
		add(names[file], len(refused[file]), refusal)
	}
	schema := schemaRows(t)
	for _, file := range sortedKeys(schema) {
		n := 0
		for _, row := range schema[file] {
			if !row.Taken {
				n++
			}
		}
		add(file, n, refusal)
	}
	for _, file := range []string{"services", "objects"} {
		n := 0
		for _, row := range readCatalogue(t, filepath.Join("catalogue", "told-"+file+".yaml"), "Service") {
			if *row.Says != (answer{}) {
				n++
			}
		}
		add(file+" that the API server takes", n, "condition, status or Event, with reason and value")
	}
	add("endpoints of a Service", len(endpointRows()), "refused, or another endpoint")
	add("BGP messages", len(hostilePeers()[0].rows())+2, "NOTIFICATION with code and subcode, or the session goes on")
	add("BFD packets", len(bfdRows())+1, "silence, counted by reason")
	mac := make(net.HardwareAddr, 6)
	add("ARP and NDP frames", len(brokenARP(mac, mac))+len(brokenNDP(mac, mac, netip.IPv6Unspecified()))+2,
		"silence, counted by reason")
	key := make([]byte, 32)
	silent, answered := tcpGossip(t, key, key)
	add("gossip, with and without the key, over IPv4 and IPv6",
		2*(len(unreadGossip())+len(udpGossip(t, key, key))+len(silent)+len(answered)+2),
		"silence, and a line in the log; the key's message is left out as a whole")
	plain, forged := metricsServer("a stranger's token")
	add("metrics and health ports", len(anyServer())+len(plain)+len(forged)+len(healthServer())+len(noTLS())+4,
		"the status of HTTP, or an alert of TLS")
	add("status sockets", len(anyServer())+len(statusServer())+len(slowStatus())+1,
		"the status of HTTP, or the end of the connection")
	add("the dashboard", len(dashboardServer("", "")), "the status of HTTP")
	add("the relay's port", len(relayStreams())+len(relayDatagrams())+1,
		"a reset over TCP, silence over UDP, counted; no answer")
	add("lines to the feed", len(feedRows())+len(slowFeed())+1,
		"the reader is ignored or disconnected, and the log says why")
	add("lines to the relay's feed", len(relayFeedRows())+1, "the relay is disconnected, and the log says why")
	for _, target := range packetTargets("", "") {
		n := len(target.rows(netip.AddrPort{}))
		if target.floods() {
			n += 2
		}
		add("packets to "+target.name, n, "SYN-ACK, RST, ICMP, a pod, or silence, in nftables and in iptables mode")
	}
	add("**all**", total, "")
	page, err := os.ReadFile("../docs/reference/bad-input.md")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(page), table.String()) {
		t.Errorf("docs/reference/bad-input.md does not have this table:\n%s", table.String())
	}
	if total/2 < leastRows { // with the line of all of them
		t.Errorf("%d rows, want %d", total/2, leastRows)
	}
}
