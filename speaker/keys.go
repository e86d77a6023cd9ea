package main

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/landfall-lb/landfall/internal/loop"
	"github.com/landfall-lb/landfall/speaker/members"
)

// keysEvery is how often the file with the gossip keys is read: the kubelet itself takes a minute
// to bring it up to date.
const keysEvery = 10 * time.Second

// readKeys returns the gossip keys in a file, and its contents.
func readKeys(path string) (keys [][]byte, content []byte, err error) {
	if content, err = os.ReadFile(path); err != nil {
		return nil, nil, fmt.Errorf("--gossip-key-file: %w", err)
	}
	if keys, err = members.ParseKeys(content); err != nil {
		return nil, nil, fmt.Errorf("--gossip-key-file %s: %w", path, err)
	}
	return keys, content, nil
}

// newKeyFile returns the loop that has gossip use other keys when the file changes. A file that is
// not valid changes nothing.
func newKeyFile(path string, set func([][]byte) error, log *slog.Logger) *loop.Runner {
	var used []byte
	var failures loop.Failures
	runner := loop.New(func(context.Context) (time.Duration, error) {
		keys, content, err := readKeys(path)
		if err == nil && !bytes.Equal(content, used) {
			if err = set(keys); err == nil {
				used = content
				var names []string
				for _, key := range keys {
					names = append(names, members.Fingerprint(key))
				}
				log.Info("gossip keys; the first one encrypts", "fingerprints", names)
			}
		}
		failures.Log(log, "cannot use the gossip keys in the file; going on with the last ones",
			"using the gossip keys in the file again", err)
		return keysEvery, nil
	}, loop.Options{})
	runner.Poke()
	return runner
}
