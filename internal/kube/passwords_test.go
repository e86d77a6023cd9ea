package kube

import (
	"encoding/json"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
)

// vault lets each Secret be read by its name, if it is granted.
type vault struct {
	mu      sync.Mutex
	secrets map[string]string
	granted map[string]bool
	asked   []string // for all Secrets at once
	watches map[string]int
}

func (v *vault) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	selector, err := fields.ParseSelector(r.URL.Query().Get("fieldSelector"))
	name := ""
	if err == nil {
		name, _ = selector.RequiresExactMatch("metadata.name")
	}
	v.mu.Lock()
	granted, password := v.granted[name], v.secrets[name]
	watch := r.URL.Query().Get("watch") != ""
	switch {
	case name == "":
		v.asked = append(v.asked, r.URL.String())
	case watch && r.URL.Query().Get("sendInitialEvents") == "" && granted:
		v.watches[name]++
	}
	v.mu.Unlock()
	w.Header().Set("Content-Type", "application/json")
	switch {
	case !granted:
		w.WriteHeader(http.StatusForbidden)
		json.NewEncoder(w).Encode(metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"},
			Status: "Failure", Reason: metav1.StatusReasonForbidden, Code: 403})
	case r.URL.Query().Get("sendInitialEvents") != "":
		w.WriteHeader(http.StatusUnprocessableEntity)
		json.NewEncoder(w).Encode(metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"},
			Status: "Failure", Reason: metav1.StatusReasonInvalid, Code: 422})
	case watch:
		w.(http.Flusher).Flush()
		<-r.Context().Done()
		v.mu.Lock()
		v.watches[name]--
		v.mu.Unlock()
	default:
		list := corev1.SecretList{TypeMeta: metav1.TypeMeta{Kind: "SecretList", APIVersion: "v1"},
			ListMeta: metav1.ListMeta{ResourceVersion: "1"}}
		if password != "" {
			list.Items = []corev1.Secret{{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "ns"},
				Data: map[string][]byte{"password": []byte(password)}}}
		}
		json.NewEncoder(w).Encode(list)
	}
}

// TestPasswordsAreReadByNameOnly follows Secrets that peers name, some of which the speaker may not
// read, and stops when they are named no more.
func TestPasswordsAreReadByNameOnly(t *testing.T) {
	v := &vault{secrets: map[string]string{"tor": "secret", "far": "other"}, granted: map[string]bool{"tor": true,
		"missing": true}, watches: map[string]int{}}
	server := httptest.NewServer(v)
	t.Cleanup(server.Close)
	client := newClient(t, server.URL)
	var mu sync.Mutex
	var named map[string]bool
	name := func(names ...string) {
		mu.Lock()
		defer mu.Unlock()
		named = map[string]bool{}
		for _, n := range names {
			named[n] = true
		}
	}
	p := client.Passwords("ns", func() map[string]bool { mu.Lock(); defer mu.Unlock(); return maps.Clone(named) },
		func(string) {})
	if !p.Synced() {
		t.Error("it waits although no Secret is named")
	}
	name("tor", "far", "missing")
	if p.Synced() {
		t.Error("Secrets are known before they were asked for")
	}
	ended := make(chan error)
	go func() { ended <- p.Run(t.Context()) }()
	t.Cleanup(func() { <-ended })
	wait := func(what string, f func() bool) {
		t.Helper()
		for deadline := time.Now().Add(30 * time.Second); !f(); time.Sleep(time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("not in 30 s: %s", what)
			}
		}
	}
	watched := func(names ...string) func() bool {
		return func() bool {
			v.mu.Lock()
			defer v.mu.Unlock()
			var now []string
			for name, n := range v.watches {
				if n > 0 {
					now = append(now, name)
				}
			}
			slices.Sort(now)
			return slices.Equal(now, names)
		}
	}
	wait("the Secrets are known", p.Synced)
	if got := p.All(); len(got) != 1 || got["tor"] != "secret" {
		t.Errorf("passwords %v", got)
	}
	wait("two are watched", watched("missing", "tor"))
	name("missing")
	p.Poke()
	wait("one is watched", watched("missing"))
	if got := p.All(); len(got) != 0 || !p.Synced() {
		t.Errorf("passwords %v", got)
	}
	if len(v.asked) > 0 {
		t.Errorf("it asked for all Secrets: %s", strings.Join(v.asked, " "))
	}
}
