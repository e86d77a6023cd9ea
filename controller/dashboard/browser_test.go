package dashboard

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/websocket"

	"github.com/landfall-lb/landfall/controller/view"
	"github.com/landfall-lb/landfall/internal/lb"
)

// chromium returns the address of a headless browser's DevTools, which ends with the test.
func chromium(t *testing.T) (devTools string) {
	t.Helper()
	path, err := exec.LookPath("chromium")
	if named := os.Getenv("CHROMIUM"); named != "" {
		path, err = named, nil
	}
	if err != nil {
		t.Skip("no chromium in the PATH, and CHROMIUM names none")
	}
	folder := t.TempDir()
	cmd := exec.Command(path, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
		"--remote-debugging-port=0", "--remote-allow-origins=*", "--user-data-dir="+folder, "about:blank")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		for range 50 { // its children still write for a moment
			if os.RemoveAll(folder) == nil {
				return
			}
			time.Sleep(100 * time.Millisecond)
		}
	})
	for range 600 {
		text, err := os.ReadFile(filepath.Join(folder, "DevToolsActivePort"))
		if port, _, ok := strings.Cut(string(text), "\n"); err == nil && ok {
			return "127.0.0.1:" + port
		}
		time.Sleep(100 * time.Millisecond)
	}
	t.Fatal("chromium does not start")
	return ""
}

// tab is a page of the browser.
type tab struct {
	t    *testing.T
	conn *websocket.Conn
	id   int
	// thrown are exceptions and messages of the browser, such as breaches of the policy.
	thrown []string
}

