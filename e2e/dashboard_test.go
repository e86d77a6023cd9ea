package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/e2e/lab"
	"github.com/landfall-lb/landfall/e2e/lab/labtest"
)

const dashboardObjects = `
apiVersion: landfall.dev/v1beta1
kind: IPAddressPool
metadata: {name: lan}
spec: {addresses: [172.26.236.180-172.26.236.187], autoAssign: false}
---
apiVersion: landfall.dev/v1beta1
kind: L2Advertisement
metadata: {name: lan}
spec: {ipAddressPools: [lan, small]}
---
apiVersion: landfall.dev/v1beta1
kind: IPAddressPool
metadata: {name: small}
spec: {addresses: [172.26.236.190/32], autoAssign: false}
---
`

// page is what the dashboard's data say, as far as the test looks.
type page struct {
	By            string
	Leads, Synced bool
	Overview      struct {
		Services, Wrong int
		Problems        []struct {
			Kind, Name, Node, Reason string
			Since                    time.Time
		}
		Pools []struct {
			Name     string
			Families []struct{ Family, Used, Free, Quarantined string }
		}
		Nodes []struct {
			Name                        string
			Owned, Routed, Sessions, Up int
		}
		Peers []struct {
			Name      string
			BFD       bool
			Up, Total int
		}
	}
	Page struct {
		Total int
		Rows  []struct {
			Name      string
			Addresses []struct {
				VIP, Owner, Pool string
				Routes           []struct{ Peers, Nodes []string }
			}
		}
	}
}

// summary says what the test wants in one line.
func (p page) summary() string {
	var b strings.Builder
	for _, pool := range p.Overview.Pools {
		fmt.Fprintf(&b, "%s %+v; ", pool.Name, pool.Families)
	}
	for _, peer := range p.Overview.Peers {
		fmt.Fprintf(&b, "%s %d/%d BFD %v; ", peer.Name, peer.Up, peer.Total, peer.BFD)
	}
	owned := 0
	for _, node := range p.Overview.Nodes {
		owned += node.Owned
	}
	fmt.Fprintf(&b, "%d owned; ", owned)
	for _, problem := range p.Overview.Problems {
		fmt.Fprintf(&b, "%s %s %s, ", problem.Kind, problem.Name, problem.Reason)
	}
	return b.String()
}

// openDashboard runs landfallctl dashboard on the control plane's node, and returns the page's address there.
func openDashboard(t *testing.T, l *lab.Lab, args ...string) (url string) {
	t.Helper()
	argv := append([]string{filepath.Join(programFolder(t), "landfallctl"), "dashboard"}, args...)
	program, err := l.StartProgram("dashboard", l.Cluster().Master().Name, argv)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { program.Stop(10 * time.Second) })
	eventually(t, "landfallctl prints the address", func() error {
		log := l.Logs(100)["dashboard"]
		if !strings.HasPrefix(log, "http://127.0.0.1:") {
			return fmt.Errorf("it says %q (still there: %v)", log, program.Running())
		}
		url, _, _ = strings.Cut(log, "\n")
		return nil
	})
	return url
}

