package ops

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/landfall-lb/landfall/internal/listen"
)

// door is a gatekeeper with a clock and an API server of its own.
type door struct {
	*gatekeeper
	clock   time.Time
	asked   []string
	answers map[string]verdict
	err     error
}

func newDoor() *door {
	d := &door{clock: time.Unix(1e9, 0), answers: map[string]verdict{
		"good": {user: "prometheus", allowed: true}, "other": {user: "eve"},
	}}
	d.gatekeeper = newGatekeeper(guardedMetrics,
		http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "metrics") }))
	d.now = func() time.Time { return d.clock }
	d.use(func(_ context.Context, token string) (string, bool, error) {
		d.asked = append(d.asked, token)
		return d.answers[token].user, d.answers[token].allowed, d.err
	}, nil)
	return d
}

func (d *door) get(client, authorization string) (code int, body string) {
	return d.getOn(context.Background(), client, authorization)
}

// getOn sends a request on the connection that a context has.
func (d *door) getOn(ctx context.Context, client, authorization string) (code int, body string) {
	r := httptest.NewRequestWithContext(ctx, http.MethodGet, "/metrics", nil)
	r.RemoteAddr = client + ":1"
	if authorization != "" {
		r.Header.Set("Authorization", authorization)
	}
	w := httptest.NewRecorder()
	d.ServeHTTP(w, r)
	return w.Code, w.Body.String()
}

func (d *door) want(t *testing.T, client, authorization string, code int, text string) {
	t.Helper()
	if got, body := d.get(client, authorization); got != code || !strings.Contains(body, text) {
		t.Errorf("%q from %s: %d %q, want %d with %q", authorization, client, got, body, code, text)
	}
}

func TestMetricsNeedATokenThatTheAPIServerAccepts(t *testing.T) {
	d := newDoor()
	d.use(nil, nil)
	d.want(t, "10.0.0.1", "Bearer good", 503, "has not connected to the API server yet")
	d = newDoor()
	for i, test := range []struct {
		authorization string
		code          int
		text          string
	}{
		{"", 401, "bearer token"},
		{"Basic Z29vZDo=", 401, "bearer token"},
		{"Bearer", 401, "bearer token"},
		{"Bearer " + strings.Repeat("x", maxToken+1), 401, "bearer token"},
		{"Bearer bad", 401, "does not accept the token"},
		{"Bearer other", 403, `user "eve" may not get /metrics`},
		{"bearer good", 200, "metrics"},
	} {
		d.want(t, fmt.Sprintf("10.0.1.%d", i), test.authorization, test.code, test.text)
	}
}

func TestAnswersOfTheAPIServerAreRememberedForAWhile(t *testing.T) {
	d := newDoor()
	for range 10 {
		d.want(t, "10.0.0.1", "Bearer good", 200, "")
		d.want(t, "10.0.0.2", "Bearer other", 403, "")
	}
	if len(d.asked) != 2 {
		t.Errorf("the API server was asked %d times, want 2", len(d.asked))
	}
	d.clock = d.clock.Add(distrustFor)
	d.answers["other"] = verdict{user: "eve", allowed: true}
	d.want(t, "10.0.0.2", "Bearer other", 200, "")
	d.clock = d.clock.Add(trustFor)
	delete(d.answers, "other")
	d.want(t, "10.0.0.2", "Bearer other", 401, "")

	// Monitoring goes on without the API server, for a while.
	d.err = errors.New("connection refused")
	d.clock = d.clock.Add(trustFor)
	d.want(t, "10.0.0.1", "Bearer good", 200, "")
	d.want(t, "10.0.0.3", "Bearer new", 503, "connection refused")
	d.clock = d.clock.Add(trustAtMost)
	d.want(t, "10.0.0.1", "Bearer good", 503, "connection refused")
}

