package members

import (
	"maps"
	"slices"
	"testing"

	"github.com/hashicorp/memberlist"
)

func FuzzMeta(f *testing.F) {
	f.Add([]byte(nil))
	f.Add(meta{born: 1, macs: []string{"02:00:00:00:00:01"}}.encode(memberlist.MetaMaxSize))
	f.Fuzz(func(t *testing.T, b []byte) {
		m := metaOf(&memberlist.Node{Meta: b})
		again := metaOf(&memberlist.Node{Meta: m.encode(len(b) + bornSize)})
		if again.born != m.born || !slices.Equal(again.macs, m.macs) {
			t.Fatalf("%+v is read back as %+v", m, again)
		}
	})
}

func TestMetaLeavesOutWhatDoesNotFit(t *testing.T) {
	m := meta{born: 7, macs: []string{"02:00:00:00:00:01", "00:00:00:00:fe:80:00:00:00:00:00:00:02:00:5e:10:00:00:00:01",
		"02:00:00:00:00:02", "02:00:00:00:00:03"}}
	got := metaOf(&memberlist.Node{Meta: m.encode(bornSize + 2*macSize + 1)})
	if want := []string{"02:00:00:00:00:01", "02:00:00:00:00:02"}; got.born != 7 || !slices.Equal(got.macs, want) {
		t.Errorf("%+v", got)
	}
}

func TestMembersKnowTheMACsOfAll(t *testing.T) {
	r := newRig(t, "a", "b", "c")
	r.cluster()
	knows := func(at string, want ...string) {
		t.Helper()
		r.eventually(at+" knows", func() bool {
			return slices.Equal(slices.Sorted(maps.Keys(r.members[at].MACs())), want)
		})
	}
	r.members["a"].SetMACs([]string{"02:00:00:00:00:0a"})
	r.members["b"].SetMACs([]string{"02:00:00:00:00:0b", "02:00:00:00:01:0b"})
	all := []string{"02:00:00:00:00:0a", "02:00:00:00:00:0b", "02:00:00:00:01:0b"}
	for _, name := range r.names() {
		knows(name, all...)
	}
	// One that changes, and one that is gone but still a node of the cluster.
	r.members["b"].SetMACs([]string{"02:00:00:00:00:1b"})
	knows("c", "02:00:00:00:00:0a", "02:00:00:00:00:1b")
	r.members["a"].stop()
	r.eventually("a is gone", func() bool { return slices.Equal(r.members["c"].Live(), []string{"b", "c"}) })
	knows("c", "02:00:00:00:00:0a", "02:00:00:00:00:1b")
	delete(r.peers, "a")
	r.introduce("c")
	knows("c", "02:00:00:00:00:1b")
}
