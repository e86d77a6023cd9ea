package lab

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// archiveOf returns a .tar.gz with one file.
func archiveOf(t *testing.T, name, content string) string {
	t.Helper()
	var b bytes.Buffer
	zipped := gzip.NewWriter(&b)
	files := tar.NewWriter(zipped)
	if err := files.WriteHeader(&tar.Header{Name: name, Mode: 0o600, Size: int64(len(content))}); err != nil {
		t.Fatal(err)
	}
	if _, err := files.Write([]byte(content)); err != nil {
		t.Fatal(err)
	}
	for _, c := range []interface{ Close() error }{files, zipped} {
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
	}
	return b.String()
}

// publisher serves pages by their path.
func publisher(t *testing.T, pages map[string]string) (url string) {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		page, ok := pages[r.URL.Path]
		if !ok {
			http.NotFound(w, r)
			return
		}
		fmt.Fprint(w, page)
	}))
	t.Cleanup(s.Close)
	return s.URL
}

func sumOf(text string) string { return fmt.Sprintf("%x", sha256.Sum256([]byte(text))) }

func TestDownload(t *testing.T) {
	const program = "#!/bin/sh\n"
	archive := archiveOf(t, "linux/tool", program)
	url := publisher(t, map[string]string{
		"/tool":          program,
		"/tool.sum":      sumOf(program),
		"/tool.tgz":      archive,
		"/tool.tgz.sum":  sumOf(archive) + "  tool.tgz\n",
		"/many.sum":      sumOf(program) + "  other.tgz\n" + sumOf(archive) + " *tool.tgz\n",
		"/empty.sum":     "",
		"/other.sum":     sumOf(program) + "  other.tgz\n",
		"/short.sum":     "abcdef",
		"/not-a.tgz":     program,
		"/not-a.tgz.sum": sumOf(program),
		"/tampered":      program + "more",
		"/tampered.sum":  sumOf(program),
		"/unsigned":      program,
		"/nothing.sum":   sumOf(program),
	})
	for _, test := range []struct {
		name, file, sums, member, fails string
	}{
		{"a program", "/tool", "/tool.sum", "", ""},
		{"an archive", "/tool.tgz", "/tool.tgz.sum", "linux/tool", ""},
		{"an archive among others", "/tool.tgz", "/many.sum", "linux/tool", ""},
		{"another content", "/tampered", "/tampered.sum", "", "has the SHA-256 checksum"},
		{"no checksum page", "/unsigned", "/unsigned.sum", "", "404 Not Found"},
		{"an empty checksum page", "/tool", "/empty.sum", "", "has no SHA-256 checksum of tool"},
		{"another file's checksum", "/tool.tgz", "/other.sum", "linux/tool", "has no SHA-256 checksum of tool.tgz"},
		{"a short checksum", "/tool", "/short.sum", "", "has no SHA-256 checksum of tool"},
		{"nothing there", "/nothing", "/nothing.sum", "", "404 Not Found"},
		{"no such member", "/tool.tgz", "/tool.tgz.sum", "windows/tool", "has no windows/tool"},
		{"no archive", "/not-a.tgz", "/not-a.tgz.sum", "linux/tool", "gzip"},
	} {
		t.Run(test.name, func(t *testing.T) {
			to := filepath.Join(t.TempDir(), "tool")
			p := published{URL: url + test.file, Sums: url + test.sums, Member: test.member}
			err := p.download(t.Context(), to, "downloading", func(string) {})
			text, _ := os.ReadFile(to)
			if test.fails != "" {
				if err == nil || !strings.Contains(err.Error(), test.fails) || len(text) > 0 {
					t.Errorf("%v, want an error with %q, and no file: %q", err, test.fails, text)
				}
				return
			}
			info, statErr := os.Stat(to)
			if err != nil || statErr != nil || info.Mode().Perm() != 0o755 || string(text) != program {
				t.Errorf("%v, %v, %q", err, statErr, text)
			}
			if left, _ := filepath.Glob(to + ".*"); len(left) > 0 {
				t.Errorf("left behind: %v", left)
			}
		})
	}
}

// A tool that is published is downloaded into the cache, and built only where that fails or must not
// be tried.
func TestToolIsDownloadedOrBuilt(t *testing.T) {
	const program = "#!/bin/sh\n"
	for _, test := range []struct {
		name, sum, offline, says string
		built                    bool
	}{
		{"published", sumOf(program), "", "downloading tool v1.2.3", false},
		{"published with a wrong checksum", sumOf("other"), "", "building it instead", true},
		{"offline", sumOf(program), "1", "building tool v1.2.3", true},
	} {
		t.Run(test.name, func(t *testing.T) {
			repo := t.TempDir()
			t.Setenv("LANDFALL_CACHE", t.TempDir())
			t.Setenv("KUBEBUILDER_ASSETS", "")
			t.Setenv("GOFLAGS", "-mod=mod")
			t.Setenv(offlineVariable, test.offline)
			for name, text := range map[string]string{
				"go.mod": "module example.com/x\n\ngo 1.26\n\nrequire example.com/tool v1.2.3\n\n" +
					"replace example.com/tool => ./tool\n",
				"main.go":     "package main\n\nfunc main() {}\n",
				"tool/go.mod": "module example.com/tool\n",
			} {
				if err := os.MkdirAll(filepath.Dir(filepath.Join(repo, name)), 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(filepath.Join(repo, name), []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			url := publisher(t, map[string]string{"/v1.2.3/tool": program, "/v1.2.3/tool.sum": test.sum})
			x := tool{Module: "example.com/tool", Package: ".", Flags: func(string) string { return "" },
				Published: func(version, _ string) published {
					return published{URL: url + "/" + version + "/tool", Sums: url + "/" + version + "/tool.sum"}
				}}
			var said []string
			path, err := x.ensure(t.Context(), "tool", repo, func(line string) { said = append(said, line) })
			if err != nil {
				t.Fatal(err)
			}
			text, err := os.ReadFile(path)
			if err != nil || (string(text) != program) != test.built ||
				!strings.Contains(strings.Join(said, "\n"), test.says) {
				t.Errorf("%v; built %v, said %q", err, string(text) != program, said)
			}
			if again, err := x.ensure(t.Context(), "tool", repo, func(line string) { t.Error(line) }); err != nil ||
				again != path {
				t.Errorf("a second time: %s, %v", again, err)
			}
		})
	}
}
