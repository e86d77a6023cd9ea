package plan

import (
	"fmt"
	"slices"
	"strings"
	"testing"
)

var foreignStories = []story{
	{name: "a foreign status is not an assignment", steps: []step{
		{name: "adopts what a pool contains, keeps what MetalLB marked, replaces the rest", do: []change{
			newPool("p", "10.0.0.0/29"), service("adopted", holds("10.0.0.4")), service("marked", holds("172.18.0.3"), marked),
			service("foreign", holds("172.18.0.3")), service("asks", holds("172.18.0.5"), asks("172.18.0.5"))},
			moves: []string{"foreign"},
			want: map[string]string{"adopted": "10.0.0.4 Assigned", "marked": "172.18.0.3 HeldOutside",
				"foreign": "10.0.0.0 Assigned", "asks": "172.18.0.5 HeldOutside"}},
		{name: "asks for it no longer", do: []change{service("asks", asks())}, moves: []string{"asks"},
			want: map[string]string{"asks": "10.0.0.1 Assigned"}},
		{name: "the mark alone is enough only at first", do: []change{service("marked", holds("192.0.2.1"))},
			moves: []string{"marked"}, want: map[string]string{"marked": "10.0.0.2 Assigned"}},
	}},
	{name: "what Landfall assigned is kept when pools shrink", steps: []step{
		{name: "assigns", do: []change{newPool("p", "10.0.0.0/24"), service("a"), service("b"),
			service("shared", shares("k", 80)), service("c", asks("10.0.0.9"))},
			want: map[string]string{"a": "10.0.0.0 Assigned", "b": "10.0.0.1 Assigned", "shared": "10.0.0.2 Assigned",
				"c": "10.0.0.9 Assigned"}},
		{name: "a node has an address", do: []change{node("n", "10.0.0.0")},
			want: map[string]string{"a": "10.0.0.0 AddressExcluded"}},
		{name: "asks for nonsense", do: []change{service("c", asks("x"))},
			want: map[string]string{"c": "10.0.0.9 AddressInvalid"}},
		{name: "shrinks", do: []change{newPool("p", "192.0.2.0/28")},
			want: map[string]string{"a": "10.0.0.0 HeldOutside", "b": "10.0.0.1 HeldOutside",
				"shared": "10.0.0.2 HeldOutside"}},
		{name: "asks for the pool", do: []change{service("b", asksPool("p"))}},
		{name: "no pool at all", do: []change{noPool("p"), service("c", asks())},
			want: map[string]string{"c": "10.0.0.9 HeldOutside", "b": "10.0.0.1 PoolNotFound"}},
		{name: "and back", do: []change{newPool("p", "10.0.0.0/24")},
			want: map[string]string{"a": "10.0.0.0 AddressExcluded", "b": "10.0.0.1 Assigned",
				"shared": "10.0.0.2 Assigned", "c": "10.0.0.9 Assigned"}},
	}},
	{name: "nothing is replaced before there is something else", steps: []step{
		{name: "no pool", do: []change{service("a", holds("172.18.0.3"))}, want: map[string]string{"a": "172.18.0.3 NoPool"}},
		{name: "a pool that cannot be read may contain it", do: []change{newPool("p", "10.0.0.0/29", "nonsense"),
			newPool("q", "10.1.0.0/29")},
			want: map[string]string{"a": "172.18.0.3 HeldOutside"}},
		{name: "it does not", do: []change{newPool("p", "10.0.0.0/29")}, moves: []string{"a"},
			want: map[string]string{"a": "10.0.0.0 Assigned"}},
	}},
	{name: "nothing is replaced once a pool contains it", steps: []step{
		{name: "no pool", do: []change{service("a", holds("172.18.0.3"))}, want: map[string]string{"a": "172.18.0.3 NoPool"}},
		{name: "adopted", do: []change{newPool("p", "172.18.0.0/29")},
			want: map[string]string{"a": "172.18.0.3 Assigned"}},
	}},
	{name: "Services of another class are not ours", steps: []step{
		{name: "left alone", do: []change{newPool("p", "10.0.0.0/29"), service("a", class("x"), holds("172.18.0.3"))},
			want: map[string]string{"a": "172.18.0.3"}},
	}},
}