// TestDashboard shows a cluster with routers, Services that are announced both ways, and three things that are wrong,
// through landfallctl dashboard as a user would. With $LANDFALL_PICTURES it saves what a browser shows.
func TestDashboard(t *testing.T) {
	t.Parallel()
	cluster := lab.SeedCluster()
	cluster.ToR = lab.ToR{Kind: lab.FRR, Count: 2, ASN: 64513, NodeASN: 64512, BFD: 50 * time.Millisecond}
	l := labtest.Start(t, cluster, lab.Options{Values: map[string]any{"controller": map[string]any{"replicas": 1,
		"dashboard": map[string]any{"enabled": true}}}})
	if err := l.ServeExec(t.Context()); err != nil {
		t.Fatal(err)
	}
	objects := dashboardObjects + fmt.Sprintf(bgpPool, "") + bgpPeers(cluster, ", bfdProfile: fast") +
		"---\napiVersion: landfall.dev/v1beta1\nkind: BGPPeer\nmetadata: {name: tor-9}\n" +
		"spec: {myASN: 64512, peerASN: 64519, peerAddress: 172.26.236.9}\n"
	applied(objects)(t, l)
	if err := l.AddService(t.Context(), lab.SeedService()); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"shop", "blog", "mail"} {
		backed(name, fromPool("lan"))(t, l)
	}
	backed("api", nil)(t, l)
	backed("only", fromPool("small"))(t, l)
	created("second", fromPool("small"))(t, l)
	created("idle", fromPool("lan"))(t, l)

	host := l.Cluster().Master().Name
	url := openDashboard(t, l)
	ask := func(query string) (p page, err error) {
		code, body, err := l.Get(t.Context(), host, url+"data"+query)
		if err == nil && code != 200 {
			err = fmt.Errorf("%d %s", code, body)
		}
		if err == nil {
			err = json.Unmarshal([]byte(body), &p)
		}
		return p, err
	}
	nodes, sessions := len(workers(l)), len(l.Cluster().Nodes)
	want := "lan [{Family:IPv4 Used:4 Free:4 Quarantined:0}]; routed [{Family:IPv4 Used:2 Free:18 Quarantined:0}]; " +
		"small [{Family:IPv4 Used:1 Free:0 Quarantined:0}]; " + fmt.Sprintf("tor-1 %[1]d/%[1]d BFD true; tor-2 %[1]d/%[1]d BFD true; "+
		"tor-9 0/%[1]d BFD false; 4 owned; ", sessions)
	var shown page
	eventually(t, "the dashboard shows the cluster", func() (err error) {
		if shown, err = ask(""); err != nil {
			return err
		}
		summary := shown.summary()
		for _, part := range []string{want, "IPAddressPool small PoolExhausted", "BGPPeer tor-9 NotEstablished",
			"Service second PoolExhausted", "Service idle NoBackends"} {
			if !strings.Contains(summary, part) {
				return fmt.Errorf("%q lacks %q", summary, part)
			}
		}
		if !shown.Leads || !shown.Synced || shown.Page.Total != 8 {
			return fmt.Errorf("leads %v, synced %v, %d Services", shown.Leads, shown.Synced, shown.Page.Total)
		}
		return nil
	})
	for _, problem := range shown.Overview.Problems {
		if since := time.Since(problem.Since); since < 0 || since > time.Hour {
			t.Errorf("%s %s is wrong since %s", problem.Kind, problem.Name, problem.Since)
		}
	}
	routed, err := ask("?q=api")
	if err != nil || len(routed.Page.Rows) != 1 || len(routed.Page.Rows[0].Addresses[0].Routes[0].Nodes) != nodes ||
		routed.Page.Rows[0].Addresses[0].Pool != "routed" {
		t.Errorf("the Service over BGP: %+v, %v", routed.Page, err)
	}
	photograph(t, l, host, url)

	t.Run("only with the secret", func(t *testing.T) {
		origin := url[:strings.LastIndex(strings.TrimSuffix(url, "/"), "/")]
		if code, body, err := l.Get(t.Context(), host, origin+"/dashboard/data"); code != 404 {
			t.Errorf("without it: %d %s %v", code, body, err)
		}
	})
	t.Run("only with a token", func(t *testing.T) {
		leader := l.Agents("controller")[0].Node
		out, _ := l.Exec(t.Context(), leader, "curl", "-sk", "-o", "/dev/null", "-w", "%{http_code}", "https://127.0.0.1:7480/dashboard/data")
		if out != "401" {
			t.Errorf("without a token: %s", out)
		}
	})
	t.Run("from the next controller", func(t *testing.T) {
		if err := l.Agents("controller")[0].Restart(t.Context()); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the page is back", func() error {
			again, err := ask("")
			if err == nil && (!again.Synced || again.By != shown.By) {
				err = fmt.Errorf("%+v", again)
			}
			return err
		})
	})
}

// photograph saves pictures of a page that only a host of the lab reaches.
func photograph(t *testing.T, l *lab.Lab, host, url string) {
	t.Helper()
	folder := os.Getenv("LANDFALL_PICTURES")
	chromium, err := exec.LookPath("chromium")
	if folder == "" || err != nil {
		return
	}
	for name, flags := range map[string][]string{
		"dashboard": {"--window-size=1280,1560"}, "dashboard-dark": {"--window-size=1280,1560", "--force-dark-mode"},
		"dashboard-narrow": {"--window-size=500,1000"},
	} {
		argv := append([]string{chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
			"--user-data-dir=" + t.TempDir(), "--virtual-time-budget=5000", "--screenshot=" + filepath.Join(folder, name+".png")}, flags...)
		if out, err := l.Exec(t.Context(), host, append(argv, url)...); err != nil {
			t.Errorf("%s: %v %s", name, err, out)
		}
	}
}
