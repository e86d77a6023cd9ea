package kube

import (
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// pieces is a connection on which so many bytes are there at any time, or with 0 as many as are asked
// for.
type pieces struct {
	net.Conn
	bytes int
}

func (p *pieces) Read(b []byte) (int, error) {
	if p.bytes == 0 {
		return len(b), nil
	}
	return min(p.bytes, len(b)), nil
}

func (p *pieces) Close() error { return nil }

// settled returns a connection that is no longer fresh.
func settled(f *folding, p *pieces) net.Conn {
	conn := f.conn(p)
	time.Sleep(freshFor)
	return conn
}

// reads returns after which time each of n reads returned.
func reads(t *testing.T, conn net.Conn, n, size int) (at []time.Duration) {
	t.Helper()
	began := time.Now()
	for range n {
		if _, err := conn.Read(make([]byte, size)); err != nil {
			t.Fatal(err)
		}
		at = append(at, time.Since(began))
	}
	return at
}

// Pieces that keep coming are read at once for a while, then together; after a calm at once again.
func TestEventsThatKeepComingAreReadTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		conn := settled(newFolding(Fold{Every: 20 * time.Millisecond, Burst: 10}), &pieces{bytes: 100})
		for i, at := range reads(t, conn, 20, 4096) {
			if want := time.Duration(max(0, i-9)) * 20 * time.Millisecond; at != want {
				t.Errorf("read %d came after %s, want %s", i, at, want)
			}
		}
		time.Sleep(time.Second)
		if at := reads(t, conn, 9, 4096); at[8] != 0 {
			t.Errorf("after a calm nine reads took %s", at[8])
		}
	})
}

// Lists come over a new connection.
func TestANewConnectionIsReadAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		conn := newFolding(Fold{Every: time.Hour, Burst: 1}).conn(&pieces{bytes: 100})
		if at := reads(t, conn, 1000, 4096); at[999] != 0 {
			t.Errorf("its reads took %s", at[999])
		}
	})
}

// What is left by one read is read at once, and so is what comes in bulk.
func TestBulkIsReadAsItComes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fold := newFolding(Fold{Every: 20 * time.Millisecond, Burst: 1})
		if at := reads(t, settled(fold, &pieces{}), 1000, 512); at[999] != 0 {
			t.Errorf("reads of a full buffer took %s", at[999])
		}
		at := reads(t, settled(fold, &pieces{bytes: 64 << 10}), 1000, 1<<20)
		if at[999] > bulkWindow {
			t.Errorf("a list took %s", at[999])
		}
	})
}

func TestAClosedConnectionIsReadAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		conn := settled(newFolding(Fold{Every: time.Hour, Burst: 1}), &pieces{bytes: 1})
		reads(t, conn, 1, 10)
		time.AfterFunc(time.Second, func() { _ = conn.Close() })
		if at := reads(t, conn, 1, 10); at[0] != time.Second {
			t.Errorf("returned after %s, want a second", at[0])
		}
	})
}

// answer is a transport that takes a second.
type answer struct{}

func (answer) RoundTrip(*http.Request) (*http.Response, error) {
	time.Sleep(time.Second)
	return nil, nil
}

// A request that is sent ends the wait, and nothing waits before its answer; that of a watch does not
// count.
func TestAnswersDoNotWait(t *testing.T) {
	for _, c := range []struct {
		query string
		want  []time.Duration
	}{
		{"", []time.Duration{time.Second, time.Second}},
		{"?watch=true", []time.Duration{time.Minute, 2 * time.Minute}},
	} {
		synctest.Test(t, func(t *testing.T) {
			f := newFolding(Fold{Every: time.Minute, Burst: 1})
			conn := settled(f, &pieces{bytes: 1})
			reads(t, conn, 1, 10)
			time.AfterFunc(time.Second, func() {
				request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://192.0.2.1/api"+c.query, nil)
				if err != nil {
					t.Error(err)
					return
				}
				_, _ = f.transport(answer{}).RoundTrip(request) //nolint:bodyclose // it has none
			})
			if at := reads(t, conn, 2, 10); !slices.Equal(at, c.want) {
				t.Errorf("%q: the reads returned after %s, want %s", c.query, at, c.want)
			}
			time.Sleep(2 * time.Second) // the request has its answer
		})
	}
}

// Answers to requests do not come over the connection of watches, where each would be read apart and
// the events before it too.
func TestRequestsDoNotShareTheConnectionOfWatches(t *testing.T) {
	for _, c := range []struct {
		fold   Fold
		shared bool
	}{{Fold{Every: time.Hour, Burst: 1}, false}, {Fold{}, true}} {
		connections := make(chan string, 100)
		api := &fakeAPI{events: make(chan metav1.WatchEvent)}
		server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if !r.URL.Query().Has("watch") {
				connections <- r.RemoteAddr
			}
			api.ServeHTTP(w, r)
		}))
		server.EnableHTTP2 = true
		server.StartTLS()
		client := connect(t, server.URL, c.fold)
		if _, err := client.rest.core.Get().Resource("services").Do(t.Context()).Raw(); err != nil {
			t.Fatal(err)
		}
		if _, err := client.core.Services("").List(t.Context(), metav1.ListOptions{}); err != nil {
			t.Fatal(err)
		}
		first, second := <-connections, <-connections
		if shared := first == second; shared != c.shared {
			t.Errorf("with %+v they share a connection: %v", c.fold, shared)
		}
		server.CloseClientConnections()
		server.Close()
	}
}
