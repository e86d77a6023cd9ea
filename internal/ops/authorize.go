package ops

import (
	"cmp"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"time"

	"github.com/landfall-lb/landfall/internal/listen"
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
	// maxReviews is how many questions are under way at a time, and maxReviewRate how many begin in a second: each for
	// tokens and connections that are trusted, for other clients of which no token was refused of late, and for the rest.
	// Of a program that runs on many nodes all begin clusterReviewRate, or one a second each, of the latter two: one user
	// asks for all, whom the API server slows down as a whole.
	maxReviews    = 4
	maxReviewRate = 16

	clusterReviewRate = 256
	// minClientGap is the least time between questions about unknown tokens of one client. It doubles with each token
	// that is refused up to maxClientGap, and is minClientGap again once the client has brought none for as long.
	minClientGap = time.Second
	maxClientGap = 32 * time.Second
	// maxClients is how many clients are remembered.
	maxClients = 4096
	// suspectFor is how long a client that sends nothing counts as one of which a token was refused: even with one
	// question a second, that many clients do not take all questions of others by turns.
	suspectFor = maxClients * time.Second
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
	now  func() time.Time
	next http.Handler

	mu       sync.Mutex
	review   Review // nil until the program has connected
	verdicts map[[sha256.Size]byte]verdict
	clients  map[netip.Prefix]prover // those that asked of late about an unknown token
	// nodes returns on how many nodes the program runs, 0 if that is not known; nil if on few.
	nodes func() int
	// Clients of which a token was refused of late ask in a lane of their own: however many they are, they take none of
	// the questions of others. No client takes those about what is trusted.
	trusted, unsuspected, suspected lane
}

// prover is what is remembered of one that asked about unknown tokens.
type prover struct {
	refused int       // how many of its tokens were refused in a row
	suspect bool      // one was refused of late
	next    time.Time // when it may ask again
	latest  time.Time // when it brought an unknown token, asked about or not
}

// connection is a connection of a client, on which HTTP/1.1 brings one request after the other.
type connection struct {
	// accepted is set while the last token on it was. It then has a place before other connections, and the next new token
	// needs no turn: a client that tries tokens from the same address cannot keep out the one that has replaced a token.
	accepted bool
	keep     func(bool)
}

// connectionKey is that of a connection in the context of its requests.
type connectionKey struct{}

// withConnection adds a connection to the context of its requests.
func withConnection(ctx context.Context, c net.Conn) context.Context {
	if secure, ok := c.(*tls.Conn); ok {
		c = secure.NetConn()
	}
	from := &connection{keep: func(bool) {}}
	if limited, ok := c.(*listen.Conn); ok {
		from.keep = limited.Keep
	}
	return context.WithValue(ctx, connectionKey{}, from)
}

// connectionOf returns the connection of a request.
func connectionOf(r *http.Request) *connection {
	if c, ok := r.Context().Value(connectionKey{}).(*connection); ok {
		return c
	}
	return &connection{keep: func(bool) {}}
}

// brought takes note of whether the token of a request was accepted.
func (c *connection) brought(accepted bool) {
	c.accepted = accepted
	c.keep(accepted)
}

// lane bounds questions.
type lane struct {
	underWay int
	second   time.Time // when the present second began
	begun    int       // in it
}

// enter reports whether one more question may be asked now, at most so many in a second; gatekeeper.asked must follow.
func (l *lane) enter(now time.Time, rate int) bool {
	if now.Sub(l.second) >= time.Second {
		l.second, l.begun = now, 0
	}
	if l.underWay >= maxReviews || l.begun >= rate {
		return false
	}
	l.underWay++
	l.begun++
	return true
}

// verdict is an answer of the API server.
type verdict struct {
	user    string
	allowed bool
	at      time.Time
}

