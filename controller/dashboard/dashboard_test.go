package dashboard

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/landfall-lb/landfall/controller/view"
	"github.com/landfall-lb/landfall/internal/lb"
)

// cluster is what a Dashboard shows.
type cluster struct {
	mu       sync.Mutex
	services map[lb.Key]lb.Service
	facts    view.Facts
	leads    bool
	// read counts how often all Services were read, got how often one, and asked how often the facts.
	read, got, asked int
	board            *Dashboard
}

func newCluster(services int) *cluster {
	c := &cluster{services: map[lb.Key]lb.Service{}, leads: true}
	c.facts.Nodes = map[string]lb.Node{"node-1": {Name: "node-1"}, "node-2": {Name: "node-2"}}
	for i := range services {
		s := newService(fmt.Sprintf("web-%05d", i), i)
		c.services[s.Key] = s
	}
	c.board = New(Sources{Services: c, Class: "", Identity: "controller-1_ABCDEFGH", Now: time.Now,
		Leads: func() bool { c.mu.Lock(); defer c.mu.Unlock(); return c.leads }, Synced: func() bool { return true },
		Facts: func() view.Facts { c.mu.Lock(); defer c.mu.Unlock(); c.asked++; return c.facts }})
	return c
}

func newService(name string, i int) lb.Service {
	addr := netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)})
	return lb.Service{Key: lb.Key{Namespace: "shop", Name: name}, Type: lb.LoadBalancer, Ingress: []lb.Ingress{{Addr: addr}},
		Conditions: []lb.Condition{{Type: lb.ConditionAssigned, Status: true, Reason: lb.ReasonAssigned},
			{Type: lb.ConditionAnnounced, Status: true, Reason: lb.ReasonAnnounced}},
		Announcements: lb.EncodeAnnouncements([]lb.Announcement{{VIP: addr, Reason: lb.ReasonAnnounced,
			Owner: fmt.Sprintf("node-%d", i%2+1), Protocol: "ARP", Interfaces: []string{"eth0"}}})}
}

func (c *cluster) Get(key lb.Key) (lb.Service, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.got++
	s, ok := c.services[key]
	return s, ok
}

func (c *cluster) All() map[lb.Key]lb.Service {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.read++
	return maps.Clone(c.services)
}

// set changes a Service.
func (c *cluster) set(s lb.Service) {
	c.mu.Lock()
	c.services[s.Key] = s
	c.mu.Unlock()
	c.board.ServiceChanged(s.Key)
}

func (c *cluster) get(target, tag string) *httptest.ResponseRecorder {
	r := httptest.NewRequest(http.MethodGet, target, nil)
	if tag != "" {
		r.Header.Set("If-None-Match", tag)
	}
	w := httptest.NewRecorder()
	c.board.ServeHTTP(w, r)
	return w
}

// data asks for data, and wants an answer.
func (c *cluster) data(t *testing.T, query, tag string) (code int, tagNow string, d document, o view.Overview) {
	t.Helper()
	w := c.get("/dashboard/data?"+query, tag)
	if w.Code == http.StatusOK {
		if err := json.Unmarshal(w.Body.Bytes(), &d); err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(d.Overview, &o); err != nil {
			t.Fatal(err)
		}
	}
	return w.Code, w.Header().Get("ETag"), d, o
}

func TestBrowsersAreToldWhatToKeepTo(t *testing.T) {
	c := newCluster(1)
	for _, target := range []string{"/dashboard/", "/dashboard/page.js", "/dashboard/page.css", "/dashboard/icon.svg",
		"/dashboard/data", "/dashboard/nothing"} {
		w := c.get(target, "")
		header := w.Header()
		policy := header.Get("Content-Security-Policy")
		if !strings.HasPrefix(policy, "default-src 'none'; ") || strings.Contains(policy, "unsafe") ||
			strings.Contains(policy, "data:") || !strings.Contains(policy, "frame-ancestors 'none'") ||
			header.Get("X-Content-Type-Options") != "nosniff" || header.Get("Cache-Control") != "no-store" ||
			header.Get("Referrer-Policy") != "no-referrer" || header.Get("Access-Control-Allow-Origin") != "" {
			t.Errorf("%s: %v", target, header)
		}
		if want := map[bool]int{true: 404, false: 200}[target == "/dashboard/nothing"]; w.Code != want {
			t.Errorf("%s: %d, want %d", target, w.Code, want)
		}
	}
	for _, method := range []string{http.MethodPost, http.MethodPut, http.MethodDelete} {
		w := httptest.NewRecorder()
		c.board.ServeHTTP(w, httptest.NewRequest(method, "/dashboard/data", nil))
		if w.Code != http.StatusMethodNotAllowed {
			t.Errorf("%s: %d", method, w.Code)
		}
	}
}

