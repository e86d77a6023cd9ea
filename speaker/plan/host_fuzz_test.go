package plan

import "testing"

// FuzzParseOnConflict checks that what is no choice refuses, in a few words: they go into a
// condition.
func FuzzParseOnConflict(f *testing.F) {
	f.Add("announce")
	f.Add("refuse")
	f.Add("Announce ")
	f.Fuzz(func(t *testing.T, s string) {
		c, err := ParseOnConflict(s)
		if (c == AnnounceOnConflict) != (s == "announce") || err != nil &&
			(c != RefuseOnConflict || len(err.Error()) > 1000) {
			t.Errorf("%q: %s, %v", s, c, err)
		}
	})
}
