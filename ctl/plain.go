package main

import (
	"fmt"
	"io"
	"strings"
	"unicode"
	"unicode/utf8"
)

// plainWriter writes text for a terminal. Names of pods in EndpointSlices, messages of Events and answers of
// programs may hold what a tenant wrote: a control character would have the terminal do something, and one
// that turns the direction of text round would show something else than there is.
type plainWriter struct{ to io.Writer }

// Write reports all of b as written: what it writes may be longer.
func (p plainWriter) Write(b []byte) (int, error) {
	if _, err := io.WriteString(p.to, plain(string(b))); err != nil {
		return 0, err
	}
	return len(b), nil
}

// unfiltered returns the writer behind a plainWriter, for archives and for a terminal's own commands.
func unfiltered(w io.Writer) io.Writer {
	if p, ok := w.(plainWriter); ok {
		return p.to
	}
	return w
}

// plain writes what is not printable as JSON does in a string, so that JSON stays JSON.
func plain(text string) string {
	if !strings.ContainsFunc(text, special) && utf8.ValidString(text) {
		return text
	}
	var out strings.Builder
	for len(text) > 0 {
		r, size := utf8.DecodeRuneInString(text)
		switch {
		case r == utf8.RuneError && size == 1:
			out.WriteRune(utf8.RuneError)
		case special(r) && r > 0xffff:
			out.WriteRune(utf8.RuneError)
		case special(r):
			fmt.Fprintf(&out, `\u%04x`, r)
		default:
			out.WriteString(text[:size])
		}
		text = text[size:]
	}
	return out.String()
}

// special reports whether a terminal does anything but show a character.
func special(r rune) bool {
	return r != '\n' && r != '\t' && !unicode.IsPrint(r)
}

// oneLine has a text of somebody else's take no more than its line.
func oneLine(text string) string {
	return strings.Join(strings.FieldsFunc(text, func(r rune) bool { return r == '\n' || r == '\r' }), " ")
}
