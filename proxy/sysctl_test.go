package main

import (
	"bytes"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestConntrackParameters(t *testing.T) {
	for _, tt := range []struct {
		name                                  string
		cores                                 int
		liberal                               bool
		most, hash, established, wait, closed string // before, "-" for none; the result after the slash
	}{
		{"a small node", 2, false, "65536/131072", "16384/32768", "432000/86400", "60/3600", "0/0"},
		{"a large node, be liberal", 64, true, "65536/1048576", "16384/262144", "432000/86400", "3600/3600", "0/1"},
		{"more is left alone, and so are shorter times", 2, false, "999999/999999", "99999/99999", "600/600", "3600/3600", "1/1"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			folder := t.TempDir()
			files := map[string]string{"hashsize": tt.hash, parameterMax: tt.most, parameterTimeout: tt.established, parameterWait: tt.wait, parameterLiberal: tt.closed}
			for name, value := range files {
				before, _, _ := strings.Cut(value, "/")
				if err := os.WriteFile(filepath.Join(folder, name), []byte(before+"\n"), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			setConntrack(folder, filepath.Join(folder, "hashsize"), tt.cores, tt.liberal, slog.New(slog.DiscardHandler))
			for name, value := range files {
				_, want, _ := strings.Cut(value, "/")
				if got, err := os.ReadFile(filepath.Join(folder, name)); err != nil || strings.TrimSpace(string(got)) != want {
					t.Errorf("%s is %s, want %s (%v)", name, got, want, err)
				}
			}
		})
	}
}

func TestConntrackParametersThatCannotBeSet(t *testing.T) {
	var said bytes.Buffer
	setConntrack("/nowhere", "/nowhere/hashsize", 2, true, slog.New(slog.NewTextHandler(&said, nil)))
	for _, name := range []string{parameterMax, parameterTimeout, parameterWait, parameterLiberal} {
		if !strings.Contains(said.String(), name) {
			t.Errorf("the log does not say that %s was not set:\n%s", name, said.String())
		}
	}
}