func openTab(t *testing.T, devTools, url string) *tab {
	t.Helper()
	request, err := http.NewRequest(http.MethodPut, "http://"+devTools+"/json/new", nil)
	if err != nil {
		t.Fatal(err)
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	var target struct{ WebSocketDebuggerURL string }
	if err := json.NewDecoder(response.Body).Decode(&target); err != nil {
		t.Fatal(err)
	}
	conn, err := websocket.Dial(target.WebSocketDebuggerURL, "", "http://localhost")
	if err != nil {
		t.Fatal(err)
	}
	conn.MaxPayloadBytes = 64 << 20
	t.Cleanup(func() { conn.Close() })
	p := &tab{t: t, conn: conn}
	for _, domain := range []string{"Page", "Runtime", "Log", "Accessibility"} {
		p.call(domain+".enable", nil)
	}
	p.call("Page.navigate", map[string]any{"url": url})
	return p
}

// call sends a command and returns the result.
func (p *tab) call(method string, params any) (result json.RawMessage) {
	p.t.Helper()
	p.id++
	if err := websocket.JSON.Send(p.conn, map[string]any{"id": p.id, "method": method, "params": params}); err != nil {
		p.t.Fatal(err)
	}
	for {
		var m struct {
			ID             int
			Method         string
			Result, Params json.RawMessage
			Error          *struct{ Message string }
		}
		if err := websocket.JSON.Receive(p.conn, &m); err != nil {
			p.t.Fatal(err)
		}
		switch {
		case m.Method == "Runtime.exceptionThrown", m.Method == "Log.entryAdded":
			p.thrown = append(p.thrown, string(m.Params))
		case m.ID == p.id && m.Error != nil:
			p.t.Fatalf("%s: %s", method, m.Error.Message)
		case m.ID == p.id:
			return m.Result
		}
	}
}

// eval returns the value of an expression.
func (p *tab) eval(expression string) any {
	p.t.Helper()
	var answer struct {
		Result           struct{ Value any }
		ExceptionDetails json.RawMessage
	}
	result := p.call("Runtime.evaluate", map[string]any{"expression": expression, "returnByValue": true, "awaitPromise": true})
	if err := json.Unmarshal(result, &answer); err != nil || answer.ExceptionDetails != nil {
		p.t.Fatalf("%s: %v %s", expression, err, answer.ExceptionDetails)
	}
	return answer.Result.Value
}

// until waits until an expression is true.
func (p *tab) until(expression string) {
	p.t.Helper()
	for range 300 {
		if p.eval(expression) == true {
			return
		}
		time.Sleep(100 * time.Millisecond)
	}
	p.t.Fatalf("never: %s; the page has\n%v", expression, p.eval("document.body.innerText"))
}

// show has a reason to be looked at: it saves a picture in $LANDFALL_PICTURES.
func (p *tab) show(name string) {
	p.t.Helper()
	folder := os.Getenv("LANDFALL_PICTURES")
	if folder == "" {
		return
	}
	var picture struct{ Data string }
	if err := json.Unmarshal(p.call("Page.captureScreenshot", map[string]any{"format": "png"}), &picture); err != nil {
		p.t.Fatal(err)
	}
	data, err := base64.StdEncoding.DecodeString(picture.Data)
	if err := errors.Join(err, os.WriteFile(filepath.Join(folder, name+".png"), data, 0o644)); err != nil {
		p.t.Fatal(err)
	}
}

func (p *tab) size(width, height int) {
	p.t.Helper()
	p.call("Emulation.setDeviceMetricsOverride", map[string]any{"width": width, "height": height, "deviceScaleFactor": 1,
		"mobile": false})
}

const text = `(document.body?.innerText ?? "")`

// evil is what a tenant, a router or a node might have shown.
const evil = `<img src=x onerror="window.taken=1"><script>window.taken=1</script>' " & </td>`

// TestPageInABrowser is one test, as a browser takes a while to start.
func TestPageInABrowser(t *testing.T) {
	devTools := chromium(t)
	c := newCluster(10_000)
	c.facts = facts()
	broken := newService("web-00003", 3)
	broken.Conditions[1] = lb.Condition{Type: lb.ConditionAnnounced, Reason: lb.ReasonNoBackends, Message: evil}
	broken.Announcements = ""
	broken.FalseSince = map[string]time.Time{lb.ConditionAnnounced: time.Now().Add(-3 * time.Hour)}
	c.services[broken.Key] = broken
	hostile := newService("web-00004", 4)
	hostile.Key = lb.Key{Namespace: evil, Name: evil}
	c.services[hostile.Key] = hostile
	var mu sync.Mutex
	down := false
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		gone := down
		mu.Unlock()
		if gone {
			http.Error(w, "no controller answers", http.StatusBadGateway)
			return
		}
		c.board.ServeHTTP(w, r)
	}))
	defer server.Close()
	p := openTab(t, devTools, server.URL+"/dashboard/")
	p.size(1280, 1000)

	t.Run("shows what there is", func(t *testing.T) {
		p.t = t
		p.until(text + `.includes("1 to 50 of 10001")`)
		for _, part := range []string{"10001 Services, 10001 addresses, 2 nodes, 3 problems", "live, from controller-1, which leads",
			"IPv4: 200 used, 5 quarantined, 51 free", "Service shop/web-00003 NoBackends for 3 h", "1 of 2 up", "AS 64512", "BFD is Up",
			"node-1 (ARP on eth0)", "NoBackends 1"} {
			if !strings.Contains(p.eval(text).(string), part) {
				t.Errorf("the page lacks %q:\n%.3000s", part, p.eval(text))
			}
		}
		p.show("dashboard")
	})
	t.Run("obeys no text of the cluster", func(t *testing.T) {
		p.t = t
		for range 2 { // in the lists above, and as a row
			if n := strings.Count(p.eval(text).(string), evil); n == 0 {
				t.Errorf("the text is not shown:\n%s", p.eval(text))
			}
			if p.eval("window.taken === undefined && document.images.length === 0 && document.scripts.length === 1") != true {
				t.Error("the page obeys it")
			}
			p.eval(`document.getElementById("q").value = "onerror"; search()`)
			p.until(text + `.includes("1 to 1 of 1")`)
		}
	})
	t.Run("searches, pages and filters", func(t *testing.T) {
		p.t = t
		search := func(q string) {
			p.eval(fmt.Sprintf(`document.getElementById("q").value = %q; document.getElementById("q").dispatchEvent(new Event("input"))`, q))
		}
		search("WEB-0001")
		p.until(text + `.includes("1 to 10 of 10")`)
		search("nothing of the sort")
		p.until(text + `.includes("No Service fits.")`)
		search("")
		p.until(text + `.includes("1 to 50 of 10001")`)
		p.eval(`document.getElementById("later").click()`)
		p.until(text + `.includes("51 to 100 of 10001")`)
		p.eval(`document.querySelector("#nodes [data-key=node-2]").click()`)
		p.until(text + `.includes("on node-2: show all nodes") && ` + text + `.includes("1 to 50 of 4999")`)
		p.eval(`document.getElementById("no-node").click()`)
		p.until(text + `.includes("1 to 50 of 10001")`)
		p.eval(`document.getElementById("wrong").click()`)
		p.until(text + `.includes("1 to 1 of 1")`)
		p.eval(`document.getElementById("wrong").click()`)
		p.until(text + `.includes("1 to 50 of 10001")`)
	})
	t.Run("follows changes and keeps the focus", func(t *testing.T) {
		p.t = t
		p.eval(`document.querySelector("#nodes [data-key=node-2]").focus()`)
		c.mu.Lock()
		c.facts.Nodes = map[string]lb.Node{"node-1": {Name: "node-1"}, "node-2": {Name: "node-2", Leaving: lb.ReasonNodeDrained}}
		c.mu.Unlock()
		c.board.FactsChanged()
		p.until(`document.getElementById("nodes").innerText.includes("NodeDrained")`)
		if got := p.eval(`document.activeElement.getAttribute("data-key")`); got != "node-2" {
			t.Errorf("the focus is on %v", got)
		}
		moved := newService("web-00001", 1)
		moved.Announcements = strings.ReplaceAll(moved.Announcements, "node-2", "node-9")
		c.set(moved)
		p.until(`document.getElementById("services").innerText.includes("node-9 (ARP on eth0)")`)
	})
	t.Run("has a name for everything that can be used", func(t *testing.T) {
		p.t = t
		unnamed(t, p)
	})
	t.Run("fits a telephone, and is dark for who wants that", func(t *testing.T) {
		p.t = t
		p.size(360, 800)
		if width := p.eval("document.documentElement.scrollWidth"); width.(float64) > 360 {
			t.Errorf("the page is %v wide", width)
		}
		p.show("dashboard-narrow")
		p.call("Emulation.setEmulatedMedia", map[string]any{"features": []map[string]string{{"name": "prefers-color-scheme", "value": "dark"}}})
		if color := p.eval("getComputedStyle(document.body).backgroundColor"); color != "rgb(18, 22, 28)" {
			t.Errorf("a dark page is %v", color)
		}
		p.size(1280, 1000)
		p.show("dashboard-dark")
	})
	if len(p.thrown) > 0 {
		t.Errorf("the browser says %v", p.thrown)
	}
	t.Run("says that it is not live", func(t *testing.T) {
		p.t = t
		mu.Lock()
		down = true
		mu.Unlock()
		p.until(text + `.includes("Not live: the answer is 502: no controller answers. Trying again.")`)
		mu.Lock()
		down = false
		mu.Unlock()
		p.until(text + `.includes("live, from controller-1")`)
	})
	t.Run("has something to say of an empty cluster", func(t *testing.T) {
		empty := newCluster(0)
		server := httptest.NewServer(empty.board)
		defer server.Close()
		p := openTab(t, devTools, server.URL+"/dashboard/")
		p.until(text + `.includes("There is no Service of type LoadBalancer.") && ` + text + `.includes("Nothing is wrong.") && ` +
			text + `.includes("There is no IPAddressPool") && document.getElementById("peers-section").hidden`)
	})
}

