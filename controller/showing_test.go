package main

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http/httptest"
	"reflect"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/kube"
	"github.com/landfall-lb/landfall/internal/kube/kubetest"
	"github.com/landfall-lb/landfall/internal/lb"
)

// TestDashboardShowsTheControllersTables has a cluster with one of each.
func TestDashboardShowsTheControllersTables(t *testing.T) {
	peers, found := kubetest.NewTable[string, lb.PeerSessions](), kubetest.NewTable[string, kube.NodeFinding]()
	services, pools := kubetest.NewTable[lb.Key, lb.Service](), kubetest.NewTable[string, lb.Pool]()
	nodes := kubetest.NewTable[string, lb.Node]()
	nodes.Set("n1", lb.Node{Name: "n1"})
	pools.Set("lan", lb.Pool{Name: "lan"})
	services.Set(key("web"), lb.Service{Key: key("web"), Type: lb.LoadBalancer})
	services.Set(key("other"), lb.Service{Key: key("other"), Type: lb.LoadBalancer, Class: "other"})
	peers.Set("tor", lb.PeerSessions{Name: "tor", Sessions: []lb.PeerSession{{Node: "n1"}, {Node: "n2"}}})
	now := time.Unix(1e9, 0)
	found.Set("n1.1", kube.NodeFinding{Node: "n1", Finding: lb.Find(lb.ReasonForwardingOff, "off"), First: now, Last: now})
	found.Set("n1.2", kube.NodeFinding{}) // another program's Event
	found.SetSynced(false)
	d := deps{services: services, pools: pools, nodes: nodes, identity: "c-0_XYZ", now: func() time.Time { return now },
		log: slog.New(slog.DiscardHandler)}
	shown := showing{deps: d, leads: func() bool { return true }, peers: peers, found: found}
	board := shown.dashboard()
	ask := func() string {
		w := httptest.NewRecorder()
		board.ServeHTTP(w, httptest.NewRequest("GET", "/dashboard/data", nil))
		var got struct {
			By            string
			Leads, Synced bool
			Overview      struct {
				Services, Wrong     int
				Pools, Nodes, Peers []struct{ Name string }
			}
		}
		if err := json.Unmarshal(w.Body.Bytes(), &got); err != nil {
			t.Fatalf("%d %s: %v", w.Code, w.Body, err)
		}
		return fmt.Sprintf("%+v", got)
	}
	want := "{By:c-0 Leads:true Synced:%v Overview:{Services:1 Wrong:3 Pools:[{Name:lan}] Nodes:[{Name:n1}] Peers:[{Name:tor}]}}"
	if got := ask(); got != fmt.Sprintf(want, false) {
		t.Error(got)
	}
	found.SetSynced(true)
	now = now.Add(time.Second) // the least time between two looks
	if got := ask(); got != fmt.Sprintf(want, true) {
		t.Error(got)
	}

	// The tidier reads the same table.
	tidied := peerNodes{peers}
	if got, ok := tidied.Get("tor"); !ok || !reflect.DeepEqual(got, []string{"n1", "n2"}) ||
		!reflect.DeepEqual(tidied.All(), map[string][]string{"tor": {"n1", "n2"}}) || !tidied.Synced() {
		t.Errorf("the tidier sees %v", tidied.All())
	}
}