// TestPageIsItsOwnOrigin holds that the page needs nothing from elsewhere, and has nothing in it that its policy
// forbids.
func TestPageIsItsOwnOrigin(t *testing.T) {
	for name, text := range map[string]string{"index.html": indexHTML, "page.css": pageCSS, "page.js": pageJS} {
		for _, bad := range []string{"http://", "https://", " style=", "onclick", "onload", "javascript:", "innerHTML",
			"outerHTML", "insertAdjacentHTML", "document.write", "eval(", "url("} {
			if strings.Contains(text, bad) {
				t.Errorf("%s has %q", name, bad)
			}
		}
		if len(text) > 16<<10 {
			t.Errorf("%s has %d bytes", name, len(text))
		}
	}
	if strings.Count(indexHTML, "<script") != 1 || !strings.Contains(indexHTML, `<script src="page.js" defer></script>`) {
		t.Error("index.html has scripts of its own")
	}
}

func TestNothingIsSentWhileNothingChanges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(10)
		c.board.ServiceChanged(lb.Key{}) // nobody looks
		code, tag, d, o := c.data(t, "limit=3", "")
		if code != 200 || d.By != "controller-1" || !d.Leads || o.Services != 10 || d.Page.Total != 10 || len(d.Page.Rows) != 3 {
			t.Fatalf("%d %+v %+v", code, d, o)
		}
		for range 30 {
			time.Sleep(2 * time.Second)
			if code, now, _, _ := c.data(t, "limit=3", tag); code != 304 || now != tag {
				t.Fatalf("%d, tag %s, want 304 and %s", code, now, tag)
			}
		}
		if c.read != 1 || c.got != 0 || c.asked != 1 {
			t.Errorf("read all Services %d times, one %d times, the rest %d times", c.read, c.got, c.asked)
		}
		s := c.services[lb.Key{Namespace: "shop", Name: "web-00003"}]
		s.Conditions = []lb.Condition{{Type: lb.ConditionAssigned, Reason: lb.ReasonPoolExhausted}}
		c.set(s)
		time.Sleep(gap)
		code, after, _, o := c.data(t, "limit=3", tag)
		if code != 200 || after == tag || o.Wrong != 1 || c.read != 1 || c.got != 1 {
			t.Errorf("after a change: %d, %d wrong; read all %d times, one %d times", code, o.Wrong, c.read, c.got)
		}
		c.mu.Lock()
		c.leads = false
		c.facts.Nodes["node-3"] = lb.Node{Name: "node-3"}
		c.mu.Unlock()
		c.board.FactsChanged()
		time.Sleep(gap)
		if code, _, d, o := c.data(t, "limit=3", after); code != 200 || d.Leads || len(o.Nodes) != 3 {
			t.Errorf("after a leader and a node: %d %+v, %d nodes", code, d, len(o.Nodes))
		}
	})
}

// TestAChangeIsLookedAtOnceASecond has many pages open while everything changes all the time.
func TestAChangeIsLookedAtOnceASecond(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(10)
		c.data(t, "", "")
		for range 100 {
			for i := range 10 {
				c.set(newService(fmt.Sprintf("web-%05d", i), i))
			}
			for range 5 {
				c.data(t, "", "")
			}
			time.Sleep(gap / 10)
		}
		if c.read != 1 || c.got > 110 {
			t.Errorf("in 10 s: read all Services %d times, single ones %d times", c.read, c.got)
		}
	})
}

// TestNobodyLooks holds that changes are not noted for long once the last page is closed.
func TestNobodyLooks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(3)
		_, tag, _, _ := c.data(t, "", "")
		time.Sleep(idle + time.Second)
		c.set(newService("web-00001", 7))
		if c.board.noting || c.board.dirty != nil {
			t.Error("changes are noted although nobody looks")
		}
		c.set(newService("web-00009", 9))
		if code, now, d, _ := c.data(t, "", tag); code != 200 || now == tag || d.Page.Total != 4 || c.read != 2 {
			t.Errorf("who looks again: %d %s, %d Services, all read %d times", code, now, d.Page.Total, c.read)
		}
	})
}

