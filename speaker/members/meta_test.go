package members

import (
	"maps"
	"slices"
	"testing"

	"github.com/hashicorp/memberlist"
)

func FuzzMeta(f *testing.F) {
	f.Add([]byte(nil))
	f.Add(meta{born: 1, boot: bootMask, macs: []string{"02:00:00:00:00:01"}}.encode(memberlist.MetaMaxSize))
	f.Fuzz(func(t *testing.T, b []byte) {
		m := metaOf(&memberlist.Node{Meta: b})
		again := metaOf(&memberlist.Node{Meta: m.encode(len(b) + bornSize)})
		if again.born != m.born || again.boot != m.boot || !slices.Equal(again.macs, m.macs) {
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

func TestMetaTellsBootsApart(t *testing.T) {
	first, second := bootOf("3b0c8ae4-b0a2-4e43-9d5b-3c4b5ad4cd6c"), bootOf("d51d7f0f-7a86-4d9c-8e0e-0a8a3b1a5a0e")
	if first == 0 || first == second || bootOf("") != 0 {
		t.Fatalf("%x, %x", first, second)
	}
	m := meta{born: 7, boot: first, macs: []string{"02:00:00:00:00:01"}, wire: farewellVersion}
	got := metaOf(&memberlist.Node{Meta: m.encode(memberlist.MetaMaxSize)})
	if got.boot != first || got.wire != m.wire || !slices.Equal(got.macs, m.macs) {
		t.Errorf("%+v, want %+v", got, m)
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
