package otlp

import (
	"context"
	"encoding/pem"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/net/http/httpguts"
	"google.golang.org/protobuf/encoding/protowire"
)

// TestSecrets asks a collector with a certificate and a token of its own, while both change.
func TestSecrets(t *testing.T) {
	var got http.Header
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		got = r.Header
		if r.Header.Get("Authorization") != "Bearer right" {
			http.Error(w, "who are you?", http.StatusUnauthorized)
		}
	}))
	server.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	defer server.Close()
	dir := t.TempDir()
	e, err := New(Options{Endpoint: server.URL, SecretDir: dir, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	authority := string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}))
	for _, step := range []struct{ name, file, text, want string }{
		{"no authority", headersFile, "Authorization: Bearer wrong", "unknown authority"},
		{"no certificate", authoritiesFile, "hello", "no certificate in PEM"},
		{"a wrong token", authoritiesFile, authority, "401"},
		{"no header", headersFile, "Bearer secret\n", "each line has to be a header"},
		{"two headers", headersFile, "authorization: Bearer right\nX-Tenant: shop\nContent-Type: text/plain\n", ""},
		{"no header at all", headersFile, "\n", "401"},
	} {
		if err := os.WriteFile(filepath.Join(dir, step.file), []byte(step.text), 0o600); err != nil {
			t.Fatal(err)
		}
		err := e.post(context.Background(), []byte{})
		if (err == nil) != (step.want == "") || err != nil && !strings.Contains(err.Error(), step.want) {
			t.Errorf("%s: %v", step.name, err)
		}
		if err != nil && strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: the error shows the token: %v", step.name, err)
		}
		if err == nil && (got.Get("X-Tenant") != "shop" || got.Get("Content-Type") != "application/x-protobuf") {
			t.Errorf("%s: the headers are %v", step.name, got)
		}
	}
}

// TestPartialSuccess counts the spans that a collector has left out, and does not send them again.
func TestPartialSuccess(t *testing.T) {
	asked := 0
	e := newExporter(t, &pipe{serve: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked++
		_, _ = w.Write(partialSuccess(2, "too old"))
	})})
	e.Add(newSpan("a", 1))
	e.Add(newSpan("b", 2))
	e.Add(newSpan("c", 3))
	e.leave(context.Background())
	if asked != 1 || e.sent.Load() != 1 || e.dropped.Load() != 2 {
		t.Errorf("asked %d times, %d sent, %d dropped", asked, e.sent.Load(), e.dropped.Load())
	}
}

// partialSuccess is the answer that says so, after a field that nobody knows.
func partialSuccess(spans uint64, message string) []byte {
	inner := protowire.AppendVarint(protowire.AppendTag(nil, fieldRejected, protowire.VarintType), spans)
	inner = protowire.AppendString(protowire.AppendTag(inner, fieldMessage, protowire.BytesType), message)
	outer := protowire.AppendFixed64(protowire.AppendTag(nil, 9, protowire.Fixed64Type), 1)
	return protowire.AppendBytes(protowire.AppendTag(outer, fieldPartial, protowire.BytesType), inner)
}

// FuzzReadHeaders checks that each line of the file is a header that each request has, or an error, which shows nothing
// of the file.
func FuzzReadHeaders(f *testing.F) {
	for _, seed := range []string{
		"", "\n\n", "Authorization: Bearer right\nX-Tenant: shop\n", "Bearer secret", "A: 1\n\nB: 2\n",
		"A: 1\n B: 2\n", "A:\r\nA: 1\r\n", ": x", "A B: x", "A: \x00", "A: \x7f\xff",
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		headers, err := parseHeaders([]byte(text))
		if err != nil {
			if !strings.HasPrefix(err.Error(), "each line has to be a header") {
				t.Errorf("%q: the error shows the file: %v", text, err)
			}
			return
		}
		values, lines := 0, 0
		for name, all := range headers {
			for _, value := range all {
				if values++; !httpguts.ValidHeaderFieldName(name) || !httpguts.ValidHeaderFieldValue(value) {
					t.Errorf("%q: no request can have the header %q: %q", text, name, value)
				}
			}
		}
		for line := range strings.Lines(text) {
			if line = strings.TrimRight(line, "\r\n"); strings.TrimSpace(line) != "" {
				lines++
			}
		}
		if values != lines {
			t.Errorf("%q: %d lines are %d headers: %q", text, lines, values, headers)
		}
	})
}

func FuzzDecodeRejection(f *testing.F) {
	f.Add(partialSuccess(2, "too old"))
	f.Add(partialSuccess(1<<63, ""))
	f.Fuzz(func(t *testing.T, answer []byte) {
		if r := decodeRejection(answer); r.spans < 0 || len(r.message) > len(answer) {
			t.Errorf("%+v", r)
		}
	})
}
