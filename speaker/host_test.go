package main

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/labels"

	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/speaker/plan"
)

// TestHostLooks has a speaker look at its node once it knows enough.
func TestHostLooks(t *testing.T) {
	inRig(t, func(r *rig) {
		r.start(w177, w178)
		time.Sleep(3 * time.Second)
		s := r.nodes[w177].speaker
		told, synced := map[string]string{w177: "", w178: "", "gone": ""}, false
		h := host{speaker: s, began: time.Now(), port: 7947, arpIgnore: filepath.Join(t.TempDir(), "arp_ignore"),
			around: func() (map[string]string, bool) { return told, synced }}
		if err := os.WriteFile(h.arpIgnore, []byte("0\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		look := func(want ...lb.Reason) {
			t.Helper()
			found, known := h.look(time.Now().Add(time.Hour))
			if known != synced || len(found) != len(want) {
				t.Fatalf("found %v, %v; want %v", found, known, want)
			}
			for i := range want {
				if found[i].Reason != want[i] {
					t.Errorf("found %v, want %v", found, want)
				}
			}
		}
		look()
		synced = true
		look() // it has met the other
		node, _ := r.api.nodes.Get(s.self)
		node.Labels = labels.Set{plan.LabelExclude: ""}
		r.api.nodes.Set(s.self, node)
		look(lb.ReasonNodeExcluded)
		h.ignoreExclude = true
		look()
	})
}
