package main

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/landfall-lb/landfall/ctl/migrate"
)

// move plans the move of the world, from all objects that are there now.
func (w *fakeWorld) move(t *testing.T) *metallbMove {
	t.Helper()
	var objects []migrate.Object
	for _, p := range slices.Sorted(maps.Keys(w.objects)) {
		raw, err := json.Marshal(w.objects[p])
		if err != nil {
			t.Fatal(err)
		}
		decoded, err := migrate.Decode(strings.NewReader(string(raw)))
		if err != nil {
			t.Fatal(err)
		}
		objects = append(objects, decoded...)
	}
	choices := migrate.Choices{Namespace: "landfall-system", CopySecrets: true, ClusterCIDR: "192.168.0.0/16"}
	var err error
	if choices.MetalLBNamespace, err = migrate.MetalLBNamespace(objects, ""); err != nil {
		t.Fatal(err)
	}
	return &metallbMove{
		installer: installer{choice: choices, release: "landfall",
			migrator: migrator{server: w, out: io.Discard, wait: 10 * time.Second, pause: time.Millisecond, poll: time.Millisecond},
			ready:    func(context.Context) (string, error) { return "", nil }},
		plan: migrate.PlanMetalLB(objects, nil, choices),
	}
}

func (w *fakeWorld) apply(t *testing.T) error {
	m := w.move(t)
	if len(m.plan.Blockers) > 0 {
		t.Fatalf("blockers: %v", m.plan.Blockers)
	}
	return m.run(t.Context(), m.steps())
}

func (w *fakeWorld) undo(t *testing.T) error {
	m := w.move(t)
	return m.run(t.Context(), m.undoSteps())
}

// state is all that a user could see, without empty maps.
func (w *fakeWorld) state(t *testing.T) map[string]any {
	t.Helper()
	all := map[string]any{}
	for p, o := range w.objects {
		all[p] = prune(clone(t, o))
	}
	return all
}

func prune(v any) any {
	m, ok := v.(map[string]any)
	if !ok {
		return v
	}
	out := map[string]any{}
	for key, value := range m {
		value = prune(value)
		if inner, isMap := value.(map[string]any); value == nil || isMap && len(inner) == 0 {
			continue
		}
		out[key] = value
	}
	return out
}

// Whichever write fails, a second run ends where one without a failure ends, and going back leads to
// what was there before. At no moment do both products act for one address (fakeWorld.check).
func TestMigrationSurvivesAFailureOfEachWrite(t *testing.T) {
	for name, bgp := range map[string]bool{"L2": false, "BGP": true} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, bgp)
			before := w.state(t)
			if err := w.apply(t); err != nil {
				t.Fatal(err)
			}
			after, writes := w.state(t), w.writes
			if writes < 8 || cmp.Equal(before, after) {
				t.Fatalf("%d writes", writes)
			}
			w.wantMoved(t, bgp)
			if err := w.apply(t); err != nil {
				t.Fatalf("again: %v", err)
			}
			if diff := cmp.Diff(after, w.state(t)); diff != "" {
				t.Errorf("a second run changes something (-want +got):\n%s", diff)
			}
			if err := w.undo(t); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(before, w.state(t)); diff != "" {
				t.Errorf("back at MetalLB (-want +got):\n%s", diff)
			}
			for failAt := 1; ; failAt++ { // of going back
				w := newWorld(t, bgp)
				if err := w.apply(t); err != nil {
					t.Fatal(err)
				}
				w.writes, w.failAt = 0, failAt
				err := w.undo(t)
				if err == nil {
					break
				}
				w.failAt = 0
				if again := w.undo(t); !errors.Is(err, errFake) || again != nil {
					t.Fatalf("write %d of going back: %v, and again %v", failAt, err, again)
				}
				if diff := cmp.Diff(before, w.state(t)); diff != "" {
					t.Errorf("write %d of going back (-want +got):\n%s", failAt, diff)
				}
			}
			for failAt := 1; failAt <= writes; failAt++ {
				for _, back := range []bool{false, true} {
					w := newWorld(t, bgp)
					w.failAt = failAt
					if err := w.apply(t); !errors.Is(err, errFake) {
						t.Fatalf("write %d: %v", failAt, err)
					}
					again, want := w.apply, after
					if back {
						again, want = w.undo, before
					}
					if err := again(t); err != nil {
						t.Fatalf("write %d, back %v: %v", failAt, back, err)
					}
					if diff := cmp.Diff(want, w.state(t)); diff != "" {
						t.Errorf("write %d, back %v (-want +got):\n%s", failAt, back, diff)
					}
				}
			}
		})
	}
}