// unnamed finds buttons and fields without a name, as a screen reader would say it.
func unnamed(t *testing.T, p *tab) {
	t.Helper()
	var tree struct {
		Nodes []struct {
			Ignored    bool
			Role, Name struct{ Value any }
		}
	}
	if err := json.Unmarshal(p.call("Accessibility.getFullAXTree", nil), &tree); err != nil {
		t.Fatal(err)
	}
	found := map[any]int{}
	for _, n := range tree.Nodes {
		if n.Ignored {
			continue
		}
		found[n.Role.Value]++
		switch n.Role.Value {
		case "button", "searchbox", "checkbox", "region", "navigation":
			if n.Name.Value == nil || n.Name.Value == "" {
				t.Errorf("a %v has no name", n.Role.Value)
			}
		}
	}
	for _, role := range []string{"main", "banner", "region", "heading", "searchbox", "checkbox", "columnheader", "status"} {
		if found[role] == 0 {
			t.Errorf("a screen reader finds no %s among %v", role, found)
		}
	}
}

func facts() view.Facts {
	r, err := lb.ParseRange("10.0.0.0/24")
	if err != nil {
		panic(err)
	}
	return view.Facts{
		Nodes: map[string]lb.Node{"node-1": {Name: "node-1"}, "node-2": {Name: "node-2"}},
		Pools: map[string]lb.Pool{"lan": {Name: "lan", Ranges: []lb.Range{r}, Status: lb.PoolStatus{AssignedIPv4: "200",
			AvailableIPv4: "51", QuarantinedIPv4: "5", Conditions: []lb.Condition{{Type: lb.ConditionReady, Status: true, Reason: "Ready"}}}}},
		Peers: map[string]lb.PeerSessions{"tor": {Name: "tor", Interface: "eth1", PeerASN: 64512, BFD: true,
			Sessions: []lb.PeerSession{{Node: "node-1", PeerNode: lb.PeerNode{State: "Established", Message: "BFD is Up"}, Since: time.Now()},
				{Node: "node-2", PeerNode: lb.PeerNode{State: "Idle", Reason: lb.ReasonNotEstablished, Message: evil}, Since: time.Now()}}}},
		Findings: []view.Finding{{Node: "node-2", Finding: lb.Find(lb.ReasonForwardingOff, "%s", evil), Since: time.Now(), Last: time.Now()}},
	}
}
