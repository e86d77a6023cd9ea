package members

import (
	"bytes"
	"slices"
	"time"
)

// KeyHold is within what time every speaker has read the same change of the key file. A kubelet
// brings the volumes of a pod up to date every 60 to 90 s. By default it watches Secrets; if it is
// set to cache them, it uses what is up to a minute old, in clusters of up to 2,000 nodes. The speaker
// reads the file every 10 s. So it takes 100 s by default and 160 s at most, unless a kubelet fails.
// About half of KeyHold also allows for the next change as soon as every speaker has read the last one.
const KeyHold = 5 * time.Minute

// maxFormer is how many keys are accepted that the file does not name any more.
const maxFormer = 8

// Rotation says which keys gossip has while speakers read a change of the key file one after the
// other. A speaker accepts new keys at once. It encrypts with the key that it had until every other
// one accepts the file's first key, and accepts former keys until no other one encrypts with them.
// The zero value has no keys yet.
type Rotation struct {
	file     [][]byte
	encrypts []byte
	former   [][]byte  // accepted, and not in the file; those that left it last come first
	changed  time.Time // when the file changed; zero if it has not
}

// Step returns the Rotation at a time when the file has these keys, of which there must be one. The
// keys of the first file count at once.
func (r Rotation) Step(file [][]byte, now time.Time) Rotation {
	if r.encrypts == nil {
		return Rotation{file: file, encrypts: file[0]}
	}
	if !slices.EqualFunc(file, r.file, bytes.Equal) {
		former := slices.DeleteFunc(r.Keys(), func(key []byte) bool { return hasKey(file, key) })
		r = Rotation{file: file, encrypts: r.encrypts, former: former[:min(len(former), maxFormer)], changed: now}
	}
	if _, at := r.Next(); !now.Before(at) {
		r.encrypts = file[0]
	}
	if _, at := r.Former(); !now.Before(at) {
		r.former = nil
	}
	return r
}

// Keys returns the keys that gossip has. The first one encrypts; all of them decrypt.
func (r Rotation) Keys() [][]byte {
	var keys [][]byte
	for _, key := range slices.Concat([][]byte{r.encrypts}, r.file, r.former) {
		if !hasKey(keys, key) {
			keys = append(keys, key)
		}
	}
	return keys
}

// Next returns the key that encrypts from a time on, which is the one that encrypts already unless
// the file's first key has changed.
func (r Rotation) Next() (key []byte, at time.Time) { return r.file[0], r.changed.Add(KeyHold) }

// Former returns the keys that the file does not name, and until when they decrypt.
func (r Rotation) Former() (keys [][]byte, until time.Time) {
	return r.former, r.changed.Add(2 * KeyHold)
}

// Equal reports whether both have the same keys, for the same time.
func (r Rotation) Equal(other Rotation) bool {
	return r.changed.Equal(other.changed) && slices.EqualFunc(r.Keys(), other.Keys(), bytes.Equal)
}