// wantMoved looks at the end of a migration.
func (w *fakeWorld) wantMoved(t *testing.T, bgp bool) {
	t.Helper()
	if pods := w.under("/api/v1/namespaces/metallb-system/pods"); len(pods) > 0 {
		t.Errorf("pods of MetalLB are left: %v", pods)
	}
	if w.objects["/api/v1/namespaces/landfall-system/pods/landfall-controller-n1"] == nil {
		t.Error("Landfall's controller does not run")
	}
	kind := "L2Advertisement"
	if bgp {
		kind = "BGPPeer"
		peer := w.objects[landfallPath("BGPPeer")+"/tor"]
		want := map[string]any{"myASN": 1.0, "peerASN": 2.0, "peerAddress": "10.0.0.1",
			"passwordSecret": map[string]any{"name": "tor"}}
		if diff := cmp.Diff(want, peer["spec"]); diff != "" {
			t.Errorf("the peer (-want +got):\n%s", diff)
		}
		if copied := w.objects[secretPath("landfall-system", "tor")]; text(copied, "data", "password") != "c2VjcmV0" {
			t.Errorf("the copied Secret: %v", copied)
		}
	}
	if found := w.under(landfallPath(kind)); len(found) != 1 {
		t.Errorf("%s: %v", kind, found)
	}
}

// While a pod of MetalLB's speaker is left, Landfall announces nothing, and the error says what to
// do.
func TestMigrationWaitsForTheLastSpeaker(t *testing.T) {
	w := newWorld(t, false)
	w.stubborn = true
	m := w.move(t)
	m.wait = 20 * time.Millisecond
	m.holdControllerForTest(t)
	err := m.run(t.Context(), m.steps()[4:6])
	if err == nil || !strings.Contains(err.Error(), "speaker-n1") || !strings.Contains(err.Error(), "--undo") {
		t.Errorf("error %v", err)
	}
	if found := w.under(landfallPath("L2Advertisement")); len(found) > 0 {
		t.Errorf("Landfall announces: %v", found)
	}
}

// holdControllerForTest has no controller of Landfall in the way of a test about speakers.
func (m *metallbMove) holdControllerForTest(t *testing.T) {
	t.Helper()
	w, ok := m.server.(*fakeWorld)
	if !ok {
		t.Fatal("no fake")
	}
	delete(w.objects, appsPath+"landfall-system/deployments/landfall-controller")
	delete(w.objects, "/api/v1/namespaces/landfall-system/pods/landfall-controller-n1")
}

// ^C ends a run between or within steps, and the error says how to go on.
func TestMigrationIsInterrupted(t *testing.T) {
	w := newWorld(t, false)
	w.stubborn = true // so that something is waited for
	m := w.move(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	err := m.run(ctx, m.steps())
	if err == nil || !strings.Contains(err.Error(), "interrupted in step") {
		t.Errorf("error %v", err)
	}
}

// An object of the same name that differs, and that somebody else created, is left alone.
func TestMigrationRefusesToOverwrite(t *testing.T) {
	w := newWorld(t, false)
	at := landfallPath("IPAddressPool") + "/lan"
	w.put(at, "{metadata: {name: lan}, spec: {addresses: [192.0.2.0/24]}}")
	before := w.state(t)
	if err := w.apply(t); err == nil || !strings.Contains(err.Error(), "IPAddressPool lan exists already and differs") {
		t.Errorf("error %v", err)
	}
	if diff := cmp.Diff(before, w.state(t)); diff != "" {
		t.Errorf("something was changed (-want +got):\n%s", diff)
	}
	w.put(at, "{metadata: {name: lan}, spec: {addresses: [10.0.0.100-10.0.0.120], avoidBuggyIPs: false}}")
	if err := w.apply(t); err != nil {
		t.Errorf("with the same object: %v", err)
	}
	if text(w.objects[at], "metadata", "labels", migrate.LabelFrom) != "" {
		t.Error("--undo would delete what somebody else created")
	}
}
