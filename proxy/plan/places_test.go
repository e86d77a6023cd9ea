package plan

import (
	"strings"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
)

// Contract clause 11: the Services of a namespace have room together in the memory for session affinity. Who has places
// keeps them, who finds none is told, and another namespace notices nothing.
func TestContract11ANamespaceHasPlacesTogether(t *testing.T) {
	shares := NewAffinityShares(2, 1)
	created := map[string]int64{"a": 1, "b": 2, "c": 3, "d": 4, "e": 5, "other/a": 9}
	for _, step := range []struct {
		what, name string
		affinity   bool
		want       Places
		next       string
	}{
		{"the first", "b", true, ManyPlaces, ""},
		{"the second", "c", true, ManyPlaces, ""},
		{"the third", "d", true, FewPlaces, ""},
		{"the fourth", "e", true, NoPlaces, ""},
		{"an older one", "a", true, NoPlaces, ""},
		{"again", "b", true, ManyPlaces, ""},
		{"again", "d", true, FewPlaces, ""},
		{"one of another namespace", "other/a", true, ManyPlaces, ""},
		{"without affinity", "b", false, ManyPlaces, "a"},
		{"who has few keeps them", "d", true, FewPlaces, ""},
		{"who has none gets many", "a", true, ManyPlaces, ""},
		{"or none still", "e", true, NoPlaces, ""},
		{"few are free", "d", false, ManyPlaces, "e"},
		{"who waited gets them", "e", true, FewPlaces, ""},
		{"another one waits", "d", true, NoPlaces, ""},
		{"and goes", "d", false, ManyPlaces, ""},
		{"few are free", "e", false, ManyPlaces, ""},
	} {
		space, name, ok := strings.Cut(step.name, "/")
		if !ok {
			space, name = "shop", step.name
		}
		got := shares.Set(lb.Key{Namespace: space, Name: name}, Age{Created: created[step.name]}, step.affinity)
		next := ""
		if key := shares.Next(); key != nil {
			next = key.Name
		}
		if got != step.want || next != step.next {
			t.Errorf("%s: %s has %d, and %q is next; want %d, %q", step.what, step.name, got, next, step.want, step.next)
		}
	}
	unbounded := NewAffinityShares(0, 0)
	for name := range created {
		if got := unbounded.Set(lb.Key{Name: name}, Age{}, true); got != ManyPlaces {
			t.Errorf("without a bound %s has %d", name, got)
		}
	}
	s := Service{AffinityTimeout: time.Hour}
	for places, told := range map[Places]bool{ManyPlaces: false, FewPlaces: false, NoPlaces: true} {
		if s.Places = places; (AffinityRefused(s) != "") != told {
			t.Errorf("with %d: %q", places, AffinityRefused(s))
		}
	}
}
