package kube

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/landfall-lb/landfall/internal/lb"
)

var equateWitness = cmp.Options{cmpopts.EquateComparable(netip.Addr{}), cmpopts.EquateEmpty(),
	cmp.Comparer(func(a, b time.Time) bool { return a.Equal(b) })}

func TestWitnesses(t *testing.T) {
	w := &Witnesses{core: fakeKinds{fake.NewClientset()}, namespace: "landfall-system", name: "landfall-speaker"}
	if said, version, err := w.Read(t.Context()); err != nil || version != "" || len(said.Live) > 0 {
		t.Fatalf("without a Lease: %+v %q %v", said, version, err)
	}
	says := lb.Witness{Node: "a", At: time.Unix(1, 5000), Live: []string{"a", "b"},
		Unserved: []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")}}
	for _, version := range []string{"", "1"} { // created, then renewed; the fake gives no versions
		if _, err := w.Write(t.Context(), says, version); err != nil {
			t.Fatal(err)
		}
		said, _, err := w.Read(t.Context())
		if d := cmp.Diff(says, said, equateWitness...); d != "" || err != nil {
			t.Fatalf("%v: %s", err, d)
		}
		says.At = says.At.Add(time.Second)
	}
}

func TestWitnessThatDoesNotFit(t *testing.T) {
	var many []netip.Addr
	for a := netip.MustParseAddr("2001:db8:ffff:ffff:ffff:ffff:ffff:1"); len(many) < unservedKept+1; a = a.Next() {
		many = append(many, a)
	}
	lease := leaseOf(lb.Witness{Node: "a", Unserved: many})
	if size := len(lease.Annotations[annotationUnserved]); size > 200<<10 {
		t.Errorf("%d bytes", size)
	}
	if said := convertWitness(lease); !said.Partial || len(said.Unserved) != unservedKept {
		t.Errorf("partial %v, %d addresses", said.Partial, len(said.Unserved))
	}
	if said := convertWitness(leaseOf(lb.Witness{Node: "a", Partial: true})); !said.Partial {
		t.Error("read as complete")
	}
	if said := convertWitness(&coordinationv1.Lease{}); !said.Partial {
		t.Error("a Lease of somebody else counts")
	}
}

func FuzzWitness(f *testing.F) {
	f.Add("a,b", "192.0.2.1,2001:db8::1")
	f.Add("", "more")
	f.Fuzz(func(t *testing.T, live, unserved string) {
		said := convertWitness(
			&coordinationv1.Lease{
				ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{annotationLive: live, annotationUnserved: unserved}}})
		if !said.Partial && strings.Contains(unserved, more) {
			t.Fatalf("%q counts as all", unserved)
		}
		if !said.Partial && len(said.Unserved) < unservedKept {
			if again := convertWitness(leaseOf(said)); !cmp.Equal(said, again, equateWitness...) {
				t.Fatalf("%+v is read back as %+v", said, again)
			}
		}
	})
}