func TestAClientThatTriesTokensKeepsNobodyOut(t *testing.T) {
	d := newDoor()
	for i := range 1000 {
		code, _ := d.get("10.0.0.66", fmt.Sprintf("Bearer guess-%d", i))
		if want := map[bool]int{true: 401, false: 503}[i == 0]; code != want {
			t.Fatalf("guess %d: %d, want %d", i, code, want)
		}
	}
	if len(d.asked) != 1 {
		t.Errorf("the API server was asked %d times within a second", len(d.asked))
	}
	d.want(t, "10.0.0.1", "Bearer good", 200, "")
	// What was allowed is asked for again however many try, and forgotten last.
	for i := range 3 * maxVerdicts {
		d.clock = d.clock.Add(time.Second)
		d.get(fmt.Sprintf("10.2.%d.%d", i/250, i%250), fmt.Sprintf("Bearer more-%d", i))
	}
	d.err = errors.New("connection refused")
	d.clock = d.clock.Add(-time.Second * (3*maxVerdicts - 60)) // within trustAtMost
	d.want(t, "10.0.0.1", "Bearer good", 200, "")
	if len(d.verdicts) > maxVerdicts {
		t.Errorf("%d tokens are remembered", len(d.verdicts))
	}
	// Many clients at once are bounded together.
	d.err = nil
	asked := len(d.asked)
	for i := range 3 * maxClients {
		d.get(fmt.Sprintf("10.1.%d.%d", i/250, i%250), fmt.Sprintf("Bearer many-%d", i))
	}
	if got := len(d.asked) - asked; got > maxReviewRate {
		t.Errorf("the API server was asked %d times within a second", got)
	}
}

// TestContract11ManyClientsWithUnknownTokensKeepNoNewScraperOut has clients try new tokens all the time.
func TestContract11ManyClientsWithUnknownTokensKeepNoNewScraperOut(t *testing.T) {
	for _, flooders := range []int{maxReviewRate, 300, 1000} {
		d := newDoor()
		flood := func(d *door) {
			for i := range flooders {
				d.get(fmt.Sprintf("10.%d.%d.1", i/250, i%250), fmt.Sprintf("Bearer %d-%d", i, len(d.asked)))
			}
		}
		for range 1 + flooders/maxReviewRate { // until each has been heard
			flood(d)
			d.clock = d.clock.Add(time.Second)
		}
		asked := len(d.asked)
		for i := range 60 {
			flood(d)
			d.answers[fmt.Sprint("new-", i)] = verdict{user: "prometheus", allowed: true}
			d.want(t, fmt.Sprintf("172.16.0.%d", i), fmt.Sprint("Bearer new-", i), 200, "")
			d.clock = d.clock.Add(time.Second)
		}
		if got, most := len(d.asked)-asked-60, 60*maxReviewRate; got > most {
			t.Errorf("%d clients: the API server was asked %d times in a minute, want at most %d", flooders, got, most)
		}
		if len(d.clients) > maxClients {
			t.Errorf("%d clients are remembered", len(d.clients))
		}
	}
}

// TestContract11AClientWithForgedTokensKeepsOutNoNewTokenOfANeighbor has a pod with the address of Prometheus, as those on
// its node have where network plugins translate addresses, try tokens all the time.
func TestContract11AClientWithForgedTokensKeepsOutNoNewTokenOfANeighbor(t *testing.T) {
	d := newDoor()
	const shared = "10.0.0.66"
	scraper, other := withConnection(t.Context(), nil), withConnection(t.Context(), nil)
	if code, body := d.getOn(scraper, shared, "Bearer good"); code != 200 {
		t.Fatalf("%d %s", code, body)
	}
	for i := range 600 {
		asked := len(d.asked)
		for j := range 10 {
			d.getOn(other, shared, fmt.Sprintf("Bearer forged-%d-%d", i, j))
		}
		if got := len(d.asked) - asked; got > 1 {
			t.Fatalf("%d questions about forged tokens in a second", got)
		}
		if i%30 == 29 {
			token := fmt.Sprint("rotated-", i)
			d.answers[token] = verdict{user: "prometheus", allowed: true}
			if code, body := d.getOn(scraper, shared, "Bearer "+token); code != 200 {
				t.Fatalf("a new token after %d s: %d %s", i, code, body)
			}
		}
		d.clock = d.clock.Add(time.Second)
	}
	// Whoever had one token accepted has one question for it.
	d.getOn(scraper, shared, "Bearer forged")
	if code, body := d.getOn(scraper, shared, "Bearer forged too"); code != 503 {
		t.Errorf("the second forged token on the connection: %d %s", code, body)
	}
}

