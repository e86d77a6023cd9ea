package lb

import (
	"net/netip"
	"testing"
	"time"
)

// TestProgramsAgreeOnTraces has what two programs know of one address be one trace, and what differs be another.
func TestProgramsAgreeOnTraces(t *testing.T) {
	root := Span{UID: "a", VIP: netip.MustParseAddr("192.0.2.1"), Name: SpanAssigned, Start: time.Unix(1, 0)}
	child := Span{UID: "a", VIP: root.VIP, Name: SpanProgrammed, Start: time.Unix(2, 0)}
	if root.Trace() != child.Trace() {
		t.Error("two traces")
	}
	if parent, ok := child.Parent(); !ok || parent != root.ID("any") || parent != root.ID("other") {
		t.Errorf("parent %x (%v), root %x", parent, ok, root.ID("any"))
	}
	if _, ok := root.Parent(); ok {
		t.Error("the first span has a parent")
	}
	other := root
	other.UID = "b"
	moved := root
	moved.VIP = netip.MustParseAddr("192.0.2.2")
	again := child
	again.Start = time.Unix(3, 0)
	bgp := child
	bgp.Attributes = []SpanAttribute{{Key: "network.protocol.name", Value: "bgp"}}
	if other.Trace() == root.Trace() || moved.Trace() == root.Trace() {
		t.Error("one trace for two addresses")
	}
	ids := map[[8]byte]bool{root.ID("n1"): true, child.ID("n1"): true, child.ID("n2"): true, again.ID("n1"): true, bgp.ID("n1"): true}
	if len(ids) != 5 {
		t.Errorf("%d IDs of 5 spans", len(ids))
	}
}