// foreignDualStories have Services of two families, of which one or both are foreign.
var foreignDualStories = []story{
	{name: "what is of a family that no pool has is not replaced", steps: []step{
		{name: "IPv4 is", do: []change{newPool("p", "10.0.0.0/29"), service("a", preferDual, holds("172.18.0.4", "fd00::1"))},
			moves: []string{"a"}, want: map[string]string{"a": "fd00::1,10.0.0.0 HeldOutside"}},
		{name: "IPv6 as well, once there is something else", do: []change{newPool("p", "10.0.0.0/29", "fd01::/125")},
			moves: []string{"a"}, want: map[string]string{"a": "10.0.0.0,fd01:: Assigned"}},
	}},
	{name: "a family that a pool contains is adopted", steps: []step{
		{name: "IPv6", do: []change{newPool("p", "10.0.0.0/29", "fd00::/125"),
			service("a", requireDual, holds("172.18.0.4", "fd00::4"))},
			moves: []string{"a"}, want: map[string]string{"a": "fd00::4,10.0.0.0 Assigned"}},
		{name: "IPv4", do: []change{service("b", requireDual, holds("10.0.0.4", "fd01::4"))},
			moves: []string{"b"}, want: map[string]string{"b": "10.0.0.4,fd00:: Assigned"}},
	}},
	{name: "what Landfall assigned is kept when a pool of two families shrinks", steps: []step{
		{name: "assigns", do: []change{newPool("p", "10.0.0.0/24", "fd00::/120"), service("a", requireDual)},
			want: map[string]string{"a": "10.0.0.0,fd00:: Assigned"}},
		{name: "one family shrinks", do: []change{newPool("p", "192.0.2.0/28", "fd00::/120")},
			want: map[string]string{"a": "10.0.0.0,fd00:: HeldOutside"}},
		{name: "then the other", do: []change{newPool("p", "192.0.2.0/28", "fd01::/120")}},
		{name: "no pool at all", do: []change{noPool("p")}},
		{name: "and back", do: []change{newPool("p", "10.0.0.0/24", "fd00::/120")},
			want: map[string]string{"a": "10.0.0.0,fd00:: Assigned"}},
	}},
}

func TestContract8ForeignStories(t *testing.T) {
	for _, s := range slices.Concat(bothFamilies(foreignStories), foreignDualStories) {
		for _, duplicated := range []bool{false, true} {
			for _, lagging := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s/duplicated=%v/lagging=%v", s.name, duplicated, lagging), func(t *testing.T) {
					tell(t, s, duplicated, lagging)
				})
			}
		}
	}
}

// TestForeignIsTold says what is replaced, and what a status shows that cannot be replaced yet.
func TestForeignIsTold(t *testing.T) {
	w := newWorld(Config{})
	service("a", holds("172.18.0.3"))(w)
	d := w.tellBook(nil).Services[key("a")]
	if want := "there is no IPAddressPool; shows 172.18.0.3, which Landfall did not assign"; d.Condition.Message != want {
		t.Errorf("%q, want %q", d.Condition.Message, want)
	}
	if len(d.Replaced) > 0 {
		t.Errorf("replaced %v although there is nothing else", d.Replaced)
	}
	w.apply(key("a"), d)
	newPool("p", "10.0.0.0/29")(w)
	d = w.tellBook(nil).Services[key("a")]
	if got := fmt.Sprint(d.Addresses, d.Replaced); got != "[10.0.0.0] [172.18.0.3]" {
		t.Errorf("holds and replaced: %s", got)
	}
	// A controller that writes its own address back again and again is another matter than one that
	// Landfall has assigned, whatever its condition said before.
	w.apply(key("a"), d)
	service("a", holds("172.18.0.3"))(w)
	if d = w.tellBook(nil).Services[key("a")]; len(d.Replaced) != 1 {
		t.Errorf("written over: holds %v, %v", d.Addresses, d.Condition)
	}
	if got := strings.Join([]string{d.Condition.Message}, ""); !strings.HasPrefix(got, "10.0.0.") {
		t.Errorf("written over: %q", got)
	}
}
