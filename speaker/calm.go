package main

import (
	"context"
	"runtime/debug"
	"runtime/metrics"
	"time"
)

// While little happens, garbage is collected every calmEvery and the memory given back: the spare
// memory, by which garbage is collected rarely while Services come, lets some 20 MiB of it grow
// otherwise, at a few hundred kB a second of gossip. It is calm if less than calmBytes were allocated.
const (
	calmEvery = 20 * time.Second
	calmBytes = 20 << 20
)

// calm gives memory back.
type calm struct {
	allocated func() uint64 // bytes, since the start
	free      func()
}

func newCalm() calm {
	sample := []metrics.Sample{{Name: "/gc/heap/allocs:bytes"}}
	return calm{free: debug.FreeOSMemory, allocated: func() uint64 {
		metrics.Read(sample)
		return sample[0].Value.Uint64()
	}}
}

// Run gives memory back until ctx ends.
func (c calm) Run(ctx context.Context) error {
	ticker := time.NewTicker(calmEvery)
	defer ticker.Stop()
	before := c.allocated()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
		now := c.allocated()
		if now-before < calmBytes {
			c.free()
		}
		before = now
	}
}

// Busy returns 0: it is never at one thing.
func (calm) Busy() time.Duration { return 0 }
