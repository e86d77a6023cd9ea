package main

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// TestGossipKeysAreReadAgain replaces the file as the kubelet does, also by one that makes no
// sense.
func TestGossipKeysAreReadAgain(t *testing.T) {
	path := filepath.Join(t.TempDir(), "key")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	a, b := strings.Repeat("a!", 16), strings.Repeat("b!", 16)
	write(a)
	synctest.Test(t, func(t *testing.T) {
		var sets []string
		runner := newKeyFile(path, func(keys [][]byte) error {
			var all []string
			for _, key := range keys {
				all = append(all, string(key[:1]))
			}
			sets = append(sets, strings.Join(all, ""))
			return nil
		}, slog.New(slog.DiscardHandler))
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- runner.Run(ctx) }()
		for _, text := range []string{a, a + "\n" + b, "nonsense", "", b + "\n" + a, b + "\n"} {
			write(text)
			time.Sleep(2 * keysEvery)
			synctest.Wait()
		}
		if got, want := strings.Join(sets, " "), "a ab ba b"; got != want {
			t.Errorf("keys %q, want %q", got, want)
		}
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}
