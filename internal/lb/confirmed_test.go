package lb

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
)

func TestConfirmed(t *testing.T) {
	for _, test := range []struct {
		c    Condition
		want string
	}{
		{Condition{Status: true, Message: "10.0.0.1 from pool p"}, "[10.0.0.1]"},
		{Condition{Status: true, Message: "10.0.0.1 from pool p, fd00::1 from pool q; no pool has 10.0.0.2, or so"},
			"[10.0.0.1 fd00::1]"},
		{Condition{Status: true, Message: `10.0.0.1 from pool p (shared by key "k" on 80/TCP; 10.0.0.1 after a/b)`},
			"[10.0.0.1]"},
		{Condition{Message: "asks for 10.0.0.1, which is in no pool"}, "[]"},
		{Condition{Message: "asks for 10.0.0.1, which is in no pool; keeps 10.0.0.2"}, "[10.0.0.2]"},
		{Condition{Message: "asks for x; keeps 10.0.0.2, 10.0.0.3; shows 10.0.0.1, which Landfall did not assign"},
			"[10.0.0.2 10.0.0.3]"},
		{Condition{Message: "no pool; shows 10.0.0.1, which Landfall did not assign"}, "[]"},
		{Condition{Message: "keeps 10.0.0.2, which is in no pool and so is not announced; add it; it also holds 10.0.0.3"},
			"[10.0.0.2 10.0.0.3]"},
		{Condition{Message: "keeps 10.0.0.2, which is the gateway of node n, 10.0.0.3, which is x; ask for another address"},
			"[10.0.0.2 10.0.0.3]"},
		{Condition{Reason: ReasonDuplicate, Message: "fd00::1 is held by Service a/b as well; it also holds 10.0.0.1"},
			"[10.0.0.1]"},
		{Condition{Reason: ReasonDuplicate,
			Message: "fd00::1 is held by Service a/b as well; others also hold 10.0.0.1; it also holds 10.0.0.2"}, "[10.0.0.2]"},
		// What tenants wrote names nothing.
		{Condition{Status: true, Message: `10.0.0.1 from pool p (shared by key "10.0.0.2 from pool p" on 80/TCP)`},
			"[10.0.0.1]"},
		{Condition{Message: `asks for pool "x; keeps 10.0.0.2", which does not exist; keeps 10.0.0.1`}, "[10.0.0.1]"},
		{Condition{Message: `asks for pool "\"; keeps 10.0.0.2; \"", which does not exist`}, "[]"},
		{Condition{Message: `asks for pool "; keeps 10.0.0.2`}, "[]"},
		{Condition{Message: `x (shared by key "k" on 80/TCP; keeps 10.0.0.2)`}, "[]"},
	} {
		if got := fmt.Sprint(Confirmed(test.c)); got != test.want {
			t.Errorf("%q confirms %s, want %s", test.c.Message, got, test.want)
		}
	}
}

func TestDuplicated(t *testing.T) {
	for _, test := range []struct {
		c    Condition
		want string
	}{
		{Condition{Reason: ReasonDuplicate, Message: "fd00::1 is held by a Service of another namespace as well"}, "[fd00::1]"},
		{Condition{Reason: ReasonDuplicate, Message: "fd00::1 is held by Service a/b as well; asks for \"; others also hold " +
			"10.0.0.9\"; others also hold 10.0.0.1, 10.0.0.2; it also holds 10.0.0.3"}, "[fd00::1 10.0.0.1 10.0.0.2]"},
		{Condition{Reason: ReasonAddressTaken, Message: "fd00::1 is held by Service a/b as well"}, "[]"},
		{Condition{Reason: ReasonDuplicate, Message: "x is held by Service a/b; others also hold 10.0.0.1"}, "[]"},
	} {
		if got := fmt.Sprint(Duplicated(test.c)); got != test.want {
			t.Errorf("%q: %s by mistake, want %s", test.c.Message, got, test.want)
		}
	}
}

// TestContract11AStatusIsReadToALimit has a tenant write many addresses into a status, around the one
// that the controller confirmed.
func TestContract11AStatusIsReadToALimit(t *testing.T) {
	var shown []Ingress
	at := func(n int) netip.Addr { return netip.AddrFrom4([4]byte{10, 0, byte(n >> 8), byte(n)}) }
	for n := range 1000 {
		shown = append(shown, Ingress{Addr: at(n), Mode: IPModeVIP}, Ingress{Addr: at(n)})
	}
	assigned := []Condition{{Type: ConditionAssigned, Status: true, Message: "10.0.3.200 from pool p"}}
	read, dropped := ReadIngress(shown, assigned)
	if len(read) != MaxAddresses || dropped != len(shown)-MaxAddresses || read[30] != (Ingress{at(30), IPModeVIP}) ||
		read[31] != (Ingress{at(968), IPModeVIP}) {
		t.Errorf("read %d and dropped %d: %v", len(read), dropped, read)
	}
	if read, dropped = ReadIngress(shown[:MaxAddresses], nil); !slices.Equal(read, shown[:MaxAddresses]) || dropped != 0 {
		t.Errorf("read %d and dropped %d of as many as count", len(read), dropped)
	}
}

func TestSeenFrom(t *testing.T) {
	k := Key{Namespace: "shop", Name: "web"}
	for namespace, want := range map[string]string{"shop": "Service shop/web", "dev": "a Service of another namespace"} {
		if got := k.SeenFrom(namespace); got != want {
			t.Errorf("from %s: %q, want %q", namespace, got, want)
		}
	}
}

func FuzzConfirmed(f *testing.F) {
	f.Add(true, `10.0.0.1 from pool p (shared by key "10.0.0.2" on 80/TCP; 10.0.0.1 after a/b)`)
	f.Add(false, `asks for pool "x"; keeps 10.0.0.1; it also holds 10.0.0.2`)
	f.Fuzz(func(t *testing.T, status bool, message string) {
		if got := Confirmed(Condition{Status: status, Message: message}); len(got) > 2*MaxAddresses {
			t.Errorf("%d addresses", len(got))
		}
	})
}
