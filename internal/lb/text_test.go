package lb

import "testing"

func TestShortened(t *testing.T) {
	for _, c := range []struct {
		text string
		most int
		want string
	}{
		{"", 3, ""},
		{"abc", 3, "abc"},
		{"abcd", 3, "..."},
		{"abcdefgh", 8, "abcdefgh"},
		{"abcdefghi", 8, "abcde..."},
		{"abcdé", 6, "abcdé"},
		{"aéééé", 7, "aé..."},
		{"aééééé", 8, "aéé..."},
		{"日本語日本語", 10, "日本..."},
		{"日本語", 5, "..."},
	} {
		if got := Shortened(c.text, c.most); got != c.want {
			t.Errorf("%q in %d bytes: %q, want %q", c.text, c.most, got, c.want)
		}
	}
}
