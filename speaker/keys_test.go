package main

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/landfall-lb/landfall/speaker/members"
)

// keyStory runs a keyFile on a file whose keys are letters.
type keyStory struct {
	t    *testing.T
	path string
	file *keyFile
	end  func()

	mu   sync.Mutex // guards what follows
	logs bytes.Buffer
	sets []string // the letters of keys that were set, the one that encrypts first
}

func newKeyStory(t *testing.T, letters string) *keyStory {
	t.Helper()
	s := &keyStory{t: t, path: filepath.Join(t.TempDir(), "key")}
	s.write(keyLines(letters))
	keys, err := readKeys(s.path)
	if err != nil {
		t.Fatal(err)
	}
	s.file = newKeyFile(s.path, keys, func(keys [][]byte) error {
		var all string
		for _, key := range keys {
			all += string(key[:1])
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		s.sets = append(s.sets, all)
		return nil
	}, slog.New(slog.NewTextHandler(s, nil)))
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- s.file.Run(ctx) }()
	s.end = func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
	return s
}

// keyLines returns the contents of a file with a key for each letter.
func keyLines(letters string) string {
	var lines []string
	for _, letter := range letters {
		lines = append(lines, strings.Repeat(string(letter)+"!", 16))
	}
	return strings.Join(lines, "\n") + "\n"
}

// Write takes a line of the log.
func (s *keyStory) Write(line []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.logs.Write(line)
}

func (s *keyStory) write(text string) {
	s.t.Helper()
	if err := os.WriteFile(s.path, []byte(text), 0o600); err != nil {
		s.t.Fatal(err)
	}
}

// want waits, and compares what was set meanwhile.
func (s *keyStory) want(after time.Duration, sets ...string) {
	s.t.Helper()
	time.Sleep(after)
	synctest.Wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	if !slices.Equal(s.sets, sets) {
		s.t.Errorf("keys %q, want %q", s.sets, sets)
	}
	s.sets = nil
}

// TestGossipKeysAreReadAgain rotates the key in three steps, by files that the kubelet replaces.
func TestGossipKeysAreReadAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newKeyStory(t, "a")
		defer s.end()
		s.want(keysEvery)
		for _, step := range []struct {
			file      string
			now, next []string
		}{
			{"ab", []string{"ab"}, nil},
			{"ba", []string{"ab"}, []string{"ba"}},
			{"b", []string{"ba"}, nil},
		} {
			s.write(keyLines(step.file))
			s.want(2*keysEvery, step.now...)
			s.want(members.KeyHold, step.next...)
		}
		s.want(members.KeyHold, "b")
	})
}

// TestAReplacedGossipKeyLeavesNoGap replaces the only key, and again while that is under way, beside
// files that make no sense.
func TestAReplacedGossipKeyLeavesNoGap(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newKeyStory(t, "a")
		defer s.end()
		s.write(keyLines("b"))
		s.want(2*keysEvery, "ab")
		s.write("nonsense")
		s.want(members.KeyHold, "ba")
		s.write("")
		s.want(members.KeyHold, "b")
		s.write(keyLines("b"))
		s.want(members.KeyHold)

		s.write(keyLines("c"))
		s.want(members.KeyHold/2, "bc")
		s.write(keyLines("d"))
		s.want(members.KeyHold, "bdc")
		s.want(2*keysEvery, "dbc")
		s.want(members.KeyHold, "d")
	})
}

// TestGossipKeysAreShown looks for the fingerprints in metrics and in the log, which say no key.
func TestGossipKeysAreShown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newKeyStory(t, "a")
		defer s.end()
		a, b := members.Fingerprint([]byte(strings.Repeat("a!", 16))), members.Fingerprint([]byte(strings.Repeat("b!", 16)))
		metrics := func(rows ...string) {
			t.Helper()
			text := "# HELP landfall_speaker_gossip_key 1 for each key of gossip and its use: encrypts, decrypts, or former " +
				"for one that decrypts and is not in the file.\n# TYPE landfall_speaker_gossip_key gauge\n"
			for i := 0; i < len(rows); i += 2 {
				text += fmt.Sprintf("landfall_speaker_gossip_key{fingerprint=%q,use=%q} 1\n", rows[i], rows[i+1])
			}
			if err := testutil.CollectAndCompare(s.file, strings.NewReader(text)); err != nil {
				t.Error(err)
			}
		}
		logged := func(want string) {
			t.Helper()
			s.mu.Lock()
			defer s.mu.Unlock()
			if got := s.logs.String(); !strings.HasSuffix(got, want+"\n") || strings.Contains(got, "a!") {
				t.Errorf("the log ends otherwise than with %q: %s", want, got)
			}
		}
		at := func(from time.Time) string { return from.Format("2006-01-02T15:04:05.000Z07:00") }
		s.want(keysEvery / 2)
		metrics(a, "encrypts")
		logged(fmt.Sprintf("encrypts=%s accepted=[%s]", a, a))
		s.write(keyLines("b"))
		changed := time.Now().Add(keysEvery / 2)
		s.want(keysEvery, "ab")
		metrics(a, "encrypts", b, "decrypts")
		logged(fmt.Sprintf(`encrypts=%s accepted="[%s %s]" next=%s from=%s former=[%s] until=%s`, a, a, b, b,
			at(changed.Add(members.KeyHold)), a, at(changed.Add(2*members.KeyHold))))
		s.want(members.KeyHold, "ba")
		metrics(a, "former", b, "encrypts")
		s.want(members.KeyHold, "b")
		metrics(b, "encrypts")
		logged(fmt.Sprintf("encrypts=%s accepted=[%s]", b, b))
	})
}
