package main

import (
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/kube"
)

// refusing is a client of an API server with nothing in it that refuses one kind.
func refusing(t *testing.T, refused string) *kube.Client {
	t.Helper()
	f := fakeCluster{refused: map[string]bool{}, objects: map[string]string{"/version": "{}"}}
	for _, path := range readPaths {
		f.refused[path] = filepath.Base(path) == refused
	}
	o := options{user: kube.UserConfig{Kubeconfig: f.serve(t)}}
	client, _, err := o.connect(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return client
}

// readPaths are the paths that the report is made of, and of the Events.
var readPaths = []string{"/api/v1/services", lists + "ipaddresspools", lists + "l2advertisements",
	lists + "bgpadvertisements", lists + "bgppeers", "/api/v1/namespaces/default/events"}

// A user with the role view may read no BGPPeers, and sees the rest. What the report is about has
// to be readable: an error says what is not.
func TestStatusWithoutWhatTheUserMayNotRead(t *testing.T) {
	// All connect first, as that sets the logger of a library, and one of its goroutines may outlive a
	// client that has ended.
	clients := map[string]*kube.Client{"nothing": refusing(t, "nothing")}
	for _, path := range readPaths {
		clients[filepath.Base(path)] = refusing(t, filepath.Base(path))
	}
	w, err := read(t.Context(), clients["bgppeers"], kube.Server{}, options{})
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	if err := newReport(w).write(&out, ""); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"POOL ", "VIP ", "BGPPeers and their sessions are not shown", `User "eve" cannot`,
		"landfall-view-peers"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%q is missing:\n%s", want, out.String())
		}
	}
	for name, client := range clients {
		if name == "bgppeers" || name == "nothing" || name == "events" {
			continue
		}
		_, err := read(t.Context(), client, kube.Server{}, options{})
		if err == nil || !strings.HasPrefix(err.Error(), "read "+name+": ") || !strings.Contains(err.Error(), "eve") {
			t.Errorf("without %s: %v", name, err)
		}
	}
	if w, err := read(t.Context(), clients["nothing"], kube.Server{}, options{}); err != nil || w.refused != nil {
		t.Errorf("%v, %v", w.refused, err)
	}
	if w, err := read(t.Context(), clients["events"], kube.Server{}, options{}); err != nil || len(w.refused) != 1 ||
		!strings.Contains(w.refused[0], `resources: ["events"], verbs: ["list"]`) {
		t.Errorf("without events: %v, %v", w.refused, err)
	}
}

// What a program said is over once the next one has had the time to find it again.
func TestStillFound(t *testing.T) {
	now := time.Unix(1_000_000, 0)
	ago := func(seconds int) time.Time { return now.Add(-time.Duration(seconds) * time.Second) }
	pods := []kube.PodState{{Node: "a", Containers: []kube.Container{
		{Command: []string{"/landfall-speaker"}, Started: ago(60)},
		{Command: []string{"/landfall-proxy"}, Started: ago(10)},
	}}, {Node: "b", Containers: []kube.Container{{Command: []string{"/landfall-speaker"}}}}}
	for name, tc := range map[string]struct {
		node, by string
		at       int
		found    bool
	}{
		"the process before said so":                   {"a", "landfall-speaker", 90, false},
		"this one says so":                             {"a", "landfall-speaker", 50, true},
		"in the second in which it began":              {"a", "landfall-speaker", 60, true},
		"the next one has not had the time":            {"a", "landfall-proxy", 90, true},
		"it is not known when the process began":       {"b", "landfall-speaker", 90, true},
		"another node's":                               {"b", "landfall-proxy", 90, true},
		"what the user may not see is not taken back":  {"c", "landfall-speaker", 90, true},
		"another program of Landfall on the same node": {"a", "landfall-controller", 90, true},
	} {
		w := kube.NodeWarning{Node: tc.node, By: tc.by, At: ago(tc.at)}
		if got := len(stillFound([]kube.NodeWarning{w}, pods, now)) == 1; got != tc.found {
			t.Errorf("%s: found %v, want %v", name, got, tc.found)
		}
	}
}
