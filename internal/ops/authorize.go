package ops

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"time"
)

// Limits of questions to the API server about who may read metrics, or what else is guarded.
const (
	// trustFor is how long an answer of the API server counts.
	trustFor = time.Minute
	// trustAtMost is how long a permission counts while the API server does not answer.
	trustAtMost = 10 * time.Minute
	// distrustFor is how long a refusal counts.
	distrustFor = 10 * time.Second
	// maxVerdicts is how many answers are remembered.
	maxVerdicts = 256
	// maxToken is the longest token that is looked at.
	maxToken = 8 << 10
	// reviewTimeout bounds one question.
	reviewTimeout = 5 * time.Second
	// maxReviews is how many questions are under way at a time.
	maxReviews = 4
	// reviewGap is the least time between questions about unknown tokens of one client, and maxClients
	// how many clients may ask within it.
	reviewGap  = time.Second
	maxClients = 16
)

// Review asks the API server about a token: whom it belongs to, "" if it is not valid, and whether
// that user may get what it guards.
type Review func(ctx context.Context, token string) (user string, allowed bool, err error)

// errBusy means that a question was not asked because too many were.
var errBusy = errors.New("too many requests with unknown tokens")

// Guarded is something on the metrics server that only those may get whom the API server lets.
type Guarded struct {
	// Name is what it is called, such as metrics.
	Name string
	// URL is its path, and the nonResourceURL that a user needs to get.
	URL string
	// Role is the end of the name of the chart's ClusterRole.
	Role string
	// Hint is added where a token is missing. It may be empty.
	Hint string
}

// guardedMetrics is what every program has.
var guardedMetrics = Guarded{Name: "metrics", URL: "/metrics", Role: "metrics-reader"}

// gatekeeper lets only those requests through whose token the API server accepts.
type gatekeeper struct {
	Guarded
	now     func() time.Time
	next    http.Handler
	reviews chan struct{}

	mu       sync.Mutex
	review   Review // nil until the program has connected
	verdicts map[[sha256.Size]byte]verdict
	asked    map[netip.Prefix]time.Time // when clients last asked about an unknown token
}

// verdict is an answer of the API server.
type verdict struct {
	user    string
	allowed bool
	at      time.Time
}

func newGatekeeper(what Guarded, next http.Handler) *gatekeeper {
	return &gatekeeper{
		Guarded: what, now: time.Now, next: next, reviews: make(chan struct{}, maxReviews),
		verdicts: map[[sha256.Size]byte]verdict{}, asked: map[netip.Prefix]time.Time{},
	}
}

// ServeHTTP answers 401 without a valid token, 403 without permission, and 503 while the API server
// does not say.
func (g *gatekeeper) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	scheme, token, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	token = strings.TrimSpace(token)
	if !strings.EqualFold(scheme, "Bearer") || token == "" || len(token) > maxToken {
		w.Header().Set("WWW-Authenticate", "Bearer")
		http.Error(w, strings.TrimSpace("access to "+g.Name+" needs the bearer token of a Kubernetes user, such as a "+
			"ServiceAccount. "+g.Hint), http.StatusUnauthorized)
		return
	}
	v, err := g.judge(r, token)
	switch {
	case err != nil:
		http.Error(w, fmt.Sprintf("cannot check the token: %v; try again later", err), http.StatusServiceUnavailable)
	case v.user == "":
		w.Header().Set("WWW-Authenticate", `Bearer error="invalid_token"`)
		http.Error(w, "the API server does not accept the token", http.StatusUnauthorized)
	case !v.allowed:
		http.Error(w, fmt.Sprintf("user %q may not get %s: bind a ClusterRole with the nonResourceURL %s, such as the "+
			"chart's %s", v.user, g.URL, g.URL, g.Role), http.StatusForbidden)
	default:
		g.next.ServeHTTP(w, r)
	}
}

// judge returns what is known about a token, or asks.
func (g *gatekeeper) judge(r *http.Request, token string) (verdict, error) {
	key := sha256.Sum256([]byte(token))
	g.mu.Lock()
	known, ok := g.verdicts[key]
	review, now := g.review, g.now()
	trusted, age := ok && known.allowed, now.Sub(known.at)
	var refusal error
	switch {
	case trusted && age < trustFor, ok && !trusted && age < distrustFor:
		g.mu.Unlock()
		return known, nil
	case review == nil:
		refusal = errors.New("the program has not connected to the API server yet")
	case !trusted && !g.mayAsk(r, now):
		refusal = errBusy
	}
	g.mu.Unlock()
	if refusal != nil {
		return verdict{}, refusal
	}
	v, err := g.ask(r.Context(), review, token)
	switch {
	case err == nil:
		g.remember(key, v)
	case trusted && age < trustAtMost:
		return known, nil // monitoring goes on without the API server
	}
	return v, err
}

// mayAsk reports whether the client may ask about an unknown token now. Each client has a share of
// its own: one that tries tokens does not keep others from asking.
func (g *gatekeeper) mayAsk(r *http.Request, now time.Time) bool {
	client := clientOf(r)
	for other, at := range g.asked {
		if now.Sub(at) >= reviewGap {
			delete(g.asked, other)
		}
	}
	if _, soon := g.asked[client]; soon || len(g.asked) >= maxClients {
		return false
	}
	g.asked[client] = now
	return true
}

func (g *gatekeeper) ask(ctx context.Context, review Review, token string) (verdict, error) {
	select {
	case g.reviews <- struct{}{}:
		defer func() { <-g.reviews }()
	default:
		return verdict{}, errBusy
	}
	ctx, cancel := context.WithTimeout(ctx, reviewTimeout)
	defer cancel()
	user, allowed, err := review(ctx, token)
	return verdict{user, allowed && user != "", g.now()}, err
}

// remember keeps an answer, in the place of the oldest one if there are too many.
func (g *gatekeeper) remember(key [sha256.Size]byte, v verdict) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if _, ok := g.verdicts[key]; !ok && len(g.verdicts) >= maxVerdicts {
		oldest := key
		for other, old := range g.verdicts {
			if oldest == key || older(old, g.verdicts[oldest]) {
				oldest = other
			}
		}
		delete(g.verdicts, oldest)
	}
	g.verdicts[key] = v
}

// older reports whether a is to be forgotten before b: refusals go before permissions.
func older(a, b verdict) bool {
	if a.allowed != b.allowed {
		return b.allowed
	}
	return a.at.Before(b.at)
}

// use has the gatekeeper ask with review from now on.
func (g *gatekeeper) use(review Review) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.review = review
}
