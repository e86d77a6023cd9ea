package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/landfall-lb/landfall/internal/loop"
	"github.com/landfall-lb/landfall/speaker/members"
)

// keysEvery is how often the file with the gossip keys is read: the kubelet itself takes a minute
// to bring it up to date.
const keysEvery = 10 * time.Second

// readKeys returns the gossip keys in a file.
func readKeys(path string) ([][]byte, error) {
	content, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("--gossip-key-file: %w", err)
	}
	keys, err := members.ParseKeys(content)
	if err != nil {
		return nil, fmt.Errorf("--gossip-key-file %s: %w", path, err)
	}
	return keys, nil
}

// keyFile has gossip use other keys when the file with them changes. A file that is not valid
// changes nothing.
type keyFile struct {
	*loop.Runner
	path     string
	set      func([][]byte) error
	log      *slog.Logger
	failures loop.Failures
	file     [][]byte // as it was read last

	mu       sync.Mutex // for writing rotation, and for reading it outside of the loop
	rotation members.Rotation
}

// newKeyFile returns the keyFile of a process that was started with these keys.
func newKeyFile(path string, keys [][]byte, set func([][]byte) error, log *slog.Logger) *keyFile {
	k := &keyFile{path: path, set: set, log: log, file: keys, rotation: members.Rotation{}.Step(keys, time.Time{})}
	k.Runner = loop.New(func(context.Context) (time.Duration, error) {
		k.failures.Log(log, "cannot use the gossip keys in the file; going on with the last ones",
			"using the gossip keys in the file again", k.step(time.Now()))
		return keysEvery, nil
	}, loop.Options{})
	k.tell(k.rotation)
	k.Poke()
	return k
}

// step has gossip use the keys of the time. These change with the file, and some time after that.
func (k *keyFile) step(now time.Time) error {
	keys, failed := readKeys(k.path)
	if failed == nil {
		k.file = keys
	}
	next := k.rotation.Step(k.file, now)
	if next.Equal(k.rotation) {
		return failed
	}
	if err := k.set(next.Keys()); err != nil {
		return err
	}
	k.mu.Lock()
	k.rotation = next
	k.mu.Unlock()
	k.tell(next)
	return failed
}

// tell logs which keys gossip has, and until when.
func (k *keyFile) tell(r members.Rotation) {
	names := fingerprints(r.Keys())
	about := []any{"encrypts", names[0], "accepted", names}
	if key, at := r.Next(); members.Fingerprint(key) != names[0] {
		about = append(about, "next", members.Fingerprint(key), "from", at)
	}
	if former, until := r.Former(); len(former) > 0 {
		about = append(about, "former", fingerprints(former), "until", until)
	}
	k.log.Info("gossip keys", about...)
}

func fingerprints(keys [][]byte) (names []string) {
	for _, key := range keys {
		names = append(names, members.Fingerprint(key))
	}
	return names
}

var gossipKey = prometheus.NewDesc("landfall_speaker_gossip_key",
	"1 for each key of gossip and its use: encrypts, decrypts, or former for one that decrypts and is not in the file.",
	[]string{"fingerprint", "use"}, nil)

// Describe implements prometheus.Collector.
func (k *keyFile) Describe(descs chan<- *prometheus.Desc) { descs <- gossipKey }

// Collect implements prometheus.Collector.
func (k *keyFile) Collect(metrics chan<- prometheus.Metric) {
	k.mu.Lock()
	r := k.rotation
	k.mu.Unlock()
	former, _ := r.Former()
	old := fingerprints(former)
	for i, name := range fingerprints(r.Keys()) {
		use := "decrypts"
		switch {
		case i == 0:
			use = "encrypts"
		case slices.Contains(old, name):
			use = "former"
		}
		metrics <- prometheus.MustNewConstMetric(gossipKey, prometheus.GaugeValue, 1, name, use)
	}
}
