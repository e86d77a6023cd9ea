package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"testing"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/proxy/conntrack"
)

// TestConnections counts connections of clients outside the cluster to VIPs, and names those with
// the most.
func TestConnections(t *testing.T) {
	b := newBench(t)
	b.put("web", "192.0.2.1", "10.200.1.2")
	b.put("db", "192.0.2.2", "10.200.1.3")
	b.nodes.Set("there", lb.Node{Name: "there", Addresses: []netip.Addr{netip.MustParseAddr("172.31.0.2")},
		PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.200.2.0/24")}})
	b.synced()
	b.run()
	var failure error
	b.connections = func(each func(conntrack.Connection)) error {
		for client, to := range map[string]string{
			"10.200.1.2": "192.0.2.1:80", "10.200.2.9": "192.0.2.1:80", // pods
			"172.31.0.2": "192.0.2.1:80", "10.9.0.1": "192.0.2.1:80", // nodes
			"198.51.100.1": "192.0.2.1:81", "198.51.100.2": "10.200.1.2:80", // no VIP
		} {
			each(conntrack.Connection{Client: netip.MustParseAddr(client), To: netip.MustParseAddrPort(to)})
		}
		for i := range 7 {
			for range i + 1 {
				each(conntrack.Connection{Client: netip.AddrFrom4([4]byte{198, 51, 100, byte(i)}),
					To: netip.MustParseAddrPort("192.0.2.1:80")})
			}
		}
		each(conntrack.Connection{Client: netip.MustParseAddr("198.51.100.9"), To: netip.MustParseAddrPort("192.0.2.2:80")})
		return failure
	}
	var text bytes.Buffer
	var got struct {
		connectionsHead
		Services []serviceConnections `json:"services"`
	}
	if err := errors.Join(b.writeStatus(&text, onlyConnections), json.Unmarshal(text.Bytes(), &got)); err != nil {
		t.Fatal(err)
	}
	web, db := key("web").String(), key("db").String()
	want := fmt.Sprintf("29 [{%s 28 [{198.51.100.6 7} {198.51.100.5 6} {198.51.100.4 5} {198.51.100.3 4} "+
		"{198.51.100.2 3}]} {%s 1 [{198.51.100.9 1}]}]", web, db)
	if got := fmt.Sprint(*got.Total, " ", got.Services); got != want {
		t.Errorf("%v, want %s", got, want)
	}
	failure = errors.New("no table")
	text.Reset()
	got.Total = nil
	err := errors.Join(b.writeStatus(&text, onlyConnections), json.Unmarshal(text.Bytes(), &got))
	if err != nil || got.Total != nil || got.Error != "no table" {
		t.Errorf("%v: %s", err, text.String())
	}
}