func TestQueriesAreRead(t *testing.T) {
	c := newCluster(300)
	for query, want := range map[string]string{
		"":                              "200 300 50",
		"limit=1000":                    "200 300 200",
		"limit=0":                       "200 300 50",
		"q=web-0001&limit=100":          "200 10 10",
		"node=node-2":                   "200 150 50",
		"wrong=true":                    "200 0 0",
		"offset=290":                    "200 300 10",
		"offset=-1":                     "400 0 0",
		"limit=many":                    "400 0 0",
		"q=" + strings.Repeat("x", 300): "400 0 0",
	} {
		code, _, d, _ := c.data(t, query, "")
		if got := fmt.Sprintf("%d %d %d", code, d.Page.Total, len(d.Page.Rows)); got != want {
			t.Errorf("%.40s: %s, want %s", query, got, want)
		}
	}
}

// FuzzReadQuery checks that a query that is taken asks for no more than one page, and for what was written.
func FuzzReadQuery(f *testing.F) {
	f.Add("q=web&node=n&wrong=true&offset=50&limit=100")
	f.Add("limit=1000")
	f.Add("limit=0&offset=2147483648")
	f.Add("limit=-1")
	f.Add("q=%zz&limit=1;2")
	f.Fuzz(func(t *testing.T, text string) {
		values, _ := url.ParseQuery(text) // what it can read counts, as in a request
		q, err := readQuery(values)
		if err != nil {
			return
		}
		if q.Limit < 1 || q.Limit > maxPage || q.Offset < 0 || len(q.Text) > maxQuery || len(q.Node) > maxQuery {
			t.Fatalf("%q asks for %+v", text, q)
		}
		again, err := readQuery(url.Values{"q": {q.Text}, "node": {q.Node}, "wrong": {fmt.Sprint(q.Wrong)},
			"offset": {fmt.Sprint(q.Offset)}, "limit": {fmt.Sprint(q.Limit)}})
		if err != nil || again != q {
			t.Errorf("%+v is read back as %+v: %v", q, again, err)
		}
		if limit, err := strconv.Atoi(values.Get("limit")); err == nil && limit > 0 && q.Limit != min(limit, maxPage) {
			t.Errorf("%q has a limit of %d", text, q.Limit)
		}
		if offset, err := strconv.Atoi(values.Get("offset")); err == nil && q.Offset != offset {
			t.Errorf("%q begins at %d", text, q.Offset)
		}
	})
}

// TestManyWhoAskAreRefused has more requests than are answered at a time, while one of them hangs.
func TestManyWhoAskAreRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(1)
		hang := make(chan struct{})
		c.board.sources.Synced = func() bool { <-hang; return true }
		codes := make(chan int, 2*requests)
		for range 2 * requests {
			go func() { codes <- c.get("/dashboard/data", "").Code }()
		}
		synctest.Wait()
		count := map[int]int{}
		for range requests {
			count[<-codes]++
		}
		close(hang)
		for range requests {
			count[<-codes]++
		}
		if count[503] != requests || count[200] != requests {
			t.Errorf("answers: %v", count)
		}
	})
}

func TestADashboardThatIsOff(*testing.T) {
	var off *Dashboard
	off.ServiceChanged(lb.Key{})
	off.FactsChanged()
}

// BenchmarkOpenPage is what an open page costs at 10,000 Services and 100 nodes: each time something has changed, and
// while nothing has.
func BenchmarkOpenPage(b *testing.B) {
	c := newCluster(10_000)
	for i := range 100 {
		c.facts.Nodes[fmt.Sprintf("node-%d", i)] = lb.Node{Name: fmt.Sprintf("node-%d", i)}
	}
	clock := time.Unix(1e9, 0)
	c.board.sources.Now = func() time.Time { return clock }
	w := c.get("/dashboard/data", "")
	b.Run("open", func(b *testing.B) {
		for b.Loop() {
			c.board.noting = false
			clock = clock.Add(gap)
			w = c.get("/dashboard/data", "")
		}
	})
	b.Run("one changed", func(b *testing.B) {
		for i := 0; b.Loop(); i++ {
			c.set(newService("web-00001", i%5))
			clock = clock.Add(gap)
			w = c.get("/dashboard/data?q=web", "")
		}
		b.ReportMetric(float64(w.Body.Len()), "bytes")
	})
	b.Run("100 changed", func(b *testing.B) {
		for i := 0; b.Loop(); i++ {
			for j := range 100 {
				c.set(newService(fmt.Sprintf("web-%05d", j), i+j))
			}
			clock = clock.Add(gap)
			w = c.get("/dashboard/data?q=web", "")
		}
	})
	b.Run("unchanged", func(b *testing.B) {
		tag := w.Header().Get("ETag")
		for b.Loop() {
			clock = clock.Add(gap / 1000)
			w = c.get("/dashboard/data?q=web", tag)
		}
	})
}
