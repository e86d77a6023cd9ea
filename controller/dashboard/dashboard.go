// Package dashboard serves a page that shows what Landfall does: pools, who announces which
// address, sessions, and what is wrong. It only reads.
//
// A browser asks for changes every few seconds, and gets an answer without content while nothing has
// changed. What the page shows is kept only while somebody looks at it; a change then costs what has
// changed, once a second at most, however many look.
package dashboard

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/landfall-lb/landfall/controller/view"
	"github.com/landfall-lb/landfall/internal/lb"
)

// Path is where the page is, and the nonResourceURL that its users may get.
const Path = "/dashboard"

// Limits of what the page costs.
const (
	// gap is the least time between two looks at what has changed.
	gap = time.Second
	// staleAfter is how long an overview is shown that nothing has changed: some of it ends by itself.
	staleAfter = time.Minute
	// idle is how long after the last request changes are noted.
	idle = time.Minute
	// maxDirty is how many changed Services are noted; after more of them all are read anew.
	maxDirty = 1 << 17
	// requests is how many answers are made or wait at a time.
	requests = 8
	// restFactor is how many times as long as an answer took no other is made, so that they cost a
	// fifth of a processor at most.
	restFactor = 4
	// pageSize is how many Services an answer has if the request does not say, maxPage how many at most.
	pageSize, maxPage = 50, 200
	// maxQuery is the longest text to search for.
	maxQuery = 256
)

// Sources are where the page's data come from. All are safe for concurrent use.
type Sources struct {
	// Services is the controller's table.
	Services interface {
		Get(key lb.Key) (lb.Service, bool)
		All() map[lb.Key]lb.Service
	}
	// Facts returns all that is no Service.
	Facts func() view.Facts
	// Class is the loadBalancerClass that the controller serves.
	Class string
	// Identity differs from that of all other controllers; Leads reports whether this one assigns
	// addresses.
	Identity string
	Leads    func() bool
	// Synced reports whether the tables have been complete.
	Synced func() bool
	Now    func() time.Time
}

// Dashboard answers requests for the page and its data.
type Dashboard struct {
	sources  Sources
	handler  http.Handler
	requests chan struct{}

	mu sync.Mutex
	// noting is set while somebody looks; dirty are the Services that have changed since the last look,
	// facts is set if something else has.
	noting bool
	dirty  map[lb.Key]bool
	facts  bool
	asked  time.Time

	// turn is held by the request that works on what follows.
	turn     chan struct{}
	state    *view.State
	version  int
	overview json.RawMessage
	leads    bool
	synced   bool
	looked   time.Time // when the last look at what has changed was
	made     time.Time // when overview was made
	rest     time.Time // until when no answer is made
}

// New returns a Dashboard.
func New(s Sources) *Dashboard {
	d := &Dashboard{sources: s, requests: make(chan struct{}, requests), turn: make(chan struct{}, 1)}
	mux := http.NewServeMux()
	for name, file := range files {
		mux.HandleFunc("GET "+Path+"/"+name, func(w http.ResponseWriter, _ *http.Request) { file.write(w) })
	}
	mux.HandleFunc("GET "+Path+"/{$}", func(w http.ResponseWriter, _ *http.Request) { index.write(w) })
	mux.HandleFunc("GET "+Path+"/data", d.data)
	d.handler = secured(mux)
	return d
}

// ServeHTTP answers a request below Path. Who may ask is not its business.
func (d *Dashboard) ServeHTTP(w http.ResponseWriter, r *http.Request) { d.handler.ServeHTTP(w, r) }