func newGatekeeper(what Guarded, next http.Handler) *gatekeeper {
	return &gatekeeper{
		Guarded: what, now: time.Now, next: next,
		verdicts: map[[sha256.Size]byte]verdict{}, clients: map[netip.Prefix]prover{},
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
	from := connectionOf(r)
	v, err := g.judge(r, token, from.accepted)
	if err == nil {
		from.brought(v.allowed)
	}
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

// judge returns what is known about a token, or asks: at any time if the last one on the connection was accepted.
func (g *gatekeeper) judge(r *http.Request, token string, accepted bool) (verdict, error) {
	key := sha256.Sum256([]byte(token))
	g.mu.Lock()
	known, ok := g.verdicts[key]
	review, now := g.review, g.now()
	trusted, age := ok && known.allowed, now.Sub(known.at)
	var lane *lane
	var refusal error
	switch {
	case trusted && age < trustFor, ok && !trusted && age < distrustFor:
		g.mu.Unlock()
		return known, nil
	case review == nil:
		refusal = errors.New("the program has not connected to the API server yet")
	default:
		if lane = g.mayAsk(clientOf(r), trusted || accepted, now); lane == nil {
			refusal = errBusy
		}
	}
	g.mu.Unlock()
	v, err := verdict{}, refusal
	if lane != nil {
		// A client that goes away before the answer does not keep it from counting.
		v, err = g.ask(context.WithoutCancel(r.Context()), review, token)
		g.asked(lane, clientOf(r), key, v, err)
	}
	if err != nil && trusted && age < trustAtMost {
		return known, nil // monitoring goes on without the API server
	}
	return v, err
}

// mayAsk returns the lane in which a client may ask about a token now, nil if it may not ask. About a trusted token, or
// on a connection with an accepted one, it may ask at any time.
func (g *gatekeeper) mayAsk(from netip.Prefix, trusted bool, now time.Time) *lane {
	if trusted {
		if !g.trusted.enter(now, maxReviewRate) {
			return nil
		}
		return &g.trusted
	}
	c, known := g.clients[from]
	if rest := now.Sub(c.latest); !now.Before(c.next) && rest >= maxClientGap {
		c = prover{suspect: c.suspect && rest < suspectFor}
	}
	l := &g.unsuspected
	if c.suspect {
		l = &g.suspected
	}
	if now.Before(c.next) || !l.enter(now, g.rate()) {
		l = nil
	}
	if known || l != nil {
		if c.latest = now; l != nil {
			c.next = now.Add(minClientGap)
		}
		g.note(from, c)
	}
	return l
}

// rate is how many questions of a lane begin in a second.
func (g *gatekeeper) rate() int {
	if g.nodes == nil {
		return maxReviewRate
	}
	if n := g.nodes(); n > 0 {
		return max(1, min(maxReviewRate, clusterReviewRate/n))
	}
	return 1
}

// note remembers a client, in the place of one with few refused tokens if there are too many.
func (g *gatekeeper) note(from netip.Prefix, c prover) {
	if _, ok := g.clients[from]; !ok && len(g.clients) >= maxClients {
		var out netip.Prefix
		for other, o := range g.clients {
			least := g.clients[out]
			if !out.IsValid() || cmp.Or(cmp.Compare(o.refused, least.refused), o.next.Compare(least.next)) < 0 {
				out = other
			}
		}
		delete(g.clients, out)
	}
	g.clients[from] = c
}

func (g *gatekeeper) ask(ctx context.Context, review Review, token string) (verdict, error) {
	ctx, cancel := context.WithTimeout(ctx, reviewTimeout)
	defer cancel()
	user, allowed, err := review(ctx, token)
	return verdict{user, allowed && user != "", g.now()}, err
}

// asked takes note of how a question has ended.
func (g *gatekeeper) asked(l *lane, from netip.Prefix, key [sha256.Size]byte, v verdict, err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	l.underWay--
	if err != nil {
		return
	}
	g.remember(key, v)
	if v.allowed {
		delete(g.clients, from)
		return
	}
	c := g.clients[from]
	c.next = v.at.Add(min(minClientGap<<min(c.refused, 16), maxClientGap))
	c.refused++
	c.suspect = true
	g.note(from, c)
}

// remember keeps an answer, in the place of the oldest one if there are too many.
func (g *gatekeeper) remember(key [sha256.Size]byte, v verdict) {
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

// use has the gatekeeper ask with review from now on, for a program on so many nodes.
func (g *gatekeeper) use(review Review, nodes func() int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.review, g.nodes = review, nodes
}
