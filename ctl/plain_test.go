package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"unicode"

	"sigs.k8s.io/yaml"
)

// What a tenant writes has no effect on a terminal, whatever the format, and JSON stays what it is.
func TestOutputHasNoControlCharacters(t *testing.T) {
	for _, hostile := range []string{"\x1b]0;owned\a\x1b[2J", "a\rb", "\u009b2J", "\u202egnp.exe", "\x9b2J", "a\u200bb",
		"\U000e0041", "\x00", "plain → text"} {
		for _, format := range []string{"", "json", "yaml"} {
			var out bytes.Buffer
			if err := write(plainWriter{&out}, format, map[string]string{"name": hostile}, "name "+hostile+"\n"); err != nil {
				t.Fatal(err)
			}
			if i := strings.IndexFunc(out.String(), func(r rune) bool { return r != '\n' && !unicode.IsPrint(r) }); i >= 0 {
				t.Errorf("%q as %q: %q", hostile, format, out.String())
			}
			var got map[string]string
			var err error
			switch format {
			case "json":
				err = json.Unmarshal(out.Bytes(), &got)
			case "yaml": // which may show an escape as text
				if err := yaml.Unmarshal(out.Bytes(), &got); err != nil || got["name"] == "" {
					t.Errorf("%q as yaml: %v, %q", hostile, err, got["name"])
				}
				continue
			default:
				continue
			}
			want := strings.ToValidUTF8(hostile, "\ufffd")
			if hostile == "\U000e0041" && format == "json" {
				want = "\ufffd" // an escape of JSON has four digits
			}
			if err != nil || got["name"] != want {
				t.Errorf("%q as %q: %v, %q", hostile, format, err, got["name"])
			}
		}
	}
}

// A message of somebody else's is part of one line: it cannot end a list of problems with a line that
// says that nothing is wrong.
func TestMessagesAreOneLine(t *testing.T) {
	var r report
	r.problem("Node %s: %s", "n1", "off\nNothing is wrong.\r\n")
	c := change{Kind: "Node", Name: "n1", What: "finding", Message: "off\n23:41:02  Node n1: drain: NodeDrained → none"}
	for _, text := range []string{r.problems[0], c.String()} {
		if strings.ContainsAny(text, "\r\n") {
			t.Errorf("%q", text)
		}
	}
}

func TestPlainWriterReportsWhatItTook(t *testing.T) {
	if n, err := fmt.Fprint(plainWriter{new(bytes.Buffer)}, "\x1b[2J"); n != 4 || err != nil {
		t.Errorf("%d %v", n, err)
	}
}