// ServiceChanged says that a Service has changed. It never blocks for long. A nil Dashboard is one
// that is off.
func (d *Dashboard) ServiceChanged(key lb.Key) {
	if d == nil {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.noting {
		return
	}
	if d.dirty[key] = true; len(d.dirty) > maxDirty || d.sources.Now().Sub(d.asked) > idle {
		d.noting, d.dirty = false, nil // the next look reads all
	}
}

// FactsChanged says that something else has changed.
func (d *Dashboard) FactsChanged() {
	if d == nil {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.facts = true
}

// document is the answer to a request for data.
type document struct {
	// By is the pod of the replica that answers, Leads whether it assigns addresses, and Synced whether it has
	// read everything.
	By     string `json:"by"`
	Leads  bool   `json:"leads"`
	Synced bool   `json:"synced"`
	// At is when Overview was made.
	At       time.Time       `json:"at"`
	Overview json.RawMessage `json:"overview"`
	Page     view.Page       `json:"page"`
}

// data answers with what the page shows: 304 if the client has that already.
func (d *Dashboard) data(w http.ResponseWriter, r *http.Request) {
	query, err := readQuery(r.URL.Query())
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	select {
	case d.requests <- struct{}{}:
		defer func() { <-d.requests }()
	default:
		busy(w)
		return
	}
	if !d.begin(r.Context()) {
		busy(w)
		return
	}
	body, tag, err := d.answer(query, r.Header.Get("If-None-Match"))
	<-d.turn
	w.Header().Set("ETag", tag)
	switch {
	case err != nil:
		http.Error(w, err.Error(), http.StatusInternalServerError)
	case body == nil:
		w.WriteHeader(http.StatusNotModified)
	default:
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write(body) // the client has gone
	}
}

func busy(w http.ResponseWriter) {
	w.Header().Set("Retry-After", "2")
	http.Error(w, "too many requests for the dashboard at a time", http.StatusServiceUnavailable)
}

// begin waits for the request's turn; it returns false if the client does not wait so long.
func (d *Dashboard) begin(ctx context.Context) bool {
	select {
	case d.turn <- struct{}{}:
	case <-ctx.Done():
		return false
	}
	timer := time.NewTimer(d.rest.Sub(d.sources.Now()))
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		<-d.turn
		return false
	}
}

// answer makes an answer and its tag; nil if the client has the one with that tag. It needs the
// turn.
func (d *Dashboard) answer(query view.Query, has string) (body []byte, tag string, err error) {
	began := d.sources.Now()
	defer func() {
		ended := d.sources.Now()
		d.rest = ended.Add(restFactor * ended.Sub(began))
	}()
	if err := d.look(began); err != nil {
		return nil, "", err
	}
	tag = fmt.Sprintf(`"%s-%d"`, d.sources.Identity, d.version)
	if has == tag {
		return nil, tag, nil
	}
	pod, _, _ := strings.Cut(d.sources.Identity, "_")
	body, err = json.Marshal(document{By: pod, Leads: d.leads, Synced: d.synced, At: d.made,
		Overview: d.overview, Page: d.state.Page(query)})
	return body, tag, err
}

// look brings the state up to date, unless it has just done so.
func (d *Dashboard) look(now time.Time) error {
	if d.state != nil && now.Sub(d.looked) < gap {
		return nil
	}
	dirty, facts, all := d.take(now)
	d.looked = now
	leads, synced := d.sources.Leads(), d.sources.Synced()
	if d.state == nil {
		d.state = view.New(d.sources.Class)
	}
	if all {
		d.state.SetServices(d.sources.Services.All())
	}
	for key := range dirty {
		service, ok := d.sources.Services.Get(key)
		d.state.SetService(key, service, ok)
	}
	if all || facts {
		d.state.SetFacts(d.sources.Facts())
	}
	changed := all || len(dirty) > 0 || leads != d.leads || synced != d.synced
	if !changed && !facts && now.Sub(d.made) < staleAfter {
		return nil
	}
	overview, err := json.Marshal(d.state.Overview(now))
	if err != nil {
		return err
	}
	if changed || string(overview) != string(d.overview) {
		d.version++
	}
	d.leads, d.synced, d.overview, d.made = leads, synced, overview, now
	return nil
}

// take returns what has changed since the last call; all if that is unknown.
func (d *Dashboard) take(now time.Time) (dirty map[lb.Key]bool, facts, all bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	dirty, facts, all = d.dirty, d.facts, !d.noting
	d.noting, d.dirty, d.facts, d.asked = true, map[lb.Key]bool{}, false, now
	return dirty, facts, all
}

// readQuery reads which Services a request is for.
func readQuery(values url.Values) (view.Query, error) {
	q := view.Query{Text: values.Get("q"), Node: values.Get("node"), Wrong: values.Get("wrong") == "true", Limit: pageSize}
	if len(q.Text) > maxQuery || len(q.Node) > maxQuery {
		return q, fmt.Errorf("a text to search for has %d bytes at most", maxQuery)
	}
	for name, to := range map[string]*int{"offset": &q.Offset, "limit": &q.Limit} {
		text := values.Get(name)
		if text == "" {
			continue
		}
		n, err := strconv.ParseUint(text, 10, 31)
		if err != nil {
			return q, fmt.Errorf("%s is no number", name)
		}
		*to = int(n)
	}
	q.Limit = cmp.Or(min(q.Limit, maxPage), pageSize)
	return q, nil
}