// TestContract11ProgramsOnManyNodesAskLittleTogether has many clients send new tokens to a program of which each node has
// one. Those that are trusted stay so, also while clients take turns that rest in between.
func TestContract11ProgramsOnManyNodesAskLittleTogether(t *testing.T) {
	for nodes, rate := range map[int]int{0: 1, 3: maxReviewRate, 100: 2, 5000: 1} {
		d := newDoor()
		d.nodes = func() int { return nodes }
		d.want(t, "172.16.0.1", "Bearer good", 200, "")
		const clients = 300
		token := 0
		flood := func(n int) {
			for range n {
				token++
				d.get(fmt.Sprintf("10.0.%d.%d", token%clients/250, token%clients%250), fmt.Sprintf("Bearer forged-%d", token))
			}
		}
		for second := range 10 * 60 {
			asked := len(d.asked)
			flood(rate)
			if second%60 == 0 {
				flood(clients)
			}
			if got := len(d.asked) - asked; got > 2*rate {
				t.Fatalf("%d nodes: %d questions in a second, want at most %d", nodes, got, 2*rate)
			}
			if second%20 == 0 {
				d.want(t, "172.16.0.1", "Bearer good", 200, "")
			}
			d.clock = d.clock.Add(time.Second)
		}
		d.answers["new"] = verdict{user: "prometheus", allowed: true}
		flood(clients)
		d.want(t, "172.16.0.2", "Bearer new", 200, "")
		for second := range 180 { // clients of which nothing was refused take all questions of such
			for i := range rate {
				d.get(fmt.Sprintf("10.1.%d.%d", second, i), fmt.Sprintf("Bearer %d-%d", second, i))
			}
			d.want(t, "172.16.0.1", "Bearer good", 200, "")
			d.clock = d.clock.Add(time.Second)
		}
		if age := d.clock.Sub(d.verdicts[sha256.Sum256([]byte("good"))].at); age > trustFor {
			t.Errorf("%d nodes: what is trusted was last asked about %v ago", nodes, age)
		}
	}
}

// TestTokensOfClientsThatGoAwayCountAsRefused has a client close its connections before the API server answers.
func TestTokensOfClientsThatGoAwayCountAsRefused(t *testing.T) {
	d := newDoor()
	d.use(func(ctx context.Context, _ string) (string, bool, error) { return "", false, ctx.Err() }, nil)
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	r := httptest.NewRequestWithContext(gone, http.MethodGet, "/metrics", nil)
	r.RemoteAddr = "10.0.0.66:1"
	r.Header.Set("Authorization", "Bearer bad")
	d.ServeHTTP(httptest.NewRecorder(), r)
	if got := d.clients[clientOf(r)].refused; got != 1 {
		t.Errorf("%d tokens count as refused, want 1", got)
	}
}

// TestAClientWhoseTokensFailWaitsLonger also gets in again: a scraper whose ServiceAccount has just got its role.
func TestAClientWhoseTokensFailWaitsLonger(t *testing.T) {
	d := newDoor()
	tries := func(seconds int) int {
		asked := len(d.asked)
		for range seconds {
			d.get("10.0.0.66", fmt.Sprintf("Bearer %d", len(d.asked)))
			d.clock = d.clock.Add(time.Second)
		}
		return len(d.asked) - asked
	}
	if first, later := tries(8), tries(300); first != 4 || later > 1+300/int(maxClientGap/time.Second) {
		t.Errorf("%d questions in 8 s, want 4; then %d in 300 s", first, later)
	}
	d.want(t, "10.0.0.66", "Bearer good", 503, "too many requests with unknown tokens")
	d.clock = d.clock.Add(maxClientGap)
	d.want(t, "10.0.0.66", "Bearer good", 200, "")
	d.clock = d.clock.Add(3 * maxClientGap)
	if first := tries(8); first != 4 {
		t.Errorf("%d questions in 8 s after a rest, want 4", first)
	}
	// An API server that does not answer says nothing about a client.
	d.err = errors.New("connection refused")
	d.clock = d.clock.Add(3 * maxClientGap)
	tries(100)
	d.err = nil
	d.want(t, "10.0.0.66", "Bearer bad", 401, "")
}

func TestAHangingAPIServerHoldsFewRequests(t *testing.T) {
	d := newDoor()
	hang, started := make(chan struct{}), make(chan struct{})
	d.use(func(ctx context.Context, _ string) (string, bool, error) {
		if _, bounded := ctx.Deadline(); !bounded {
			t.Error("a question without a time-out")
		}
		started <- struct{}{}
		<-hang
		return "", false, errors.New("hung")
	}, nil)
	ended := make(chan struct{})
	for i := range maxReviews {
		go func() { d.get(fmt.Sprintf("10.0.0.%d", i), "Bearer x"); ended <- struct{}{} }()
		<-started
	}
	d.want(t, "10.0.0.9", "Bearer y", 503, "too many")
	if !d.clients[listen.Client(netip.MustParseAddr("10.0.0.9"))].next.IsZero() {
		t.Error("a question that was not asked counts")
	}
	close(hang)
	for range maxReviews {
		<-ended
	}
}
