package lb

import "strings"

// Shortened returns a text of at most so many bytes, at least three: where that leaves out the end of the text, "..."
// says so. It cuts between characters.
func Shortened(text string, most int) string {
	const end = "..."
	if len(text) <= most {
		return text
	}
	return strings.ToValidUTF8(text[:most-len(end)], "") + end
}
